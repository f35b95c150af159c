"""Custom gradients have a forward mode, which changes nothing else of the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg

pytestmark = pytest.mark.both_jax


@tg.custom_gradient
def double(x):
    return x * 2, lambda dy: 2 * dy


def test_a_region_that_many_calls_share_stays_shared():
    layer = jax.jit(lambda x: jnp.sin(double(x)))

    def f(x):
        return layer(layer(layer(x)))

    program = jax.jit(lambda x: tg.jvp(f, (x,), (1.0,))).lower(1.0)
    assert program.as_text().count("func.func private") == 1


def handed_on(x, dy):
    return jax.lax.while_loop(lambda carry: carry[0] < x, lambda carry: carry, (x, dy))[1]


@pytest.mark.parametrize(
    "backward",
    [lambda x, zero, dy: 2 * dy + zero, lambda x, zero, dy: 2 * handed_on(x, dy)],
    ids=["a zero that it adds", "a loop that hands it on"],
)
def test_a_backward_is_linear_in_spite_of(backward):
    @tg.custom_gradient
    def double(x):
        zero = jnp.zeros_like(x) * x
        return x * 2, lambda dy: backward(x, zero, dy)

    assert tg.jvp(double, (3.0,), (1.0,)) == (6.0, 2.0)
