"""What `show` says of the gradient at a node is what happens when it is stopped there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tracegrad.differentiation.connectivity import connections
from tracegrad.insight.gradient_flow import Flow, gradient_flow
from tracegrad.ir import has_gradient
from tracegrad.ir.editing import behind_each

X = jnp.array([[0.3, -1.2, 0.4], [2.0, 0.7, -0.6], [1.1, -0.2, 0.9]])
W = jnp.array([[0.5, 0.1, -1.1], [-0.4, 1.3, 0.2], [0.7, -0.8, 0.6]])


@tg.custom_gradient
def quantise(w):
    return jnp.round(8 * w) / 8, lambda dy: 2 * dy


@tg.custom_gradient
def first_only(x, y):
    return x * y, lambda dy: (dy, None)


@tg.custom_gradient
def nothing(x):
    return x * 1.0, lambda dy: None


def annotated(w, x):
    h = jnp.tanh(x @ quantise(w)) + nothing(jnp.sin(x))
    h = first_only(h, jnp.exp(w)) * tg.stop_gradient(jnp.cos(h))
    return jnp.sum(h) + jnp.sum(jnp.floor(w) * x), jnp.sin(x) > 0


def scanned(w, x):
    def body(carry, row):
        kept, dropped = carry
        kept = jnp.tanh(kept @ w) + jnp.sin(lax.stop_gradient(row))
        return (kept, jnp.cos(dropped)), jnp.sign(kept) * jnp.exp(row)

    (kept, _), rows = lax.scan(body, (x[0], x[1]), x)
    return jnp.sum(kept) + jnp.sum(rows[1:] * 0.5)


def delayed(w, x):
    """The gradient of the second carry arrives an iteration later than that of the first."""

    def body(carry, row):
        first, second = carry
        return (jnp.sin(second), jnp.cos(first) * row + jnp.cos(second)), jnp.exp(first)

    (first, _), _ = lax.scan(body, (x[0], w[0]), x)
    return jnp.sum(first)


def branched(w, x):
    def left(w, x):
        return jnp.tanh(w * x)

    def right(w, x):
        return jnp.round(w) + jnp.sin(x)

    h = lax.cond(x[0, 0] > 0, left, right, w, jnp.cos(x))
    return jnp.sum(h * lax.cond(x[0, 0] > 0, right, left, jnp.exp(w), x))


def nested(w, x):
    @jax.jit
    def inner(v, scale):
        return jnp.sin(v) * jnp.round(scale), jnp.cos(v) * scale

    @jax.checkpoint
    def block(w, x):
        a, _ = inner(w, x)
        _, b = inner(a, lax.stop_gradient(jnp.exp(x)))
        return jax.nn.relu(a + b)

    return jnp.sum(block(w, x) * inner(w, w)[0])


def looped(w, x):
    return jnp.sum(lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + i * jnp.floor(w), x))


def gradients(graph):
    """With respect to both arguments, where each branch is taken once."""
    run = graph.to_callable()

    def total(w, x):
        leaves = [*jax.tree.leaves(run(w, x)), *jax.tree.leaves(run(w, 0.1 - 0.7 * x))]
        return sum(jnp.sum(v) for v in leaves if jnp.issubdtype(v.dtype, jnp.floating))

    return jax.jit(jax.grad(total, argnums=(0, 1)))(W, X)


def stopped(graph, occurrence):
    """The graph with `stop_gradient` behind one node."""
    return behind_each(
        graph, [occurrence], lambda match: lax.stop_gradient, selects=has_gradient
    ).graph


PROGRAMS = [annotated, scanned, delayed, branched, nested, looped]


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_stopping_the_gradient_changes_something_exactly_where_it_flows(program, step):
    graph = tg.graph(program, W, X)
    flow = gradient_flow(graph)
    before = gradients(graph)
    reached = [any(i in found for found in connections(graph)) for i in range(2)]
    assert flow.reached == reached == [bool(jnp.any(g)) for g in before]
    told = [(o, flow.along(o.path).flows[o.node]) for o in graph.walk()]
    # What a custom rule stands for is not run when differentiated.
    told = [(o, kind) for o, kind in told if kind is not Flow.REPLACED]
    for occurrence, kind in told[::step]:
        after = gradients(stopped(graph, occurrence))
        same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert same == (kind not in (Flow.FLOWS, Flow.CHANGED)), (str(occurrence), kind)


def kinds(fun, *args):
    flow = gradient_flow(tg.graph(fun, *args))
    return {node.op: kind.value for node, kind in flow.flows.items()}


def test_what_lies_behind_a_cut_is_told_from_the_cut_and_from_what_has_no_gradient():
    def f(x, n):
        return jnp.sum(jnp.cos(jnp.floor(jnp.sin(x)))) + n * 2

    assert kinds(f, X, 3) == {
        "sin": "unreached",
        "floor": "cut",
        "cos": "none",
        "reduce_sum": "none",
        "mul": "none",
        "convert_element_type": "none",
        "add": "none",
    }


def test_what_nothing_uses_is_unreached_and_cuts_nothing():
    def f(x):
        jnp.round(jnp.sin(x))
        return jnp.cos(x)

    assert kinds(f, X) == {"sin": "unreached", "jit": "unreached", "cos": "flows"}


def test_regions_that_only_jax_enters_are_not_guessed_about():
    mesh = jax.make_mesh((3,), ("i",), (jax.sharding.AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    def doubled(x):
        return 2 * x

    flow = gradient_flow(tg.graph(lambda x: doubled(jnp.sin(x)), X))
    assert [kind.value for kind in flow.flows.values()] == ["flows", "flows"]
    ((inner,),) = (regions.values() for regions in flow.regions.values())
    assert {kind.value for kind in inner.flows.values()} == {"unknown"}


def test_what_is_written_to_a_ref_flows_on_from_where_it_is_read():
    def f(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = jnp.sin(x)
        return jnp.sum(ref[...])

    found = kinds(f, X)
    assert found["sin"] == "flows"
    assert found["reduce_sum"] == "flows"

    def in_a_loop(x):
        ref = jax.new_ref(jnp.zeros(()))

        def body(i, _):
            ref[...] += jnp.cos(x[i])

        lax.fori_loop(0, 3, body, None)
        return ref[...]

    assert gradient_flow(tg.graph(in_a_loop, X[0])).reached == [True]
    assert jnp.any(jax.grad(in_a_loop)(X[0]))
