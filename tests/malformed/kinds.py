"""Replies of every malformed kind, in every field, to a task of a linear model that asks for gradient and gamma."""

import io

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

from folb.core.upload import LARGEST
from folb.flower import Device

SHAPES = {"weight": (4, 3), "bias": (3,)}


def gradient(params, x, y):
    error = x @ params["weight"] + params["bias"] - y
    return {"weight": x.T @ error / len(y), "bias": error.mean(axis=0)}


def device(k):
    rng = np.random.default_rng(k)
    x, y = (rng.normal(size=(9, width)).astype(np.float32) for width in (4, 3))
    return Device(x, y, gradient)


def npy(array, version=None):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version, allow_pickle=False)
    return stream.getvalue()


def claim(shape=(4, 3), dtype="float32", data=None, stype="numpy.ndarray"):
    """An array record of the wire: what it says it is, and bytes that may say something else."""
    return Array(dtype, shape, stype, npy(np.ones(shape, np.float32)) if data is None else data)


def header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(48)


def zipped():
    stream = io.BytesIO()
    np.savez(stream, np.ones((4, 3), np.float32))
    return stream.getvalue()


def filled(value):
    array = np.ones((4, 3), np.float32)
    array[1, 2] = value
    return claim(data=npy(array))


ARRAYS = {  # what can be wrong with one array of an update or of a gradient
    "not a number": filled(np.nan),
    "infinite": filled(np.inf),
    "minus infinite": filled(-np.inf),
    "huge": filled(3e38),
    "beyond the largest norm": filled(2 * LARGEST),
    "one number": claim((1,)),
    "a scalar": claim(()),
    "one row too many": claim((5, 3)),
    "turned round": claim((3, 4)),
    "an axis too many": claim((1, 4, 3)),
    "empty": claim((0, 3)),
    "doubles": Array(np.ones((4, 3))),
    "halves": Array(np.ones((4, 3), np.float16)),
    "integers": Array(np.ones((4, 3), np.int32)),
    "complex": Array(np.ones((4, 3), np.complex64)),
    "claimed shape is not the bytes'": claim(data=npy(np.ones((3, 4), np.float32))),
    "claimed dtype is not the bytes'": claim(data=npy(np.ones((4, 3)))),
    "of the other byte order": claim(data=npy(np.ones((4, 3), ">f4"))),
    "no bytes": claim(data=b""),
    "noise": claim(data=bytes(range(256))),
    "cut short": claim(data=npy(np.ones((4, 3), np.float32))[:-5]),
    "too long": claim(data=npy(np.ones((4, 3), np.float32)) + bytes(4)),
    "far too long": claim(data=npy(np.ones((4, 3), np.float32)) + bytes(100_000)),
    "an archive": claim(data=zipped()),
    "a pickle": claim(data=b"\x80\x04]\x94." + bytes(60)),
    "another format": claim(stype="torch.tensor"),
    "version 3 of the format": claim(data=npy(np.ones((4, 3), np.float32), (3, 0))),
    "a header that is no dict": claim(data=header("[1, 2]".ljust(70))),
    "a header of objects": claim(data=header("{'descr': '|O', 'fortran_order': False, 'shape': (4, 3), }".ljust(70))),
    "a header of a terabyte": claim(
        data=header("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(80))
    ),
}

NUMBERS = {  # what can be wrong with a number
    "not a number": float("nan"),
    "infinite": float("inf"),
    "minus infinite": -float("inf"),
    "negative": -1,
    "large": 10**9,
    "a fraction": 0.5,
    "negative and large": -(10**9),
    "a negative fraction": -0.5,
    "more than one": 1.5,
    "two": 2,
    "a hundred": 100.0,
    "nearly infinite": 1e308,
    "nearly minus infinite": -1e308,
    "the largest whole number": 2**62,
    "a list": [1, 2],
    "a list of one": [1],
    "a list of fractions": [0.5, 0.5],
    "a list of what is no number": [float("nan")],
    "a long list": list(range(100)),
    "an empty list": [],
}


def without(record, name):
    del record[name]


def with_(record, name, value):
    record[name] = value


def replaced(upload, name, value):
    return lambda content: with_(content[upload], name, value)


KINDS = {}
for upload in ("delta", "grad"):
    for kind, array in ARRAYS.items():
        KINDS[f"{upload}: {kind}"] = replaced(upload, "weight", array)
    KINDS |= {
        f"{upload}: missing": lambda content, u=upload: without(content, u),
        f"{upload}: an array missing": lambda content, u=upload: without(content[u], "bias"),
        f"{upload}: an array too many": lambda content, u=upload: with_(content[u], "more", claim((1,))),
        f"{upload}: an array by another name": lambda content, u=upload: with_(
            content[u], "Bias", content[u].pop("bias")
        ),
        f"{upload}: no arrays": lambda content, u=upload: with_(content, u, ArrayRecord()),
        f"{upload}: numbers in its place": lambda content, u=upload: with_(content, u, MetricRecord({"weight": 1.0})),
        f"{upload}: settings in its place": lambda content, u=upload: with_(content, u, ConfigRecord({"weight": "1"})),
    }
for name in ("round", "num-examples", "gamma"):
    for kind, value in NUMBERS.items():
        if (name, kind) != ("gamma", "a fraction"):
            KINDS[f"{name}: {kind}"] = replaced("metrics", name, value)
    KINDS[f"{name}: missing"] = lambda content, n=name: without(content["metrics"], n)
KINDS |= {
    "round: the one before": replaced("metrics", "round", 0),
    "round: a float": replaced("metrics", "round", 1.0),
    "num-examples: one more": replaced("metrics", "num-examples", 10),
    "num-examples: a float": replaced("metrics", "num-examples", 9.0),
    "gamma: above 1": replaced("metrics", "gamma", 1.0000001),
    "metrics: missing": lambda content: without(content, "metrics"),
    "metrics: one too many": replaced("metrics", "bonus", 1.0),
    "metrics: arrays in its place": lambda content: with_(content, "metrics", ArrayRecord()),
    "records: one too many": lambda content: with_(content, "more", ArrayRecord()),
    "records: none": lambda content: content.clear(),
}


# Arrays of a codec ----------------------------------------------------------------------------------------------------


def as_sent(value):
    value = np.asarray(value)
    return Array(value.dtype.name, value.shape, "numpy.ndarray", npy(value))


def places(*values):
    return as_sent(np.array(values, np.int32))


def bomb(dtype):
    """A header that claims a terabyte."""
    text = f"{{'descr': '{np.dtype(dtype).str}', 'fortran_order': False, 'shape': (1099511627776,), }}".ljust(90)
    return Array(
        dtype, (1 << 40,), "numpy.ndarray", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    )


def scale(*values):
    return as_sent(np.array(values, np.float32))


LIES = {  # the codec of the reply, the array of it that is wrong, and what is there instead
    "a scale that is not a number": ("int8", "scale", scale(np.nan)),
    "an infinite scale": ("int8", "scale", scale(np.inf)),
    "a negative scale": ("int4", "scale", scale(-1)),
    "a huge scale": ("sign", "scale", scale(3e38)),
    "a scale beyond the largest norm": ("int8", "scale", scale(9e14)),
    "two scales": ("int8", "scale", scale(1, 1)),
    "a code that is no level": ("int8", "codes", as_sent(np.zeros(15, np.uint8))),
    "half a byte that is no level": ("int4", "codes", as_sent(np.full(8, 0x10, np.uint8))),
    "a code too few": ("int8", "codes", as_sent(np.ones(14, np.uint8))),
    "a code too many": ("int4", "codes", as_sent(np.full(9, 0x11, np.uint8))),
    "codes with signs": ("int8", "codes", as_sent(np.ones(15, np.int8))),
    "numbers for codes": ("sign", "codes", as_sent(np.ones(2, np.float32))),
    "codes of a terabyte": ("int8", "codes", bomb("uint8")),
    "values of a terabyte": ("random_k", "values", bomb("float32")),
    "places of a terabyte": ("top_k", "places", bomb("int32")),
    "the same place twice": ("top_k", "places", places(3, 3)),
    "a place too far": ("top_k", "places", places(3, 15)),
    "a place far too far": ("top_k", "places", places(3, 2**31 - 1)),
    "a negative place": ("top_k", "places", places(-1, 3)),
    "places out of order": ("top_k", "places", places(4, 3)),
    "places that are fractions": ("top_k", "places", as_sent(np.array([3, 4], np.float32))),
    "more places than asked for": ("top_k", "places", places(1, 2, 3)),
    "a value that is not a number": ("top_k", "values", scale(np.nan, 1)),
    "an infinite value": ("random_k", "values", scale(1, np.inf)),
    "huge values": ("random_k", "values", scale(1e15, 1e15)),
    "a value too many": ("random_k", "values", scale(1, 2, 3)),
}


def spoilers(codec):
    """How a reply can be malformed: one without a codec, or the update of one through a codec."""
    if not codec:
        return list(KINDS.values())
    return [replaced("delta", array, value) for name, array, value in LIES.values() if name == codec]
