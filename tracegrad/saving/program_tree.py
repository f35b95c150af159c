"""How the programs of a function belong together: itself, its gradient, that of that, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tracegrad import _jax
from tracegrad.saving.documents import Natural

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class ProgramTree(Generic[T]):
    """A program, and those by which it is differentiated.

    Attributes:
        program: what stands for it: its number among those of the function, or the
            `jax.export.Exported` that was read.
        connected: for each result, the operands (by position) from which a gradient arrives.
        refused: the operands with respect to which it cannot be differentiated, and why.
        value: what is run in its place where it is differentiated; None: itself.
        gradient: its derivative; None: there is none, or it was not saved.
    """

    program: T
    connected: tuple[tuple[Natural, ...], ...]
    refused: tuple[tuple[Natural, str], ...] = ()
    value: ProgramTree[T] | None = None
    gradient: ProgramTree[T] | None = None

    def map(self, fun: Callable[[T], S]) -> ProgramTree[S]:
        """The same tree of other programs."""
        value = None if self.value is None else self.value.map(fun)
        gradient = None if self.gradient is None else self.gradient.map(fun)
        return ProgramTree(fun(self.program), self.connected, self.refused, value, gradient)

    def all(self, order: int = 0) -> Iterator[tuple[T, int]]:
        """Every program in it, and the order of the derivative that it is."""
        yield self.program, order
        for below in (self.value, self.gradient):
            if below is not None:
                yield from below.all(order + 1)


def has_cotangent(avals: Sequence[Any], assigned: int) -> list[int]:
    """Which results of a program, the last `assigned` of them new values, take cotangents."""
    return [j for j in range(len(avals) - assigned) if _jax.has_gradient(avals[j])]


def gets_gradient(avals: Sequence[Any], refused: Sequence[tuple[int, str]] = ()) -> list[int]:
    """Which operands of a program get gradients."""
    without = dict(refused)
    return [i for i, aval in enumerate(avals) if _jax.has_gradient(aval) and i not in without]


def has_flags(avals: Sequence[Any], gradient_avals: Sequence[Any], flowing: int) -> bool:
    """Whether the gradient of a program with these operands takes, behind them and the cotangents
    of some results, a flag for each of the latter: whether it has a cotangent at all."""
    return len(gradient_avals) == len(avals) + 2 * flowing
