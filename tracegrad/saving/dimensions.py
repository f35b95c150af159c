"""Symbolic dimensions of a saved function: bound at a call, and compared with what was saved.

JAX writes them as text, ``b``, ``2*b + 1``, ``floordiv(b, 2)``, and does the arithmetic itself; it
does not write the constraints under which the program was made (``b >= 4``), without which a call
could go to a program that is wrong for it. So these are kept beside it, and checked here.
"""

from __future__ import annotations

import ast
import operator
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegrad.saving import documents

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
}
_LONGEST = 1000  # characters


class _Unbound(Exception):
    """An expression has a dimension of which nothing is known yet."""


def evaluate(text: str, bound: Mapping[str, Any]) -> Any:
    """The value of an expression or a constraint, in integers or JAX's symbolic ones.

    None where it has a dimension that is not among `bound`, or is of no form known here.

    >>> evaluate("floordiv(b, 2) + 1", {"b": 6})
    4
    >>> evaluate("b >= 4", {"b": 3})
    False
    """
    if len(text) > _LONGEST:
        return None
    try:
        return _value(_parsed(text), bound)
    except Exception:  # also JAX's, where it cannot tell which of two symbolic sizes is larger
        return None


def _parsed(text: str) -> ast.expr:
    # What JAX writes as ``b^2`` binds in Python as ``**`` does.
    return ast.parse(text.strip().replace("^", "**"), mode="eval").body


def _value(node: ast.expr, bound: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in bound:
        return bound[node.id]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, bound)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, bound), _value(node.right, bound)
        if isinstance(node.op, ast.Pow) and (
            not isinstance(right, int) or not 0 <= right < 64 or _is_large(left)
        ):
            raise _Unbound
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None and len(node.args) == 2:
            return function(*(_value(arg, bound) for arg in node.args))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        compare = _COMPARISONS.get(type(node.ops[0]))
        if compare is not None:
            return compare(_value(node.left, bound), _value(node.comparators[0], bound))
    raise _Unbound


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= 2**63


def why_no_constraint(text: str) -> str | None:
    """Why a constraint could not be checked at a call; None if it can.

    >>> why_no_constraint("b >= floordiv(12, c - 1)")
    >>> why_no_constraint("b.c >= 1")
    'it is none of the forms that JAX writes'
    """
    if (why := why_no_size(text)) is not None:
        return why
    try:
        parsed = _parsed(text)
        names = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
        if isinstance(parsed, ast.Compare) and _value(parsed, dict.fromkeys(names, 1)) is not None:
            return None
    except ArithmeticError:  # a division by what is nought for these sizes
        return None
    except Exception:  # whatever the parser raises
        pass
    return "it is none of the forms that JAX writes"


def why_no_size(text: str) -> str | None:
    """Why an expression of dimensions could not be read again; None if it can."""
    if len(text) > _LONGEST:
        return f"it has {len(text)} characters, at most {_LONGEST} can be read"
    if (folded := unicodedata.normalize("NFKC", text)) != text:
        return f"it has a name that Python reads as another one: write {folded!r}"
    return None


def size(value: Any) -> str | None:
    """What a size in a file may be: a number, or the text of an open one."""
    if documents.natural(value) is None:
        return None
    if documents.text(value) is None and why_no_size(value) is None:
        return None
    return f"{documents.natural(None)}, or an expression of names of sizes"


def bind(
    leaves: Sequence[tuple[str, Sequence[int | str], Sequence[Any]]],
    constraints: Sequence[str],
    name: str,
) -> None:
    """Checks shapes against those saved.

    Args:
      leaves: for each argument its place, the saved dimensions, and those of the call.
      constraints: between the symbolic dimensions.
      name: of the function, for errors.

    Raises TypeError: a rank, a size, or two sizes that should be one differ, or a constraint does
    not hold. Sizes that cannot be judged here are left to JAX.
    """
    bound: dict[str, tuple[Any, str]] = {}
    for place, saved, given in leaves:
        if len(saved) != len(given):
            raise TypeError(
                f"{name} was saved for {place} of shape {shown(saved)}, of rank {len(saved)}; it "
                f"was called with {shown(given)}"
            )
        for wanted, size in zip(saved, given, strict=True):
            if isinstance(wanted, str) and wanted.isidentifier():
                bound.setdefault(wanted, (size, place))
    values = {dimension: size for dimension, (size, _) in bound.items()}
    for place, saved, given in leaves:
        for axis, (wanted, size) in enumerate(zip(saved, given, strict=True)):
            value = evaluate(wanted, values) if isinstance(wanted, str) else wanted
            if value is not None and not _equal(value, size):
                known = [f"{d} = {s} by {p}" for d, (s, p) in bound.items() if d in str(wanted)]
                because = f", where {' and '.join(known)}" if known else ""
                raise TypeError(
                    f"{name} was saved for {place} of shape {shown(saved)}{because}; it was called "
                    f"with {shown(given)}: axis {axis} should be {value}"
                )
    for constraint in constraints:
        if evaluate(constraint, values) is False:
            sizes = ", ".join(f"{dimension} = {size}" for dimension, size in values.items())
            raise TypeError(
                f"{name} was saved for sizes with {constraint}; it was called with {sizes}"
            )


def _equal(value: Any, size: Any) -> bool:
    try:
        return bool(value == size)
    except Exception:  # symbolic ones that JAX cannot compare: it will judge them
        return True


def shown(shape: Sequence[Any]) -> str:
    """A shape as it is printed: ``[b,3]``."""
    return f"[{','.join(str(size).replace(' ', '') for size in shape)}]"
