"""What a program adds to a linear function of some of its inputs.

A derivative does not see it: a gradient function ``lambda dy: dy + 1``, or one that forgets ``dy``,
would pass for linear. Zeros are known by structure: those that are written into the program, and
what is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import jax
import numpy as np

from tracegrad.ir import Graph, Literal, Node, Occurrence, Value, operations
from tracegrad.ir.occurrence import Path, at


class Part(Enum):
    """What a value is, as a function of the inputs that are marked linear."""

    ZERO = "zero whatever they are"
    CONSTANT = "independent of them"
    LINEAR = "dependent on them"


def constant_part(graph: Graph, inputs: Sequence[Part]) -> str | None:
    """What a graph adds to, or returns instead of, a linear function of its linear inputs.

    Returns words that name it and its line; None if there is nothing.
    """
    found: list[str] = []
    outs = _parts(graph, inputs, found, ())
    if not found and Part.CONSTANT in outs:
        return f"result {outs.index(Part.CONSTANT)} does not depend on it"
    return found[0] if found else None


def zero_outputs(graph: Graph) -> list[bool]:
    """Which outputs of a graph are zeros by structure."""
    outs = _parts(graph, [Part.CONSTANT] * len(graph.inputs), [], ())
    return [part is Part.ZERO for part in outs]


def _parts(graph: Graph, inputs: Sequence[Part], found: list[str], path: Path) -> list[Part]:
    parts: dict[Value, Part] = dict(zip(graph.inputs, inputs, strict=True))
    parts.update((value, _of_array(array)) for value, array in graph.constants.items())

    def part_of(value: Value | Literal) -> Part:
        return parts[value] if isinstance(value, Value) else _of_array(value.value)

    for node in graph.nodes:
        results = _through(node, [part_of(value) for value in node.inputs], found, path)
        parts.update(zip(node.outputs, results, strict=True))
    return [part_of(value) for value in graph.outputs]


def _through(node: Node, ins: list[Part], found: list[str], path: Path) -> list[Part]:
    if node.op == "jit":
        return _parts(node.regions["jaxpr"], ins, found, (*path, (node, "jaxpr")))
    whole = Part.LINEAR if Part.LINEAR in ins else Part.CONSTANT
    if node.op == "select_n":
        summands = ins[1:]
    elif node.op in operations.ADDITIVE:
        places = operations.ADDITIVE[node.op]
        summands = ins if places is None else [ins[i] for i in places]
    else:
        is_zero = (node.op in operations.PRODUCTS and Part.ZERO in ins) or (
            node.op in operations.LINEAR and ins[0] is Part.ZERO
        )
        return [Part.ZERO if is_zero else whole] * len(node.outputs)
    if Part.LINEAR in summands and Part.CONSTANT in summands:
        origin = Occurrence(path, node).origin
        found.append(f"{node.op}{at(origin)} adds a constant to it")
    zero = all(part is Part.ZERO for part in summands)
    return [Part.ZERO if zero else whole] * len(node.outputs)


def _of_array(array: Any) -> Part:
    if isinstance(array, jax.core.Tracer) or not _is_number(array):
        return Part.CONSTANT
    return Part.CONSTANT if np.any(np.asarray(array)) else Part.ZERO


def _is_number(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    return dtype is None or jax.numpy.issubdtype(dtype, np.number)
