"""What holds for a training program of a framework when ``tg.trace`` compiles its steps.

A program is a function ``run(compiled, edit)``, written as its framework's documentation writes it.
It compiles its train step with ``compiled``, the framework's own jit or ``tg.trace``, trains for
five steps, and returns all that came of it: parameters, statistics, the optimizer's state, random
numbers, metrics. ``edit`` stands in its model, by hand, at the place that the program's rule
selects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.planning import BudgetTooSmall

Edit = Callable[[jax.Array], jax.Array]
STEPS = 5
LIMIT = 1e-3  # of a gradient: less than what arrives in each of the programs


def unedited(x: jax.Array) -> jax.Array:
    return x


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """What ``clip_gradient(..., max_value=LIMIT)`` does, as one writes it into a model."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, dy: (jnp.clip(dy, -LIMIT, LIMIT),))


@dataclass(frozen=True)
class Program:
    """``rule`` edits the model's gradient from outside as ``by_hand`` does inside of it."""

    run: Callable[[Callable[..., Any], Edit], Any]
    jit: Callable[..., Any]
    rule: Any
    by_hand: Edit
    budget: str = "60%"
    mark: str = ""  # or "slow"
    no_plan: str = ""  # why there is none within the budget


def each(*programs: Program) -> pytest.MarkDecorator:
    """For the test of a framework."""
    marked = []
    for p in programs:
        marks = [getattr(pytest.mark, p.mark)] if p.mark else []
        if p.no_plan:
            marks.append(pytest.mark.xfail(reason=p.no_plan, raises=BudgetTooSmall, strict=True))
        marked.append(pytest.param(p, marks=marks, id=p.run.__name__))
    return pytest.mark.parametrize("program", marked)


def arrays(result: Any) -> list[np.ndarray]:
    """All of them, with random keys as the numbers in them."""
    found = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array | np.ndarray)]
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in found
    ]


def assert_same(result: Any, expected: Any) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for got, wanted in zip(arrays(result), arrays(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def differ(result: Any, other: Any) -> bool:
    """More than roundings do."""
    pairs = zip(arrays(result), arrays(other), strict=True)
    return any(not np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)


class Looked:
    """Compiles a program's step with ``tg.trace``, and keeps it to be looked at."""

    def __init__(self, **options: Any):
        self.options, self.calls = options, {}

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        traced = tg.trace(step, **self.options)

        def call(*args: Any) -> Any:
            self.calls[traced] = args
            return traced(*args)

        return call

    def barriers(self) -> int:
        """What is recomputed is behind one, lest XLA finds out that it has been computed."""
        programs = [traced.lower(*args) for traced, args in self.calls.items()]
        return sum(program.as_text().count("optimization_barrier") for program in programs)

    def check_memory(self) -> None:
        """`tg.memory` has what XLA says, and knows what most of it is."""
        for traced, args in self.calls.items():
            report, stats = (
                tg.memory(traced, *args),
                traced.lower(*args).compile().memory_analysis(),
            )
            given = stats.argument_size_in_bytes + stats.output_size_in_bytes
            total = stats.temp_size_in_bytes + given - stats.alias_size_in_bytes
            assert report.measured_on
            assert report.total == total
            named = (each for each in report.lines if each.line or each.kind == "argument")
            assert 0.85 * total <= sum(each.size for each in named) <= report.listed <= total


def check(program: Program) -> None:
    """As it stands, under a rule, within a budget; and what holds its memory."""
    expected = program.run(program.jit, unedited)
    plain, fitted = Looked(), Looked(memory_budget=program.budget)
    assert_same(program.run(plain, unedited), expected)
    plain.check_memory()
    assert_same(program.run(fitted, unedited), expected)
    assert fitted.barriers() > plain.barriers()

    edited = program.run(program.jit, program.by_hand)
    assert differ(edited, expected)
    assert_same(program.run(partial(tg.trace, rules=[program.rule]), unedited), edited)
