"""What a Graph costs beside JAX's own tracing: importing, searching, editing, lowering.

A program of some 20,000 nodes, and the train step (adamw) of six blocks of a transformer. CPU
seconds, medians of several rounds in which all parts take turns; each round has a new function.
Ratios are to `jax.make_jaxpr` of the program and to `jax.jit(step).trace(...).lower()`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from report import print_table
from transformer import init, train_step

import tracegrad
from tracegrad.ir.importer import graph_of

NODES, PLACES = 20_000, 100


def long_program(count: int) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        for k in range(count // 4):
            y = jnp.sin(x) if k % (count // 4 // PLACES) == 0 else jnp.cos(x)
            x = jax.lax.tanh(jax.lax.add(jax.lax.mul(y, x), y))
        return x

    return program


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    begun = time.process_time()
    result = run()
    return time.process_time() - begun, result


def round_of(args: tuple[Any, ...]) -> dict[str, float]:
    """CPU seconds of each part, once."""
    jax.clear_caches()
    x = jax.ShapeDtypeStruct((8,), "float32")
    program = long_program(NODES)
    found: dict[str, float] = {}
    found["make_jaxpr"], traced = timed(lambda: jax.make_jaxpr(program)(x))
    found["import"], graph = timed(lambda: graph_of(traced))
    where = tracegrad.match.op("sin")
    found["find"], matches = timed(lambda: graph.find(where))
    assert len(matches) == PLACES
    assert len(graph.nodes) >= NODES
    rule = tracegrad.rules.stop_gradient(where)
    found["edit"], edited = timed(lambda: rule(graph))
    assert len(edited.nodes) == len(graph.nodes) + PLACES
    for name, compiler in {"jit": jax.jit, "trace": tracegrad.trace}.items():
        jax.clear_caches()
        step = train_step()
        found[name], _ = timed(lambda compiler=compiler, step=step: compiler(step).lower(*args))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    params = jax.eval_shape(lambda: init(6, 64, 100))
    optimizer = jax.eval_shape(optax.adamw(1e-3).init, params)
    args = params, optimizer, jax.ShapeDtypeStruct((2, 17), jnp.int32)
    round_of(args)
    rounds = [round_of(args) for _ in range(repeat)]
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    rows = [
        [f"import of {NODES:,} nodes", "import", "make_jaxpr"],
        [f"find {PLACES} matches in them", "find", "make_jaxpr"],
        [f"an edit at {PLACES} places", "edit", "make_jaxpr"],
        ["a train step to StableHLO by `trace`", "trace", "jit"],
    ]
    print_table(
        "Graphs",
        ["what", "seconds", "beside JAX's", "ratio"],
        [
            [what, f"{median[own]:.3f}", f"{median[jaxs]:.3f}", f"{median[own] / median[jaxs]:.3f}"]
            for what, own, jaxs in rows
        ],
    )


if __name__ == "__main__":
    main()
