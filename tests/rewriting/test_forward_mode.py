"""The pass that gives custom gradients a forward mode: what it changes, and what it leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tracegrad import custom_gradient
from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.rewriting.linearity import Part, constant_part, zero_outputs

pytestmark = pytest.mark.both_jax


@custom_gradient
def double(x):
    return x * 2, lambda dy: 2 * dy


def kinds(graph):
    return [o.node.kind for o in graph.walk() if isinstance(o.node, tg.ir.CustomGradient)]


def test_a_graph_without_custom_gradients_stays_itself():
    graph = tg.graph(lambda x: jax.nn.relu(x) + lax.stop_gradient(x), 1.0)
    assert with_forward_mode(graph) is graph


def test_every_custom_gradient_is_replaced_at_any_depth():
    def f(x):
        x = jax.jit(lambda x: lax.cond(x > 0, double, lambda x: x, x))(x)
        x, _ = lax.scan(lambda c, _: (jax.checkpoint(double)(c), None), x, None, length=2)
        return jax.nn.relu(double(x))

    graph = tg.graph(f, 1.0)
    result = with_forward_mode(graph)
    assert sorted(kinds(graph)) == ["jvp", "vjp", "vjp", "vjp"]
    assert kinds(result) == ["jvp"] * 4
    result.verify()
    assert sorted(kinds(graph)) == ["jvp", "vjp", "vjp", "vjp"]  # the original is as it was
    np.testing.assert_allclose(result.to_callable()(1.5), f(1.5))
    assert jax.jvp(result.to_callable(), (1.5,), (1.0,)) == (24.0, 16.0)
    # Reverse mode is unchanged.
    assert jax.grad(result.to_callable())(1.5) == jax.grad(f)(1.5) == 16.0


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


def test_constants_are_told_from_what_is_linear():
    def parts(f):
        linear = tg.graph(f, jnp.ones(3), jnp.ones(3))
        return constant_part(linear, [Part.CONSTANT, Part.LINEAR])

    assert parts(lambda x, dy: dy * x + 0.0) is None
    assert parts(lambda x, dy: jnp.zeros(3)) is None
    assert (
        parts(lambda x, dy: jax.jit(lambda z: -z.at[0].set(0.0).sum())(jnp.zeros(3)) * dy) is None
    )
    assert "add at" in parts(lambda x, dy: jax.jit(jnp.add)(dy, x))
    assert "concatenate at" in parts(lambda x, dy: jnp.concatenate([dy, x]))
    assert "does not depend" in parts(lambda x, dy: x)
    assert zero_outputs(tg.graph(lambda x: (jnp.zeros_like(x) * x, x * 2), 1.0)) == [True, False]


def test_constants_are_told_inside_of_loops_branches_and_calls_too():
    @jax.custom_jvp
    def shifted(dy):
        return dy + 1.0

    shifted.defjvp(lambda primals, tangents: (shifted(*primals), tangents[0]))

    def steps(body, start):
        return lax.scan(lambda c, _: (body(c), None), start, None, length=3)[0]

    def parts(f):
        return constant_part(tg.graph(f, 1.0, 1.0), [Part.CONSTANT, Part.LINEAR])

    assert "add at" in parts(lambda x, dy: steps(lambda c: c + x, dy))
    assert "add at" in parts(lambda x, dy: steps(lambda c: c + dy, x))
    assert "add at" in parts(lambda x, dy: lax.cond(x > 0, lambda: dy + 1.0, lambda: dy))
    assert "cond at" in parts(lambda x, dy: lax.cond(x > 0, lambda: dy, lambda: x))
    assert "add at" in parts(lambda x, dy: jax.checkpoint(lambda dy: dy + x)(dy))
    assert "add at" in parts(lambda x, dy: shifted(dy))
    assert parts(lambda x, dy: steps(lambda c: c * x + dy, jnp.zeros_like(dy))) is None
    assert parts(lambda x, dy: lax.cond(x > 0, lambda: x * dy, lambda: jnp.zeros_like(dy))) is None
    assert parts(lambda x, dy: lax.fori_loop(0, 3, lambda i, c: (i + 1) * x * c, dy)) is None
    assert parts(lambda x, dy: lax.while_loop(lambda c: c[0] < x, lambda c: c, (x, dy))[1]) is None


def test_a_backward_that_adds_a_constant_in_a_loop_has_no_forward_mode():
    @custom_gradient
    def drifting(x):
        return 2 * x, lambda dy: lax.fori_loop(0, 3, lambda _, c: c + 1.0, dy)

    @custom_gradient
    def summed(x):
        return x**4, lambda dy: lax.fori_loop(0, 4, lambda _, c: c + dy * x**3, jnp.zeros_like(dy))

    assert jax.grad(drifting)(1.0) == 4.0
    with pytest.raises(ValueError, match=r"drifting.*adds a constant to it"):
        tg.jvp(drifting, (1.0,), (1.0,))
    assert tg.jvp(summed, (2.0,), (1.0,))[1] == jax.grad(summed)(2.0) == 32.0
