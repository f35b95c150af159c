"""Custom rules: of functions that have run on values, and of functions in JAX programs.

A function with a rule that has run on values (concrete arrays) is one entry of a record. The entry
has a `RecordedRule` instead of a computation. `RuleParts` describes a rule in a JAX program, if
this package has made the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tracegrad import _jax
from tracegrad._jax.caches import of_program


@dataclass(frozen=True, eq=False)
class RecordedRule:
    """The gradient function for one call of a Python function on values.

    Attributes:
      name: the name of the Python function.
      called: ``(*inputs) -> results``: the call, which runs the user's functions again, to be
        traced for a program.
      pull_back: ``(cotangents, sparse) -> gradients``: a cotangent, or None, for each result; a
        gradient, or None, for each input; `sparse`: for each input, whether the gradient may be
        slices.
    """

    number, constant_results = None, frozenset[int]()  # unlike a `Computation`
    name: str
    called: Callable[..., list[Any]]
    pull_back: Callable[[Sequence[Any], Sequence[bool]], Sequence[Any]]


# ----------------------------------------------------------------------------- rules in programs

UserNames = tuple[str, str]  # of a function, and of an array that the function closes over


class RuleParts(NamedTuple):
    """The parts of a rule that this package has made.

    Attributes:
      programs: the programs that the rule runs.
      closed_over: (position, names) for each array that the rule's function closes over.
    """

    programs: tuple[Any, ...]
    closed_over: tuple[tuple[int, UserNames], ...] = ()


def attach_parts(backward: Callable[..., Any], parts: RuleParts) -> None:
    """`backward`: the rule's backward function."""
    backward._tracegrad_parts = parts  # type: ignore[attr-defined]


def parts_of_rule(wrapped: Any) -> RuleParts | None:
    """The parts that `attach_parts` has attached, if any. `wrapped`: a rule's backward function."""
    parts = getattr(_jax.users_function(wrapped), "_tracegrad_parts", None)
    return parts if isinstance(parts, RuleParts) else None


def closed_over_by(primitive: Any, params: Mapping[str, Any]) -> list[tuple[int, UserNames]]:
    """Returns (position, names) for each operand that the called function closes over; [] unless
    the operation calls a rule that this package has made."""
    parts = parts_of_rule(params["bwd"]) if primitive is _jax.CUSTOM_VJP else None
    if parts is None or not parts.closed_over:
        return []
    first = _jax.count_closed_over(params)
    return [(first + position, what) for position, what in parts.closed_over]


@of_program
def closes_over_arrays(program: Any) -> bool:
    """Whether `closed_over_by` finds an operand in a program, or in a program that it calls."""
    return any(
        closed_over_by(equation.primitive, equation.params)
        or any(closes_over_arrays(inner) for _, inner in _jax.sub_programs(equation.params))
        for equation in _jax.opened(program).eqns
    )
