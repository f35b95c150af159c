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
    ("loss", "x"),
    [
        (by_hand, jnp.array([1.0, 0.0])),
        (in_a_checkpointed_loop, jnp.array([1.0, 0.0])),
        (solved, jnp.zeros(4)),
    ],
)
def test_a_rule_that_recomputes_its_function_is_not_put_at_zero_as_a_whole(loss, x):
    """Zero in the place of its gradient would discard the part of it that is finite."""
    (finding,) = explain(loss, x).problems
    assert finding.cause.endswith("in the reverse pass")
    assert finding.rule is None


@pytest.mark.parametrize("power", [2, 3, -1], ids=str)
def test_a_power_that_overflows_divides_by_nothing(power):
    (finding,) = explain(lambda x: jnp.sum(x**power), jnp.array([1e30, 0.0])).problems
    assert ("divisor is zero" in finding.cure) == (power < 0)
    assert ("overflow" in finding.cure) == (power > 0)


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


def attention(p, x, mask):
    q, k, v = (x @ p[name] for name in "qkv")
    scores = jnp.where(mask, q @ k.T, -jnp.inf)
    weights = jax.nn.softmax(scores)
    return weights @ v


def test_the_softmax_of_a_masked_row_is_blamed_and_not_the_product_that_spreads_its_nan():
    keep = jnp.array([True, True, False, True])

    def loss(p, x, mask):
        return jnp.sum(jnp.where(keep[:, None], attention(p, x, mask), 0.0) ** 2)

    keys = jax.random.split(jax.random.key(0), 4)
    p = {name: jax.random.normal(key, (3, 3)) for name, key in zip("qkv", keys, strict=False)}
    args = p, jax.random.normal(keys[3], (4, 3)), jnp.ones((4, 4), bool).at[2].set(False)
    assert jnp.isnan(jax.grad(loss)(*args)["v"]).all()
    (finding,) = explain(loss, *args).problems
    line = attention.__code__.co_firstlineno
    assert (finding.cause, finding.origin.line) == ("NaN in the forward pass", line + 3)
    assert f"dot_general at test_explain_cures.py:{line + 4} multiplies a" in finding.what
    cured = loss
    for _ in range(4):  # the product, then what made its factor
        cured = tg.rewrite(cured, explain(cured, *args).problems[0].rule)
        if not explain(cured, *args).problems:
            break
    right = jax.grad(loss)(args[0], args[1], jnp.ones((4, 4), bool))  # any weights will do
    found = jax.grad(cured)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, right)


def test_what_made_the_infinity_in_a_masked_product_of_matrices_is_blamed():
    def loss(w, x):
        powers = jnp.exp(x)
        return jnp.sum(jnp.where(x[:, :1] < 50, powers @ w, 0.0))

    (finding,) = explain(loss, jnp.ones((2, 2)), jnp.array([[1.0, 2.0], [100.0, 1.0]])).problems
    assert (finding.cause, finding.operation) == ("Inf in the forward pass", "exp")
    assert finding.origin.line == loss.__code__.co_firstlineno + 1


def test_a_masked_logarithm_that_is_a_factor_is_blamed_and_cured_at_the_product():
    def loss(b, x):
        y = jnp.log(x)
        return jnp.sum(jnp.where(x > 0, y * b, 0.0))

    args = jnp.array([3.0, 4.0]), jnp.array([-1.0, 2.0])
    (finding,) = explain(loss, *args).problems
    assert (finding.operation, finding.origin.line) == ("log", loss.__code__.co_firstlineno + 1)
    cured = jax.grad(tg.rewrite(loss, finding.rule))(*args)
    np.testing.assert_allclose(cured, [0.0, np.log(2.0)], rtol=1e-6)


def test_a_scalar_factor_of_what_is_masked_is_offered_the_rule_that_cures_it():
    def loss(beta, x):
        return jnp.sum(jnp.where(jnp.isfinite(x), beta * x, 1.0))

    args = jnp.float32(2.0), jnp.array([1.0, jnp.nan, 2.0])
    (finding,) = explain(loss, *args).problems
    assert jax.grad(tg.rewrite(loss, finding.rule))(*args) == 3.0

    def unmasked(beta, x):
        return jnp.sum(jnp.where(x > 5, beta * x, 1.0) + jnp.where(jnp.isnan(x), beta * x, 0.0))

    (finding,) = explain(unmasked, *args).problems
    assert finding.rule is None


def test_after_a_cure_the_next_nan_is_found():
    def loss(x):
        a = jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0))
        b = jnp.sum(jnp.where(x > 0, x / jnp.sqrt(x), 0.0))
        return a + b + jnp.sum(x**0.5)

    x = jnp.array([0.0, 2.0])
    line = loss.__code__.co_firstlineno
    cured, lines = loss, []
    while problems := explain(cured, x).problems:
        lines.append(problems[0].origin.line)
        cured = tg.rewrite(cured, problems[0].rule)
        assert len(lines) <= 3
    assert lines == [line + 3, line + 2, line + 1]
    np.testing.assert_allclose(jax.grad(cured)(x), [0.0, 0.5 + 2**-0.5], rtol=1e-6)


def test_effects_that_run_more_than_once_are_told():
    calls = []

    @jax.custom_vjp
    def noted(x):
        jax.debug.callback(lambda: calls.append("function"))
        return 2 * x

    noted.defvjp(lambda x: (noted(x), None), lambda _, ct: (2 * ct,))

    def called(x):
        def step(x, _):
            jax.debug.callback(lambda: calls.append("in a loop"))
            return x, None

        jax.debug.callback(lambda: calls.append("called"))
        return 2 * jax.lax.scan(step, x, length=3)[0]

    for fun, x, times in ((called, 1.0, 4), (called, 0.0, 8), (noted, 1.0, None)):
        calls.clear()
        found = explain(lambda x, fun=fun: jnp.sqrt(fun(x)), x)
        jax.effects_barrier()
        assert len(calls) == times if times else len(calls) > 1
        is_told = "run again" in [finding.cause for finding in found.notes]
        assert is_told == (times != 4)  # at zero, another run finds where the Inf began


def test_a_weight_on_which_a_second_derivative_does_not_depend_is_unused():
    def curvature(w, x):
        return jax.grad(jax.grad(lambda x: jax.nn.relu(w * x)))(x)

    assert jax.grad(curvature)(2.0, 1.0) == 0
    (finding,) = explain(curvature, 2.0, 1.0).findings
    assert finding.cause == "unused"
    assert "as the second derivative of relu" in finding.cure
