"""Why a program cannot be saved: the operation, the user's line, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export

from tracegrad import _jax
from tracegrad.ir import Graph, Node, Occurrence
from tracegrad.ir.running import run_node
from tracegrad.saving.source import Source
from tracegrad.tracing import rule_errors

_LOOP = (
    " XLA's while loops keep nothing for a backward pass; tracegrad.checkpointed_loop is such a "
    "loop with a gradient, and jax.lax.scan one of a fixed number of steps."
)
_RUNTIME_CHECK = (
    "it is a runtime check of equinox (`equinox.error_if`), which raises its error in Python, and "
    "the process that loads the function has none of its Python code. Import equinox with "
    "EQX_ON_ERROR=nan or =off in the environment, or take the check out."
)


def exported(fun: Callable[..., Any], specs: Sequence[Any], platforms: Sequence[str] | None) -> Any:
    """The `jax.export.Exported` of a function, which does not tell where it was made."""
    with _jax.without_folders():
        return jax.export.export(jax.jit(fun), platforms=platforms)(*specs)


def reason(
    source: Source, what: str, order: int, platforms: Sequence[str] | None, error: Exception
) -> str | None:
    """Why the program of `source` was not written; None where JAX's own error has to say it.

    Args:
      source: the function.
      what: it is called in the message.
      order: of the derivative that it is.
      platforms: it was to be written for.
      error: what JAX raised.
    """
    try:
        graph = source.graph
    except Exception:
        # What it is the derivative of was traced, and written: JAX cannot differentiate that.
        above = source.above
        if above is None:
            return None
        found = _first(above.graph, _fails_to_be_differentiated)
        at = "" if found is None else f" of {found[0]}"
        hint = _LOOP if found is not None and found[0].node.op == "while" else ""
        return (
            f"{what} cannot be saved, because JAX cannot differentiate it{at}: {error}\n"
            f"Save it with gradient_order={order - 1}.{hint}"
        )
    constants = [c for region in graph.regions_below for c in region.constants.values()]
    if source.above is not None and any(map(_jax.is_tracer, constants)):
        # A rule has put a value of a trace that is over into its gradient.
        names = [each.name for each in rule_errors.closing_over(source.above.graph)]
        return f"{what} cannot be saved: {rule_errors.closing_over_advice(names)}"
    found = _first(graph, _needs_python) or _first(graph, _fails_to_be_written(platforms))
    return None if found is None else f"{what} cannot be saved, because of {found[0]}: {found[1]}"


Fault = Callable[[Occurrence], str | None]


def _first(graph: Graph, fault: Fault) -> tuple[Occurrence, str] | None:
    """The first node of a graph with a fault, and which."""
    seen: set[Node] = set()
    for occurrence in graph.walk():
        if occurrence.node not in seen and (why := fault(occurrence)) is not None:
            return occurrence, why
        seen.add(occurrence.node)
    return None


def _needs_python(occurrence: Occurrence) -> str | None:
    node = occurrence.node
    # Of what is done inside it a call has those effects that leave it: not the sums over the axes
    # of its mesh.
    leaves = all(around.effects for around, _ in (*occurrence.path, (node, "")))
    if "callback" not in node.op and (not leaves or node.regions or node.has_references):
        return None
    if any("error_if" in str(around) for around, _ in occurrence.path):
        return _RUNTIME_CHECK
    what = "calls back into Python" if "callback" in node.op else "has an effect"
    return (
        f"it {what}, and the process that loads the function has none of its Python code. Take it "
        "out of the function, or return what it is to be given as a result."
    )


def _alone(node: Node) -> Callable[..., list[Any]]:
    def alone(*operands: Any) -> list[Any]:
        return run_node(node, operands)

    return alone


def _words(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:400]


def _fails_to_be_written(platforms: Sequence[str] | None) -> Fault:
    def fault(occurrence: Occurrence) -> str | None:
        node = occurrence.node
        if node.regions:
            return None
        avals = [_jax.without_devices(value.aval) for value in node.inputs]
        try:
            exported(_alone(node), avals, platforms).serialize(vjp_order=0)
        except Exception as error:
            return _words(error)
        return None

    return fault


def _fails_to_be_differentiated(occurrence: Occurrence) -> str | None:
    node = occurrence.node
    if node.regions and node.op != "while":
        return None
    avals = [_jax.without_devices(value.aval) for value in node.inputs]
    active = [i for i, aval in enumerate(avals) if _jax.has_gradient(aval)]
    flowing = [j for j, value in enumerate(node.outputs) if _jax.has_gradient(value.aval)]

    def pull_back(operands: list[Any], cotangents: list[Any]) -> Any:
        run = lambda operands: _alone(node)(*operands)  # noqa: E731
        return _jax.pull_back_of_some(run, operands, active, flowing, cotangents)

    try:
        jax.eval_shape(pull_back, avals, [node.outputs[j].aval for j in flowing])
    except Exception as error:
        return _words(error)
    return None
