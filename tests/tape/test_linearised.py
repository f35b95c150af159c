"""What a backward pass needs of a loop comes from its forward pass, which runs once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import value_by_tape

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("compiled_fully")]

W = jnp.linspace(-0.5, 0.5, 64).reshape(8, 8)
H = jnp.linspace(0.0, 1.0, 8)
XS = jnp.linspace(-1.0, 1.0, 40).reshape(5, 8)


def rnn(w, h):
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, XS)
    return jnp.sum(h * h)


@jax.custom_vjp
def ruled(w, h):
    return rnn(w, h)


ruled.defvjp(lambda w, h: jax.vjp(rnn, w, h), lambda pullback, dy: pullback(dy))


def branched(w, h):
    return jax.lax.cond(h[0] > -1, rnn, lambda w, h: jnp.sum(w), w, h)


FUNCTIONS = {
    "scan": rnn,
    "call": jax.jit(rnn),
    "branch": branched,
    "custom rule": ruled,
    "call of a custom rule": jax.jit(ruled),
    "recomputed": jax.checkpoint(rnn),
    "recomputed in part": jax.checkpoint(rnn, policy=jax.checkpoint_policies.dots_saveable),
}


def by_jax(f):
    return jax.value_and_grad(f)


def by_tape(f):
    return lambda w, h: value_by_tape(lambda w: f(w, h), w)


def by_gradients(f):
    @tg.trace
    def both(w, h):
        y = f(w, h)
        return y, *tg.gradients(y, w)

    return both


def twice_by_jax(f):
    def norm(w, h):
        dw = jax.grad(f)(w, h)
        return jnp.sum(dw**2), dw

    def both(w, h):
        (_, dw), second = jax.value_and_grad(norm, has_aux=True)(w, h)
        return dw, second

    return both


def twice_by_tapes(f):
    def both(w, h):
        with tg.GradientTape() as outer:
            outer.watch(w)
            _, dw = by_tape(f)(w, h)
            norm = jnp.sum(dw**2)
        return dw, outer.gradient(norm, w)

    return both


def twice_by_one_tape(f):
    def both(w, h):
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(w)
            dw = tape.gradient(f(w, h), w)
            norm = jnp.sum(dw**2)
        return dw, tape.gradient(norm, w)

    return both


def twice_by_gradients(f):
    @tg.trace
    def both(w, h):
        (dw,) = tg.gradients(f(w, h), w)
        return dw, *tg.gradients(jnp.sum(dw**2), w)

    return both


@functools.cache
def compiled(differentiated, name):
    return jax.jit(differentiated(FUNCTIONS[name])).lower(W, H).compile()


def loops_and_products(differentiated, name):
    text = compiled(differentiated, name).as_text()
    return len(re.findall(r" while\(", text)), len(re.findall(r" dot\(", text))


def assert_close(found, expected):
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", [by_tape, by_gradients])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_gradient_has_the_loops_and_products_that_jaxs_has(way, name):
    assert loops_and_products(way, name) == loops_and_products(by_jax, name)


@pytest.mark.parametrize("way", [twice_by_tapes, twice_by_one_tape, twice_by_gradients])
def test_a_compiled_second_derivative_has_the_loops_and_products_that_jaxs_has(way):
    assert loops_and_products(way, "scan") == loops_and_products(twice_by_jax, "scan")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_eager_gradient_is_that_of_jax_to_second_order(name):
    f = FUNCTIONS[name]
    assert_close(by_tape(f)(W, H), compiled(by_jax, name)(W, H))
    expected = compiled(twice_by_jax, name)(W, H)
    assert_close(twice_by_tapes(f)(W, H), expected)
    assert_close(twice_by_one_tape(f)(W, H), expected)


@pytest.mark.parametrize("way", [twice_by_tapes, twice_by_gradients])
def test_a_compiled_second_derivative_is_that_of_jax(way):
    for name in ("branch", "call of a custom rule"):
        assert_close(compiled(way, name)(W, H), compiled(twice_by_jax, name)(W, H))


@pytest.mark.parametrize("name", ["scan", "branch", "custom rule"])
def test_an_eager_gradient_runs_no_forward_pass_again(name):
    """What the backward program takes of the loop is what it saved: it has one loop, backwards."""
    with tg.GradientTape() as tape:
        tape.watch(W)
        y = FUNCTIONS[name](W, H)
    text = jax.jit(lambda: tape.gradient(y, W)).lower().compile().as_text()
    assert len(re.findall(r" while\(", text)) == 1


def test_each_tape_that_watches_a_loop_has_its_gradient_of_it():
    a, b = jnp.float32(2.0), jnp.float32(3.0)
    with tg.GradientTape() as of_a, tg.GradientTape() as of_b:
        of_a.watch(a)
        of_b.watch(b)
        y, _ = jax.lax.scan(lambda c, _: (c * a + b, None), a * b, None, length=2)
        with pytest.warns(UserWarning, match="did not watch"):
            assert of_b.gradient(y, [a, b]) == [None, 8 + 2 + 1]
    with pytest.warns(UserWarning, match="did not watch"):
        da, db = of_a.gradient(y, [a, b])
    assert (da, db) == (3 * 3 * 4 + 3, None)


def root_in_a_loop(x):
    root, _ = jax.lax.scan(lambda c, _: (jnp.sqrt(c), None), x, None, length=2)
    return jnp.sin(x), root


SINGULAR = {
    "call": jax.jit(root_in_a_loop),
    "traced": tg.trace(root_in_a_loop),
    "recomputed": jax.checkpoint(lambda x: (jnp.sin(x), jnp.sqrt(x))),
    "branch": lambda x: jax.lax.cond(
        x < 1, lambda x: (jnp.sin(x), jnp.sqrt(x)), lambda x: (x, x), x
    ),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_an_infinite_derivative_of_another_result_makes_no_nan(name):
    _, gradient = value_by_tape(lambda x: SINGULAR[name](x)[0], jnp.float32(0.0))
    assert gradient == 1.0


def test_a_rule_in_a_compiled_function_reaches_what_its_function_does_not_use():
    """The forward pass that saves what derivatives need has lost the rule, and with it the way."""

    @jax.custom_vjp
    def rule(x, y):
        return jnp.sin(x)

    rule.defvjp(lambda x, y: (jnp.sin(x), None), lambda _, ct: (ct, 3 * ct))
    compiled = jax.jit(lambda x, y: 2 * rule(x, y))
    x = jnp.float32(0.5)
    _, gradient = value_by_tape(lambda y: compiled(x, y) ** 2, jnp.float32(0.7))
    assert np.isclose(gradient, 2 * (2 * jnp.sin(0.5)) * 6)


def test_a_loop_that_has_no_derivative_by_one_operand_has_that_by_another():
    refused = jax.custom_jvp(lambda x: x)

    @refused.defjvp
    def _(primals, tangents):
        raise RuntimeError("no derivative")

    calls = []

    def host(x):
        calls.append(x)
        return np.asarray(x)

    @jax.jit
    def loop(a, b):
        def body(c, _):
            met = tg.numpy_function(host, [b], jnp.float32, grad=lambda op, dy: dy)
            return c * b + met + refused(a), None

        return jax.lax.scan(body, b, None, 3)[0]

    a, b = jnp.float32(1.0), jnp.float32(2.0)
    for _ in range(2):
        _, gradient = value_by_tape(lambda b: loop(a, b), b)
        # Of b**4 + (b + a) * (b**2 + b + 1)
        np.testing.assert_allclose(gradient, 4 * 8.0 + 7.0 + 3.0 * 5.0)
        assert len(calls) == 3
        with pytest.raises((RuntimeError, NotImplementedError)):
            value_by_tape(lambda a: loop(a, b), a)
        calls.clear()


@jax.jit
def zeros_and_more(x):
    return jnp.zeros_like(x), x + 1


def of_zeros(x):
    zeros, more = zeros_and_more(jnp.sin(x))
    return jnp.where(more > 1, more * x, jnp.cos(zeros) * x)


@pytest.mark.parametrize("fun", [jax.nn.relu, jax.nn.leaky_relu, of_zeros])
def test_what_no_operand_decides_is_not_saved(fun, everything_saved):
    called, x = jax.jit(lambda x: (fun(jnp.sin(x)) ** 2).sum()), W
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        first = tape.gradient(called(x), x)
    record = tape._record
    entry = record.entries[0]
    saved = [record.arrays[slot] for slot in entry.results[entry.computation.count :]]
    assert saved
    assert not any((array == 0).all() for array in saved)
    np.testing.assert_allclose(first, jax.grad(called)(x), rtol=1e-6)
    np.testing.assert_allclose(
        tape.gradient(first, x), jax.grad(lambda x: jax.grad(called)(x).sum())(x), atol=1e-6
    )


def test_a_residual_behind_a_stopped_gradient_is_no_source_of_a_second_derivative():
    def repeated(factor):  # as a solver of linear systems refuses to be differentiated
        start = 0, factor
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * 2), start)[1]

    @jax.custom_vjp
    def solved(x, factor):
        return x * repeated(factor)

    solved.defvjp(
        lambda x, factor: (x * repeated(factor), factor),
        lambda factor, dy: (dy * repeated(factor), None),
    )

    @jax.jit
    def loss(x):
        return jnp.sum(solved(x, jnp.exp(jax.lax.stop_gradient(x))) ** 2)

    def slope(x):
        return value_by_tape(loss, x)[1]

    expected = jax.grad(lambda x: jax.grad(loss)(x).sum())(H)
    np.testing.assert_allclose(value_by_tape(slope, H)[1], expected, rtol=1e-6)
