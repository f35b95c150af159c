"""The statistics that `explain` computes inside of loops are those that NumPy computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.insight.explaining import runs
from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.statistics import (
    EDGE_GIVEN,
    EDGE_INF,
    NORM,
    edge,
    exact,
    norms,
    of_parts,
)

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


def parts_of(measure, stack, arguments, parts):
    """What `measure` finds in parts of a stack of vectors; and the same of a stack in a loop."""
    form = jax.tree.structure(arguments)
    stacks = [stack] * len(parts)
    found = of_parts(measure, form, parts, *stacks)
    np.testing.assert_array_equal(
        of_parts(measure, form, parts, *(x[None] for x in stacks)), found[None]
    )
    return found


@pytest.mark.parametrize("measure", [norms, exact])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_the_measures_of_the_steps_of_a_loop_are_those_of_each_step(dtype, measure):
    steps = [array for array in ARRAYS.values() if array.shape == (3,)] + [np.zeros(3), np.ones(3)]
    stack = jnp.asarray(np.stack([np.pad(array, (2, 1)) for array in steps]), dtype)
    expected = np.stack([measure(jnp.asarray(array, dtype)) for array in steps])
    found = parts_of(measure, stack, (0,), [(2, (3,))])
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    one = parts_of(measure, stack, (0,), [(3, ())])
    expected = np.stack([measure(jnp.asarray(array[1], dtype)) for array in steps])
    np.testing.assert_allclose(one, expected, rtol=1e-14)


@pytest.mark.parametrize("result", [(6, (2, 2)), (4, ())])
def test_what_is_measured_of_a_vjp_in_the_steps_of_a_loop_is_that_of_each_step(result):
    stack = np.random.default_rng(0).normal(size=(5, 10)).astype(np.float32)
    stack[1, 7], stack[1, 4] = np.nan, np.nan  # an element of the results
    stack[3, 8], stack[3, 4] = np.inf, -np.inf
    stack[3, 2] = np.inf  # an element of the operand
    parts = [result, (5, (2, 2)), (0, (2, 2)), (9, ())]

    def of_step(row):
        arrays = [row[k : k + int(np.prod(shape))].reshape(shape) for k, shape in parts]
        return edge(arrays[0], arrays[1], [arrays[2], None, arrays[3]])

    found = parts_of(edge, stack, (0, 0, [0, None, 0]), parts)
    np.testing.assert_allclose(found, np.stack([of_step(row) for row in stack]), rtol=1e-14)
    assert np.isnan(found[:, -1]).all()
    np.testing.assert_array_equal(found[:, -2], stack[:, 9])


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


# Both in the loop and after it: a NaN where the factor is zero, in one step.
@pytest.mark.parametrize(("steps", "width"), [(5, 3), (33, 1 << 16)])
def test_a_nan_in_a_loop_is_measured_at_its_step_with_the_operands_there(steps, width):
    def loss(w, added):
        def step(h, x):
            return h * w + jnp.sqrt(x), None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(width), added)[0])

    w, added = jnp.full(width, 0.5), jnp.ones((steps, width)).at[2, 1].set(0.0)
    graph = tg.graph(loss, w, added)
    observed = runs.measure(graph, [True, True], [w, added], [jnp.ones(())], Detail.ALL)
    (found,) = (stat for where, _, stat in observed.of("edge") if where.node.op == "sqrt")
    infs = np.zeros(steps)
    infs[2] = 1
    np.testing.assert_array_equal(found[:, EDGE_INF], infs)
    given = 0.5 ** (steps - 3)
    np.testing.assert_allclose(found[2, EDGE_GIVEN:][:2], [given, 0.0], rtol=1e-6)


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
