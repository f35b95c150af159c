"""The statistics that `explain` computes inside of loops are those that NumPy and JAX compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.runs import measure
from tracegrad.insight.explaining.statistics import NORM
from tracegrad.insight.explaining.streams import total


def norm_in_scope(scope, loss, *args):
    """The norm, over all steps, of the cotangent of the last result of a scope."""
    sources = [True, *[False] * (len(args) - 1)]
    observed = measure(tg.graph(loss, *args), sources, args, Detail.FEW)
    given = (stat for found, _, stat in observed.of("ct") if found.scopes == (scope,))
    return total(next(given)[..., NORM])  # the reverse pass starts with the last


# The norms of many steps of large arrays are computed in the loop.
LOOPS = pytest.mark.parametrize(("steps", "width"), [(5, 3), (33, 1 << 16)])


@LOOPS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("sizes", [(1.0, 2.0, 0.0), (1e-30, 1e-31, 0.0), (1e35, 1e-30, 1.0)])
def test_a_norm_in_a_loop_is_that_of_the_numbers_in_double_precision(steps, width, dtype, sizes):
    """Of all steps, also where the squares of the elements are out of range."""
    factors = jnp.asarray(np.resize(sizes, steps), dtype)

    def loss(x):
        def step(carry, factor):
            with jax.named_scope("made"):
                y = x * carry
            return carry, (y * factor).astype(x.dtype)

        ys = jax.lax.scan(step, jnp.ones((), dtype), factors)[1]
        return jnp.sum(jnp.real(ys).astype(jnp.float32))

    norm = norm_in_scope("made", loss, jnp.zeros(width, dtype))
    exact = np.abs(np.asarray(factors).astype(complex))
    assert norm == pytest.approx(np.sqrt(width * np.sum(exact**2)), rel=1e-5)


@LOOPS
def test_a_cotangent_in_a_loop_has_the_norm_that_jax_computes(steps, width):
    def loss(w, added):
        def step(h, added):
            with jax.named_scope("step"):
                h = jnp.reshape(jnp.tanh(h * w)[None], -1)
            return h + added, None

        return jnp.sum(jax.lax.scan(step, jnp.ones(width), added)[0] ** 2)

    w, added = jnp.linspace(0.1, 0.9, width), jnp.zeros((steps, width))
    expected = np.linalg.norm(jax.grad(loss, 1)(w, added).astype(float))
    assert norm_in_scope("step", loss, w, added) == pytest.approx(expected, rel=1e-5)


def test_a_cotangent_in_a_loop_in_a_loop_has_the_norm_that_jax_computes():
    def loss(w, added):
        def inner(h, added):
            with jax.named_scope("inner"):
                h = jnp.sin(h * w)
            return h + added, None

        def outer(h, added):
            return jax.lax.scan(inner, jnp.cos(h), added)[0], None

        return jnp.sum(jax.lax.scan(outer, jnp.ones(2), added)[0])

    w, added = jnp.array([0.7, 1.3]), jnp.zeros((4, 3, 2))
    expected = np.linalg.norm(jax.grad(loss, 1)(w, added))
    assert norm_in_scope("inner", loss, w, added) == pytest.approx(expected, rel=1e-5)


# Both in the loop and after it: an Inf in one step, and a NaN in another.
@LOOPS
def test_a_nan_in_a_loop_is_told_with_its_step_and_the_operands_there(steps, width):
    def loss(w, added):
        def step(h, x):
            return h * w + jnp.sqrt(x), None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(width), added)[0])

    w, added = jnp.full(width, 0.5), jnp.ones((steps, width)).at[2, 1].set(0.0)
    explanation = tg.explain(loss, w, added, wrt=(0, 1))
    (finding,) = explanation.problems
    assert (finding.operation, finding.step, finding.operands) == ("sqrt", 2, (0.0,))
    assert explanation["added"].infs == 1
