"""Generated files of datasets and of stored results: each is rejected alone, with one line."""

import gzip

import pytest
from test_defence import KRUM, MEAN, TINY
from test_hostile_trust import VALUES, rejected

from folb_studies.defence import battles, opponents
from folb_studies.defence.opponents import Battle
from folb_studies.results import FILE, Results


def hostile_datasets(random, folder):
    """A file of the defence's datasets with wrong values, or with other tables."""
    fine = {
        "name": "'t'",
        "title": "'T'",
        "dataset": "'synthetic_1_1'",
        "rounds": "2",
        "seeds": "[0]",
        "shares": "[20]",
    }
    others, wholes = VALUES[:5], ["nan", "1.5", "true", "'x'", "[]"]
    wrong = {
        "title": others,
        "dataset": others,
        "name": [*others, "'x y'", "'../x'", "''", "'\\u001b'"],
        "rounds": wholes,
        "evaluate_every": wholes,
        "seeds": VALUES[:6],
        "attacks": VALUES[:6],
        "shares": ["[0]", "[-1]", "[50]", "[20, 20]", "[2.5]", *VALUES[:6]],
        "set": [one for one in VALUES if not one.startswith("{")],
        "goal": [one for one in VALUES if one != "true"],
        "more": VALUES,
    }
    key = random.choice(sorted(wrong))
    lines = [f"{name} = {text}" for name, text in (fine | {key: random.choice(wrong[key])}).items()]
    random.shuffle(lines)
    path = folder / "d.toml"
    head = "[[dataset]]" if random.random() < 0.8 else random.choice(["[dataset]", "[[datasets]]", "", "[[dataset"])
    path.write_text("\n".join([head, *lines]))
    opponents.datasets(path)


def hostile_results(random, folder):
    """Stored results, cut, with other bytes, or with a part of another kind."""
    battle = Battle(TINY, random.choice([MEAN, KRUM]), random.choice([0, 20]))
    one = {"settled": [0.5, 0.5], "backdoor": [0.0, 0.0], "weight": 0.1}
    found = {"identity": battle.identity, "seeds": [0, 1], "attacks": {"honest": one, "alie": dict(one)}}
    bad = random.choice([None, 3, "x", [], [1], [0.1] * 9])
    key = random.choice(["identity", "seeds", "attacks", "settled", "backdoor", "cut", "noise"])
    if key in one:
        found["attacks"]["alie"][key] = bad
    elif key == "identity":
        found[key] = random.choice([None, "", 0, []])
    elif key in found:
        found[key] = bad if key == "seeds" or bad != [] else 1
    path = folder / FILE
    path.unlink(missing_ok=True)
    Results(path).keep(battle.name, found)
    content = bytearray(path.read_bytes())
    if key == "cut":
        del content[random.randrange(len(content)) :]
        path.write_bytes(content)
    elif key == "noise":
        lines = bytearray(gzip.decompress(content))
        lines[random.randrange(len(lines))] = random.choice(b"\0\xff\x1b{")
        path.write_bytes(gzip.compress(lines + random.choice([b"\0", b"\xff", b"{", b","])))
    battles.stored(Results(path), battle)


@pytest.mark.parametrize("attempt", [hostile_datasets, hostile_results])
def test_hundreds_of_files_are_rejected_alone(attempt, tmp_path):
    for seed in range(334):
        rejected(seed, attempt, tmp_path)
