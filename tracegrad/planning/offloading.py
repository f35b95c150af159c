"""What it costs to keep a value in the host's memory until the backward pass reads it.

In FLOPs for a byte, which is what the planner weighs: those that the device could do in the time in
which a byte goes there and comes back. That is more than it takes where XLA has something else to
do meanwhile.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.planning.measuring import FOUND

Offload = bool | float


def transfer_flops(offload: Offload, measure: bool) -> float:
    """FLOPs for which there is time while a byte goes to the host's memory and back.

    Args:
      offload: False: infinitely many, as nothing goes there; True: they are measured, once for a
        kind of device; or the number.
      measure: whether plans are for the devices that are here.

    Raises:
      TypeError, ValueError: for a number that is none.
      ValueError: these devices have no memory but the host's.
    """
    if offload is False:
        return math.inf
    if not isinstance(offload, bool | int | float):
        raise TypeError(f"offload= is True, False or FLOPs for a byte, not {offload!r}")
    if not 0 < offload < math.inf:
        raise ValueError(f"offload= wants FLOPs for a byte above zero, not {offload!r}")
    device = jax.local_devices()[0]
    if (measure or offload is True) and not _jax.has_host_memory(device):
        raise ValueError(
            f"offload= keeps values in the host's memory, but {device.device_kind!r} has no other: "
            "nothing would be saved. To plan for another device, pass measure=False and how many "
            "FLOPs that does while a byte goes to the host and back"
        )
    if offload is not True:
        return float(offload)
    key = "transfer", device.device_kind
    known: float | None = FOUND.get(key)
    return FOUND.put(key, measured_transfer(device)) if known is None else known


def measured_transfer(device: Any, size: int = 4096) -> float:
    """FLOPs of products, float32 as they are by default, for a byte; `size`: rows of a matrix."""
    with jax.ensure_compile_time_eval():
        here = jax.sharding.SingleDeviceSharding(device)
        there = here.with_memory_kind(_jax.HOST_MEMORY)
        matrix = jax.device_put(jnp.ones((size, size), jnp.float32), here)
        product = jax.jit(jnp.matmul)
        product_seconds = _seconds(lambda: product(matrix, matrix))
        seconds = _seconds(lambda: jax.device_put(jax.device_put(matrix, there), here))
    return 2.0 * size**3 / product_seconds * seconds / float(matrix.nbytes)


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(4):
        began = time.perf_counter()
        _jax.wait_for(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one compiles
