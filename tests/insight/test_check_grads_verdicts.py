"""`check_grads`: a verdict is right, or there is none, whatever the dtypes and sizes of numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tracegrad.insight import GradientError, check_grads

X = jnp.array([0.3, -1.2, 2.0])


def report_on(fun, *args, order=1, **choices):
    try:
        return check_grads(fun, args, order, **choices)
    except GradientError as error:
        return error.report


def statuses(report):
    return {check.status for check in (*report.rules, *report.leaves)}


def scaled_rule(factor, function=jnp.tanh, derivative=lambda x: 1 - jnp.tanh(x) ** 2):
    """A function whose rule is its derivative times a factor."""
    act = jax.custom_vjp(lambda x: function(x))
    act.defvjp(lambda x: (function(x), x), lambda x, dy: ((factor * dy * derivative(x)),))
    return act


# ------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("factor", [1.0, 1.1, 10.0, 0.0, -1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_rule_in_a_narrow_dtype_is_judged_as_in_double_precision(dtype, factor):
    act, x = scaled_rule(factor), jnp.linspace(-1, 1, 64)
    report = report_on(lambda x: jnp.sum(act(x.astype(dtype)).astype(float)), x)
    assert statuses(report) == {"right" if factor == 1 else "wrong"}
    exact = report_on(lambda x: jnp.sum(act(x)), x)
    for check, other in zip(report.leaves, exact.leaves, strict=True):
        assert check.expected == pytest.approx(other.expected, rel=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_right_rule_whose_constants_are_rounded_is_not_called_wrong(dtype):
    def gelu(x):
        return x * jax.scipy.special.erf(x * 0.70710678)

    def derivative(x):
        return jax.scipy.special.erf(x * 0.70710678) + x * 0.79788456 * jnp.exp(-x * x / 2)

    act = scaled_rule(1.0, gelu, derivative)
    for seed in range(10):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=16))
        report = report_on(lambda x: jnp.sum(act(x.astype(dtype)).astype(float)), x, seed=seed)
        assert report.wrong == ()


def test_one_operation_in_bfloat16_hides_no_rule_beside_it():
    act = scaled_rule(10.0)

    def f(x):
        return jnp.sum(act(x.astype("float32"))) + jnp.sum(jnp.sin(x.astype("bfloat16")))

    assert statuses(report_on(f, X)) == {"wrong"}


def everything(x, dtype):
    """What has programs, dtypes or bits among its parameters."""
    x = x.astype(dtype)
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    x = jnp.where(kept, x, x * jnp.asarray(0.5, dtype))
    y = jnp.zeros((5, 3), dtype).at[jnp.array([1, 1, 4])].add(x[:3]) + jnp.sort(x, axis=0)[:5]
    y = lax.dot_general(y, y, (((0,), (0,)), ((), ())), preferred_element_type=dtype)
    y, _ = lax.scan(lambda c, t: (jnp.tanh(c * t), None), y, jnp.ones(3, dtype))
    y = lax.cond(jnp.sum(y) > -1e6, jnp.sin, jnp.cos, y)
    y = lax.fori_loop(0, 2, lambda i, y: jax.checkpoint(jnp.exp)(-y), y)
    y = jax.jit(jax.nn.softmax)(y) + jax.nn.silu(y) + lax.reduce_precision(y, 8, 7)
    y = lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID")
    lines = lax.conv(y[None, None], jnp.full((1, 1, 2, 2), 0.5, dtype), (1, 1), "SAME")
    return jnp.sum(lines.astype(float)) + jnp.max(y).astype(float)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_of_many_operations_in_a_narrow_dtype_is_that_in_double_precision(dtype):
    x = np.random.default_rng(0).normal(size=(6, 3))
    narrow = report_on(lambda x: everything(x, dtype), x)
    double = report_on(lambda x: everything(x, "float64"), x)
    assert statuses(narrow) == statuses(double) == {"right"}
    for check, other in zip(narrow.leaves, double.leaves, strict=True):
        assert check.got == pytest.approx(other.got, rel=1e-9)


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1), ("float16", 1), ("float16", 3)])
def test_a_host_function_that_rounds_small_steps_away_is_not_called_wrong(dtype, factor):
    """No small step changes its results, so rounding alone makes a derivative of zero of them."""

    def square(x):
        return tg.numpy_function(
            lambda x: x * x, [x], dtype, grad=lambda op, dy: factor * dy * 2 * op.inputs[0]
        )

    report = report_on(square, jnp.array([1.0, 2.0, 0.3], dtype), seed=2)
    assert bool(report.wrong) == (factor == 3)
    if factor == 1:
        for check in report.leaves:
            assert check.expected == pytest.approx(check.got, rel=0.1)


def test_second_derivatives_through_a_rule_in_bfloat16_are_judged():
    act = scaled_rule(1.0, jnp.sin, jnp.cos)
    stopped = scaled_rule(1.0, jnp.sin, lambda x: lax.stop_gradient(jnp.cos(x)))
    for rule, verdict in ((act, {"right"}), (stopped, {"right", "wrong"})):
        report = report_on(
            lambda x, rule=rule: rule(x.astype("bfloat16")).astype(float), X, order=2, modes=["rev"]
        )
        assert {check.status for check in report.leaves} == verdict
        assert {check.order for check in report.wrong} <= {2}


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", "right"), ("float16", "not judged")])
def test_what_runs_in_its_own_dtype_is_judged_as_far_as_that_goes(dtype, verdict):
    def sine(op, dy):
        return factor * dy * jnp.cos(op.inputs[0])

    def f(x):  # no code of the host's has another form
        y = tg.numpy_function(lambda x: np.sin(x, dtype=dtype), [x], dtype, grad=sine)
        return jnp.sum(y.astype(float))

    x = jnp.linspace(0.2, 1.4, 32).astype(dtype)
    factor = 1.0
    report = check_grads(lambda x: f(x.astype(dtype)), (x,), order=1)
    assert statuses(report) == {verdict}
    assert str(report).startswith(f"derivatives of <lambda>: {verdict}")
    factor = 1.1
    assert "right" not in statuses(report_on(lambda x: f(x.astype(dtype)), x))


# ------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e12])
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.0])
def test_limits_are_relative_to_what_is_compared(size, factor):
    act = scaled_rule(factor, lambda x: size * x * x, lambda x: 2 * size * x)
    expected = {"right" if factor == 1 else "wrong"}
    for x in (jnp.arange(1.0, 5.0), 1e-6 * jnp.arange(1.0, 5.0)):
        assert statuses(report_on(lambda x: jnp.sum(act(x)), x)) == expected
        assert statuses(report_on(lambda x: jnp.sum(jnp.abs(act(x))), x)) == expected


def test_a_small_factor_in_float32_counts_too():
    act = scaled_rule(0.0, lambda x: x * np.float32(1e-6), lambda x: x)
    assert statuses(report_on(lambda x: jnp.sum(act(x.astype("float32"))), X)) == {"wrong"}


def test_a_derivative_that_cancels_is_not_called_wrong():
    def centred(x):
        return jnp.sum(jnp.sin(x - jnp.mean(x))), jnp.sum(x - jnp.mean(x))

    x = np.random.default_rng(0).normal(size=40)
    assert report_on(lambda x: centred(x)[1], x).wrong == ()
    assert report_on(lambda x, b: jnp.sum((x + b - jnp.mean(x + b)) ** 2), x, 0.5).wrong == ()
    assert report_on(lambda x: jnp.sum(jax.nn.softmax(x.astype("float32"))), x).wrong == ()
    assert statuses(report_on(lambda x: jnp.sum(jnp.round(x)), x)) == {"right"}  # zero and zero


def test_a_change_that_is_rounded_away_at_small_steps_is_not_called_wrong():
    def flat(x):
        return 1e-4 * jnp.tanh(jnp.exp(0.3 * (jnp.max(x, initial=-100.0) * x)))

    x = jnp.array([-2.17620527e-05], jnp.float32)
    assert "wrong" not in statuses(report_on(flat, x))


def test_a_derivative_that_is_infinite_is_wrong():
    act = scaled_rule(jnp.inf)
    assert statuses(report_on(lambda x: jnp.sum(act(jnp.abs(x))), X)) == {"wrong"}


# ------------------------------------------------------------------------------------------ kinks


@pytest.mark.parametrize("act", [jax.nn.relu, jnp.abs], ids=["relu", "abs"])
def test_a_network_of_many_kinks_is_not_called_wrong(act):
    for seed in range(3):
        random = np.random.default_rng(seed)
        ws = [jnp.asarray(random.normal(size=(64, 64)) / 6, jnp.float32) for _ in range(4)]
        x = jnp.asarray(random.normal(size=(32, 64)), jnp.float32)

        def loss(ws, x):
            for w in ws:
                x = act(x.astype("float32") @ w.astype("float32"))
            return jnp.mean(x**2)

        report = report_on(loss, ws, x, seed=seed)
        assert report.wrong == ()
        assert "right" in statuses(report)


def test_a_rule_with_a_kink_that_is_wrong_beside_it_is_wrong():
    act = scaled_rule(1.1, jax.nn.relu, lambda x: (x > 0).astype(x.dtype))
    x = jnp.asarray(np.random.default_rng(0).normal(size=64), jnp.float32)
    assert statuses(report_on(lambda x: jnp.sum(act(x.astype("float32"))), x)) == {"wrong"}


# ------------------------------------------------------------------- what does not run in double


def starts_in_float32(x):
    return lax.scan(lambda c, _: (jnp.sin(c * x), None), jnp.ones(3, "float32"), length=3)[0]


def carries_bfloat16(x):
    start = jnp.ones(3, "bfloat16")
    carry, _ = lax.scan(lambda c, _: (c * x.astype(c.dtype), None), start, length=3)
    return carry.astype(float)


def expects_float32(x):
    assert x.dtype == jnp.float32
    return jnp.sin(x)


def in_a_rule(backward):
    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, dy: (backward(x, dy),))
    return square


def adds_from_float32(x, dy):
    return lax.fori_loop(0, 2, lambda i, c: c + x * dy, jnp.zeros(3, "float32"))


def doubles_float32(x, dy):
    assert dy.dtype == jnp.float32
    return 2 * x * dy


TWOS = np.full(3, 2, "float32")


def multiplies_by_what_it_closes_over(x, dy):
    return jax.jit(lambda dy: lax.mul(dy * x, jnp.asarray(TWOS)))(dy)


@pytest.mark.parametrize(
    "function",
    [
        starts_in_float32,
        carries_bfloat16,
        expects_float32,
        in_a_rule(adds_from_float32),
        in_a_rule(doubles_float32),
        in_a_rule(multiplies_by_what_it_closes_over),
    ],
)
def test_what_does_not_run_in_double_precision_is_judged_all_the_same(function):
    order = 2 if function is starts_in_float32 else 1
    report = check_grads(lambda x: jnp.sum(function(x)), (X,), order=order)
    assert statuses(report) == {"right"}
    assert ("single precision" in report.note) == (function is not carries_bfloat16)
    if function is starts_in_float32:
        words = "traced in single precision, as double precision failed: scan body"
        assert f"right ({words}" in str(report)
    wrong = scaled_rule(1.1, jnp.sin, jnp.cos)
    assert "wrong" in statuses(report_on(lambda x: jnp.sum(wrong(function(x))), X))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loops_that_end_one_by_one_under_vmap_are_judged_in_narrow_dtypes(dtype):
    def doubled(x):
        return lax.while_loop(lambda y: y < 10, lambda y: y * 2, x)

    def f(x):  # 64, 8 and 2 times x
        return jnp.sum(jax.vmap(doubled)(x.astype(dtype)).astype(float))

    x = jnp.array([0.25, 2.0, 7.0])
    report = check_grads(f, (x,), 1, ["fwd"])
    plain = check_grads(lambda x: jnp.sum(x * jnp.array([64.0, 8, 2])), (x,), 1, ["fwd"])
    assert statuses(report) == {"right"}
    assert report.leaves[0].got == pytest.approx(plain.leaves[0].got)


def test_a_rule_in_float32_may_call_a_jitted_function():
    act = scaled_rule(1.0, jax.nn.softplus, jax.nn.sigmoid)
    assert statuses(report_on(lambda x: jnp.sum(act(x.astype("float32"))), X)) == {"right"}


def test_an_error_of_the_function_itself_is_raised_as_it_is():
    def fails(x):
        raise AssertionError("x is never right")

    with pytest.raises(AssertionError, match="x is never right"):
        check_grads(fails, (X,))


@pytest.mark.both_jax
def test_a_rule_that_jax_cannot_transpose_since_a_batch_shares_a_result_is_not_wrong():
    @jax.custom_vjp
    def scaled(x, scale):
        return x * scale, scale + 1

    scaled.defvjp(
        lambda x, scale: (scaled(x, scale), (x, scale)),
        lambda saved, dy: (dy[0] * saved[1], dy[0] * saved[0] + dy[1]),
    )

    def loss(x, scale):
        return jnp.sum(jax.vmap(lambda x: scaled(x, scale)[0])(x) ** 2)

    tg.check_grads(loss, (jnp.arange(1.0, 4.0), 2.0), order=1)
