"""Custom rules: of functions that have run on values, and of functions in JAX programs.

A function with a rule that has run on values (concrete arrays) is one entry of a record. The entry
has a `RecordedRule` instead of a computation. A rule in a JAX program says which arrays its
function closes over, if this package has made the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracegrad import _jax
from tracegrad._jax.caches import of_program


@dataclass(frozen=True, eq=False)
class RecordedRule:
    """The gradient function for one call of a Python function on values.

    Attributes:
      called: ``(*inputs) -> results``: the call, which runs the user's functions again, to be
        traced for a program.
      pull_back: ``(cotangents, sparse) -> gradients``: a cotangent, or None, for each result; a
        gradient, or None, for each input; `sparse`: for each input, whether the gradient may be
        slices.
    """

    number, constant_results = None, frozenset[int]()  # unlike a `Computation`
    called: Callable[..., list[Any]]
    pull_back: Callable[[Sequence[Any], Sequence[bool]], Sequence[Any]]


# ----------------------------------------------------------------------------- rules in programs

UserNames = tuple[str, str]  # of a function, and of an array that the function closes over


def attach_closed_over(
    backward: Callable[..., Any], closed_over: Sequence[tuple[int, UserNames]]
) -> None:
    """Attaches (position, names) for each array that a rule's function closes over to the rule's
    backward function."""
    backward._tracegrad_closed_over = closed_over  # type: ignore[attr-defined]


def closed_over_by(primitive: Any, params: Mapping[str, Any]) -> list[tuple[int, UserNames]]:
    """Returns (position, names) for each operand that the called function closes over; [] unless
    the operation calls a rule that this package has made."""
    if primitive is not _jax.CUSTOM_VJP:
        return []
    found = getattr(_jax.users_function(params["bwd"]), "_tracegrad_closed_over", ())
    first = _jax.count_closed_over(params) if found else 0
    return [(first + position, what) for position, what in found]


@of_program
def closes_over_arrays(program: Any) -> bool:
    """Whether `closed_over_by` finds an operand in a program, or in a program that it calls."""
    return any(
        closed_over_by(equation.primitive, equation.params)
        or any(closes_over_arrays(inner) for _, inner in _jax.sub_programs(equation.params))
        for equation in _jax.opened(program).eqns
    )
