"""What a graph knows of what is in it, at any depth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.ir.dependence import dependence

pytestmark = pytest.mark.both_jax


def test_what_stands_in_a_region_of_a_region_is_known_of_the_graph():
    def within(fun):
        inner = jax.jit(fun)
        return tg.graph(lambda x: jax.jit(lambda x: inner(x))(x), jnp.ones(3))

    def on_the_host(x):
        return jax.pure_callback(np.sin, x, x)

    assert within(jax.checkpoint(jnp.sin)).recomputes
    assert within(on_the_host).calls_host
    assert not within(jnp.sin).recomputes
    assert not within(jnp.sin).calls_host


def test_what_is_closed_over_depends_on_no_argument():
    table = np.arange(3.0, dtype=np.float32)
    fun = lambda x: (table[1] * jnp.sin(table), jax.jit(lambda: table + 1)(), x * table)  # noqa: E731
    assert dependence(tg.graph(fun, 2.0)) == [0, 0, 1]


def test_a_graph_that_is_called_as_its_function_says_how_it_is_called():
    graph = tg.graph(lambda params, x: params["a"] * params["b"] * x, {"a": 1.0, "b": 2.0}, 3.0)
    assert graph(1.0, 2.0, 3.0) == [6.0]
    assert graph.to_callable()({"a": 1.0, "b": 2.0}, 3.0) == 6.0
    for arguments in [({"a": 1.0, "b": 2.0}, 3.0), (1.0, 2.0, 3.0, 4.0)]:
        with pytest.raises(TypeError, match=r"takes 3 arrays, . were given.*to_callable\(\)"):
            graph(*arguments)
