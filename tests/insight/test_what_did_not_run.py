"""Loops of no steps, branches that are not taken, and Python numbers: nothing is measured there."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tracegrad as tg


@jax.custom_vjp
def scaled(x, by):
    return x * by.astype(x.dtype)


scaled.defvjp(lambda x, by: (scaled(x, by), by), lambda by, g: (g * by.astype(g.dtype), None))


def no_steps(step, init):
    return lax.scan(lambda carry, _: (step(carry), None), init, None, length=0)[0]


def test_a_nan_of_the_reverse_pass_is_found_before_a_loop_of_no_steps():
    def loss(x):
        return no_steps(jnp.cos, jnp.sqrt(x))

    (finding,) = tg.explain(loss, jnp.float32(0)).problems
    assert (finding.cause, finding.operation) == ("Inf in the reverse pass", "sqrt")
    (finding,) = tg.explain(
        lambda x: no_steps(lambda c: no_steps(jnp.cos, c), loss(x)), 0.0
    ).problems
    assert finding.operation == "sqrt"


def test_a_nan_of_the_forward_pass_is_followed_through_a_loop_of_no_steps():
    def loss(x):
        made = jnp.log(x)
        inner, stacked = lax.scan(lambda c, _: (jnp.sin(c), c), made, None, length=0)
        return inner + jnp.sum(stacked)

    def around(x):
        return lax.scan(lambda c, _: (no_steps(jnp.sin, c - 1), None), loss(x), None, length=3)[0]

    for fun in (loss, around):
        (finding,) = tg.explain(fun, jnp.float32(-1)).problems
        assert (finding.cause, finding.operation) == ("NaN in the forward pass", "log")


def test_what_only_a_loop_of_no_steps_uses_has_a_gradient_of_zero_there():
    (finding,) = tg.explain(lambda x: no_steps(lambda c: c * x, 1.0), jnp.float32(2)).problems
    assert finding.cause == "no steps"
    assert "takes no steps" in finding.what
    assert finding.origin.file == __file__


def test_a_python_number_is_where_a_loop_starts_or_a_constant_of_it():
    def loss(x):
        return lax.fori_loop(0, 3, lambda _, c: c * jnp.sqrt(x), 1.0)

    found = tg.explain(loss, 4.0)
    assert not found.problems
    assert found.sources[0].norm == pytest.approx(float(jax.grad(loss)(4.0)), rel=1e-5)
    assert tg.explain(loss, 0.0).problems[0].operation == "sqrt"


@pytest.mark.parametrize("by", [jnp.int32(3), jnp.array(True), jax.random.key(0)])
def test_a_rule_in_a_branch_that_is_not_taken_is_not_checked(by):
    is_key = jnp.issubdtype(by.dtype, jax.dtypes.prng_key)

    def loss(x, by):
        number = jnp.int32(2) if is_key else by
        return lax.cond(x > 5, lambda x: noisy(x, by) + scaled(x, number), jnp.sin, x)

    @jax.custom_vjp
    def noisy(x, by):
        return x

    noisy.defvjp(lambda x, by: (x, None), lambda _, g: (2 * g, None))  # which is wrong
    report = tg.check_grads(loss, (1.0, by), order=1)
    assert report.leaves
    assert not any("noisy" in check.what for check in report.rules)
    with pytest.raises(tg.insight.GradientError, match="noisy"):
        tg.check_grads(loss, (6.0, by), order=1)


def test_a_rule_in_a_loop_of_no_steps_is_not_checked():
    def loss(x):
        return no_steps(lambda c: scaled(c, jnp.int32(3)), x)

    report = tg.check_grads(loss, (1.0,), order=1)
    assert report.leaves
    assert not report.rules
