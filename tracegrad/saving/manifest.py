"""The records of functions and Variables in a file: typed, and written as JSON in its header.

``docs/artefact.md`` describes every field. If a field is missing, unknown or of another type,
reading raises an error that names the field.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Literal

from tracegrad.saving.libraries import msgspec

FORMAT = 2
"""The number of the format that this version writes and reads. (Format 1 was never released.)"""
OWN = "tracegrad/"
"""The prefix of the names of arrays that are not Variables, but programs."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
Kind = Literal["positional", "either", "keyword", "*", "**"]

KINDS: dict[Kind, inspect._ParameterKind] = {
    "positional": inspect.Parameter.POSITIONAL_ONLY,
    "either": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
    "*": inspect.Parameter.VAR_POSITIONAL,
    "**": inspect.Parameter.VAR_KEYWORD,
}
"""The names of the kinds of parameters in a manifest."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a manifest."""


class ArrayRecord(Record, frozen=True):
    """`dtype` is a name such as ``float32`` or ``key<fry>``."""

    dtype: str
    shape: tuple[Natural, ...]


class VariableRecord(Record, frozen=True):
    """`key` names the array in the file, `name` is the Variable's own name. If the Variable holds
    random keys, `key_type` is their generator, and the array has their words as ``uint32``."""

    key: str
    name: str
    array: ArrayRecord
    trainable: bool
    key_type: str | None = None


class Program(Record, frozen=True):
    """An exported program, and the programs of its derivatives.

    Attributes:
      array: the name of the array that holds the program.
      gradients: its gradient programs, if the gradient is saved.
      value: the program that runs instead under differentiation; None: the program itself.
      may_add: whether the gradient of several results is the sum of their single gradients. With a
        custom gradient this is false: clip(3 + 4) is not clip(3) + clip(4).
    """

    array: str
    gradients: tuple[Gradient, ...] = ()
    value: Program | None = None
    may_add: bool = True


class Gradient(Record, frozen=True):
    """A gradient program takes all operands of the function and the cotangents of `results`, and
    returns the gradients of `operands`: the operands on which some of `results` depend."""

    results: tuple[Natural, ...]
    operands: tuple[Natural, ...]
    program: Program


class FunctionRecord(Record, frozen=True):
    """`signature` is one line of text for people. `reads` and `assigns` are positions in the list
    of Variables. `calls` maps the array of each program to the targets of its custom calls."""

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


class Digested(Record, frozen=True):
    """What a file says of itself. `digests` has the SHA-256 of each array; in the seal of a
    checkpoint, of each file."""

    versions: dict[str, str]
    digests: dict[str, str]


class Manifest(Digested, frozen=True):
    """`single` is false if a dictionary of functions was saved."""

    single: bool
    variables: tuple[VariableRecord, ...]
    functions: tuple[FunctionRecord, ...]


class Seal(Digested, frozen=True):
    """The manifest of a complete checkpoint, in a file of its own."""

    arrays: dict[str, ArrayRecord]
