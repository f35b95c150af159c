"""Gradient functions of rules that close over what is being traced, differentiated or mapped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg

pytestmark = pytest.mark.both_jax

X, S = jnp.float32(0.5), jnp.float32(3.0)


@jax.jit
def inner(x):
    return jnp.sin(x) * x


def times(factor):
    def grad(op, dy):
        return factor * dy

    return grad


def by_rule(x, factor):
    rule = tg.rules.override_gradient(tg.match.op("sin"), times(factor))
    return tg.rewrite(inner, rule)(x)


def by_rule_in_a_list(x, factor):
    held = [factor]
    rule = tg.rules.override_gradient(tg.match.op("sin"), lambda op, dy: held[0] * dy)
    return tg.rewrite(inner, rule)(x)


def by_name(x, factor):
    name = "test_gradients_that_close_over_values"
    tg.register_gradient(name, replace=True)(times(factor))
    with tg.gradient_override_map({"sin": name}):
        return inner(x)


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def grad(self, op, dy):
        return self.scale * dy


def by_method(x, factor, fun=inner):
    rule = tg.rules.override_gradient(tg.match.op("sin"), Scaled(factor).grad)
    return tg.rewrite(fun, rule)(x)


def by_method_of_what_is_inlined(x, factor):
    return by_method(x, factor, lambda x: jnp.sin(x) * x)


# The derivative of the sine is the factor, so that of sin(x) x is factor * x + sin(x).
EXPECTED = S * X + jnp.sin(X)


@pytest.mark.parametrize(
    "f", [by_rule, by_rule_in_a_list, by_name, by_method, by_method_of_what_is_inlined]
)
def test_what_a_gradient_function_closes_over_may_be_traced_differentiated_or_mapped(f):
    slope = jax.grad(f)
    np.testing.assert_allclose(jax.grad(jax.jit(f))(X, S), EXPECTED, rtol=1e-6)
    for wrap in (lambda f: f, jax.jit, tg.trace):
        np.testing.assert_allclose(wrap(slope)(X, S), EXPECTED, rtol=1e-6)
        np.testing.assert_allclose(wrap(jax.grad(slope, 1))(X, S), X, rtol=1e-6)  # by the factor
        np.testing.assert_allclose(wrap(jax.grad(slope, 0))(X, S), 2 * S, rtol=1e-6)
    factors = jnp.array([1.0, 3.0])
    mapped = jax.vmap(slope, (None, 0))(X, factors)
    np.testing.assert_allclose(mapped, factors * X + jnp.sin(X), rtol=1e-6)


def test_what_it_closes_over_may_belong_to_a_loop():
    def f(x):
        return jax.lax.scan(lambda c, _: (by_rule(c, S * c), None), x, None, length=2)[0]

    first = jnp.sin(X) * X
    slopes = [S * c * c + jnp.sin(c) for c in (X, first)]
    np.testing.assert_allclose(jax.grad(f)(X), slopes[0] * slopes[1], rtol=1e-6)
