"""The commands for existing runs: `folb runs`, `show`, `tag`, `export`, `report`, `watch` and `rm`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folb.cli import compare
from folb.cli.options import JSON, RUN, add_naming, command, words
from folb.errors import InputError, check, one_line

if TYPE_CHECKING:
    from folb.store.directory import RunDirectory

COLUMNS = ("run", "name", "tags", "state", "rounds", "best", "started, UTC", "differs in")  # of `folb runs`
TROUBLE = 20  # the most lines of it that are shown
LISTED, LINE = 50, 150  # the most names of classes or devices, and characters of them


def add(commands: Any) -> None:
    says = "list the runs: state, progress, best accuracy, start, and what each differs in"
    command(commands, "runs", says, _runs).add_argument("--json", action="store_true", help=JSON)
    show = command(commands, "show", "show a run's results so far, its settings, and how to resume it", _show)
    show.add_argument("run", metavar="RUN", help=RUN)
    show.add_argument("--json", action="store_true", help=JSON)
    tag = command(commands, "tag", "change what a run is called: its name and its tags", _tag)
    tag.add_argument("run", metavar="RUN", help=RUN)
    add_naming(tag)
    export = command(commands, "export", "write a run's rounds as csv or parquet, or its table as latex", _export)
    export.add_argument("run", metavar="RUN", help=RUN)
    export.add_argument("--format", required=True, choices=("csv", "parquet", "latex"))
    export.add_argument("-o", "--output", metavar="FILE", help="the file to write (for csv and latex: standard output)")
    page = command(commands, "report", "write one self-contained page about runs, to open in a browser", _report)
    page.add_argument("run", metavar="RUN", nargs="+", help=RUN)
    page.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the file to write (report.html)")
    says = "also write the curves of each run next to it, as png, svg and pdf"
    page.add_argument("--figures", action="store_true", help=says)
    watch = command(commands, "watch", "serve the same page live, on this machine only", _watch)
    watch.add_argument("run", metavar="RUN", nargs="?", help=f"{RUN} (all runs)")
    watch.add_argument("--port", type=int, help="the port on 127.0.0.1 (8470); 0 for any free port")
    compare.add_resume(commands)
    remove = command(commands, "rm", "remove runs", _remove)
    remove.add_argument("run", metavar="RUN", nargs="+", help=RUN)
    remove.add_argument("--yes", action="store_true", help="remove them without asking")
    remove.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _runs(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.store import directory

    paths = directory.listed()
    if options.json:
        print(json.dumps({"runs": [_about(path)[0] for path in paths]}))
    elif paths:
        rows = [_about(path)[1] for path in paths]
        columns = [i for i, name in enumerate(COLUMNS) if name not in ("name", "tags") or any(row[i] for row in rows)]
        shown = [[row[i] for i in columns] for row in (COLUMNS, *rows)]
        if len(columns) > len(COLUMNS) - 2 and not tables.fit(shown):  # names and tags go below, before the last column
            heading = ["run", *COLUMNS[3:-1], "name, tags, differs in"]
            called = [" ".join(filter(None, (_called(name, tags), last))) for _, name, tags, *_, last in rows]
            shown = [heading, *([row[0], *row[3:-1], last] for row, last in zip(rows, called, strict=True))]
        numbers = [n for n, name in enumerate(shown[0]) if name in ("rounds", "best")]
        tables.show_rows(shown, right=numbers, headed=True)
    else:
        tables.say(f"no runs in {directory.home()}")


def _about(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A run for a program, and as one row. A run that cannot be read does not hide the others."""
    from folb.store import directory

    try:
        stored = directory.read(path)
        done, total, best = _progress(stored)
    except InputError as error:
        wrong = {"run": path.name, "path": str(path), "state": "unreadable", "error": str(error)}
        return wrong, (path.name, "", "", "unreadable", "", "", "", str(error))
    about: dict[str, Any] = {
        "run": stored.name,
        "path": str(path),
        "name": stored.given_name,
        "tags": stored.tags,
        "state": stored.state,
        "rounds_done": done,
        "rounds": total,
        "best": best,
        "started": stored.environment["started"],
        "algorithms": list(dict.fromkeys(run["name"] for run in stored.environment["runs"])),
        "differs": stored.differs,
    }
    shown = "" if best is None else stored.measure.text(best)
    rounds, tags = f"{done:,} of {total:,}", ", ".join(stored.tags)
    row = (stored.name, stored.given_name, tags, about["state"], rounds, shown, stored.started[:16], stored.differs)
    return about, row


def _progress(stored: RunDirectory) -> tuple[int, int, float | None]:
    """Of all runs together: the rounds done, the number of rounds, and the best test accuracy or error so far."""
    from folb.store.round_lines import judged

    lines, measure = stored.rounds()[0], stored.measure
    values = [value for line in lines if (value := judged(line, measure.name)) is not None]
    best = (min if measure.lower else max)(values, default=None)
    return len(lines), len(stored.environment["runs"]) * stored.experiment["rounds"], best


def _show(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.results.document import document
    from folb.store import directory, experiment_file
    from folb.store.round_lines import trouble

    stored = directory.read(directory.find(options.run))
    wrong = [(line["round"], words) for line in stored.rounds()[0] for words in trouble(line)]
    if options.json:
        # the results have the keys of results.json
        results = document(stored.experiment, stored.environment["note"], stored.runs())
        about = {**_about(stored.path)[0], "environment": stored.environment}
        told = [{"round": number, "what": words} for number, words in wrong]
        print(json.dumps({**about, "results": results, "trouble": told}))
        return
    tables.say("\n".join(_facts(stored)) + "\n")
    if begun := stored.begun():
        experiment = stored.experiment
        tables.show_in_parts(tables.results(begun, experiment["target"], stored.clock, experiment["rounds"]))
    if wrong:
        tables.say(f"\n{len(wrong):,} rejected, lost or abandoned, the last:")
        tables.say("\n".join(f"  round {number}: {words}" for number, words in wrong[-TROUBLE:]))
    settings = stored.path / directory.EXPERIMENT
    tables.say(f"\n{settings}:\n{experiment_file.read_text(settings)}")


def _tag(options: argparse.Namespace) -> None:
    from folb.cli import tables
    from folb.store import directory
    from folb.store.environment import checked_name, give_name

    path = directory.find(options.run)
    given = checked_name(options.name, words(options.tags))
    check("tag", path.name, given, "should be given with --name or --tags; an empty value removes it")
    give_name(path, given)
    tables.say(next(_facts(directory.read(path))))


def _facts(stored: RunDirectory) -> Iterator[str]:
    """A run's state, its data, and the process that runs it or the command that resumes it."""
    from folb.atomic import holder

    done, total, _ = _progress(stored)
    environment = stored.environment
    called = " ".join(filter(None, (stored.name, _called(stored.given_name, ", ".join(stored.tags)))))
    yield (
        f"{called}: {stored.state}, {done:,} of {total:,} rounds; {environment['device']}, "
        f"folb {environment['folb']}, jax {environment['jax']}, started {stored.started}"
    )
    if environment["note"]:
        yield f"the data: {environment['note']}"
    for what, key in (("classes", "class_names"), ("devices", "device_names")):
        if environment.get(key):
            yield one_line(f"the {what}, from 0 on: {', '.join(environment[key][:LISTED])}", LINE)
    if stored.state == "running" and (process := holder(stored.path)):
        yield f"run by process {process.get('pid')} on {process.get('host')}: {process.get('command')}"
    if stored.state == "interrupted":
        yield f"resume with: {stored.resume_command}"


def _called(name: str, tags: str) -> str:
    return " ".join(filter(None, (f"“{name}”" if name else "", f"({tags})" if tags else "")))


def _export(options: argparse.Namespace) -> None:
    from folb import atomic
    from folb.report.export import FORMATS
    from folb.store import directory

    stored = directory.read(directory.find(options.run))
    if options.output is None and options.format == "parquet":
        raise InputError("output", options.output, "should be a file to write parquet to: -o FILE")
    content = FORMATS[options.format](stored)
    if options.output is None:
        sys.stdout.write(content.decode())
        return
    try:
        atomic.output(Path(options.output), content)
    except OSError as error:
        raise InputError("output", options.output, f"cannot be written: {error.strerror}") from error
    print(f"written to {options.output}", file=sys.stderr)


def _report(options: argparse.Namespace) -> None:
    from folb import atomic
    from folb.experiments.holdings import holdings
    from folb.report import page, payload
    from folb.report.figures import curves
    from folb.store import directory

    stored = [directory.read(path) for path in dict.fromkeys(directory.find(name) for name in options.run)]
    path = Path(options.output)
    atomic.output(path, page.render(payload.view(stored, holdings(stored))).encode())
    print(path)
    for n, one in enumerate(stored if options.figures else (), start=1):
        runs = [run for run in one.runs() if len(run.evaluated_rounds)]
        about = payload.described(one)
        stem = one.name if [other.name for other in stored].count(one.name) == 1 else f"{one.name}-{n}"
        for form in ("png", "svg", "pdf") if runs else ():
            picture = path.parent / f"{stem}.{form}"
            drawn = curves(runs, form, target=about["target"], title=about["title"], note=about["note"])
            atomic.output(picture, drawn)
            print(picture)


def _watch(options: argparse.Namespace) -> None:
    from folb.report import live

    announce = partial(print, flush=True)  # the reader of a pipe waits for the address
    live.serve(options.run, live.PORT if options.port is None else options.port, announce=announce)


def _remove(options: argparse.Namespace) -> None:
    from folb.store import directory

    paths = list(dict.fromkeys(directory.find(name) for name in options.run))
    if options.dry_run:
        print("\n".join(f"would remove {path}" for path in paths))
        return
    if not options.yes:  # the beginning of a name may match another run than the user thinks
        names = ", ".join(map(str, paths))
        if sys.stdin is None or not sys.stdin.isatty():
            raise InputError("rm", names, "should be given with --yes: there is no terminal to ask on")
        print(f"remove {names}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InputError("rm", names, "is kept: the answer was not yes")
    for path in paths:
        directory.remove(path)
        print(f"removed {path}")
