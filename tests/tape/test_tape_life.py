"""How long a tape lives, where it may be used, and what it leaves behind."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.derivatives import by_tape
from tracegrad import GradientTape, _jax

F32 = jnp.float32
X = 3.0


@pytest.fixture(autouse=True)
def the_trace_of_jax_is_as_it_was():
    before = _jax.current_trace(None)
    yield
    assert _jax.current_trace(None) is before


# -------------------------------------------------------------------------------- used up, or not


def test_a_gradient_of_nothing_uses_a_tape_up_too_which_then_cannot_be_entered():
    x = F32(X)
    with GradientTape() as tape:
        y = x * x
    with pytest.warns(UserWarning, match="did not watch"):
        assert tape.gradient(y, x) is None
    with pytest.raises(RuntimeError, match="used up"):
        tape.gradient(y, x)
    with pytest.raises(RuntimeError, match="used up"), tape:
        pass


# --------------------------------------------------------------------------- entering and leaving


def test_an_exception_while_a_function_is_traced_leaves_the_trace_alone():
    def f(x):
        with GradientTape() as tape:
            tape.watch(x)
            raise ZeroDivisionError

    x = F32(X)
    with GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(ZeroDivisionError):
            jax.jit(f)(x)
        y = x * x
    assert tape.gradient(y, x) == 6.0


# ----------------------------------------------------------------------- stop_recording and reset


def test_stop_recording_goes_on_after_an_exception():
    x = F32(X)
    with GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(ZeroDivisionError), tape.stop_recording():
            raise ZeroDivisionError
        y = x * x
    assert tape.gradient(y, x) == 6.0


# -------------------------------------------------------------------------------- transformations


def test_a_gradient_taken_in_the_body_of_a_compiled_function_leaves_the_trace_alone():
    x = F32(X)
    with GradientTape() as tape:
        tape.watch(x)
        y = x * x

        @jax.jit
        def f(z):
            return z * 2 + tape.gradient(y, x)

        assert f(x) == 12.0
        assert f(x) == 12.0
        z = x * 5
    assert z == 15.0


def test_a_tape_that_is_suspended_in_the_body_of_a_compiled_function_goes_on_after():
    x = F32(X)
    with GradientTape() as tape:
        tape.watch(x)

        @jax.jit
        def f(z):
            with tape.stop_recording():
                return z * z

        y = f(x) * x
    assert tape.gradient(y, x) == 27.0


# ---------------------------------------------------------------------------------------- threads


def in_another_thread(fun):
    """What a function returns in a thread of its own; it raises what the function raises."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(fun).result()


@pytest.mark.parametrize(
    "use",
    [
        lambda tape, x, y: tape.watch(x),
        lambda tape, x, y: tape.gradient(y, x),
        lambda tape, x, y: tape.jacobian(y, x),
        lambda tape, x, y: tape.reset(),
        lambda tape, x, y: tape.__enter__(),
        lambda tape, x, y: tape.__exit__(None, None, None),
        lambda tape, x, y: tape.stop_recording().__enter__(),
    ],
)
def test_a_tape_that_records_is_its_threads_own(use):
    x = F32(X)
    with GradientTape() as tape:
        tape.watch(x)
        y = x * x
        with pytest.raises(RuntimeError, match="another thread"):
            in_another_thread(lambda: use(tape, x, y))
    assert tape.gradient(y, x) == 6.0


def test_another_thread_is_not_recorded_and_may_ask_a_tape_that_is_over():
    x = F32(X)
    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x * x
        z = in_another_thread(lambda: x * x)
    assert tape.gradient(z, x) is None
    assert in_another_thread(lambda: tape.gradient(y, x)) == 6.0


def test_each_thread_has_its_own_tapes():
    barrier = threading.Barrier(4)

    def work(i):
        barrier.wait()
        return [float(by_tape(lambda x: x * x * x, F32(i))) for _ in range(20)]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [[3.0 * i * i] * 20 for i in range(4)]


# ----------------------------------------------------------------------------------------- memory


@pytest.fixture
def no_garbage_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_two_thousand_tapes_leave_nothing_alive(no_garbage_collector):
    def step(i):
        x = jnp.full(8, float(i))
        with GradientTape() as tape:
            tape.watch(x)
            y = jax.nn.relu(x * 2).sum()
        dx = tape.gradient(y, x)
        return [weakref.ref(thing) for thing in (x, y, dx, tape)]

    step(0)
    alive = []
    for i in range(2000):
        alive += step(i)
        if i % 100 == 99:
            assert not any(ref() is not None for ref in alive)
            alive.clear()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_tape_that_is_used_or_dropped_frees_what_it_recorded(is_used, no_garbage_collector):
    x = jnp.ones(4)
    with GradientTape(persistent=not is_used) as tape:
        tape.watch(x)
        middle = jnp.exp(x)
        y = middle.sum()
    gone = weakref.ref(middle)
    del middle
    if is_used:
        tape.gradient(y, x)
    else:
        del tape
    assert gone() is None


# ------------------------------------------------------------------------------ one after another


def trace_in_a_tape():
    with GradientTape():
        return _jax.current_trace(None)


def test_tapes_one_after_another_are_one_trace_to_jax():
    # Jitted functions keep an entry for every trace that they were called under: if each tape were
    # another, the thousandth step of a loop would take ten times as long as the first.
    first = trace_in_a_tape()
    assert all(trace_in_a_tape() is first for _ in range(3))


def test_a_tape_where_a_transformation_is_stepped_out_of_inside_another_records():
    x = F32(X)
    with GradientTape() as outer:
        outer.watch(x)
        with jax.ensure_compile_time_eval(), GradientTape() as inner:
            inner.watch(x)
            y = x * x
        z = x * x * x
    assert inner.gradient(y, x) == 6.0
    assert outer.gradient(z, x) == 27.0


def test_a_tape_opened_while_another_is_suspended_sees_what_follows_its_end():
    x = F32(X)
    with GradientTape() as first:
        first.watch(x)
        with first.stop_recording():
            second = GradientTape()
            second.__enter__()
            second.watch(x)
        y = x * x
        second.__exit__(None, None, None)
        z = y * x
    assert second.gradient(y, x) == 6.0
    assert first.gradient(z, x) == 27.0


def test_what_was_recorded_with_64_bits_has_a_gradient_of_64_bits_afterwards():
    with jax.enable_x64(True):
        x, unused = jnp.asarray(np.array([0.3, 0.5])), jnp.asarray(np.float64(1.0))
        with GradientTape(persistent=True) as tape:
            tape.watch([x, unused])
            y = jnp.sum(jax.jit(lambda x: jnp.sin(x) * x @ jnp.ones((2, 2)))(x))
    assert not jax.config.jax_enable_x64
    found, none = tape.gradient(y, [x, unused], unconnected_gradients="zero")
    assert found.dtype == none.dtype == tape.jacobian(y, x).dtype == np.float64
    expected = 2 * (np.sin([0.3, 0.5]) + np.cos([0.3, 0.5]) * [0.3, 0.5])
    np.testing.assert_allclose(found, expected, rtol=1e-14)
