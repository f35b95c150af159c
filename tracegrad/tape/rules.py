"""Functions with a gradient of their own: one that has run on values, and one that this package
has made and that stands in a program of JAX.

What a function on values has computed is one entry of a record, which has a `Rule` in the place of
a computation.
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
    """The gradient of what a Python function has computed on values, as a Python function.

    Attributes:
      name: of the function whose gradient it is.
      called: ``(*inputs) -> results``: the call as it is where it is traced, for what needs a
        program. It runs the user's functions once more.
      pull_back: from the cotangents of the results (None for one that has none), and for each input
        whether it may get slices, to the gradients of the inputs; None for one that has none.
      op: what it is called in a graph; default: by its name.
      describe: of an array that the function closes over: what the function is, and what it calls
        the array.
      handed_on: which results are which of the operands as they were.
    """

    number = None  # as a `Computation` has one
    name: str
    called: Callable[..., list[Any]]
    pull_back: Callable[[Sequence[Any], Sequence[bool]], Sequence[Any]]
    op: str | None = None
    describe: Callable[[Any], tuple[str, str]] | None = None
    handed_on: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))

    def without_arrays(self) -> Rule:
        """The name alone: both functions may close over arrays."""
        return replace(self, called=_is_over, pull_back=_is_over)


def _is_over(*_: Any) -> Any:
    raise RuntimeError("what a tape recorded is asked for after the tape was used up")


@contextmanager
def refusing_values(name: str) -> Iterator[None]:
    """Says why the function of this name is traced, if it cannot be."""
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
