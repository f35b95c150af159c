"""Custom rules: of functions that have run on values, and of functions in JAX programs.

A function with a rule that has run on values (concrete arrays) is one entry of a record. The entry
has a `Rule` instead of a computation. For a rule in a JAX program that this package has made,
`MadeOf` has the parts of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from tracegrad import _jax
from tracegrad._jax.caches import of_program


@dataclass(frozen=True, eq=False)
class Rule:
    """The gradient function for one call of a Python function on values.

    Attributes:
      name: the name of the Python function.
      called: ``(*inputs) -> results``: the call, to be traced where a program is needed. It runs
        the user's functions again.
      pull_back: ``(cotangents, sparse) -> gradients``. There is a cotangent, or None, for each
        result; a gradient, or None, for each input; `sparse` says which gradients may be slices.
      op: the name of its operation in a graph; default: `name`.
      describe: ``(array) -> (function, name)``: the user's names for the function, and for an
        array that it closes over.
      handed_on: maps the position of each result that is an unchanged operand to the position of
        that operand.
    """

    number, constant = None, frozenset[int]()  # unlike a `Computation`
    name: str
    called: Callable[..., list[Any]]
    pull_back: Callable[[Sequence[Any], Sequence[bool]], Sequence[Any]]
    op: str | None = None
    describe: Callable[[Any], tuple[str, str]] | None = None
    handed_on: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))

    def without_arrays(self) -> Rule:
        """Returns the rule without its two functions, which may close over arrays."""
        return replace(self, called=_is_over, pull_back=_is_over)


def _is_over(*_: Any) -> Any:
    raise RuntimeError("the operations of a tape are needed after the tape was used up")


@contextmanager
def refusing_values(name: str) -> Iterator[None]:
    """A block that traces the function of this name. If the function needs values, the error says
    why it is traced."""
    try:
        yield
    except _jax.NEEDS_VALUES as error:
        raise NotImplementedError(
            f"a function with a custom gradient ({name}), or its gradient function, asks for the "
            "value of an array, as `if` and NumPy do. A tape runs it on values, but has to trace "
            "it to be explained or shown, and where rules are in force: write it with jnp.where "
            "or jax.lax.cond"
        ) from error


# ----------------------------------------------------------------------------- rules in programs

What = tuple[str, str]  # the user's names for a function, and for an array that it closes over


class MadeOf(NamedTuple):
    """The parts of a rule that this package has made.

    Attributes:
      programs: the programs that the rule runs.
      closed_over: the positions of the arrays that its function closes over, each with the user's
        names for the function and for the array.
    """

    programs: tuple[Any, ...]
    closed_over: tuple[tuple[int, What], ...] = ()


def tell_made_of(backward: Callable[..., Any], parts: MadeOf) -> None:
    """Attaches the parts of a rule to its backward function."""
    backward.made_of = parts  # type: ignore[attr-defined]


def parts_of_rule(wrapped: Any) -> MadeOf | None:
    """Returns the parts attached to a rule's backward function; None if there are none."""
    parts = getattr(_jax.users_function(wrapped), "made_of", None)
    return parts if isinstance(parts, MadeOf) else None


def closed_over_by(primitive: Any, params: Mapping[str, Any]) -> list[tuple[int, What]]:
    """Returns the positions of the operands that the called function closes over, each with the
    user's names. Returns none unless the operation calls a rule that this package has made."""
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
