"""The measured passes over a graph as one compiled program.

What leaves the device is small: of a cotangent its norm and its zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad.insight.explaining.measuring import MeasuredPass
from tracegrad.insight.explaining.observed import Key, Observed
from tracegrad.ir import Graph

# It runs once or a few times, and compiling is most of what it costs.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# Of the inputs of a graph and the cotangents of its outputs (or None) what was observed in it.
Look = Callable[[Sequence[Any], Sequence[Any]], Observed]


def compile_pass(graph: Graph, sources: Sequence[bool], close: bool) -> Look:
    """One compiled program for the passes.

    Statistics of one shape leave it as one array: there are some thousand, and each array costs
    more than the numbers in it.
    """
    measured = MeasuredPass(graph, sources, close)

    def observed(found: Mapping[int, np.ndarray[Any, Any]]) -> Observed:
        keys: list[Key] = measured.keys
        stats = {keys[number]: stat for number, stat in found.items()}
        return Observed(graph, stats, measured.refused, dict(measured.lines))

    if close:
        # Operation by operation: as one program it would be the largest of all, for a single run.
        def look_close(args: Sequence[Any], seeds: Sequence[Any]) -> Observed:
            measured.lines.clear()
            return observed(jax.device_get(measured.run(args, seeds)))

        return look_close

    @functools.partial(jax.jit, compiler_options=_QUICK)
    def stacked(args: Sequence[Any], seeds: Sequence[Any]) -> dict[tuple[int, ...], Any]:
        found = measured.run(args, seeds)
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, stat in found.items():
            alike.setdefault(stat.shape, []).append(number)
        return {tuple(group): jnp.stack([found[n] for n in group]) for group in alike.values()}

    def look(args: Sequence[Any], seeds: Sequence[Any]) -> Observed:
        stacks = jax.device_get(stacked(args, seeds)).items()
        return observed({n: stat for group, stack in stacks for n, stat in zip(group, stack)})

    return look
