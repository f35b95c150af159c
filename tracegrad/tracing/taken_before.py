"""Finds derivatives that were taken before a function was traced: its rules do not reach them."""

from __future__ import annotations

from tracegrad.ir import Graph, Node, scopes
from tracegrad.ir.occurrence import Occurrence, origin_of_function, warn_where_called, was_called_by


def warn_of_taken_before(program: Graph) -> None:
    """Warns, at the user's line, if a program calls a derivative that `jax.vjp` or `jax.linearize`
    returned before the program was traced."""
    for region in program.regions_below:
        if origin_of_function(region.function_source) is None:
            continue
        for node in region.nodes:
            if _is_derivative(node) and not was_called_by(node, region.function_source):
                warn_where_called(
                    f"{region.name} calls a derivative of {Occurrence((), node).origin}, taken "
                    f"before {region.name} was traced (by jax.vjp or jax.linearize): the rules do "
                    "not reach it. Take the derivative inside of the traced function, or of "
                    "tracegrad.rewrite(fun, rule)",
                    UserWarning,
                )
                return


def _is_derivative(node: Node) -> bool:
    """Whether JAX computed a node for a derivative to which no rules were applied."""
    around = scopes.around(node)
    return "jvp" in scopes.transformations(around) and not scopes.is_under_rules(around)
