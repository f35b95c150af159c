"""By which parts a shown program folds: its named scopes or, where it has none, its calls."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tracegrad as tg
from tracegrad.insight.parts import parts_of_nodes


def parts(fun, *args):
    found, are_named = parts_of_nodes(tg.graph(fun, *args))
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


def half_named(x):
    with jax.named_scope("a"), jax.named_scope("b"):
        x = scaled(x)
    return scaled(x)


def with_a_few_scopes(x):
    with jax.named_scope("a"):
        x = scaled(x)
    return Model()(x) + 1


ONE, TWO = "scaled ()", "scaled () · 2"
MODEL = [(ONE,), (ONE,), (TWO,), (TWO,), (ONE,), (ONE,), ()]  # the last is called elsewhere


@pytest.mark.parametrize(
    ("fun", "are_named", "expected"),
    [
        (half_named, True, [("a", "b"), ("a", "b"), (), ()]),
        # Of what all operations have in common nothing is told; a turn of a loop counts.
        (lambda x: Model()(x), False, MODEL),
        (lambda x: Model()(x) ** 2, False, [*(("Model ()", *parts) for parts in MODEL), ()]),
        (
            with_a_few_scopes,
            False,
            [(ONE, "a"), (ONE, "a"), *(("Model ()", *p) for p in MODEL), ()],
        ),
    ],
    ids=["scopes", "calls", "calls in calls", "scopes in calls"],
)
def test_parts_are_named_scopes_or_where_few_are_named_the_calls_of_functions(
    fun, are_named, expected
):
    assert parts(fun, 1.0) == (expected, are_named)


def test_the_passes_of_a_derivative_are_the_outermost_parts():
    found, _ = parts(lambda x: jax.grad(lambda x: Model()(x) ** 2)(x) + 1, 1.0)
    assert found[0] == ("jvp()", "Model ()", ONE)
    assert ("transpose(jvp())", "Model ()", ONE) in found
    assert found[-1] == ()


def test_inside_of_a_region_they_begin_in_its_function():
    region = jax.jit(lambda x: scaled(x) + 1)
    graph = tg.graph(lambda x: Model()(region(x)), 1.0)
    found, _ = parts_of_nodes(graph.nodes[0].regions["jaxpr"])
    assert [len(row) for row in found] == [1, 1, 0]


def test_layers_of_libraries_are_parts():
    first, second = (nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2))
    found, _ = parts(lambda x: jnp.sin(second(first(x))), jnp.ones((1, 2)))
    assert list(dict.fromkeys(found)) == [("Linear",), ("Linear_1",), ()]
