"""model.npz: in a new process it predicts what the run reported; what is wrong with it is said in one line."""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import folb
from folb import InputError, data, models
from folb.cli import running
from folb.cli.main import main
from folb.experiments import execute
from folb.flower.protocol import flat
from folb.store import directory

pytestmark = pytest.mark.usefixtures("undrawn")

OWN = """
import jax, jax.numpy as jnp
from folb.models import classifier

def tanh(shape, classes, *, width: int = 3):
    def init(key):
        keys = jax.random.split(key)
        last = jax.random.normal(keys[1], (width, classes))
        return {"in": jax.random.normal(keys[0], (*shape, width)), "out": [last]}
    return classifier(init, lambda params, x: jnp.tanh(x @ params["in"]) @ params["out"][0])
"""
FIELDS = {
    "dataset": "synthetic_1_1",
    "algorithms": ["folb", "fedavg"],
    "rounds": 6,
    "seeds": [3, 5],
    "set": {"sizes": [200, 300, 250], "select.K": 2, "local.lr": 0.1, "average": ["none", "ema"]},
}
# what a user would write, and which packages it loads
FRESH = """
import json, sys
import folb
import numpy as np
x, y, chosen = np.load(sys.argv[2]), np.load(sys.argv[3]), json.loads(sys.argv[4])
for algorithm, seed in chosen:
    model = folb.load_model(sys.argv[1], algorithm=algorithm, seed=seed)
    print(f"{(model.predict(x) == y).mean():.6f}", np.array_equal(model.scores(x).argmax(1), model.predict(x)))
print(*(name for name in ("simulation", "data", "report", "cli") if f"folb.{name}" in sys.modules))
"""


@pytest.fixture(scope="module")
def federation():
    return data.load("synthetic_1_1", sizes=[200, 300, 250])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two algorithms, with and without an average, and two seeds; its model is of a user's own file."""
    home = tmp_path_factory.mktemp("kept")
    (home / "own.py").write_text(OWN)
    fields = FIELDS | {"model": f"{home / 'own.py'}:tanh", "set": FIELDS["set"] | {"width": 4}}
    return folb.execute(fields, directory=home / "run").path


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def predicted(path, federation, tmp_path):
    """The accuracies that a new process finds with the models of a run, and those that the run reported."""
    np.save(tmp_path / "x.npy", federation.test.x)
    np.save(tmp_path / "y.npy", federation.test.y)
    runs = directory.read(path).environment["runs"]
    chosen = json.dumps([(run["algorithm"], run["seed"]) for run in runs])
    files = [path, tmp_path / "x.npy", tmp_path / "y.npy"]
    done = subprocess.run([sys.executable, "-c", FRESH, *map(str, files), chosen], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, loaded = done.stdout.split("\n")[:-1]
    assert loaded == "", "neither the simulator nor the datasets are loaded"
    return lines, [f"{run['final']:.6f} True" for run in json.loads((path / "results.json").read_text())["runs"]]


@pytest.mark.slow
def test_a_new_process_predicts_what_the_run_reported(whole, federation, tmp_path):
    ours, reported = predicted(whole, federation, tmp_path)
    assert ours == reported and len(ours) == 8 and len(set(ours)) > 2


def test_the_average_is_kept_and_not_the_server_s_model(whole):
    plain, averaged = (
        folb.load_model(whole, algorithm=f"fedavg average={kind}", seed=3).params["in"] for kind in ("none", "ema")
    )
    assert np.abs(plain - averaged).max() > 1e-4


def test_it_is_what_results_json_has_a_hash_of(whole):
    """The bits are those of the model that the run ended with."""
    from folb.results.document import _digest

    digests = [run["model_sha256"] for run in json.loads((whole / "results.json").read_text())["runs"]]
    runs = directory.read(whole).environment["runs"]
    loaded = [folb.load_model(whole, algorithm=run["algorithm"], seed=run["seed"]).params for run in runs]
    assert [_digest(params) for params in loaded] == digests


def test_a_model_of_folb_s_own(federation):
    stored = folb.execute(
        FIELDS | {"algorithms": ["fedavg"], "seeds": 1, "model": "mlp", "set": {"first": 4, "select.K": 2}}
    )
    model = folb.load_model(stored)
    assert (model.algorithm, model.seed, model.classes) == ("fedavg", 0, range(10))
    assert model.params["first"]["weight"].shape == (60, 4)
    assert model.predict(federation.test.x[:0]).shape == (0,) and model.predict(federation.test.x[:1]).shape == (1,)
    many = np.tile(federation.test.x, (40, 1))[:1000]  # more than a block, and a last one that is not full
    assert np.array_equal(model.predict(many)[: len(federation.test.x)], model.predict(federation.test.x))
    assert repr(model) == "KeptModel(mlp, fedavg, seed 0: samples of shape (60,), 10 classes)"
    assert folb.load_model(stored.path / "model.npz").seed == 0  # the file alone is enough


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 3)), r"shape of x = \(2, 3\): should be samples first, each of shape \(60,\)"),
        (np.float32(3), r"shape of x = \(\)"),
        (np.full((2, 60), "a"), "x = '<U1': should be numbers"),
        ([[1.0], [2.0, 3.0]], "x = .*: should be an array with rows of equal length"),
    ],
)
def test_samples_that_do_not_fit(whole, x, message):
    model = folb.load_model(whole, algorithm="folb average=ema", seed=3)
    for use in (model.predict, model.scores):
        with pytest.raises(InputError, match=message):
            use(x)


def test_codes_and_models_without_scores():
    text = models.char_lstm((5,), 7, units=2)
    sound = folb.experiments.kept_model.KeptModel(
        text.init(folb_key()), text, "char_lstm", "folb", 0, (5,), tuple("abcdefg")
    )
    assert sound.predict(np.full((2, 5), 6)).shape == (2,)
    for x in (np.full((2, 5), 7), np.zeros((2, 5))):
        with pytest.raises(InputError, match="should be whole numbers from 0 to 6"):
            sound.predict(x)
    no_scores = folb.experiments.kept_model.KeptModel({}, text._replace(scores=None), "mine", "folb", 0, (5,), (0, 1))
    with pytest.raises(InputError, match="model = 'mine': has no scores: call predict"):
        no_scores.scores(np.zeros((1, 5), int))


def folb_key():
    import jax

    return jax.random.key(0)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({}, "algorithm = None: should be one of: folb average=none; folb average=ema; fedavg average=none"),
        ({"algorithm": "folb"}, "algorithm = 'folb': should be one of: folb average=none; folb average=ema$"),
        ({"algorithm": "accord"}, "algorithm = 'accord': should be one of: folb average=none; .*; fedavg average=ema"),
        ({"algorithm": "folb average=ema"}, "seed = None: should be one of 3, 5"),
        ({"algorithm": "folb average=ema", "seed": 4}, "seed = 4: should be one of 3, 5"),
    ],
)
def test_it_says_what_there_is_to_choose_from(whole, chosen, message):
    with pytest.raises(InputError, match=message):
        folb.load_model(whole, **chosen)


def test_an_own_file_that_is_gone_or_changed(whole, federation):
    chosen = {"algorithm": "folb average=ema", "seed": 3}
    file, text = whole.parent / "own.py", OWN
    sound = folb.load_model(whole, **chosen).predict(federation.test.x)
    try:
        file.write_text(text.replace("tanh(x", "sin(x"))
        with pytest.raises(InputError, match=r"own.py:tanh'?: has changed since the run; restore the file"):
            folb.load_model(whole, **chosen)
        file.unlink()
        with pytest.raises(
            InputError, match=r"there is no file .*own.py any more; .* load_model\(\.\.\., model=\.\.\.\)"
        ):
            folb.load_model(whole, **chosen)
        space = {}
        exec(text, space)
        given = folb.load_model(whole, **chosen, model=space["tanh"]((60,), 10, width=4))
        assert np.array_equal(given.predict(federation.test.x), sound)
        with pytest.raises(InputError, match=r"0/in|in = 'float32 of shape \(60, 4\)': should be float32 of shape"):
            folb.load_model(whole, **chosen, model=space["tanh"]((60,), 10, width=5))
    finally:
        file.write_text(text)


# what is not a model


def rewritten(path, **changes):
    """The model file with other arrays, or without those that are None."""
    with np.load(path / "model.npz") as sound:
        arrays = dict(sound) | changes
    np.savez(path / "model.npz", **{name: value for name, value in arrays.items() if value is not None})


def about(path, **changes):
    with np.load(path / "model.npz") as sound:
        return np.array(json.dumps(json.loads(str(sound["about"])) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0/in": np.zeros((60, 9), np.float32)}, r"0/in = 'float32 of shape \(60, 9\)': should be float32 of shape"),
        ({"0/in": np.zeros((60, 4))}, r"0/in = 'float64 of shape \(60, 4\)': should be float32"),
        ({"0/in": None}, "0/in = None: is missing"),
        ({"0/in": np.array([{}])}, "should be an undamaged .npz, its arrays without Python objects"),
        ({"about": None}, "about'?: is missing: it is not a model file of"),
        ({"about": np.array("{")}, "about = .*: should be JSON"),
        ({"about": np.array("[" * 100_000)}, "about = .*: should be JSON"),
        ({"about": np.array("[]")}, "should be a table with a list of runs"),
        ({"about": np.array([{}])}, "without Python objects"),
    ],
)
def test_a_file_that_is_not_what_folb_wrote(copy, changes, message):
    rewritten(copy, **changes)
    with pytest.raises(InputError, match=message):
        folb.load_model(copy, algorithm="folb average=none", seed=3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", "logistik", "did you mean 'logistic'"),
        ("model", 3, "model = 3: should be a text"),
        ("shape", [60, -1], "shape = .*: should be a list of at most 8 whole numbers of at least 1"),
        ("shape", [2**31] * 3, "shape = "),
        ("shape", [1] * 9, "at most 8"),
        ("classes", 2**40, "classes = "),
        ("classes", 10**9, "should be float32 of shape"),
        ("class_names", ["a"], "class_names = 1: should be 10 names"),
        ("class_names", "abcdefghij", "class_names = "),
        ("settings", {"width": "wide"}, "width = 'wide': should be a whole number"),
        ("settings", [], "settings = "),
        ("runs", [3], r"runs\[0\] = 3: should be a table"),
        ("runs", [{"algorithm": "folb", "name": "folb", "seed": -1}], r"runs\[0\].seed = -1"),
        ("runs", [], "algorithm = "),
    ],
)
def test_an_about_that_is_not_what_folb_wrote(copy, field, value, message):
    rewritten(copy, about=about(copy, **{field: value}))
    with pytest.raises(InputError, match=message) as error:
        folb.load_model(copy, algorithm="folb average=none", seed=3)
    assert "\n" not in str(error.value)


def test_a_cut_file_and_one_that_unpacks_to_much(copy, monkeypatch):
    content = (copy / "model.npz").read_bytes()
    (copy / "model.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"should be an undamaged .npz"):
        folb.load_model(copy)
    monkeypatch.setattr(folb.npz, "UNPACKED", 1000)
    np.savez_compressed(copy / "model.npz", about=np.zeros(10**6))
    with pytest.raises(InputError, match=r"should be at most .* when unpacked"):
        folb.load_model(copy)


def test_there_is_none(copy, tmp_path):
    (copy / "model.npz").unlink()
    with pytest.raises(
        InputError, match=r"has no model.npz: `folb compare --again` saves it, without --no-model; the studies"
    ):
        folb.load_model(copy)
    (copy / "results.json").unlink()
    with pytest.raises(InputError, match="is interrupted: its model is saved when it finishes"):
        folb.load_model(str(copy))
    with pytest.raises(InputError, match=r"should be a readable .npz file"):
        folb.load_model(tmp_path / "no.npz")
    with pytest.raises(InputError, match="there is no such run"):
        folb.load_model("nothing")


# whether it is kept

TINY = [
    "synthetic_1_1",
    "--algorithms",
    "fedavg",
    "--rounds",
    "2",
    "--seeds",
    "1",
    "--set",
    "sizes=20,30",
    "--set",
    "select.K=2",
]


def test_no_model_is_for_good(tmp_path, capsys, monkeypatch):
    """A run that began without its model is resumed without it."""
    out = ["--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(execute, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert main(["compare", *TINY, "--no-model", *out]) == 130
    assert main(["resume", out[1]]) == 0
    assert not (tmp_path / "run" / "model.npz").exists() and (tmp_path / "run" / "results.json").exists()
    assert "model.npz" not in capsys.readouterr().out
    assert main(["compare", *TINY, "--again", *out]) == 0
    assert "model.npz" in capsys.readouterr().out and folb.load_model(out[1]).algorithm == "fedavg"
    assert main(["compare", *TINY, "--again", "--no-model", *out]) == 0
    assert not (tmp_path / "run" / "model.npz").exists()
    with monkeypatch.context() as patch:  # or once it was resumed without it
        patch.setattr(execute, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert main(["compare", *TINY, "--again", *out]) == 130
        assert main(["resume", out[1], "--no-model"]) == 130
    assert main(["resume", out[1]]) == 0 and not (tmp_path / "run" / "model.npz").exists()


def test_the_arrays_of_a_flower_app(tmp_path, federation):
    """They have no description, so the model is given."""
    model = models.mlp(federation.shape, federation.classes, first=3, second=2)
    params = model.init(jax.random.key(1))
    np.savez(tmp_path / "model.npz", **flat(params))
    kept = folb.load_model(tmp_path / "model.npz", model=model)
    assert np.array_equal(kept.predict(federation.test.x), model.predict(params, federation.test.x))
    assert repr(kept) == "KeptModel(Model(mlp): arrays alone)" and kept.shape is None
    with pytest.raises(InputError, match=r"shape of x = \(2, 7\): should be samples that the model takes"):
        kept.predict(np.zeros((2, 7), np.float32))
    with pytest.raises(InputError, match=r"about.*is missing.*give the model"):
        folb.load_model(tmp_path / "model.npz")
    with pytest.raises(InputError, match=r"bias"):
        folb.load_model(tmp_path / "model.npz", model=models.logistic(federation.shape, federation.classes))


def test_a_large_one_is_announced(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(running, "LARGE", 2000)
    assert main(["compare", *TINY, "--out", str(tmp_path / "run")]) == 0
    assert "run/model.npz will take 0 MB; --no-model leaves it out\n" in capsys.readouterr().err  # 610 numbers
    assert main(["compare", *TINY, "--no-model", "--out", str(tmp_path / "other")]) == 0
    assert "will take" not in capsys.readouterr().err


def test_a_type_that_npz_has_no_name_for(tmp_path):
    from folb.store import run_arrays

    model = {"w": np.asarray(jnp.arange(4, dtype=jnp.bfloat16)), "deep": [np.arange(3), {"x": np.float32(2)}]}
    run_arrays.save_models(tmp_path / "model.npz", {}, [model, model])
    found = run_arrays.read_model(tmp_path / "model.npz", 1, model)
    assert found["w"].dtype == jnp.bfloat16 and np.array_equal(found["w"], model["w"]) and found["deep"][1]["x"] == 2


COLLIDING = """
import jax, jax.numpy as jnp
from folb.models import classifier

def colliding(shape, classes):
    def init(key):
        return {"a.b": jnp.zeros((*shape, classes)), "a": {"b": jnp.zeros(classes)}}
    return classifier(init, lambda params, x: x @ params["a.b"] + params["a"]["b"])
"""


def test_names_that_collide_are_refused_before_a_round(tmp_path):
    (tmp_path / "own.py").write_text(COLLIDING)
    fields = FIELDS | {"model": f"{tmp_path / 'own.py'}:colliding"}
    with pytest.raises(InputError, match=r"model: names .* should still differ"):
        folb.execute(fields, directory=tmp_path / "run")
    assert not (tmp_path / "run" / "rounds.jsonl").exists()
