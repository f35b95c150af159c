"""Compares the derivatives of a function with finite differences, by random directions.

A comparison is of two functions of the same leaves: the differences are those of one, and JAX
differentiates the other. For a whole program the two are the same; for a custom rule, they are the
rule's function and the rule. Each check takes a random direction in the leaves, and weights the
results by random numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.forward import jvp
from tracegrad.insight.bounded import bounded
from tracegrad.insight.comparisons import Checked
from tracegrad.insight.finite_differences import (
    Function,
    Limits,
    Numbers,
    Weighed,
    along_smooth,
    beside,
    difference,
    judge,
    random_like,
    status_of,
    weighed,
)
from tracegrad.tracing.rule_errors import words_of


class Comparison:
    """Derivatives of `derived` beside differences of `exact`, which has equal results.

    Args:
      leaves: the point of the comparison, in double precision; both functions take a list of them.
      names: the names of the leaves in the report.
      limits: how far numbers may differ.
      random: a random generator of NumPy.
      whole: if it is not empty, forward mode takes all leaves at once, under this name. Reverse
        mode takes them one by one, and so names the one that is wrong.
      before: the modes that gave the functions, if these are derivatives themselves.
      begin: reports each step as progress.
    """

    def __init__(
        self,
        exact: Function,
        derived: Function,
        leaves: Sequence[Any],
        names: Sequence[str],
        limits: Limits,
        random: Any,
        *,
        whole: str = "",
        before: tuple[str, ...] = (),
        begin: Callable[[str], None] = lambda step: None,
    ):
        self._leaves, self._names, self._limits, self._random = leaves, names, limits, random
        self._whole, self._before, self._begin = whole, before, begin
        self._weights = random_like(random, jax.eval_shape(exact, leaves))
        self._flowing = [i for i, weight in enumerate(self._weights) if weight is not None]
        self._exact, self._derived = bounded(exact, leaves), derived
        apart = {name: [i] for i, name in enumerate(names)}
        self._groups = {"rev": apart, "fwd": {whole: [*range(len(names))]} if whole else apart}

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
        for i, direction in enumerate(random_like(self._random, self._leaves)):
            self._begin(" of ".join((f"differences along {self._names[i]}", *self._before)))
            expected.append(
                along_smooth(
                    self._exact,
                    self._leaves,
                    i,
                    direction,
                    self._weights,
                    self._limits,
                    self._random,
                )
            )
        self._directions = [estimate.direction for estimate in expected]
        level = len(self._before) + 1
        for mode in modes:
            modes_so_far = (mode, *self._before)
            name = " of ".join(modes_so_far)
            self._begin(name)
            function = self._backward if mode == "rev" else self._forward
            derivative = jax.jit(function)
            try:
                found = derivative(self._leaves)
            except Exception as error:
                status, note = status_of(error), words(error)
                for what in [self._whole] if self._whole else self._names:
                    yield Checked(what, level, name, math.nan, math.nan, status, note=note)
                continue
            for what, group in self._groups[mode].items():
                wants, number = [expected[i] for i in group], self._number(mode, found, what)
                nearby = functools.partial(self._nearby, mode, derivative, what)
                status = judge(wants, number, self._limits, nearby)
                total = sum(want.value for want in wants)
                yield Checked(what, level, name, total, number.value, status)
            if level < order:
                higher = Comparison(
                    function,
                    function,
                    self._leaves,
                    self._names,
                    self._limits,
                    self._random,
                    whole=self._whole,
                    before=modes_so_far,
                    begin=self._begin,
                )
                yield from higher.checks(modes, order)

    def _of_flowing(self, given: Sequence[Any]) -> list[Any]:
        outs = self._derived(given)
        return [outs[i] for i in self._flowing]

    def _backward(self, given: Sequence[Any]) -> list[Any]:
        """Returns the gradient of the weighted results, by leaf."""
        outs, vjp = _jax.vjp(self._of_flowing, list(given))
        weights = [self._weights[i] for i in self._flowing]
        return list(vjp(list(map(_as_type_of, outs, weights)))[0])

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
        weights = [self._weights[i] for i in self._flowing]
        return weighed(found[k * len(weights) : (k + 1) * len(weights)], weights)

    def _nearby(self, mode: str, derivative: Function, what: str) -> Numbers:
        """Returns the derivatives by differences and by JAX, a few roundings away."""
        there = beside(self._leaves, self._limits, self._random)
        wants = [
            difference(self._exact, there, i, self._directions[i], self._weights, self._limits)
            for i in self._groups[mode][what]
        ]
        return wants, self._number(mode, derivative(there), what)


def _as_type_of(value: Any, numbers: Any) -> Any:
    """Returns numbers as an array with the dtype of `value`, sharded over an explicit mesh as
    `value` is."""
    return jnp.zeros_like(value) + jnp.asarray(numbers, value.dtype)
