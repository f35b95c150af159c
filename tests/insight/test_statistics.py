"""The statistics that `explain` computes inside of loops are those that NumPy computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.insight.explaining import runs
from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.statistics import NORM, exact, norms, norms_of_part

ARRAYS = {
    "ordinary numbers": np.random.default_rng(0).normal(size=(7, 30)),
    "zeros": np.zeros((2, 3)),
    "nothing": np.zeros((0, 3)),
    "squares that overflow": np.array([2e38, 1e38, 0.0]),
    "squares that underflow": np.array([1e-30, 2e-30, 0.0]),
    "both": np.array([1e38, 1e-37, 1.0]),
    "infinite": np.array([np.inf, 1.0, -np.inf, 0.0]),
    "not a number": np.array([np.nan, np.inf, 0.0]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_compiled_statistic_is_that_of_the_numbers_in_double_precision(name, dtype):
    array = jnp.asarray(ARRAYS[name], dtype)
    exactly = np.abs(np.asarray(array).astype(complex if dtype == "complex64" else float))
    largest = exactly.max(initial=0.0)
    norm = largest
    if 0 < largest < np.inf:
        norm = largest * np.sqrt(np.sum((exactly / largest) ** 2))
    zeros = np.mean(exactly == 0) if exactly.size else 0.0
    for measure in (norms, exact):
        found = jax.jit(measure)(array)
        np.testing.assert_allclose(found[:2], [norm, zeros], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_norms_of_the_steps_of_a_loop_are_those_of_each_step(dtype):
    steps = [array for array in ARRAYS.values() if array.shape == (3,)] + [np.zeros(3), np.ones(3)]
    stack = jnp.asarray(np.stack([np.pad(array, (2, 1)) for array in steps]), dtype)
    expected = np.stack([norms(jnp.asarray(array, dtype)) for array in steps])
    np.testing.assert_allclose(norms_of_part(2, 5, stack), expected, rtol=1e-14)
    np.testing.assert_allclose(norms_of_part(2, 5, stack[None]), expected[None], rtol=1e-14)


# The norms of many steps of large arrays are computed in the loop.
@pytest.mark.parametrize(("steps", "width"), [(5, 3), (33, 1 << 16)])
def test_a_cotangent_in_a_loop_has_the_norm_that_jax_computes_at_each_step(steps, width):
    def loss(w, added):
        def step(h, added):
            return jnp.reshape(jnp.tanh(h * w)[None], -1) + added, None

        return jnp.sum(jax.lax.scan(step, jnp.ones(width), added)[0] ** 2)

    w, added = jnp.linspace(0.1, 0.9, width), jnp.zeros((steps, width))
    graph = tg.graph(loss, w, added)
    observed = runs.measure(graph, [True, False], [w, added], [jnp.ones(())], Detail.FEW)
    expected = np.linalg.norm(jax.grad(loss, 1)(w, added).astype(float), axis=-1)
    ((_, _, carry),) = observed.of("carry")
    np.testing.assert_allclose(carry[:, NORM], expected, rtol=1e-5)
    found = {where.node.op: stat[:, NORM] for where, _, stat in observed.of("ct") if where.path}
    for name in ("add", "reshape", "broadcast_in_dim", "tanh"):
        np.testing.assert_allclose(found[name], expected, rtol=1e-5)


def test_a_cotangent_in_a_loop_in_a_loop_has_the_norm_that_jax_computes_at_each_step():
    def loss(w, added):
        def inner(h, added):
            return jnp.sin(h * w) + added, None

        def outer(h, added):
            return jax.lax.scan(inner, jnp.cos(h), added)[0], None

        return jnp.sum(jax.lax.scan(outer, jnp.ones(2), added)[0])

    w, added = jnp.array([0.7, 1.3]), jnp.zeros((4, 3, 2))
    graph = tg.graph(loss, w, added)
    observed = runs.measure(graph, [True, False], [w, added], [jnp.ones(())], Detail.FEW)
    expected = np.linalg.norm(jax.grad(loss, 1)(w, added), axis=-1)
    found = {where.node.op: stat[..., NORM] for where, _, stat in observed.of("ct")}
    np.testing.assert_allclose(found["sin"], expected, rtol=1e-5)
    carries = [stat[..., NORM] for _, _, stat in observed.of("carry")]
    np.testing.assert_allclose(next(c for c in carries if c.ndim == 2), expected, rtol=1e-5)
    np.testing.assert_allclose(next(c for c in carries if c.ndim == 1), expected[:, -1], rtol=1e-5)
