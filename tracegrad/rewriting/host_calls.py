"""Marks the operands of calls to the host that have no gradient function.

The primitive `TO_HOST` marks each such operand. A functional gradient that goes through a mark
raises an error; for a tape, and for `gradients()`, the mark disconnects, as `stop_gradient` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import jax

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence, Value
from tracegrad.ir.editing import around_each
from tracegrad.ir.occurrence import Path


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


def end_gradients_at_host(graph: Graph) -> Graph:
    """Stops the gradient at each operand that is handed to the host, except in custom gradients,
    whose operations are not differentiated."""
    if TO_HOST.name not in graph.operations:
        return graph
    handed = graph.find(lambda found: found.node.primitive is TO_HOST and not found.rule_around)
    stop = jax.lax.stop_gradient
    return around_each(graph, handed, lambda op, *operands: [*map(stop, operands)]).graph


def without_past_effects(graph: Graph, moving: AbstractSet[Value] = frozenset()) -> Graph:
    """Removes the effects (prints) that a derivative of a function that has run would repeat.

    A node that prints a tangent (in the rule of a `jax.custom_jvp`) has not run yet, and stays:
    `moving` has the values at every depth that depend on a tangent. Effects in custom gradients
    stay, since the rules run instead; accesses to a Ref stay, since later operations may read it.

    Raises:
      NotImplementedError: an effect that has happened has results too, as a call of the host.
    """
    past = list(_find_past_effects(graph, (), moving))
    return around_each(graph, past, lambda op, *operands: []).graph


def _find_past_effects(
    graph: Graph, path: Path, moving: AbstractSet[Value]
) -> Iterator[Occurrence]:
    for node in graph.nodes:
        found = Occurrence(path, node)
        if not node.effects or isinstance(node, CustomGradient):
            continue
        if node.regions:
            for name, region in node.regions.items():
                yield from _find_past_effects(region, found.into(name), moving)
        elif moving.isdisjoint(node.operands) and not node.has_references:
            if node.outputs:
                raise _would_run_again(node)
            yield found


def _would_run_again(node: Node) -> NotImplementedError:
    return NotImplementedError(
        f"{Occurrence((), node)} returns results in a compiled function, a loop or a branch: to "
        "differentiate that, it would have to run once more. Call it outside, and pass the results "
        "in; or, if it is a numpy_function that is pure, pass stateful=False"
    )
