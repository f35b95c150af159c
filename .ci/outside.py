"""What an installed copy is to a type checker: mypy and pyright read this where it is installed."""

from typing import assert_type

import jax
import jax.numpy as jnp

import tracegrad as tg
from tracegrad.planning import RecomputePlan


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.relu(x @ w) ** 2)


w, x = jnp.ones((8, 2)), jnp.ones((4, 8))
assert_type(tg.graph(loss, w, x), tg.Graph)
assert_type(tg.plan_recompute(loss, w, x, memory_budget="2GiB", measure=False), RecomputePlan)
assert_type(tg.stop_gradient(w), jax.Array)
rule = tg.rules.stop_gradient(tg.match.call("relu"))
gradient = jax.grad(tg.rewrite(loss, rule))(w, x)
findings = tg.explain(loss, w, x).findings
assert_type(tg.Variable(w).shape, tuple[int, ...])
