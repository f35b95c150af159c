"""Which cure `explain` offers for NaN and Inf: what the cure makes finite is right."""

from __future__ import annotations

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

import tracegrad as tg
from tracegrad.insight import explain


def root_or_nothing(x):
    """At zero the derivative is 1: of the side that counts."""
    return x + jnp.where(x > 0, jnp.sqrt(x), 0.0)


@jax.custom_vjp
def recomputed(x):
    return root_or_nothing(x)


recomputed.defvjp(
    lambda x: (root_or_nothing(x), x), lambda x, ct: jax.vjp(root_or_nothing, x)[1](ct)
)


def by_hand(x):
    return jnp.sum(recomputed(x))


def in_a_checkpointed_loop(x):
    def body(carry):
        i, c = carry
        return i + 1, c + 0.1 * jnp.where(c > 0, jnp.sqrt(c), 0.0)

    last = eqxi.while_loop(lambda c: c[0] < 3, body, (0, x), kind="checkpointed", max_steps=8)
    return jnp.sum(last[1])


def solved(y0):
    def field(y, t):
        r = jnp.sqrt(jnp.sum(y[:2] ** 2))
        return jnp.concatenate([y[2:], jnp.where(r > 0.2, -(r - 0.2), 0.0) * y[:2]])

    return jnp.sum(odeint(field, y0, jnp.linspace(0.0, 0.5, 3))[-1])


@pytest.mark.parametrize(
    "loss, x",
    [
        (by_hand, jnp.array([1.0, 0.0])),
        (in_a_checkpointed_loop, jnp.array([1.0, 0.0])),
        (solved, jnp.zeros(4)),
    ],
)
def test_a_rule_that_recomputes_its_function_is_not_put_at_zero_as_a_whole(loss, x):
    """Zero in the place of its gradient would discard the part of it that is finite."""
    (finding,) = explain(loss, x).problems
    assert finding.cause == "NaN in the reverse pass"
    assert finding.rule is None


@pytest.mark.parametrize("sums", [False, True])
def test_a_rule_is_put_at_zero_where_what_is_not_finite_is_all_that_it_gives(sums):
    @jax.custom_vjp
    def scaled_root(x, scale):
        return scale * jnp.sqrt(x)

    def backward(kept, ct):
        x, scale = kept
        of_x = jnp.where(x > -1, ct * scale * 0.5 / jnp.sqrt(x), 0.0)
        # 1 / 1, and 0 / 0 which is a part of the sum
        of_scale = jnp.sum(ct * x / jnp.sqrt(x)) if sums else jnp.sum(ct * scale)
        return of_x, of_scale

    scaled_root.defvjp(lambda x, scale: (scaled_root(x, scale), (x, scale)), backward)

    def loss(x, scale):
        return jnp.sum(scaled_root(x, scale))

    args = jnp.array([1.0, 0.0]), jnp.float32(3.0)
    (finding,) = explain(loss, *args, wrt=(0, 1)).problems
    assert (finding.rule is None) == sums
    if not sums:
        cured = jax.grad(tg.rewrite(loss, finding.rule))(*args)
        np.testing.assert_allclose(cured, [1.5, 0.0])
