"""Every primitive that JAX can run goes through a Graph unchanged, and so does its derivative.

A sample of JAX's own test programs, from every group; ``pytest -m slow`` runs all of them, and
``benchmarks/coverage.py`` prints them as a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from harnesses import REFUSED, check, harnesses, jitted, same_program, sample

GROUPS = harnesses()
SAMPLE = 5

# JAX's test programs bind primitives directly, and some in ways that JAX warns about.
pytestmark = [pytest.mark.both_jax, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def x64():
    """A third of the programs are in float64, complex128 or int64, which is f32 without this."""
    with jax.enable_x64(True):
        yield


# Whose sample JAX differentiates nowhere: what has no floats, or no derivative (see `REFUSED`).
WITHOUT_DERIVATIVE = """
    and argmax argmin clamp conj eq ge gt iota iota_2x32_shape is_finite le lt mul ne nextafter or
    population_count random_categorical random_randint random_split random_uniform reduce_and
    reduce_max reduce_min reduce_or reduce_window_mul regularized_incomplete_beta
    rng_bit_generator shift_left shift_right_arithmetic shift_right_logical xor
"""


@pytest.mark.parametrize(
    "count", [SAMPLE, pytest.param(None, marks=pytest.mark.slow)], ids=["sample", "all"]
)
@pytest.mark.parametrize("name", GROUPS)
def test_primitive_is_unchanged(name: str, count: int | None) -> None:
    group = GROUPS[name] if count is None else sample(GROUPS[name], count)
    outcomes = {h.fullname: check(h) for h in group}
    refused = [program for program, outcome in outcomes.items() if outcome == "jax cannot"]
    assert len(refused) <= REFUSED.get(name, 0), f"JAX cannot differentiate {refused}"
    # So that no derivative goes unnoticed, should JAX's collection change its form.
    assert "same" in outcomes.values() or name in WITHOUT_DERIVATIVE.split()
    if count is None:
        jax.clear_caches()  # thousands of programs use up a process's memory maps


def test_the_primitives_of_every_model_are_among_them() -> None:
    """So that none is left out unnoticed, should JAX's collection change its form."""
    expected = """
        add cholesky conv_general_dilated cumsum custom_linear_solve dot_general dynamic_slice
        dynamic_update_slice exp fft gather reduce_sum reduce_window_max scatter_add select_n
        sort tanh transpose triangular_solve
    """
    assert set(GROUPS) >= set(expected.split())


# Where two programs are the same to `same_program`, neither runs.


def is_same(ours: Callable[..., Any], theirs: Callable[..., Any], *args: Any) -> bool:
    return same_program(jitted(ours).lower(*args), jitted(theirs).lower(*args))


def test_a_program_is_the_same_under_another_name() -> None:
    def twice(x):
        return x * 2

    assert is_same(twice, lambda x: x * 2, 1.0)


@pytest.mark.parametrize(
    "other",
    [lambda x: x * 3, lambda x: 2 * x + 0, lambda x: (x * 2,), lambda x: x * np.float64(2)],
    ids=["a constant", "an operation", "a tree of results", "a weak type"],
)
def test_a_program_is_another_if_it_differs_in(other: Callable[..., Any]) -> None:
    assert not is_same(other, lambda x: x * 2, 1.0)


def test_no_program_that_calls_back_is_the_same_as_another() -> None:
    """The text does not say which function it calls."""

    def calling(fun):
        return lambda x: jax.pure_callback(fun, jax.ShapeDtypeStruct((), x.dtype), x)

    assert not is_same(calling(np.sin), calling(np.cos), np.float32(1))
