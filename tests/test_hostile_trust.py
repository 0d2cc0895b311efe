"""Generated settings and files for robust rules and attacks: each is rejected alone, with one line."""

import math
from random import Random

import pytest
from test_hostile import HURTS

from folb import algorithms
from folb.cli.main import main
from folb.core.liars import ATTACKS
from folb.core.robust import ROBUST
from folb.errors import InputError
from folb.experiments.experiment import from_toml
from folb.experiments.plan import plan

NAMES = ["fedavg", "folb", "accord", "scaffold", "fedprox"]
# None means the default, and an empty mapping sets nothing
WRONG = [value for value in HURTS if value is not None and not (isinstance(value, dict) and not value)]
BEYOND = {  # numbers that no such setting can have
    "robust.liars": [-1e-9, 0.5, 0.75, 1, 2],
    "attack.share": [-1e-9, 1.0001, 2, 100],
    "robust.bucket": [0, 0.5, 1.5, 10**5],
    "robust.root": [0, 2.5, 10**7],
}
NEARLY = [
    "",
    " ",
    "None",
    "mediam",
    "Krum",
    "median ",
    "trimmed-mean",
    "norm_bound\n",
    "alie\0",
    "ALIE",
    "fltrust,krum",
]


def rejected(seed, attempt, *given):
    """What an attempt raises: an `InputError` of one printable line."""
    with pytest.raises(InputError) as error:
        attempt(Random(seed), *given)
    text = str(error.value)
    assert text.isprintable() and len(text) <= 2000, seed
    return text


def hostile_setting(random):
    """One setting is wrong, among others that are right."""
    name = random.choice(NAMES)
    right = {"robust": random.choice(sorted(ROBUST.parts)), "attack": random.choice(sorted(ATTACKS.parts))}
    setting = random.choice(["robust", "attack", *BEYOND])
    if setting in right:
        right[setting] = random.choice([*WRONG, *NEARLY])
    elif setting == "robust.root":
        right["robust"] = random.choice(["fltrust", "median"])
        right[setting] = random.choice([*WRONG, *BEYOND[setting]]) if right["robust"] == "fltrust" else 10
    else:
        needs = "attack" if setting == "attack.share" else "robust"
        if random.random() < 0.2:  # right, but for nothing
            del right[needs]
            right[setting] = 0.25 if setting != "robust.bucket" else 2
        else:
            right[setting] = random.choice([*WRONG, *BEYOND[setting]])
    getattr(algorithms, name)(**right)


def test_a_thousand_settings_are_rejected_alone():
    texts = [rejected(seed, hostile_setting) for seed in range(1000)]
    for setting in ("robust", "attack", *BEYOND):
        assert sum(text.startswith(f"{setting} = ") for text in texts) > 50, setting


def test_the_settings_that_are_right_are_taken():
    for centre in ROBUST.parts:
        for attack in ("alie", "backdoor"):
            algorithms.fedavg(
                select={"K": 20},
                robust={"name": centre, "liars": 0.1, "bucket": 2},
                attack={"name": attack, "share": 0.4},
            )


VALUES = ["nan", "-inf", "-1", "9" * 30, "true", "[[1]]", "'x'", "[]", "{a = {b = 1}}", "'\\u001b'", "1979-05-27", "''"]
OF_RULES = ["robust", "attack", *BEYOND]


def hostile_experiment(random, folder):
    """An experiment file with a setting of rules or attacks that is wrong, alone or in a sweep."""
    key, value = random.choice(OF_RULES), random.choice(VALUES)
    if random.random() < 0.3:
        value = f"[{value}, {random.choice(VALUES)}]"
    others = {"robust": "'fltrust'", "attack": "'alie'"} | {key: value}
    where = random.choice(["set", "set.fedavg"])
    lines = ["dataset = 'synthetic_1_1'", "algorithms = ['fedavg']", f"[{where}]"]
    lines += [f"'{name}' = {text}" for name, text in others.items()]
    path = folder / "e.toml"
    path.write_text("\n".join([*lines, "[set.synthetic_1_1]", "sizes = [20, 30]"]))
    plan(from_toml(path))


def test_hundreds_of_experiments_are_rejected_alone(tmp_path):
    for seed in range(334):
        rejected(seed, hostile_experiment, tmp_path)


def test_files_of_samples_for_an_attack_are_rejected_with_a_line(tmp_path, capsys):
    """`folb attack` reads them as every command does: tests/test_hostile.py has a thousand of them."""
    random = Random(5)
    for number in range(20):
        path = tmp_path / "file.csv"
        path.write_bytes(b"device,label,a\n0,0,1\n0,1,2\n" + random.randbytes(random.randint(1, 40)) + b",\xff\n")
        assert main(["attack", str(path), "--attackers", str(random.choice([0.2, math.inf]))]) == 2, number
        error = capsys.readouterr().err
        assert error.startswith("folb: error: ") and error.count("\n") == 1
