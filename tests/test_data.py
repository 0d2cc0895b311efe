"""Datasets: the synthetic recipe, users' own files, and every way in which these can be wrong."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, get_origin, get_type_hints

import numpy as np
import pytest

from folb import data
from folb.data import leaf, synthetic, tabular
from folb.data.federation import Federation
from folb.errors import InputError

# ---- the flat layout


def rows(split, k):
    return slice(split.start[k], split.start[k] + split.size[k])


def check_layout(federation, devices):
    """Start and size cover every row once, in device order; types are what the simulator takes."""
    assert devices == federation.N
    for split in (federation.train, federation.test):
        assert len(split.size) == len(split.start) == devices
        np.testing.assert_array_equal(split.start, np.cumsum(split.size) - split.size)
        assert split.size.sum() == len(split.x) == len(split.y)
        assert split.start.dtype == split.size.dtype == split.y.dtype == np.int32
        assert split.x.dtype in (np.float32, np.int32) and split.x.flags.c_contiguous
        assert len(split.y) == 0 or (split.y.min() >= 0 and split.y.max() < federation.classes)
    assert federation.train.size.min() >= 1


def test_from_arrays_gathers_each_device_in_the_order_of_its_samples():
    device = np.array(["b", "a", "b", "c", "a", "b", "c"])
    x = np.arange(14.0).reshape(7, 2)
    federation = Federation.from_arrays("toy", x, np.array([0, 1, 2, 0, 1, 2, 0]), device, [0, 0, 1, 0, 1, 0, 0])
    check_layout(federation, 3)
    assert federation.shape == (2,) and federation.classes == 3
    np.testing.assert_array_equal(federation.train.size, [1, 2, 2])
    np.testing.assert_array_equal(federation.train.x[:, 0], [2, 0, 10, 6, 12])
    np.testing.assert_array_equal(federation.test.x[:, 0], [8, 4])
    np.testing.assert_array_equal(federation.test.size, [1, 1, 0])
    np.testing.assert_array_equal(federation.test.y, [1, 2])


def test_devices_may_be_strings_or_numbers():
    x, y = np.arange(6.0)[:, None], np.array([0, 1] * 3)
    split = [False, False, False, True, True, True]
    for device in (["p", "q", "r"], [7, 8, 10**12], [-1.5, 0.0, 2.0], np.array(["p", "q", "r"], object)):
        federation = Federation.from_arrays("toy", x, y, np.tile(device, 2), split)
        np.testing.assert_array_equal(federation.test.x[:, 0], [3, 4, 5])


def test_holding_out_takes_a_tenth_of_each_device_and_never_all():
    sizes = [1, 2, 9, 10, 11, 100]
    device = np.repeat(np.arange(6), sizes)
    x = np.arange(len(device), dtype=np.float64)[:, None]
    y = np.zeros(len(device))
    federation = Federation.from_arrays("toy", x, y, device)
    check_layout(federation, 6)
    np.testing.assert_array_equal(federation.test.size, [0, 1, 1, 1, 2, 10])
    for k in range(6):
        both = np.concatenate([side.x[rows(side, k), 0] for side in (federation.train, federation.test)])
        np.testing.assert_array_equal(np.sort(both), np.flatnonzero(device == k))
    again = Federation.from_arrays("toy", x, y, device, holdout_seed=0)
    other = Federation.from_arrays("toy", x, y, device, holdout_seed=1)
    np.testing.assert_array_equal(again.test.x, federation.test.x)
    assert not np.array_equal(other.test.x, federation.test.x)


def test_integers_stay_integers_and_whole_floats_are_labels():
    x = np.array([[0, 255], [7, 8]])
    federation = Federation.from_arrays("toy", x, np.array([1.0, 0.0]), [0, 0], [0, 1])
    assert federation.train.x.dtype == np.int32 and federation.train.x[0, 1] == 255
    images = Federation.from_arrays("toy", x.astype(np.uint8), [1, 0], [0, 0], [0, 1])
    assert images.train.x.dtype == np.uint8 and images.train.x[0, 1] == 255
    assert federation.train.y.dtype == np.int32 and federation.classes == 2
    binary = Federation.from_arrays("toy", x > 7, np.array([True, False]), [0, 0], [0, 1])
    assert binary.train.x.dtype == np.float32 and binary.train.y[0] == 1


def test_few_samples_may_have_more_classes():
    federation = Federation.from_arrays("toy", np.zeros((2, 1)), [61, 3], [0, 0], [0, 1])
    assert federation.classes == 62


X, Y, DEVICE = np.zeros((4, 2)), np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])


def with_value(values, index, value):
    changed = np.array(values, dtype=np.result_type(values, np.asarray(value)))
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"x": with_value(X, (2, 1), np.nan)}, "x[2, 1]", "nan"),
        ({"x": with_value(X, (0, 0), -np.inf)}, "x[0, 0]", "-inf"),
        ({"x": with_value(X, (3, 0), 1e300)}, "x[3, 0]", "1e+300"),
        ({"x": np.full((4, 1), 2**40)}, "x[0, 0]", "1099511627776"),
        ({"x": X.astype(str)}, "x", "<U32"),
        ({"x": X.astype(complex)}, "x", "complex128"),
        ({"x": X.astype("m8[s]")}, "x", "timedelta"),
        ({"x": [[1.0], [2.0, 3.0], [4.0], [5.0]]}, "x", "[[1.0], [2.0"),
        ({"x": np.float32(3)}, "shape of x", "()"),
        ({"x": np.zeros((4, 0))}, "shape of x", "(4, 0)"),
        ({"x": np.zeros((0, 2)), "y": Y[:0], "device": DEVICE[:0]}, "len(x)", "0"),
        ({"y": Y[:3]}, "len(y)", "3"),
        ({"y": np.eye(4)}, "shape of y", "(4, 4)"),
        ({"y": ["a", "b", "a", "b"]}, "y", "<U1"),
        ({"y": [0, 1, 0, -1]}, "y[3]", "-1"),
        ({"y": [0, 1, 0.5, 1]}, "y[2]", "0.5"),
        ({"y": [0, np.nan, 0, 1]}, "y[1]", "nan"),
        ({"y": [0, 1e300, 0, 1]}, "y[1]", "1e+300"),
        ({"y": np.array([0, 2**64 - 1, 0, 1], np.uint64)}, "y[1]", str(2**64 - 1)),
        ({"y": [0, 2_000_000_000, 0, 1]}, "y[1]", "2000000000"),
        ({"y": [0, 1, 2, 1], "classes": 2}, "y[2]", "2"),
        ({"classes": 1}, "classes", "1"),
        ({"device": DEVICE[:3]}, "len(device)", "3"),
        ({"device": 5}, "shape of device", "()"),
        ({"device": [0, 0, np.nan, 1]}, "device[2]", "nan"),
        ({"device": np.array([0, "a", None, 1], object)}, "device", "object"),
        ({"split": [0, 1, 0]}, "len(split)", "3"),
        ({"split": 1}, "shape of split", "()"),
        ({"split": [0, 1, 0, 2]}, "split[3]", "2"),
        ({"split": [0, 1, 0, np.nan]}, "split[3]", "nan"),
        ({"split": ["train", "test", "train", "valid"]}, "split[3]", "'valid'"),
        ({"split": [b"train", b"test", b"train", b"test"]}, "split[0]", "b'train'"),
        ({"split": [0, 1, 1, 1]}, "training samples of device 1", "0"),
        (
            {"device": np.array(["a", "a", "b\n", "b\n"], object), "split": [0, 1, 1, 1]},
            r"training samples of device 'b\n'",
            "0",
        ),
    ],
)
def test_from_arrays_refuses(change, field, value):
    given = {"x": X, "y": Y, "device": DEVICE, "split": [0, 1, 0, 1]} | change
    with pytest.raises(InputError) as error:
        Federation.from_arrays("toy", **given)
    assert str(error.value).startswith(f"toy: {field} = ")
    assert value in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "1"])
def test_a_holdout_seed_is_a_whole_number(seed):
    with pytest.raises(InputError, match=r"^holdout_seed = "):
        Federation.from_arrays("toy", X, Y, DEVICE, holdout_seed=seed)


def test_a_holdout_seed_beside_a_split_is_refused():
    with pytest.raises(InputError, match=r"^holdout_seed = 0: should not be set"):
        Federation.from_arrays("toy", X, Y, DEVICE, [0, 1, 0, 1], holdout_seed=0)


# ---- the synthetic recipe


def joined(federation, k):
    """Device k's samples in the order in which they were drawn."""
    train, test = federation.train, federation.test
    return (
        np.concatenate([train.x[rows(train, k)], test.x[rows(test, k)]]),
        np.concatenate([train.y[rows(train, k)], test.y[rows(test, k)]]),
    )


@pytest.fixture(scope="module")
def many():
    """A thousand devices of one size, whose u_k, B_k and v_k can be judged as samples."""
    return data.load("synthetic", alpha=0.5, beta=3.0, devices=1000, sizes=[40] * 1000)


@pytest.mark.parametrize("name", ["synthetic_iid", "synthetic_1_1", "synthetic"])
def test_synthetic_layout_and_split(name):
    federation = data.load(name)
    check_layout(federation, 30)
    assert federation.shape == (60,) and federation.classes == 10
    total = federation.train.size + federation.test.size
    np.testing.assert_array_equal(federation.train.size, (0.9 * total).astype(int))
    assert total.min() >= 50


def test_synthetic_sizes_are_lognormal_plus_50():
    sizes = np.concatenate([synthetic._sizes("lognormal", "synthetic_1_1", 1000, draw) for draw in range(10)])
    for n in (1, 8, 55, 403, 2981):  # whole, so that rounding down crosses none of them
        at_least = 1 - NormalDist(4, 2).cdf(np.log(n))
        assert np.mean(sizes - 50 >= n) == pytest.approx(at_least, abs=0.02)
    assert sizes.min() == 50


def test_x_has_covariance_j_to_the_minus_1_2():
    federation = data.load("synthetic_iid", devices=1, sizes=[40_000])
    x, _ = joined(federation, 0)
    expected = np.arange(1, 61) ** -1.2
    np.testing.assert_allclose(x.var(axis=0), expected, rtol=0.04)
    np.testing.assert_allclose(x.mean(axis=0) / np.sqrt(expected), 0, atol=0.025)
    np.testing.assert_allclose(np.corrcoef(x.T) - np.eye(60), 0, atol=0.03)


def test_means_of_x_are_N_B_1_and_B_is_N_0_beta(many):
    mean = np.array([joined(many, k)[0].mean(axis=0) for k in range(many.N)])
    noise = np.arange(1, 61) ** -1.2 / 40
    B = mean.mean(axis=1)
    assert B.std() == pytest.approx(3.0, rel=0.1)
    within = (mean - B[:, None]).var(axis=0, ddof=1) * 60 / 59 - noise
    np.testing.assert_allclose(within, 1, rtol=0.25)
    assert within.mean() == pytest.approx(1, rel=0.03)


def test_labels_reproduce_the_argmax_of_the_devices_own_model():
    federation = data.load("synthetic_1_1", devices=5, draw=3)
    for k in range(5):
        x, y = joined(federation, k)
        rng = np.random.default_rng([3, k, 1])
        u, B = rng.normal(0, 1.0), rng.normal(0, 1.0)
        v = rng.normal(B, 1, 60)
        W, b = rng.normal(u, 1, (60, 10)), rng.normal(u, 1, 10)
        assert np.mean(np.argmax(x @ W + b, axis=1) == y) > 0.999  # x has been rounded to 32 bits since
        np.testing.assert_allclose(x.mean(axis=0), v, atol=6 / np.sqrt(len(x)))


def test_alpha_changes_no_label_and_beta_no_noise():
    """u_k shifts all class scores alike, a property of the published recipe; B_k only shifts x."""
    plain, alpha, beta = (data.load(f"synthetic_{a}_{b}", draw=1) for a, b in ((0, 1), (5, 1), (0, 2)))
    np.testing.assert_array_equal(plain.train.x, alpha.train.x)
    np.testing.assert_array_equal(plain.train.y, alpha.train.y)
    shift = beta.train.x - plain.train.x
    assert np.ptp(shift[rows(plain.train, 0)]) < 1e-5 < np.ptp(shift)
    assert np.mean(beta.train.y != plain.train.y) > 0.05


def test_iid_devices_share_one_model():
    federation = data.load("synthetic_iid", draw=2)
    shared = np.random.default_rng([2])
    W, b = shared.normal(0, 1, (60, 10)), shared.normal(0, 1, 10)
    for side in (federation.train, federation.test):
        assert np.mean(np.argmax(side.x @ W + b, axis=1) == side.y) > 0.999
    x = [joined(federation, k)[0] for k in range(30)]
    assert not np.array_equal(x[0][:50], x[1][:50])


def test_devices_of_synthetic_1_1_do_not_share_a_model():
    """Their labels cover different classes; where the model is shared all devices see about the same."""
    common = {}
    for name in ("synthetic_iid", "synthetic_1_1"):
        federation = data.load(name, devices=20, sizes=[300] * 20)
        share = np.array([np.bincount(joined(federation, k)[1], minlength=10) / 300 for k in range(20)])
        common[name] = share.std(axis=0).mean()
    assert common["synthetic_iid"] < 0.03 < 0.1 < common["synthetic_1_1"]


@pytest.mark.parametrize("name", ["synthetic_iid", "synthetic_1_1"])
def test_the_same_draw_gives_the_same_bits(name):
    first, again, other = data.load(name), data.load(name, draw=0), data.load(name, draw=1)
    for side in ("train", "test"):
        for field in ("x", "y", "start", "size"):
            same = getattr(getattr(first, side), field)
            assert same.tobytes() == getattr(getattr(again, side), field).tobytes()
            assert same.tobytes() != getattr(getattr(other, side), field).tobytes()


@pytest.mark.parametrize(
    ("name", "total", "largest"), [("synthetic_1_1", 10_840, 6_620), ("synthetic_iid", 8_050, 3_600)]
)
def test_published_sizes(name, total, largest):
    federation = data.load(name, sizes="published")
    check_layout(federation, 30)
    assert federation.test.size.sum() == total // 10 and federation.train.size.sum() == total - total // 10
    assert (federation.train.size + federation.test.size).max() == largest


@pytest.mark.parametrize("name", ["synthetic_iid", "synthetic_1_1"])
def test_sizes_change_only_sizes(name):
    drawn, fixed = data.load(name, devices=3), data.load(name, devices=3, sizes="20,50,31")
    np.testing.assert_array_equal(fixed.train.size + fixed.test.size, [20, 50, 31])
    for k, n in enumerate((20, 50, 31)):
        for ours, theirs in zip(joined(fixed, k), joined(drawn, k), strict=True):
            np.testing.assert_array_equal(ours, theirs[:n])


def test_more_devices_leave_the_first_ones_as_they_are():
    few, more = data.load("synthetic_1_1", devices=2), data.load("synthetic_1_1", devices=3)
    for k in range(2):
        np.testing.assert_array_equal(joined(few, k)[0], joined(more, k)[0])


SYNTHETIC = ("synthetic", "synthetic_iid", "synthetic_1_1")


@pytest.mark.parametrize(
    ("name", "settings", "field"),
    [
        ("synthetic", {"alpha": -1}, "alpha"),
        ("synthetic", {"alpha": float("nan")}, "alpha"),
        ("synthetic", {"alpha": "1"}, "alpha"),
        ("synthetic", {"beta": float("inf")}, "beta"),
        ("synthetic", {"beta": 1e300}, "beta"),
        ("synthetic_-1_1", {}, "alpha"),
        ("synthetic_0_1e9", {}, "beta"),
        ("synthetic_nan_1", {}, "alpha"),
        *((name, {"draw": draw}, "draw") for name in data.DATASETS for draw in (-1, 2**32, 0.5, "0")),
        *((name, {"devices": n}, "devices") for name in SYNTHETIC for n in (0, -3, 10**12, 2.0)),
        ("synthetic_iid", {"sizes": "normal"}, "sizes"),
        ("synthetic_iid", {"sizes": ""}, "sizes"),
        ("synthetic_iid", {"sizes": 1}, "sizes"),
        ("synthetic_iid", {"sizes": 40.5}, "sizes"),
        ("synthetic_iid", {"sizes": [50, 80], "devices": 3}, "sizes"),
        ("synthetic_iid", {"sizes": "published", "devices": 29}, "sizes"),
        ("synthetic_iid", {"sizes": [50, 1], "devices": 2}, "sizes"),
        ("synthetic_iid", {"sizes": [50, 60.5], "devices": 2}, "sizes"),
        ("synthetic_iid", {"sizes": [10**12, 60], "devices": 2}, "sizes"),
    ],
)
def test_bad_settings_are_refused(name, settings, field):
    with pytest.raises(InputError) as error:
        data.load(name, **settings)
    assert error.value.field == field


@pytest.mark.parametrize("size", [20, "20", [20]])
def test_one_size_is_for_all_devices(size):
    federation = data.load("synthetic_1_1", devices=3, sizes=size)
    np.testing.assert_array_equal(federation.train.size, [18, 18, 18])


def test_sizes_may_be_an_array():
    federation = data.load("synthetic_iid", devices=2, sizes=np.array([20, 30]))
    np.testing.assert_array_equal(federation.train.size, [18, 27])


# ---- names


def test_names_are_found_in_any_case():
    assert data.constructor("Synthetic_1_1") is data.DATASETS["synthetic_1_1"]
    assert data.load("SYNTHETIC_IID", devices=1, sizes="20").name == "synthetic_iid"


def test_any_alpha_and_beta_has_a_name():
    named = data.load("Synthetic_0.5_2", devices=2, sizes="20,20")
    spelled = data.load("synthetic", alpha=0.5, beta=2, devices=2, sizes="20,20")
    assert named.name == spelled.name == "synthetic_0.5_2"
    np.testing.assert_array_equal(named.train.x, spelled.train.x)
    one = data.load("synthetic_1_1", devices=2, sizes="20,20")
    np.testing.assert_array_equal(one.train.x, data.load("synthetic", devices=2, sizes="20,20").train.x)
    assert not np.array_equal(one.train.x, named.train.x)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sinthetic_iid", "did you mean 'synthetic_iid'"),
        ("synthetic_x_1", "did you mean 'synthetic_1_1'"),
        (
            "nothing",
            "choose one of cifar10, cifar100, femnist, mnist, sent140, shakespeare, synthetic, synthetic_1_1, ",
        ),
        ("", "choose one of"),
        ("no/such/directory", "no such file or directory"),
        ("missing.npz", "no such file or directory"),
        ("missing.json.gz", "no such file or directory"),
        ("nul\0byte", "choose one of"),
        ("a/" * 5000, "no such file or directory"),
    ],
)
def test_unknown_names(name, expected):
    with pytest.raises(InputError) as error:
        data.load(name)
    assert error.value.field == "dataset" and expected in str(error.value)


def test_settings_are_checked_against_the_dataset():
    with pytest.raises(InputError, match=r"^setting of synthetic_iid = 'device': did you mean 'devices'"):
        data.load("synthetic_iid", device=3)
    with pytest.raises(InputError, match=r"^setting of synthetic_1_1 = 'alpha'"):
        data.load("synthetic_1_1", alpha=2)


def test_every_setting_says_what_it_means(tmp_path):
    write_leaf(tmp_path / "d.json")
    for name in (*data.DATASETS, "synthetic_2_3", tmp_path / "d.json"):
        make = data.constructor(name)
        assert make.__doc__
        hints = get_type_hints(make, include_extras=True)
        for parameter in inspect.signature(make).parameters.values():
            assert get_origin(hints[parameter.name]) is Annotated
            assert parameter.default is not parameter.empty


def test_importing_the_datasets_does_not_load_jax():
    code = "import sys, folb.data; folb.data.load('synthetic_iid', devices=2); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- LEAF json


def leaf_content(users=("ann", "bob"), samples=10, features=3, first=0):
    """A well-formed file; every x is different, and y = 0, 1, 2, 0, …"""
    content = {"users": list(users), "num_samples": [samples] * len(users), "user_data": {}}
    for user in reversed(users):  # the published files are not in order either
        content["user_data"][user] = {
            "x": [[first + 100.0 * users.index(user) + i + j / 8 for j in range(features)] for i in range(samples)],
            "y": [float(i % 3) for i in range(samples)],
        }
    return content


def write_leaf(path: Path, content=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(leaf_content() if content is None else content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_leaf_train_and_test(tmp_path):
    write_leaf(tmp_path / "train" / "a.json", leaf_content(["bob", "ann"]))
    write_leaf(tmp_path / "train" / "b.json.gz", leaf_content(["cid"], samples=4, first=1000))
    write_leaf(tmp_path / "test" / "a.json", leaf_content(["cid"], samples=2, first=2000))
    write_leaf(tmp_path / "test" / "z.json.gz", leaf_content(["ann"], samples=3, first=3000))
    (tmp_path / "train" / "._a.json").write_bytes(b"\0\5\26\7")
    (tmp_path / "train" / "readme.txt").write_text("not data")
    federation = data.load(tmp_path)
    check_layout(federation, 3)
    assert federation.name == str(tmp_path) and federation.classes == 3 and federation.shape == (3,)
    np.testing.assert_array_equal(federation.train.size, [10, 10, 4])  # bob, ann, cid
    np.testing.assert_array_equal(federation.test.size, [0, 3, 2])
    np.testing.assert_array_equal(federation.train.x[federation.train.start, 0], [0, 100, 1000])
    np.testing.assert_array_equal(federation.train.x[12], [102, 102.125, 102.25])
    np.testing.assert_array_equal(federation.test.x[:, 0], [3000, 3001, 3002, 2000, 2001])
    np.testing.assert_array_equal(federation.test.y, [0, 1, 2, 0, 1])
    assert federation.train.x.dtype == np.float32


@pytest.mark.parametrize("layout", ["d.json", "d.json.gz", "several"])
def test_leaf_without_sides_holds_out_a_tenth(tmp_path, layout):
    path = tmp_path / layout
    if layout == "several":
        write_leaf(path / "1.json", leaf_content(["ann"]))
        write_leaf(path / "2.json.gz", leaf_content(["bob"], first=100))
    else:
        write_leaf(path)
    federation = data.load(str(path))
    check_layout(federation, 2)
    np.testing.assert_array_equal(federation.train.size, [9, 9])
    assert sorted(joined(federation, 1)[0][:, 0]) == list(range(100, 110))
    seeds = [data.load(path, holdout_seed=seed).test.x[:, 0].tolist() for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] == federation.test.x[:, 0].tolist() != seeds[2]


def test_leaf_with_both_sides_has_nothing_to_hold_out(tmp_path):
    write_leaf(tmp_path / "train" / "a.json")
    write_leaf(tmp_path / "test" / "a.json")
    with pytest.raises(InputError, match=r"^holdout_seed = 1: should not be set"):
        data.load(tmp_path, holdout_seed=1)


def test_leaf_rows_may_have_any_shape(tmp_path):
    content = leaf_content()
    for user in content["user_data"].values():
        user["x"] = [[[1, 2], [3, True]]] * 10
    assert data.load(write_leaf(tmp_path / "d.json", content)).shape == (2, 2)
    for user in content["user_data"].values():
        user["x"] = list(range(10))
    assert data.load(write_leaf(tmp_path / "d.json", content)).shape == ()


def test_leaf_users_may_be_called_anything(tmp_path):
    users = ["x", "y", "users", "é\n", "\ud800", ""]
    federation = data.load(write_leaf(tmp_path / "d.json", leaf_content(users)))
    check_layout(federation, 6)


def spoil(*path, value):
    """A change to a well-formed file: content[path[0]][path[1]]… = value, or gone if value is DELETED."""

    def change(content):
        *above, last = path
        for key in above:
            content = content[key]
        if value is DELETED:
            del content[last]
        else:
            content[last] = value

    return change


DELETED = object()
BOB = ("user_data", "bob")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (spoil("users", value=DELETED), ": users = None: is missing"),
        (spoil("num_samples", value=DELETED), ": num_samples = None: is missing"),
        (spoil("user_data", value=DELETED), ": user_data = None: is missing"),
        (spoil("users", value="ann"), ": users = 'ann': should be a list"),
        (spoil("users", value={"ann": 1}), ": users = {'ann': 1}: should be a list"),
        (spoil("users", 1, value=7), ": users = 7: should be strings"),
        (spoil("users", 1, value=["bob"]), ": users = ['bob']: should be strings"),
        (spoil("users", 1, value="ann"), ": user 'ann': user_data = None: is missing, or the user is listed twice"),
        (spoil("users", 1, value="eve\n"), r": user 'eve\n': user_data = None: is missing"),
        (spoil("num_samples", value=20), ": num_samples = 20: should be a list"),
        (spoil("num_samples", value=[10]), ": len(num_samples) = 1: should be len(users) = 2"),
        (spoil("num_samples", 1, value=11), ": user 'bob': num_samples = 11: should be the number of samples"),
        (spoil("num_samples", 1, value="10"), ": user 'bob': num_samples = '10'"),
        (spoil("num_samples", 1, value=None), ": user 'bob': num_samples = None"),
        (spoil("user_data", value=[]), ": user_data = []: should be an object"),
        (spoil(*BOB, value=DELETED), ": user 'bob': user_data = None: is missing"),
        (spoil(*BOB, value=[1]), ": user 'bob': user_data = [1]: should be a json object with x and y"),
        (spoil("user_data", "eve", value={}), ": users = 'eve': is in user_data, and should be listed"),
        (spoil(*BOB, "x", value=DELETED), ": user 'bob': x = None: is missing"),
        (spoil(*BOB, "y", value=DELETED), ": user 'bob': y = None: is missing"),
        (spoil(*BOB, "x", value="abc"), ": user 'bob': x = 'abc': should be a list"),
        (spoil(*BOB, "x", value={"0": 1}), ": user 'bob': x = {'0': 1}: should be a list"),
        (spoil(*BOB, "x", value=3), ": user 'bob': x = 3: should be a list"),
        (spoil(*BOB, "y", value=None), ": user 'bob': y = None: should be a list"),
        (spoil(*BOB, "x", 9, value=DELETED), ": user 'bob': len(y) = 10: should be len(x) = 9"),
        (spoil(*BOB, "y", 9, value=DELETED), ": user 'bob': len(y) = 9: should be len(x) = 10"),
        (spoil(*BOB, "x", 4, value=[1.0, 2.0]), ": user 'bob': shape of x[4] = (2,): should be (3,)"),
        (spoil(*BOB, "x", 4, value=5.0), ": user 'bob': shape of x[4] = (): should be (3,)"),
        (spoil(*BOB, "x", 4, value=[1, [2], 3]), ": user 'bob': x[4] = [1, [2], 3]: should be a number, or"),
        (spoil(*BOB, "x", 4, value=["1", "2", "3"]), ": user 'bob': x[4] = ['1', '2', '3']: should be a number"),
        (spoil(*BOB, "x", 4, 1, value="2"), ": user 'bob': x[4] = "),
        (spoil(*BOB, "x", 4, 1, value=None), ": user 'bob': x[4] = "),
        (spoil(*BOB, "x", 4, 1, value={}), ": user 'bob': x[4] = "),
        (spoil(*BOB, "x", 4, 1, value=10**400), ": user 'bob': x[4] = "),
        (spoil(*BOB, "x", value=["to be", "or not"] * 5), ": user 'bob': x[0] = 'to be'"),
        (spoil(*BOB, "x", value=[[]] * 10), ": user 'bob': shape of x = (10, 0)"),
        (spoil(*BOB, "x", value=[[1.0, 2.0]] * 10), ": user 'bob': shape of a row of x = (2,): should be (3,)"),
        (spoil(*BOB, "x", 4, 1, value=float("nan")), ": user 'bob': x[4, 1] = nan: should be a finite"),
        (spoil(*BOB, "x", 4, 1, value=float("inf")), ": user 'bob': x[4, 1] = inf: should be a finite"),
        (spoil(*BOB, "x", 4, 1, value=1e300), ": user 'bob': x[4, 1] = inf: should be a finite"),
        (spoil(*BOB, value={"x": [], "y": []}), ": user 'bob': num_samples = 10"),
        (spoil(*BOB, "y", 3, value=-1), ": user 'bob': y[3] = -1.0: should be a whole number from 0 to 99"),
        (spoil(*BOB, "y", 3, value=0.5), ": user 'bob': y[3] = 0.5"),
        (spoil(*BOB, "y", 3, value=1.00000001), ": user 'bob': y[3] = 1.00000001"),
        (spoil(*BOB, "y", 3, value=10**9), ": user 'bob': y[3] = 1000000000.0"),
        (spoil(*BOB, "y", 3, value=float("nan")), ": user 'bob': y[3] = nan"),
        (spoil(*BOB, "y", 3, value="a"), ": user 'bob': y[3] = 'a': should be a number"),
        (spoil(*BOB, "y", 3, value=[1]), ": user 'bob': shape of y[3] = (1,)"),
        (spoil(*BOB, "y", value=[[0, 1]] * 10), ": user 'bob': shape of y = (10, 2)"),
    ],
)
@pytest.mark.parametrize("side", ["train", "test"])
def test_leaf_refuses(tmp_path, change, expected, side):
    write_leaf(tmp_path / "train" / "a.json")
    write_leaf(tmp_path / "test" / "a.json")
    content = leaf_content()
    change(content)
    spoiled = write_leaf(tmp_path / side / "a.json", content)
    with pytest.raises(InputError) as error:
        data.load(tmp_path)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"{spoiled}{expected}")


def test_leaf_refuses_an_empty_user(tmp_path):
    content = leaf_content()
    content["num_samples"][1], content["user_data"]["bob"] = 0, {"x": [], "y": []}
    with pytest.raises(InputError, match=r"user 'bob': samples = 0: should be at least 1$"):
        data.load(write_leaf(tmp_path / "d.json", content))
    with pytest.raises(InputError, match=r"d\.json: users = \[\]: should be at least one$"):
        data.load(write_leaf(tmp_path / "d.json", leaf_content([])))


def test_leaf_refuses_a_user_in_two_files(tmp_path):
    write_leaf(tmp_path / "a.json", leaf_content(["ann"]))
    write_leaf(tmp_path / "b.json", leaf_content(["bob", "ann"]))
    with pytest.raises(InputError, match=r"b\.json: user = 'ann': should be in one file only; see .*a\.json: user"):
        data.load(tmp_path)


def test_leaf_refuses_a_test_user_without_training_data(tmp_path):
    write_leaf(tmp_path / "train" / "a.json", leaf_content(["ann"]))
    write_leaf(tmp_path / "test" / "a.json", leaf_content(["ann", "bob"]))
    with pytest.raises(InputError, match=r"a\.json: user 'bob': training samples = 0: should be in a file of .*train"):
        data.load(tmp_path)


def test_leaf_refuses_half_a_layout(tmp_path):
    write_leaf(tmp_path / "train" / "a.json")
    with pytest.raises(InputError, match=r"sub-directories = \['train'\]: should be both train and test, or neither"):
        data.load(tmp_path)
    (tmp_path / "test").mkdir()
    with pytest.raises(InputError, match=r"test: json files = 0: should be at least one"):
        data.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["d/a.json", "d.json.gz", "d.csv", "d.parquet", "d.npz", "d/train/x.npy", "d/federation.json"]
)
def test_a_pipe_is_an_error_of_one_line(tmp_path, name):
    """To open it would wait for somebody who writes to it."""
    if name == "d/federation.json":
        np.save(made(tmp_path / "d" / "train" / "x.npy"), np.zeros(1))
    os.mkfifo(made(tmp_path / name))
    with pytest.raises(InputError, match=re.escape(name) + r".*not a regular file"):
        data.load(tmp_path / ("d" if "/" in name else name))


def made(path):
    """The path, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


GOOD = json.dumps(leaf_content()).encode()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("d.json", b"", "should be json"),
        ("d.json", GOOD[:-40], "should be json"),
        ("d.json", GOOD + b"}", "should be json"),
        ("d.json", b"[" * 100_000, "should be json"),
        ("d.json", b'{"users": ' + b"9" * 5000 + b"}", "should be json"),
        ("d.json", b"\xef\xbb\xbf" + GOOD[:-1], "should be json"),
        ("d.json", GOOD.replace(b"ann", b"\xff\xfe"), "should be utf-8"),
        ("d.json", GOOD.decode().encode("utf-16"), "should be utf-8"),
        ("d.json", b"[1, 2]", "should be a json object"),
        ("d.json", b"null", "should be a json object"),
        ("d.json", b"NaN", "should be a json object"),
        ("d.json", GOOD[:-1] + b', "users": []}', "should not be repeated"),
        ("d.json", GOOD.replace(b'"bob": {', b'"ann": {'), "should not be repeated"),
        ("d.json.gz", b"", "should be json"),
        ("d.json.gz", gzip.compress(GOOD)[2:], "should be utf-8"),
        ("d.json.gz", gzip.compress(GOOD)[:60], "should be an undamaged gzip file"),
        ("d.json.gz", gzip.compress(GOOD)[:-4] + b"0000", "should be an undamaged gzip file"),
        ("d.json.gz", gzip.compress(GOOD)[:40] + b"\xff" * 40, "should be an undamaged gzip file"),
        ("d.json.gz", gzip.compress(GOOD[:-40]), "should be json"),
        ("d.txt", GOOD, "should be an .npz, a LEAF .json"),
        ("d", GOOD, "should be an .npz, a LEAF .json"),
    ],
)
def test_files_that_are_not_leaf(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        data.load(path)
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert str(path) in str(error.value) or error.value.field == "dataset"


def test_a_byte_order_mark_does_no_harm(tmp_path):
    (tmp_path / "d.json").write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert data.load(tmp_path).N == 2


def test_a_directory_without_data(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(InputError, match=r"json files = 0: should be at least one \.json or \.json\.gz$"):
        data.load(tmp_path)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InputError, match=r"folder\.json = 'Is a directory': should be a readable file$"):
        data.load(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission(tmp_path):
    path = write_leaf(tmp_path / "d.json")
    path.chmod(0)
    with pytest.raises(InputError, match=r"d\.json = 'Permission denied': should be a readable file$"):
        data.load(tmp_path)
    tmp_path.chmod(0)
    try:
        with pytest.raises(InputError, match="should be a readable directory"):
            leaf.load(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_that_vanishes(tmp_path):
    for read, name in ((leaf.load, "gone.json"), (leaf.load, "gone.json.gz"), (tabular.load_arrays, "gone.npz")):
        with pytest.raises(InputError, match=r"gone.* = 'No such file or directory': should be a readable"):
            read(tmp_path / name)


# ---- npz


def write_npz(path, **changes):
    given = {
        "x": np.arange(40, dtype=np.float64).reshape(20, 2),
        "y": np.arange(20) % 3,
        "device": np.repeat(["a", "b"], 10),
    } | changes
    np.savez_compressed(path, **{name: values for name, values in given.items() if values is not None})
    return path


def test_npz_without_split_holds_out_a_tenth(tmp_path):
    path = write_npz(tmp_path / "d.npz")
    federation = data.load(path)
    check_layout(federation, 2)
    assert federation.name == str(path) and federation.classes == 3
    np.testing.assert_array_equal(federation.test.size, [1, 1])
    assert any(data.load(path, holdout_seed=seed).test.x[0, 0] != federation.test.x[0, 0] for seed in range(1, 5))


@pytest.mark.parametrize("words", [(0, 1), (False, True), (0.0, 1.0), ("train", "test")])
def test_npz_split(tmp_path, words):
    split = np.array(words)[(np.arange(20) % 5 == 0).astype(int)]
    federation = data.load(write_npz(tmp_path / "d.NPZ.npz", split=split))
    check_layout(federation, 2)
    np.testing.assert_array_equal(federation.test.x[:, 0], [0, 10, 20, 30])
    np.testing.assert_array_equal(federation.train.size, [8, 8])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"x": None}, ": x = None: is missing"),
        ({"y": None}, ": y = None: is missing"),
        ({"device": None}, ": device = None: is missing"),
        ({"x": np.array([[1.0], None] * 10, object)}, ": x = 'Object arrays cannot be loaded"),
        ({"device": np.array(["a", 1] * 10, object)}, ": device = 'Object arrays cannot be loaded"),
        ({"split": np.array([None] * 20)}, ": split = 'Object arrays cannot be loaded"),
        ({"x": np.zeros((19, 2))}, ": len(y) = 20: should be len(x) = 19"),
        ({"device": np.zeros(21)}, ": len(device) = 21: should be len(x) = 20"),
        ({"split": np.zeros(3)}, ": len(split) = 3"),
        ({"split": np.full(20, 2)}, ": split[0] = 2: should be 0 or 1, a boolean, or one of the words"),
        ({"split": np.full(20, "Test")}, ": split[0] = 'Test'"),
        ({"split": np.ones(20)}, ": training samples of device 'a' = 0"),
        ({"y": np.full(20, -1)}, ": y[0] = -1"),
        ({"y": np.full(20, 10**12)}, ": y[0] = 1000000000000: should be a whole number from 0 to 99"),
        ({"x": np.full((20, 1), np.nan)}, ": x[0, 0] = nan"),
        ({"x": np.zeros(20, [("a", "f4")])}, ": x = "),
    ],
)
def test_npz_refuses(tmp_path, changes, expected):
    path = write_npz(tmp_path / "d.npz", **changes)
    with pytest.raises(InputError) as error:
        data.load(path)
    assert str(error.value).startswith(f"{path}{expected}")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\x76\x00",
        b"\x93NUMPY\x09\x09\x76\x00" + b" " * 118,
        b"\x93NUMPY\x01\x00\x10\x00" + b"{'descr': ((((((",
        b"\x93NUMPY\x01\x00\x46\x00"
        + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}".ljust(70),
        b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (-3,)}".ljust(69) + b"\n",
        b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (20,)}".ljust(69) + b"\n",
        b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (20,)}".ljust(69) + b"\n",
        b"not an array",
    ],
)
def test_npz_with_a_damaged_array(tmp_path, header):
    path = write_npz(tmp_path / "d.npz", y=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("y.npy", header)
    with pytest.raises(InputError) as error:
        data.load(path)
    assert str(error.value).startswith(f"{path}: ") and "y" in error.value.field.removeprefix(str(path))


def test_npz_that_is_no_archive(tmp_path):
    path = tmp_path / "d.npz"
    for content in (b"", b"PK\x03\x04", b"not a zip", b"\x80\x04K\x01."):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"should be an undamaged \.npz"):
            data.load(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(InputError, match=r"'a single array': should be an undamaged \.npz"):
        data.load(path)


def test_damaged_npz_never_raises_anything_else(tmp_path):
    """Truncated anywhere, or with bytes changed anywhere: an InputError, or, rarely, data that is still sound."""
    path = tmp_path / "d.npz"
    whole = write_npz(tmp_path / "whole.npz", split=np.arange(20) % 2).read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        if rng.random() < 0.3:
            del damaged[rng.integers(len(damaged)) :]
        else:
            for place in rng.integers(len(damaged), size=rng.integers(1, 4)):
                damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            check_layout(data.load(path), 2)
        except InputError:
            refused += 1
    assert refused > 200


def test_damaged_json_never_raises_anything_else(tmp_path):
    rng = np.random.default_rng(0)
    refused = 0
    small = json.dumps(leaf_content(samples=3)).encode()
    for turn in range(400):
        name, whole = (("d.json.gz", gzip.compress(small)), ("d.json", small))[turn % 2]
        damaged = bytearray(whole)
        for place in rng.integers(len(damaged), size=rng.integers(1, 4)):
            damaged[place] = rng.choice(list(b'[]{},:"0-eNn\xff ')) if turn % 2 else rng.integers(256)
        (tmp_path / name).write_bytes(damaged)
        try:
            data.load(tmp_path / name)
        except InputError:
            refused += 1
    assert refused > 200


# ---- the draws published with FedProx


@pytest.mark.skipif("FOLB_DATA" not in os.environ, reason="FOLB_DATA is not set")
@pytest.mark.parametrize("name", ["synthetic_1_1", "synthetic_iid"])
def test_published_draws(name):
    path = Path(os.environ["FOLB_DATA"]) / "fedprox_synthetic" / f"{name}.test.json.gz"
    federation = data.load(path)
    check_layout(federation, 30)
    assert federation.shape == (60,) and federation.classes == 10
    size = federation.train.size + federation.test.size
    assert size.sum() == {"synthetic_1_1": 1084, "synthetic_iid": 805}[name]
    np.testing.assert_array_equal(10 * size, synthetic.PUBLISHED[name])
    if name == "synthetic_iid":  # the same recipe made it
        x = np.concatenate([federation.train.x, federation.test.x])
        np.testing.assert_allclose(x.var(axis=0), np.arange(1, 61) ** -1.2, rtol=0.2)


@pytest.mark.parametrize("name", ["Synthetic_1_1", "synthetic_1.0_1", "SYNTHETIC_01_1", "synthetic_1_1"])
def test_a_dataset_has_one_name_however_it_is_typed(name):
    assert data.located(name) == "synthetic_1_1"
