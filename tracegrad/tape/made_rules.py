"""What a rule that this package has made is made of, as it stands in a program of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tracegrad import _jax
from tracegrad._jax.caches import of_program

What = tuple[str, str]  # a function, and what it calls an array


class MadeOf(NamedTuple):
    """What a rule runs, and closes over.

    Attributes:
      programs: what the rule runs.
      closed_over: the positions of arrays that its function closes over, each with what the
        function is and what it calls the array.
    """

    programs: tuple[Any, ...]
    closed_over: tuple[tuple[int, What], ...] = ()


def tell_made_of(backward: Callable[..., Any], parts: MadeOf) -> None:
    """Tells what a rule, known by its backward function, was made of."""
    backward.made_of = parts  # type: ignore[attr-defined]


def parts_of_rule(wrapped: Any) -> MadeOf | None:
    """What the rule was made of that has this backward function; None if it was not told."""
    parts = getattr(_jax.users_function(wrapped), "made_of", None)
    return parts if isinstance(parts, MadeOf) else None


def closed_over_by(primitive: Any, params: Mapping[str, Any]) -> list[tuple[int, What]]:
    """Which operands of a call of a rule that this package has made are arrays that its function
    closes over, with what the user calls function and array; none of another operation."""
    parts = parts_of_rule(params["bwd"]) if primitive is _jax.CUSTOM_VJP else None
    if parts is None or not parts.closed_over:
        return []
    first = _jax.count_closed_over(params)
    return [(first + position, what) for position, what in parts.closed_over]


@of_program
def closes_over_arrays(program: Any) -> bool:
    """Whether there is such an operand in a program or in those that it calls."""
    return any(
        closed_over_by(equation.primitive, equation.params)
        or any(closes_over_arrays(inner) for _, inner in _jax.sub_programs(equation.params))
        for equation in _jax.opened(program).eqns
    )
