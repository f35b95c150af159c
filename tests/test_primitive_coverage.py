"""Every primitive that JAX can run goes through a Graph unchanged, and so does its derivative.

A sample of JAX's own test programs, from every group; ``pytest -m slow`` runs all of them, and
``benchmarks/coverage.py`` prints them as a table.
"""

from __future__ import annotations

import jax
import pytest
from harnesses import REFUSED, Harness, check, differentiable, harnesses, sample

GROUPS = harnesses()
SAMPLE = 5

# JAX's test programs bind primitives directly, and some in ways that JAX warns about.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def x64():
    """A third of the programs are in float64, complex128 or int64, which is f32 without this."""
    with jax.enable_x64(True):
        yield


def assert_group_is_unchanged(name: str, group: list[Harness]) -> None:
    refused = [h.fullname for h in group if check(h) == "jax cannot"]
    assert len(refused) <= REFUSED.get(name, 0), f"JAX cannot differentiate {refused}"


@pytest.mark.parametrize("name", GROUPS)
def test_primitive_is_unchanged(name: str) -> None:
    assert_group_is_unchanged(name, sample(GROUPS[name], SAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_primitive_is_unchanged_in_every_program(name: str) -> None:
    assert_group_is_unchanged(name, GROUPS[name])
    jax.clear_caches()  # thousands of compiled programs use up a process's memory maps


def test_sample_is_of_every_group_and_mostly_differentiated() -> None:
    """So that nothing is skipped unnoticed, should JAX's collection change its form."""
    programs = [h for group in GROUPS.values() for h in sample(group, SAMPLE)]
    assert len(GROUPS) >= 130
    assert len(programs) >= 580
    outcomes = [differentiable(harness) for harness in programs]
    assert outcomes.count("same") >= 300
    assert outcomes.count("jax cannot") <= 40
