"""Exports the programs of a function and of its derivatives with `jax.export`.

The function's program takes its arguments and the values of Variables, and returns its result and
new values of Variables. A gradient program takes the same operands, flat, and the cotangents of
*some* results; it returns the gradients of the operands on which these results depend. Each float
result has a gradient program of its own, in which other results do not contribute (an infinite
derivative of another result would make NaN); and one program has the gradients of all float results
together. New values of Variables have no cotangents.

When JAX differentiates one program to make the next, it calls the user's custom gradients. A
function with custom gradients has another program for its results under differentiation: this
`value` program runs the forward passes of the custom gradients. The file also has the `value`
program and its gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export

from tracegrad import _jax
from tracegrad.differentiation.connectivity import connections
from tracegrad.ir import CustomGradient, Graph, Occurrence
from tracegrad.ir.dependence import leading_to
from tracegrad.saving import outside_calls, refusals
from tracegrad.saving.file import sha256
from tracegrad.saving.manifest import OWN, Gradient, Program
from tracegrad.saving.source import ExportedFunction

MAX_SINGLE = 16
"""How many results, over all gradients of one order, may get a gradient program each."""
_MAX_SINGLE_BYTES = 16 << 20  # the same for the bytes of these gradient programs together

_LOCATION = re.compile(r' loc\((#loc\d*|unknown|"[^"]*")\)')


@dataclass
class Programs:
    """The programs of one function, without duplicates.

    Attributes:
      order: how many times the function can be differentiated.
      contents: the programs as bytes, by the names of their arrays.
      calls: the targets of the custom calls of each program, by the same names.
    """

    name: str
    order: int
    platforms: Sequence[str] | None
    contents: dict[str, bytes] = field(default_factory=dict)
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _names: dict[Any, str] = field(default_factory=dict)  # by `_identify_program`
    _finds_duplicates: bool = False

    def write(self, source: ExportedFunction, order: int = 0, width: int = 1) -> Program:
        """Exports a program and, below `self.order`, its gradient programs. There are `width`
        gradient programs of this order.

        Raises ValueError if an operation cannot be written, or cannot be differentiated in reverse
        mode; the message names the node and its line.
        """
        if order == self.order:
            return Program(self._export(source, order)[0])
        rules = [each for each in source.graph.walk() if isinstance(each.node, CustomGradient)]
        has_rules = _are_live(rules, source.graph)
        self._finds_duplicates |= has_rules
        array, size = self._export(source, order)
        active = _differentiable_positions(source.avals)
        gradients = self._export_gradients(source, active, size, order, width)
        value = None
        if has_rules and active:
            value = self.write(source.value(active), order + 1, width)
        may_add = all(getattr(rule.node, "kind", "") != "vjp" for rule in rules)
        return Program(array, gradients, value, may_add)

    def _export_gradients(
        self, source: ExportedFunction, active: Sequence[int], size: int, order: int, width: int
    ) -> tuple[Gradient, ...]:
        connected = [set(inputs).intersection(active) for inputs in connections(source.graph)]
        flowing = [
            j
            for j in _differentiable_positions(source.graph.out_avals[: source.count])
            if connected[j]
        ]
        choices: list[tuple[int, ...]] = [(j,) for j in flowing]
        if width * len(flowing) > MAX_SINGLE or size * len(flowing) > _MAX_SINGLE_BYTES:
            choices = []
        if flowing and len(choices) != 1:
            choices.append(tuple(flowing))
        gradients = []
        for results in choices:
            operands = tuple(sorted(set().union(*(connected[j] for j in results))))
            program = self.write(
                source.gradient(operands, results), order + 1, width * len(choices)
            )
            gradients.append(Gradient(results, operands, program))
        return tuple(gradients)

    def _export(self, source: ExportedFunction, order: int) -> tuple[str, int]:
        """Returns the name of the program's array, and the program's size in bytes."""
        is_last = order == self.order
        what = f"the derivative of order {order} of {self.name}" if order else self.name
        try:
            exported = refusals.exported(*_function_to_export(source, is_last), self.platforms)
            contents, calls = bytes(exported.serialize(vjp_order=0)), _jax.outside_calls(exported)
            if exported.ordered_effects or exported.unordered_effects:
                raise ValueError("it has effects")
        except Exception as error:
            why = refusals.reason(source, what, order, self.platforms, error)
            if why is None:
                raise
            raise ValueError(why) from error
        if (unknown := outside_calls.unknown(calls)) is not None:
            raise ValueError(
                f"{what} cannot be saved: it calls {unknown!r} by a custom call of XLA, and this "
                "version of tracegrad would refuse to load a call of this name"
            )
        self.platforms = exported.platforms
        name = f"{OWN}program/{sha256(contents)[:16]}"
        if self._finds_duplicates:
            name = self._names.setdefault(_identify_program(exported), name)
        if name not in self.contents:
            self.contents[name], self.calls[name] = contents, tuple(calls)
        return name, len(contents)


def _function_to_export(
    source: ExportedFunction, is_last: bool
) -> tuple[Callable[..., Any], list[Any]]:
    """Returns the function to export, and the types of its arguments: of the saved function, the
    user's pytrees. Below the last order, the function runs the graph, because the gradients need
    the same graph."""
    types: list[Any] = list(map(_jax.without_devices, source.avals))
    if source.above is None:
        arguments: Any = jax.tree.structure(tuple(source.arguments.values()))
        types = [
            jax.tree.unflatten(arguments, types[: arguments.num_leaves]),
            types[arguments.num_leaves :],
        ]

    def program(*args: Any) -> Any:
        operands = jax.tree.leaves(args)
        results = source.fun(*operands) if is_last else source.run(operands)
        if source.above is not None:
            return results
        structure = jax.tree.structure(source.result)
        return jax.tree.unflatten(structure, results[: source.count]), results[source.count :]

    program.__name__ = program.__qualname__ = source.name
    return program, types


def _differentiable_positions(avals: Sequence[Any]) -> list[int]:
    return [i for i, aval in enumerate(avals) if _jax.has_gradient(aval)]


def _identify_program(exported: Any) -> tuple[Any, ...]:
    """Returns a key that equal programs share: the text without source lines, the types of the flat
    arguments, and the used arguments. (The text has the used arguments only, so programs with the
    same text may use different arguments.)"""
    lines = (line for line in exported.mlir_module().splitlines() if not line.startswith("#loc"))
    text = _LOCATION.sub("", "\n".join(lines))
    return text, str(exported.in_avals), exported.module_kept_var_idx


def _are_live(rules: Sequence[Occurrence], graph: Graph) -> bool:
    """Whether a result depends on one of these operations."""
    live = leading_to(graph, [True] * len(graph.outputs)) if rules else set()
    return any(not live.isdisjoint(rule.steps[0].outputs) for rule in rules)
