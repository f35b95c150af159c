"""Marks the operands of calls to the host that have no gradient function.

The primitive `TO_HOST` marks each such operand. A functional gradient that goes through a mark
raises an error; for a tape, and for `gradients()`, the mark disconnects, as `stop_gradient` does.
"""

from __future__ import annotations

import jax

from tracegrad import _jax
from tracegrad.ir import Graph, Node, Occurrence
from tracegrad.ir.editing import around_each


def _has_no_gradient(function: str, stateful: bool) -> Exception:
    return ValueError(
        f"{function}, called by numpy_function, is differentiated and has no gradient: it runs on "
        "the host, where JAX does not see its operations. Give numpy_function a gradient "
        "function, grad=; if the result is meant as a constant, apply stop_gradient to its inputs"
    )


def _cannot_be_exported(function: str, stateful: bool) -> Exception:
    return NotImplementedError(
        f"{function}, called by numpy_function, cannot be exported or saved: it is Python code of "
        "this process. Write it in jax.numpy, or call it outside of the exported function"
    )


def _cannot_be_mapped(function: str, stateful: bool) -> Exception | None:
    if not stateful:
        return None
    return NotImplementedError(
        f"{function}, called by numpy_function, is mapped by jax.vmap, under which calls have no "
        "order, and it counts as stateful. If its results depend on nothing but its inputs, pass "
        "stateful=False, and it is called for each element; otherwise map it by jax.lax.map"
    )


# `function` is the name and line of the called function; `stateful` says whether the order and the
# number of its calls matter.
TO_HOST = _jax.identity_primitive(
    "to_host", _has_no_gradient, _cannot_be_exported, _cannot_be_mapped
)


def would_run_again(node: Node) -> NotImplementedError:
    return NotImplementedError(
        f"{Occurrence((), node)} returns results in a compiled function, a loop or a branch: to "
        "differentiate that, it would have to run once more. Call it outside, and pass the results "
        "in; or, if it is a numpy_function that is pure, pass stateful=False"
    )


def end_gradients_at_host(graph: Graph) -> Graph:
    """Stops the gradient at each operand that is handed to the host, except in custom gradients,
    whose operations are not differentiated."""
    if TO_HOST.name not in graph.operations:
        return graph
    handed = graph.find(lambda found: found.node.primitive is TO_HOST and not found.rule_around)
    stop = jax.lax.stop_gradient
    return around_each(graph, handed, lambda op, *operands: [*map(stop, operands)]).graph
