"""Plans of programs with loops keep their budget, and what the loops compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad
from tests.compilation import f32
from tracegrad.planning import plan_recompute
from tracegrad.planning.flatten import flatten
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model
from tracegrad.planning.search import Search
from tracegrad.tracing import to_callable

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("compiled_fully")]


def model_of(fun: Callable[..., Any], *shapes: Any) -> MemoryModel:
    return model(flatten(tracegrad.graph(fun, *shapes)))


# ----------------------------------------------------------------------------- scans inside scans


def gated(h: jax.Array, x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    zx, cx = jnp.split(x @ p["w"], 2, axis=-1)
    zh, ch = jnp.split(h @ p["u"], 2, axis=-1)
    z = jax.nn.sigmoid(zx + zh)
    return (1 - z) * h + z * jnp.tanh(cx + ch)


def gated_shapes(width: int, *layers: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"w": f32(*layers, width, 2 * width), "u": f32(*layers, width, 2 * width)}


def recurrent_layers(ps: Any, xs: jax.Array) -> tuple[jax.Array]:
    """Over layers, and inside over time, forwards and backwards."""

    def layer(xs: jax.Array, p: Any) -> tuple[jax.Array, None]:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = gated(h, x, p)
            return h, h

        _, forward = jax.lax.scan(step, xs[0], xs)
        _, backward = jax.lax.scan(step, xs[0], forward, reverse=True)
        return jnp.tanh(backward) + xs, None

    return (jnp.mean(jax.lax.scan(layer, xs, ps)[0] ** 2),)


def chunks_of_time(p: Any, xs: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Over epochs, chunks and steps: the last two of one program that is compiled."""

    def chunk(h: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.sin(gated(h, x, p))
            return h, jnp.sum(jnp.cos(h), axis=-1)

        return jax.lax.scan(step, h, xs)

    def epoch(h: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return jax.jit(lambda h: jax.lax.scan(chunk, h, xs))(h)

    h, sums = jax.lax.scan(epoch, h, None, length=2)
    return jnp.mean(h**2) + jnp.mean(sums), sums


NESTED: dict[str, tuple[Any, tuple[Any, ...], float]] = {
    "layers": (recurrent_layers, (gated_shapes(16, 4), f32(8, 64, 16)), 0.3),
    "chunks": (chunks_of_time, (gated_shapes(16), f32(8, 8, 64, 16), f32(64, 16)), 0.2),
}


@pytest.mark.parametrize("name", ["layers", pytest.param("chunks", marks=pytest.mark.slow)])
def test_scans_inside_scans_are_planned(name: str):
    """The gradients stay, XLA's memory falls as planned, and the plan is one like others."""
    fun, shapes, share = NESTED[name]
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 4), shapes)

        def gradient(fun: Any) -> tuple[Any, int]:
            step = jax.grad(lambda *a: fun(*a)[0], tuple(range(len(args))))
            compiled = tracegrad.trace(step).lower(*args).compile()
            return compiled(*args), compiled.memory_analysis().temp_size_in_bytes

        plan = plan_recompute(fun, *args, memory_budget=share, measure=False)
        assert "inside these" in plan.scans
        assert plan.scans in str(plan)
        assert max(plan.timeline()[1]) == plan.peak <= plan.budget
        expected, everything = gradient(fun)
        found, temporary = gradient(plan.apply())
        assert temporary / everything == pytest.approx(plan.peak / plan.peak_without, rel=0.15)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_what_is_not_differentiated_in_a_body_needs_no_derivative():
    def fun(w: jax.Array, x: jax.Array, clock: jax.Array) -> jax.Array:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            x, clock = carry
            clock = jax.lax.while_loop(lambda t: jnp.sum(t) < 10.0, lambda t: 2 * t + 1, clock)
            return (jnp.sin(jnp.tanh(x @ w) * clock), clock - 9), None

        start = (x, jax.lax.stop_gradient(clock))
        return jnp.sum(jax.lax.scan(step, start, None, length=9)[0][0])

    shapes = f32(16, 16), f32(64, 16), f32(64, 16)
    assert not plan_recompute(fun, *shapes, memory_budget="100%", measure=False).is_needed
    plan = plan_recompute(fun, *shapes, memory_budget="60%", measure=False)
    assert plan.scans
    assert plan.flops > 0


# ---------------------------------------------------------------------- some iterations otherwise


def noisy_layers(ws: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
    """Layers with dropout, from the last to the first, each of which has a result of its own."""

    def layer(x: jax.Array, here: Any) -> tuple[jax.Array, jax.Array]:
        w, key = here
        y = jnp.tanh(jnp.sin(jnp.cos(x @ w["up"])) @ w["down"])
        y = jnp.where(jax.random.bernoulli(key, 0.8, y.shape), y, 0.0)
        return x + y, jnp.sum(jnp.exp(y), axis=-1)

    x, sums = jax.lax.scan(layer, x, (ws, keys), reverse=True)
    return jnp.mean(x**2) + jnp.mean(sums * jnp.arange(sums.shape[0])[:, None])


def test_some_iterations_may_keep_what_others_compute_again():
    """What a scan keeps comes in steps of a few values for each iteration otherwise: with some of
    its iterations run another way a budget between two steps costs what is between."""
    rng = np.random.default_rng(0)
    ws = {"up": rng.normal(size=(24, 16, 16)) / 4, "down": rng.normal(size=(24, 16, 16)) / 4}
    ws, x = jax.tree.map(jnp.float32, ws), jnp.float32(rng.normal(size=(256, 16)))
    args = ws, x, jax.random.split(jax.random.key(0), 24)
    search = Search(model_of(noisy_layers, *args))
    expected, without = gradient_and_bytes(noisy_layers, args)
    plans = [search.best(search.kept.peak * percent // 100) for percent in range(40, 100)]
    in_turn = {plan.scans: plan for plan in plans if plan.scans.startswith("of 2 scan bodies")}
    assert len(in_turn) >= 3
    for plan in (list(in_turn.values())[1], list(in_turn.values())[-2]):
        found, held = gradient_and_bytes(to_callable(plan.rewritten()), args)
        assert held / without == pytest.approx(plan.peak / search.kept.peak, rel=0.1)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def gradient_and_bytes(fun: Callable[..., Any], args: Any) -> tuple[Any, int]:
    compiled = tracegrad.trace(jax.grad(fun, (0, 1))).lower(*args).compile()
    return compiled(*args), compiled.memory_analysis().temp_size_in_bytes
