"""What `explain` costs on a 12-layer transformer, beside one compiled backward pass.

First calls are in CPU seconds, which neighbours do not blur. After that both alternate in one
process; the numbers are ratios of medians. ``--bugs`` runs the gallery of seeded bugs instead: what
`explain` and ``jax_debug_nans`` tell of each.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import print_table
from transformer import block, init, loss_with

from tracegrad.insight import explain

sys.path.append(str(Path(__file__).parents[1] / "tests" / "insight"))
from gallery import BUGS, Bug

ROUNDS = 7


def seconds(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def measured(layers: int, width: int, batch: int, length: int) -> list[str]:
    params = init(layers, width, 1000)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 1000, (batch, length + 1)))
    loss = loss_with(block)
    backward = jax.jit(jax.value_and_grad(loss))

    def compiled() -> None:
        jax.block_until_ready(backward(params, tokens))

    def explained() -> None:
        explain(loss, params, tokens)

    first = [seconds(run, time.process_time) for run in (compiled, explained)]
    times = [(seconds(compiled), seconds(explained)) for _ in range(ROUNDS)]
    one, other = (statistics.median(column) for column in zip(*times, strict=True))
    row = [f"{layers} layers of {width}, {batch} x {length} tokens"]
    row += [f"{first[0]:.1f} s", f"{first[1]:.1f} s", f"{first[1] / first[0]:.2f}"]
    return [*row, f"{1000 * one:.0f} ms", f"{1000 * other:.0f} ms", f"{other / one:.1f}"]


def cost() -> None:
    sizes = (6, 128, 2, 64), (12, 128, 2, 64), (24, 128, 2, 64), (12, 256, 4, 128)
    rows = [measured(*each) for each in sizes]
    header = ["transformer", "first backward", "first explain", "ratio"]
    header += ["backward", "explain", "ratio"]
    print_table("One call of explain beside one compiled backward pass", header, rows)


# ---------------------------------------------------------------------------------------- the bugs


def debug_nans(bug: Bug, file: Path, line: int | None) -> str:
    """What ``jax_debug_nans`` says of the gradient."""
    tree, definition = jax.tree.flatten(bug.arguments[0])
    chosen = [
        i for i, leaf in enumerate(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]

    def loss(leaves: list[Any]) -> Any:
        all_leaves = list(tree)
        for i, leaf in zip(chosen, leaves, strict=True):
            all_leaves[i] = leaf
        return bug.loss(jax.tree.unflatten(definition, all_leaves), *bug.arguments[1:])

    try:
        with jax.debug_nans(True):
            jax.grad(loss)([tree[i] for i in chosen])
    except Exception as error:
        name = type(error).__name__
        if isinstance(error, FloatingPointError):
            primitive = re.search(r"in (?:the output of )?(.+?)\.?$", str(error).split("\n")[0])
            name = primitive[1] if primitive else "?"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)]
        other = "another line" if line else "a line of its use"
        return f"{name}, {'the line' if line in lines else other if lines else 'no line'}"
    return "nothing"


def said_of(name: str) -> tuple[str, str]:
    """What `explain` says of a bug, and what ``jax_debug_nans`` does."""
    seeded = BUGS[name]
    bug = seeded.build()
    found = explain(bug.loss, *bug.arguments, wrt=bug.wrt).findings[0]
    cause = found.cause if found.cause in seeded.causes else f"{found.cause}, which is wrong"
    if found.origin is None:
        where = "no line"
    else:
        where = "the line" if found.origin.line == seeded.line else "another line"
    return f"{cause}, {where}", debug_nans(bug, seeded.file, seeded.line)


def bugs() -> None:
    rows = [[name.replace("_", " "), *said_of(name)] for name in sorted(BUGS)]
    print_table("What is said of seeded bugs", ["bug", "explain", "jax_debug_nans"], rows)


if __name__ == "__main__":
    bugs() if "--bugs" in sys.argv else cost()
