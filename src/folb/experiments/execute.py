"""`folb.execute` runs an experiment in its run directory, from the start or from where it was interrupted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from folb import atomic
from folb.atomic import check_free, claimed, regular
from folb.core.round import nbytes
from folb.errors import InputError, check
from folb.experiments.experiment import Experiment, from_fields, from_toml, to_mapping, to_toml
from folb.experiments.plan import Plan, plan
from folb.experiments.settings import naming_own_files
from folb.measures import FAIRNESS
from folb.models.model import params_like
from folb.report import trackers
from folb.results.document import document
from folb.results.run import Run
from folb.simulation import parallel
from folb.simulation.simulate import Observe, Simulation, run_by_run, simulation
from folb.store import directory as store
from folb.store.directory import RunDirectory
from folb.store.environment import GIVEN, PROGRAM, checked_name, give_name, program, with_name, write_environment
from folb.store.reading import read
from folb.store.round_lines import Recorder
from folb.store.run_arrays import save_models

NAMES = 100_000  # the most characters of devices' names, or of classes', that environment.json has

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """What is about to happen to an experiment."""

    plan: Plan
    path: Path  # of its run directory
    finished: bool  # the results exist already, and no round is run
    keep_model: bool = True  # at the end
    costs: Sequence[float] = (1.0,)  # what a round of each run costs, compared with the others
    first_look: Callable[[], str | None] = lambda: None  # what can be said before a long first round

    @property
    def rounds(self) -> int:
        """How many rounds all runs have together."""
        return len(self.plan.experiment.seeds) * sum(self.plan.rounds)

    @property
    def model_bytes(self) -> int:
        """How many bytes model.npz will take, about; 0 if it is not kept."""
        return len(self.plan.runs) * nbytes(params_like(self.plan.model)) if self.keep_model else 0


OnStart = Callable[[Start], None]


def execute(
    experiment: Experiment | Plan | Mapping[str, Any] | str | os.PathLike[str],
    *,
    directory: str | os.PathLike[str] | None = None,
    again: bool = False,
    accelerators: int | str = 1,
    stream: bool | None = None,
    track: str | None = None,
    keep_model: bool = True,
    name: str | None = None,
    tags: Sequence[str] | None = None,
    on_start: OnStart | None = None,
    observe: Observe | None = None,
) -> RunDirectory:
    """Run an experiment and return its run directory, which has the results.

    The same call resumes an experiment that was interrupted. If its results are there already, it returns at once.

    `experiment` is an `Experiment`, a dict of its fields, the path of an experiment file, or a plan.
    `directory` is the run directory. By default its name comes from the content of the experiment, and it is in the
    directory that FOLB_RUNS names, else in `runs`.
    `again` runs the experiment from the start. The finished run that is there stays in its folder `replaced` until the
    new one is finished. If the new one fails before its first round, the old one comes back.
    `accelerators`, `stream` and `observe` are explained at `simulate`. A resumed run also tells `observe` the rounds
    that it had before, in one part.
    `track` also logs the rounds for "tensorboard", "mlflow" or "wandb", in the run directory.
    `keep_model` writes model.npz at the end, for `folb.load_model`; it takes as many bytes as the models of all runs.
    `name` and `tags` are what you call the run; `folb runs` shows them. They change neither the run nor its place.
    `on_start(start)` is called once, before the first round. `start.plan`, `start.path` and `start.finished` are the
    plan, the directory, and whether its results are there already.

    Bad input raises an `InputError`. Recorded rounds survive every error and interruption. If several processes compute
    together, all of them call it; only the first writes the directory and calls its callbacks.
    """
    planned = _planned(experiment, stream)
    check("out", directory, directory is None or os.fspath(directory), "should be a directory to write to")
    given = checked_name(name, tags)
    path = place(planned) if directory is None else Path(directory)
    if parallel.leads():
        store.restore(path)
    parallel.check_alike(planned.identity)
    if not parallel.leads():
        if parallel.shared(None):
            ready(planned, accelerators).run()
            parallel.shared(None)  # the first has written the results
        return RunDirectory(path, environment(planned, accelerators))
    start = Start(planned, path, not again and finished(path, planned), keep_model)
    if start.finished:
        _complete(path, planned)
        give_name(path, given)
        parallel.shared(False)
        if on_start is not None:
            on_start(start)
        return store.read(path)
    if track is not None:
        trackers.check(track)
    check_free(path)
    parallel.shared(True)
    new = not path.exists()
    atomic.directory(path)
    try:
        with claimed(path):
            stored = _perform(start, again, accelerators, track, given, on_start, observe)
    except InputError:
        if new:
            with contextlib.suppress(OSError):
                path.rmdir()  # if nothing is in it
        raise
    parallel.shared(None)
    return stored


def resume(
    run: RunDirectory | str | os.PathLike[str],
    *,
    again: bool = False,
    accelerators: int | str | None = None,
    stream: bool | None = None,
    track: str | None = None,
    keep_model: bool | None = None,
    on_start: OnStart | None = None,
    observe: Observe | None = None,
) -> RunDirectory:
    """Resume an interrupted run, and return its run directory.

    `run` is a run directory, its path, its name, the beginning of its name, or "last" for the newest. By default
    `accelerators`, `stream` and `keep_model` are as when the run began. The others are explained at `execute`.
    """
    if isinstance(run, str | os.PathLike):
        for place_of_run in (Path(run), store.home() / run):
            store.restore(place_of_run)
    stored = read(run)
    path, there = stored.path, stored.environment
    expected = f"is a run on Flower: to resume it, submit it again: {stored.resume_command}"
    check("run", path.name, not stored.deployed, expected)
    planned = plan(from_toml(path / store.EXPERIMENT), there["stream"] if stream is None else stream)
    expected = f"its {store.EXPERIMENT}, its data or the user's own files have changed; --again runs it from the start"
    check("run", path.name, again or planned.identity == there["identity"], expected)
    return execute(
        planned,
        directory=path,
        again=again,
        accelerators=there["accelerators"] if accelerators is None else accelerators,
        track=track,
        keep_model=there["keep_model"] if keep_model is None else keep_model,
        on_start=on_start,
        observe=observe,
    )


def _planned(given: Experiment | Plan | Mapping[str, Any] | str | os.PathLike[str], stream: bool | None) -> Plan:
    if isinstance(given, Plan):
        return given
    if isinstance(given, Mapping):
        given = from_fields(given)
    elif isinstance(given, str | os.PathLike):
        given = from_toml(Path(given))
    elif not isinstance(given, Experiment):
        raise InputError("experiment", given, "should be an Experiment, a dict of its fields, or the path of a file")
    return plan(given, stream)


def _perform(
    start: Start,
    again: bool,
    accelerators: int | str,
    track: str | None,
    given: Mapping[str, Any],
    on_start: OnStart | None,
    observe: Observe | None,
) -> RunDirectory:
    """Run an experiment in its claimed directory, and write the results there."""
    planned, path = start.plan, start.path
    fresh = not store.is_run(path)
    check_place(path, planned, again, accelerators)
    # this comes first: an experiment that cannot run must clear nothing, and a user's own file may change later
    simulation = ready(planned, accelerators)
    about = planned.about_models if start.keep_model else None
    # matplotlib draws the picture at the end. It takes half a second to load, so it loads while rounds are played,
    # but only after every run has begun: before that, the interpreter is busy with lowering and loading their programs.
    loading = threading.Thread(target=import_module, args=("matplotlib.figure",))
    try:
        prepare(path, planned, again, accelerators, start.keep_model, given)
        if on_start is not None:
            begun = (path / store.ROUNDS).is_file()  # a look at the first model would come too late
            look = start.first_look if begun else simulation.first_look
            on_start(start._replace(costs=simulation.costs, first_look=look))
        with contextlib.ExitStack() as stack:
            tracked = [stack.enter_context(trackers.tracking(track, path, planned.runs))] if track is not None else []
            recorder = stack.enter_context(Recorder(path, planned.runs))
            observers = [recorder.add, *tracked, *([run_by_run(observe)] if observe is not None else [])]
            with naming_own_files(planned.experiment.named):
                runs = simulation.run(observers, path / store.CHECKPOINTS, loading.start)
            recorder.finish(runs)
    except BaseException as error:
        unused = fresh and isinstance(error, InputError) and not store.is_recorded(path)
        if not store.put_back(path) and unused:
            store.clear(path)
        raise
    return finish(path, planned, runs, about)


def ready(planned: Plan, accelerators: int | str = 1) -> Simulation:
    experiment = planned.experiment
    record = ["weights", "gamma"] if experiment.records else []
    record += ["own"] if record and FAIRNESS in experiment.metrics else []
    record += ["attack"] if any(algorithm.attack is not None for algorithm in planned.algorithms) else []
    with naming_own_files(experiment.named):
        chosen = {"system": planned.system, "objective": experiment.objective, "record": tuple(record)}
        return simulation(planned, accelerators=accelerators, **chosen)


def place(planned: Plan) -> Path:
    """The directory of an experiment: the dataset's name and the beginning of the identity."""
    dataset = planned.experiment.dataset
    stem = Path(dataset).stem if os.path.isabs(dataset) else dataset
    word = re.sub("[^A-Za-z0-9_.-]+", "-", stem).strip(".-")[:60]
    return store.home() / f"{word or 'data'}-{planned.identity[:8]}"


def finished(path: Path, planned: Plan) -> bool:
    """Whether the directory has the complete results of exactly this experiment."""
    if not store.is_run(path) or store.read(path).environment["identity"] != planned.identity:
        return False
    with contextlib.suppress(OSError, ValueError, RecursionError):
        json.loads(regular(path / store.RESULTS).read_bytes())
        wanted = [rounds for rounds in planned.rounds for _ in planned.experiment.seeds]
        return [len(run.seconds) for run in store.read(path).runs()] == wanted
    return False


def check_place(path: Path, planned: Plan, again: bool, accelerators: int | str = 1) -> None:
    """Raise an `InputError` unless the experiment may be run in this directory, from the start or resumed."""
    if not store.is_run(path):
        store.check_own(path, again)
    elif not again:
        now, there = environment(planned, accelerators), store.read(path).environment
        same = there["identity"] == now["identity"]
        check("out", str(path), same, "holds the run of another experiment; --again replaces it")
        for key in ("accelerators", "stream"):
            expected = f"should be {there[key]}, as when it began; --again runs it from the start"
            check(key, now[key], there[key] == now[key], expected)


def prepare(
    path: Path,
    planned: Plan,
    again: bool = False,
    accelerators: int | str = 1,
    keep_model: bool = True,
    given: Mapping[str, Any] | None = None,
) -> None:
    """Make the claimed directory ready: from scratch, or to resume what an earlier process left.

    Rounds and checkpoints of other versions of the program are not resumed: the results would mix both versions.
    """
    now = environment(planned, accelerators) | {"keep_model": keep_model}
    there = store.read(path).environment if store.is_run(path) else {}
    changed = [key for key in PROGRAM if there and there.get(key) != now[key]]
    if changed and not again:
        what = ", ".join(f"{key} {there.get(key)}, now {now[key]}" for key in changed)
        log.warning("%s: starting again from the first round, because its rounds were made with %s", path, what)
    called = {key: there[key] for key in GIVEN if key in there}
    if not there or again or changed:
        store.set_aside(path)
        write_environment(path, with_name(now | called, given or {}))
    elif given or there["keep_model"] != keep_model:
        write_environment(path, with_name(there | {"keep_model": keep_model}, given or {}))
    atomic.replace(path / store.EXPERIMENT, to_toml(planned.experiment, planned.note).encode())
    if store.is_recorded(path) and not any((path / store.CHECKPOINTS).glob("*.checkpoint")):
        log.warning("%s: starting again from the first round, because it has no checkpoint to resume from", path)
    (path / store.RESULTS).unlink(missing_ok=True)  # damaged: with sound ones nothing would be run
    (path / store.CHECKPOINTS).mkdir(exist_ok=True)


def environment(planned: Plan, accelerators: int | str = 1) -> dict[str, Any]:
    """What a result may depend on besides the experiment, and a description of its runs."""
    mesh, federation = parallel.mesh(accelerators), planned.federation
    names = {"device_names": federation.device_names, "class_names": federation.class_names}
    return program(1 if mesh is None else mesh.size, planned.streamed) | {
        **{key: list(own) for key, own in names.items() if own is not None and sum(map(len, own)) <= NAMES},
        "carrier": "simulator",
        "note": planned.note,
        "devices": federation.N,
        "identity": planned.identity,
        "differs": planned.differs,
        "runs": planned.runs,
    }


def finish(path: Path, planned: Plan, runs: Sequence[Run], about: Mapping[str, Any] | None = None) -> RunDirectory:
    """Write the models, if `about` describes them, the picture and the results; then remove the checkpoints.

    If it is killed before the results are written, the checkpoints have everything; later, `_complete` does the rest.
    """
    if about is not None:
        save_models(path / store.MODEL, about, [run.params for run in runs])
    else:
        (path / store.MODEL).unlink(missing_ok=True)  # of earlier rounds
    stored = store.read(path)
    recorded = [replace(one, params=run.params) for one, run in zip(stored.runs(), runs, strict=True)]
    experiment, note = planned.experiment, planned.note
    store.leave(path, document(to_mapping(experiment), note, recorded), _picture(experiment, note, recorded))
    _tidy(path)
    return stored


def _picture(experiment: Experiment, note: str, runs: Sequence[Run]) -> bytes:
    from folb.report.figures import attacks, curves
    from folb.report.looks import title

    about = {"title": title(experiment.dataset, experiment.model), "note": note}
    if all(run.parameters.get("attack") for run in runs):
        return attacks(runs, **about)
    return curves(runs, target=experiment.target, **about)


LEFT = (store.CHECKPOINTS, store.REPLACED)  # not needed any more once there are results


def _tidy(path: Path) -> None:
    for left in LEFT:
        shutil.rmtree(path / left, ignore_errors=True)


def _complete(path: Path, planned: Plan) -> None:
    """Finish the work of a process that was killed after it wrote the results."""
    if (path / store.CURVES).is_file() and not any((path / left).exists() for left in LEFT):
        return
    with claimed(path):
        if not (path / store.CURVES).is_file():
            atomic.replace(path / store.CURVES, _picture(planned.experiment, planned.note, store.read(path).runs()))
        _tidy(path)
