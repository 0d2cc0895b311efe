"""The command line from end to end: what it prints, what it writes, and its errors."""

import json
import os
import resource
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from folb.cli.main import main
from folb.core.algorithm import OTHERS_SAY
from folb.core.algorithms import ALGORITHMS, GROUPS

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = ["synthetic_1_1", "--set", "sizes=20,30,40", "--set", "select.K=2", "--rounds", "4", "--seeds", "2"]


def folb(capsys, *arguments):
    """Exit code, standard output and standard error of a command."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A comparison written to a directory, with a sweep over mu and both averages."""
    out = tmp_path_factory.mktemp("out") / "new" / "directory"
    sweep = ["--set", "local.mu=0.01,1", "--set", "rule.weights=equal,samples", "--evaluate-every", "2"]
    assert main(["compare", *TINY, *sweep, "--out", str(out)]) == 0
    return out


def test_results_hold_every_run(results):
    assert (results / "curves.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((results / "results.json").read_text())
    assert (document["dataset"], document["model"], document["rounds"]) == ("synthetic_1_1", "logistic", 4)
    # folb x 2 mu, fedprox x 2 mu x 2 averages, fedavg x 2 averages, each with 2 seeds
    assert len(document["runs"]) == 2 * (2 + 4 + 2)
    for run in document["runs"]:
        assert run["evaluated_rounds"] == [2, 4]
        assert len(run["test_accuracy"]) == len(run["train_loss"]) == 2
        assert run["bytes_up"] == run["bytes_down"] * (2 if run["algorithm"] == "folb" else 1)
    assert {(r["parameters"]["local.mu"], r["seed"]) for r in document["runs"] if r["algorithm"] == "folb"} == {
        (mu, seed) for mu in (0.01, 1.0) for seed in (0, 1)
    }


def test_experiment_file_repeats_the_comparison(results, capsys):
    code, out, _ = folb(capsys, "run", results / "experiment.toml", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((results / "results.json").read_text())


def test_json_is_one_document_and_nothing_else(capsys):
    code, out, _ = folb(capsys, "compare", *TINY, "--algorithms", "fedavg", "--target", "1", "--json")
    assert code == 0
    run = json.loads(out)["runs"][1]
    assert (run["algorithm"], run["seed"], run["evaluated_rounds"]) == ("fedavg", 1, [1, 2, 3, 4])
    assert run["rounds_to_target"] is None


def test_table_names_what_tells_the_runs_apart(capsys):
    code, out, _ = folb(capsys, "compare", *TINY, "--algorithms", "fedavg", "--set", "fedavg.server=plain,adam")
    assert code == 0
    assert "3 devices, 81 training and 9 test samples" in out
    assert "fedavg server=plain" in out and "fedavg server=adam" in out
    assert "rounds to 70 %" in out and "MB up" in out


def test_experiment_file_with_tables(tmp_path, capsys):
    (tmp_path / "e.toml").write_text(
        'dataset = "synthetic_iid"\nalgorithms = ["folb", "fedprox"]\nrounds = 2\nseeds = [7]\nsystem = "deadline"\n'
        '[set]\nsizes = [20, 30]\n"select.K" = 2\ntau = 9\n[set.folb.local]\nmu = [0.1, 0.2]\n'
    )
    code, out, _ = folb(capsys, "run", tmp_path / "e.toml", "--json", "--out", tmp_path / "out")
    assert code == 0
    runs = json.loads(out)["runs"]
    assert [(r["algorithm"], r["parameters"]["local.mu"], r["seed"]) for r in runs] == [
        ("folb", 0.1, 7),
        ("folb", 0.2, 7),
        ("fedprox", 1.0, 7),
    ]
    kept = tomllib.loads((tmp_path / "out" / "experiment.toml").read_text())["set"]
    assert kept["synthetic_iid"]["sizes"] == [20, 30] and kept["deadline"]["tau"] == 9
    assert kept["folb"]["local.mu"] == [0.1, 0.2]
    assert kept["folb"]["select.K"] == kept["fedprox"]["select.K"] == 2


def test_own_rule_and_own_model_from_files(capsys):
    rule = "examples/my_rule.py:softmax"
    assert len(Path("examples/my_rule.py").read_text().splitlines()) < 40
    model = ["--model", "examples/my_model.py:mlp", "--set", "width=3"]
    code, out, err = folb(
        capsys, "compare", *TINY, *model, "--algorithms", rule, "--set", "rule.temperature=0.1", "--json"
    )
    assert code == 0, err
    run = json.loads(out)["runs"][0]
    assert (run["algorithm"], run["parameters"]["rule.temperature"]) == ("softmax", 0.1)


def test_own_data(tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.normal(size=(60, 4)), y=rng.integers(0, 3, 60), device=np.arange(60) % 5)
    run = ["--model", "logistic", "--algorithms", "fedavg", "--rounds", 2, "--seeds", 1, "--json"]
    code, out, err = folb(capsys, "compare", tmp_path / "mine.npz", *run)
    assert code == 0, err
    assert json.loads(out)["dataset"].endswith("mine.npz")
    for side in ("train", "test"):
        (tmp_path / "leaf" / side).mkdir(parents=True)
        users = {f"u{k}": {"x": rng.normal(size=(6, 4)).tolist(), "y": [0, 1, 2, 0, 1, 2]} for k in range(3)}
        content = {"users": list(users), "num_samples": [6] * 3, "user_data": users}
        (tmp_path / "leaf" / side / "all.json").write_text(json.dumps(content))
    code, out, err = folb(capsys, "compare", tmp_path / "leaf", *run)
    assert code == 0, err
    assert json.loads(out)["dataset"].endswith("leaf")


def test_list_names_everything_with_settings_and_equations(capsys):
    code, out, _ = folb(capsys, "list")
    assert code == 0
    assert set(ALGORITHMS) == {name for names in GROUPS.values() for name in names}
    equations = ("(7)", "(9)", "(13)", "(18)")
    for word in (*ALGORITHMS, *equations, "synthetic_iid", "deadline", "tau", "logistic", "replacement"):
        assert word in out
    lines = [line.strip() for line in out.splitlines()]
    costs = {name: lines[i + 1] for i, line in enumerate(lines) for name in ALGORITHMS if line.startswith(f"{name}  ")}
    assert costs["fedavg"] == "up d; down d; the server keeps nothing"
    assert costs["folb_hetero"] == "up d + d (grad) + 4 B (gamma); down d; the server keeps nothing"
    assert costs["scaffold"] == "up d; down d + d (shift); the server keeps d and d for each device"
    assert costs["fednu_norm"] == "up d, and 4 B (norm) from each of N; down d; the server keeps nothing"
    assert costs["fedbuff"] == "up d; down d; the server keeps 10 d + 258 B"
    assert costs["ghbm"] == "up d; down d + d (shift); the server keeps 10 d + 4 B"


def test_list_shows_one_kind_or_one_name(capsys):
    psi = " rule.psi "
    assert psi in folb(capsys, "list", "folb_hetero")[1] and psi not in folb(capsys, "list", "fedavg")[1]
    parts = folb(capsys, "list", "parts")[1]
    for word in ("power_of_choice", "delta_sgd", "fedvarp", "sketch", "lookahead", "Reddi et al., 2021", "hinge"):
        assert word in parts
    assert "devices" in folb(capsys, "list", "datasets")[1]
    code, _, err = folb(capsys, "list", "scafold")
    assert code == 2 and "list = 'scafold': did you mean 'scaffold'?" in err


REFUSED = {
    "unknown algorithm": (["--algorithms", "flob"], "algorithms = 'flob': did you mean 'folb'?"),
    "algorithm twice": (["--algorithms", "folb,folb"], "should be different names: two are called folb"),
    "an option cut short": (["--seed", "1"], "unrecognized arguments: --seed 1"),
    "unknown model": (["--model", "logistics"], "model = 'logistics': did you mean 'logistic'?"),
    "unknown system": (["--system", "deadlin"], "did you mean 'deadline'?"),
    "unknown setting": (["--set", "serve=adam"], "set = 'serve': did you mean 'server'?"),
    "psi on one that has none": (
        ["--algorithms", "fedavg", "--set", "rule.psi=1"],
        "rule.psi = '1': is a setting of folb_hetero",
    ),
    "scoped psi": (["--set", "folb.rule.psi=1"], "rule.psi = '1': is a setting of folb_hetero"),
    "other system's setting": (["--set", "tau=3"], "tau = '3': is a setting of deadline"),
    "setting without value": (["--set", "mu"], "set = 'mu': should be KEY=VALUE"),
    "negative mu": (["--set", "local.mu=-1"], "local.mu = -1.0: should be at least 0"),
    "nan": (["--set", "local.lr=nan"], "local.lr = 'nan': should be a finite number"),
    "word for a number": (["--set", "local.batch=ten"], "local.batch = 'ten': should be a whole number"),
    "too large K": (
        ["--set", "folb.select.K=4", "--set", "select.replacement=false"],
        "select.K = 4: should be at most the 3 devices",
    ),
    "no rounds": (["--rounds", "0"], "rounds = 0: should be at least 1"),
    "rounds no number": (["--rounds", "x"], "invalid int value: 'x'"),
    "target too high": (["--target", "1.5"], "target = 1.5: should be more than 0 and at most 1"),
    "target zero": (["--target", "0"], "target = 0.0: should be more than 0"),
    "evaluation too rare": (["--evaluate-every", "9"], "evaluate_every = 9: should be at most rounds = 4"),
    "seeds twice": (["--seeds", "1,1"], "seeds = [1, 1]: should be different"),
    "dropout": (["--set", "dropout=2"], "dropout = 2.0: should be between 0 and 1"),
    "missing rule file": (["--algorithms", "nowhere.py:rule"], "there is no file nowhere.py"),
    "no seeds": (["--seeds", ""], "seeds = []: should be"),
    "too many seeds": (["--seeds", "8589934592"], "seeds = 8589934592: should be from 1 to"),
    "absurd K": (["--set", "folb.select.K=10000000"], "select.K = 10000000: should be a whole number from 1 to 10000"),
    "K of many digits": (
        ["--set", f"folb.select.K={'9' * 23}"],
        f"select.K = {'9' * 23}: should be a whole number from 1 to 10000",
    ),
    "a setting twice": (
        ["--set", "local.mu=1", "--set", "local.mu=2"],
        "set = 'local.mu=2': local.mu is given already",
    ),
    "a value twice": (["--set", "local.mu=0.1,0.10"], "local.mu = ['0.1', '0.10']: should be different values"),
    "absurd layer": (
        ["--model", "mlp", "--set", "first=1000000000"],
        "first = 1000000000: should be a whole number from",
    ),
    "numbers for codes": (["--model", "char_lstm"], "x = 'float32': should be whole numbers from 0 to 9"),
    "more devices than there are": (["--devices", "99"], "devices = 99: should be auto, or a number from 1 to"),
    "unknown objective": (["--objective", "mean"], "objective = 'mean': "),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    out_dir = tmp_path / "out"
    code, out, err = folb(capsys, "compare", *TINY, *arguments, "--out", out_dir)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1 and out == ""
    assert not out_dir.exists()


OWN = """
import folb
from folb import Model, models

class Unsaid(folb.Rule):
    def update(self, round):
        return folb.weighted(round, folb.rules.inner_products(round)[0])

class Unshaped(folb.Rule):
    def update(self, round):
        return folb.Update(round.delta, round.times)

class Failing(folb.Rule):
    def update(self, round):
        raise RuntimeError("no memory left")

unsaid = folb.Algorithm(rule=Unsaid())
unshaped = folb.Algorithm(rule=Unshaped())
failing = folb.Algorithm(rule=Failing())

def scalar(shape, classes):
    whole = models.logistic(shape, classes)
    return Model(whole.init, lambda params, x, y: whole.loss(params, x, y).mean(), whole.predict)

def nothing(shape, classes):
    return {}
"""


@pytest.mark.parametrize(
    "option, name, message",
    [
        ("--algorithms", "unsaid", "this rule needs the devices' gradients"),
        ("--algorithms", "unshaped", "should be an update of the shapes of the model"),
        ("--algorithms", "failing", "fails: RuntimeError: no memory left"),
        ("--algorithms", "absent", "has no 'absent'"),
        ("--model", "scalar", "shape of loss(...) for 81 samples = (): should be (81,)"),
        ("--model", "nothing", "nothing = {}: should make a folb.Model"),
    ],
)
def test_mistakes_in_own_files_are_named(option, name, message, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    code, _, err = folb(capsys, "compare", *TINY, option, f"{tmp_path / 'own.py'}:{name}", "--out", tmp_path / "out")
    assert code == 2 and message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


def test_nothing_of_the_users_is_taken_for_a_run(tmp_path, capsys):
    """Neither --out (with or without --again) nor rm touches files that folb did not write."""
    for name in ("experiment.toml", "curves.png", "lock", "environment.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").write_text("precious")
    before = sorted(path.name for path in tmp_path.iterdir())
    for again in ([], ["--again"]):
        code, _, err = folb(capsys, "compare", *TINY, "--algorithms", "fedavg", "--out", tmp_path, *again)
        assert code == 2 and "is not a run of folb; choose another directory" in err
    code, _, err = folb(capsys, "rm", tmp_path, "--yes")
    assert code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "checkpoints" / "mine").read_text() == "precious"


@pytest.mark.drawn
def test_divergence_is_shown_and_finishes(tmp_path, capsys):
    run = ["compare", *TINY, "--algorithms", "folb", "--set", "local.lr=1e30"]
    code, out, err = folb(capsys, *run, "--out", tmp_path / "out")
    assert code == 0 and "(2 of 2 diverged)" in out, err
    assert (tmp_path / "out" / "curves.png").exists()
    assert folb(capsys, "report", tmp_path / "out", "-o", tmp_path / "r.html", "--figures")[0] == 0
    assert (tmp_path / "out.svg").exists()


DAMAGE = {
    "environment.json": [b"{}", b"[]", b"", b"{"],
    "experiment.toml": [b"a = = b", b'rounds = "x"', b""],
    "rounds.jsonl": [b'{"run": 99, "round": 1}\n', b'{"run": "x"}\n', b"null\n", b""],
}


def test_a_damaged_run_is_named_and_hides_no_other(tmp_path, capsys):
    folb(capsys, "compare", *TINY, "--algorithms", "fedavg")
    folb(capsys, "compare", *TINY, "--algorithms", "fedavg", "--rounds", "3")
    one, other = sorted((tmp_path / "runs").iterdir())
    for name, contents in DAMAGE.items():
        sound = (one / name).read_bytes()
        for content in contents:
            (one / name).write_bytes(content)
            code, out, err = folb(capsys, "runs")
            assert code == 0 and other.name in out and one.name in out, (name, content, err)
            for command in ("show", "resume", "report"):
                where = ["-o", tmp_path / "r.html"] if command == "report" else []
                code, _, err = folb(capsys, command, one, *where)
                assert code in (0, 2) and "Traceback" not in err, (name, content, err)
        (one / name).write_bytes(sound)
    assert folb(capsys, "show", one)[0] == 0


@pytest.mark.drawn
def test_names_that_the_shell_or_toml_would_trip_over(tmp_path, capsys):
    arrays = {"x": np.eye(8), "y": np.arange(8) % 2, "device": np.arange(8) % 2}
    for name in ("-rf.npz", "数据.npz", "a\x7fb.npz", "<script>.npz", "x" * 200 + ".npz"):
        np.savez(tmp_path / name, **arrays)
        run = ["--algorithms", "fedavg", "--rounds", 1, "--seeds", 1]
        code, _, err = folb(capsys, "compare", tmp_path / name, *run)
        assert code == 0, err
    names = [path.name for path in (tmp_path / "runs").iterdir()]
    assert len(names) == 5 and not [name for name in names if name.startswith(("-", "."))]
    assert folb(capsys, "runs")[0] == 0 and all(folb(capsys, "show", name)[0] == 0 for name in names)


@pytest.mark.parametrize("where", [".", "", "/"])
def test_outputs_that_are_no_files(where, tmp_path, capsys):
    folb(capsys, "compare", *TINY, "--algorithms", "fedavg")
    (run,) = (tmp_path / "runs").iterdir()
    code, _, err = folb(capsys, "report", run, "-o", where)
    assert code == 2 and "should be a file to write to" in err and len(err.splitlines()) == 1


def test_what_lies_in_the_output_directory_stays(tmp_path, capsys):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "notes").write_text("precious")
    np.savez(tmp_path / "p$^^$[b].npz", x=np.eye(8), y=np.arange(8) % 2, device=np.arange(8) % 2)
    run = ["--algorithms", "fedavg", "--rounds", 1, "--seeds", 1, "--out", tmp_path]
    code, out, err = folb(capsys, "compare", tmp_path / "p$^^$[b].npz", *run)
    assert code == 0, err
    assert "p$^^$[b].npz" in out
    assert (tmp_path / "unfinished" / "notes").read_text() == "precious"
    assert tomllib.loads((tmp_path / "experiment.toml").read_text())["dataset"].endswith("p$^^$[b].npz")


def test_the_same_experiment_is_not_run_twice(capsys, tmp_path):
    once = ["compare", *TINY, "--algorithms", "fedavg"]
    code, out, err = folb(capsys, *once)
    assert code == 0 and "finished already" not in err
    code, again, err = folb(capsys, *once, "--set", "local.lr=0.01")  # as it is by default
    assert code == 0 and "is finished already; --again runs it from the start" in err and again == out
    (run,) = (tmp_path / "runs").iterdir()
    before = (run / "rounds.jsonl").stat().st_mtime_ns, (run / "results.json").read_bytes()
    code, again, err = folb(capsys, *once, "--again")
    assert code == 0 and "finished already" not in err and again == out
    assert (run / "rounds.jsonl").stat().st_mtime_ns != before[0] and (run / "results.json").read_bytes() == before[1]
    code, out, err = folb(capsys, "compare", *TINY, "--algorithms", "folb", "--out", run)
    assert code == 2 and "holds the run of another experiment; --again replaces it" in err


def test_runs_are_listed_shown_and_removed(capsys, tmp_path):
    assert "no runs in" in folb(capsys, "runs")[1]
    folb(capsys, "compare", *TINY, "--algorithms", "fedavg")
    (run,) = (tmp_path / "runs").iterdir()
    code, out, _ = folb(capsys, "runs")
    assert code == 0 and run.name in out and "finished" in out and "8 of 8" in out and "fedavg" in out
    code, out, _ = folb(capsys, "show", run.name[:15])
    assert code == 0 and "rounds to 70 %" in out and "[set.fedavg]" in out
    (run / "notes").write_text("mine")
    code, out, _ = folb(capsys, "rm", run.name, "--yes")
    assert code == 0 and f"removed {run}" in out and os.listdir(run) == ["notes"]
    code, _, err = folb(capsys, "show", run.name)
    assert code == 2 and "is not a run" in err


def test_changed_files_are_not_gone_on_with(capsys, tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.eye(8), y=np.arange(8) % 2, device=np.arange(8) % 2)
    run = ["--algorithms", "fedavg", "--rounds", 1, "--seeds", 1, "--out", tmp_path / "out"]
    assert folb(capsys, "compare", tmp_path / "mine.npz", *run)[0] == 0
    (tmp_path / "out" / "results.json").unlink()
    np.savez(tmp_path / "mine.npz", x=np.eye(8), y=np.arange(8) // 4, device=np.arange(8) % 2)
    code, _, err = folb(capsys, "resume", tmp_path / "out")
    assert code == 2 and "files have changed" in err


def test_unknown_dataset_and_command(capsys):
    code, _, err = folb(capsys, "compare", "synthetc")
    assert code == 2 and "did you mean 'synthetic'?" in err
    code, _, err = folb(capsys, "comapre", "synthetic")
    assert code == 2 and "'comapre'" in err and len(err.splitlines()) == 1


def test_unwritable_output_directory(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    code, _, err = folb(capsys, "compare", *TINY, "--out", tmp_path / "file")
    assert code == 2 and "should be a directory to write to" in err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "content, message",
    [
        ("dataset = ", "cannot be read"),
        ("rounds = 3\n", "dataset = None: should name a dataset"),
        ('dataset = "synthetic_1_1"\nround = 3', "key = 'round': did you mean 'rounds'?"),
        ('dataset = "synthetic_1_1"\nrounds = "many"', "rounds = 'many': should be a whole number"),
        ('dataset = "synthetic_1_1"\nalgorithms = "folb"', "algorithms = 'folb': should be a list"),
        ('dataset = "synthetic_1_1"\nseeds = "1"', "seeds = '1': should be a number of seeds"),
        ('dataset = "synthetic_1_1"\nset = 3', "set = 3: should be a table"),
        ("dataset = 3", "dataset = 3: should be a name"),
        ('dataset = "synthetic_1_1"\nrounds = inf', "rounds = inf: should be a whole number"),
        ('dataset = "synthetic_1_1"\nalgorithms = [1]', "algorithms = [1]: should be names"),
        ('dataset = "synthetic_1_1"\n[set]\nsizes = []', "sizes = []: should be at least one"),
        ('dataset = "synthetic_1_1"\ntarget = true', "target = True: should be a finite number"),
        ('dataset = "synthetic_1_1"\n[set]\n"local.mu" = []', "local.mu = []: should be at least one value"),
    ],
)
def test_bad_experiment_file(content, message, tmp_path, capsys):
    (tmp_path / "e.toml").write_text(content)
    code, _, err = folb(capsys, "run", tmp_path / "e.toml")
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compar", "x"], "argument COMMAND: did you mean 'compare'? invalid choice: 'compar' (choose from "),
        (["data", "lst"], "argument ACTION: did you mean 'list'? invalid choice: 'lst'"),
        (["new", "flowr", "x"], "argument kind: did you mean 'flower'?"),
        (
            ["compare", "x", "--round", "3"],
            "did you mean '--rounds'? unrecognized arguments: --round 3 (see folb compare ",
        ),
        (["compare", "x", "--seed=1"], "did you mean '--seeds'? unrecognized arguments: --seed=1"),
        (["data", "list", "--jsn"], "did you mean '--json'? unrecognized arguments: --jsn (see folb data list --help)"),
        (["runs", "3"], "unrecognized arguments: 3 (see folb runs --help)"),
        (["xyz"], "argument COMMAND: invalid choice: 'xyz'"),
    ],
)
def test_a_mistyped_command_or_option_has_a_suggestion(words, message, capsys):
    code, _, err = folb(capsys, *words)
    assert code == 2 and err.startswith(f"folb: error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(("name", "here"), OTHERS_SAY.items())
def test_what_others_call_a_setting(name, here, capsys):
    code, _, err = folb(capsys, "compare", "synthetic_1_1", "--set", f"{name}=1")
    assert (code, err) == (2, f"folb: error: set = '{name}': folb calls this {here}\n")


def test_the_local_epochs_of_others_are_settings_here(capsys, tmp_path):
    words = ["compare", *TINY, "--algorithms", "fedavg", "--out", tmp_path / "run"]
    assert OTHERS_SAY["epochs"] == "local.epochs"
    assert folb(capsys, *words, "--set", "local.epochs=2")[0] == 0


@pytest.mark.slow
def test_more_draws_than_devices_are_said_once(tmp_path, caplog, capsys):
    words = [
        "compare",
        *TINY[:3],
        "--set",
        "select.K=2,3,6",
        "--rounds",
        "1",
        "--seeds",
        "2",
        "--out",
        tmp_path / "run",
    ]
    assert folb(capsys, *words)[0] == 0
    note = "K = 6 draws with replacement from 3 devices: a round counts each 2 times on average"
    assert [record.getMessage() for record in caplog.records if "draws" in record.getMessage()] == [note]
    caplog.clear()  # of 6 devices that are asked, the first 3 count
    assert (
        folb(capsys, *words[:4], "--set", "select.K=3", "--set", "select.over_selection=2", *words[6:], "--again")[0]
        == 0
    )
    assert "draws" not in caplog.text
    code, _, err = folb(capsys, *words, "--set", "select.replacement=false")
    assert code == 2 and "K = 6: should be at most the 3 devices: a round draws each device at most once" in err


def test_missing_experiment_file(tmp_path, capsys):
    code, _, err = folb(capsys, "run", tmp_path / "none.toml")
    assert code == 2 and "cannot be read" in err


def test_help_takes_under_half_a_cpu_second():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "folb", "--help"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("command", [["list"], ["completion", "bash"], ["runs", "--json"]])
def test_a_reader_that_has_gone_is_no_error(command):
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does when it has seen enough
    done = subprocess.run([sys.executable, "-m", "folb", *command], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_end_of_a_command_is_not_cut_short():
    """A process ends at once, but only after what was registered for its end, and with all of its output."""
    code = """
import atexit
from folb.cli import main
begin = main.open_closed_streams
main.open_closed_streams = lambda: (begin(), atexit.register(print, "last words"))
raise SystemExit(main.main())
"""
    done = subprocess.run([sys.executable, "-c", code, "list", "systems"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "deadline" in done.stdout and done.stdout.endswith("last words\n")
    wrong = subprocess.run([sys.executable, "-c", code, "list", "nothing"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("folb: error: list = 'nothing'")


@pytest.mark.parametrize("words", [[], ["--help"], ["table1", "--quick"], ["--only", "mnist-*", "--json"]])
@pytest.mark.parametrize("study", ["arena", "defend", "reproduce"])
def test_a_study_that_is_not_installed_says_how_to_install_it(study, words, monkeypatch, capsys):
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    code, out, error = folb(capsys, study, *words)
    assert (code, out) == (2, "") and error.count("\n") == 1
    assert f"command = '{study}': is one of the studies, which are not installed: pip install ./studies" in error
    code, out, _ = folb(capsys, "--help")
    assert code == 0 and "repeat the paper's figures and tables (pip install ./studies" in " ".join(out.split())


CTRL_C = """
import atexit, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {moment!r}:
            exec("signal.raise_signal(signal.SIGINT)")  # an interrupt within exec, as of a dataclass, is remembered
        elif (name, {moment!r}) == ("numpy", "the end"):
            atexit.register(signal.raise_signal, signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("moment", ["argparse", "folb.cli.main", "folb.cli.datasets", "numpy", "rich", "the end"])
def test_ctrl_c_at_any_moment_is_one_line(moment, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(CTRL_C.format(moment=moment))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "folb", "data", "info", "synthetic_1_1"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert (done.returncode, done.stderr) == (130, "folb: interrupted\n")
