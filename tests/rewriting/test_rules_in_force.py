"""Rules given to a traced function act on what is differentiated inside it."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import grad as grad_by_name
from jax.experimental import jet

import tracegrad as tg
from tests.compilation import temporary_bytes
from tests.derivatives import GRADIENTS, by_tape
from tracegrad import match, rules

pytestmark = pytest.mark.both_jax

X = jnp.array([-1.0, 0.5, 2.0])
SIN = match.op("sin")
TRIPLE = rules.scale_gradient(SIN, 3.0)


def loss(x):
    return jnp.sum(jnp.sin(x) * x)


def by_hand(factor):
    """The same, with the gradient of the sine multiplied."""

    def loss(x):
        sine = jnp.sin(x)
        return jnp.sum((jax.lax.stop_gradient((1 - factor) * sine) + factor * sine) * x)

    return loss


EXPECTED = jax.grad(by_hand(3.0))(X)


WAYS = {
    **GRADIENTS,
    "tg.gradients in the step": lambda f, x: tg.gradients(f(x), [x])[0],
    "tg.intermediate_gradients": lambda f, x: tg.intermediate_gradients(
        lambda x: f(x / 1.0), x, where=match.op("div")
    )[1]["div"],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rule_reaches_every_way_of_differentiating(way):
    def step(x):
        return WAYS[way](loss, x)

    np.testing.assert_allclose(tg.trace(step, rules=[TRIPLE])(X), EXPECTED, rtol=1e-5)
    np.testing.assert_allclose(tg.trace(step)(X), jax.grad(loss)(X), rtol=1e-5)


SECOND = {
    "hessian": lambda x: tg.hessian(loss)(x),
    "hvp": lambda x: jnp.stack([tg.hvp(loss, (x,), v) for v in jnp.eye(3)]),
    "jacobian of grad": lambda x: tg.jacobian(tg.grad(loss))(x),
    "jax.hessian": lambda x: jax.hessian(loss)(x),
    "jax.jacfwd of jax.grad": lambda x: jax.jacfwd(jax.grad(loss))(x),
    "equinox.filter_jvp of equinox.filter_grad": lambda x: jax.vmap(
        lambda v: eqx.filter_jvp(eqx.filter_grad(loss), (x,), (v,))[1]
    )(jnp.eye(3)),
}


@pytest.mark.parametrize("way", SECOND)
def test_second_derivatives_go_by_the_rule(way):
    expected = jax.jacobian(jax.grad(scaled_by_rule))(X)
    found = tg.trace(lambda x: SECOND[way](x), rules=[TRIPLE])(X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_rule_that_would_change_tangents_is_refused_in_an_accumulator():
    def tangent(x):
        with tg.ForwardAccumulator(x, jnp.ones(3)) as accumulator, jax.named_scope("sine"):
            y = jnp.sin(x)
        return accumulator.jvp(y)

    with pytest.raises(tg.GraphError, match="does not reach the tangents of a ForwardAcc"):
        tg.trace(tangent, rules=[rules.scale_gradient(SIN, 3.0)])(X)
    harmless = tg.trace(tangent, rules=[rules.recompute(match.scope("sine"))])
    np.testing.assert_allclose(harmless(X), np.cos(X), rtol=1e-6)


BLOCK = match.scope("block")


@pytest.mark.parametrize(
    ("rule", "factor"),
    [(rules.recompute(BLOCK), 1.0), (rules.scale_gradient(BLOCK, 0.5), 0.5)],
    ids=["recompute", "scale_gradient"],
)
def test_sources_and_constants_inside_of_a_match_have_their_own_gradients(rule, factor):
    def step(x):
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            with jax.named_scope("block"):
                a = jnp.sin(x)
                b = a * a
                y = b * a
            partial = tg.gradients(y, [a, b], stop_gradients=[a, b])
            partial += tg.gradients(y, x, stop_gradients=b)
        return tape.gradient(y, [x, a, b]) + partial

    sin, cos = np.sin(X), np.cos(X)
    expected = [3 * sin**2 * cos, 3 * sin**2, sin, sin**2, sin, sin**2 * cos]
    second = [6 * sin * cos**2 - 3 * sin**3, 6 * sin * cos, cos]
    second += [2 * sin * cos, cos, 2 * sin * cos**2 - sin**3]
    traced = tg.trace(step, rules=[rule])
    for fun, by in ((step, 1.0), (traced, factor)):
        found, tangents = jax.jvp(fun, (X,), (jnp.ones(3),))
        np.testing.assert_allclose(found, by * np.array(expected), rtol=1e-5)
        if rule.name == "recompute":
            np.testing.assert_allclose(tangents, second, rtol=1e-4)


@jax.custom_jvp
def tripled(x):
    return x


tripled.defjvp(lambda primals, tangents: (tripled(*primals), 3 * tangents[0]))


def scaled_by_rule(x):
    return jnp.sum(tripled(jnp.sin(x)) * x)


def test_rules_of_nested_traces_are_both_in_force():
    inner = tg.trace(lambda x: tg.grad(loss)(x), rules=[TRIPLE])
    outer = tg.trace(lambda x: inner(x), rules=[rules.scale_gradient(SIN, 2.0)])
    np.testing.assert_allclose(outer(X), jax.grad(by_hand(6.0))(X), rtol=1e-6)
    np.testing.assert_allclose(inner(X), EXPECTED, rtol=1e-6)


def test_sparse_gradients_under_rules():
    table, ids = jnp.ones((10, 2)), jnp.array([1, 1, 3])

    def looked_up(table):
        return jnp.sum(jnp.sin(table[ids]))

    step = tg.trace(lambda t: tg.grad(looked_up, sparse=True)(t), rules=[TRIPLE])
    np.testing.assert_allclose(step(table).to_dense(), 3 * jax.grad(looked_up)(table), rtol=1e-6)


# ------------------------------------------------------------------------------------ bad input


def test_a_rule_that_matches_nowhere_raises_once_all_was_looked_at():
    step = tg.trace(lambda x: tg.grad(loss)(x), rules=[rules.scale_gradient(match.op("sinn"), 2.0)])
    with pytest.raises(tg.NoMatchError, match=r"matches nothing in loss.*'sin'"):
        step(X)


def test_a_rule_that_matched_nothing_keeps_no_program():
    programs = []

    def note(graph):
        programs.append(weakref.ref(graph))
        return graph

    missing = rules.scale_gradient(match.op("sinn"), 2.0)
    step = tg.trace(lambda x: tg.grad(loss)(x), rules=[note, missing])
    with pytest.raises(tg.NoMatchError) as raised:
        step(X)
    error = raised.value.with_traceback(None)
    del raised
    gc.collect()
    assert [ref() for ref in programs] == [None, None]
    assert "matches nothing in loss" in str(error)


def test_filter_jvp_has_none_for_what_does_not_move():
    def step(x):
        return eqx.filter_jvp(lambda x, y: (loss(x), loss(y), 2, jnp.arange(2)), (x, x), (x, None))

    value, tangents = tg.trace(step, rules=[TRIPLE])(X)
    np.testing.assert_allclose(value[:2], [loss(X)] * 2, rtol=1e-6)
    np.testing.assert_allclose(tangents[0], EXPECTED @ X, rtol=1e-5)
    assert (value[2], *tangents[1:]) == (2, None, None, None)


def call(fun, *args, **kwargs):
    try:
        return float(fun(*args, **kwargs))
    except tg.NoMatchError as error:
        return "matches nothing in " in str(error)


@pytest.mark.parametrize("flags", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("differentiates", [False, True])
def test_whether_a_rule_matches_is_decided_for_each_signature_alone(flags, differentiates):
    def f(x, flag):
        inner = lambda x: 2 * (jnp.sin(x) if flag else x)  # noqa: E731
        return tg.grad(inner)(x) if differentiates else inner(x)

    traced = tg.trace(f, rules=[TRIPLE], static_argnames="flag")
    kept = jax.jit(lambda x: tg.grad(jnp.sin)(x))  # is not traced again for a second signature
    by_kept = tg.trace(lambda x, flag: kept(1.0) if flag else x, rules=[TRIPLE], static_argnums=1)
    right = 6.0 if differentiates else 0.0
    for flag in flags:
        assert call(traced, 0.0, flag=flag) == (right if flag else True)
        for x in (1.0, jnp.ones(())):
            expected = pytest.approx(3 * np.cos(1.0)) if flag else True
            assert call(by_kept, x, flag) == expected
    with ThreadPoolExecutor(1) as other:
        assert other.submit(call, traced, jnp.zeros(()), flag=False).result() is True


def test_a_rule_that_may_match_nothing_matches_where_it_can():
    rule = rules.scale_gradient(SIN, 3.0, missing_ok=True)
    f = tg.trace(lambda x, n: jnp.sin(x) if n else x, rules=[rule], static_argnums=1)
    assert [float(jax.grad(f)(0.0, n)) for n in (0, 1, 0)] == [1.0, 3.0, 1.0]


def test_static_arguments_keywords_and_python_values_reach_the_loss_as_they_are():
    def configured(x, n, *, name):
        assert (type(n), name) == (int, "sine")
        return sum(loss(x) for _ in range(n)) / n

    step = tg.trace(lambda x: jax.grad(configured)(x, 2, name="sine"), rules=[TRIPLE])
    np.testing.assert_allclose(step(X), EXPECTED, rtol=1e-6)


def test_everybody_else_sees_jaxs_own_functions():
    names = ("grad", "value_and_grad", "vjp", "linearize", "jacrev", "jacfwd", "hessian")
    before = [getattr(jax, name) for name in names]
    inside, elsewhere = [], []

    def step(x):
        inside.append(jax.grad)
        with ThreadPoolExecutor(1) as thread:  # that traces, under no rules
            elsewhere.append(thread.submit(lambda: jax.grad(loss)(X)).result())
        assert jax.grad.__name__ == "grad"
        assert jax.grad.__doc__ == before[0].__doc__
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tg.trace(step)(X)
    assert inside == [before[0]]  # no rule waits
    with pytest.raises(ZeroDivisionError):
        tg.trace(step, rules=[TRIPLE])(X)
    assert inside[1] is not before[0]
    assert [getattr(jax, name) for name in names] == before
    for gradient in elsewhere:
        np.testing.assert_allclose(gradient, jax.grad(loss)(X))


def test_a_derivative_in_a_gradient_function_is_not_under_the_rule_that_has_it():
    twice = rules.override_gradient(
        SIN, lambda op, dy: 2 * jax.vjp(jnp.sin, op.inputs[0])[1](dy)[0]
    )
    step = tg.trace(lambda x: jax.grad(loss)(x), rules=[twice])
    np.testing.assert_allclose(step(X), jax.grad(by_hand(2.0))(X), rtol=1e-6)


@jax.custom_vjp
def sine_by_vjp(x):
    return jnp.cos(x - jnp.pi / 2)


sine_by_vjp.defvjp(
    lambda x: (sine_by_vjp(x), x), lambda x, dy: jax.vjp(lambda x: jnp.sin(x), x)[1](dy)
)


@jax.custom_jvp
def sine_by_jvp(x):
    return jnp.cos(x - jnp.pi / 2)


sine_by_jvp.defjvp(lambda primals, tangents: jax.jvp(lambda x: jnp.sin(x), primals, tangents))


@pytest.mark.parametrize("sine", [sine_by_vjp, sine_by_jvp])
def test_a_derivative_in_a_rule_of_jax_is_not_under_the_rules_in_force(sine):
    """The edit of the function that the rule is of does not reach it either."""

    def nested(x):
        return jnp.sum(jnp.sin(sine(x)))

    def directional(x):
        return jnp.stack([tg.jvp(nested, (x,), (v,))[1] for v in jnp.eye(3)])

    plain = jax.grad(nested)(X)
    np.testing.assert_allclose(jax.grad(tg.rewrite(nested, TRIPLE))(X), 3 * plain, rtol=1e-5)
    ways = (
        lambda x: jax.grad(nested)(x),
        lambda x: jax.vjp(nested, x)[1](1.0)[0],
        tg.grad(nested),
        lambda x: by_tape(nested, x),
        directional,
    )
    for gradient in ways:
        np.testing.assert_allclose(tg.trace(gradient, rules=[TRIPLE])(X), 3 * plain, rtol=1e-5)


@jax.custom_jvp
def sine_by_slope(x):
    return jax.jvp(lambda x: jnp.sin(x - jnp.pi / 2), (x,), (jnp.ones_like(x),))[1]


@sine_by_slope.defjvp
def _(primals, tangents):
    return sine_by_slope(*primals), jnp.cos(primals[0]) * tangents[0]


def test_a_derivative_in_a_function_that_has_a_rule_is_not_under_the_rules_in_force():
    """Its rule is not, and is to return the same: optimistix differentiates what it solves."""

    def nested(x):
        return jnp.sum(jnp.sin(sine_by_slope(x)))

    with pytest.raises(tg.GraphError, match="lies inside of the custom gradient sine_by_slope"):
        tg.trace(jax.grad(nested), rules=[TRIPLE])(X)
    outside = rules.scale_gradient(SIN & ~match.call("sine_by_slope"), 3.0)
    step = tg.trace(lambda x: (nested(x), jax.value_and_grad(nested)(x)), rules=[outside])
    value, (same, gradient) = step(X)
    np.testing.assert_allclose([value, same], [nested(X)] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, 3 * jax.grad(nested)(X), rtol=1e-5)


def test_a_match_that_jax_has_differentiated_raises_and_says_where():
    def step(x):
        return grad_by_name(loss)(x)  # here

    with pytest.raises(tg.GraphError, match=r"differentiated already \(by jax\.grad at ") as error:
        tg.trace(step, rules=[TRIPLE])(X)
    line = step.__code__.co_firstlineno + 1
    assert f"test_rules_in_force.py:{line} (" in str(error.value)
    assert "`import jax` rather than `from jax import grad`" in str(error.value)
    with pytest.raises(tg.GraphError, match="differentiated already"):
        tg.rewrite(step, TRIPLE)(X)

    both = tg.trace(lambda x: step(x) + tg.grad(loss)(x), rules=[TRIPLE])
    with pytest.raises(tg.GraphError, match="differentiated already"):
        both(X)


def test_taylor_mode_which_no_rule_reaches_is_refused():
    def taylor(x):
        return jet.jet(loss, (x,), ((x, x),))[1][1]

    for run in (tg.trace(taylor, rules=[TRIPLE]), tg.rewrite(jax.jit(taylor), TRIPLE)):
        with pytest.raises(tg.GraphError, match=r"jax\.experimental\.jet .* do nothing there"):
            run(X)
    by_name = rules.scale_gradient(match.param("x"), 3.0)
    with pytest.raises(tg.GraphError, match=r"jax\.experimental\.jet"):
        tg.trace(taylor, rules=[by_name])(X)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_derivative_that_was_taken_before_the_trace_warns(jitted):
    _, pullback = jax.vjp(loss, X)
    _, linear = jax.linearize(loss, X)
    for derivative, given in ((pullback, 1.0), (linear, X)):
        called = jax.jit(lambda v, d=derivative: d(v)) if jitted else derivative
        step = tg.trace(lambda x, v, d=called: (jax.grad(loss)(x), d(v)), rules=[TRIPLE])
        with pytest.warns(UserWarning, match=r"a derivative of test_rules_in_force\.py:\d+ .*loss"):
            after = step(X, given)
        np.testing.assert_allclose(after[0], EXPECTED, rtol=1e-6)
        np.testing.assert_allclose(*map(np.ravel, (after[1], derivative(given))), rtol=1e-6)


def test_a_derivative_of_a_program_that_was_traced_by_itself_is_not_said_to_be_of_before():
    def loss(x):  # as differential equations are solved: the rule differentiates a jaxpr
        step = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(lambda y: y * jnp.sin(y))(x))

        @jax.custom_vjp
        def iterated(y):
            return jax.lax.fori_loop(0, 3, lambda _, y: step(y)[0], y)

        def forward(y):
            return jax.lax.scan(lambda y, _: (step(y)[0], y), y, length=3)

        def backward(ys, dy):
            def back(dy, y):
                return jax.vjp(step, y)[1]([dy])[0], None

            return jax.lax.scan(back, dy, ys, reverse=True)[:1]

        iterated.defvjp(forward, backward)
        return jnp.sum(iterated(x))

    by_name = rules.scale_gradient(match.param("x"), 3.0)
    gradient = tg.trace(lambda x: jax.grad(loss)(x), rules=[by_name])(X)  # a warning fails
    np.testing.assert_allclose(gradient, 3 * jax.grad(loss)(X), rtol=1e-6)


def test_numbers_are_no_inputs_for_a_rule_on_a_tape_as_for_jax_grad():
    def scaled(h):
        return jnp.sum(2.0 * h)

    for step in (lambda h: by_tape(scaled, h), lambda h: jax.grad(scaled)(h)):
        first, second = (rules.scale_gradient(match.op("mul"), 3.0, inputs=i) for i in (0, 1))
        with pytest.raises(tg.NoMatchError, match=r"through inputs=0 of .* \(2\.0, "):
            tg.trace(step, rules=[first])(X)
        by_rule = tg.trace(step, rules=[second])(X)
        np.testing.assert_allclose(by_rule, jnp.full_like(X, 6.0))


# JAX moves what is the same at each step of a scan out of it, and out of all named scopes.


def recurrent(sine, w, x):
    def step(carry, _):
        return carry * sine(w) + carry, None

    def outer(carry, _):
        return jax.lax.scan(step, carry, None, length=2)

    return jnp.sum(jax.lax.scan(outer, x, None, length=2)[0])


def rounded(rounding, w, x):
    def step(carry, _):
        return jnp.tanh(carry * rounding(4 * w) / 4 + x), None

    return jnp.sum(jax.lax.scan(step, jnp.zeros_like(x), None, length=3)[0])


@jax.custom_jvp
def straight(x):
    return jnp.round(x)


straight.defjvp(lambda x, dx: (straight(*x), *dx))
W = jnp.array([0.3, 0.7, 1.1])


@pytest.mark.parametrize("way", GRADIENTS)
def test_a_rounding_that_is_the_same_at_each_step_of_a_scan(way):
    rule = rules.straight_through(match.op("round"))
    step = tg.trace(lambda w: GRADIENTS[way](lambda w: rounded(jnp.round, w, X), w), rules=[rule])
    expected = jax.grad(lambda w: rounded(straight, w, X))(W)
    np.testing.assert_allclose(step(W), expected, rtol=1e-5)


def in_a_scan(step, x):
    return jax.lax.scan(lambda carry, _: (step(carry), None), x, None, length=3)[0]


def in_two_scans(step, x):
    return in_a_scan(lambda carry: in_a_scan(step, carry), x)


def in_a_loop_of_a_jitted_function(step, x):
    return jax.lax.fori_loop(0, 3, lambda i, carry: jax.jit(step)(carry), x)


@pytest.mark.parametrize("run", [in_a_scan, in_two_scans, in_a_loop_of_a_jitted_function])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, jax.vmap], ids=["as it is", "jit", "vmap"])
def test_a_rule_for_what_jax_moved_out_of_a_scan_of_a_gradient_by_name_raises(run, outer):
    """Outside of the scan the rounding is not marked as differentiated; the rule did nothing."""

    def loss(w):
        def step(carry):
            return jnp.tanh(carry * jnp.round(4 * w) / 4 + 1.0)

        return jnp.sum(run(step, jnp.zeros_like(w)))

    rule = rules.straight_through(match.op("round"))
    w = jnp.stack([W, W])
    with pytest.raises(tg.GraphError, match="differentiated already"):
        tg.trace(lambda w: outer(grad_by_name(loss))(w), rules=[rule])(w)
    found = tg.trace(lambda w: outer(jax.grad(loss))(w), rules=[rule])(w)
    np.testing.assert_allclose(found, outer(jax.grad(tg.rewrite(loss, rule)))(w), rtol=1e-6)


def test_a_rule_for_what_was_computed_before_a_scan_of_a_gradient_by_name_is_taken():
    """Whoever differentiates the traced function gets the gradient of the rounding."""

    def twice(w, carry):
        return jnp.tanh(carry * w)

    def gradient(w):
        quantised = jnp.round(4 * w) / 4
        first = jax.jit(twice)(quantised, 1 + w)

        def loss(v):
            return jnp.sum(in_a_scan(lambda carry: twice(v, carry), first))

        return grad_by_name(loss)(quantised)

    rule = rules.straight_through(match.op("round"))
    found = jax.grad(lambda w: jnp.sum(tg.trace(gradient, rules=[rule])(w)))(W)
    assert np.all(np.abs(found) > 0)


HIGHER = {
    "gradient of a gradient": lambda f, x: jax.grad(lambda w: jnp.sum(jax.grad(f)(w) * x))(W),
    "tangent of a gradient": lambda f, x: jax.jvp(jax.grad(f), (W,), (x,))[1],
    "hessian": lambda f, x: tg.hessian(f)(W),
    "by tapes": lambda f, x: by_tape(lambda w: jnp.sum(by_tape(f, w) * x), W),
}


@pytest.mark.parametrize("way", HIGHER)
def test_an_operation_that_is_the_same_at_each_step_is_edited_once(way):
    def twice(x):
        sine = jnp.sin(x)
        return 3 * sine - jax.lax.stop_gradient(2 * sine)

    def step(sine):
        return lambda x: HIGHER[way](lambda w: recurrent(sine, w, x), x)

    np.testing.assert_allclose(
        tg.trace(step(jnp.sin), rules=[TRIPLE])(X), jax.jit(step(twice))(X), rtol=1e-5
    )


def test_whoever_differentiates_a_step_with_a_scan_has_its_operations_edited_once():
    def step(sine):
        return lambda w: jnp.sum(jax.grad(lambda w: recurrent(sine, w, X))(w) * X)

    edited = tg.trace(step(jnp.sin), rules=[TRIPLE])
    sine = jax.grad(step(lambda x: 3 * jnp.sin(x) - jax.lax.stop_gradient(2 * jnp.sin(x))))
    np.testing.assert_allclose(jax.grad(edited)(W), sine(W), rtol=1e-5)


# -------------------------------------------------------------------------------- memory budgets


def deep(w, x):
    for _ in range(24):
        x = jnp.tanh(jnp.sin(x @ w))
    return jnp.sum(x)


@pytest.mark.parametrize("derivative", [tg.grad, lambda f: jax.grad(f)], ids=["tg", "jax"])
def test_a_memory_budget_reaches_the_loss_inside_a_step(derivative):
    w, x = jnp.eye(64) / 8, jnp.ones((512, 64))

    def step(w, x):
        return w - 0.1 * derivative(deep)(w, x)

    plain, fitted = tg.trace(step), tg.trace(step, memory_budget="60%")
    np.testing.assert_allclose(fitted(w, x), plain(w, x), rtol=1e-5)
    assert temporary_bytes(fitted, w, x) < 0.8 * temporary_bytes(plain, w, x)


def test_a_memory_budget_that_does_not_reach_the_loss_inside_a_step_raises():
    w, x = jnp.eye(64) / 8, jnp.ones((512, 64))
    with pytest.raises(tg.GraphError, match=r"memory_budget='60%'.*differentiated already") as told:
        tg.trace(lambda w, x: grad_by_name(deep)(w, x), memory_budget="60%")(w, x)
    assert "jax.grad(tracegrad.trace(loss, memory_budget='60%'))" in str(told.value)


def test_a_budget_that_is_none_is_refused_at_once():
    with pytest.raises(ValueError, match="not above zero"):
        tg.trace(deep, memory_budget=-1)
    with pytest.raises(TypeError, match="memory budget is"):
        tg.trace(deep, memory_budget=[1])


def test_forward_mode_of_jax_goes_by_rules_once_also_over_a_gradient():
    def tangent(x):
        return jax.jvp(jnp.sin, (x,), (x,))[1]

    def product(x):  # of a Hessian
        return jax.jvp(jax.grad(lambda y: jnp.sin(y) ** 2), (x,), (x,))[1]

    tripled = tg.rules.scale_gradient(tg.match.op("sin"), 3.0)
    x = 0.3
    assert np.isclose(tg.trace(tangent, rules=[tripled])(x), 3 * x * np.cos(x))
    # The gradient is 3 * 2 sin cos; the tangent of sin in it is that of sin, which is tripled too.
    expected = 6 * x * (3 * np.cos(x) ** 2 - np.sin(x) ** 2)
    assert np.isclose(tg.trace(product, rules=[tripled])(x), expected)
    assert np.isclose(tg.rewrite(product, tripled)(x), expected)


DIFFERENTIATED = jax.jit(lambda x: jax.grad(loss)(x))
differentiates = tg.rewrite(lambda x: jax.nn.relu(DIFFERENTIATED(x)), TRIPLE)


def shows_values(x):
    return tg.intermediates(lambda x: jax.nn.relu(loss(x)), x, where=SIN)[0]


def shows_gradients(x):
    return tg.intermediate_gradients(lambda x: jax.nn.relu(loss(x)), x, where=SIN)[0]


def edits(x):
    return tg.rewrite(lambda x: jax.nn.relu(loss(x)), tg.edit(SIN, lambda op, x: op(x)))(x)


@pytest.mark.parametrize("call", [differentiates, shows_values, shows_gradients, edits])
def test_inner_functions_that_jax_has_compiled_are_shared_by_calls_with_the_same_rules(
    call, caplog
):
    expected = jax.nn.relu(EXPECTED if call is differentiates else loss(X))
    np.testing.assert_allclose(call(X), expected, rtol=1e-5)
    with jax.log_compiles():
        np.testing.assert_allclose(call(X), expected, rtol=1e-5)
    assert "Finished XLA compilation" not in caplog.text


def test_functions_that_differentiate_share_nothing_with_other_rules():
    inner = jax.jit(lambda x: jax.grad(loss)(x))
    tripled = tg.rewrite(lambda x: jnp.cos(x) + inner(x), TRIPLE)
    ninefold = rules.scale_gradient(SIN, 9.0)
    for _ in range(2):
        outer = tg.rewrite(lambda x: (edits(x), tripled(x), inner(x)), ninefold)
        found = (*outer(X)[1:], tripled(X), inner(X))
        own = [jnp.cos(X), 0.0, jnp.cos(X), 0.0]
        for result, start, factor in zip(found, own, (27, 9, 3, 1), strict=True):
            gradient = jax.grad(by_hand(factor))(X)
            np.testing.assert_allclose(result, start + gradient, rtol=1e-5)
