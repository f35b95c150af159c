"""What is remembered from one call to the next is bounded, and forgetting it changes nothing."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tests.derivatives import value_by_tape
from tracegrad._jax.caches import Cache, WeakCache
from tracegrad.tape import known_computations

pytestmark = pytest.mark.both_jax


def doubled(x):
    @tg.custom_gradient
    def rule(x):
        return x**2, lambda dy: dy * 4 * x  # twice the derivative

    return jnp.sum(rule(jnp.tanh(x)))


WAYS = {
    "tape": lambda x: value_by_tape(doubled, x),
    "tape over a jitted function": lambda x: value_by_tape(jax.jit(doubled), x),
    "traced": lambda x: (tg.trace(doubled)(x), jax.grad(tg.trace(doubled))(x)),
    "grad": lambda x: tg.value_and_grad(doubled)(x),
    "rewritten": lambda x: jax.value_and_grad(
        tg.rewrite(doubled, tg.rules.scale_gradient(tg.match.op("tanh"), 1.0))
    )(x),
    "forward": lambda x: jax.jvp(lambda x: jnp.sum(jnp.tanh(x)), (x,), (x,)),
}


@pytest.mark.parametrize("way", WAYS)
def test_after_clearing_everything_gives_the_same(way):
    x = jnp.linspace(-1.0, 2.0, 4)
    before = WAYS[way](x)
    tg.clear_caches()
    after = WAYS[way](x)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_clearing_between_two_operations_leaves_what_a_tape_has_recorded():
    x = jnp.float32(0.5)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = jnp.sin(x)
        tg.clear_caches()
        z = jnp.exp(y) * x
        first = tape.gradient(z, x)
        tg.clear_caches()
        second = tape.gradient(z, x)
    expected = np.exp(np.sin(0.5)) * (1 + 0.5 * np.cos(0.5))
    np.testing.assert_allclose([first, second], expected, rtol=1e-6)


def test_clearing_leaves_variables_and_traced_functions_that_hold_them():
    count = tg.Variable(0.0)
    step = tg.trace(lambda x: count.assign_add(x))
    step(1.0)
    tg.clear_caches()
    step(2.0)
    assert float(count.value) == 3.0


def test_a_cache_drops_what_came_first_and_keeps_what_another_thread_has_put():
    squares = Cache(2)
    for i in (3, 4, 3, 5):
        squares.put(i, i * i)
    assert dict(squares) == {4: 16, 5: 25}
    assert squares.put(5, 0) == 25


class Equal:
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


def test_a_weak_cache_is_bounded_tells_equal_objects_apart_and_lets_go_of_them():
    names, (one, two, three) = WeakCache(2), (Equal() for _ in range(3))
    for owner, name in ((one, "one"), (two, "two"), (three, "three")):
        names.put(owner, name)
    assert [names.get(owner) for owner in (one, two, three)] == [None, "two", "three"]
    del two, owner
    assert names.values() == ["three"]


@pytest.mark.parametrize(
    ("few", "many", "most"),
    [(60, 60, 60), pytest.param(1000, 10_000, 1000, marks=pytest.mark.slow)],
)
def test_steps_with_a_fresh_function_each_do_not_grow(few, many, most):
    def objects_after(steps):
        for _ in range(steps):
            value_by_tape(lambda x: jnp.sum(x * 2), jnp.ones(3))
            tg.grad(lambda x: jnp.sum(x * 2))(jnp.ones(3))
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(few)
    assert objects_after(many) - before < most


def test_new_arrays_in_the_program_of_each_step_are_let_go(monkeypatch):
    """A loop in which a new jitted function closes over a new array."""
    monkeypatch.setattr(known_computations._holding_arrays, "_maxsize", 2)
    x, arrays = jnp.ones(3), []
    for i in range(6):
        array = jnp.full(3, float(i))
        scaled = jax.jit(lambda x, array=array: x * array)
        slope = value_by_tape(
            lambda x, f=scaled: jnp.sum(lax.scan(lambda c, _: (f(c), None), x, None, 2)[0]), x
        )
        np.testing.assert_allclose(slope[1], array**2)
        arrays.append(weakref.ref(array))
        del array, scaled
    gc.collect()
    assert sum(each() is not None for each in arrays) <= 3
