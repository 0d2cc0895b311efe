"""The report page as text: its numbers are the run's, nothing in it can become code, and its size is bounded."""

import base64
import hashlib
import json
import re
import shutil
from statistics import mean, median

import numpy as np
import pytest
import rundirectory

from folb.cli import tables
from folb.experiments.holdings import holdings
from folb.report import page, payload
from folb.report.together import labels
from folb.store import directory

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 <img src=x onerror=alert(1)> &amp; {{script}}"


@pytest.fixture
def stored(tmp_path):
    return directory.read(rundirectory.write(tmp_path))


def lines(stored):
    return [json.loads(line) for line in (stored.path / "rounds.jsonl").read_text().splitlines()]


def embedded(html):
    return json.loads(re.search(r'<script type="application/json" id="view">(.*?)</script>', html, re.DOTALL)[1])


def test_table_is_that_of_folb_show_with_bytes_and_seconds_to_target(stored):
    (experiment,) = payload.view([stored])["experiments"]
    headings, rows = experiment["table"]["headings"], experiment["table"]["rows"]
    shown = tables.results(stored.runs(), 0.7)
    assert headings[3:5] == ["MB to 70 %", "s to 70 %"]
    for column in shown.columns:
        assert [row[headings.index(column.header)] for row in rows] == list(column.cells)

    for label, _, _, megabytes, seconds, final, *_ in rows:
        own = [[line for line in lines(stored) if (line["algorithm"], line["seed"]) == (label, n)] for n in range(3)]
        until = [next((t for t, line in enumerate(run, 1) if line["test_accuracy"] >= 0.7), None) for run in own]
        past = [run[:t] for run, t in zip(own, until, strict=True) if t]
        if len(past) == 3:
            assert megabytes == f"{median(sum(r['bytes_up'] + r['bytes_down'] for r in run) for run in past) / 1e6:.2f}"
            assert seconds == f"{median(sum(r['seconds'] for r in run) for run in past):.0f}"
        assert final.startswith(f"{100 * mean(run[-1]['test_accuracy'] for run in own):.1f} ± ")
    assert rows[1][0] == "fedprox" and "never" not in rows[1][2]


def test_a_target_that_some_seeds_never_reach(tmp_path):
    path = rundirectory.write(tmp_path, algorithms=("folb",), seeds=3, rounds=5, records=False)
    text = (path / "rounds.jsonl").read_text().splitlines()
    accuracy = {0: [0.1, 0.8, 0.1, 0.1, 0.1], 1: [0.1, 0.2, 0.3, 0.4, 0.5], 2: [0.1, 0.1, 0.1, 0.9, 0.1]}
    changed = [json.loads(line) for line in text]
    for line in changed:
        line["test_accuracy"], line["seconds"] = accuracy[line["seed"]][line["round"] - 1], 2.0
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    (row,) = payload.view([directory.read(path)])["experiments"][0]["table"]["rows"]
    assert [*row[:2], *row[3:5]] == ["folb", "4 (2 to never)", "0.29 (1 of 3 never)", "8 (1 of 3 never)"]


def test_columns_are_the_rounds(stored):
    (experiment,) = payload.view([stored])["experiments"]
    for i, column in enumerate(experiment["columns"]):
        own = [line for line in lines(stored) if line["run"] == i]
        assert column["rounds"] == list(range(1, 41)) and column["evaluated"] == list(range(40))
        assert column["bytes"] == [line["bytes_up"] + line["bytes_down"] for line in own]
        assert column["seconds"] == [line["seconds"] for line in own]
        np.testing.assert_allclose(column["judged"], [line["test_accuracy"] for line in own], rtol=1e-6)


def test_records_are_the_rounds_devices(stored):
    (experiment,) = payload.view([stored])["experiments"]

    def unpack(text, kind):
        return np.frombuffer(base64.b64decode(text), kind)

    for i, column in enumerate(experiment["columns"]):
        own = [line for line in lines(stored) if line["run"] == i]
        packed = column["records"]
        assert unpack(packed["counts"], "<u4").tolist() == [10] * 40
        assert unpack(packed["devices"], "<u4").tolist() == [k for line in own for k in line["devices"]]
        weights = np.float32([w for line in own for w in line["weights"]])
        np.testing.assert_array_equal(unpack(packed["weights"], "<f4"), weights)
        gamma = np.array([g for line in own for g in line["gamma"]], float).astype("f4")
        np.testing.assert_array_equal(unpack(packed["gamma"], "<f4"), gamma)
        flags = unpack(packed["flags"], "u1")
        assert (flags & payload.LOST > 0).sum() == sum(len(line["lost_devices"]) for line in own) == 40
        assert (flags & payload.REJECTED > 0).sum() == sum(len(line["rejected_devices"]) for line in own) == 40
        assert (flags // payload.TIMES).tolist() == [m for line in own for m in line["times"]]


def test_rounds_that_diverged_or_were_not_evaluated(tmp_path):
    path = rundirectory.write(tmp_path, algorithms=("folb",), seeds=1, rounds=6, every=3, records=False)
    text = (path / "rounds.jsonl").read_text()
    (path / "rounds.jsonl").write_text(
        re.sub(r'("round": 6, .*?"train_loss": )[\d.]+', r"\1null", text) + '{"run": 0, "ro'
    )
    (column,) = payload.view([directory.read(path)])["experiments"][0]["columns"]
    assert column["rounds"] == [1, 2, 3, 4, 5, 6] and column["evaluated"] == [2, 5]
    assert column["loss"][1] is None and column["loss"][0] > 0 and "records" not in column


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_that_has_hardly_begun(done, tmp_path):
    path = rundirectory.write(tmp_path, done=done, finished=False)
    (experiment,) = payload.view([directory.read(path)])["experiments"]
    assert experiment["state"] == "interrupted" and len(experiment["table"]["rows"]) == (3 if done else 0)
    assert experiment["again"][1][1] == f"folb resume {path}"  # not in the home of runs
    assert page.render(payload.view([directory.read(path)]))


def test_labels_are_the_whole_experiments_however_few_runs_have_begun(tmp_path):
    path = rundirectory.write(
        tmp_path, algorithms=("folb local.mu=0", "folb local.mu=1"), seeds=1, rounds=3, records=False
    )
    text = (path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (path / "rounds.jsonl").write_text("".join(line for line in text if '"run": 0' in line))
    (experiment,) = payload.view([directory.read(path)])["experiments"]
    assert [row[0] for row in experiment["table"]["rows"]] == ["folb local.mu=0"]


def test_nothing_in_the_data_can_become_part_of_the_page(tmp_path):
    name = HOSTILE.replace("/", "∕")
    path = rundirectory.write(tmp_path, name, algorithms=(HOSTILE,), seeds=1, rounds=2, note=HOSTILE)
    shown = payload.view([directory.read(path)]) | {"title": HOSTILE}
    html = page.render(shown)
    assert embedded(html)["experiments"][0]["note"] == HOSTILE
    assert html.count("<script") == html.count("</script") == 2 and html.count("<!") == 1
    assert "<img" not in html and "\u2028" not in html.partition("<body>")[2]
    assert html.count("class Experiment") == 1  # {{script}} in the data was left alone


def relabelled(path, **changes):
    """A run directory whose experiment or runs have other settings."""
    parameters = changes.pop("parameters", {})
    environment = json.loads((path / "environment.json").read_bytes())
    for run in environment["runs"]:
        run["parameters"] = parameters.get(run["name"], {})
    (path / "environment.json").write_text(json.dumps(environment))
    text = (path / "experiment.toml").read_text()
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    (path / "experiment.toml").write_text(text)
    return directory.read(path)


def test_labels_say_what_differs_between_runs(tmp_path):
    def written(name, mu, **changes):
        path = rundirectory.write(tmp_path, name, algorithms=("folb", "fedavg"), seeds=1, rounds=2, records=False)
        return relabelled(
            path, parameters={"folb": {"local.mu": mu, "local.lr": 0.1}, "fedavg": {"local.lr": 0.1}}, **changes
        )

    a, b = written("a", 0.1), written("b", 1.0)
    assert labels([a, b]) == [["folb local.mu=0.1", "fedavg (a)"], ["folb local.mu=1", "fedavg (b)"]]
    c = written("c", 0.1, draw=("draw = 0", "draw = 3"), target=("target = 0.7", "target = 0.8"))
    assert labels([a, c]) == [["folb draw=0", "fedavg draw=0"], ["folb draw=3", "fedavg draw=3"]]
    twin = directory.read(shutil.copytree(a.path, tmp_path / "elsewhere" / "a"))
    assert labels([a, twin]) == [["folb (a 1)", "fedavg (a 1)"], ["folb (a 2)", "fedavg (a 2)"]]
    together = payload.view([a, c])["together"]
    assert together["target"] == 0.7 and together["unequal"] == [
        "The runs have the targets 70 %, 80 %: here all are measured by one, at first 70 %."
    ]
    other = written("d", 0.1, data=('dataset = "synthetic_1_1"', 'dataset = "/tmp/mine.csv"'))
    assert labels([a, other])[1][0] == "folb dataset=mine.csv"
    assert payload.view([a, other])["together"]["unequal"] == [
        "The runs are of different data: synthetic_1_1, mine.csv."
    ]


def test_why_samples_are_not_known(tmp_path):
    plain = directory.read(rundirectory.write(tmp_path, "a", rounds=2, records=False))
    gone = relabelled(
        rundirectory.write(tmp_path, "b", rounds=2), data=('dataset = "synthetic_1_1"', 'dataset = "/no/such.csv"')
    )
    fewer = directory.read(rundirectory.write(tmp_path, "c", rounds=2, devices=20))
    odd = relabelled(rundirectory.write(tmp_path, "d", rounds=2), draw=("draw = 0", "dra = 1"))
    words = [held["missing"] for held in holdings([plain, gone, fewer, odd])]
    assert words[0] == "the run did not record its devices" and "no such file" in words[1]
    assert words[2] == "the data now have 30 devices, and the run had another number" and "dra" in words[3]
    whole = holdings([directory.read(rundirectory.write(tmp_path, "e", rounds=2))])[0]
    assert len(whole["labels"]) == 30
    assert [sum(counts) for counts in whole["labels"]] == [
        train + test for train, test in zip(whole["train"], whole["test"], strict=True)
    ]


def test_a_name_that_is_no_text(tmp_path):
    path = rundirectory.write(tmp_path, "run-\udcff", rounds=2)
    html = page.render(payload.view([directory.read(path)]) | {"title": path.name})
    assert "<title>run-?</title>" in html.encode().decode()


def test_policy_allows_this_script_and_this_style_and_nothing_else():
    html = page.render({"title": "t", "experiments": []})
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))

    def digest(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'",
        "script-src": digest(re.search(r'<script type="module">(.*?)</script>', html, re.DOTALL)[1]),
        "style-src": digest(re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]),
        "img-src": "blob:",  # pictures that the page makes
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert page.policy(live=True).count("connect-src 'self'") == 1
    assert not re.search(r"<link|https?://(?!www\.w3\.org/2000/svg)| style=|innerHTML|eval\(", html)


def test_records_are_bounded_and_what_is_left_out_is_named(tmp_path, monkeypatch):
    first = directory.read(rundirectory.write(tmp_path, "a-1", algorithms=("folb", "fedavg"), seeds=2, rounds=10))
    second = directory.read(rundirectory.write(tmp_path, "b-2", algorithms=("folb",), seeds=1, rounds=10))
    monkeypatch.setattr(payload, "ENTRIES", 350)  # a run has 100
    a, b = payload.view([first, second])["experiments"]
    # the first seed of each algorithm before the second of any
    assert ["records" in column for column in a["columns"]] == [True, True, True, False] and a["left_out"] == [3]
    assert ["records" in column for column in b["columns"]] == [False] and b["left_out"] == [0]
