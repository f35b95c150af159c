"""Nothing is differentiated through stop_gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad import stop_gradient

pytestmark = pytest.mark.both_jax


def test_a_tree_keeps_its_values_and_loses_its_derivatives():
    tree = {"a": jnp.array([1.0, 2.0]), "n": jnp.array([1, 2]), "c": (1.5, None, 3, True)}
    stopped = stop_gradient(tree)
    assert jax.tree.structure(stopped) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, stopped, tree)

    def loss(a):
        return (stop_gradient({"x": a})["x"] * a**2).sum()

    np.testing.assert_array_equal(jax.grad(loss)(tree["a"]), 2 * tree["a"] ** 2)


def test_no_order_and_no_mode_passes():
    def f(x):
        return x * stop_gradient(x**2)

    assert jax.grad(f)(3.0) == 9.0
    assert jax.grad(jax.grad(f))(3.0) == 0.0
    assert jax.jvp(f, (3.0,), (1.0,)) == (27.0, 9.0)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(f)))(jnp.array([1.0, 2.0])), [1.0, 4.0])


@pytest.mark.parametrize(
    "constant",
    [
        pytest.param(stop_gradient, id="stop_gradient"),
        pytest.param(
            lambda x: stop_gradient({"x": x, "key": jax.random.key(0)})["x"], id="of a tree"
        ),
        pytest.param(tg.custom_gradient(lambda x: (x, lambda dy: 3 * dy)), id="custom_gradient"),
        pytest.param(tg.grad_pass_through(lambda x: x), id="grad_pass_through"),
    ],
)
def test_a_value_of_before_the_watch_is_no_source(constant):
    """An anchor, or old weights in a ratio: the derivative of x c in x is c, as in TensorFlow."""
    x = jnp.float32(2.0)
    before = constant(x)
    with tg.ForwardAccumulator(x, jnp.float32(1.0)) as accumulator:
        product = x * before
    assert accumulator.jvp(product) == 2.0
    with tg.GradientTape(persistent=True) as tape:
        before_watch = constant(x)
        tape.watch(x)
        with tape.stop_recording():
            stopped = constant(x)
        products = [x * each for each in (before, before_watch, stopped)]
    assert [tape.gradient(y, x) for y in products] == [2.0, 2.0, 2.0]


def test_it_is_the_primitive_of_jax_and_a_stop_gradient_in_a_graph():
    eqns = jax.make_jaxpr(lambda x: stop_gradient([x]))(1.0).jaxpr.eqns
    assert [eqn.primitive.name for eqn in eqns] == ["stop_gradient"]
    assert [type(node).__name__ for node in tg.graph(lambda x: stop_gradient(x), 1.0).nodes] == [
        "StopGradient"
    ]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_leaf_that_is_no_array_says_where_and_what_it_is(transform):
    def f(x):
        return stop_gradient({"w": x, "act": [jnp.sin]})

    with pytest.raises(TypeError, match=r"the leaf at act\.0 is a PjitFunction"):
        transform(f)(1.0)
    with pytest.raises(TypeError, match="it is a str: 'text'"):
        stop_gradient("text")
