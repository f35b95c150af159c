"""Which value a value is inside of calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg
from tracegrad.ir.inlined import Inlined

pytestmark = pytest.mark.both_jax


def test_what_is_called_from_everywhere_is_looked_at_where_it_is_asked_for():
    inner = jax.jit(lambda x, y: (jnp.sin(x), y))
    for _ in range(40):  # a trillion calls
        inner = jax.jit(lambda x, y, inner=inner: inner(*inner(x, y)))
    graph = tg.graph(inner, 1.0, 2.0)
    program = Inlined(graph)
    assert program.made_by(*program.origin((), graph.outputs[0])).op == "sin"
