"""Gradients registered by name, and the blocks in which they take the place of others."""

from __future__ import annotations

import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import GRADIENTS, by_tape

pytestmark = pytest.mark.both_jax

X = jnp.array([-1.0, 0.5, 2.0])


@tg.register_gradient("test_registry: hundredfold", replace=True)
def hundredfold(op, dy):
    return 100 * dy


@tg.register_gradient("test_registry: guided", replace=True)
def guided(op, dy):
    return jnp.where((op.inputs[0] > 0) & (dy > 0), dy, 0)


HUNDREDFOLD = {"sin": "test_registry: hundredfold"}


def f(x):
    return jnp.sum(jnp.sin(x) * x)


EXPECTED = 100 * X + jnp.sin(X)
PLAIN = jnp.cos(X) * X + jnp.sin(X)


@pytest.fixture
def name():
    """One under which nothing is registered."""
    return f"test_registry: {uuid.uuid4()}"


def within(fun, overrides=HUNDREDFOLD):
    def run(*args):
        with tg.gradient_override_map(overrides):
            return fun(*args)

    return run


def within_of(name, fun):
    return within(fun, {"sin": name})


# Of JAX's own, which refuses a function with a custom VJP: of the operations in the block, then.
FORWARD_MODE = {"jax.linearize", "jax.jacfwd", "equinox.filter_jvp"}


@pytest.mark.parametrize("way", GRADIENTS)
def test_an_override_acts_on_every_way_of_differentiating_inside_of_the_block(way):
    found = within(lambda x: GRADIENTS[way](f, x))(X)
    np.testing.assert_allclose(found, EXPECTED, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(f)(X), PLAIN, rtol=1e-5)


@pytest.mark.parametrize("way", GRADIENTS)
def test_an_override_acts_on_every_way_of_differentiating_what_has_the_block(way):
    if way in FORWARD_MODE:
        with pytest.raises(TypeError, match="custom_vjp"):
            GRADIENTS[way](within(f), X)
    else:
        np.testing.assert_allclose(GRADIENTS[way](within(f), X), EXPECTED, rtol=1e-5)


def test_values_stay_and_loops_and_branches_are_reached():
    def g(x):
        x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)
        return jnp.sum(jax.lax.cond(x[0] < 5, jnp.sin, jnp.cos, x))

    value, gradient = jax.value_and_grad(within(g))(X)
    np.testing.assert_array_equal(value, g(X))
    np.testing.assert_allclose(gradient, 100.0**3, rtol=1e-6)


def test_custom_rules_and_jitted_functions_go_by_their_names():
    @jax.jit
    def block(x):
        return jnp.tanh(x) * 2

    def g(x):
        return jnp.sum(block(jax.nn.relu(x) * jnp.array([1.0, -1.0, 1.0])))

    overrides = {"relu": "test_registry: guided", "block": "test_registry: hundredfold"}
    # relu's gradient is the cotangent where both are positive; block's a hundred times it.
    np.testing.assert_allclose(jax.grad(within(g, overrides))(X), [0.0, 0.0, 100.0])


@pytest.mark.parametrize("computed", [f, jax.jit(f), tg.trace(f)])
@pytest.mark.parametrize("around", [lambda fun: fun, tg.trace])
def test_what_a_tape_recorded_before_a_block_keeps_its_gradient(around, computed):
    @around
    def both(x):
        with tg.GradientTape() as tape:
            tape.watch(x)
            before = computed(x)
            with tg.gradient_override_map(HUNDREDFOLD):
                inside = computed(x)
                return tape.gradient(before + 10 * inside, x)

    np.testing.assert_allclose(both(X), PLAIN + 10 * EXPECTED, rtol=1e-5)


@pytest.mark.parametrize("other", [tg.GradientTape, lambda: tg.gradient_override_map({"sin": "b"})])
def test_a_block_that_is_left_too_early_ends_with_what_was_entered_inside_of_it(other):
    block, inner = tg.gradient_override_map(HUNDREDFOLD), other()
    block.__enter__()
    inner.__enter__()
    jnp.sin(X)
    with pytest.raises(RuntimeError, match=r"map\('sin'\) is left before another"):
        block.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    for differentiate in (jax.grad, tg.grad):
        np.testing.assert_allclose(differentiate(f)(X), PLAIN, rtol=1e-5)


def test_names_that_no_operation_has_are_told():
    names = {"cbrt": "b", "sine": "b", "exp2": "b"}
    telling = pytest.warns(
        UserWarning, match=r"no operation 'sine' was met .*\{'cbrt': 'b'.*a primitive"
    )
    with telling, tg.gradient_override_map(names):
        jnp.cbrt(X)
        jax.lax.scan(lambda c, y: (c, jnp.exp2(y)), 0.0, X)
    with tg.gradient_override_map({"cbrt": "b"}):  # as where all in it was compiled in another
        pass
    with pytest.raises(ZeroDivisionError), tg.gradient_override_map({"sine": "b"}):
        raise ZeroDivisionError


def test_symbolic_gradients_are_asked_for_in_a_block():
    @tg.trace
    def both(x):
        before = f(x)
        with tg.gradient_override_map(HUNDREDFOLD):
            return *tg.gradients(before, x), *tg.gradients(f(x), x)

    np.testing.assert_allclose(both(X), (PLAIN, EXPECTED), rtol=1e-5)


def test_kept_programs_are_those_of_the_block():
    traced = tg.trace(lambda x: tg.grad(f)(x))
    plain = traced(X)
    for _ in range(2):
        np.testing.assert_allclose(within(traced)(X), EXPECTED, rtol=1e-5)
        np.testing.assert_array_equal(traced(X), plain)


def test_jax_differentiating_inside_a_block_goes_by_it_or_is_refused():
    np.testing.assert_allclose(within(lambda x: jax.grad(f)(x))(X), EXPECTED, rtol=1e-5)
    before = jax.grad(f)  # which is JAX's own
    with pytest.raises(tg.GraphError, match=r"JAX does not see the override: use tracegrad\.grad"):
        within(before)(X)
    with pytest.raises(tg.GraphError, match="differentiated"):
        within(lambda x: jax.jit(before)(x))(X)


def test_names(name):
    g = within_of(name, jnp.sin)
    np.testing.assert_allclose(g(0.5), jnp.sin(0.5))  # no gradient is asked for
    with pytest.raises(LookupError, match="no gradient is registered under"):
        jax.grad(g)(0.5)
    misspelled = tg.gradient_override_map({"sin": "test_registry: hundretfold"})
    with misspelled, pytest.raises(LookupError, match="did you mean 'test_registry: hundredfold'"):
        by_tape(f, X)
    register = tg.register_gradient(name)
    assert register(guided) is guided
    with pytest.raises(KeyError, match=r"is registered already, as 'guided'.*replace=True"):
        register(hundredfold)
    with pytest.raises(TypeError, match="gradient function"):
        tg.register_gradient(f"{name} again")(3)
    with pytest.raises(TypeError, match="needs a name"):
        tg.register_gradient(guided)
    with pytest.raises(TypeError, match="from names of operations to names"):
        tg.gradient_override_map({"sin": guided}).__enter__()


def test_an_error_leaves_the_block():
    with pytest.raises(ZeroDivisionError), tg.gradient_override_map(HUNDREDFOLD):
        raise ZeroDivisionError
    np.testing.assert_allclose(jax.grad(f)(X), PLAIN, rtol=1e-5)


# ------------------------------------------------------------------------- what a name means now


def factor_registered(name, factor):
    return tg.register_gradient(name, replace=True)(lambda op, dy: factor * dy)


def slope(fun):
    """The gradient at 1 of what depends on one number."""
    return float(fun(jnp.float32(1.0)))


def test_loops_of_one_body_that_run_in_different_directions_are_told_apart():
    def body(carry, x):
        carry = carry * x + jnp.sin(x)
        return carry, carry

    def both(xs):
        forward, _ = jax.lax.scan(body, 1.0, xs)
        backward, _ = jax.lax.scan(body, 1.0, xs, reverse=True)
        return forward, backward

    np.testing.assert_allclose(within(both)(X), both(X), rtol=1e-6)
    a, b, c = X
    last = c + jnp.sin(c)  # where the backward one begins
    slopes = [last * b + jnp.sin(b) + 100, a * (last + 100), a * b * 101]
    found = jax.grad(within(lambda xs: both(xs)[1]))(X)
    np.testing.assert_allclose(found, slopes, rtol=1e-5)


def slopes_by_every_way(block, computed):
    """At 1; the block is in the function that is differentiated, or around who differentiates."""
    f = block(computed)
    ways = [
        jax.grad(f),
        jax.jit(jax.grad(f)),
        jax.grad(jax.jit(f)),
        jax.grad(tg.trace(f)),
        tg.grad(f),
        tg.trace(jax.grad(f)),
        block(tg.grad(computed)),
        block(tg.trace(tg.grad(computed))),
        block(lambda x: by_tape(computed, x)),
        lambda x: by_tape(f, x),
    ]
    return {slope(way) for way in ways}


@jax.custom_jvp
def sin(x):
    return x**3


sin.defjvp(lambda primals, tangents: (sin(*primals), 3 * primals[0] ** 2 * tangents[0]))

SINES = {
    "operation": jnp.sin,
    "jit": jax.jit(lambda x: jnp.sin(x)),
    "custom rule": sin,
    "custom rule in jit": jax.jit(lambda x: sin(x)),
    "trace": tg.trace(lambda x: jnp.sin(x)),
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=1)[0],
}
each_sine = pytest.mark.parametrize("computed", SINES.values(), ids=SINES)


@each_sine
def test_a_gradient_that_was_replaced_is_gone(computed, name):
    first = factor_registered(name, 2.0)
    assert slopes_by_every_way(lambda fun: within_of(name, fun), computed) == {2.0}
    factor_registered(name, 3.0)
    assert slopes_by_every_way(lambda fun: within_of(name, fun), computed) == {3.0}
    tg.register_gradient(name, replace=True)(first)
    assert slopes_by_every_way(lambda fun: within_of(name, fun), computed) == {2.0}


@each_sine
def test_a_gradient_registered_anew_is_the_one_that_runs_also_in_an_open_block(computed, name):
    factor_registered(name, 2.0)
    f, x = within_of(name, computed), jnp.float32(1.0)
    _, pull_back = jax.vjp(f, x)
    with tg.gradient_override_map({"sin": name}), tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = computed(x)
        for factor in (2.0, 3.0, 2.0):
            factor_registered(name, factor)
            found = [pull_back(1.0)[0], tape.gradient(y, x), tg.grad(computed)(x), jax.grad(f)(x)]
            assert set(map(float, found)) == {factor}


@each_sine
def test_of_nested_blocks_the_innermost_wins_wherever_the_gradient_is_taken(computed, name):
    outer, inner = f"{name}, outer", f"{name}, inner"
    factor_registered(outer, 2.0)
    factor_registered(inner, 3.0)
    nested = lambda fun: within_of(outer, within_of(inner, fun))  # noqa: E731
    assert slopes_by_every_way(nested, computed) == {3.0}


def test_a_gradient_may_be_registered_after_the_block(name):
    for _ in range(2):  # of which the second finds what the first compiled
        _, pull_back = jax.vjp(within_of(name, jax.jit(jnp.sin)), 1.0)
        factor_registered(name, 7.0)
        assert pull_back(1.0) == (7.0,)


def test_what_nobody_has_used_is_replaced_without_compiling_anything_anew(name):
    traces = []

    @jax.jit
    def g(x):
        traces.append(x)
        return x

    g(1.0)
    for factor in (2.0, 3.0):
        factor_registered(name, factor)
    g(1.0)
    assert len(traces) == 1
    slope(jax.grad(within_of(name, jnp.sin)))
    same = factor_registered(name, 4.0)
    g(1.0)
    assert len(traces) == 2
    tg.register_gradient(name, replace=True)(same)
    g(1.0)
    assert len(traces) == 2


def test_a_gradient_that_is_replaced_while_a_function_is_compiled_is_gone_from_others(name):
    f = within_of(name, jnp.sin)
    factor_registered(name, 2.0)
    before = jax.jit(jax.grad(f))
    assert slope(before) == 2.0

    @jax.jit
    def registers(x):
        factor_registered(name, 3.0)
        return jax.grad(f)(x)

    assert slope(registers) == slope(before) == 3.0


def test_of_a_custom_rule_that_closes_over_an_array_the_inputs_are_its_arguments():
    factor = jnp.float32(4.0)

    @jax.custom_vjp
    def scaled(x):
        return x * factor

    scaled.defvjp(lambda x: (x * factor, None), lambda _, dy: (dy * factor,))
    f = within(lambda x: scaled(x), {"scaled": "test_registry: hundredfold"})
    assert [f(1.0), slope(jax.grad(f)), slope(jax.jit(jax.grad(f)))] == [4.0, 100.0, 100.0]
    factor = jnp.float32(5.0)
    assert f(1.0) == 5.0
