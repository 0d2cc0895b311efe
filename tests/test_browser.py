"""The report and the live page in a real browser: headless Chromium, driven by Playwright."""

import csv
import io
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
import rundirectory

from folb import atomic, data
from folb.experiments import execute
from folb.experiments.experiment import Experiment
from folb.experiments.holdings import holdings
from folb.report import live, page
from folb.report.looks import looks
from folb.report.payload import view
from folb.results import summary
from folb.store import directory as store
from folb.store import environment

CHROMIUM = os.environ.get("FOLB_CHROMIUM") or shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = ("folb", "fedprox", "fedavg")

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    pytest.skip("NO BROWSER TESTS: Playwright for Python is not installed", allow_module_level=True)
if not CHROMIUM:
    pytest.skip("NO BROWSER TESTS: no Chromium on the path, nor in FOLB_CHROMIUM", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """Open an address; at the end, no page has had an error or asked for anything from elsewhere."""
    contexts, complaints, asked = [], [], []

    def go(address, allowed=None, **options):
        context = browser.new_context(**({"viewport": {"width": 1240, "height": 900}} | options))
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        tab.on("request", lambda request: asked.append((request.url, allowed or address)))
        tab.goto(address)
        return tab

    go.complaints = complaints
    yield go
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url, allowed in asked if not url.startswith((allowed, "blob:"))] == []  # a blob is the page's own


def report(path, *directories):
    """A report on run directories; its address."""
    path.write_text(page.render(view([store.read(one) for one in directories])), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return rundirectory.write(tmp_path_factory.mktemp("runs"), note="a sample of 736 users")


@pytest.fixture(scope="module")
def address(directory):
    return report(directory.parent / "report.html", directory)


def lines(path):
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


def charts(tab):
    return tab.locator("svg.chart")


def ticks(tab, chart=0):
    return charts(tab).nth(chart).locator("text.x:not(.name)").all_text_contents()


def drag(tab, node, start, end):
    """From one point of a node to another, each as parts of its width and height."""
    node.scroll_into_view_if_needed()
    box = node.bounding_box()
    (x0, y0), (x1, y1) = ((box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (start, end))
    tab.mouse.move(x0, y0)
    tab.mouse.down()
    tab.mouse.move((x0 + x1) / 2, (y0 + y1) / 2)
    tab.mouse.move(x1, y1)
    tab.mouse.up()


# the report


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run that was run."""
    tiny = {"sizes": [20, 30, 40], "select.K": 2, "local.mu": [0.01, 1.0]}
    experiment = Experiment(
        "synthetic_1_1",
        algorithms=["folb"],
        rounds=30,
        seeds=2,
        target=0.4,
        records=True,
        metrics=["fairness", "f1"],
        set=tiny,
    )
    path = tmp_path_factory.mktemp("real") / "run"
    execute.execute(experiment, directory=path)
    return path


def test_the_table_has_the_results_of_a_real_run(real, tmp_path, visit):
    results = json.loads((real / "results.json").read_bytes())["runs"]
    tab = visit(report(tmp_path / "report.html", real))
    expect(tab.locator(".state")).to_have_text("finished")
    headings = tab.locator("table.results thead th").all_text_contents()
    rows = [row.locator("th, td").all_text_contents() for row in tab.locator("table.results tbody tr").all()]
    assert [row[0] for row in rows] == ["folb local.mu=0.01", "folb local.mu=1"]
    for row, runs in zip(rows, (results[:2], results[2:]), strict=True):
        shown = dict(zip(headings, row, strict=True))
        reached = [run["rounds_to_target"] for run in runs]
        assert None not in reached and shown["rounds to 40 %"] == summary.ranged(reached)
        held = [run["held_from"] for run in runs]
        assert None not in held and shown["held from"] == summary.ranged(held)
        assert shown["final accuracy"].startswith(f"{50 * sum(run['final'] for run in runs):.1f} ±")
        assert shown["best"] == f"{50 * sum(run['best'] for run in runs):.1f} %"
        assert shown["MB up"] == f"{sum(run['bytes_up'] for run in runs) / 2e6:.2f}"
        assert shown["simulated s"] == f"{sum(run['seconds'] for run in runs) / 2:.0f}"
    assert (real / "experiment.toml").read_text() == tab.locator("pre.toml").text_content()


def test_what_the_report_says(address, directory, visit):
    tab = visit(address)
    expect(tab.locator("h1")).to_have_text("synthetic_1_1, logistic regression")
    expect(tab.locator(".name code")).to_have_text(directory.name)
    expect(tab.locator(".note")).to_have_text("The data: a sample of 736 users")
    expect(tab.locator("h2")).to_have_text(["Curves", "Results", "Devices", "Configuration", "Run it again"])
    expect(tab.locator("section").last.locator("pre")).to_have_text(["folb run experiment.toml"])
    assert tab.title() == "synthetic_1_1, logistic regression"


def test_the_cross_hair_reads_medians_and_ranges(address, directory, visit):
    tab = visit(address)
    box = charts(tab).first.bounding_box()
    tab.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 100)
    readout = tab.locator(".readout").first
    t = int(re.fullmatch(r"round (\d+)", readout.locator("caption").text_content())[1])
    for name, row in zip(NAMES, readout.locator("tr").all(), strict=True):
        at = [
            100 * line["test_accuracy"] for line in lines(directory) if line["algorithm"] == name and line["round"] == t
        ]
        assert row.locator("th").text_content() == name
        expected = [f"{median(at):.1f}", f"{min(at):.1f} – {max(at):.1f}"]
        assert row.locator("td").all_text_contents() == expected
    expect(tab.locator(".readout").nth(1)).to_be_visible()  # the other chart's, at the same round
    tab.mouse.move(5, 5)
    expect(readout).to_be_hidden()


def test_series_can_be_hidden(address, visit):
    tab = visit(address)
    button = tab.get_by_role("button", name="fedprox")
    expect(charts(tab).first.locator("path.line")).to_have_count(3)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    for chart in charts(tab).all():
        expect(chart.locator("path.line")).to_have_count(2)
        expect(chart.locator("path.area")).to_have_count(2)
    button.press("Enter")
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(charts(tab).first.locator("path.line")).to_have_count(3)
    for name in NAMES:  # no value at all is not an error
        tab.get_by_role("button", name=name).click()
    expect(charts(tab).first.locator("path.line")).to_have_count(0)


def test_zoom_with_the_pointer(address, visit):
    tab = visit(address)
    everything, button = ticks(tab), tab.locator(".curves").get_by_role("button", name="Show all")
    assert everything[0] == "0" and everything[-1] == "40"
    expect(button).to_be_disabled()
    drag(tab, charts(tab).first, (0.5, 0.3), (0.75, 0.5))
    expect(button).to_be_enabled()
    assert ticks(tab) == ticks(tab, 1) != everything and 15 <= float(ticks(tab)[0]) <= 22
    charts(tab).nth(1).dblclick()
    expect(button).to_be_disabled()
    assert ticks(tab) == everything
    drag(tab, charts(tab).nth(1), (0.75, 0.3), (0.5, 0.5))
    assert ticks(tab) != everything
    tab.keyboard.press("Escape")
    assert ticks(tab) == everything


def test_logarithmic_scale_and_axes(address, visit):
    tab = visit(address)
    labels = charts(tab).nth(1).locator("text.y")
    assert {"0.5", "1", "2"} <= set(labels.all_text_contents())
    tab.get_by_label("Logarithmic loss").uncheck()
    expect(labels.first).to_have_text("0.5")
    assert "1.5" in labels.all_text_contents()
    for choice, name, end in [("MB up and down", "MB", 2.928), ("Simulated seconds", "s", 900)]:
        tab.get_by_label(choice).check()
        expect(charts(tab).first.locator("text.name")).to_have_text(choice)
        assert end / 2 < float(ticks(tab)[-1]) <= end
        charts(tab).first.focus()
        tab.keyboard.press("End")
        assert tab.locator(".readout caption").first.text_content().endswith(name)


def test_curves_with_the_keyboard(address, visit):
    tab = visit(address)
    charts(tab).first.focus()
    caption = tab.locator(".readout caption").first
    for key, expected in [
        ("Home", "round 1"),
        ("ArrowRight", "round 2"),
        ("Shift+ArrowRight", "round 12"),
        ("ArrowLeft", "round 11"),
        ("End", "round 40"),
        ("ArrowRight", "round 40"),
    ]:
        tab.keyboard.press(key)
        expect(caption).to_have_text(expected)
    spoken = tab.locator(".curves [role=status]")
    expect(spoken).to_have_text(re.compile(r"^round 40: folb [\d.]+, fedprox [\d.]+, fedavg [\d.]+$"))
    everything = ticks(tab)
    tab.keyboard.press("+")
    tab.keyboard.press("+")
    assert ticks(tab)[0] == "30" and ticks(tab)[-1] == "40"
    tab.keyboard.press("Home")  # what is shown goes along
    expect(caption).to_have_text("round 1")
    tab.keyboard.press("-")
    tab.keyboard.press("Escape")
    assert ticks(tab) == everything


def test_everything_can_be_reached_with_the_tab_key(address, visit):
    tab = visit(address)
    reached = []
    for _ in range(50):
        tab.keyboard.press("Tab")
        focused = "document.activeElement"
        outlined = tab.evaluate(f"getComputedStyle({focused}).outlineStyle")
        reached.append(tab.evaluate(f"{focused}.getAttribute('aria-label') || {focused}.textContent || {focused}.type"))
        assert outlined != "none" or tab.evaluate(f"{focused} === document.body")
    text = "\n".join(reached)
    for wanted in (
        "Dark colours",
        *NAMES,
        "radio",
        "checkbox",
        "Test accuracy (%) by rounds",
        "Training loss by rounds",
    ):
        assert wanted in text
    for wanted in (
        "Results",
        "folb, seed 0",
        "Aggregation weight by device",
        "negated",
        "Show all 30 devices",
        "Environment",
    ):
        assert wanted in text


def test_heat_map_tells_what_the_devices_did(address, directory, visit):
    tab = visit(address)
    tab.locator("select").select_option(label="fedavg, seed 1")
    expect(tab.locator(".plot.heat").locator("..").locator("figcaption")).to_contain_text("fedavg, seed 1")
    canvas, readout = tab.locator(".heat canvas"), tab.locator("p.value")
    own = {line["round"]: line for line in lines(directory) if (line["algorithm"], line["seed"]) == ("fedavg", 1)}
    canvas.focus()
    tab.keyboard.press("Home")
    for _ in range(3):
        tab.keyboard.press("Shift+ArrowUp")
    seen = Counter()
    for device in range(30):
        row = own[1]
        where = f"Round 1, device {device}: "
        if device not in row["devices"]:
            words = ["not chosen"]
        else:
            k = row["devices"].index(device)
            words = ["lost"] * (device in row["lost_devices"]) + ["rejected"] * (device in row["rejected_devices"])
            text = f"{abs(row['weights'][k]):.3g}"
            words.append(f"weight −{text}, negated" if row["weights"][k] < 0 else f"weight {text}")
            if row["gamma"][k] is not None:
                words.append(f"gamma {row['gamma'][k]:.3g}")
        seen[words[0].split()[0]] += 1
        expect(readout).to_have_text(f"{where}{', '.join(words)}.")
        tab.keyboard.press("ArrowDown")
    assert seen == {"not": 20, "lost": 1, "rejected": 1, "weight": 8}
    canvas.hover()
    expect(readout).to_have_text(re.compile(r"^Round (19|20|21|22), device 1[4-7]: "))


def test_heat_map_colours_and_zoom(address, visit):
    tab = visit(address)
    canvas, button = tab.locator(".heat canvas"), tab.get_by_role("button", name="Show all").nth(1)
    signs = """canvas => {
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let blue = 0, orange = 0, purple = 0;
        for (let i = 0; i < data.length; i += 4) {
            const [r, g, b] = data.slice(i, i + 3);
            if (b > r + 40 && g > r) blue++;
            if (r > b + 40 && g > b) orange++;
            if (r > g + 60 && b > g + 40) purple++;
        }
        return [blue, orange, purple];
    }"""
    blue, orange, purple = canvas.evaluate(signs)
    assert blue > 2 * orange > 0 and purple > 0
    drag(tab, canvas, (0.3, 0.2), (0.5, 0.5))
    expect(button).to_be_enabled()
    tab.keyboard.press("Escape")
    expect(button).to_be_disabled()
    tab.keyboard.press("+")
    expect(button).to_be_enabled()
    tab.get_by_label("Gamma").check()
    expect(tab.locator(".key")).to_contain_text("0, exact")
    assert canvas.evaluate(signs)[1] == 0


def test_counts_of_each_device(address, directory, visit):
    tab = visit(address)
    tab.get_by_role("button", name="Show all 30 devices").click()
    rows = [row.locator("th, td").all_text_contents() for row in tab.locator("table.counts tbody tr").all()]
    expected = {device: [0, 0, 0, 0] for device in range(30)}
    for line in lines(directory):
        if line["run"] == 0:
            for device, weight in zip(line["devices"], line["weights"], strict=True):
                expected[device][0] += 1
                expected[device][1] += device in line["lost_devices"]
                expected[device][2] += device in line["rejected_devices"]
                expected[device][3] += weight < 0
    assert {int(row[0]): [int(cell) for cell in row[1:]] for row in rows} == expected
    assert [int(row[1]) for row in rows] == sorted((count[0] for count in expected.values()), reverse=True)
    tab.get_by_role("button", name="negated").click()
    expect(tab.locator("table.counts th[aria-sort]")).to_have_text("negated")
    column = tab.locator("table.counts tbody td:last-child").all_text_contents()
    assert [int(cell) for cell in column] == sorted((count[3] for count in expected.values()), reverse=True)


def test_without_records_and_several_experiments(directory, tmp_path, visit):
    plain = rundirectory.write(tmp_path, "other-1", records=False, finished=False, done=20, every=5)
    tab = visit(report(tmp_path / "report.html", directory, plain))
    expect(tab.locator("h1")).to_have_text("2 experiments")
    expect(tab.locator("nav a")).to_have_count(2)
    expect(tab.locator("article").nth(2)).to_contain_text("did not record its devices: use --records")
    expect(tab.locator(".state")).to_have_text(["finished", "interrupted, 180 of 360 rounds"])
    expect(tab.locator("pre", has_text=re.compile("folb resume .*other-1"))).to_be_visible()
    charts(tab).nth(4).press("Home")
    expect(tab.locator("article").nth(2).locator(".readout caption").first).to_have_text("round 5")


def test_runs_that_diverge(tmp_path, visit):
    path = rundirectory.write(tmp_path, rounds=20, records=False)
    text = re.sub(
        r'("run": [678], .*?"round": (?:1[0-9]|20), .*?"train_loss": )[\d.]+',
        r"\1null",
        (path / "rounds.jsonl").read_text(),
    )
    (path / "rounds.jsonl").write_text(text)
    tab = visit(report(tmp_path / "report.html", path))
    charts(tab).nth(1).focus()
    tab.keyboard.press("End")
    expect(tab.locator(".readout").nth(1).locator("td").nth(4)).to_have_text("diverged")
    tab.get_by_label("Logarithmic loss").uncheck()


def test_light_dark_and_paper(address, visit):
    colour = "getComputedStyle(document.body).backgroundColor"
    shade = """c => {
        const {data} = c.getContext('2d').getImageData(110, 20, 800, 400);
        let sum = 0;
        for (let i = 0; i < data.length; i += 4) sum += data[i] + data[i + 1] + data[i + 2];
        return sum / data.length;
    }"""
    light, dark = visit(address), visit(address, color_scheme="dark")
    assert light.evaluate(colour) == "rgb(255, 255, 255)" and dark.evaluate(colour) == "rgb(20, 23, 26)"
    # the curves have the colours of the pictures
    strokes = "nodes => nodes.map(node => getComputedStyle(node).stroke)"
    inks = [tuple(bytes.fromhex(look.ink[1:])) for look in looks(NAMES).values()]
    assert light.locator(".legend .line").evaluate_all(strokes) == [f"rgb{ink}" for ink in inks]
    canvas = light.locator(".heat canvas")
    before = canvas.evaluate(shade)
    light.get_by_role("button", name="Dark colours").click()
    assert light.evaluate(colour) == "rgb(20, 23, 26)" and canvas.evaluate(shade) < before / 2
    light.get_by_role("button", name="Light colours").click()
    assert light.evaluate(colour) == "rgb(255, 255, 255)" and canvas.evaluate(shade) == before
    dark.emulate_media(media="print")
    assert dark.evaluate(colour) == "rgb(255, 255, 255)"
    expect(dark.locator(".controls").first).to_be_hidden()
    expect(dark.locator("table.results")).to_be_visible()


@pytest.mark.parametrize("width", [400, 700])
def test_nothing_is_wider_than_a_narrow_screen(width, address, visit):
    tab = visit(address, viewport={"width": width, "height": 800})
    expect(tab.locator("table.results")).to_be_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_a_thousand_rounds_of_a_thousand_devices_open_within_three_seconds(tmp_path, visit):
    big = rundirectory.write(tmp_path, algorithms=("folb",), seeds=1, rounds=1000, devices=1000, chosen=1000)
    address = report(tmp_path / "report.html", big)
    begun = time.perf_counter()
    tab = visit(address)
    expect(tab.locator("table.counts tbody tr")).to_have_count(10)
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert time.perf_counter() - begun < 3
    row = tab.locator("table.counts tbody tr").first.locator("th, td").all_text_contents()
    assert row[:2] == ["0", "1,000"]
    tab.locator(".heat canvas").hover()
    expect(tab.locator("p.value")).to_contain_text("weight")


def test_names_stay_text(tmp_path, visit):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    path = rundirectory.write(tmp_path, hostile.replace("/", "∕"), algorithms=(hostile,), note=hostile, rounds=3)
    tab = visit(report(tmp_path / "report.html", path))
    expect(tab.locator(".name code")).to_have_text(hostile.replace("/", "∕"))
    expect(tab.locator(".legend button")).to_have_text(hostile)
    expect(tab.locator("table.results tbody th")).to_have_text(hostile)
    expect(tab.locator("img")).to_have_count(0)
    expect(tab.locator("script")).to_have_count(2)


# runs compared


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs, of which the second is longer, and has fewer algorithms and only some of its devices chosen."""
    home = tmp_path_factory.mktemp("pair")
    first = rundirectory.write(home, "a-1", rounds=30, records=False)
    second = rundirectory.write(
        home, "b-2", algorithms=("folb", "fedavg"), seeds=2, rounds=50, devices=1000, chosen=4, records=True
    )
    return first, second


@pytest.fixture(scope="module")
def overlaid(pair):
    return report(pair[0].parent / "report.html", *pair)


def cells(tab, place="#together"):
    """The table of results as rows of text, with its headings."""
    rows = tab.locator(f"{place} table.results tr").all()
    return [row.locator("th, td").all_text_contents() for row in rows]


def settle(tab):
    """Wait until the address says what is shown."""
    tab.wait_for_timeout(600)
    return tab.url


def look(tab):
    """What can be seen of the curves together: their paths, their ends and the table."""
    drawn = "nodes => nodes.map(node => [node.getAttribute('class'), node.getAttribute('d')])"
    pressed = "nodes => nodes.map(node => node.getAttribute('aria-pressed'))"
    return [
        tab.locator("#together path.line").evaluate_all(drawn),
        tab.locator("#together .legend button").evaluate_all(pressed),
        tab.locator("#together text.x").all_text_contents(),
        cells(tab),
    ]


def test_runs_are_laid_over_each_other(overlaid, pair, visit):
    tab = visit(overlaid)
    names = ["folb (a-1)", "fedprox", "fedavg (a-1)", "folb (b-2)", "fedavg (b-2)"]
    expect(tab.locator("#together .legend button")).to_have_text(names)
    expect(charts(tab).first.locator("path.line")).to_have_count(5)
    assert ticks(tab)[-1] == "50"
    expect(tab.locator("#together .note")).to_have_text(
        "The runs have from 30 to 50 rounds: a curve ends with its run."
    )
    headings, *rows = cells(tab)
    assert headings[:2] == ["algorithm", "after"]
    assert [row[:2] for row in rows] == [[name, f"{30 if i < 3 else 50} rounds"] for i, name in enumerate(names)]
    own = [row[1:] for i in (0, 1) for row in cells(tab, f"#experiment-{i}")[1:]]
    assert [row[2:] for row in rows] == own  # the same target: the rows of each run
    charts(tab).first.press("End")
    readout = tab.locator("#together .readout").first
    expect(readout.locator("caption")).to_have_text("round 50")
    expect(readout.locator("th")).to_have_text(names[3:])  # the others have ended


def test_the_target_moves(overlaid, pair, visit):
    tab = visit(overlaid)
    goal = tab.locator("#together input.goal")
    expect(goal).to_have_value("70")
    stored = cells(tab)
    for percent in ("55", "33.3", "85", "0", "100"):
        goal.fill(percent)
        goal.press("Enter")
        expect(tab.locator("#together th", has_text=f"rounds to {percent} %")).to_be_visible()
        runs = [run for one in pair for run in store.read(one).begun()]
        labels = [label for one in view([store.read(path) for path in pair])["together"]["labels"] for label in one]
        named = [replace(run, algorithm=label) for run, label in zip(runs, labels, strict=True)]
        headings, rows = summary.table(named, float(percent) / 100, rounds=50)
        assert cells(tab) == [headings, *rows]
    assert cells(tab, "#experiment-0")[0][1] == "rounds to 70 %"  # its own target stays
    goal.fill("")
    goal.press("Enter")
    expect(goal).to_have_value("100")
    tab.locator("#together").get_by_role("button", name="Back to 70 %").click()
    assert cells(tab) == stored


def test_lines_of_single_seeds(overlaid, visit):
    tab = visit(overlaid)
    first = charts(tab).first
    expect(first.locator("path.area")).to_have_count(5)
    tab.locator("#together").get_by_label("Single seeds").check()
    expect(first.locator("path.seed")).to_have_count(3 * 3 + 2 * 2)
    expect(first.locator("path.median")).to_have_count(5)
    expect(first.locator("path.area")).to_have_count(0)


def test_a_copied_link_shows_the_same(overlaid, visit):
    tab = visit(overlaid)
    assert settle(tab) == overlaid  # nothing to say
    together = tab.locator("#together")
    together.get_by_label("MB up and down").check()
    together.get_by_role("button", name="fedprox").click()
    together.get_by_label("Single seeds").check()
    together.get_by_label("Logarithmic loss").uncheck()
    together.locator("input.goal").fill("62.5")
    together.locator("input.goal").press("Enter")
    drag(tab, charts(tab).first, (0.3, 0.3), (0.75, 0.5))
    tab.locator("#experiment-1").get_by_role("button", name="fedavg").click()
    other = visit(settle(tab), allowed=overlaid)
    assert look(other) == look(tab)
    expect(other.locator("#experiment-1 .legend button")).to_have_text(["folb", "fedavg"])
    expect(other.locator("#experiment-1 .legend button").nth(1)).to_have_attribute("aria-pressed", "false")
    expect(other.locator(".misfit")).to_be_hidden()
    other.locator("nav a").nth(1).click()  # a link within the page keeps the rest
    assert settle(other).startswith(f"{overlaid}#experiment-1&") and "axis=mb" in other.url
    third = visit(other.url, allowed=overlaid)
    assert look(third) == look(tab) and third.evaluate("scrollY") > 500


def test_a_link_that_no_longer_fits(overlaid, visit):
    tab = visit(overlaid)
    plain = look(tab)
    tab.goto(f"{overlaid}#experiment-9&axis=mb")
    expect(tab.locator(".misfit")).to_contain_text("Left out: experiment-9.")
    assert look(tab) != plain
    wrong = ["axis=furlongs", "target=many", "seeds=some", "loss=cubic", "hidden=<img src=x>", "zoom=900_1000"]
    wrong += [
        "zoom=5_1",
        "zoom=1_2_3",
        "zoom=_",
        "target=101",
        "axis=__proto__",
        "7.axis=mb",
        "2.device=1000",
        "2.run=none",
    ]
    for text in wrong:
        key, value = text.split("=", 1)
        tab.goto(f"{overlaid}#hidden=fedprox&{key}={quote(value)}")
        expect(tab.locator(".misfit")).to_contain_text(f"Left out: {text}.")
        expect(charts(tab).first.locator("path.median")).to_have_count(4)  # what fits is shown
        expect(tab.locator("img")).to_have_count(0)
        tab.goto(overlaid + "#")
        expect(tab.locator(".misfit")).to_be_hidden()
        assert look(tab) == plain


def downloaded(tab, place, name):
    """The content of a file that a button of the page gives, and its name."""
    with tab.expect_download() as download:
        tab.locator(place).get_by_role("button", name=name).click()
    return Path(download.value.path()).read_bytes(), download.value.suggested_filename


def test_the_csv_has_the_numbers_of_results_json(real, tmp_path, visit):
    results = json.loads((real / "results.json").read_bytes())["runs"]
    tab = visit(report(tmp_path / "report.html", real))
    content, name = downloaded(tab, "main", "Results of each seed as csv")
    assert name == "run-results.csv"
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert [row["algorithm"] for row in rows] == ["folb local.mu=0.01"] * 2 + ["folb local.mu=1"] * 2
    keys = ["seed", "rounds_to_target", "held_from", "bytes_to_target", "seconds_to_target"]
    keys += ["final", "best", "bytes_up", "bytes_down"]
    for row, run in zip(rows, results, strict=True):
        assert [float(row[key]) for key in keys] == [run[key] for key in keys]
    content, _ = downloaded(tab, "main", "Curves as csv")
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    for key, names in (("evaluated_rounds", "round"), ("test_accuracy", "test_accuracy"), ("train_loss", "train_loss")):
        assert [float(row[names]) for row in rows] == [value for run in results for value in run[key]]


def test_pictures_stand_alone(overlaid, visit, tmp_path):
    tab = visit(overlaid)
    content, name = downloaded(tab, "#together", "Test accuracy (%) as svg")
    assert name == "runs-accuracy.svg"
    root = ElementTree.fromstring(content)
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"folb (a-1)", "fedprox", "folb (b-2)", "Rounds", "target 70 %"} <= set(texts)
    assert b"var(" not in content and b"href" not in content and b"<style" not in content
    (tmp_path / "a.svg").write_bytes(content)
    drawn = visit((tmp_path / "a.svg").as_uri())
    strokes = drawn.locator("path.median").evaluate_all("nodes => nodes.map(node => getComputedStyle(node).stroke)")
    shown = charts(tab).first.locator("path.median")
    assert strokes == shown.evaluate_all("nodes => nodes.map(node => getComputedStyle(node).stroke)")
    assert len(set(strokes)) == 5
    content, name = downloaded(tab, "#together", "Training loss as png")
    assert name == "runs-loss.png" and content[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "a.png").write_bytes(content)
    width = visit((tmp_path / "a.png").as_uri()).locator("img").evaluate("node => node.naturalWidth")
    assert width > 2 * 280


def test_files_of_hostile_names(tmp_path, visit):
    hostile = '=cmd|"</title><script>alert(1)</script>\u0001'
    path = rundirectory.write(tmp_path, algorithms=(hostile, "fedavg"), rounds=3)
    tab = visit(report(tmp_path / "report.html", path))
    content, _ = downloaded(tab, "main", "Curves as csv")
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert rows[0]["algorithm"] == f"'{hostile}"  # a spreadsheet does not compute it
    content, _ = downloaded(tab, "main", "Training loss as svg")
    assert hostile.replace("\u0001", "\ufffd") in ElementTree.fromstring(content).itertext()


def test_a_device_alone(real, tmp_path, visit):
    stored = store.read(real)
    html = page.render(view([stored], holdings([stored])))
    (tmp_path / "report.html").write_text(html)
    address = (tmp_path / "report.html").as_uri()
    tab = visit(address)
    tab.locator("table.counts").get_by_role("button", name="1", exact=True).click()
    panel = tab.locator(".device")
    expect(panel).to_contain_text("Device 1, folb local.mu=0.01, seed 0")
    federation = data.load("synthetic_1_1", sizes=[20, 30, 40])
    train, test = federation.train.size[1], federation.test.size[1]
    expect(panel).to_contain_text(f"Samples: {train} to train on, {test} to test on.")
    bars = panel.get_by_label("Labels of the device").locator("tbody tr")
    shown = dict(row.locator("th, td").all_text_contents() for row in bars.all())
    assert shown == {str(k): str(n) for k, n in enumerate(federation.labels()[1]) if n}
    own = [line for line in lines(real) if line["run"] == 0 and 1 in line["devices"]]
    weight = own[-1]["weights"][own[-1]["devices"].index(1)]
    row = panel.get_by_label("Rounds of the device").locator("tbody tr").first
    assert row.locator("th, td").all_text_contents()[0] == str(own[-1]["round"])
    assert float(row.locator("td").first.text_content().replace("−", "-")) == pytest.approx(weight, rel=0.01, abs=1e-3)
    expect(panel.locator("figure", has_text="Aggregation weight").locator("circle")).to_have_count(len(own))
    accuracies = panel.locator("figure", has_text="Its own accuracy (%)")
    expect(accuracies.locator("circle")).to_have_count(len(own))
    last = 100 * own[-1]["own"][own[-1]["devices"].index(1)]
    label = accuracies.locator("svg").get_attribute("aria-label")
    assert re.search(rf"{len(own)} values, the last ([\d.]+) in round {own[-1]['round']}$", label)[1] == f"{last:.3g}"
    other = visit(settle(tab), allowed=address)
    expect(other.locator(".device")).to_have_text(panel.text_content())
    panel.get_by_role("button", name="Close").click()
    expect(panel).to_have_count(0)


def test_another_metric(real, tmp_path, visit):
    """The first chart shows it, a link keeps it, a file has it; a link to one that is not there says so."""
    address = report(tmp_path / "report.html", real)
    tab = visit(address)
    chart, choice = charts(tab).first, tab.get_by_role("group", name="Metric")
    assert choice.locator("label").all_text_contents() == [
        "accuracy",
        "devices' mean",
        "worst decile",
        "devices' variance",
        "F1",
    ]
    choice.get_by_text("worst decile").click()
    expect(tab.locator("figcaption").first).to_contain_text("Accuracy of the worst decile of devices (%)")
    expect(chart.locator("text.target")).to_have_count(0)  # the target is for the accuracy
    ends = [line["metrics"]["own_worst"] for line in lines(real) if line["round"] == 30 and line["run"] < 2]
    assert f"folb local.mu=0.01 is at {50 * sum(ends):.1f}" in chart.get_attribute("aria-label")
    link = settle(tab)
    assert "metric=own_worst" in link
    other = visit(link, allowed=address)
    expect(charts(other).first).to_have_attribute("aria-label", chart.get_attribute("aria-label"))
    content, _ = downloaded(tab, "main", "Curves as csv")
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    expected = [line["metrics"]["own_worst"] for line in lines(real) if line["run"] == 0]
    assert [float(row["own_worst"]) for row in rows[:30]] == pytest.approx(expected, rel=1e-6)
    wrong = visit(f"{address}#metric=auc", allowed=address)
    expect(wrong.locator(".misfit")).to_contain_text("Left out: metric=auc.")
    expect(charts(wrong).first.locator("text.target")).to_have_count(1)


def test_an_error_that_should_be_low(tmp_path, visit):
    """A regression: the chart is of its error, and what reaches the target is below it."""
    path = rundirectory.write(tmp_path, algorithms=("folb", "fedavg"), seeds=2, rounds=20)
    about = json.loads((path / "environment.json").read_bytes())
    about["runs"] = [run | {"judged_by": "mse"} for run in about["runs"]]
    (path / "environment.json").write_text(json.dumps(about))
    own = lines(path)
    for line in own:
        line["metrics"] = {"mse": 1 / line["round"] + 0.01 * line["run"]}
        del line["test_accuracy"]
    (path / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in own))
    text = (path / "experiment.toml").read_text()
    (path / "experiment.toml").write_text(text.replace("target = 0.7", "target = 1.5"))
    address = report(tmp_path / "report.html", path)
    tab = visit(f"{address}#target=0.25", allowed=address)
    expect(tab.locator("figcaption").first).to_contain_text("Mean squared error")
    expect(charts(tab).first.locator("text.target")).to_have_text("target 0.25")
    headings = tab.locator("table.results thead th").all_text_contents()
    rows = [row.locator("th, td").all_text_contents() for row in tab.locator("table.results tbody tr").all()]
    shown = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    assert shown["folb"]["rounds to 0.25"] == "4.5 (4 to 5)" and shown["fedavg"]["rounds to 0.25"] == "5"
    target = {
        label: [run.rounds_to(0.25) for run in runs]
        for label, runs in summary.labelled(store.read(path).runs()).items()
    }
    assert target == {"folb": [4, 5], "fedavg": [5, 5]}
    tab.get_by_role("button", name="Back to 1.5").click()
    expect(tab.locator("table.results")).to_contain_text("rounds to 1.5")
    expect(tab.locator("table.results caption")).to_contain_text("have a mean of at most the target")
    content, _ = downloaded(tab, "main", "Results of each seed as csv")
    best = [float(row["best"]) for row in csv.DictReader(io.StringIO(content.decode()))]
    assert best == pytest.approx([0.05, 0.06, 0.07, 0.08])


def test_only_devices_that_were_chosen_are_shown(overlaid, pair, visit):
    tab = visit(overlaid)
    own = [line for line in lines(pair[1]) if line["run"] == 0]
    chosen = sorted({k for line in own for k in line["devices"]})
    place = tab.locator("#experiment-1")
    expect(place.get_by_role("button", name=f"Show all {len(chosen)} devices")).to_be_visible()
    expect(place.locator("caption", has_text="never chosen")).to_contain_text(f"{1000 - len(chosen)} of 1,000")
    canvas = place.locator(".heat canvas")
    canvas.focus()
    for key in ("Home", *["Shift+ArrowUp"] * 20, "ArrowDown"):
        tab.keyboard.press(key)
    expect(place.locator("p.value")).to_contain_text(f"Round 1, device {chosen[1]}:")
    tab.keyboard.press("Enter")
    expect(place.locator(".device")).to_contain_text(f"Device {chosen[1]}, folb, seed 0")
    canvas.click(position={"x": 300, "y": 100})
    device = re.match(r"Round \d+, device (\d+):", place.locator("p.value").text_content())[1]
    expect(place.locator(".device")).to_contain_text(f"Device {device}, folb, seed 0")
    expect(place.locator(".device")).to_contain_text("Its own accuracy over the rounds was not recorded: use --metrics")


@pytest.mark.parametrize("width", [400, 800])
def test_a_comparison_fits_a_narrow_screen(width, overlaid, visit):
    tab = visit(
        f"{overlaid}#seeds=each&2.device=3&hidden={'x' * 300}", overlaid, viewport={"width": width, "height": 800}
    )
    expect(tab.locator(".misfit")).to_be_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow  # to measure three seconds, the machine must be quiet
def test_ten_long_runs_open_within_three_seconds(tmp_path, visit):
    algorithms = ("folb", "fedprox", "fedavg", "scaffold", "fedyogi")
    path = rundirectory.write(tmp_path, "a-0", algorithms=algorithms, seeds=5, rounds=1000, done=100, records=False)
    shown = view([store.read(path)] * 10)  # the curves of 1,000 rounds, made of the first 100
    for experiment in shown["experiments"]:
        for own in experiment["columns"]:
            own |= {key: own[key] * 10 for key in ("bytes", "up", "seconds", "judged", "loss")}
            own |= {"rounds": list(range(1, 1001)), "evaluated": list(range(1000))}
    html = page.render(shown)
    assert len(html) < 20e6
    (tmp_path / "report.html").write_text(html)
    begun = time.perf_counter()
    tab = visit((tmp_path / "report.html").as_uri())
    expect(charts(tab).first.locator("path.line")).to_have_count(50)
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert time.perf_counter() - begun < 3
    assert tab.evaluate("performance.memory.usedJSHeapSize") < 200e6


# the live page


@pytest.fixture
def served():
    """Start servers, which can be stopped before the end."""
    running = []

    def start(name=None, port=0):
        server = live.bound(name, port)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        running.append(server)

        def stop():
            running.remove(server)
            server.shutdown()
            server.server_close()

        return f"http://127.0.0.1:{server.server_port}/", server.server_port, stop

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def home(tmp_path):
    return tmp_path / "runs"


def test_a_round_shows_within_a_second(home, served, visit):
    path = rundirectory.write(home, "a-1", done=3, rounds=20, finished=False)
    address, _, _ = served()
    tab = visit(address)
    tab.get_by_role("link", name="a-1").click()
    state, cells = tab.locator(".state"), tab.locator("table.results tbody td")
    expect(state).to_have_text("interrupted, 27 of 180 rounds")
    charts(tab).first.focus()
    for t in range(4, 10):
        before = cells.all_text_contents()
        rundirectory.append(path, t, t)
        expect(state).to_have_text(f"interrupted, {9 * t} of 180 rounds", timeout=1000)
        tab.keyboard.press("End")
        expect(tab.locator(".readout caption").first).to_have_text(f"round {t}")
        assert cells.all_text_contents() != before
    rundirectory.append(path, 10, 20)
    (path / "results.json").write_text("{}")
    expect(state).to_have_text("finished", timeout=1000)
    shown = [row.locator("th, td").all_text_contents() for row in tab.locator("table.results tbody tr").all()]
    assert shown == view([store.read(path)])["experiments"][0]["table"]["rows"]


def test_live_records_of_the_run_that_is_chosen(home, served, visit):
    path = rundirectory.write(home, "a-1", done=10, rounds=20, finished=False)
    tab = visit(served("a-1")[0])
    chosen = tab.locator("table.counts tbody td:nth-child(2)")

    def counted(run):
        counts = Counter(k for line in lines(path) if line["run"] == run for k in line["devices"])
        return [str(count) for _, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:10]]

    expect(chosen).to_have_text(counted(0))
    charts(tab).first.press("+")
    tab.locator("select").select_option(label="fedprox, seed 1")
    expect(chosen).to_have_text(counted(4))
    expect(tab.locator(".curves").get_by_role("button", name="Show all")).to_be_enabled()  # the zoom stays
    rundirectory.append(path, 11, 12)
    expect(chosen).to_have_text(counted(4))
    expect(tab.locator(".state")).to_have_text("interrupted, 108 of 180 rounds")


def test_a_link_to_a_live_page(home, served, visit):
    rundirectory.write(home, "a-1", rounds=20)
    address = served()[0]
    tab = visit(f"{address}run/a-1#target=50&hidden=fedprox&zoom=5_15&device=3&run=folb%2C+seed+1", allowed=address)
    expect(tab.locator("table.results thead th").nth(1)).to_have_text("rounds to 50 %")
    expect(charts(tab).first.locator("path.line")).to_have_count(2)
    assert float(ticks(tab)[0]) >= 5 and float(ticks(tab)[-1]) <= 15
    expect(tab.locator(".device")).to_contain_text("Device 3, folb, seed 1")
    expect(tab.locator(".misfit")).to_be_hidden()
    tab.get_by_role("button", name="fedavg").click()
    assert "shown=folb" in settle(tab)


def test_it_survives_a_restart_of_the_server(home, served, visit):
    path = rundirectory.write(home, "a-1", done=3, rounds=20, finished=False)
    address, port, stop = served("a-1")
    tab = visit(address)
    state, status = tab.locator(".state"), tab.locator(".status")
    expect(state).to_have_text("interrupted, 27 of 180 rounds")
    expect(status).to_be_hidden()
    stop()
    expect(status).to_have_text("reconnecting")
    rundirectory.append(path, 4, 5)
    served("a-1", port)
    expect(state).to_have_text("interrupted, 45 of 180 rounds")
    expect(status).to_be_hidden()
    refused = [text for text in visit.complaints if "ERR_CONNECTION_REFUSED" in text]
    assert refused == visit.complaints  # what the browser itself says if the server is gone
    visit.complaints.clear()


def test_it_survives_a_restart_of_the_run(home, served, visit):
    path = rundirectory.write(home, "a-1", rounds=20)
    tab = visit(served("a-1")[0])
    state = tab.locator(".state")
    expect(state).to_have_text("finished")
    # restarted: other rounds, and another start time
    begun = {"done": 2, "rounds": 30, "finished": False, "started": "2026-02-03T04:05:06+00:00"}
    other = rundirectory.write(Path(f"{home}-new"), "a-1", **begun)
    shutil.copytree(other, path, dirs_exist_ok=True)
    (path / "results.json").unlink()
    expect(state).to_have_text("interrupted, 18 of 270 rounds")
    charts(tab).first.press("End")
    expect(tab.locator(".readout caption").first).to_have_text("round 2")
    # cut back to what was sound, and resumed
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(path) if line["round"] == 1))
    expect(state).to_have_text("interrupted, 9 of 270 rounds")
    rundirectory.append(path, 2, 3)
    expect(state).to_have_text("interrupted, 27 of 270 rounds")


@pytest.mark.slow
def test_the_list_of_runs_is_live_and_tells_them_apart(home, served, visit):
    rundirectory.write(home, "a-1", rounds=2, differs="local.mu=0.1 rounds=2")
    tab = visit(served()[0])
    rows = tab.locator("table.runs tbody tr")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("local.mu=0.1 rounds=2")
    expect(rows.first).to_contain_text("2026-01-02 03:04 UTC")
    link = tab.get_by_role("link", name="a-1")
    link.focus()
    other = rundirectory.write(home, "b-2", done=3, rounds=20, finished=False, differs="local.lr=0.5")
    expect(rows).to_have_count(2)
    expect(link).to_be_focused()
    state = rows.filter(has_text="b-2").locator(".state")
    expect(state).to_have_text("interrupted")
    environment.give_name(home / "a-1", {"name": "<b>first", "tags": ["x", "y"]})
    expect(rows.filter(has_text="a-1").locator("th")).to_have_text("a-1 “<b>first” (x, y)")
    with atomic.claimed(other):
        expect(state).to_have_text("running, 27 of 180 rounds")
        rundirectory.append(other, 4, 4)
        expect(state).to_have_text("running, 36 of 180 rounds")
    shutil.rmtree(other)
    expect(rows).to_have_count(1)


@pytest.mark.parametrize("width", [400, 1000, 1400])
def test_a_name_in_the_list_is_on_one_line(width, home, served, visit):
    rundirectory.write(
        home, "synthetic_1_1-0123abcd", rounds=2, differs="algorithms=folb,fedavg rounds=2 local.mu=0.01,0.1"
    )
    tab = visit(served()[0], viewport={"width": width, "height": 800})
    link = tab.get_by_role("link", name="synthetic_1_1-0123abcd")
    expect(link).to_be_visible()
    assert link.bounding_box()["height"] < 24
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    inner = "(node) => node.scrollWidth <= node.clientWidth"
    assert tab.locator(".scrolling").evaluate(inner)  # all of it can be seen


def test_a_table_of_unequal_rounds_says_so(tmp_path, visit):
    path = rundirectory.write(tmp_path, algorithms=("folb", "fedavg"), seeds=2, done=5, rounds=20, finished=False)
    kept = [line for line in lines(path) if line["algorithm"] == "folb" or line["round"] <= 3 + line["seed"]]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    table = visit(report(tmp_path / "report.html", path)).locator("table.results")
    assert table.locator("thead th").all_text_contents()[:2] == ["algorithm", "after"]
    assert table.locator("tbody td:nth-child(2)").all_text_contents() == ["5 rounds", "3 to 4 rounds"]


def test_the_contents_of_a_report_tell_experiments_apart(tmp_path, visit):
    paths = [rundirectory.write(tmp_path, name, rounds=2, differs=f"local.mu={name}") for name in ("a", "b")]
    entries = visit(report(tmp_path / "report.html", *paths)).locator("nav li")
    assert entries.all_text_contents() == [
        "synthetic_1_1, logistic regression a, finished local.mu=a",
        "synthetic_1_1, logistic regression b, finished local.mu=b",
    ]


def test_names_stay_text_on_the_live_page(home, served, visit):
    name = "<script>alert(1)<∕script><img src=x onerror=alert(1)>"
    rundirectory.write(home, name, algorithms=(name.replace("∕", "/"),), rounds=3, differs=name)
    address, _, _ = served()
    tab = visit(address)
    link = tab.locator("table.runs a")
    expect(link).to_have_text(name)
    link.click()
    expect(tab.locator(".name code")).to_have_text(name)
    expect(tab.locator("img")).to_have_count(0)
    expect(tab.locator("script")).to_have_count(2)
    tab.get_by_role("link", name="All runs").click()
    expect(link).to_have_text(name)
