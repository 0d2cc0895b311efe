"""A part is a value: a frozen dataclass whose fields are its settings, and a pytree.

A field that is a number is a leaf: it can be swept and stacked. A field that is static (a word, a shape, a size) is a
piece of the program. What other parts must know of a part is a property of its class.

A device has parts, too, and may have no jax: classes become pytrees once `folb.core.tree` has loaded it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, dataclass_transform, get_type_hints

from folb.errors import InputError, check, check_number, choose


class Range(NamedTuple):
    """The values that a number may have, and the words for an error."""

    holds: Callable[[Any], Any]
    words: str
    number: bool = True


def at_least(low: float) -> Range:
    return Range(lambda value: value >= low, f"should be at least {low:g}")


def more_than(low: float) -> Range:
    return Range(lambda value: value > low, f"should be more than {low:g}")


def between(low: float, high: float) -> Range:
    return Range(lambda value: (value >= low) & (value <= high), f"should be from {low:g} to {high:g}")


def below(high: float, low: float = 0.0) -> Range:
    return Range(lambda value: (value >= low) & (value < high), f"should be at least {low:g} and less than {high:g}")


def up_to(high: float, low: float = 0.0) -> Range:
    return Range(lambda value: (value > low) & (value <= high), f"should be more than {low:g} and at most {high:g}")


FLAG = Range(lambda value: isinstance(value, bool), "should be True or False", number=False)


def whole(low: int, high: int, *, number: bool = False) -> Range:
    """A whole number from `low` to `high`: a shape, say, which is static, or with `number` a leaf as others are."""
    return Range(
        lambda value: isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high,
        f"should be a whole number from {low} to {high}",
        number,
    )


def one_of(*words: str) -> Range:
    expected = f"should be one of {', '.join(words)}"
    return Range(lambda value: isinstance(value, str) and value in words, expected, number=False)


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


OWN_NAMES = ("name", "settings", "check", "has", "called", "needed", "abstract")  # no field may shadow them
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
        # jax (jaxlib 0.10.2) takes two dataclasses with like fields for one, and now and then runs the other's program:
        # so the class is a static field, too
        cls.__annotations__ = {**vars(cls).get("__annotations__", {}), "kind_": type}
        cls.kind_ = field(default=cls, repr=False, compare=False, kw_only=True, metadata={"static": True})  # type: ignore[attr-defined]
        dataclass(frozen=True)(cls)
        for one in fields(cls):  # type: ignore[arg-type]
            where = f"{cls.__name__}.{one.name}"
            if one.name in OWN_NAMES:
                raise TypeError(f"{where}: should have another name, for every part has `{one.name}`")
            if isinstance(one.default, str | bool | tuple) and not one.metadata.get("static"):
                raise TypeError(f"{where} = {one.default!r}: should be a number, or folb.setting(..., static=True)")
        CLASSES.append(cls)
        for register in _register:
            register(cls)

    @property
    def name(self) -> str:
        return name_of(type(self))

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in settings_of(type(self))}

    def has(self, method: str) -> bool:
        """Whether it has this method of its own."""
        return method not in _missing(type(self), (method,))

    def of(self, hidden: Any) -> Any:
        """The part on a model with these hidden matrices (`folb.Hidden`)."""
        return self

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


def name_of(kind: type) -> str:
    """How users call a class of parts: as it says, or by its name in small letters."""
    return str(vars(kind).get("called", kind.__name__.lower()))


P = TypeVar("P", bound="Part")
KEEP: Any = object()  # stands for a part that is not given


@dataclass(frozen=True)
class Slot(Generic[P]):
    """The parts among which a setting chooses, by name, or a user's own of the same base.

    The fields of a part are settings, too, by the path to them: `server.lr`. With a `record`, that has the part in its
    field `inside`, and its other fields are settings of the slot, whatever the part.
    """

    name: str
    base: type[P]
    known: tuple[type[P], ...]
    meaning: str
    optional: bool = True  # whether there may be none
    record: type[Part] | None = None
    inside: str = ""

    @cached_property
    def parts(self) -> dict[str, type[P]]:
        return {name_of(kind): kind for kind in self.known}

    def spelt(self, name: str) -> str:
        return f"{self.name}.{name}"

    def choice(self, names: Iterable[str] | None = None) -> Any:
        """The setting that chooses, of all or of some, as a type with a line of help."""
        kind: Any = Literal[tuple(self.parts if names is None else names)]
        return Annotated[kind | None if self.optional else kind, self.meaning]

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The settings of its record and of its parts as types with a line of help: whose they are, and by default."""
        known = {} if self.record is None else described(self.record)
        of: dict[str, list[tuple[str, Any]]] = {}
        for part, kind in self.parts.items():
            for name, one in settings_of(kind).items():
                of.setdefault(name, []).append((part, one))
        known |= {name: self._described(those) for name, those in of.items()}
        return {self.spelt(name): one for name, one in known.items()}

    def fields_of(self, names: Iterable[str] | None = None) -> set[str]:
        """The paths to the settings of its record and of its parts, all or some."""
        kinds: list[type[Part]] = [] if self.record is None else [self.record]
        kinds += self.known if names is None else (self.parts[name] for name in names)
        return {self.spelt(field) for kind in kinds for field in settings_of(kind)}

    def _described(self, of: list[tuple[str, Any]]) -> Any:
        hint = get_type_hints(self.parts[of[0][0]])[of[0][1].name]
        said: dict[str, dict[Any, list[str]]] = {}  # by meaning and default, the parts
        for part, one in of:
            said.setdefault(one.metadata["meaning"], {}).setdefault(one.default, []).append(part)
        texts = []
        for meaning, usual in said.items():
            parts = [part for those in usual.values() for part in those]
            whose = "" if len(parts) == len(self.known) else f"with {self.name}={', '.join(parts)}: "
            defaults = []
            for value, those in usual.items():
                spelt = f"{value:g}" if isinstance(value, float) else str(value).lower()
                defaults.append(spelt + (f" for {', '.join(those)}" if len(usual) > 1 else ""))
            texts.append(whose + meaning + ("" if None in usual else f"; by default {', '.join(defaults)}"))
        return Annotated[hint | None, ". ".join(texts)]

    def values(self, made: Any) -> dict[str, Any]:
        """The settings of what is in the slot: its name, and its fields by their paths."""
        part = self.part_of(made)
        known: dict[str, Any] = {} if part is None else part.settings
        if self.record is not None:
            known |= made.settings
        return {self.name: part and part.name, **{self.spelt(name): value for name, value in known.items()}}

    def part_of(self, made: Any) -> P | None:
        """The part itself, if what is in the slot is a record that has it."""
        return made if self.record is None else getattr(made, self.inside)

    def changed(self, made: Any, given: Mapping[str, Any]) -> Any:
        """What is in the slot, with another part ("" in `given`; None or "none": no part) or other values; checked."""
        values, wanted = {name: value for name, value in given.items() if name}, given.get("", KEEP)
        if isinstance(wanted, str) and wanted == "none" and self.optional and "none" not in self.parts:
            wanted = None
        if self.record is None:
            return self._changed(made, wanted, values)
        if isinstance(wanted, self.record):
            _check_unfinished(self.name, wanted, self.record)
            made, wanted = wanted, KEEP
        own = {name: values.pop(name) for name in settings_of(self.record) if name in values}
        part = self._changed(self.part_of(made), wanted, values)
        made = with_values(replace(made, **{self.inside: part}), own)
        made.check(self.spelt)
        return made

    def _changed(self, made: P | None, wanted: Any, values: Mapping[str, Any]) -> P | None:
        if wanted is None:
            made = None if self.optional else made
        elif wanted is not KEEP:
            made = self._wanted(made, wanted)
        known = {} if made is None else settings_of(type(made))
        for name, value in values.items():
            if name not in known and (value is not None or self.spelt(name) not in self.fields):
                raise self._misplaced(name, value, made)
        if made is None:
            return None
        check_part(self.name, made, self.base)
        if self.parts.get(made.name, type(made)) is not type(made):
            raise InputError(self.name, made.name, "should have another name (`called`): folb has a part of this name")
        if self.record is not None and (taken := known.keys() & settings_of(self.record).keys()):
            expected = f"should have another name, for every {self.name} has `{min(taken)}`"
            raise InputError(self.spelt(min(taken)), made.name, expected)
        made = with_values(made, {name: value for name, value in values.items() if name in known})
        made.check(self.spelt)
        return made

    def _wanted(self, made: P | None, wanted: Any) -> P:
        """The part by its name, its class or itself; one that is there already keeps its settings."""
        if isinstance(wanted, str):
            wanted = self.parts[choose(self.name, wanted, self.parts)]
        if isinstance(wanted, type) and issubclass(wanted, self.base):
            return made if type(made) is wanted else wanted()
        if not isinstance(wanted, self.base):
            expected = f"should be one of {', '.join(self.parts)}, or a folb.{self.base.__name__}"
            raise InputError(self.name, wanted, expected)
        _check_unfinished(self.name, wanted, self.base)
        return wanted

    def _misplaced(self, name: str, value: Any, made: P | None) -> InputError:
        """The error of a field that the part does not have."""
        which = "not set" if made is None else made.name if type(made) in self.known else "your own"
        owners = [other for other, one in self.parts.items() if name in settings_of(one)]
        if not owners:
            mine = () if made is None else settings_of(type(made))
            choose("setting", self.spelt(name), dict.fromkeys([*self.fields, *map(self.spelt, mine)]))
        whose = f"any {self.name}" if len(owners) == len(self.known) else f"{self.name}={', '.join(owners)}"
        return InputError(self.spelt(name), value, f"is for {whose}; {self.name} is {which}")


def _check_unfinished(name: str, made: Part, base: type[Part]) -> None:
    """Raise for a part of a finished algorithm: some fields of its base then followed from the other parts."""
    for one in fields(base):  # type: ignore[arg-type]
        derived = "meaning" not in one.metadata and one.name != "kind_" and not isinstance(one.default, Part)
        if derived and one.default is not MISSING and getattr(made, one.name) != one.default:
            expected = f"should be a new part: its {one.name} is that of the algorithm it was taken from"
            raise InputError(name, made.name, expected)


def with_values(made: Any, values: Mapping[str, Any]) -> Any:
    """The part with these values; None stands for the default, or for none if that is the default."""
    known = settings_of(type(made))
    given = {name: value for name, value in values.items() if value is not None or known[name].default is None}
    return replace(made, **given) if given else made


def settings_of(kind: type[Part]) -> dict[str, Any]:
    """The fields of a class that users may set."""
    return {one.name: one for one in fields(kind) if "meaning" in one.metadata}  # type: ignore[arg-type]


def described(kind: type[Part]) -> dict[str, Any]:
    """The settings of a class, as types with a line of help."""
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError) as error:  # a user's own class
        expected = f"should have types that are known: {type(error).__name__}: {error}"
        raise InputError("setting", kind.__name__, expected) from error
    return {name: Annotated[hints[name], one.metadata["meaning"]] for name, one in settings_of(kind).items()}


def check_part(field: str, made: Any, base: type[Part]) -> None:
    """Raise an `InputError` unless it is a part of this base, with the methods that each has of its own."""
    if not isinstance(made, base):
        raise InputError(field, made, f"should be a folb.{base.__name__}")
    for method in _missing(type(made)):
        raise InputError(field, made.name, f"should have a method {method}")
