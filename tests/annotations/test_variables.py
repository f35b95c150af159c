"""Annotated functions that read and assign Variables."""

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg
from tests.derivatives import by_tape, value_by_tape
from tracegrad.variables.variable import Variable


def floats(values):
    return [None if v is None else float(v) for v in values]


def test_each_variable_is_listed_once_sorted_by_name_with_its_own_gradient():
    b, a = Variable(3.0, name="b"), Variable(2.0, name="a")
    frozen = Variable(1.0, trainable=False, name="frozen")

    @tg.custom_gradient
    def f(x):
        def grad(dy, variables=None):
            assert [v.name for v in variables] == ["a", "b"]
            return dy * 7, [dy * 10, dy * 20]

        return x * b * a * frozen * b, grad

    x = jnp.float32(2.0)
    y, gradients = value_by_tape(lambda x: f(x) * 2, x, sources=[x, a, b, frozen])
    assert float(y) == 2 * 2 * 9 * 2
    assert floats(gradients) == [14.0, 20.0, 40.0, None]


def test_the_gradient_function_is_differentiated_through_the_variables_too():
    v = Variable(3.0)

    @tg.custom_gradient
    def f(x):
        return x * v, lambda dy, variables: (dy * v * v, [dy * x])

    x = jnp.float32(2.0)
    slope, second = value_by_tape(lambda x: by_tape(f, x), x, sources=v)
    assert (float(slope), float(second)) == (9.0, 6.0)


@pytest.mark.parametrize(
    "slope", [jax.grad, lambda f: jax.grad(tg.trace(f)), lambda f: tg.trace(jax.grad(f)), tg.grad]
)
def test_traced_they_run_once_and_are_given_the_variables_that_time(slope):
    v, w = Variable(3.0, name="v"), Variable(5.0, name="w")
    frozen = Variable(2.0, trainable=False)
    runs = []

    @tg.custom_gradient
    def f(x):
        runs.append("f")

        def grad(dy, variables=None):
            runs.append([variable.name for variable in variables])
            return dy * v * w, [dy * x]

        return x * v * frozen, grad

    assert float(slope(f)(jnp.float32(2.0))) == 15.0
    assert runs == ["f", ["v"]]  # and not w, of which y is no function


def test_what_only_a_gradient_function_reads_is_differentiated_in_higher_orders():
    v, w = Variable(3.0), Variable(5.0)

    @tg.custom_gradient
    def f(x):
        return x * v, lambda dy, variables: (dy * v * w, [dy * x])

    @tg.custom_gradient
    def around(x):
        return f(x) + v, lambda dy, variables: (dy * jax.grad(f)(x), [dy * 7])

    x = jnp.float32(2.0)
    assert floats(by_tape(tg.trace(f), x, sources=[v, w])) == [2.0, None]
    for function in (f, around):
        slope = tg.trace(jax.grad(function))
        assert floats(by_tape(slope, x, sources=[v, w])) == [5.0, 3.0]


def test_a_variable_that_is_closed_over_and_not_read_is_no_input():
    also = Variable(5.0)
    f = tg.custom_gradient(lambda y: (also if y is None else y * 2.0, lambda dy: dy))
    assert tg.trace(lambda x: f(x)).graph(1.0).variables == ()


def test_a_function_with_a_custom_gradient_assigns_no_variable():
    counter = Variable(3.0, name="counter")
    f = tg.custom_gradient(
        lambda x: (counter.assign_add(1.0) * x, lambda dy, variables: (dy, [dy]))
    )
    with pytest.raises(RuntimeError, match="assigns the Variable 'counter'"):
        by_tape(f, jnp.float32(2.0))


def test_a_recomputed_function_sees_assignments_between_calls():
    v = Variable(3.0)
    f = tg.recompute_grad(lambda x: x * v)
    for value in (3.0, 5.0):
        v.assign(value)
        assert (float(f(2.0)), float(jax.grad(f)(2.0))) == (2 * value, value)


def test_a_pass_through_function_reads_what_it_has_assigned():
    v = Variable(1.0, trainable=False)

    @tg.grad_pass_through
    def f(x):
        v.assign(x * 2)
        return v * 1.0

    assert value_by_tape(f, jnp.float32(3.0)) == (6.0, 1.0)
    assert float(v.value) == 6.0


# ---------------------------------------------------- in functions whose programs JAX has kept


def kept_by_jit(v):
    return jax.jit(lambda x: v * x)


def kept_by_scan(v):
    def body(c, _):  # by its identity
        return v * c, None

    return lambda x: jax.lax.scan(body, x, None, length=1)[0]


@pytest.mark.parametrize("kept", [kept_by_jit, kept_by_scan])
def test_a_variable_read_in_a_function_that_jax_has_kept_has_its_gradient(kept):
    v = Variable(3.0)
    inner = kept(v)

    @tg.custom_gradient
    def f(x):
        def grad(dy, variables=None):
            assert variables == [v]
            return dy * 7, [dy * 11 * inner(1.0)]

        return inner(x), grad

    def total(x):
        return f(x) + v * x

    def on_a_tape(x, fun=total):
        y, gradients = value_by_tape(fun, x, sources=[x, v])
        return [y, *gradients]

    def by_gradients(x):
        y = total(x)
        return [y, *tg.gradients(y, [x, v])]

    for value in (3.0, 5.0):
        v.assign(value)
        expected = [4 * value, 7 + value, 11 * value + 2]
        for _ in range(2):  # JAX has it from the second on, and a fresh trace each asks again
            assert floats(tg.trace(lambda x: on_a_tape(x))(2.0)) == expected
            assert floats(tg.trace(lambda x: by_gradients(x))(2.0)) == expected
            assert floats(on_a_tape(jnp.float32(2.0), tg.trace(lambda x: total(x)))) == expected
            assert float(tg.trace(lambda x: tg.grad(f)(x))(2.0)) == 7.0


def test_a_variable_that_only_a_function_inside_reads_and_does_not_use_is_listed():
    v = Variable(3.0)

    @tg.custom_gradient
    def f(x):
        y = jax.jit(lambda x: (v.value, x * x)[1])(x)
        return y, lambda dy, variables: (dy * 7, [dy * 11 for _ in variables])

    y, gradients = tg.trace(lambda x: value_by_tape(f, x, sources=[x, v]))(2.0)
    assert floats([y, *gradients]) == [4.0, 7.0, 11.0]


def test_a_variable_assigned_before_is_given_as_it_was_then():
    v = Variable(3.0)
    inner = kept_by_jit(v)
    f = tg.custom_gradient(lambda x: (inner(x), lambda dy, variables: (dy * 7, [dy * 11])))

    @tg.trace
    def step(x):
        v.assign(x * 2)
        inner(x)
        return value_by_tape(f, x, sources=v)

    assert floats(step(3.0)) == [18.0, 11.0]


def test_a_gradient_function_needs_a_place_for_what_jax_has_kept_too():
    inner = kept_by_jit(Variable(3.0, name="v"))
    f = tg.custom_gradient(lambda x: (inner(x), lambda dy: dy))
    tg.trace(lambda x: inner(x))(2.0)
    for _ in range(2):
        with pytest.raises(TypeError, match="reads the trainable Variables 'v'"):
            tg.trace(lambda x: tg.grad(f)(x))(2.0)


@pytest.mark.parametrize("kept", [kept_by_jit, kept_by_scan])
def test_values_from_around_an_annotated_function_do_not_stay_in_what_jax_keeps(kept):
    v = Variable(3.0)
    inner = kept(v)
    f = tg.custom_gradient(lambda x: (inner(x), lambda dy, variables: (dy, [dy * inner(x)])))
    g = tg.recompute_grad(lambda x: inner(x))
    traced = tg.trace(lambda x: (f(x), g(x), inner(x)))
    for value in (3.0, 5.0):
        v.assign(value)
        assert floats(traced(2.0)) == [2 * value] * 3
        assert floats(tg.trace(lambda x: (f(x), g(x), inner(x)))(2.0)) == [2 * value] * 3
        assert floats(tg.trace(lambda x: (f(x), inner(x)))(2.0)) == [2 * value] * 2
        for annotated in (f, g):  # as without annotation: the value would be that of this call
            with pytest.raises(RuntimeError, match="would be kept as a constant"):
                annotated(2.0)
