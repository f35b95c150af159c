"""The pass that gives custom gradients a forward mode: what it changes, and what it leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tracegrad as tg
from tracegrad import custom_gradient
from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.rewriting.linearity import TermKinds, constant_part, zero_outputs

pytestmark = pytest.mark.both_jax


@custom_gradient
def double(x):
    return x * 2, lambda dy: 2 * dy


def kinds(graph):
    return [o.node.kind for o in graph.walk() if isinstance(o.node, tg.ir.CustomGradient)]


def test_a_graph_without_custom_gradients_stays_itself():
    graph = tg.graph(lambda x: jax.nn.relu(x) + lax.stop_gradient(x), 1.0)
    assert with_forward_mode(graph) is graph


def test_the_graph_that_is_given_stays_as_it_was():
    graph = tg.graph(lambda x: double(jax.nn.relu(x)), 1.0)
    result = with_forward_mode(graph)
    result.verify()
    assert (sorted(kinds(graph)), kinds(result)) == (["jvp", "vjp"], ["jvp"] * 2)


def test_a_region_that_many_calls_share_stays_shared():
    layer = jax.jit(lambda x: jnp.sin(double(x)))

    def f(x):
        return layer(layer(layer(x)))

    result = with_forward_mode(tg.graph(f, 1.0))
    calls = [node for node in result.nodes if node.op == "jit"]
    assert len(calls) == 3
    assert len({id(call.regions["jaxpr"]) for call in calls}) == 1
    assert jax.jit(result.to_callable()).lower(1.0).as_text().count("func.func private") <= 2


def test_the_new_node_keeps_the_name_the_place_and_the_effects():
    @custom_gradient
    def noisy(x):
        jax.debug.print("{}", x)
        return x, lambda dy: dy

    graph = tg.graph(lambda x: noisy(x) + 1, 1.0)
    result = with_forward_mode(graph)
    (old,), (new,) = (
        [o for o in g.walk() if isinstance(o.node, tg.ir.CustomGradient)] for g in (graph, result)
    )
    assert new.node.name == old.node.name == "noisy"
    assert new.origin == old.origin
    assert new.node.effects == old.node.effects != frozenset()


def test_zeros_are_known_by_structure_and_a_while_loop_that_hands_on_adds_nothing():
    assert zero_outputs(tg.graph(lambda x: (jnp.zeros_like(x) * x, x * 2), 1.0)) == [True, False]

    def handed_on(x, dy):
        return lax.while_loop(lambda c: c[0] < x, lambda c: c, (x, dy))[1]

    terms = [TermKinds.CONSTANT, TermKinds.LINEAR]
    assert constant_part(tg.graph(handed_on, 1.0, 1.0), terms) is None
