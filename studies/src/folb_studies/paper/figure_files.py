"""The experiment files of the reproduction: a figure or table of the paper, its arms and its claims.

The files in the folder `outside` go beyond the paper: numbers that others published, and claims of our own. A file has
`title`, `paper` (what the paper says, in our words), `source` (who says it, if not the paper), `caveats`, `uses` (arms
of other files), `shows` (the arms in the picture), `quantities` (what it shows of them), `by` (a setting with a panel
for each of its values), and tables [[arm]] and [[claim]].

An arm has the keys of an experiment of `folb run`, and

    id, name     for the command and for people
    draws        the number of draws of the data, 0 .. draws-1, each with every seed
    drawn        the dataset's setting that a draw is a value of, if not `draw`: such as holdout_seed, for splits
    printed      the paper's rounds to the target, by algorithm, or "never"
    [arm.vary]   a setting and its values: an arm for each value
    [arm.search] the line search, on draws and seeds that are not reported; [[arm.search]] for several
    [arm.quick]  what --quick uses instead; `skip = true` leaves the arm out
    check        instead of an experiment: a numerical check of the theory, from `folb_studies.paper.checks`

`folb_studies.paper.verdicts` explains a claim.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, cast

from folb.errors import InputError, choose
from folb.experiments.experiment import Experiment
from folb_studies.typed_tables import FORMS, all_of, by_path, made

FRONT = "front"  # the file with the texts of the front page
OUTSIDE = "outside"  # the folder of the files that go beyond the paper
KEYS = frozenset(field.name for field in fields(Experiment)) - {"evaluate", "device_samples"}
OWN = (
    "id",
    "name",
    "draws",
    "drawn",
    "printed",
    "check",
    "settings",
)  # keys of an arm that an experiment does not have
WORDS = {"step": "steps", "gradient": "full gradients", "epoch": "epochs"}


@dataclass(frozen=True)
class Search:
    """A line search over `grid` for `algorithm`. The algorithms in `also` get the result, too."""

    algorithm: str
    grid: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]
    draws: Sequence[int] = ()  # none: the dataset has no draws
    rounds: int | None = None
    also: Sequence[str] = ()


@dataclass(frozen=True)
class Arm:
    """An experiment over draws and seeds, or a check."""

    figure: str
    id: str
    name: str
    quick: bool
    given: Mapping[str, Any] = field(default_factory=dict)  # the fields of `Experiment`
    draws: int = 0  # 0: the dataset has only one
    searches: Sequence[Search] = ()
    printed: Mapping[str, int | str] = field(default_factory=dict)
    varied: Mapping[str, Any] = field(default_factory=dict)
    check: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the check
    drawn: str = "draw"  # the dataset's setting that a draw is a value of

    @property
    def slug(self) -> str:
        """The name of its results."""
        return f"{self.figure}-{self.id}"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, or about a published number, and how it is decided; see `folb_studies.paper.verdicts`."""

    figure: str
    id: str
    says: str
    arms: Sequence[str]
    metric: str = "rounds"
    better: str = ""
    worse: Sequence[str] = ()
    under: Sequence[str] = ()
    than: Mapping[str, str] = field(default_factory=dict)
    same: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    keeping: Mapping[str, float] = field(default_factory=dict)
    conditions: Sequence[str] = ()
    published: float | None = None
    spread: float | None = None
    source: str = ""

    @property
    def compares(self) -> bool:
        """Whether it only says that one is better than another."""
        return bool(self.better) and self.same is None and self.at_least is None


@dataclass(frozen=True)
class Figure:
    """A figure or table of the paper."""

    name: str
    title: str
    paper: str
    arms: Sequence[Arm]
    claims: Sequence[Claim]
    caveats: Sequence[str] = ()
    uses: Sequence[str] = ()
    shows: Sequence[str] = ("*",)
    quantities: Sequence[str] = ("accuracy",)
    by: str = ""
    source: str = "The paper"

    def matching(self, patterns: Sequence[str], arms: Sequence[Arm]) -> list[Arm]:
        """The arms in `arms` (its own and those it uses) that a pattern names, by id or figure:id."""
        return [
            arm
            for arm in arms
            if any(
                fnmatchcase(arm.id, pattern) or fnmatchcase(f"{arm.figure}:{arm.id}", pattern) for pattern in patterns
            )
        ]


@dataclass(frozen=True)
class Sentence:
    """A sentence of the advice: the claim (figure:id) that it follows from, and its wording for each outcome."""

    claim: str
    holds: str
    partly: str
    fails: str
    unclear: str = ""  # no comparison speaks for the claim or against it; as `fails`, if not given
    unreached: str = ""  # no run arrives


@dataclass(frozen=True)
class Front:
    """The texts of the front page; `folb_studies.paper.advice` explains those of the advice."""

    title: str
    introduction: str
    reading: str
    outside: str
    advice: str
    columns: Mapping[str, str] = field(default_factory=dict)  # of its table: the algorithms
    rows: Mapping[str, str] = field(default_factory=dict)  # the arms, by figure:id
    sentences: Mapping[str, Sentence] = field(default_factory=dict)


def names() -> list[str]:
    """The figures and tables that have experiment files, in the paper's order."""
    names = [path.name.removesuffix(".toml") for path in _home().iterdir() if path.name.endswith(".toml")]

    def order(name: str) -> tuple[int, int, str]:
        number = re.search(r"\d+", name)
        return (("table", "fig").index(name[: number.start()]) if number else 2), int(number[0]) if number else 0, name

    return sorted((name for name in names if name != FRONT), key=order)


def outside() -> list[str]:
    """The files that go beyond the paper."""
    names = (path.name for path in (_home() / OUTSIDE).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def chosen(wanted: Sequence[str]) -> list[str]:
    """The figures that the command asks for: names, "all" of the paper, all from "outside", the user's own files."""
    groups = {"all": names(), OUTSIDE: outside()}
    known = [name for group in groups.values() for name in group]
    for name in wanted:
        if not name.endswith(".toml"):
            choose("reproduce", name, [*known, *groups])
    figures = list(dict.fromkeys(name for one in wanted for name in groups.get(one, [one])))
    stems = [Path(name).stem for name in figures]
    for name, stem in zip(figures, stems, strict=True):
        if stems.count(stem) > 1 or (name.endswith(".toml") and stem in known):
            raise InputError("reproduce", name, "should have a name that no other figure has")
    return figures


def _home() -> Any:
    return resources.files("folb_studies.paper") / "experiments"


def content(name: str) -> dict[str, Any]:
    """The content of a file: one of ours by name, or the user's own by path."""
    home = _home() / OUTSIDE if name in outside() else _home()
    path = Path(name) if name.endswith(".toml") else home / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("reproduce", name, f"cannot be read: {error}") from error


def read(name: str, quick: bool = False) -> Figure:
    """The figure or table of that name, or of the file at that path."""
    document, stem = content(name), Path(name).stem
    where = f"{stem}.toml"
    for key in ("arm", "claim"):
        if not all_of(lambda one: isinstance(one, dict), list)(document.get(key, [])):
            raise InputError(f"{where}: {key}", document[key], f"should be tables: [[{key}]]")
    for key in ("name", "arms", "claims"):
        if key in document:
            raise InputError(f"{where}: key of figure", key, "should not be given: it comes from the file")
    arms = [arm for table in document.pop("arm", []) for arm in _arms(where, stem, table, quick)]
    claims = [made(where, Claim, {"figure": stem} | table) for table in document.pop("claim", [])]
    for kind, ids in (("arm", [arm.id for arm in arms]), ("claim", [claim.id for claim in claims])):
        if len(set(ids)) < len(ids):
            raise InputError(f"{where}: {kind}", ids, "should have different ids")
    return made(where, Figure, {"name": stem, "arms": arms, "claims": claims} | document)


def front() -> Front:
    """The texts of the front page."""
    document = content(FRONT)
    where = f"{FRONT}.toml"
    sentences = {name: made(where, Sentence, table) for name, table in document.pop("sentence", {}).items()}
    return cast("Front", made(where, Front, document | {"sentences": sentences}))


def used(figure: Figure, quick: bool = False) -> list[Arm]:
    """The arms of other files that the figure uses."""
    others = [read(name, quick) for name in dict.fromkeys(pattern.partition(":")[0] for pattern in figure.uses)]
    return figure.matching(figure.uses, [arm for other in others for arm in other.arms])


def _arms(where: str, figure: str, table: dict[str, Any], quick: bool) -> list[Arm]:
    """The arm of a table, or an arm for each varied value."""
    table = dict(table)
    for key in ("quick", "vary", "set"):
        if not isinstance(table.get(key, {}), dict):
            raise InputError(f"{where}: {key} of arm", table[key], "should be a table")
    instead, table = _by_paths(table.pop("quick", {})), _by_paths(table)
    if quick:
        if instead.pop("skip", False) is True:
            return []
        table = _merged(table, instead)
    vary = table.pop("vary", {})
    if not FORMS["Mapping[str, Sequence[Any]]"][0](vary):
        raise InputError(f"{where}: vary of arm", vary, "should be a table of lists, each with a value")
    own: dict[str, Any] = {key: table.pop(key) for key in OWN if key in table}
    if not re.fullmatch("[a-z0-9_.-]+", str(own.get("id", ""))):
        raise InputError(f"{where}: id of an arm", own.get("id"), "should be small letters, digits, - and _")
    search = table.pop("search", {})
    searches = search if isinstance(search, list) else [search] if search else []
    if not all(isinstance(one, dict) for one in searches):
        raise InputError(f"{where}: search of arm", search, "should be a table, or tables")
    searches = [one | {"grid": by_path(one["grid"])} if isinstance(one.get("grid"), dict) else one for one in searches]
    own["searches"] = [made(where, Search, one) for one in searches]
    if not own.get("check"):
        for key in table:
            choose(f"{where}: key of arm", key, KEYS)
        table["evaluate"] = "all"  # even if the model is costly: the paper's figures are of all samples
    columns = []
    for values in itertools.product(*vary.values()):
        varied = dict(zip(vary, values, strict=True))
        ending = "".join(f"-{value}" for value in values)
        words = "".join(f", {WORDS.get(value, f'{key} {value}')}" for key, value in varied.items())
        given = table | {"set": table.get("set", {}) | varied} if varied else table
        names = {"id": own["id"] + ending, "name": own.get("name", own["id"]) + words}
        columns.append(
            made(where, Arm, {**own, **names, "figure": figure, "quick": quick, "given": given, "varied": varied})
        )
    return columns


def _by_paths(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with its settings by their paths."""
    return {
        key: by_path(value) if key in ("set", "vary") and isinstance(value, dict) else value
        for key, value in table.items()
    }


def _merged(table: dict[str, Any], instead: dict[str, Any]) -> dict[str, Any]:
    """`table` with the values of `instead`. Inner tables are merged, too, except the search, which is replaced."""
    merged = dict(table)
    for key, value in instead.items():
        merge = isinstance(value, dict) and key not in ("search", "vary")
        merged[key] = _merged(merged.get(key, {}), value) if merge else value
    return merged
