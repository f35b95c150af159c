"""Graph → serialised programs: the function itself, its gradient, the gradient of that, and so on.

A program takes the arguments and the values of Variables, flat, and returns the flat result and the
new values of Variables. Its gradient takes the same and a cotangent for each float result (none for
new values of Variables: assignment is not differentiated), and returns a gradient for each float
operand. Where zeros for a cotangent are another thing than none, it takes flags behind these.
Custom gradients act where JAX differentiates one program to make the next, so what is written is
what the function's own rules say, to that order.

Where JAX differentiates a function, its value too comes from another program: from the forward
pass of its rules, which is differentiated for a derivative of the second order and may have
another derivative than the rule. So a function with rules is written with that value, which has a
gradient of its own. Most often two of all these programs are the same, and written once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export

from tracegrad import _jax
from tracegrad._jax.packages import require
from tracegrad._jax.progress import progress
from tracegrad.differentiation.connectivity import connections
from tracegrad.differentiation.cotangent_flags import with_flags
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence
from tracegrad.ir.dependence import dependence, leading_to
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.lowering import evaluate
from tracegrad.saving import outside_calls
from tracegrad.saving.program_tree import ProgramTree, gets_gradient, has_cotangent
from tracegrad.tracing import rule_errors
from tracegrad.tracing.graphs import graph as trace_graph

# Arrays that a function closes over are written into each of its programs.
_LARGE_CONSTANTS = 16 << 20  # bytes

_LARGEST_COMPARED = 64 << 20  # bytes; of larger programs the text would take too much memory
_LOCATION = re.compile(r' loc\((#loc\d*|unknown|"[^"]*")\)')


@dataclass(frozen=True)
class Programs:
    """All programs of a function, what each calls outside, and how they belong together, by
    their positions."""

    contents: tuple[bytes, ...]
    calls: tuple[tuple[str, ...], ...]
    platforms: tuple[str, ...]
    tree: ProgramTree[int]


def export(
    graph: Graph, again: Callable[[], Graph], order: int, platforms: Sequence[str] | None
) -> Programs:
    """The programs of a function and of its derivatives.

    Args:
      graph: of the function.
      again: makes the same graph once more. (A rule that JAX has failed to differentiate it cannot
        differentiate again in the same program.)
      order: how many times it can be differentiated.
      platforms: as of `jax.export.export`; None: the one that JAX runs on.

    Raises:
      ValueError: part of the program cannot be written, or not differentiated in reverse; the
        message names the node and its line.
    """
    _warn_of_constants(graph, order + 1)
    with progress("save", order + 1) as begin:
        writer = _Writer(graph.name, platforms, begin)
        tree = writer.write(graph, again, len(graph.assigned), 0, order)
    return Programs(tuple(writer.contents), tuple(writer.calls), writer.written_for, tree)


@dataclass
class _Writer:
    """Exports the programs of one function, each different one once."""

    name: str
    platforms: Sequence[str] | None
    begin: Callable[[str], None]
    contents: list[bytes] = field(default_factory=list)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    written_for: tuple[str, ...] = ()
    places: dict[str, int] = field(default_factory=dict)  # by the text of the program

    def write(
        self, graph: Graph, again: Callable[[], Graph], assigned: int, order: int, left: int
    ) -> ProgramTree[int]:
        """Exports a derivative of some order, and those of up to `left` orders more."""
        described = f"the derivative of order {order} of {self.name}" if order else self.name
        refuse_host(graph, described)
        self.begin(f"writing {described}")
        program = self._place(graph, described)
        connected = [set(inputs) for inputs in connections(graph)]
        active = gets_gradient(graph.in_avals)
        flowing = has_cotangent(graph.out_avals, assigned)
        if not left or not active or not flowing:
            return ProgramTree(program, _sorted(connected))
        try:
            gradient, refused = _gradient_where_possible(graph, again, active, flowing)
            active = [i for i in active if i not in dict(refused)]
            # What the derivative really depends on never counts as unconnected.
            for i, mask in zip(active, dependence(gradient), strict=True):
                for place, j in enumerate(flowing, len(graph.inputs)):
                    if mask >> place & 1:
                        connected[j].add(i)
            graph = again() if refused else graph
            value = _value(graph, active) if _has_rules(graph) else None
            refuse_leaked(gradient, graph)
        except Exception as error:
            raise ValueError(
                f"the derivative of order {order + 1} of {self.name} cannot be saved, because JAX "
                f"cannot differentiate it: {error}\nSave it with gradient_order={order}."
            ) from error
        return ProgramTree(
            program,
            _sorted(connected),
            refused,
            None
            if value is None
            else self.write(value, lambda: _value(again(), active), assigned, order + 1, left - 1),
            self.write(
                gradient, lambda: _gradient(again(), active, flowing), 0, order + 1, left - 1
            ),
        )

    def _place(self, graph: Graph, described: str) -> int:
        exported, contents = _exported_graph(graph, self.platforms, described)
        self.written_for = tuple(exported.platforms)
        text = _text(exported) if len(contents) < _LARGEST_COMPARED else str(len(self.contents))
        if text not in self.places:
            calls = _jax.outside_calls(exported)
            if (unknown := outside_calls.unknown(calls)) is not None:
                raise ValueError(
                    f"{described} cannot be saved: it calls {unknown!r} by a custom call of XLA, "
                    "which is none of those that this version of tracegrad would load"
                )
            self.places[text] = len(self.contents)
            self.contents.append(contents)
            self.calls.append(tuple(calls))
        return self.places[text]


def _sorted(connected: Sequence[set[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(inputs)) for inputs in connected)


def _text(exported: Any) -> str:
    """The text of a program without source lines, by which two that compute the same differ."""
    lines = (line for line in exported.mlir_module().splitlines() if not line.startswith("#loc"))
    return _LOCATION.sub("", "\n".join(lines))


def check_installed() -> None:
    """Raises ImportError, saying what to install, where JAX lacks what it writes programs with."""
    require(
        "flatbuffers",
        "jax.export needs the package flatbuffers to write and read programs: "
        "pip install 'tracegrad[save]'",
    )


# -------------------------------------------------------------------------------- differentiation


def _gradient(graph: Graph, active: Sequence[int], flowing: Sequence[int]) -> Graph:
    """The program that gives gradients for some operands, from cotangents of some results, and,
    where that makes a difference, from a flag for each of those: whether it has a cotangent."""
    results = [graph.out_avals[j] for j in flowing]
    count, cotangents = len(graph.inputs), [_jax.struct(out.shape, out.dtype) for out in results]
    gated = with_flags(graph, active, flowing)
    is_flagged = gated is not None and len(flowing) > 1
    flags = [_jax.struct((), bool)] * len(flowing) if is_flagged else []

    def gradient(*operands: Any) -> list[Any]:
        inputs, rest = operands[:count], operands[count:]
        given, flags = rest[: len(flowing)], rest[len(flowing) :]

        def run(operands: list[Any]) -> list[Any]:
            return evaluate(graph, operands) if gated is None else gated(operands, flags)

        _, pullback = _jax.vjp_of_some(run, inputs, active, flowing)
        return list(pullback(list(given)))

    gradient.__name__ = gradient.__qualname__ = f"{graph.name}_gradient"
    return trace_graph(gradient)(*graph.in_avals, *cotangents, *flags)


def _gradient_where_possible(
    graph: Graph, again: Callable[[], Graph], active: Sequence[int], flowing: Sequence[int]
) -> tuple[Graph, tuple[tuple[int, str], ...]]:
    """The gradient, and the operands for which there is none, with the reason.

    A rule has no gradient for what its function closes over, a Variable that is not trainable for
    example, and refuses to be differentiated with respect to it. For the rest it has.
    """
    try:
        return _gradient(graph, active, flowing), ()
    except Exception:
        refused: dict[int, str] = {}
        for i in active:
            try:
                _gradient(again(), [i], flowing)
            except Exception as error:
                refused[i] = _without_folders(str(error))
        rest = [i for i in active if i not in refused]
        if not rest or not refused:
            raise
    return _gradient(again(), rest, flowing), tuple(refused.items())


def _without_folders(text: str) -> str:
    """Words about somebody's source lines, for others."""
    return re.sub(r"(?<![\w.])([A-Za-z]:)?[/\\]([^\s/\\:()]+[/\\])+", "", text)


def _value(graph: Graph, active: Sequence[int]) -> Graph:
    """What JAX computes in the place of a program where it differentiates it."""

    def value(*inputs: Any) -> list[Any]:
        return list(_jax.vjp_of_some(functools.partial(evaluate, graph), inputs, active)[0])

    value.__name__ = value.__qualname__ = graph.name
    return trace_graph(value)(*graph.in_avals)


def refuse_leaked(gradient: Graph, graph: Graph) -> None:
    """Raises for a gradient into which a rule has put a value of a trace that is over."""
    constants = (c for region in gradient.regions_below for c in region.constants.values())
    if any(map(_jax.is_tracer, constants)):
        names = [each.name for each in rule_errors.closing_over(graph)]
        raise ValueError(rule_errors.closing_over_advice(names))


def _has_rules(graph: Graph) -> bool:
    """Whether a custom gradient leads to a result."""
    rules = [found for found in graph.walk() if isinstance(found.node, CustomGradient)]
    live = leading_to(graph, [True] * len(graph.outputs)) if rules else set()
    return any(not live.isdisjoint(rule.steps[0].outputs) for rule in rules)


# -------------------------------------------------------------------------------------- writing


def _exported_graph(
    graph: Graph, platforms: Sequence[str] | None, described: str
) -> tuple[Any, bytes]:
    def program(*flat: Any) -> list[Any]:
        return evaluate(graph, flat)

    program.__name__ = program.__qualname__ = graph.name
    try:
        return _exported(program, graph.in_avals, platforms)
    except Exception as error:
        culprit = _culprit(graph, platforms)
        if culprit is None:
            raise
        occurrence, reason = culprit
        raise ValueError(
            f"{described} cannot be saved, because of {occurrence}: {reason}"
        ) from error


def _exported(
    fun: Callable[..., Any], avals: Sequence[Any], platforms: Sequence[str] | None
) -> tuple[Any, bytes]:
    """The `jax.export.Exported` of a function, and what is written of it."""
    avals = [_jax.without_devices(aval) for aval in avals]
    with _jax.without_folders():
        exported = jax.export.export(jax.jit(fun), platforms=platforms)(*avals)
    return exported, bytes(exported.serialize(vjp_order=0))


def _culprit(graph: Graph, platforms: Sequence[str] | None) -> tuple[Occurrence, str] | None:
    """The first node that cannot be written even alone, and why."""
    seen: set[Node] = set()
    for occurrence in graph.walk():
        node = occurrence.node
        if node in seen or node.regions:
            continue
        seen.add(node)

        def alone(*args: Any, node: Node = node) -> list[Any]:
            return _jax.bind(node.primitive, args, node.params)

        try:
            _exported(alone, [value.aval for value in node.inputs], platforms)
        except Exception as error:
            return occurrence, " ".join((str(error) or type(error).__name__).split())[:400]
    return None


def refuse_host(graph: Graph, described: str) -> None:
    """Raises for what needs the Python process: callbacks, prints, effects."""
    nodes = (node for region in graph.regions_below for node in region.nodes)
    if not any("callback" in node.primitive.name or node.effects for node in nodes):
        return
    for occurrence in graph.walk():
        node = occurrence.node
        # Of what is done inside it a call has those effects that leave it: not the sums over the
        # axes of its mesh.
        leaves = all(around.effects for around, _ in (*occurrence.path, (node, "")))
        if "callback" not in node.op and (not leaves or node.regions or node.has_references):
            continue
        what = "calls back into Python" if "callback" in node.op else "has an effect"
        raise ValueError(
            f"{described} cannot be saved, because of {occurrence}: it {what}, and the "
            "process that loads the function has none of its Python code. Take it out of the "
            "function, or return what it is to be given as a result."
        )


def _warn_of_constants(graph: Graph, programs: int) -> None:
    arrays: dict[int, Any] = {}
    for region in graph.regions_below:
        arrays.update((id(array), array) for array in region.constants.values())
    size = sum(getattr(array, "nbytes", 0) for array in arrays.values())
    if size >= _LARGE_CONSTANTS:
        warn_where_called(
            f"{graph.name} closes over arrays of {size >> 20} MiB, which become a part of each of "
            f"its programs, and so are written {programs} times. Pass them as arguments, or make "
            "Variables of them, which are written once.",
            UserWarning,
        )
