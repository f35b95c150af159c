"""The named scopes and the transformations that JAX records around an operation.

In JAX's text, scopes and transformations cannot be distinguished: ``jvp(x)`` is a valid name of a
scope. So the text is only shown to people, and all code uses the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracegrad import _jax
from tracegrad.ir.nodes import Node

# The named scope around a loss to which the rules of an enclosing trace were applied.
UNDER_RULES = "tracegrad.rules"


def around(node: Node) -> tuple[_jax.Around, ...]:
    """Returns the scopes and transformations around a node in its region, from the outside in.
    Omits names with an arrow: JAX makes a scope of the subscripts of `jnp.einsum`
    (``bi,ij->bj``)."""
    stack = _jax.scopes_around(node.equation.source_info)
    if not any("->" in name for name, _ in stack):
        return stack
    return tuple(each for each in stack if "->" not in each[0])


def scopes(stack: Sequence[_jax.Around]) -> tuple[str, ...]:
    """``a/b`` counts as two scopes."""
    names = (name for name, is_transformation in stack if not is_transformation)
    return tuple(part for name in names for part in name.split("/") if part)


def transformations(stack: Sequence[_jax.Around]) -> tuple[str, ...]:
    """``("transpose", "jvp")`` in a backward pass."""
    return tuple(name for name, is_transformation in stack if is_transformation)


def is_differentiated(node: Node) -> bool:
    """Whether JAX has differentiated the node."""
    return ("jvp", True) in _jax.scopes_around(node.equation.source_info)


def is_under_rules(stack: Sequence[_jax.Around]) -> bool:
    """Whether a node is in a loss to which the rules in force were already applied."""
    return (UNDER_RULES, False) in stack


def text(stack: Sequence[_jax.Around]) -> str:
    """Returns the stack as JAX writes it: a transformation around the next scope, ``jvp(a)/b``."""
    parts: list[str] = []
    for name, is_transformation in reversed(stack):
        if is_transformation:
            parts[-1:] = [f"{name}({parts[-1] if parts else ''})"]
        else:
            parts.append(name)
    return "/".join(reversed(parts))
