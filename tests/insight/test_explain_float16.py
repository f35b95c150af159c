"""`explain` names the dtype where a gradient underflows or a value overflows in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegrad.insight import explain


def test_a_gradient_that_underflows_is_a_problem_that_names_the_dtype_and_a_loss_scale():
    def loss(w, x, dtype=jnp.float16, scale=1.0):
        h = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
        return scale * jnp.mean(h.astype(jnp.float32) ** 2)

    w, x = jnp.full((8, 4), 1e-3), jax.random.normal(jax.random.key(0), (20000, 8)) * 1e-2
    assert not jnp.any(jax.grad(loss)(w, x))
    single = jax.grad(loss)(w, x, jnp.float32)
    scaled = jax.grad(loss)(w, x, scale=2.0**14) / 2.0**14
    np.testing.assert_allclose(scaled, single, rtol=0.2)
    (finding,) = explain(loss, w, x).findings
    assert (finding.cause, finding.problem) == ("underflow", True)
    assert "float16" in finding.what
    assert "loss scale" in finding.cure


def test_a_value_that_overflows_names_float16():
    def loss(w, x):
        return jnp.sum(jnp.square(x.astype(jnp.float16) @ w.astype(jnp.float16))).astype(float)

    (finding,) = explain(loss, jnp.full((8, 4), 30.0), jnp.full((100, 8), 3.0)).problems
    assert finding.operation == "square"
    assert "float16" in finding.what
    assert "float32" in finding.cure


def test_a_product_whose_cotangent_underflows_is_not_said_to_be_multiplied_by_zeros():
    def loss(w, x, scale=1e-7):
        h = jnp.matmul(x, w, preferred_element_type=jnp.float32)  # a cotangent in float32
        return scale * jnp.mean((h + 1) ** 2)

    w, x = jnp.full((8, 4), 0.1, jnp.float16), jnp.full((20, 8), 0.3, jnp.float16)
    assert not jnp.any(jax.grad(loss)(w, x))
    assert jnp.all(jax.grad(loss)(w, x, 1.0))
    (finding,) = explain(loss, w, x).findings
    assert (finding.cause, finding.operation) == ("underflow", "dot_general")
    assert "loss scale" in finding.cure
    (finding,) = explain(loss, w, jnp.zeros_like(x)).problems
    assert finding.cause == "multiplied by zero"


def in_scan(step, length=200):
    return lambda x: jax.lax.scan(lambda x, _: (step(x), None), x, None, length)[0]


def one_by_one(step, count=60):
    def steps(x):
        for _ in range(count):
            x = step(x)
        return x

    return steps


@pytest.mark.parametrize(
    ("steps", "operations"),
    [
        (one_by_one(lambda x: 0.1 * x), {"mul"}),
        (one_by_one(lambda x: x / 10), {"div"}),
        (one_by_one(lambda x: jnp.tanh(0.1 * x + 0.2)), {"mul", "tanh"}),
        (in_scan(lambda x: 0.1 * x), {"mul"}),
        (in_scan(lambda x: jnp.tanh(x @ (0.5 * jnp.eye(3)) + 0.3)), {"dot_general", "tanh"}),
        (in_scan(jax.checkpoint(lambda x: 0.1 * x)), {"mul"}),
        (in_scan(in_scan(lambda x: 0.1 * x, 30), 3), {"mul"}),
    ],
)
def test_a_gradient_that_underflows_in_float32_is_no_product_with_zeros_and_cancels_nothing(
    steps, operations
):
    def loss(x):
        return jnp.sum(steps(x))

    x = jnp.full(3, 0.5)
    assert not jnp.any(jax.grad(loss)(x))
    with jax.enable_x64():  # in float64 it is not zero
        assert jnp.all(jax.grad(loss)(jnp.full(3, 0.5, jnp.float64)) > 0)
    found = explain(loss, x)
    (finding,) = (f for f in found.findings if f.cause != "vanishing")
    assert finding.cause == "underflow"
    assert len(found.problems) == 1
    assert finding.operation in operations
    assert "float32" in finding.what
    assert "loss scale" not in finding.cure


def test_a_carry_that_is_multiplied_by_zero_in_one_step_is_told_by_that_step():
    def loss(h, xs, factors):
        def step(h, item):
            x, factor = item
            return jnp.tanh(h * factor + x), None

        return jnp.sum(jax.lax.scan(step, h, (xs, factors))[0])

    factors = jnp.ones(10).at[4].set(0)
    (finding,) = explain(loss, jnp.ones(3), 0.1 * jnp.ones((10, 3)), factors).findings
    assert (finding.cause, finding.operation) == ("multiplied by zero", "mul")
