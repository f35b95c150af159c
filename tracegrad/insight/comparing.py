"""Compares the derivatives of a function with finite differences, by random directions.

A comparison takes two functions of the same leaves: differences of one function, and JAX's
derivative of the other. For a whole program the two are the same; for a custom rule, they are the
rule's function and the rule. Each check takes a random direction in the leaves, and weights the
results by random numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.forward import jvp
from tracegrad.insight.comparisons import Checked
from tracegrad.insight.finite_differences import (
    Differences,
    Function,
    Limits,
    Numbers,
    Weighed,
    judge,
    nearby_point,
    random_like,
    status_of,
    weighed,
)
from tracegrad.tracing.rule_errors import words_of


@dataclass
class Comparison:
    """Derivatives of `derived` beside differences of `exact`, which has equal results.

    Attributes:
      leaves: the point of the comparison, in double precision; both functions take a list of them.
      names: the names of the leaves in the report.
      limits: how far numbers may differ.
      random: a random generator of NumPy.
      whole: the name of all leaves together. With a name, forward mode checks all leaves at once,
        under this name; with "", it checks each leaf, as reverse mode always does.
      before: the modes that gave the functions, if these are derivatives themselves.
      begin: reports each step as progress.
    """

    exact: Function
    derived: Function
    leaves: Sequence[Any]
    names: Sequence[str]
    limits: Limits
    random: Any
    whole: str = ""
    before: tuple[str, ...] = ()
    begin: Callable[[str], None] = lambda step: None

    def __post_init__(self) -> None:
        weights = random_like(self.random, jax.eval_shape(self.exact, self.leaves))
        self._differences = Differences(jax.jit(self.exact), weights, self.limits)
        self._flowing = [i for i, weight in enumerate(weights) if weight is not None]
        self._weights = [weights[i] for i in self._flowing]
        apart = {name: [i] for i, name in enumerate(self.names)}
        together = {self.whole: [*range(len(self.names))]}
        self._groups = {"rev": apart, "fwd": together if self.whole else apart}

    def checks(
        self,
        modes: Sequence[str],
        order: int = 1,
        words: Callable[[Exception], str] = words_of,
    ) -> Iterator[Checked]:
        """Yields the checks of the derivatives in some modes, then those of the derivatives of
        each derivative, up to `order`. `words` describes the error of a derivative that fails."""
        if not self._flowing:
            return
        expected = []
        for i, direction in enumerate(random_like(self.random, self.leaves)):
            self.begin(" of ".join((f"differences along {self.names[i]}", *self.before)))
            expected.append(self._differences.along_smooth(self.leaves, i, direction, self.random))
        self._directions = [estimate.direction for estimate in expected]
        level = len(self.before) + 1
        for mode in modes:
            modes_so_far = (mode, *self.before)
            name = " of ".join(modes_so_far)
            self.begin(name)
            function = self._backward if mode == "rev" else self._forward
            derivative = jax.jit(function)
            try:
                found = derivative(self.leaves)
            except Exception as error:
                status, note = status_of(error), words(error)
                for what in [self.whole] if self.whole else self.names:
                    yield Checked(what, level, name, math.nan, math.nan, status, note=note)
                continue
            for what, group in self._groups[mode].items():
                wants, number = [expected[i] for i in group], self._number(mode, found, what)
                nearby = functools.partial(self._nearby, mode, derivative, what)
                status = judge(wants, number, self.limits, nearby)
                total = sum(want.value for want in wants)
                yield Checked(what, level, name, total, number.value, status)
            if level < order:
                higher = dataclasses.replace(
                    self, exact=function, derived=function, before=modes_so_far
                )
                yield from higher.checks(modes, order)

    def _of_flowing(self, given: Sequence[Any]) -> list[Any]:
        outs = self.derived(given)
        return [outs[i] for i in self._flowing]

    def _backward(self, given: Sequence[Any]) -> list[Any]:
        """Returns the gradient of the weighted results, by leaf."""
        outs, vjp = _jax.vjp(self._of_flowing, list(given))
        return list(vjp(list(map(_as_type_of, outs, self._weights)))[0])

    def _forward(self, given: Sequence[Any]) -> list[Any]:
        """Returns the tangents of the results, for each group of leaves that move together."""
        primal, found = [jnp.asarray(leaf) for leaf in given], []
        for group in self._groups["fwd"].values():
            moves = [d if i in group else 0 for i, d in enumerate(self._directions)]
            tangents = list(map(_as_type_of, primal, moves))
            found += jvp(self._of_flowing, (primal,), (tangents,))[1]
        return found

    def _number(self, mode: str, found: Sequence[Any], what: str) -> Weighed:
        """Returns the derivative along the directions of one group of leaves."""
        k = list(self._groups[mode]).index(what)
        if mode == "rev":
            return weighed([found[k]], [self._directions[k]])
        weights = self._weights
        return weighed(found[k * len(weights) : (k + 1) * len(weights)], weights)

    def _nearby(self, mode: str, derivative: Function, what: str) -> Numbers:
        """Returns the derivatives by differences and by JAX, a few roundings away."""
        there = nearby_point(self.leaves, self.limits, self.random)
        wants = [
            self._differences.along(there, i, self._directions[i]) for i in self._groups[mode][what]
        ]
        return wants, self._number(mode, derivative(there), what)


def _as_type_of(value: Any, numbers: Any) -> Any:
    """Returns numbers as an array with the dtype of `value`, sharded over an explicit mesh as
    `value` is."""
    return jnp.zeros_like(value) + jnp.asarray(numbers, value.dtype)
