"""The statistics that `explain` computes inside of loops are those that NumPy computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegrad.insight.explaining.statistics import exact, norms

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
