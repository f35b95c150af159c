"""`explain` compares rules whose functions hold a `while_loop`: those of implicit solvers, say."""

from __future__ import annotations

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.insight import explain

W = jnp.asarray(0.2 * np.random.default_rng(0).normal(size=(6, 6)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=6), jnp.float32)


def cell(w, x, z):
    return jnp.tanh(w @ z + x)


def solve(step, z, tolerance):
    """Iterates to a fixed point."""

    def goes_on(pair):
        return jnp.linalg.norm(pair[0] - pair[1]) > tolerance

    return jax.lax.while_loop(goes_on, lambda pair: (step(pair[0]), pair[0]), (step(z), z))[0]


def fixed_point(is_right, tolerance=1e-6):
    @tg.custom_gradient
    def solved(w, x):
        z = solve(lambda z: cell(w, x, z), jnp.zeros(6), tolerance)

        def grad(ct):
            _, of_z = jax.vjp(lambda z: cell(w, x, z), z)
            u = solve(lambda u: of_z(u)[0] + ct, ct, 1e-6) if is_right else ct
            return jax.vjp(lambda w, x: cell(w, x, z), w, x)[1](u)

        return z, grad

    return solved


def by_bisection(is_right):
    """Returns a function that finds the root of ``z**3 + z == a``."""

    @jax.custom_vjp
    def root(a):
        def halve(ends):
            low, high = ends
            middle = (low + high) / 2
            is_above = middle**3 + middle > a
            return jnp.where(is_above, low, middle), jnp.where(is_above, middle, high)

        start = jnp.float32(-5), jnp.float32(5)
        return jax.lax.while_loop(lambda ends: ends[1] - ends[0] > 1e-6, halve, start)[0]

    def forward(a):
        z = root(a)
        return z, z

    root.defvjp(forward, lambda z, ct: (ct / (3 * z**2 + (1 if is_right else 2)),))
    return root


def doubled_three_times(is_right):
    @jax.custom_vjp
    def doubled(x):
        state = jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] * 2, s[1] + 1), (x, 0))
        return state[0]

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, ct: (ct * (8 if is_right else 1),))
    return doubled


def in_scan(solved):
    return lambda w, x: jax.lax.scan(lambda x, _: (solved(w, x), None), x, length=3)[0]


ARGUMENTS = {
    "fixed point": (fixed_point, (W, X)),
    "loose tolerance": (lambda is_right: fixed_point(is_right, 1e-3), (W, X)),
    "in a scan": (lambda is_right: in_scan(fixed_point(is_right)), (W, X)),
    "bisection": (by_bisection, (jnp.float32(0.7),)),
    "bisections": (lambda is_right: jax.vmap(by_bisection(is_right)), (jnp.linspace(-2, 2, 7),)),
    "doubled": (doubled_three_times, (X,)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_rule_of_a_function_with_a_while_loop_is_compared_by_finite_differences(name):
    make, arguments = ARGUMENTS[name]
    wrt = tuple(range(len(arguments)))

    def loss_of(function):
        return lambda *arguments: jnp.sum(function(*arguments) ** 2)

    assert explain(loss_of(make(True)), *arguments, wrt=wrt).findings == ()
    (finding,) = explain(loss_of(make(False)), *arguments, wrt=wrt).findings
    assert (finding.cause, finding.problem) == ("changed by a rule", False)
    assert finding.rule is None  # JAX has no derivative of the function to put in its place
    if name == "doubled":
        by_rule, right = re.search(r"norm (\S+); .* has (\S+),", finding.what).groups()
        assert float(right) == pytest.approx(8 * float(by_rule), rel=1e-2)


def test_a_rule_of_equinox_is_compared_too():
    @eqx.filter_custom_vjp
    def square(x):
        return x**2

    square.def_fwd(lambda perturbed, x: (x**2, None))
    square.def_bwd(lambda residuals, ct, perturbed, x: ct * x)  # twice that would be right

    def loss(x):
        return jnp.sum(square(x))

    (finding,) = explain(loss, X).findings
    assert (finding.cause, finding.problem) == ("changed by a rule", False)
    np.testing.assert_allclose(jax.grad(loss)(X), X, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(tg.rewrite(loss, finding.rule))(X), 2 * X, rtol=1e-6)
