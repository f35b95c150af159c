"""By which parts a shown program folds: its named scopes or, where it has none, its calls."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from flax import nnx

import tracegrad as tg
from tracegrad.insight.parts import parts_of


def parts(fun, *args):
    found, are_named = parts_of(tg.graph(fun, *args))
    return [
        tuple(re.sub(r"\(\S+?\.py:\d+\)", "()", part) for part in row) for row in found
    ], are_named


def scaled(x):
    return 2 * jnp.sin(x)


class Model:
    def __call__(self, x):
        for _ in range(2):
            x = scaled(x)
        return scaled(x) + 1


def test_named_scopes_are_the_parts_where_there_are_some():
    def f(x):
        with jax.named_scope("a"), jax.named_scope("b"):
            x = scaled(x)
        return scaled(x)

    assert parts(f, 1.0) == ([("a", "b"), ("a", "b"), (), ()], True)


def test_else_the_functions_that_are_called_are_and_each_turn_of_a_loop_counts():
    found, are_named = parts(lambda x: Model()(x) ** 2, 1.0)
    assert not are_named
    assert found == [
        ("Model ()", "scaled ()"),
        ("Model ()", "scaled ()"),
        ("Model ()", "scaled () · 2"),
        ("Model ()", "scaled () · 2"),
        ("Model ()", "scaled ()"),  # called from another line
        ("Model ()", "scaled ()"),
        ("Model ()",),
        (),
    ]


def test_what_all_operations_have_in_common_is_left_out():
    found, _ = parts(lambda x: Model()(x), 1.0)
    assert [row[:1] for row in found] == [("scaled ()",)] * 2 + [("scaled () · 2",)] * 2 + [
        ("scaled ()",)
    ] * 2 + [()]


def test_inside_of_a_region_they_begin_in_its_function():
    @jax.jit
    def region(x):
        return scaled(x) + 1

    graph = tg.graph(lambda x: Model()(region(x)), 1.0)
    found, _ = parts_of(graph.nodes[0].regions["jaxpr"])
    assert [len(row) for row in found] == [1, 1, 0]


def test_layers_of_libraries_are_parts():
    first, second = (nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2))
    found, _ = parts(lambda x: jnp.sin(second(first(x))), jnp.ones((1, 2)))
    assert list(dict.fromkeys(found)) == [("Linear",), ("Linear_1",), ()]


def test_a_few_scopes_lie_inside_of_the_calls():
    def named(x):
        with jax.named_scope("a"):
            return scaled(x)

    def f(x):
        return Model()(named(x)) + 1

    found, are_named = parts(f, 1.0)
    assert not are_named
    assert found[0] == ("named ()", "scaled ()", "a")
    found, _ = parts(jax.grad(f), 1.0)
    assert found[0] == ("jvp()", "named ()", "scaled ()", "a")


def test_the_passes_of_a_derivative_are_parts_with_calls_in_them():
    found, are_named = parts(lambda x: jax.grad(lambda x: Model()(x) ** 2)(x) + 1, 1.0)
    assert not are_named
    assert found[0] == ("jvp()", "Model ()", "scaled ()")
    assert ("transpose(jvp())", "Model ()", "scaled ()") in found
    assert found[-1] == ()
