"""Differentiating what a custom derivative closes over is an error, where JAX has a silent zero."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import by_tape

pytestmark = pytest.mark.both_jax


def quantised_by(scale, x=1.0):
    @jax.custom_jvp
    def quantised(x):
        return jnp.round(x) + scale

    @quantised.defjvp
    def _(primals, tangents):
        return primals[0], tangents[0] * 2

    return quantised(x)


def in_scan(scale):
    return jax.lax.scan(lambda c, _: (quantised_by(scale, c), None), 1.0, None, length=2)[0]


def in_cond(scale):
    return jax.lax.cond(scale > 0, quantised_by, lambda scale: scale, scale)


def in_while(scale):
    def body(carry):
        return carry[0] + 1, quantised_by(scale, carry[1])

    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, 1.0))[1]


def in_jits(scale):
    return jax.jit(jax.jit(quantised_by))(scale)


LINE = quantised_by.__code__.co_firstlineno + 9
PLACES = [quantised_by, in_jits, in_scan, in_cond, jax.checkpoint(quantised_by)]


HALF = jnp.float32(0.5)


def by_accumulator(f):
    with tg.ForwardAccumulator(HALF, HALF) as accumulator:
        y = jax.jit(f)(HALF)
    return accumulator.jvp(y)


WAYS = {
    "as it runs": lambda f: tg.grad(f)(0.5),
    "jitted": lambda f: tg.grad(jax.jit(f))(0.5),
    "in a traced step": lambda f: tg.trace(lambda x: tg.value_and_grad(f)(x))(0.5),
    "jacobian": lambda f: tg.jacobian(f)(0.5),
    "hessian": lambda f: tg.hessian(f)(0.5),
    "hvp": lambda f: tg.hvp(f, (0.5,), 1.0),
    "jax.grad of a trace": lambda f: jax.grad(tg.trace(f))(0.5),
    "tg.grad of a trace": lambda f: tg.grad(tg.trace(f))(0.5),
    "jax.jvp of a trace": lambda f: jax.jvp(tg.trace(f), (0.5,), (1.0,)),
    "tg.jvp": lambda f: tg.jvp(f, (0.5,), (1.0,)),
    "jax.grad of a graph": lambda f: jax.grad(tg.graph(f, 0.5).to_callable())(0.5),
    "vmap": lambda f: jax.vmap(jax.grad(tg.trace(f)))(jnp.ones(2)),
    "tape": lambda f: by_tape(jax.jit(f), HALF),
    "gradients": lambda f: tg.trace(lambda x: tg.gradients(jax.jit(f)(x), x)[0])(0.5),
    "accumulator": by_accumulator,
}


@pytest.mark.parametrize("way", WAYS)
def test_differentiating_it_names_the_value_and_the_line(way):
    with pytest.raises(ValueError, match="quantised closes over a value") as caught:
        WAYS[way](quantised_by)
    assert "f32[]" in str(caught.value)
    assert f"test_closed_over.py:{LINE} (quantised_by)" in str(caught.value)


FOUR_WAYS = ["as it runs", "jax.grad of a trace", "tg.jvp", "tape"]


@pytest.mark.parametrize(
    ("way", "place"), [*itertools.product(FOUR_WAYS, PLACES), ("tg.jvp", in_while)]
)
def test_wherever_the_function_is_called(way, place):
    with pytest.raises(ValueError, match="quantised closes over a value"):
        WAYS[way](place)


def test_a_gradient_by_the_argument_and_the_value_are_as_ever():
    f = tg.trace(quantised_by)
    assert f(0.5, 1.4) == 1.5
    assert jax.grad(f, argnums=1)(0.5, 1.4) == 2.0
    assert tg.jvp(lambda x: quantised_by(0.5, x), (1.4,), (3.0,))[1] == 6.0
    plain = jax.jit(quantised_by).lower(0.5, 1.4).compile().as_text()
    assert f.lower(0.5, 1.4).compile().as_text().count("fusion") == plain.count("fusion")


def test_what_is_used_as_a_constant_may_be_closed_over():
    def stopped(scale):
        return quantised_by(jax.lax.stop_gradient(scale)) * scale

    def rounded(scale):
        @jax.custom_jvp
        def f(x):
            return jnp.round(x * scale) + jax.lax.stop_gradient(scale)

        f.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
        return f(1.5) + scale

    def counted(scale):
        return quantised_by(jnp.argmax(jnp.stack([scale, 1.0]))) * scale

    for way in map(WAYS.get, ("jitted", "tg.grad of a trace", "tape", "gradients")):
        assert way(stopped) == quantised_by(0.5)
        assert way(rounded) == 1.0
        assert way(counted) == quantised_by(1)


@pytest.mark.parametrize(
    "f",
    [
        jax.nn.relu,
        jax.nn.softplus,
        jax.nn.log_softmax,
        jax.scipy.special.xlogy,
        jnp.sinc,
    ],
)
def test_what_jax_closes_over_in_its_own_functions_is_no_matter(f):
    args = (1.5, 0.5) if f is jax.scipy.special.xlogy else (jnp.array([0.5, 1.5]),)
    expected = jax.grad(lambda *a: jnp.sum(f(*a)))(*args)

    def total(*args):
        return jnp.sum(f(*args))

    for gradient in (jax.grad(tg.trace(total)), tg.grad(total)):
        np.testing.assert_allclose(gradient(*args), expected, rtol=1e-6)


def test_what_is_not_differentiated_may_be_closed_over():
    def f(x, scale):
        return quantised_by(scale, x) * x

    expected = 2.0 * 1.4 + 1.4  # with the rule's derivative and the rule's value
    for wrap in (lambda f: f, jax.jit, tg.trace):
        assert tg.grad(wrap(f))(1.4, 0.5) == pytest.approx(expected)
        with pytest.raises(ValueError, match="quantised closes over"):
            tg.grad(wrap(f), wrt=1)(1.4, 0.5)


def test_a_function_that_asks_for_values_is_left_alone():
    def f(x, offset):
        @jax.custom_jvp
        def positive(x):
            return x if offset > 0 else -x

        positive.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 3))
        return positive(x)

    assert tg.grad(f)(2.0, 1.0) == 3.0


def test_a_function_that_closes_over_an_array_is_run_as_often_as_by_jax():
    """What it closes over is looked at; the function is not traced for that."""
    runs = []

    def loss(x):
        factor = jnp.float32(3.0)

        @jax.custom_jvp
        def scaled(x):
            runs.append("function")
            return x * x * factor

        @scaled.defjvp
        def _(primals, tangents):
            runs.append("rule")
            return scaled(*primals), tangents[0] * 2 * primals[0] * factor

        return scaled(x)

    found = {}
    for derivative in (jax.grad, tg.grad):
        runs.clear()
        found[derivative] = derivative(derivative(loss))(2.0), sorted(runs)
    assert found[jax.grad] == found[tg.grad]
