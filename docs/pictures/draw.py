"""Draws the pictures of the documentation: the graph of a loss, and a plan for its memory.

`python docs/pictures/draw.py` writes `graph.svg` and `plan.svg` beside it.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl

import tracegrad as tg

HERE = Path(__file__).parent


@tg.custom_gradient
def clipped(x):  # what comes back is limited
    return x, lambda dy: jnp.clip(dy, -1, 1)


@tg.recompute_grad
def block(w, x):  # nothing in here is kept for the backward pass
    return jnp.tanh(x @ w)


def loss(w, x, y):
    return jnp.sum((clipped(block(w, x)) - tg.stop_gradient(y)) ** 2)


def deep(weights, x):
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def draw_graph() -> None:
    graph = tg.show(loss, jnp.ones((8, 32)), jnp.ones((64, 8)), jnp.ones((64, 32)))
    (HERE / "graph.svg").write_text(graph.to_svg(), encoding="utf-8")


def draw_plan() -> None:
    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 12
    plan = tg.plan_recompute(
        deep,
        weights,
        jax.ShapeDtypeStruct((8192, 64), "float32"),
        memory_budget="52%",
        measure=False,
    )
    mpl.rcParams["svg.hashsalt"] = "tracegrad"  # the same file each time
    plan.plot().savefig(HERE / "plan.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw_graph()
    draw_plan()
