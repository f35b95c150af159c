"""What is alive at the peak of a program, told by the program that XLA compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tracegrad.ir import Graph, Occurrence
from tracegrad.ir.occurrence import Origin
from tracegrad.ir.scopes import UNDER_RULES

Kind = Literal["argument", "constant", "result", "residual", "gradient", "activation"]


@dataclass(frozen=True)
class Held:
    """A buffer that is in use at the peak.

    Attributes:
      size: bytes.
      kind: ``argument``, ``constant``, ``result``, ``residual`` (of the forward pass, for the
        backward pass), ``gradient`` (of the backward pass) or ``activation``.
      type: of what is in it, ``f32[64,512]``.
      line: where that is computed, ``model.py:12 (Block.__call__)``; "" for what is not.
      scope: the named scopes around it.
      kept_for: the operation at the peak or after it that reads it next; of what the forward pass
        makes, the next of the backward pass that does.
      alive: from when to when, as shares of the program.
      source: the operation that computes it; of the results of a loop the one inside of it; None
        for arguments and constants, and where it is not known.
    """

    size: int
    kind: Kind
    type: str
    line: str
    scope: str
    kept_for: str
    alive: tuple[float, float]
    source: Occurrence | None


@dataclass(frozen=True)
class Peak:
    """The highest point of a program: the operation there, what is alive, and bytes at each."""

    program: Graph
    at: str
    held: tuple[Held, ...]
    timeline: tuple[int, ...]


_AROUND = (UNDER_RULES, "checkpoint", "rematted_computation")


def scope_of(names: Sequence[str]) -> str:
    """Named scopes, for people, without those of rules and of JAX around what is recomputed, which
    is in the same scopes once more."""
    own = [name for name in names if name not in _AROUND]
    if len(own) < len(names):
        own = own[max((k for k, name in enumerate(own) if name == own[0]), default=0) :]
    return "/".join(own)


def told(op: str, origin: Origin | None, *, is_backward: bool) -> str:
    """An operation, for people."""
    of = "the backward pass of " if is_backward else ""
    return f"{of}{op}" + (f" at {origin.place}" if origin else "")
