"""Settings and their values from text or TOML: the paths of an algorithm, the keywords of others; users' own files."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from folb.core.algorithm import Algorithm
from folb.core.algorithms import ALGORITHMS, Named, called
from folb.errors import InputError, check, choose

OWN = "folb_own_"  # begins the module names of a user's own files
FAILURES = (Exception, SystemExit)  # of a user's own code, which may try to end the process


class Setting(NamedTuple):
    """One setting: its type, its default and what it means."""

    name: str
    type: Any
    default: Any
    meaning: str


def settings(constructor: Callable[..., Any]) -> dict[str, Setting]:
    """The settings of a constructor, in the order of its signature; of an algorithm, those that not all have like it.

    Keywords without a default (a model's shape and classes) are not settings.
    """
    if isinstance(constructor, Named):
        usual = common_settings()
        return {name: one for name, one in algorithm_settings(constructor).items() if usual.get(name) != one}
    hints = get_type_hints(constructor, include_extras=True)
    return {
        name: setting(name, hints.get(name, Any), parameter.default)
        for name, parameter in inspect.signature(constructor).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.default is not parameter.empty
    }


def algorithm_settings(algorithm: Named) -> dict[str, Setting]:
    """All settings of an algorithm, by their paths."""
    return {path: setting(path, hint, usual) for path, (hint, usual) in algorithm.settings.items()}


@functools.cache
def common_settings() -> dict[str, Setting]:
    """The settings that every algorithm has: FedAvg's, without those of its rule."""
    known = algorithm_settings(ALGORITHMS["fedavg"])
    return {path: one for path, one in known.items() if not path.startswith("rule")}


def setting(name: str, hint: Any, default: Any) -> Setting:
    """A setting from an annotation such as Annotated[float, "what it means"]."""
    if get_origin(hint) is Annotated:
        return Setting(name, get_args(hint)[0], default, get_args(hint)[1])
    if hint is Any and isinstance(default, bool | int | float | str):
        hint = type(default)
    return Setting(name, hint, default, "")


def first_line(constructor: Callable[..., Any]) -> str:
    return (constructor.__doc__ or "").strip().partition("\n")[0]


def read(field: str, kind: Any, value: Any) -> Any:
    """`value`, a string or a TOML value, as the type `kind`."""
    if get_origin(kind) is Literal:
        return choose(field, str(value), get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return _read_one_of(field, get_args(kind), value)
    if kind is bool:
        known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        check(field, value, str(value).lower() in known, "should be true or false")
        return known[str(value).lower()]
    if kind in (int, float):
        return _number(field, kind, value)
    if kind is str:
        parts = value if isinstance(value, list) else [value]  # the command line splits at commas
        check(field, value, all(isinstance(part, str) for part in parts), "should be a text")
        return ",".join(parts)
    return value


def _read_one_of(field: str, kinds: tuple[Any, ...], value: Any) -> Any:
    """A value of a union such as `int | Literal["all"]` or `float | None`. Its words come before its other type."""
    words: dict[str, Any] = {"none": None} if type(None) in kinds else {}
    words |= {word: word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)}
    if (word := str(value)) in words or (word := word.lower()) in words:
        return words[word]
    others = [kind for kind in kinds if kind is not type(None) and get_origin(kind) is not Literal]
    lists = [kind for kind in others if get_origin(kind) is Sequence]
    if lists and isinstance(value, list | tuple):
        return [read(field, get_args(lists[0])[0], item) for item in value]
    if others in ([int], [float]):
        return _number(field, others[0], value, also="".join(f", or {word}" for word in words))
    return read(field, others[0], value) if len(others) == 1 else value


def _number(field: str, kind: type, value: Any, also: str = "") -> Any:
    try:
        number = float(value)
        whole = int(value) if kind is int else None
    except (TypeError, ValueError, OverflowError):
        number, whole = math.nan, None
    fraction = not isinstance(value, str) and whole != value  # int() rejects a fraction in a text
    if isinstance(value, bool) or not math.isfinite(number) or (kind is int and fraction):
        raise InputError(field, value, f"should be a {'whole' if kind is int else 'finite'} number{also}")
    return whole if kind is int else number


def from_file(field: str, spec: str) -> Any:
    """What NAME is in `path/to/file.py:NAME`: a user's own algorithm, part, model, system model or metric."""
    path, _, name = spec.rpartition(":")
    check(field, spec, Path(path).is_file(), f"there is no file {path}")
    file = Path(path).resolve()
    module = None if OPEN is None else OPEN.get(file)
    if module is None:
        loaded = importlib.util.spec_from_file_location(OWN + Path(path).stem, path)
        assert loaded is not None and loaded.loader is not None
        module = importlib.util.module_from_spec(loaded)
        sys.modules[loaded.name] = module  # dataclasses and annotations look their module up there
        try:
            with _neighbours(file.parent):
                loaded.loader.exec_module(module)
        except FAILURES as error:
            raise InputError(field, spec, f"{path} fails to load: {type(error).__name__}: {error}") from error
        if OPEN is not None:
            OPEN[file] = module
    value = getattr(module, name, None)
    check(field, spec, value is not None, f"{path} has no {name!r}")
    return value


OPEN: dict[Path, types.ModuleType] | None = None  # the files that `read_once` has read


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Within it, a user's file is read once: a class of its own is one class, however often it is named."""
    global OPEN
    before, OPEN = OPEN, {} if OPEN is None else OPEN
    try:
        yield
    finally:
        OPEN = before


def metric_from_file(spec: str) -> Any:
    """A user's own metric: a function, or a `Metric`."""
    path, _, name = spec.rpartition(":")
    metric = from_file("metrics", spec)
    check("metrics", spec, callable(metric), f"{path} has no function {name!r}")
    return metric


NEIGHBOURS: dict[Path, dict[str, Any]] = {}  # the modules that a user's files imported from each directory


@contextlib.contextmanager
def _neighbours(home: Path) -> Iterator[None]:
    """A user's file may import the files of its directory, and not those of the same name that another one imported."""
    for name in [name for modules in NEIGHBOURS.values() for name in modules]:
        sys.modules.pop(name, None)  # the file that imported it has it still
    sys.modules.update(NEIGHBOURS.get(home, {}))
    before = set(sys.modules)
    sys.path.insert(0, str(home))
    try:
        yield
    finally:
        sys.path.remove(str(home))
        for name in set(sys.modules) - before:
            source = Path(getattr(sys.modules[name], "__file__", None) or "").resolve()
            installed = {"site-packages", "dist-packages"} & set(source.parts) or name.partition(".")[0] == "folb"
            if home in source.parents and not installed:  # an environment may be beside the file
                NEIGHBOURS.setdefault(home, {})[name] = sys.modules[name]


@contextlib.contextmanager
def naming_own_files(names: Sequence[str]) -> Iterator[None]:
    """Turn an error of a user's own files, some of `names`, into an `InputError` that names the file and the line."""
    try:
        yield
    except InputError:
        raise
    except FAILURES as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        own = [(f.f_code.co_filename, line) for f, line in frames if f.f_globals.get("__name__", "").startswith(OWN)]
        reason = f"fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if "Traceback" in reason:  # of a function that jax called back while rounds were played
            reason = f"fails: {str(error).strip().splitlines()[-1]}"
        if own:
            raise InputError(own[-1][0], f"line {own[-1][1]}", reason) from error
        files = [name for name in names if ".py:" in name]
        exhausted = isinstance(error, OSError | MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        if not files or exhausted:  # a full disk, for instance
            raise
        # one of their functions returned something that folb cannot use
        raise InputError("own file", ", ".join(files), reason) from error


@dataclass(frozen=True)
class Chosen:
    """A chosen dataset, model, system or algorithm: its constructor, the settings it has, and values for them."""

    name: str
    constructor: Callable[..., Any]
    settings: dict[str, Setting]
    own: bool = False  # from a user's own file
    given: dict[str, Any] = field(default_factory=dict)  # lists of values if it is swept
    box: dict[str, Any] = field(default_factory=dict)  # ranges and values that points are drawn from

    @property
    def swept(self) -> bool:
        """Whether a list of values means a run for each: of an algorithm's settings."""
        return isinstance(self.constructor, Named)

    def make(self, kind: Any, *arguments: Any, **values: Any) -> Any:
        """What the constructor makes. A user's own may fail in any way; the error then names it as the cause."""
        try:
            made = self.constructor(*arguments, **values)
        except FAILURES as error:
            if isinstance(error, InputError) or not self.own:
                raise
            raise InputError(self.name, values, f"fails: {type(error).__name__}: {error}") from error
        if not isinstance(made, kind):
            what = "function (home, draws, cost) -> Effort" if kind is Callable else f"folb.{kind.__name__}"
            raise InputError(self.name, made, f"should make a {what}")
        return made


def chosen_by_name(field: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Chosen:
    """The part of that name: one of the `registry`, or a function of a user's own file, path.py:function."""
    if ".py:" not in name:
        constructor = registry[choose(field, name, registry)]
        known = algorithm_settings(constructor) if isinstance(constructor, Named) else settings(constructor)
        return Chosen(name, constructor, known)
    constructor, short = from_file(field, name), name.rpartition(":")[2]
    if field == "algorithms":
        if not isinstance(constructor, Algorithm):
            raise InputError(field, name, f"should be an algorithm, as {short} = folb.Algorithm(server='adam')")
        named = Named(called(constructor, short), "An algorithm of your own.", {}, own=True)
        return Chosen(short, named, algorithm_settings(named), own=True)
    check(field, name, callable(constructor), f"should be a function, but {short} is none")
    try:
        known = settings(constructor)
    except Exception as error:
        expected = f"should be a function with keywords: {type(error).__name__}: {error}"
        raise InputError(field, name, expected) from error
    expected = f"should be a finite number, as the default of a keyword of {short}; or None, for none"
    for one in known.values():
        check(one.name, one.default, not isinstance(one.default, float) or math.isfinite(one.default), expected)
    return Chosen(short, constructor, known, own=True)
