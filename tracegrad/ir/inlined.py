"""Follows values across the borders of regions, and views a program with its calls inlined.

A region can be called from several places, and its values differ between the calls. So a value of
the inlined program is a value and the path of calls that leads to it. Only `region_calls` maps the
operands of a node to inputs of its regions, and the outputs of its regions to results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tracegrad import _jax
from tracegrad.ir.nodes import Atom, CustomGradient, Node, Recompute, Value
from tracegrad.ir.occurrence import Occurrence, Path

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph

# Primitives that run one program on their operands, unchanged.
_CALLS = frozenset({"jit", "closed_call", "core_call", "shard_map"})


@dataclass(frozen=True)
class RegionCall:
    """One call of a region by a node.

    Attributes:
      operands: for each input the position of the operand that enters it (in a loop, at the first
        step).
      results: for each output the position of the result that it becomes (in a loop, after the last
        step). None: the output decides whether the loop goes on.
      fed_back_from: for each input the position of the output of the loop's body that enters it at
        each further step. None: the operand enters it at each step.
      sliced: the number of inputs, from the end, that are slices of their operands.
    """

    name: str
    operands: Sequence[int]
    results: Sequence[int | None]
    fed_back_from: Sequence[int | None]
    sliced: int = 0


def region_calls(node: Node) -> list[RegionCall]:
    """Returns the calls of a node's regions, for a loop in the order of execution; [] if only JAX
    knows how the node runs its regions. A custom gradient calls its primal region."""
    ins, outs, params = range(len(node.inputs)), range(len(node.outputs)), node.params
    none: list[int | None] = [None] * len(ins)
    if node.primitive is _jax.SCAN:
        constants, carried = _jax.scan_split(params)
        sliced = len(ins) - constants - carried
        fed_back_from = [*none[:constants], *range(carried), *none[:sliced]]
        return [RegionCall("jaxpr", ins, outs, fed_back_from, sliced)]
    if node.primitive in _jax.WHILES:
        conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
        carry = ins[conditions + bodies :]
        return [
            RegionCall(name, [*consts, *carry], results, [*none[: len(consts)], *range(len(carry))])
            for name, consts, results in (
                ("cond_jaxpr", ins[:conditions], [None]),
                ("body_jaxpr", ins[conditions : conditions + bodies], outs),
            )
        ]
    if node.primitive is _jax.COND:
        return [RegionCall(name, ins[1:], outs, none[1:]) for name in node.regions]
    if isinstance(node, Recompute | CustomGradient) or node.op in _CALLS:
        return [RegionCall(name, ins, outs, none) for name in node.regions]
    return []


def is_loop(node: Node) -> bool:
    return node.primitive is _jax.SCAN or node.primitive in _jax.WHILES


def may_take_no_step(node: Node) -> bool:
    """Whether a loop may take no step, and so return its inputs."""
    length = node.params.get("length", 0)
    return is_loop(node) and (not isinstance(length, int) or length == 0)


PlacedAtom = tuple[Path, Atom]  # a value of the inlined program, or a literal


def inside(call: Occurrence, value: Atom) -> Iterator[tuple[Path, Value]]:
    """Yields the inputs of a node's regions that an operand of the node enters."""
    for each in region_calls(call.node):
        for i, inner in zip(each.operands, call.node.region(each.name).inputs, strict=True):
            if call.node.inputs[i] is value:
                yield call.into(each.name), inner


def inside_result(call: Occurrence, result: Value, name: str) -> PlacedAtom:
    """Returns the output of a node's region that becomes a result of the node."""
    each = next(each for each in region_calls(call.node) if each.name == name)
    k = each.results.index(call.node.outputs.index(result))
    return call.into(name), call.node.region(name).outputs[k]


def outside(path: Path, value: Value) -> list[PlacedAtom]:
    """Returns the sources of a region's input: an operand and, in a loop, an output of the body.
    Returns [] for a value that is not an input, and for an input of a custom gradient's face."""
    call, name = path[-1]
    calls = region_calls(call)
    inputs = call.region(name).inputs
    each = next((each for each in calls if each.name == name), None)
    if each is None or value not in inputs:
        return []
    i = inputs.index(value)
    sources: list[PlacedAtom] = [(path[:-1], call.inputs[each.operands[i]])]
    if (k := each.fed_back_from[i]) is not None:
        body = calls[-1].name
        sources.append(((*path[:-1], (call, body)), call.region(body).outputs[k]))
    return sources


def onward(path: Path, value: Value) -> list[tuple[Path, Value]]:
    """Returns the destinations of a region's output: a result and, in a loop, inputs of the next
    step. Returns [] for a value that is not an output, and for an output of a custom gradient's
    face."""
    call, name = path[-1]
    calls = region_calls(call)
    destinations: list[tuple[Path, Value]] = []
    for each in calls:
        for k, out in enumerate(call.region(name).outputs if each.name == name else ()):
            if out is not value:
                continue
            if (result := each.results[k]) is not None:
                destinations.append((path[:-1], call.outputs[result]))
            for other in calls if each is calls[-1] else ():
                inputs = zip(call.region(other.name).inputs, other.fed_back_from, strict=True)
                there = (*path[:-1], (call, other.name))
                destinations += [(there, inner) for inner, j in inputs if j == k]
    return destinations


def _is_jit_call(path: Path, node: Node) -> bool:
    return node.primitive is _jax.JIT


class Inlined:
    """A view of a graph in which some of its calls are inlined.

    Args:
      graph: the graph. It is not copied, and its calls are inlined only on demand.
      opens: ``opens(path, node)`` says whether to inline a node, which calls one region once;
        default: the calls of jitted functions. A node that is not inlined counts as one operation.
    """

    def __init__(self, graph: Graph, opens: Callable[[Path, Node], bool] = _is_jit_call):
        self.graph, self._opens = graph, opens

    def region(self, path: Path) -> Graph:
        return path[-1][0].region(path[-1][1]) if path else self.graph

    def origin(self, path: Path, atom: Atom) -> PlacedAtom:
        """Follows a value through the borders of regions back to where it is defined: as the result
        of an operation, an input, a constant, or a literal."""
        while isinstance(atom, Value):
            region = self.region(path)
            node = region.producers.get(atom)
            if node is not None and self._opens(path, node):
                (call,) = region_calls(node)
                atom = node.region(call.name).outputs[call.results.index(node.outputs.index(atom))]
                path = (*path, (node, call.name))
            elif node is None and path and atom in region.inputs:
                enclosing, name = path[-1]
                call = next(each for each in region_calls(enclosing) if each.name == name)
                i = region.inputs.index(atom)
                if call.fed_back_from[i] is not None or i >= len(call.operands) - call.sliced:
                    break
                path, atom = path[:-1], enclosing.inputs[call.operands[i]]
            else:
                break
        return path, atom

    def made_by(self, path: Path, atom: Atom) -> Node | None:
        """Returns the operation that computes an `origin`; None if the origin is no result."""
        return self.region(path).producers.get(atom) if isinstance(atom, Value) else None

    @cached_property
    def steps(self) -> list[Occurrence]:
        """The operations in the order of execution, once for each inlined call of their region."""
        steps: list[Occurrence] = []
        self._visit((), steps)
        return steps

    def _visit(self, path: Path, steps: list[Occurrence]) -> None:
        """Appends the operations of a region."""
        for node in self.region(path).nodes:
            if self._opens(path, node):
                self._visit((*path, (node, region_calls(node)[0].name)), steps)
            else:
                steps.append(Occurrence(path, node))
