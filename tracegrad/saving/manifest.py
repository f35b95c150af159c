"""What a file says of the functions and Variables in it: typed records, as JSON in its header.

``docs/artefact.md`` describes every field. A field that is missing, unknown or of another type is
refused by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Literal

from tracegrad.saving.libraries import msgspec

FORMAT = 2
"""The number of the format that is written and read. (Format 1 was never released.)"""
OWN = "tracegrad/"
"""What the names of those arrays begin with that are no Variables: programs, and texts."""
HIGHEST_ORDER = 32
"""How many times a saved function can be differentiated at most."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
Kind = Literal["positional", "either", "keyword", "*", "**"]

KINDS: dict[Kind, inspect._ParameterKind] = {
    "positional": inspect.Parameter.POSITIONAL_ONLY,
    "either": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
    "*": inspect.Parameter.VAR_POSITIONAL,
    "**": inspect.Parameter.VAR_KEYWORD,
}
"""What the kinds of parameters are called in a manifest."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a manifest."""


class Placement(Record, frozen=True):
    """How an array was split: the axes of a mesh with their sizes, and for each axis of the array
    those it is split along, or None."""

    mesh: tuple[tuple[str, Natural], ...]
    spec: tuple[tuple[str, ...] | None, ...]


class ArrayRecord(Record, frozen=True):
    """The type of an array as a Variable has it, such as ``float32`` or ``key<fry>``, and how it
    was split."""

    dtype: str
    shape: tuple[Natural, ...]
    placement: Placement | None = None


class VariableRecord(Record, frozen=True):
    """One Variable: `key` is the name of its array, `name` its own. `key_type` is the generator of
    random keys, whose array has their words as ``uint32``."""

    key: str
    name: str
    array: ArrayRecord
    trainable: bool
    key_type: str | None = None


class Program(Record, frozen=True):
    """An exported program, and those by which JAX differentiates it.

    Attributes:
      array: the name of the array that has it.
      gradients: its gradient programs, if the gradient is saved.
      value: what is run in its place where it is differentiated; None: the program itself.
      refused: the operands with respect to which it has no gradient, each with the reason.
      may_add: whether the gradient of several results is the sum of their single gradients. It is
        not where a rule of the user's makes a gradient: clip(3 + 4) is not clip(3) + clip(4).
    """

    array: str
    gradients: tuple[Gradient, ...] = ()
    value: Program | None = None
    refused: tuple[tuple[Natural, str], ...] = ()
    may_add: bool = True

    def arrays(self) -> Iterator[str]:
        """The names of all that are run in its place or to differentiate it, and its own."""
        yield self.array
        for below in (self.value, *(gradient.program for gradient in self.gradients)):
            if below is not None:
                yield from below.arrays()


class Gradient(Record, frozen=True):
    """A gradient program. It takes the operands and the cotangents of `results`, and returns the
    gradients of `operands`: those that are connected to some of `results`."""

    results: tuple[Natural, ...]
    operands: tuple[Natural, ...]
    program: Program


class FunctionRecord(Record, frozen=True):
    """One function. `signature` is a line for people. `reads` and `assigns` are positions in the
    list of Variables. `calls` has the targets of the custom calls in each of its programs."""

    name: str
    signature: str
    parameters: tuple[tuple[str, Kind], ...]
    constraints: tuple[str, ...]
    reads: tuple[Natural, ...]
    assigns: tuple[Natural, ...]
    platforms: tuple[str, ...]
    gradient_order: Natural
    calls: dict[str, tuple[str, ...]]
    program: Program

    @property
    def graph(self) -> str:
        """The array that has its Graph as text."""
        return f"{OWN}{self.name}/graph"


class Manifest(Record, frozen=True):
    """All that a file says. `single`: one function was saved, and not a dictionary of them.
    `digests` has the SHA-256 of each array."""

    versions: dict[str, str]
    single: bool
    variables: tuple[VariableRecord, ...]
    functions: tuple[FunctionRecord, ...]
    digests: dict[str, str]
