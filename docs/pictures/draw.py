"""Draws the pictures of the documentation: graphs of losses, and a plan for the memory of one.

`python docs/pictures/draw.py` writes `readme.svg`, `graph.svg` and `plan.svg` beside it.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl

import tracegrad as tg

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"


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


def draw_readme() -> None:
    """The loss of the README's first program."""
    (program, *_) = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(program, "example.py", "exec"), names)
    graph = tg.show(*map(names.get, ("loss", "model", "x", "y")))
    (HERE / "readme.svg").write_text(graph.to_svg(), encoding="utf-8")


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
    draw_readme()
    draw_graph()
    draw_plan()
