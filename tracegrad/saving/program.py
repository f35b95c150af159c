"""Graph → serialised programs: the function itself, its gradient, the gradient of that, and so on.

Program 0 takes the values of Variables and the arguments, flat, and returns the flat result and the
new values of Variables. Program k + 1 takes what program k takes and a cotangent for each float
result of it (none for new values of Variables: assignment is not differentiated), and returns a
gradient for each float operand. Custom gradients act where JAX differentiates program k to make
program k + 1, so what is written is what the function's own rules say, to that order.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export

from tracegrad import _jax
from tracegrad.differentiation.connectivity import connections
from tracegrad.ir import Graph, Node, Occurrence
from tracegrad.ir.dependence import is_reference
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.lowering import Lowering, evaluate
from tracegrad.tracing.graphs import graph as trace_graph

# Arrays that a function closes over are written into each of its programs.
_LARGE_CONSTANTS = 16 << 20  # bytes


@dataclass(frozen=True)
class Exported:
    """A program as it is written: `connected` as in `manifest.ProgramRecord`."""

    contents: bytes
    platforms: tuple[str, ...]
    connected: tuple[tuple[int, ...], ...]


def export(graph: Graph, order: int, platforms: Sequence[str] | None) -> list[Exported]:
    """The programs of a function and of its derivatives.

    Args:
      graph: of the function.
      order: how many times it can be differentiated.
      platforms: as of `jax.export.export`; None: the one that JAX runs on.

    Returns:
      At most ``order + 1`` programs; fewer where there is nothing left to differentiate.

    Raises:
      ImportError: the package that JAX writes programs with is not installed.
      ValueError: part of the program cannot be written, or not differentiated in reverse; the
        message names the node and its line.
    """
    check_installed()
    _warn_of_constants(graph, order + 1)
    name, programs = graph.name, []
    for k in range(order + 1):
        if k:
            derivative = _derivative(graph, name, k)
            if derivative is None:
                break
            graph = derivative
        described = name if k == 0 else f"the derivative of order {k} of {name}"
        _refuse_host(graph, described)
        connected = tuple(tuple(sorted(inputs)) for inputs in connections(graph))
        programs.append(Exported(*_serialised(graph, platforms, described), connected))
    return programs


def check_installed() -> None:
    """Raises ImportError, saying what to install, where JAX lacks what it writes programs with."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(
            "jax.export needs the package flatbuffers to write and read programs: "
            "pip install 'tracegrad[save]'"
        )


# -------------------------------------------------------------------------------- differentiation


def has_cotangent(avals: Sequence[Any], assigned: int) -> list[int]:
    """Which results of a program, the last `assigned` of them new values, take cotangents."""
    return [j for j in range(len(avals) - assigned) if _jax.has_gradient(avals[j])]


def gets_gradient(avals: Sequence[Any]) -> list[int]:
    """Which operands of a program get gradients."""
    return [i for i, aval in enumerate(avals) if _jax.has_gradient(aval)]


def _derivative(graph: Graph, name: str, order: int) -> Graph | None:
    """The program after this one; None where nothing goes in or nothing comes out."""
    avals, count = graph.in_avals, len(graph.inputs)
    active = gets_gradient(avals)
    flowing = has_cotangent(graph.out_avals, len(graph.assigned))
    if not active or not flowing:
        return None

    def gradient(*inputs_and_cotangents: Any) -> list[Any]:
        inputs, cotangents = inputs_and_cotangents[:count], inputs_and_cotangents[count:]

        def chosen(*values: Any) -> list[Any]:
            flat = list(inputs)
            for i, value in zip(active, values, strict=True):
                flat[i] = value
            results = evaluate(graph, flat, Lowering())
            return [results[j] for j in flowing]

        _, pullback = jax.vjp(chosen, *(inputs[i] for i in active))
        return list(pullback(list(cotangents)))

    gradient.__name__ = gradient.__qualname__ = f"{name}_gradient_{order}"
    cotangents = [_strong(graph.out_avals[j]) for j in flowing]
    try:
        return trace_graph(gradient)(*avals, *cotangents)
    except Exception as error:
        raise ValueError(
            f"the derivative of order {order} of {name} "
            f"cannot be saved, because JAX cannot differentiate it: {error}\n"
            f"Save it with gradient_order={order - 1}."
        ) from error


def _strong(aval: Any) -> Any:
    return _jax.struct(aval.shape, aval.dtype)


# -------------------------------------------------------------------------------------- writing


Serialised = tuple[bytes, tuple[str, ...]]  # and the platforms


def _serialised(graph: Graph, platforms: Sequence[str] | None, described: str) -> Serialised:
    def program(*flat: Any) -> list[Any]:
        return evaluate(graph, flat, Lowering())

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
) -> Serialised:
    exported = jax.export.export(jax.jit(fun), platforms=platforms)(*avals)
    return bytes(exported.serialize(vjp_order=0)), tuple(exported.platforms)


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


def _refuse_host(graph: Graph, described: str) -> None:
    """Raises for what needs the Python process: callbacks, prints, effects."""
    for occurrence in graph.walk():
        node = occurrence.node
        references = any(is_reference(v.aval) for v in (*node.inputs, *node.outputs))
        if "callback" not in node.op and (not node.effects or node.regions or references):
            continue
        what = "calls back into Python" if "callback" in node.op else "has an effect"
        raise ValueError(
            f"{described} cannot be saved, because of {occurrence}: it {what}, and the "
            "process that loads the function has none of its Python code. Take it out of the "
            "function, or return what it is to be given as a result."
        )


def _warn_of_constants(graph: Graph, programs: int) -> None:
    arrays: dict[int, Any] = {}
    for region in (graph, *{o.graph: None for o in graph.walk()}):
        arrays.update((id(array), array) for array in region.constants.values())
    size = sum(map(_bytes, arrays.values()))
    if size >= _LARGE_CONSTANTS:
        warn_where_called(
            f"{graph.name} closes over arrays of {size >> 20} MiB, which become a part of each of "
            f"its programs, and so are written {programs} times. Pass them as arguments, or make "
            "Variables of them, which are written once.",
            UserWarning,
        )


def _bytes(array: Any) -> int:
    itemsize = getattr(getattr(array, "dtype", None), "itemsize", 0)
    return int(itemsize * math.prod(getattr(array, "shape", ())))


# -------------------------------------------------------------------------------------- reading


def read(contents: bytes) -> Any:
    """The `jax.export.Exported` of a written program; nothing is compiled or run.

    Raises whatever JAX raises for what it cannot read.
    """
    return jax.export.deserialize(bytearray(contents))


def parse(exported: Any) -> None:
    """Has XLA parse a program.

    Raises whatever XLA raises; of bytes that no JAX wrote it may end the process.
    """
    exported.mlir_module()
