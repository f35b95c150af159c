"""Finds the devices for which a program is compiled, from the shardings of its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from tracegrad._jax.arrays import is_tracer
from tracegrad._jax.compat import versions


def sharding_of(value: Any) -> Any:
    """None for a tracer, for an argument without sharding, and for an argument on one device of
    this process of the default kind."""
    sharding = None if is_tracer(value) else getattr(value, "sharding", None)
    if sharding is None or len(sharding.device_set) > 1:
        return sharding
    device = device_of([sharding])
    is_default = _is_here(device) and device.platform == jax.local_devices()[0].platform
    return None if is_default else sharding


def device_of(shardings: Iterable[Any]) -> Any:
    """A device for which a program is compiled. `shardings`: of its arguments; None for an argument
    on the default device."""
    for sharding in shardings:
        if sharding is not None:
            return next(iter(sharding.addressable_devices or sharding.device_set))
    return jax.local_devices()[0]


def device_count(shardings: Iterable[Any]) -> int:
    """The largest number of devices of a sharding."""
    device_sets = (sharding.device_set for sharding in shardings if sharding is not None)
    return max(map(len, device_sets), default=1)


def compiled_by(device: Any, devices: int = 1) -> str:
    """For messages: ``cpu, JAX 0.12.0``."""
    where = "" if _is_here(device) else " (not here)"
    each = f", on each of {devices} devices" if devices > 1 else ""
    return f"{device.device_kind}{where}, JAX {versions()['jax']}{each}"


def _is_here(device: Any) -> bool:
    """Whether programs can run on the device. For devices of `jax.experimental.topologies`,
    programs can only be compiled."""
    return device.local_hardware_id is not None
