"""What gradient surgery costs to trace, and what a rule that recomputes by block saves.

The train step (adamw) of a 12-layer transformer, whose loss gets three rules: every softmax
another gradient, every block's gradient clipped, one operand of every product stopped. CPU seconds
of tracing with and without them; the two take turns. Then the residuals of the loss, and XLA's
temporary bytes for its gradient, with every block recomputed by a rule and without.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from report import print_table
from transformer import block, init, loss_with, train_step

import tracegrad as tg
from tracegrad import match, rules

MIB = 2**20


def softmax_by_its_output(op: Any, dy: Any) -> Any:
    """A gradient of the usual cost."""
    (p,) = op.outputs
    return p * (dy - jnp.sum(p * dy, -1, keepdims=True))


RULES = (
    rules.override_gradient(match.call("softmax"), softmax_by_its_output),
    rules.clip_gradient(match.call("block"), max_norm=1.0),
    rules.stop_gradient(match.op("dot_general"), inputs=1),
)


def tracing_seconds(chosen: Sequence[Any], args: tuple[Any, ...]) -> float:
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    tg.trace(train_step(tg.value_and_grad), rules=chosen).trace(*args)
    return time.process_time() - start


def residual_bytes(fun: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Of what the pullback holds, the arguments themselves left out."""
    pullback = jax.eval_shape(lambda *a: jax.vjp(lambda p: fun(p, *a[1:]), a[0])[1], *args)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))
    return whole - sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat

    params = jax.eval_shape(lambda: init(12, 64, 100))
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    args = (params, state, jax.ShapeDtypeStruct((2, 17), jnp.int32))
    ways: dict[str, Sequence[Any]] = {"without": (), "with three rules": RULES}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for chosen in ways.values():
        tracing_seconds(chosen, args)
    for i in range(repeat):
        for name in list(ways)[:: 1 if i % 2 else -1]:
            samples[name].append(tracing_seconds(ways[name], args))
    without, with_rules = (statistics.median(samples[name]) for name in ways)
    print_table(
        f"Tracing the step of a 12-layer transformer, CPU seconds, medians of {repeat}",
        ["", *ways, "more"],
        [["trace", f"{without:.2f} s", f"{with_rules:.2f} s", f"{with_rules - without:.2f} s"]],
    )

    params = jax.eval_shape(lambda: init(12, 128, 256))
    shapes = (params, jax.ShapeDtypeStruct((16, 257), jnp.int32))
    loss = loss_with(block)
    recomputed = tg.rewrite(loss, rules.recompute(match.call("block")))
    rows = []
    for name, measure in (
        ("residuals", residual_bytes),
        ("XLA's temporary bytes", temporary_bytes),
    ):
        before, after = (measure(fun, shapes) for fun in (loss, recomputed))
        rows.append(
            [name, f"{before / MIB:.1f} MiB", f"{after / MIB:.1f} MiB", f"{after / before:.0%}"]
        )
    print()
    print_table(
        "The gradient of a 12-layer transformer, every block recomputed by a rule",
        ["", "without", "with", "share"],
        rows,
    )


def temporary_bytes(fun: Callable[..., Any], args: tuple[Any, ...]) -> int:
    compiled = tg.trace(jax.value_and_grad(fun)).lower(*args).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


if __name__ == "__main__":
    main()
