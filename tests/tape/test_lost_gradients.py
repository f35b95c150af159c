"""What a function with a custom gradient closes over gets none on a tape, and a tape says so."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests import derivatives

X = jnp.array([0.5, -1.2, 2.0])
W = jnp.float32(2.0)
# Of sum(f(X) * w), f(X) = X * w, with f as a constant: what a rule of f leaves of 2 * w * sum(X).
PARTIAL = float(jax.grad(lambda w: jnp.sum(X * jax.lax.stop_gradient(w) * w))(2.0))


def scaled_by(w):
    @tg.custom_gradient
    def scaled(a):
        return a * w, lambda dy: dy * w

    return scaled


@tg.custom_gradient
def scaled_by_keyword(a, *, w):
    return a * w, lambda dy: dy * w


class Layer:
    def __init__(self, w):
        self.w = w

    @tg.custom_gradient
    def scaled(self, a):
        return a * self.w, lambda dy: dy * self.w


def doubled_by_rule(a, w):
    return tg.custom_gradient(lambda a: (scaled_by(w)(a), lambda dy: 2 * dy))(a)


CLOSING_OVER = {
    "variable": lambda w: scaled_by(w)(X),
    "keyword": lambda w: scaled_by_keyword(X, w=w),
    "attribute": lambda w: Layer(w).scaled(X),
    "intermediate": lambda w: scaled_by(w * 1.0)(X),
    "pass_through": lambda w: tg.grad_pass_through(lambda a: a * w)(X),
    "in another": lambda w: doubled_by_rule(X, w),
    "jit": lambda w: jax.jit(scaled_by(w))(X),
    "trace": lambda w: tg.trace(scaled_by(w))(X),
    "vmap": lambda w: jax.vmap(scaled_by(w))(X),
    "map": lambda w: jax.lax.map(scaled_by(w), X),
    "cond": lambda w: jax.lax.cond(X[0] > 0, scaled_by(w), lambda a: a, X),
    "checkpoint": lambda w: jax.checkpoint(scaled_by(w))(X),
}
# None of these lets a derivative by w into what it returns.
HEALTHY = {
    "stopped": lambda w: scaled_by(tg.stop_gradient(w))(X),
    "stopped in it": lambda w: tg.custom_gradient(
        lambda a: (a * tg.stop_gradient(w), lambda dy: dy * w)
    )(X),
    "only in the gradient": lambda w: tg.custom_gradient(lambda a: (a * 2.0, lambda dy: dy * w))(X),
    "an argument": lambda w: tg.custom_gradient(
        lambda a, w: (a * w, lambda dy: (dy * w, jnp.sum(dy * a)))
    )(X, w),
    "a constant": lambda w: scaled_by(jnp.float32(3.0))(X),
    "stopped, jit": lambda w: jax.jit(scaled_by(tg.stop_gradient(w)))(X),
    "stopped in it, jit": lambda w: jax.jit(
        tg.custom_gradient(lambda a: (a * tg.stop_gradient(w), lambda dy: dy * w))
    )(X),
}


def by_tape(f, w=W):
    with tg.GradientTape() as tape:
        tape.watch(w)
        y = jnp.sum(f(w) * w)
    return tape.gradient(y, w)


def by_accumulator(f):
    with tg.ForwardAccumulator(W, jnp.float32(1.0)) as accumulator:
        y = jnp.sum(f(W) * W)
    return accumulator.jvp(y)


WARNED = r"depends on .* \(f32\[\]\), which it closes over .*positional argument"


@pytest.mark.parametrize("derivative", [by_tape, by_accumulator])
@pytest.mark.parametrize("form", CLOSING_OVER)
def test_a_watched_array_that_a_rule_closes_over_is_told_of(form, derivative):
    with pytest.warns(UserWarning, match=WARNED) as said:
        got = derivative(CLOSING_OVER[form])
    np.testing.assert_allclose(got, PARTIAL, rtol=1e-6)
    (warning,) = said
    assert warning.filename == __file__
    assert re.search(r"through the call at test_lost_gradients\.py:\d+ ", str(warning.message))
    with pytest.raises(ValueError, match=r"depends on .*positional argument"):
        jax.grad(lambda w: jnp.sum(CLOSING_OVER[form](w) * w))(W)


@pytest.mark.parametrize("derivative", [by_tape, by_accumulator])
@pytest.mark.parametrize("form", HEALTHY)
def test_nothing_is_said_where_no_gradient_is_lost(form, derivative):
    got = derivative(HEALTHY[form])
    np.testing.assert_allclose(got, jax.grad(lambda w: jnp.sum(HEALTHY[form](w) * w))(W), rtol=1e-6)


def test_nothing_is_said_where_what_it_returns_is_stopped():
    def stopped_in_jit(w):
        return jax.jit(lambda a: tg.stop_gradient(scaled_by(w)(a)))(X)

    for got in (by_tape(stopped_in_jit), by_accumulator(stopped_in_jit)):
        np.testing.assert_allclose(got, PARTIAL, rtol=1e-6)


def test_of_several_arrays_only_those_whose_gradient_is_lost_are_told_of():
    def f(w, v):
        return jax.jit(lambda x: scaled_by(w)(x) + tg.stop_gradient(scaled_by_keyword(x, w=v)))(X)

    with pytest.warns(UserWarning, match=WARNED) as said:
        derivatives.by_tape(lambda w, v: jnp.sum(f(w, v)) * w * v, W, W + 1)
    assert len(said) == 1


def test_it_is_named_as_the_user_names_it():
    names = {"variable": "'w'", "keyword": "keyword argument 'w'", "attribute": "'self.w'"}
    for form, name in names.items():
        with pytest.warns(UserWarning, match=rf"depends on {name} \(f32\[\]\)"):
            by_tape(CLOSING_OVER[form])


def test_what_only_goes_through_it_is_none():
    for f, expected in (
        (scaled_by(W), None),
        (lambda x: jnp.sum(jnp.sin(scaled_by(W)(x))) + 0.0 * W, 0.0),
    ):
        with pytest.warns(UserWarning, match=WARNED):
            assert derivatives.by_tape(lambda w, f=f: f(X), W) == expected


def test_a_stopped_array_that_is_watched_is_told_of():
    with tg.GradientTape() as tape:
        tape.watch(W)
        stopped = tg.stop_gradient(W)
        tape.watch(stopped)
        with pytest.warns(UserWarning, match=WARNED):
            y = scaled_by(stopped)(X) * stopped
    np.testing.assert_allclose(tape.gradient(y, stopped), jnp.sum(scaled_by(W)(X)), rtol=1e-6)


def test_every_step_of_a_loop_is_told_of_and_the_records_stay_small(compilations):
    for step in range(4):
        with pytest.warns(UserWarning, match=WARNED):
            by_tape(CLOSING_OVER["variable"])
        if step == 1:
            before = compilations()
    assert compilations() == before


def test_variables_that_are_read_in_it_are_inputs_and_read_around_it_are_closed_over():
    v, fixed = tg.Variable(2.0), tg.Variable(2.0, trainable=False)

    @tg.custom_gradient
    def reads(a):
        return a * v, lambda dy, variables: (dy * variables[0], [jnp.sum(dy * a)])

    @tg.custom_gradient
    def reads_fixed(a):
        return a * fixed, lambda dy: dy

    np.testing.assert_allclose(by_tape(lambda v: reads(X), v), 2 * PARTIAL, rtol=1e-6)
    with pytest.warns(UserWarning, match=WARNED):
        found = by_tape(lambda v: scaled_by(v.value)(X), v)
    np.testing.assert_allclose(found, PARTIAL, rtol=1e-6)
    with pytest.warns(UserWarning, match=WARNED):
        found = by_tape(lambda v: reads_fixed(X), fixed)
    np.testing.assert_allclose(found, PARTIAL, rtol=1e-6)


def test_a_jitted_function_that_was_traced_before_is_told_of():
    f = jax.jit(scaled_by(W))
    f(X)
    with pytest.warns(UserWarning, match=WARNED):
        assert by_tape(lambda w: f(X)) == pytest.approx(PARTIAL)


def test_a_tape_in_a_traced_function_takes_what_was_stopped_in_its_block():
    def gradient(form):
        return tg.trace(lambda w: by_tape(form, w))(W)

    np.testing.assert_allclose(gradient(HEALTHY["stopped"]), PARTIAL, rtol=1e-6)
    with pytest.raises(ValueError, match="depends on 'w'"):
        gradient(CLOSING_OVER["variable"])


def test_there_is_no_warning_by_default_more_than_once_for_a_place():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            by_tape(CLOSING_OVER["variable"])
    assert len(said) == 1
