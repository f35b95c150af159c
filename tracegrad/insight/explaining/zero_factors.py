"""Which values are all zeros because inputs of the graph are, and because of which inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining.observed import inside
from tracegrad.insight.explaining.visits import is_called, is_entered
from tracegrad.ir import Atom, CustomGradient, Graph, Literal, Node, Occurrence, Value, operations
from tracegrad.ir.occurrence import Path
from tracegrad.ir.running import run_node

# The result is zero wherever the first operand is.
_OF_FIRST = operations.LINEAR | operations.VIEWS | {"div"}
_OF_ALL = operations.BY_ELEMENT | operations.ADDITIVE.keys()

# Of a value that is all zeros: the inputs because of which it is.
Because = frozenset[Value]


def zeros_because(graph: Graph, inputs: Sequence[Value]) -> dict[tuple[Path, Value], Because]:
    """The values that are all zeros because some inputs are, whatever the other inputs are.

    A value is known by the path to its region; of the steps of a scan those alone that all read.
    """
    found: dict[tuple[Path, Value], Because] = {}
    _spread(graph, (), {value: frozenset((value,)) for value in inputs}, found)
    return found


def _spread(
    graph: Graph,
    path: Path,
    given: Mapping[Value, Because],
    found: dict[tuple[Path, Value], Because],
) -> list[Because | None]:
    """Adds the values of a region; the result says it of the outputs."""
    zeros = dict(given)

    def because(value: Atom) -> Because | None:
        if isinstance(value, Literal):
            return None if np.any(value.val) else frozenset()
        return zeros.get(value)

    for node in graph.nodes:
        if is_entered(node):
            outs = _spread_into(Occurrence(path, node), zeros, found)
        else:
            outs = [_of_result(node, list(map(because, node.inputs)))] * len(node.outputs)
        zeros.update((v, out) for v, out in zip(node.outputs, outs, strict=True) if out)
    found.update(((path, value), behind) for value, behind in zeros.items())
    return list(map(because, graph.outputs))


def _spread_into(
    here: Occurrence, zeros: Mapping[Value, Because], found: dict[tuple[Path, Value], Because]
) -> Sequence[Because | None]:
    """Adds the values of a node's regions."""
    node = here.node
    given: dict[Path, dict[Value, Because]] = {here.into(name): {} for name in node.regions}
    carries = set()
    if node.primitive is _jax.SCAN:
        first, count = _jax.scan_split(node.params)
        carries = set(node.regions["jaxpr"].inputs[first : first + count])
    for operand in {v for v in node.inputs if isinstance(v, Value) and v in zeros}:
        for path, value in inside(here, operand):
            if value not in carries:
                given[path][value] = zeros[operand]
    for region, (path, inputs) in zip(node.regions.values(), given.items(), strict=True):
        outs = _spread(region, path, inputs, found)
        if is_called(node):
            return outs
    return [None] * len(node.outputs)


def _of_result(node: Node, operands: Sequence[Because | None]) -> Because | None:
    """Why the result of an operation is zero, of the same for its operands."""
    if node.op in operations.PRODUCTS:
        return next(filter(None, operands), None)
    if node.op in _OF_FIRST:
        return operands[0]
    if node.op == "select_n":
        operands = operands[1:]
    known = [behind for behind in operands if behind is not None]
    if len(known) < len(operands) or not any(known):
        return None
    together = frozenset[Value]().union(*known)
    return together if node.op == "select_n" or _keeps_zero(node) else None


def _keeps_zero(node: Node) -> bool:
    """Whether an operation of zeros alone is zero."""
    if node.effects or not (isinstance(node, CustomGradient) or node.op in _OF_ALL):
        return False
    operands = [
        v.val if isinstance(v, Literal) else jnp.zeros(v.aval.shape, v.aval.dtype)
        for v in node.inputs
    ]
    return not any(bool(jnp.any(result)) for result in run_node(node, operands))
