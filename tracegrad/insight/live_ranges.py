"""What a program holds while it runs: for each value the moments at which it is alive.

The program is run as it is written, from its first operation to its last; a view is not written,
nor is what is computed element by element for one reader that does so too. Arguments are there all
the time. A loop, a branch and a recomputed part hold what is inside of them as well, at its peak.
What waits in the host's memory is not held by a device that has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracegrad import _jax
from tracegrad._jax.spans import alive
from tracegrad.insight.peak import Held, Peak, scope_of, told
from tracegrad.ir import Graph, Node, Occurrence, Value, operations
from tracegrad.ir.occurrence import Path
from tracegrad.ir.scopes import is_backward
from tracegrad.planning.costs import is_by_element, nbytes, nbytes_anywhere
from tracegrad.planning.flatten import flatten


def find_peak(graph: Graph, path: Path = (), *, is_host: bool = True) -> Peak:
    """The peak of a program; `path`: the calls that lead to it; `is_host`: whether the device has
    no memory but the host's."""
    program = flatten(graph)
    ranges = _Ranges(program, path, nbytes_anywhere if is_host else nbytes)
    inside: dict[Node, Peak] = {}
    for node in program.nodes:
        peaks = [
            find_peak(region, Occurrence(path, node).into(name), is_host=is_host)
            for name, region in node.regions.items()
            if node not in ranges.inlined
        ]
        if peaks:
            inside[node] = max(peaks, key=lambda peak: peak.size)
    timeline = [
        size + (inside[node].size if node in inside else 0)
        for node, size in zip(program.nodes, ranges.sizes, strict=True)
    ]
    if not timeline:
        return Peak(program, "", ranges.held(0), (ranges.size_given,))
    moment = max(range(len(timeline)), key=timeline.__getitem__)
    node = program.nodes[moment]
    at, held = _told(Occurrence(path, node)), ranges.held(moment)
    if node in inside:
        at, held = inside[node].at or at, held + inside[node].held
    return Peak(program, at, held, tuple(timeline))


class _Ranges:
    """From which operation to which each buffer of a program is alive.

    `path`: the calls that lead to it; what is given to a region is held outside of it.
    """

    def __init__(self, program: Graph, path: Path, nbytes: Callable[[Any], int]):
        self.program = program
        self.path = path
        self.nbytes = nbytes
        self.inlined = _inlined(program)
        self.first: dict[Value, int] = {}
        self.last: dict[Value, int] = {}
        self.readers: dict[Value, list[tuple[int, Node]]] = {}
        self.results: set[Value] = set()
        given = (*program.inputs, *program.constants)
        self.given = () if path else given
        self.size_given = sum(nbytes(v.aval) for v in self.given)
        roots: dict[Value, tuple[Value, ...]] = {v: (v,) for v in given}
        for i, node in enumerate(program.nodes):
            operands = node.operands
            read = tuple(dict.fromkeys(root for v in operands for root in roots[v]))
            for root in read if node not in self.inlined else ():
                self.last[root] = i
                self.readers.setdefault(root, []).append((i, node))
            for value in node.outputs:
                roots[value] = read if node in self.inlined else (value,)
                self.first[value] = self.last[value] = i
        end = len(program.nodes)
        for output in program.outputs:
            for root in roots[output] if isinstance(output, Value) else ():
                self.results.add(root)
                self.last[root] = end
        self._dying: dict[int, list[Value]] = {}  # by the operation that reads them last
        for value, first in self.first.items():
            if program.producers[value] not in self.inlined and first < self.last[value]:
                self._dying.setdefault(self.last[value], []).append(value)
        self.sizes = [self.size_given + size for size in self._buffers(end)]

    def _buffers(self, end: int) -> list[int]:
        """Bytes of buffers at each operation."""
        spans = []
        for i, node in enumerate(self.program.nodes):
            for value in node.outputs if node not in self.inlined else ():
                spans.append((self.first[value], self.last[value], self.nbytes(value.aval)))
            for value in self._overwritten(i, node):
                spans.append((i, i, -self.nbytes(value.aval)))
        return alive(spans, end)

    def _overwritten(self, moment: int, node: Node) -> list[Value]:
        """What an element-wise operation writes its result over: a buffer that it reads last."""
        if node in self.inlined or node.op not in operations.CHEAP | operations.COSTLY:
            return []
        size = self.nbytes(node.outputs[0].aval)
        return [v for v in self._dying.get(moment, ()) if self.nbytes(v.aval) == size][:1]

    def held(self, moment: int) -> tuple[Held, ...]:
        nodes = self.program.nodes
        over = self._overwritten(moment, nodes[moment]) if nodes else []
        alive = [
            value
            for value, first in self.first.items()
            if first <= moment <= self.last[value] and value not in over
            if self.program.producers[value] not in self.inlined
        ]
        return tuple(self._held(value, moment) for value in (*self.given, *alive))

    def _held(self, value: Value, moment: int) -> Held:
        made = self.program.producers.get(value)
        later = [node for i, node in self.readers.get(value, ()) if i >= moment]
        back = list(filter(is_backward, later))
        if made is None or not is_backward(made):
            later = back or later
        kept_for = _told(Occurrence(self.path, later[0])) if later else ""
        size = self.nbytes(value.aval)
        text = _jax.type_text(value.aval)
        if made is None:
            kind = "constant" if value in self.program.constants else "argument"
            return Held(size, kind, text, "", "", kept_for, (0.0, 1.0), value, None, 1)
        kind = "activation"
        if value in self.results:
            kind, kept_for = "result", "what is returned"
        elif is_backward(made):
            kind = "gradient"
        elif back:
            kind = "residual"
        source, inner = _source(Occurrence(self.path, made), value)
        end = len(self.program.nodes)
        return Held(
            size=size,
            kind=kind,
            type=text,
            line=str(source.origin or source.node.op),
            scope=scope_of(source.scopes),
            kept_for=kept_for,
            alive=(self.first[value] / end, min(1.0, (self.last[value] + 1) / end)),
            value=value,
            source=source,
            times=max(1, size // max(1, self.nbytes(inner.aval))),
        )


def _told(made: Occurrence) -> str:
    return told(made.node.op, made.origin, is_backward=is_backward(made.node))


def _inlined(program: Graph) -> set[Node]:
    """What is computed inside of what reads it: views, and results by element with one reader that
    takes them element by element."""
    found: set[Node] = set()
    results = {value for value in program.outputs if isinstance(value, Value)}
    readers: dict[Value, set[Node]] = {}  # of a value or a view of it
    for node in reversed(program.nodes):
        own = set[Node]().union(*(readers.get(value, ()) for value in node.outputs))
        is_view, is_result = node.op in operations.VIEWS, not results.isdisjoint(node.outputs)
        into_one = len(own) == 1 and not is_result and is_by_element(node)
        if is_view or (into_one and all(map(_takes_elements, own))):
            found.add(node)
        operands = node.operands
        results.update(operands if is_view and is_result else ())
        for value in operands:
            readers.setdefault(value, set()).update(own if is_view else {node})
    return found


def _takes_elements(node: Node) -> bool:
    return is_by_element(node) or node.op in operations.REDUCTIONS


def _source(made: Occurrence, value: Value) -> tuple[Occurrence, Value]:
    """The operation that computes a value, inside of loops and recomputed parts; and its result."""
    while made.node.regions:
        name, region = next(iter(made.node.regions.items()))
        if len(region.outputs) != len(made.node.outputs):
            break
        inner = region.outputs[made.node.outputs.index(value)]
        if not isinstance(inner, Value) or inner not in region.producers:
            break
        made, value = Occurrence(made.into(name), region.producers[inner]), inner
    return made, value
