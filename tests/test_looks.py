"""An algorithm looks the same in every picture and on the page; panels have one legend, and no tangles."""

import io
import re
from importlib.resources import files

import numpy as np
import pytest
import rundirectory

from folb.core.algorithms import ALGORITHMS
from folb.models import MODELS
from folb.report import figures, looks, payload
from folb.report.figures import Curve
from folb.results.run import Run
from folb.store import directory

THREE = {"folb": {}, "fedprox": {}, "fedavg": {}}


def run(label, noise=0.0, rounds=40):
    name, _, setting = label.partition(" ")
    t, one = np.arange(1, rounds + 1), np.ones((rounds, 1), int)
    accuracy = 0.9 - 0.6 * np.exp(-t / 8) + noise * (-1.0) ** t
    parameters = {"local.mu": setting.partition("=")[2]} if setting else {}
    return Run(name, parameters, 0, t, accuracy, 2 - accuracy, t, t, t, one, one, one > 1, t > 0)


@pytest.fixture
def drawn(monkeypatch):
    """Draw runs; the figure, as matplotlib has it, and the picture."""
    kept = []
    make = figures.subplots
    monkeypatch.setattr(figures, "subplots", lambda *given, **options: kept.append(make(*given, **options)) or kept[-1])

    def draw(runs, **about):
        picture = figures.curves(runs, **about)
        return kept[-1][0], picture

    return draw


# ---- colours and dashes


def test_the_page_has_the_colours_and_dashes_of_the_pictures():
    style = files("folb.report.page").joinpath("page.css").read_text()
    assert re.findall(r"--series\d: light-dark\((#\w+),", style) == list(looks.COLOURS)
    assert len(re.findall(r"\.colour(\d) \{ --own: var\(--series\1\); \}", style)) == len(looks.COLOURS)
    dashes = re.findall(r"\.dash\d \{ --dash: ([^;]+); \}", style)
    assert [() if dash == "none" else tuple(map(float, dash.split())) for dash in dashes] == list(looks.DASHES)
    ink, paper = (re.search(rf"--{name}: light-dark\((#\w+),", style)[1] for name in ("ink", "paper"))
    shades = re.findall(
        r"\.shade[12] \{ --colour: color-mix\(in srgb, var\(--own\) (\d+)%, var\(--(\w+)\)\); \}", style
    )
    others = {"ink": ink, "paper": paper}
    assert [(others[name], 1 - int(share) / 100) for share, name in shades] == [
        (other, pytest.approx(share)) for other, share in looks.SHADES[1:]
    ]
    assert float(re.search(r"\.line \{[^}]*stroke-width: ([\d.]+)", style)[1]) == looks.STROKE


def test_every_algorithm_has_a_look_of_its_own():
    assert looks.ALGORITHMS.keys() == ALGORITHMS.keys()
    assert len(set(looks.ALGORITHMS.values())) == len(ALGORITHMS)
    assert len({looks.ALGORITHMS[name][0] for name in (*THREE, "accord", "scaffold")}) == 5


def test_a_look_does_not_depend_on_the_picture():
    alone = {name: looks.looks([name])[name] for name in ALGORITHMS}
    assert looks.looks(ALGORITHMS) == alone and looks.looks([*ALGORITHMS][::-1]) == alone
    variants = [f"{name} local.mu={mu}" for name in ("fedavg", "folb") for mu in (0.1, 1)]
    chosen = looks.looks(["mine.py:other", *variants, "scaffold"])
    assert chosen["folb local.mu=0.1"] == alone["folb"] and chosen["scaffold"] == alone["scaffold"]
    assert chosen["folb local.mu=1"].colour == alone["folb"].colour
    assert chosen["mine.py:other"] == looks.looks(["mine.py:other"])["mine.py:other"]
    assert chosen["mine.py:other"].colour in looks.OTHERS


def test_no_two_curves_of_a_picture_look_alike():
    blue = [
        f"{name} local.mu={mu}" for name in ("folb", "mimelite") for mu in range(6)
    ]  # 14 of 15 looks, with the two below
    own = [f"mine.py:{n}" for n in range(8)]
    chosen = looks.looks([*own, *blue, *ALGORITHMS])
    assert len(set(chosen.values())) == len(chosen) and list(chosen) == [*own, *blue, *ALGORITHMS]
    others = ALGORITHMS.keys() - {"folb", "mimelite"}
    assert all(chosen[name] == looks.Look(*looks.ALGORITHMS[name]) for name in others)
    assert len(looks.looks(f"folb local.mu={n}" for n in range(100))) == 100  # more than there are looks
    assert looks.looks(["", "\udcff", " "])  # whatever a run is called


def test_a_shade_mixes_in_ink_or_paper():
    assert [looks.Look(0, 0, shade).ink for shade in range(3)] == ["#0072b2", "#0c4d72", "#59a3cd"]


def test_the_page_and_the_picture_agree(tmp_path, drawn):
    stored = directory.read(rundirectory.write(tmp_path))
    styles = {one["algorithm"]: one["style"] for one in payload.described(stored)["runs"]}
    figure, _ = drawn(stored.runs())
    (legend,) = figure.legends
    for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True):
        (look,) = [one for label, one in looks.looks(styles).items() if label == text.get_text()]
        assert line.get_color() == look.ink and styles[text.get_text()] == look.style


# ---- panels


@pytest.mark.parametrize("labels", [list(THREE), [f"folb local.mu={n}" for n in range(5)] + [*ALGORITHMS][:5]])
def test_a_picture_has_one_legend_and_labelled_axes_at_150_dpi(labels, drawn):
    from PIL import Image

    figure, picture = drawn([run(label) for label in labels], target=0.7, title="data, model")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == labels
    assert all(axes.get_legend() is None and axes.get_xlabel() == "round" and axes.get_ylabel() for axes in figure.axes)
    assert round(Image.open(io.BytesIO(picture)).info["dpi"][0]) == 150
    figure.draw_without_rendering()
    below = min(axes.get_tightbbox().y0 for axes in figure.axes)
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= below


def test_a_tangle_is_a_running_mean_with_the_raw_curve_behind(drawn):
    calm, _ = drawn([run(name) for name in THREE])
    tangle, _ = drawn([run("folb"), run("fedprox", noise=0.04), run("fedavg")])
    assert [len(axes.lines) for axes in (calm.axes[0], tangle.axes[0])] == [3, 6]
    assert calm.axes[0].get_ylabel() == "test accuracy (%)"
    assert tangle.axes[0].get_ylabel() == f"test accuracy (%)\n{figures.SMOOTHED}"
    raw, smooth = (line for line in tangle.axes[0].lines if line.get_color() == looks.looks(THREE)["fedprox"].ink)
    assert raw.get_alpha() < 0.5 < smooth.get_linewidth() and raw.get_zorder() < smooth.get_zorder()
    values = 100 * run("fedprox", noise=0.04).test_accuracy
    np.testing.assert_allclose(raw.get_ydata(), values)
    np.testing.assert_allclose(smooth.get_ydata()[[0, 1, 20]], [values[0], values[:3].mean(), values[18:23].mean()])


def test_a_steep_or_a_short_curve_is_not_a_tangle():
    t = np.arange(60.0)
    assert not figures._swings(90 - 80 * np.exp(-t / 3), log=False)
    assert not figures._swings(2 * np.exp(-t / 5), log=True)
    assert figures._swings(80 + 3 * (-1) ** t, log=False) and figures._swings(2 + 0.5 * (-1) ** t, log=True)
    assert not figures._swings(80 + 3 * (-1) ** t[:10], log=False)
    assert not figures._swings(np.full(60, np.nan), log=True) and not figures._swings(-t, log=True)


def test_a_running_mean_of_any_length():
    for n in range(8):
        values = np.arange(float(n)) ** 2
        means = [values[t - r : t + r + 1].mean() for t in range(n) for r in [min(2, t, n - 1 - t)]]
        np.testing.assert_allclose(figures.running_mean(values), means)


def test_a_curve_without_a_finite_value_is_drawn():
    figure, axes = figures.subplots(1, 1, figsize=(3, 2))
    nothing = np.full(30, np.nan)
    figures.draw(axes, {"folb": Curve(range(30), nothing, nothing, nothing)}, looks.looks(["folb"]), "loss", log=True)
    assert figures.finished(figure, "title", "", "png").startswith(b"\x89PNG") and axes.get_yscale() == "linear"


# ---- words


def test_every_model_has_a_title_in_words():
    assert looks.MODELS.keys() == MODELS.keys()
    assert looks.title("/data/mine.npz", "logistic") == "mine.npz, logistic regression"
    assert looks.title("mnist", "my/model.py:net") == "mnist, model.py:net"
