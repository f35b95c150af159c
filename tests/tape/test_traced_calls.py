"""Functions compiled by `trace`, with Variables, called under tapes: called directly, and whose
arrays they may take."""

import gc
import weakref
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import by_tape, value_by_tape

pytestmark = pytest.mark.both_jax

RATE = 0.125


@pytest.fixture(params=["computed again", "saved"], autouse=True)
def what_derivatives_need(request):
    if request.param == "saved":
        request.getfixturevalue("everything_saved")


def model():
    """A weight, and a traced loss of it with a traced update."""
    w = tg.Variable(jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), name="w")

    @tg.trace
    def loss(x):
        return {"loss": jnp.sum(jnp.tanh(x @ (w * w)) ** 2), "rows": x.shape[0]}

    @tg.trace
    def descend(gradient):
        w.assign_sub(RATE * gradient)

    return w, loss, descend


def by_hand(w, x):
    return jnp.sum(jnp.tanh(x @ (w * w)) ** 2)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def batch(rows):
    return jnp.cos(jnp.arange(4.0 * rows)).reshape(rows, 4)


def stored(variable):
    """The array that it holds, without being handed it."""
    return variable._value


def test_steps_are_those_written_by_hand():
    w, loss, descend = model()
    expected = w.value
    for rows in (2, 5, 2, 5, 2):  # one program for each
        x = batch(rows)
        with tg.GradientTape() as tape:
            found = loss(x)
        assert found["rows"] == rows
        value, gradient = jax.value_and_grad(by_hand)(expected, x)
        close(found["loss"], value)
        descend(tape.gradient(found["loss"], w))
        expected = expected - RATE * gradient
    close(w.value, expected)


def test_a_step_that_was_made_before_compiles_and_traces_nothing(compilations):
    w, loss, descend = model()

    def step(rows):
        descend(by_tape(lambda: loss(batch(rows))["loss"], sources=w))

    for rows in (2, 2, 5, 5):
        step(rows)
    before = compilations()
    for rows in (2, 5, 2):
        step(rows)
    assert compilations() == before


def test_what_is_watched_decides_what_has_a_gradient():
    w, loss, _ = model()
    x = batch(2)
    for_w, for_x = jax.grad(by_hand, (0, 1))(w.value, x)
    for watched in (False, True, False):
        with tg.GradientTape() as tape:
            if watched:
                tape.watch(x)
            value = loss(x)["loss"]
        with nullcontext() if watched else pytest.warns(UserWarning, match="did not watch"):
            of_w, of_x = tape.gradient(value, [w, x])
        close(of_w, for_w)
        if watched:
            close(of_x, for_x)
        else:
            assert of_x is None


def test_settings_of_jax_are_those_at_the_call():
    w = tg.Variable(2.0)

    @tg.trace
    def scaled(x):
        return w * x * jnp.arange(3).astype(float)

    for wide in (False, True, False):
        with jax.enable_x64(wide), tg.GradientTape() as tape:
            y = scaled(jnp.float32(1.0))
            gradient = tape.gradient(y, w)
        assert y.dtype == (jnp.float64 if wide else jnp.float32)
        assert float(gradient) == 3.0


def test_results_that_are_arguments_are_values_of_their_own():
    w, x = tg.Variable(2.0), jnp.float32(10.0)
    function = tg.trace(lambda x: (w * x, w.value, x, x))
    for _ in range(3):
        with tg.GradientTape() as tape:
            tape.watch(x)
            a, b, c, d = function(x)
            y = 3 * a + 5 * b + 7 * c + 11 * d
        assert [float(g) for g in tape.gradient(y, [w, x, b, c])] == [35.0, 24.0, 5.0, 7.0]


def test_effects_and_arrays_that_are_closed_over_are_seen():
    w, c = tg.Variable(2.0), jnp.array([1.0, 3.0])
    heard = []

    @tg.trace
    def talking(x):
        jax.debug.callback(lambda value: heard.append(float(value)), w * x)
        return jnp.sum(w * x * c)

    for _ in range(3):
        with tg.GradientTape() as tape:
            tape.watch(c)
            y = talking(jnp.float32(2.0))
        gradients = tape.gradient(y, [w, c])
        jax.effects_barrier()
        assert float(gradients[0]) == 8.0
        np.testing.assert_array_equal(gradients[1], [4.0, 4.0])
    assert heard == [4.0] * 3


def test_a_step_under_a_tape_writes_over_the_old_weights():
    w, loss, descend = model()
    deleted = []
    for _ in range(4):
        gradient = by_tape(lambda: loss(batch(2))["loss"], sources=w)
        before = stored(w)
        descend(gradient)
        deleted.append(before.is_deleted())
    assert deleted == [False, True, True, True]  # the first was handed in


@pytest.mark.parametrize("order", ["update first", "read in the block", "read later"])
def test_no_array_dies_that_somebody_has(order):
    w, loss, descend = model()
    x = batch(2)
    for _ in range(3):
        expected = np.array(w.value)
        descend(jnp.zeros((4, 3)))  # from here on the array is the Variable's own
        with tg.GradientTape() as tape:
            value = loss(x)["loss"]
            kept = w.value if order == "read in the block" else None
        if order == "update first":
            descend(jnp.ones((4, 3)))
        gradient = tape.gradient(value, w)
        if order == "read later":
            kept = w.value
        descend(gradient)
        close(gradient, jax.grad(by_hand)(expected, x))
        if kept is not None:
            np.testing.assert_array_equal(kept, expected)


def test_a_persistent_tape_keeps_what_it_was_shown():
    w, loss, descend = model()
    x, expected = batch(2), np.array(w.value)
    descend(jnp.zeros((4, 3)))
    with tg.GradientTape(persistent=True) as tape:
        value = loss(x)["loss"]
    for _ in range(3):
        descend(tape.gradient(value, w))
    close(tape.gradient(value, w), jax.grad(by_hand)(expected, x))


def test_a_tape_that_began_later_keeps_what_it_recorded_of_a_backward_pass():
    w = tg.Variable(2.0)
    square = tg.trace(lambda x: x * w**2)
    add = tg.trace(lambda x: w.assign_add(x).value)
    add(1.0)
    with tg.GradientTape() as inner:
        y = square(jnp.float32(5.0))
    seed = jnp.float32(1.0)
    with tg.GradientTape() as outer:
        outer.watch(seed)
        first = inner.gradient(y, w, seed)
    add(1.0)
    assert float(outer.gradient(first, seed)) == 30.0


def test_a_tape_that_does_not_watch_keeps_what_it_recorded():
    w = tg.Variable(2.0)
    scaled = tg.trace(lambda x: jnp.sum(x * w))
    add = tg.trace(lambda x: w.assign_add(x).value)
    add(1.0)
    x = jnp.ones(3)
    with tg.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(x)
        y = scaled(x)
    add(1.0)
    np.testing.assert_array_equal(tape.gradient(y, x), [3.0] * 3)


def test_what_was_made_for_a_function_goes_with_it():
    w, loss, _ = model()
    for _ in range(2):
        with tg.GradientTape() as tape:
            value = loss(batch(2))["loss"]
        tape.gradient(value, w)
    gone = weakref.ref(loss.__wrapped__)
    gc.collect()
    gc.disable()
    try:
        del loss, tape, _
        assert gone() is None
    finally:
        gc.enable()


def test_several_tapes_and_higher_orders():
    w = tg.Variable(2.0)
    cube = tg.trace(lambda x: x * w**3)
    for _ in range(2):
        first, second = value_by_tape(lambda: by_tape(cube, jnp.float32(5.0), sources=w), sources=w)
        assert (float(first), float(second)) == (60.0, 60.0)
