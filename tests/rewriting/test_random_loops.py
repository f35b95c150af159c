"""Gradients of random while loops: against forward mode of JAX's own loop, and finite differences.

A loop carries a list of floats, a count and sometimes a random key, and may run another loop in
each step, or be one of a batch with different numbers of steps. How often it runs, from 0 to 300
times, is an argument, so that one program is compiled for all of that. The nightly run is
``pytest --hypothesis-profile=nightly tests/rewriting/test_random_loops.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

import tracegrad as tg

EXAMPLES = max(1, (settings().max_examples - 50) // 2)  # seconds each
COUNTS = 0, 1, 2, 300  # of steps, beside those that are drawn
SHAPES = (3,), (), (2, 3)  # of the first leaf, the second, and so on


@dataclass(frozen=True)
class Loop:
    """What each leaf becomes in a step, and what runs in each step beside that."""

    leaves: tuple[str, ...]
    has_key: bool = False
    inner: Loop | None = None


def compared(a, b, x):  # continuous, so that differences tell its derivative
    return jnp.where(a > b, 0.8 * a + 0.1 * b, 0.9 * b) - 0.2 * x


def scanned(a, b, x):
    return lax.scan(lambda c, w: (0.9 * jnp.sin(c) + w * b, None), a, x[:2])[0]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "turn": lambda a, b, x: jnp.sin(a + 0.3 * b) * x,
    "relax": lambda a, b, x: 0.8 * a + 0.1 * jnp.tanh(b) * x,
    "compare": lambda a, b, x: compared(a, b, jnp.mean(x)),
    "scan": lambda a, b, x: scanned(a, b, jnp.atleast_1d(jnp.stack([jnp.mean(x), 0.3]))),
    "branch": lambda a, b, x: lax.cond(b > 0.2, jnp.cos, lambda a: 0.5 * a, a) * jnp.mean(x),
    "custom": lambda a, b, x: 0.7 * jax.nn.silu(a) + 0.1 * jax.nn.softplus(b),
    "stay": lambda a, b, x: a,
}


def run(loop: Loop, x: Any, leaves: Any, n: Any) -> Any:
    def step(carry: Any) -> Any:
        i, key, leaves = carry
        if loop.inner is not None:
            leaves = run(loop.inner, 0.9 * x, leaves, i % 3)
        new = []
        for op, leaf in zip(loop.leaves, leaves, strict=False):
            other, noise = jnp.mean(leaves[-1]), 0.0
            if key is not None:
                key, sub = jax.random.split(key)
                noise = 0.1 * jax.random.normal(sub, leaf.shape, leaf.dtype)
            weights = x if leaf.shape and op != "scan" else jnp.mean(x)
            new.append(OPERATIONS[op](leaf, other, weights) + noise)
        return i + 1, key, [*new, *leaves[len(new) :]]

    init = jnp.int32(0), jax.random.key(0) if loop.has_key else None, leaves
    return lax.while_loop(lambda carry: carry[0] < n, step, init)[2]


def loops(depth: int = 2) -> st.SearchStrategy[Loop]:
    inner = st.none() if depth == 0 else st.none() | loops(depth - 1)
    names = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=len(SHAPES))
    return st.builds(Loop, names.map(tuple), st.booleans(), inner)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(loops(), st.integers(1, 6), st.booleans(), st.lists(st.integers(0, 300), max_size=4))
@example(Loop(("turn", "relax"), True, Loop(("compare",))), 2, True, [7, 40])
def test_the_gradient_of_a_random_loop_is_that_of_forward_mode(loop, checkpoints, batched, counts):
    def fun(x, n):
        leaves = [0.1 + jnp.broadcast_to(jnp.mean(x) * x[i], s) for i, s in enumerate(SHAPES)]
        if not batched:
            return run(loop, x, leaves, n)
        each = jnp.stack([n // 2, jnp.zeros_like(n), n])
        return jax.vmap(lambda n, x: run(loop, x, leaves, n), (0, None))(each, x)

    edited = tg.rewrite(fun, tg.rules.checkpointed_loop(checkpoints=checkpoints))
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, u = jnp.array([0.7, 0.9, 0.4]), jnp.asarray(random.normal(size=3))
        outs = jax.eval_shape(fun, x, jnp.int32(0))
        v = [jnp.asarray(random.normal(size=out.shape)) for out in outs]

        @jax.jit
        def both(x, n):
            values, tangents = jax.jvp(lambda x: fun(x, n), (x,), (u,))
            ours, back = jax.vjp(lambda x: edited(x, n), x)
            return inner(v, values), inner(v, tangents), inner(v, ours), inner(back(v)[0], u)

        for n in (*COUNTS, *counts):
            value, forward, same, backward = both(x, jnp.int32(n))
            np.testing.assert_allclose(same, value, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(backward, forward, rtol=1e-9, atol=1e-9)
            above, below = (both(x + s * 1e-6 * u, jnp.int32(n))[0] for s in (1, -1))
            np.testing.assert_allclose((above - below) / 2e-6, forward, rtol=1e-5, atol=1e-5)


def inner(a: Any, b: Any) -> Any:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(jnp.sum(x * y) for x, y in pairs)
