"""What recomputing saves: `tracegrad.recompute_grad` against nothing and against `jax.checkpoint`.

A deep MLP and a 12-layer transformer, `jax.value_and_grad` of both. For each: the bytes of
temporary buffers and the matrix products in XLA's optimised program, and by how much the peak
memory of a process grows when it runs the program, one process for each. The share is that of the
growth without recompute.
"""

from __future__ import annotations

import argparse
import functools
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from report import print_table
from transformer import block, init, loss_with

import tracegrad

MIB = 2**20
LAYERS, BATCH, WIDTH = 24, 2048, 512


def mlp_layer(weights: Any, x: jax.Array) -> jax.Array:
    up, down = weights
    return x + jax.nn.gelu(x @ up) @ down


def mlp(recompute: Callable[..., Any] | None, size: int) -> tuple[Any, Any]:
    """The loss of the MLP in groups of `size` layers, and the shapes of its arguments."""

    def stack(weights: Any, x: jax.Array) -> jax.Array:
        return functools.reduce(lambda x, w: mlp_layer(w, x), weights, x)

    group = recompute(stack) if recompute else stack

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for start in range(0, LAYERS, size):
            x = group(weights[start : start + size], x)
        return jnp.mean(x**2)

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return loss, ([(weight, weight)] * LAYERS, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


def transformer(recompute: Callable[..., Any] | None) -> tuple[Any, Any]:
    """The loss of the transformer, each block recomputed, and the shapes of its arguments."""
    params = jax.eval_shape(lambda: init(12, 128, 256))
    tokens = jax.ShapeDtypeStruct((16, 257), jnp.int32)
    return loss_with(recompute(block) if recompute else block), (params, tokens)


GRADIENT = jax.value_and_grad
ROWS: dict[str, Callable[[], tuple[Any, Any]]] = {}


def row(name: str, compiler: Any, program: Callable[..., Any], *options: Any) -> None:
    def build() -> tuple[Any, Any]:
        loss, shapes = program(*options)
        return compiler(GRADIENT(loss)), shapes

    ROWS[name] = build


row("MLP", jax.jit, mlp, None, 4)
for size in (1, 2, 4, 6):
    row(f"MLP, jax.checkpoint, groups of {size}", jax.jit, mlp, jax.checkpoint, size)
    row(
        f"MLP, recompute_grad, groups of {size}",
        tracegrad.trace,
        mlp,
        tracegrad.recompute_grad,
        size,
    )
row("transformer", jax.jit, transformer, None)
row("transformer, jax.checkpoint", jax.jit, transformer, jax.checkpoint)
row("transformer, recompute_grad", tracegrad.trace, transformer, tracegrad.recompute_grad)


def peak_bytes() -> int:
    """The largest resident size of this process so far; `ru_maxrss` is in KiB on Linux."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def measure(name: str) -> tuple[float, int, float]:
    """MiB of temporary buffers, matrix products, and MiB of growth of this process's peak."""
    jitted, shapes = ROWS[name]()
    compiled = jitted.lower(*shapes).compile()
    products = len(re.findall(r" = \S+ dot\(", compiled.as_text()))
    temporary = compiled.memory_analysis().temp_size_in_bytes / MIB
    # Ones, for tokens too: what is computed does not matter, but that every page is written does.
    args = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)
    results = jitted.eval_shape(*shapes)
    spare = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), results)
    jax.block_until_ready((args, spare))
    del spare  # the room for the results is not what is asked about
    before = peak_bytes()
    for _ in range(2):
        jax.block_until_ready(jitted(*args))
    return temporary, products, (peak_bytes() - before) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(ROWS), help="measure one row, print three numbers")
    only = parser.parse_args().only
    if only:
        print(*measure(only))
        return
    rows, whole = [], {}
    for name in ROWS:
        command = [sys.executable, str(Path(__file__)), "--only", name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        temporary, products, growth = map(float, output.split())
        program = name.split(",")[0]
        whole.setdefault(program, growth)
        rows.append(
            [
                name,
                f"{temporary:.0f}",
                f"{products:.0f}",
                f"{growth:.0f}",
                f"{growth / whole[program]:.0%}",
            ]
        )
    print_table(
        "value_and_grad of a 24-layer MLP (2048 × 512) and a 12-layer transformer",
        ["program", "temp MiB", "products", "peak growth MiB", "share"],
        rows,
    )


if __name__ == "__main__":
    main()
