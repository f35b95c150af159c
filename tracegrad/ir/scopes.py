"""What JAX writes around an operation: named scopes, and transformations that it came through.

As text the two cannot be told apart: ``jvp(x)`` is a good name for a scope. So nothing is decided
by the text, which is for people.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracegrad import _jax
from tracegrad.ir.nodes import Node

# The named scope of what was differentiated with the rules of an enclosing trace applied.
UNDER_RULES = "tracegrad.rules"


def around(node: Node) -> tuple[_jax.Around, ...]:
    """The scopes and transformations around a node in its region, from the outside in.

    JAX makes a scope of the sum that `jnp.einsum` is given (``bi,ij->bj``): no name of the user's.
    """
    stack = _jax.scopes_around(node.source.info)
    if not any("->" in name for name, _ in stack):
        return stack
    return tuple(each for each in stack if "->" not in each[0] or not _is_sum(each[0]))


def _is_sum(name: str) -> bool:
    """Whether it can be what `jnp.einsum` is given: each index of the result stands there once, and
    among the operands as well."""
    operands, _, result = (
        side.replace(" ", "").replace("...", "") for side in name.partition("->")
    )
    return len(set(result)) == len(result) and set(result) <= set(operands)


def scopes(stack: Sequence[_jax.Around]) -> tuple[str, ...]:
    """The components of the names of scopes: of ``a/b``, a scope and one in it."""
    names = (name for name, is_transformation in stack if not is_transformation)
    return tuple(part for name in names for part in name.split("/") if part)


def transformations(stack: Sequence[_jax.Around]) -> tuple[str, ...]:
    """The names of transformations: ``("transpose", "jvp")`` in a backward pass."""
    return tuple(name for name, is_transformation in stack if is_transformation)


def is_backward(node: Node) -> bool:
    """Whether it is part of a backward pass."""
    return "transpose" in transformations(around(node))


def is_under_rules(stack: Sequence[_jax.Around]) -> bool:
    """Whether it was differentiated with the rules in force applied."""
    return (UNDER_RULES, False) in stack


def text(stack: Sequence[_jax.Around]) -> str:
    """As JAX writes it: a transformation around the scope that follows, ``jvp(a)/b``."""
    parts: list[str] = []
    for name, is_transformation in reversed(stack):
        if is_transformation:
            parts[-1:] = [f"{name}({parts[-1] if parts else ''})"]
        else:
            parts.append(name)
    return "/".join(reversed(parts))
