"""A part is a value: a frozen dataclass whose fields are its settings, and a pytree.

A field that is a number is a leaf: it can be swept and stacked. A field that is static (a word, a shape, a size) is a
piece of the program. What other parts must know of a part is a property of its class.

A device has parts, too, and may have no jax: classes become pytrees once `folb.core.tree` has loaded it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_type_hints,
)

from folb.errors import InputError, check, check_number, choose


class Range(NamedTuple):
    """The values that a number may have, and the words for an error."""

    holds: Callable[[Any], Any]
    words: str
    number: bool = True


def at_least(low: float) -> Range:
    """From `low` on."""
    return Range(lambda value: value >= low, f"should be at least {low:g}")


def more_than(low: float) -> Range:
    """Above `low`."""
    return Range(lambda value: value > low, f"should be more than {low:g}")


def between(low: float, high: float) -> Range:
    """From `low` to `high`."""
    return Range(lambda value: (value >= low) & (value <= high), f"should be from {low:g} to {high:g}")


def below(high: float, low: float = 0.0) -> Range:
    """From `low` to less than `high`."""
    return Range(lambda value: (value >= low) & (value < high), f"should be at least {low:g} and less than {high:g}")


def up_to(high: float, low: float = 0.0) -> Range:
    """More than `low`, and at most `high`."""
    return Range(lambda value: (value > low) & (value <= high), f"should be more than {low:g} and at most {high:g}")


FLAG = Range(lambda value: isinstance(value, bool), "should be True or False", number=False)


def whole(low: int, high: int) -> Range:
    """A whole number from `low` to `high`."""
    return Range(
        lambda value: isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high,
        f"should be a whole number from {low} to {high}",
        number=False,
    )


def one_of(*words: str) -> Range:
    """One of these words."""
    return Range(lambda value: value in words, f"should be one of {', '.join(words)}", number=False)


ANY = Range(lambda value: value == value, "should be a number")


def setting(
    meaning: str, within: Range | tuple[float, float] | None = None, *, default: Any, static: bool = False
) -> Any:
    """A field that users may set: a line of help, the values that it may have, and its default.

    What is no number (a word, a flag, a shape) is static: a piece of the program, and no leaf.
    """
    within = within if within is None or isinstance(within, Range) else between(*within)
    static = static or (within is not None and not within.number)
    return field(default=default, metadata={"meaning": meaning, "within": within, "static": static})


CLASSES: list[type[Part]] = []
_register: list[Callable[[type], Any]] = []  # jax's, once it is loaded


def register_with(register: Callable[[type], Any]) -> None:
    """Make all parts pytrees, and those to come."""
    _register.append(register)
    for kind in CLASSES:
        register(kind)


@dataclass_transform(frozen_default=True, field_specifiers=(setting, field))
class Part:
    """A part of an algorithm. A class of it is a frozen dataclass and a pytree, without a decorator."""

    called: ClassVar[str]  # its name, if that is not the class's
    needed: ClassVar[tuple[str, ...]] = ()  # the methods that each has of its own
    abstract: ClassVar[bool] = False  # whether it is only a base of others, though it has these methods

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__bases__:
            if issubclass(base, Part) and base.needed and not vars(base).get("abstract") and not _missing(base):
                # it would inherit promises, such as a gain, that were made for another method
                raise TypeError(f"{cls.__name__}: should have the base of {base.__name__}, and not {base.__name__}")
        # jax (jaxlib 0.10.2) takes two dataclasses with the same fields for one, and could run the other's program: so
        # the class is a static field, too
        cls.__annotations__ = {**vars(cls).get("__annotations__", {}), "kind_": type}
        cls.kind_ = field(default=cls, repr=False, compare=False, kw_only=True, metadata={"static": True})  # type: ignore[attr-defined]
        dataclass(frozen=True)(cls)
        _check_fields(cls)
        CLASSES.append(cls)
        for register in _register:
            register(cls)

    @property
    def name(self) -> str:
        """How users call it."""
        return name_of(type(self))

    @property
    def settings(self) -> dict[str, Any]:
        """The values of its settings."""
        return {name: getattr(self, name) for name in settings_of(type(self))}

    def has(self, method: str) -> bool:
        """Whether it has this method of its own."""
        return method not in _missing(type(self), (method,))

    def check(self, spelt: Callable[[str], str] = str) -> None:
        """Raise an `InputError` for a value that a setting may not have; `spelt` gives a field's name as a setting."""
        for one in fields(self):  # type: ignore[arg-type]
            within, value = one.metadata.get("within"), getattr(self, one.name)
            if within is None and "meaning" in one.metadata and not one.metadata["static"]:
                within = ANY
            if within is not None and not (value is None and one.default is None):
                (check_number if within.number else check)(spelt(one.name), value, *within[:2])


def _missing(kind: type[Part], methods: tuple[str, ...] = ()) -> list[str]:
    """The needed methods, or these, that a class has only from the base of its slot."""
    base = next(one for one in kind.__mro__ if Part in one.__bases__)
    return [name for name in methods or kind.needed if getattr(kind, name) is getattr(base, name)]


OWN_NAMES = ("name", "settings", "check", "has", "called", "needed", "abstract")


def _check_fields(kind: type[Part]) -> None:
    """Raise for a field that would shadow what every part has, or that is no number and yet not static."""
    for one in fields(kind):  # type: ignore[arg-type]
        where = f"{kind.__name__}.{one.name}"
        if one.name in OWN_NAMES:
            raise TypeError(f"{where}: should have another name, for every part has `{one.name}`")
        if isinstance(one.default, str | bool | tuple) and not one.metadata.get("static"):
            raise TypeError(f"{where} = {one.default!r}: should be a number, or folb.setting(..., static=True)")


def name_of(kind: type) -> str:
    """How users call a class of parts: as it says, or by its name in small letters."""
    own = vars(kind).get("called")
    return str(own) if own is not None else kind.__name__.lower()


def _spelt(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


P = TypeVar("P", bound="Part")


@dataclass(frozen=True)
class Slot(Generic[P]):
    """The parts among which a setting chooses: by their names, or a user's own of the same base."""

    name: str
    base: type[P]
    known: tuple[type[P], ...]
    meaning: str
    prefix: str  # of the settings of its parts
    others: Mapping[str, str] = field(default_factory=dict)  # settings without the prefix, by field

    @property
    def parts(self) -> dict[str, type[P]]:
        """The parts by name."""
        return {name_of(kind): kind for kind in self.known}

    def spelt(self, name: str) -> str:
        """The name of a field as a setting."""
        return self.others.get(name, self.prefix + name)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The settings of its parts as types with a line of help: whose they are, and their defaults."""
        found: dict[str, list[tuple[str, Any]]] = {}
        for part, kind in self.parts.items():
            for name, one in settings_of(kind).items():
                found.setdefault(self.spelt(name), []).append((part, one))
        return {name: self._described(of) for name, of in found.items()}

    def _described(self, of: list[tuple[str, Any]]) -> Any:
        hint = get_type_hints(self.parts[of[0][0]])[of[0][1].name]
        said: dict[str, dict[Any, list[str]]] = {}  # by meaning and default, the parts
        for part, one in of:
            said.setdefault(one.metadata["meaning"], {}).setdefault(one.default, []).append(part)
        texts = []
        for meaning, usual in said.items():
            parts = [part for those in usual.values() for part in those]
            whose = "" if len(parts) == len(self.known) else f"with {self.name}={', '.join(parts)}: "
            defaults = [
                _spelt(value) + (f" for {', '.join(those)}" if len(usual) > 1 else "") for value, those in usual.items()
            ]
            texts.append(whose + meaning + ("" if None in usual else f"; by default {', '.join(defaults)}"))
        return Annotated[hint | None, ". ".join(texts)]

    @property
    def choice(self) -> Any:
        """The setting that chooses, as a type with a line of help."""
        return Annotated[Literal[tuple(self.parts)] | None, self.meaning]

    def chosen(self, wanted: Any, given: Mapping[str, Any]) -> P | None:
        """The part, as `part` has it, or None if none is wanted; then nothing may be given for it."""
        if wanted is not None:
            return self.part(wanted, given)
        for name, value in given.items():
            if value is not None and name in self.numbers:
                raise InputError(name, value, f"is for {self.name}={self._owners(name)}; {self.name} is not set")
        return None

    def _owners(self, name: str) -> str:
        return ", ".join(other for other, one in self.parts.items() if name in map(self.spelt, settings_of(one)))

    def part(self, wanted: Any, given: Mapping[str, Any]) -> P:
        """A part by its name, with its settings in `given` that are not None; or a user's own, which has its own."""
        chosen: dict[str, str] = {}
        if isinstance(wanted, str):
            kind = self.parts[choose(self.name, wanted, self.parts)]
            chosen = {self.spelt(name): name for name in settings_of(kind)}
        elif not isinstance(wanted, self.base):
            expected = f"should be one of {', '.join(self.parts)}, or a folb.{self.base.__name__}"
            raise InputError(self.name, wanted, expected)
        given = {name: value for name, value in given.items() if value is not None and name in self.numbers}
        for name, value in given.items():
            if name not in chosen:
                which = wanted if isinstance(wanted, str) else "your own"
                raise InputError(name, value, f"is for {self.name}={self._owners(name)}; {self.name} is {which}")
        made = kind(**{chosen[name]: value for name, value in given.items()}) if isinstance(wanted, str) else wanted
        check_part(self.name, made, self.base)
        made.check(self.spelt)
        return made


def settings_of(kind: type[Part]) -> dict[str, Any]:
    """The fields of a class that users may set."""
    return {one.name: one for one in fields(kind) if "meaning" in one.metadata}  # type: ignore[arg-type]


def check_part(field: str, made: Any, base: type[Part]) -> None:
    """Raise an `InputError` unless it is a part of this base, with the methods that each has of its own."""
    if not isinstance(made, base):
        raise InputError(field, made, f"should be a folb.{base.__name__}")
    for method in _missing(type(made)):
        raise InputError(field, made.name, f"should have a method {method}")
