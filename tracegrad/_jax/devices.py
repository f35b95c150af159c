"""Which devices a program is compiled for: those that its arguments lie on, here or elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from tracegrad._jax.arrays import is_tracer
from tracegrad._jax.compat import versions


def sharding_of(value: Any) -> Any:
    """How an argument lies on several devices, on one of another kind than the default, or on one
    that is not here; None for one that does not."""
    sharding = None if is_tracer(value) else getattr(value, "sharding", None)
    if sharding is None or len(sharding.device_set) > 1:
        return sharding
    device = device_of([sharding])
    is_default = _is_here(device) and device.platform == jax.local_devices()[0].platform
    return None if is_default else sharding


def device_of(shardings: Iterable[Any]) -> Any:
    """A device that a program is compiled for, from the shardings of its arguments. An argument
    with the sharding None lies on the default device."""
    for sharding in shardings:
        if sharding is not None:
            return next(iter(sharding.addressable_devices or sharding.device_set))
    return jax.local_devices()[0]


def device_count(shardings: Iterable[Any]) -> int:
    """Over how many devices arguments with these shardings lie."""
    device_sets = (sharding.device_set for sharding in shardings if sharding is not None)
    return max(map(len, device_sets), default=1)


def compiled_by(device: Any, devices: int = 1) -> str:
    """What programs are compiled for and by, as people are told: ``cpu, JAX 0.12.0``, and over how
    many devices."""
    where = "" if _is_here(device) else " (not here)"
    each = f", on each of {devices} devices" if devices > 1 else ""
    return f"{device.device_kind}{where}, JAX {versions()['jax']}{each}"


def _is_here(device: Any) -> bool:
    """Whether programs can run on it; for those of `jax.experimental.topologies` they can but be
    compiled."""
    return device.local_hardware_id is not None
