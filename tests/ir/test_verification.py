"""`verify` finds what is no program, and names the node and its line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.ir import Literal, Value

pytestmark = pytest.mark.both_jax


def net(x, w):
    a = jnp.sin(x)
    b = a @ w
    return jnp.sum(jnp.tanh(b))


@pytest.fixture
def graph():
    return tg.graph(net, jnp.ones((3, 3)), jnp.ones((3, 3)))


def test_a_traced_graph_is_a_program(graph):
    graph.verify()


def reading(graph, node, operands):
    """The graph with other operands for a node."""
    other = node.with_operands(operands)
    return graph.replace(nodes=[other if each is node else each for each in graph.nodes])


def test_a_value_used_before_it_is_defined_is_named_with_the_line(graph):
    sin, _, tanh, _ = graph.nodes
    with pytest.raises(tg.GraphError, match=r"(?s)defined later.*sin") as caught:
        reading(graph, sin, tanh.outputs).verify()
    assert f"test_verification.py:{net.__code__.co_firstlineno + 1}" in str(caught.value)


def test_a_value_of_another_graph_is_none_of_this_one(graph):
    other = tg.graph(net, jnp.ones((3, 3)), jnp.ones((3, 3)))
    with pytest.raises(tg.GraphError, match="of another graph"):
        reading(graph, graph.nodes[2], other.inputs[:1]).verify()


def test_a_type_that_the_operation_does_not_take_is_refused(graph):
    dot = graph.nodes[1]
    number = Literal(np.float32(1), jax.typeof(np.float32(1)))
    with pytest.raises(tg.GraphError, match="dot_general"):
        reading(graph, dot, [dot.inputs[0], number]).verify()


def test_a_result_of_another_type_than_jax_gives_it_is_refused(graph):
    sin, *_ = graph.nodes
    (old,), new = sin.outputs, Value(jax.typeof(jnp.ones((3, 3), jnp.int32)))
    wrong = [node.renaming({old: new}) for node in graph.nodes]
    with pytest.raises(tg.GraphError, match=r"expected f32\[3,3\].*found i32\[3,3\]"):
        graph.replace(nodes=wrong).verify()


def test_an_output_that_nothing_defines_is_refused(graph):
    with pytest.raises(tg.GraphError, match="that nothing in it defines"):
        graph.replace(nodes=graph.nodes[:-1]).verify()


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
    graph = tg.graph(fun, jnp.ones(arguments))
    graph.verify()
    node = next(n for n in graph.nodes if n.regions)
    name, region = next(iter(node.regions.items()))
    wrong = Value(jax.typeof(jnp.ones((7, 7))))
    other = region.replace(inputs=[wrong, *region.inputs[1:]])
    node_of_other = node.having(node.equation, {**node.regions, name: other})
    nodes = [node_of_other if each is node else each for each in graph.nodes]
    with pytest.raises(tg.GraphError, match=r"f32\[7,7\]|float32\[7, 7\]"):
        graph.replace(nodes=nodes).verify()
