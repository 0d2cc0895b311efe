"""The matrix rate: operations per second in large products of 32-bit floats, of a core or of a GPU.

On a core also the rate of products of ten rows by 256 x 1,024, which an LSTM of 256 units has at every time step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

SIZE, TRIALS, SECONDS = 1536, 5, 0.1


def best(product: Callable[[], Any], clock: Callable[[], float], operations: int = 2 * SIZE**3) -> float:
    """Operations per second in the best trial of `product`, which by default multiplies two SIZE x SIZE matrices."""
    product()
    rates = []
    for _ in range(TRIALS):
        begun, times = clock(), 0
        while clock() - begun < SECONDS:
            product()
            times += 1
        rates.append(times * operations / (clock() - begun))
    return max(rates)


def on_core() -> dict[str, Any]:
    """One core, in PyTorch's environment: its products are the fastest of those compared."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(2, SIZE, SIZE)
    rows, weight = torch.randn(10, 256), torch.randn(256, 1024)
    return {
        "rate": best(lambda: a @ b, time.process_time),
        "ten_rows": best(lambda: rows @ weight, time.process_time, 2 * 10 * 256 * 1024),
    }


def on_gpu() -> dict[str, Any]:
    """The GPU, with the precision that JAX has for 32-bit floats there unless told otherwise."""
    import jax

    a, b = jax.random.normal(jax.random.key(0), (2, SIZE, SIZE))
    several = jax.jit(lambda a, b: jax.lax.fori_loop(0, 100, lambda i, c: c @ b / SIZE, a))
    return {
        "rate": 100 * best(lambda: several(a, b).block_until_ready(), time.perf_counter),
        "gpu": a.device.device_kind,
    }


if __name__ == "__main__":
    print(json.dumps(on_gpu() if "--gpu" in sys.argv else on_core()))
