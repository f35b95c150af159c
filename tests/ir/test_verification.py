"""`verify` finds what is no program, and names the node and its line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.ir import Literal

pytestmark = pytest.mark.both_jax


def net(x, w):
    a = jnp.sin(x)
    b = a @ w
    return jnp.sum(jnp.tanh(b))


@pytest.fixture
def graph():
    return tg.graph(net)(jnp.ones((3, 3)), jnp.ones((3, 3)))


def test_a_traced_graph_is_a_program(graph):
    graph.verify()


def test_a_value_used_before_it_is_defined_is_named_with_the_line(graph):
    sin, _, tanh, _ = graph.nodes
    graph.set_inputs(sin, [tanh.outputs[0]])
    with pytest.raises(tg.GraphError, match=r"tanh.*defined later") as caught:
        graph.verify()
    assert f"test_verification.py:{net.__code__.co_firstlineno + 1}" in str(caught.value)


def test_a_type_that_the_operation_does_not_take_is_refused(graph):
    dot = graph.nodes[1]
    graph.set_inputs(dot, [dot.inputs[0], Literal(np.float32(1), jax.typeof(np.float32(1)))])
    with pytest.raises(tg.GraphError, match="dot_general"):
        graph.verify()


def test_a_result_of_another_type_than_jax_gives_it_is_refused(graph):
    graph.nodes[0].outputs[0].aval = jax.typeof(jnp.ones((3, 3), jnp.int32))
    with pytest.raises(tg.GraphError, match=r"expected f32\[3,3\].*found i32\[3,3\]"):
        graph.verify()


def test_an_output_that_nothing_defines_is_refused(graph):
    (gone,) = graph.insert(lambda y: -y, graph.outputs)
    graph.erase(gone.producer)
    graph.set_outputs([gone])
    with pytest.raises(tg.GraphError, match="which nothing in it defines"):
        graph.verify()


@pytest.mark.parametrize(
    ("fun", "arguments"),
    [
        (lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0], x), (3,)),
        (lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: c + x, x), (3,)),
        (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), (3,)),
        (lambda x: jax.checkpoint(jnp.sin)(jax.nn.relu(x)), (3,)),
    ],
)
def test_operands_of_regions_are_checked(fun, arguments):
    graph = tg.graph(fun)(jnp.ones(arguments))
    graph.verify()
    node = next(n for n in graph.nodes if n.regions)
    region = next(iter(node.regions.values()))
    region.inputs[0].aval = jax.typeof(jnp.ones((7, 7)))
    with pytest.raises(tg.GraphError, match=r"f32\[7,7\]|float32\[7, 7\]"):
        graph.verify()
