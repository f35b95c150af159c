"""A recomputed function computes the same, and runs again in the backward pass."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import tracegrad as tg
from tests.derivatives import by_tape
from tracegrad import custom_gradient, grad_pass_through, recompute_grad

pytestmark = pytest.mark.both_jax


def block(x, w):
    return jnp.sin(x * w) + jnp.cos(x)


@pytest.mark.accelerator
def test_derivatives_are_those_of_the_function_in_every_mode_and_order():
    again = recompute_grad(block)
    with jax.enable_x64(True):
        args = (jnp.array([0.3, -1.2]), jnp.array([2.0, 0.5]))

        def of(f, *args):
            loss = lambda x, w: (f(x, w) ** 2).sum()  # noqa: E731
            return (
                f(*args),
                jax.grad(loss, (0, 1))(*args),
                jax.hessian(loss, (0, 1))(*args),
                jax.jvp(f, args, args),
                jax.jacrev(jax.grad(loss))(*args),
                jax.vmap(jax.grad(lambda x, w: f(x, w) ** 3))(*args),
                jax.jit(jax.grad(loss))(*args),
            )

        found, expected = (jax.jit(functools.partial(of, f))(*args) for f in (again, block))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


def test_what_it_closes_over_gets_its_gradient_and_is_read_at_every_call():
    def loss(x, w):
        return recompute_grad(lambda x: jnp.sin(x * w))(x)

    for f in (loss, jax.jit(loss)):
        np.testing.assert_allclose(jax.grad(f, (0, 1))(2.0, 3.0), np.cos(6.0) * np.array([3, 2]))
    scaled = recompute_grad(lambda x: x * factor)
    for factor in (2.0, 3.0):
        assert scaled(1.0) == jax.grad(scaled)(1.0) == factor


@pytest.mark.parametrize("annotated", [recompute_grad, lambda f: f], ids=["recomputed", "plain"])
@pytest.mark.parametrize("compiled", [tg.trace, lambda f: f], ids=["traced", "eager"])
def test_what_it_assigns_is_assigned_once_and_not_differentiated(annotated, compiled):
    average = tg.Variable(1.0, trainable=False)
    weight = tg.Variable(3.0)

    @annotated
    def normalised(x):
        average.assign(0.5 * average + x)  # 1.2
        return weight * x * average

    @annotated
    def moved(x):
        weight.assign(x * x)  # 0.49
        return weight * x

    @compiled
    def gradients(x):
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            first = normalised(x) * weight  # 1.2 w² x
            second = moved(x) * weight  # w² x
        return tape.gradient(first, [x, weight]), tape.gradient(second, [x, weight])

    first, second = gradients(jnp.float32(0.7))
    np.testing.assert_allclose(first, [1.2 * 3.0**2, 1.2 * 2 * 3.0 * 0.7], rtol=1e-6)
    np.testing.assert_allclose(second, [0.49**2, 2 * 0.49 * 0.7], rtol=1e-6)
    np.testing.assert_allclose([average.numpy(), weight.numpy()], [1.2, 0.49], rtol=1e-6)
    average.assign(1.0)
    weight.assign(3.0)
    np.testing.assert_allclose(compiled(jax.grad(normalised))(0.7), 3.0 * 1.2, rtol=1e-6)
    assert np.isclose(average.numpy(), 1.2)


def test_a_custom_gradient_inside_is_kept():
    f = recompute_grad(lambda x: custom_gradient(lambda x: (x * 2, lambda dy: dy * 5))(x))
    assert jax.grad(f)(1.0) == jax.jit(jax.grad(f))(1.0) == 5.0
    assert jax.grad(custom_gradient(lambda x: (f(x), lambda dy: 7 * dy)))(1.0) == 7.0


DECORATORS = [recompute_grad, recompute_grad(policy=None), grad_pass_through, grad_pass_through()]


@pytest.mark.parametrize("decorate", DECORATORS)
def test_a_method_may_be_annotated_and_keeps_its_name_and_signature(decorate):
    def scaled(self, x):
        """What it does."""
        return self.w * x

    class Layer:
        w = jnp.float32(1.0)
        __call__ = decorate(scaled)

    layer = Layer()
    assert (layer(2.0), jax.grad(layer)(2.0)) == (2.0, 1.0)
    annotated = Layer.__call__
    assert annotated.__wrapped__ is scaled
    assert (annotated.__name__, annotated.__doc__) == ("scaled", "What it does.")
    assert inspect.signature(annotated) == inspect.signature(scaled)


def test_it_is_a_recompute_in_a_graph_with_the_name_of_the_function():
    graph = tg.graph(lambda x: recompute_grad(block)(x, 2.0), 1.0)
    assert [type(node).__name__ for node in graph.nodes] == ["Recompute"]
    assert graph.nodes[0].name == "block"


@pytest.mark.accelerator
@pytest.mark.parametrize(
    "gradient",
    [
        by_tape,
        lambda f, x: tg.trace(functools.partial(by_tape, f))(x),
        lambda f, x: tg.trace(lambda x: tg.gradients(f(x), x)[0])(x),
        lambda f, x: jax.grad(f)(x),
    ],
    ids=["tape", "traced tape", "gradients", "jax.grad"],
)
def test_what_it_prints_is_printed_when_it_runs_and_when_it_runs_again(gradient):
    """As known from TensorFlow: four calls run four times forward and four times more backward."""
    printed = []

    @recompute_grad
    def square(x):
        jax.debug.callback(lambda x: printed.append(float(x)), x)
        return x * x

    def four(x):
        return square(square(square(square(x))))

    def loop(x):
        return jax.lax.scan(lambda c, _: (square(c), None), x, None, length=4)[0]

    for f in (four, loop, jax.jit(four)):
        printed.clear()
        assert gradient(f, jnp.float32(2.0)) == 16 * 2.0**15
        jax.effects_barrier()
        assert sorted(printed) == [2, 2, 4, 4, 16, 16, 256, 256]


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_a_side_effect_that_may_not_happen_twice_raises_and_says_so(transform):
    @recompute_grad
    def f(x):
        io_callback(lambda: None, None)
        return jnp.sin(x)

    with pytest.raises(NotImplementedError, match="ffects not supported") as error:
        transform(f)(1.0)
    assert any("would happen twice" in note for note in error.value.__notes__)
    assert any("in 'f' (" in note for note in error.value.__notes__)


def test_an_exception_in_the_function_keeps_its_type_and_gets_a_note():
    @recompute_grad
    def f(x):
        raise KeyError("inside")

    with pytest.raises(KeyError) as error:
        f(1.0)
    assert any("'f' (" in note and "recomputed" in note for note in error.value.__notes__)


def test_bad_decorations():
    with pytest.raises(TypeError, match="recompute_grad decorates a function"):
        recompute_grad(3)
    with pytest.raises(TypeError, match=r"policy of jax.checkpoint_policies.*a str: 'dots'"):
        recompute_grad(block, policy="dots")
