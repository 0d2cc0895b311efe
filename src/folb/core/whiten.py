"""A network's hidden matrices: which they are, and updates of them whose directions are all about equally long.

Along a few steep directions a step may be no longer than they allow, and everything waits for them. In the orthogonal
factor of an update all directions are about as long as the longest, so that the same length goes further. The server
takes it of the sum of a round: this costs devices nothing, and sees no more than that sum. These functions run on jax's
arrays and on NumPy's: a real device needs no jax.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

from folb.core.part import Part, Slot
from folb.core.vector import namespace, over, over_largest
from folb.errors import InputError, check
from folb.typing import Params

Array = Any
STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315  # of Muon (Jordan et al., 2024): singular values end up between 0.7 and 1.2


class Hidden(NamedTuple):
    """A matrix of a model that leads into a hidden layer; a convolution is one, from all its inputs to its channels.

    `path` is the array's name, after the names above it and dots. An array may have several matrices side by side
    (`parts`), as the gates of a recurrent layer are. `outputs` is its axis of outputs: the last, or 0 as in PyTorch.
    The output layer, vectors and embeddings are not hidden.
    """

    path: str
    parts: int = 1
    outputs: int = -1


def hidden_matrices(field: str, given: Any, params: Params) -> tuple[Hidden, ...]:
    """What a model says of its matrices, each as a `Hidden` or by its path alone; checked against its arrays."""
    check(field, given, isinstance(given, Sequence) and not isinstance(given, str), "should be a list of matrices")
    arrays, _ = named(params)
    made = []
    for one in given:
        try:
            matrix = Hidden(one) if isinstance(one, str) else Hidden(*one)
        except TypeError:
            raise InputError(field, one, "should be an array's path, or a folb.Hidden(path, parts, outputs)") from None
        if matrix.path not in arrays:
            raise InputError(field, matrix.path, f"should be one of {', '.join(arrays)}")
        shape = arrays[matrix.path].shape
        check(f"{field}: {matrix.path}", tuple(shape), len(shape) > 1, "should have at least two axes")
        check(f"{field}: outputs of {matrix.path}", matrix.outputs, matrix.outputs in (0, -1), "should be 0 or -1")
        fits = isinstance(matrix.parts, int) and matrix.parts > 0 and shape[matrix.outputs] % matrix.parts == 0
        check(f"{field}: parts of {matrix.path}", matrix.parts, fits, f"should divide {shape[matrix.outputs]}")
        made.append(matrix)
    return tuple(made)


class Whitening(Part):
    """What takes the place of the hidden matrices of a round's update. One of your own has a method `apply`."""

    needed = ("apply",)
    matrices: tuple[Hidden, ...] = field(default=(), metadata={"static": True})  # those of the model

    def of(self, hidden: tuple[Hidden, ...]) -> Any:
        """None for a model without hidden matrices."""
        return replace(self, matrices=hidden) if hidden else None

    def apply(self, matrices: Array) -> Array:
        """The directions for matrices [number, rows, columns] of length 1, with columns <= rows.

        Only the direction of a result counts: the length stays that of the update.
        """

    def whitened(self, delta: Params) -> Params:
        """The update with its hidden matrices replaced, each at its length; all else is as it was."""

        def replaced(row: Array) -> Array:
            xp = namespace(row)
            direction, length = unit(row)
            made = unit(self.apply(direction))[0] * over(length, row)
            return xp.where(xp.isfinite(xp.sum(made, axis=(1, 2), keepdims=True)), made, row)

        return changed(self.matrices, delta, replaced, lambda path, leaf: leaf)


class Orthogonal(Whitening):
    """The orthogonal factor U V' of an update U S V', about: five Newton-Schulz steps bring S near 1.

    Per network, in a federation, and at the length of the update, this is ours; orthogonal steps are Muon's (Jordan et
    al., 2024), and those of a server over homogeneous workers MuLoCo's and Dion's.
    """

    def apply(self, matrices: Array) -> Array:
        return orthogonal(matrices)


WHITEN = Slot("whiten", Whitening, (Orthogonal,), "what takes the place of a network's hidden matrices in the update")


def orthogonal(matrices: Array) -> Array:
    """Five steps X <- X (a + b X'X + c (X'X)^2), from X of length 1.

    They are taken on X'X, which is the smaller square: two products with X itself, where there would be fifteen.
    """
    xp = namespace(matrices)
    square = _product(matrices.mT, matrices)
    one = xp.eye(square.shape[-1], dtype=square.dtype)
    whole = one
    for _ in range(STEPS):
        step = A * one + B * square + C * _product(square, square)
        whole, square = _product(whole, step), _product(square, _product(step, step))
    return _product(matrices, whole)


def _product(a: Array, b: Array) -> Array:
    """In 32 bits, on accelerators, too."""
    xp = namespace(a)
    return a @ b if xp.__name__ == "numpy" else xp.matmul(a, b, precision="highest")


def unit(matrices: Array) -> tuple[Array, Array]:
    """Each matrix divided by its length, and the lengths. A matrix of zeros stays one."""
    xp = namespace(matrices)
    largest = xp.max(xp.abs(matrices), axis=(1, 2))
    small = over_largest(matrices, over(largest, matrices))
    length = xp.sqrt(xp.sum(small * small, axis=(1, 2)))
    return small / over(xp.where(length > 0, length, xp.float32(1)), small), largest * length


def changed(
    hidden: Sequence[Hidden],
    tree: Params,
    matrices: Callable[[Array], Array],
    others: Callable[[str, Array], Array],
    scale: Callable[[Hidden, Array], Any] = lambda one, leaf: 1.0,
) -> Params:
    """The tree with matrices(stack) times a scale for its hidden ones, and others(path, leaf) for the rest.

    Matrices of one shape, or of its transpose, are one stack.
    """
    values, rebuilt = named(tree)
    stacks: dict[tuple[int, ...], list[Hidden]] = defaultdict(list)
    for one in hidden:
        stacks[_matrices(one, values[one.path]).shape[1:]].append(one)
    paths = {one.path for one in hidden}
    made = {path: others(path, leaf) for path, leaf in values.items() if path not in paths}
    for those in stacks.values():
        rows = [_matrices(one, values[one.path]) for one in those]
        done, first = matrices(namespace(rows[0]).concatenate(rows)), 0
        for one in those:
            own = _array(one, done[first : first + one.parts], values[one.path])
            made[one.path] = scale(one, own) * own
            first += one.parts
    return rebuilt([made[path] for path in values])


def named(tree: Params) -> tuple[Mapping[str, Array], Callable[[list[Array]], Params]]:
    """The arrays of a tree by their paths, and what makes such a tree of as many arrays."""
    jax = sys.modules.get("jax")
    if jax is None:  # a device's arrays, by name
        return tree, lambda arrays: dict(zip(tree, arrays, strict=True))
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    by_path = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return by_path, lambda arrays: jax.tree.unflatten(structure, arrays)


def _matrices(one: Hidden, leaf: Array) -> Array:
    """[parts, rows, columns], with no more columns than rows."""
    xp = namespace(leaf)
    rows = xp.moveaxis(leaf, one.outputs, -1).reshape(-1, one.parts, leaf.shape[one.outputs] // one.parts)
    matrices = xp.moveaxis(rows, 1, 0)
    return matrices if matrices.shape[1] >= matrices.shape[2] else matrices.mT


def _array(one: Hidden, matrices: Array, like: Array) -> Array:
    """The inverse of `_matrices`."""
    xp = namespace(matrices)
    shape = xp.moveaxis(like, one.outputs, -1).shape
    matrices = matrices if matrices.shape[2] * one.parts == shape[-1] else matrices.mT
    return xp.moveaxis(xp.moveaxis(matrices, 0, 1).reshape(shape), -1, one.outputs)


def stretch(one: Hidden, leaf: Array) -> float:
    """sqrt(outputs / inputs) of its matrices: how long a step of an orthogonal factor is, for the same effect."""
    outputs = leaf.shape[one.outputs]
    return math.sqrt(outputs / one.parts / (leaf.size / outputs))
