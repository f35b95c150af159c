"""Compiled functions under a tape: what they save as they run, and what of them is kept."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import by_tape, value_by_tape
from tracegrad.tape import known_computations

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("everything_saved")]


@jax.custom_vjp
def doubled(x):
    """The sine, with twice its gradient."""
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (2 * dy * jnp.cos(x),))


@jax.jit
def network(w, x, shift):
    hidden = jnp.tanh(x @ w)
    out = doubled(hidden @ w)
    return jnp.sum(out * out) + shift, hidden, jnp.sum(jnp.floor(out))


def arguments():
    w = jax.random.normal(jax.random.key(0), (4, 4))
    return w, jnp.ones((3, 4)), jnp.float32(2.0)


def loss(w, x, shift):
    return network(w, x, shift)[0]


def penalty(w, x, shift):
    return jnp.sum(jax.grad(loss)(w, x, shift) ** 2) + loss(w, x, shift)


def test_a_gradient_of_a_gradient_of_a_compiled_function():
    w, x, shift = arguments()
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([w, x])
        y, hidden, cut = network(w, x, shift)
        gradient = tape.gradient(y, w)
        total = jnp.sum(gradient**2) + y
    found = tape.gradient(total, [w, x])
    for each, expected in zip(found, jax.grad(penalty, (0, 1))(w, x, shift), strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5)
    # What the function saved of its results is not what was computed from them.
    assert tape.gradient(total, hidden) is None
    assert tape.gradient(cut, w) is None
    with pytest.warns(UserWarning, match="did not watch"):
        assert tape.gradient(y, shift) is None


def test_an_intermediate_result_of_a_compiled_function_is_a_source():
    w, x, shift = arguments()

    def both(w):
        y, hidden, _ = network(w, x, shift)
        return y + jnp.sum(hidden**2), hidden

    with tg.GradientTape() as tape:
        tape.watch(w)
        z, hidden = both(w)
    of_hidden, of_w = tape.gradient(z, [hidden, w])
    np.testing.assert_allclose(of_hidden, 2 * hidden, rtol=1e-6)
    np.testing.assert_allclose(of_w, jax.grad(both, has_aux=True)(w)[0], rtol=1e-5)


def test_a_jitted_function_with_options_is_called_with_them():
    w, x, shift = arguments()
    cpu = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    placed = jax.jit(loss, out_shardings=cpu)
    y, gradient = value_by_tape(lambda w: placed(w, x, shift), w)
    assert y.devices() == {jax.devices()[1]}
    np.testing.assert_allclose(gradient, jax.grad(loss)(w, x, shift), rtol=1e-5)


def closure_over(array):
    return jax.jit(lambda x: jnp.sum(jnp.diag(x @ x)) + array[0] * x[0, 0])


def test_what_a_function_closed_over_is_freed_with_it():
    x = jnp.eye(3)
    gc.disable()
    try:
        array = jnp.full(3, 2.0)
        gone = weakref.ref(array)
        function = closure_over(array)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        assert float(tape.gradient(y, x)[0, 0]) == 4.0
        del array, function, tape, y
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["cond", "switch"])
def test_a_new_branch_beside_one_that_stays_is_not_taken_for_one_that_was_freed(way):
    """A new branch may have the address of a branch that was freed."""

    def known(x):
        return 2 * x

    def branched(x):
        if way == "cond":
            return jax.lax.cond(x < 4, times(factor), known, x)
        return jax.lax.switch(2, [known, known, times(factor)], x)

    x = jnp.float32(3.0)
    for factor in map(float, range(3, 28)):
        assert value_by_tape(branched, x) == (factor * x, factor)


def test_what_was_compiled_for_a_new_function_beside_one_that_stays_is_freed_with_it():
    def known(x):
        return 2 * x

    def not_yet(state):
        return state[0] < 2

    x, counts = jnp.float32(3.0), []
    for factor in map(float, range(3, 8)):
        new = times(factor)
        with tg.ForwardAccumulator(x, 1.0) as accumulator:
            y = jax.lax.cond(x < 4, new, known, x)
            y *= jax.lax.while_loop(not_yet, lambda s, new=new: (s[0] + 1, new(s[1])), (0, 1.0))[1]
        assert accumulator.jvp(y) == factor**3
        del y, accumulator, new
        gc.collect()
        counts.append(sum(map(len, known_computations._of_programs.values())))
    assert counts[-1] == counts[1]


def times(factor):
    return lambda x: factor * x


@pytest.mark.filterwarnings("ignore:no operation 'tanh' was met")  # it was recorded before
def test_what_comes_into_force_after_the_call_changes_no_second_derivative_or_is_refused():
    w, x, shift = arguments()
    tg.register_gradient("compiled_calls.tanh", replace=True)(lambda op, dy: 3.0 * dy)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(w)
        y, _, _ = network(w, x, shift)
        gradient = tape.gradient(y, w)
    with tg.gradient_override_map({"tanh": "compiled_calls.tanh"}):
        first, second = tape.gradient(y, w), tape.gradient(gradient, w)
    plain = jax.grad(loss)
    np.testing.assert_allclose(first, plain(w, x, shift), rtol=1e-5)
    expected = jax.grad(lambda w: jnp.sum(plain(w, x, shift)))(w)
    np.testing.assert_allclose(second, expected, rtol=1e-4)
    rule = tg.rules.scale_gradient(tg.match.op("tanh"), 3.0)
    with pytest.raises(NotImplementedError, match="open the tape inside"):
        tg.trace(lambda: tape.gradient(gradient, w), rules=[rule])()


def test_a_rule_that_refuses_another_operand_can_still_be_differentiated_by_jax():
    @jax.custom_vjp
    def product(x, setting):  # as `eqx.filter_custom_vjp` refuses keyword arguments
        return x * setting

    def forward(x, setting):
        if setting.perturbed:
            raise RuntimeError("the setting has no gradient")
        return x.value * setting.value, setting.value

    product.defvjp(forward, lambda setting, dy: (dy * setting, None), symbolic_zeros=True)
    called = jax.jit(lambda x, y: jnp.sum(product(x, y) ** 2))
    x, setting = jnp.ones(3), jnp.arange(3.0)
    expected = 2 * x * setting**2
    np.testing.assert_allclose(by_tape(lambda x: called(x, setting), x), expected)
    np.testing.assert_allclose(jax.grad(called)(x, setting), expected)


def test_what_is_remembered_is_bounded_and_forgetting_it_changes_no_gradient(monkeypatch):
    tg.clear_caches()
    monkeypatch.setattr(known_computations._computations, "_maxsize", 3)
    x = jnp.ones(3)
    sizes = []
    for i in range(2, 10):
        gradient = by_tape(lambda x, i=i: jnp.sum(jax.lax.integer_pow(x, i)), x)
        np.testing.assert_allclose(gradient, np.full(3, float(i)), rtol=1e-6)
        sizes.append(len(known_computations._computations))
    assert max(sizes) == 3
