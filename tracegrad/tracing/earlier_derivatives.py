"""Finds derivatives that were taken before a function was traced: its rules do not reach them."""

from __future__ import annotations

from tracegrad.ir import CustomGradient, Graph, Node, Occurrence, scopes
from tracegrad.ir.occurrence import (
    is_own_file,
    origin_of_function,
    shows_callers,
    warn_where_called,
    was_called_by,
)


def warn_of_earlier_derivatives(program: Graph) -> None:
    """Warns, at the user's line, if a program calls a derivative that `jax.vjp` or `jax.linearize`
    returned before the program was traced.

    Does not look at functions that have a derivative rule, nor at functions of this package: JAX
    may have traced such functions before, in another program.
    """
    waiting = [program]
    for region in waiting:  # grows
        functions = {region.function_source, program.function_source}
        if not all(map(origin_of_function, functions)):
            continue
        for node in region.nodes:
            if isinstance(node, CustomGradient):
                continue
            is_derivative = _is_derivative(node) and shows_callers(node)
            if is_derivative and not any(was_called_by(node, each) for each in functions):
                warn_where_called(
                    f"{program.name} calls a derivative of {Occurrence((), node).origin}, taken "
                    f"before {program.name} was traced (by jax.vjp or jax.linearize): the rules do "
                    "not reach it. Take the derivative inside of the traced function, or of "
                    "tracegrad.rewrite(fun, rule)",
                    UserWarning,
                )
                return
            for inner in node.regions.values():
                origin = origin_of_function(inner.function_source)
                if inner not in waiting and origin and not is_own_file(origin.file):
                    waiting.append(inner)


def _is_derivative(node: Node) -> bool:
    """JAX made the node for a derivative to which no rules were applied."""
    return scopes.is_differentiated(node) and not scopes.is_under_rules(scopes.around(node))
