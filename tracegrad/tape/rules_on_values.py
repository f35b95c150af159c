"""Rules on values: a function that has run on arrays, and whose gradient is a Python function.

What it has computed is one entry of a record, which has a `Rule` in the place of a computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tracegrad import _jax


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
