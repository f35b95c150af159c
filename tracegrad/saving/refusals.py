"""Why a program cannot be saved: the operation, the user's line, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export

from tracegrad import _jax
from tracegrad.ir import Graph, Node, Occurrence
from tracegrad.ir.running import run_node
from tracegrad.saving.source import ExportedFunction
from tracegrad.tracing import rule_errors

_LOOP = (
    " XLA's while loops keep no residuals for a backward pass. A rule gives them a gradient: save "
    "tracegrad.rewrite(fun, tracegrad.rules.checkpointed_loop()); or use jax.lax.scan if the "
    "number of steps is fixed."
)
_RUNTIME_CHECK = (
    "it is a runtime check of equinox (`equinox.error_if`), which raises its error in Python, and "
    "the process that loads the function has none of its Python code. Import equinox with "
    "EQX_ON_ERROR=nan or =off in the environment, or remove the check."
)
_CALLBACK_INSIDE = (
    "it calls back into Python where XLA compiles it. If the operation is of lineax or another "
    f"library that is built on equinox, {_RUNTIME_CHECK}"
)


def exported(fun: Callable[..., Any], specs: Sequence[Any], platforms: Sequence[str] | None) -> Any:
    """The program does not contain the folders of its source files."""
    with _jax.without_folders():
        return jax.export.export(jax.jit(fun), platforms=platforms)(*specs)


def reason(
    source: ExportedFunction,
    what: str,
    order: int,
    platforms: Sequence[str] | None,
    error: Exception,
) -> str | None:
    """Explains why the program of `source` was not written; returns None if there is no better
    explanation than JAX's `error`.

    The message calls the function `what`. The function computes the derivative of order `order`.
    """
    try:
        graph = source.graph
    except Exception:
        # The function above was traced and written: so JAX cannot differentiate it.
        above = source.above
        if above is None:
            return None
        found = _find_without_derivative(above.graph)
        hint = _LOOP if found is not None and found.node.op == "while" else ""
        return (
            f"{what} cannot be saved, because JAX cannot differentiate {found or 'it'}: {error}\n"
            f"Save it with gradient_order={order - 1}.{hint}"
        )
    constants = [c for region in graph.regions_below for c in region.constants.values()]
    if source.above is not None and any(map(_jax.is_tracer, constants)):
        # A custom gradient returned a value of a trace that has ended.
        names = [each.name for each in rule_errors.closing_over(source.above.graph)]
        return f"{what} cannot be saved: {rule_errors.closing_over_advice(names)}"
    seen: set[Node] = set()
    for occurrence in graph.walk():
        if occurrence.node not in seen:
            seen.add(occurrence.node)
            if (why := _explain(occurrence, platforms)) is not None:
                return f"{what} cannot be saved, because of {occurrence}: {why}"
    return None


def _explain(occurrence: Occurrence, platforms: Sequence[str] | None) -> str | None:
    """Explains why a node cannot be written alone; None if it can."""
    node = occurrence.node
    if node.regions:
        return None
    # A call has only those effects of its operations that leave the call, and not, for example,
    # those of collectives over the axes of its own mesh.
    leaves = all(around.effects for around, _ in (*occurrence.path, (node, "")))
    if "callback" in node.op or (leaves and not node.has_references):
        if any("error_if" in str(around) for around, _ in occurrence.path):
            return _RUNTIME_CHECK
        what = "calls back into Python" if "callback" in node.op else "has an effect"
        return (
            f"it {what}, and the process that loads the function has none of its Python code. "
            "Remove it from the function, or return its operands as results."
        )
    avals = [_jax.without_devices(value.aval) for value in node.inputs]
    try:
        exported(lambda *operands: run_node(node, operands), avals, platforms).serialize(0)
    except Exception as error:
        text = " ".join((str(error) or type(error).__name__).split())[:400]
        return _CALLBACK_INSIDE if "host_callbacks" in text else text
    return None


def _find_without_derivative(graph: Graph) -> Occurrence | None:
    """Returns the first operation that JAX cannot differentiate: the innermost, if regions contain
    it. The body of a function with a custom rule is not differentiated, and so not searched."""
    found: Occurrence | None = None
    for occurrence in graph.walk():
        around = occurrence.path[-1][0] if occurrence.path else None
        if around is (found and found.node) and not _has_derivative(occurrence.node):
            found = occurrence
    return found


def _has_derivative(node: Node) -> bool:
    avals = [_jax.without_devices(value.aval) for value in node.inputs]
    active = [i for i, aval in enumerate(avals) if _jax.has_gradient(aval)]
    flowing = [j for j, value in enumerate(node.outputs) if _jax.has_gradient(value.aval)]

    def pull_back(operands: list[Any], cotangents: list[Any]) -> Any:
        def run(operands: Sequence[Any]) -> list[Any]:
            return run_node(node, operands)

        return _jax.pull_back_of_some(run, operands, active, flowing, cotangents)

    try:
        jax.eval_shape(pull_back, avals, [node.outputs[j].aval for j in flowing])
    except Exception:
        return False
    return True
