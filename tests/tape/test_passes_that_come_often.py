"""A backward pass that has come often is one compiled program, with the gradients of before."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import by_tape

pytestmark = pytest.mark.both_jax

OFTEN = 10  # steps, of which the last ones run the one program
X = jnp.array([0.5, -1.0, 2.0])
Y = jnp.array([1.0, 0.25, -0.5])


@pytest.fixture(autouse=True)
def nothing_known():
    tg.clear_caches()


@jax.custom_vjp
def tripled(x):
    return 2 * x


tripled.defvjp(lambda x: (2 * x, None), lambda _, dy: (3 * dy,))


@jax.jit
def loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * x, x)


FUNCTIONS = {
    "elementwise": lambda x, y: (jnp.tanh(x * y) + x).sum(),
    "a product": lambda x, y: jnp.outer(x, y) @ x @ y,
    "relu": lambda x, y: (jax.nn.relu(x) * y).sum(),
    "a compiled function": lambda x, y: (jax.jit(lambda x: jnp.exp(x))(x) * y).sum(),
    "a loop": lambda x, y: (loop(x) * y).sum(),
    "a rule in a compiled function": lambda x, y: (jax.jit(tripled)(x) * y).sum(),
    "integers on the way": lambda x, y: x[jnp.argsort(y)][0] * y[jnp.argmax(x)],
    "one is not used": lambda x, y: (x**2).sum(),
    "a value is used twice": lambda x, y: (lambda h: (h * h).sum() + h[0])(x * y),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradients_are_those_of_jax_at_every_step(name):
    fun = FUNCTIONS[name]
    for i in range(OFTEN):
        x = X + i / 8
        with tg.GradientTape() as tape:
            tape.watch([x, Y])
            z = fun(x, Y)
        found = tape.gradient(z, [x, Y], unconnected_gradients="zero")
        for ours, jaxs in zip(found, jax.grad(fun, (0, 1))(x, Y), strict=True):
            np.testing.assert_allclose(ours, jaxs, rtol=1e-6, atol=1e-7)


def test_it_compiles_once_and_then_never(compilations):
    counts = []
    for i in range(2 * OFTEN):
        by_tape(lambda x: jnp.sum(jnp.sin(x) * x), X + float(i))
        counts.append(compilations())
    after_the_second = np.diff(counts[1:])
    assert list(after_the_second[after_the_second > 0]) == [1]


def test_none_stays_none_and_no_cotangent_is_no_zero():
    for _ in range(OFTEN):
        x = jnp.zeros(2)
        with tg.GradientTape() as tape:
            tape.watch([x, Y])
            root = jnp.sqrt(x)
            z = x * 2 + jnp.round(Y)[0]
        found = tape.gradient([z], [x, Y, root])
        np.testing.assert_array_equal(found[0], [2.0, 2.0])  # what goes to the root has inf
        assert found[1:] == [None, None]


def test_several_targets_seeds_and_sources_in_between():
    for i in range(OFTEN):
        x = X + float(i)
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x**2
            z = y * 3
        np.testing.assert_allclose(tape.gradient([x, y], x), 1 + 2 * x)
        np.testing.assert_allclose(tape.gradient([y, z, z], y), np.full(3, 7.0))
        found = tape.gradient([y, z], [x, y], output_gradients=[Y, None])
        np.testing.assert_allclose(found[0], 2 * x * (Y + 3), rtol=1e-6)
        np.testing.assert_allclose(found[1], Y + 3)


def test_other_shapes_and_dtypes_have_programs_of_their_own():
    for i in range(2 * OFTEN):
        x = [X, jnp.ones((2, 2)), X.astype(jnp.bfloat16), X.astype(jnp.complex64)][i % 4]
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = jax.lax.mul(x, x)
        found = tape.gradient(y, x, jnp.ones_like(y))
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        np.testing.assert_allclose(found, 2 * x)


def test_second_derivatives():
    for i in range(OFTEN):
        x = X + float(i)
        second = by_tape(lambda x: by_tape(lambda x: (jnp.sin(x) * x).sum(), x), x)
        np.testing.assert_allclose(second, 2 * jnp.cos(x) - x * jnp.sin(x), rtol=1e-4, atol=1e-5)


def test_a_rule_on_values_runs_at_every_step():
    calls = []

    def gradient(dy):
        calls.append(float(dy[0]))
        return dy * len(calls)

    ruled = tg.custom_gradient(lambda x: (x * 1.0, gradient))
    for i in range(OFTEN):
        found = by_tape(lambda x: ruled(x * 2).sum(), X)
        np.testing.assert_allclose(found, np.full(3, 2.0 * (i + 1)))
    assert len(calls) == OFTEN


def test_rules_that_come_into_force_reach_it():
    twice = tg.rules.scale_gradient(tg.match.op("sin"), 2.0)

    def slope():
        return by_tape(jnp.sin, X)

    for _ in range(OFTEN):
        np.testing.assert_allclose(slope(), jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(tg.rewrite(slope, twice)(), 2 * jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(slope(), jnp.cos(X), rtol=1e-6)


def test_arrays_may_come_to_lie_on_different_devices():
    first, second = jax.devices()[:2]
    for i in range(OFTEN):
        place = second if i > OFTEN - 3 else first
        x, y = jax.device_put(X, first), jax.device_put(Y, place)
        dx, dy = by_tape(lambda x, y: [jnp.sin(x), jnp.cos(y)], x, y)
        assert dy.devices() == {place}
        np.testing.assert_allclose(dx, jnp.cos(X), rtol=1e-6)
        np.testing.assert_allclose(dy, -jnp.sin(Y), rtol=1e-6)


def test_a_dropped_function_and_what_it_closes_over_are_freed():
    def make():
        held = jnp.full(3, 7.0)
        return jax.jit(lambda x: x * held), weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        fun, held = make()
        for _ in range(OFTEN):
            with tg.GradientTape() as tape:
                tape.watch(X)
                y = jnp.sin(fun(X)).sum()
            tape.gradient(y, X)
        assert held() is not None
        del fun, y, tape
        gc.collect()  # JAX's own: a jitted function is in a circle
        assert held() is None
    finally:
        gc.enable()


def test_where_nans_are_looked_for_the_operation_is_named():
    def slope():
        x = jnp.zeros(2)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = jnp.sqrt(x) * 0
        return tape.gradient(y, x)

    for _ in range(OFTEN):
        assert jnp.isnan(slope()).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        slope()
    (note,) = [note for note in caught.value.__notes__ if "while differentiating" in note]
    assert "sqrt" in note
    assert "test_passes_that_come_often.py" in note
