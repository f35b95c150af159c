"""What a node hands to its regions, and which value a value is inside of calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tracegrad.ir import Literal
from tracegrad.ir.inlined import Inlined, region_calls
from tracegrad.ir.running import run_node

pytestmark = pytest.mark.both_jax


def run(program, args):
    """Runs the steps of a written-out program, each on the origins of its operands."""
    values = {((), v): x for v, x in zip(program.graph.inputs, args, strict=True)}

    def read(path, atom):
        path, atom = program.origin(path, atom)
        if isinstance(atom, Literal):
            return atom.val
        constants = program.region(path).constants
        return constants[atom] if atom in constants else values[path, atom]

    for step in program.steps:
        results = run_node(step.node, [read(step.path, v) for v in step.node.inputs])
        values.update(zip([(step.path, v) for v in step.node.outputs], results, strict=True))
    return [read((), v) for v in program.graph.outputs]


def test_the_steps_of_a_written_out_program_compute_what_it_does():
    scale = np.array([2.0, 3.0, 4.0], np.float32)

    @jax.jit
    def inner(x, y):
        return jnp.sin(x) * y * scale, x

    @jax.jit
    def outer(x):
        a, b = inner(x, x + 1)
        c, _ = inner(b, a)
        return c, 1.0

    def f(x):
        y, one = outer(x)
        return y + lax.scan(lambda c, x: (c + x, c * x), one, x)[1], x

    x = jnp.array([0.5, -1.0, 2.0])
    graph = tg.graph(f, x)
    program = Inlined(graph)
    assert [step.node.op for step in program.steps].count("sin") == 2
    assert "jit" not in {step.node.op for step in program.steps}
    assert program.origin((), graph.outputs[1]) == ((), graph.inputs[0])
    for found, expected in zip(run(program, [x]), f(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    closed = Inlined(graph, lambda path, node: False)
    assert [step.node for step in closed.steps] == list(graph.nodes)
    np.testing.assert_allclose(run(closed, [x])[0], f(x)[0], rtol=1e-6)


def test_a_value_that_a_loop_hands_on_is_the_one_outside_and_what_it_carries_is_not():
    def f(w, x):
        return lax.scan(lambda c, x: (jnp.sin(c) * w, x), w, x)

    graph = tg.graph(f, 2.0, jnp.ones(3))
    (scan,) = graph.nodes
    program, path = Inlined(graph), ((scan, "jaxpr"),)
    origins = [program.origin(path, value) for value in scan.region("jaxpr").inputs]
    assert origins[0] == ((), graph.inputs[0])
    assert [where for where, _ in origins[1:]] == [path, path]
    assert program.made_by(*origins[1]) is None


def test_regions_get_the_operands_and_give_the_results_that_they_are_said_to():
    """By the types: an operand, or a slice of it, is what the input is."""

    def loop(a, b, n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * b), (0, a))

    def f(a, xs, n):
        ys = lax.scan(lambda c, x: (c + x.sum(), (c, x)), a, xs)
        _, z = loop(xs, a, n)
        z = lax.cond(n > 1, lambda z: z * a, jnp.sin, z)
        return ys, jax.checkpoint(jnp.cos)(z)

    graph = tg.graph(f, 1.0, jnp.ones((4, 2)), 3)
    met = set()
    for found in graph.walk():
        node = found.node
        for call in region_calls(node):
            met.add(node.op)
            region = node.region(call.name)
            shapes = [node.inputs[i].aval.shape for i in call.operands]
            whole = len(shapes) - call.sliced
            shapes = [*shapes[:whole], *(shape[1:] for shape in shapes[whole:])]
            assert shapes == [aval.shape for aval in region.in_avals]
            carried = sum(k is not None for k in call.fed_back_from)
            whole = carried if node.op == "scan" else len(call.results)
            for i, k in enumerate(call.results):
                if k is not None:
                    shape = node.outputs[k].aval.shape
                    assert region.out_avals[i].shape == (shape if i < whole else shape[1:])
            body = node.region(region_calls(node)[-1].name)
            for i, k in enumerate(call.fed_back_from):
                if k is not None:
                    assert body.out_avals[k].shape == region.in_avals[i].shape
    assert met >= {"scan", "while", "cond"}
    assert len(met) >= 4


def test_what_is_called_from_everywhere_is_looked_at_where_it_is_asked_for():
    inner = jax.jit(lambda x, y: (jnp.sin(x), y))
    for _ in range(40):
        inner = jax.jit(lambda x, y, inner=inner: inner(*inner(x, y)))
    graph = tg.graph(inner, 1.0, 2.0)
    program = Inlined(graph)
    path, atom = program.origin((), graph.outputs[0])
    assert program.made_by(path, atom).op == "sin"
    assert len(path) > 40 - 1
