"""Names of scopes are the user's: what `jnp.einsum` is given is none of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg


@pytest.mark.parametrize("sum", ["bi,ij->bj", "b i, i j -> b j", "...i,ij->...j", "bi,ij->"])
def test_a_sum_of_einsum_is_no_scope(sum):
    def fun(w, x):
        with jax.named_scope("block"):
            return jnp.tanh(jnp.einsum(sum, x, w))

    graph = tg.graph(fun, jnp.ones((3, 2)), jnp.ones((4, 3)))
    assert {place.scope for place in graph.walk()} == {"block"}
    assert "->" not in str(graph).partition("\n")[2]
    assert graph.find(tg.match.scope("block") & tg.match.op("dot_general"))


@pytest.mark.parametrize("name", ["x->y", "encoder->decoder", "a->bb"])
def test_a_name_with_an_arrow_that_is_no_sum_is_one(name):
    def fun(x):
        with jax.named_scope(name):
            return jnp.sin(x)

    assert [place.scope for place in tg.graph(fun, 1.0).find(tg.match.scope(name))] == [name]
