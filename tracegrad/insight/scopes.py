"""Named scopes as a path: ``encoder/block_0`` → (``encoder``, ``block_0``)."""

from __future__ import annotations


def scope_parts(stack: str) -> tuple[str, ...]:
    """The scopes of a stack from the outside in; a transformation, ``jvp(a/b)``, is one of them.

    >>> scope_parts("model/transpose(jvp(encoder/block))/dense")
    ('model', 'transpose(jvp(encoder/block))', 'dense')
    """
    parts = [""]
    depth = 0
    for character in stack:
        depth += (character == "(") - (character == ")")
        if character == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part for part in parts if part)
