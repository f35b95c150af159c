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
    return jnp.sum(jax.jit(jnp.tanh)(b))


@pytest.fixture
def graph():
    return tg.graph(net, jnp.ones((3, 3)), jnp.ones((3, 3)))


def reading(graph, node, operands):
    """The graph with other operands for a node."""
    other = node.having(node.equation.replace(invars=list(operands)))
    return graph.replace(nodes=[other if each is node else each for each in graph.nodes])


def test_a_value_used_before_it_is_defined_is_named_with_the_line(graph):
    sin, _, tanh, _ = graph.nodes
    with pytest.raises(tg.GraphError, match=r"(?s)defined later.*sin") as caught:
        reading(graph, sin, tanh.outputs).verify()
    assert f"test_verification.py:{net.__code__.co_firstlineno + 1}" in str(caught.value)


def with_integers(graph):
    (old,), new = graph.nodes[0].outputs, Value(jax.typeof(jnp.ones((3, 3), jnp.int32)))
    return graph.replace(nodes=[node.with_renamed_values({old: new}) for node in graph.nodes])


def of_one(graph):
    """The graph with a call whose function returns a scalar; the call returns a matrix."""
    *before, call, total = graph.nodes
    ((name, region),) = call.regions.items()
    call = call.having(call.equation, {name: region.replace(outputs=[ONE])})
    return graph.replace(nodes=[*before, call, total])


OTHER = tg.graph(net, jnp.ones((3, 3)), jnp.ones((3, 3)))
ONE = Literal(np.float32(1), jax.typeof(np.float32(1)))
NO_PROGRAMS = {
    "of another graph": lambda g: reading(g, g.nodes[2], OTHER.inputs[:1]),
    "dot_general": lambda g: reading(g, g.nodes[1], [g.nodes[1].inputs[0], ONE]),
    r"expected f32\[3,3\].*found i32\[3,3\]": with_integers,
    r"results: expected f32\[\] at position 0, found f32\[3,3\]": of_one,
    "that nothing in it defines": lambda g: g.replace(nodes=g.nodes[:-1]),
}


@pytest.mark.parametrize("message", NO_PROGRAMS)
def test_what_is_no_program_is_refused(graph, message):
    graph.verify()
    with pytest.raises(tg.GraphError, match=message):
        NO_PROGRAMS[message](graph).verify()


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
