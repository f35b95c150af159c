"""What a program hands to the host without saying what its gradient is.

`TO_HOST` marks it, operand by operand. To a functional gradient that goes through it, it is an
error; to a tape, and to `gradients()`, it ends what is connected, as `stop_gradient` does.
"""

from __future__ import annotations

import jax

from tracegrad import _jax
from tracegrad.ir import Graph, Node, Occurrence
from tracegrad.ir.editing import around_each


def _has_no_gradient(function: str, stateful: bool) -> Exception:
    return ValueError(
        f"{function}, called by numpy_function, is differentiated and has no gradient: it runs on "
        "the host, where JAX does not see what it computes. Give numpy_function a gradient "
        "function, grad=; if the result is meant as a constant, give it stop_gradient of its inputs"
    )


def _cannot_be_exported(function: str, stateful: bool) -> Exception:
    return NotImplementedError(
        f"{function}, called by numpy_function, cannot be exported or saved: it is Python code of "
        "this process. Write it in jax.numpy, or call it outside of what is exported"
    )


def _cannot_be_mapped(function: str, stateful: bool) -> Exception | None:
    if not stateful:
        return None
    return NotImplementedError(
        f"{function}, called by numpy_function, is mapped by jax.vmap, under which calls have no "
        "order, and it counts as stateful. If its results depend on nothing but its inputs, say "
        "so by stateful=False, and it is called for each element; otherwise map it by jax.lax.map"
    )


# Its parameter `function` is the function's name and place; `stateful`, whether the order and the
# number of its calls matter.
TO_HOST = _jax.identity_primitive(
    "to_host", _has_no_gradient, _cannot_be_exported, _cannot_be_mapped
)


def would_run_again(node: Node) -> NotImplementedError:
    """What is raised of a node that has had an effect and gave results."""
    return NotImplementedError(
        f"{Occurrence((), node)} gives results and stands in a compiled function, a loop or a "
        "branch: to differentiate that, it would have to run once more. Call it outside, and pass "
        "the results in, or let a numpy_function that is pure say so (stateful=False)"
    )


def end_gradients_at_host(graph: Graph) -> Graph:
    """The graph in which what is handed to the host is a constant to differentiation. The rule of a
    custom gradient is left alone: what it does is not differentiated."""
    if TO_HOST.name not in graph.operations:
        return graph
    handed = graph.find(lambda found: found.node.primitive is TO_HOST and not found.rule_around)
    stop = jax.lax.stop_gradient
    return around_each(graph, handed, lambda op, *operands: [*map(stop, operands)]).graph
