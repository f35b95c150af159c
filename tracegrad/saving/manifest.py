"""What a manifest says of the functions and Variables in the file: written, read and checked.

``docs/artefact.md`` describes every field.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from tracegrad.saving import documents, structure
from tracegrad.saving.container import MANIFEST, Container
from tracegrad.saving.documents import Natural
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.placement import Placement
from tracegrad.saving.program_tree import ProgramTree
from tracegrad.saving.tensors import HEADER

OWN = "tracegrad/"
"""What the names of those arrays begin with that are no Variables: programs, texts, the seal."""
HIGHEST_ORDER = 32
"""How many times a saved function can be differentiated at most."""

_KINDS = {
    "positional": inspect.Parameter.POSITIONAL_ONLY,
    "either": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
}
KIND_NAMES = {kind: name for name, kind in _KINDS.items()}
"""What the kinds of parameters are called in a manifest."""


@dataclass(frozen=True)
class VariableRecord:
    """One Variable: `key` is the name of its array, `name` its own.

    `dtype` and `shape` are those of the Variable. `key_type` is the random number generator of
    one that holds keys, whose array has the keys' words as ``uint32``; else None. `placement`: how
    its array was split.
    """

    key: str
    name: str
    dtype: str
    shape: tuple[Natural, ...]
    trainable: bool
    key_type: str | None
    placement: Placement | None


@dataclass(frozen=True)
class FunctionRecord:
    """One function.

    `parameters` are pairs of a name and a kind (a key of ``_KINDS``), one for each of `arguments`.
    These and `result` are trees of `structure.Leaf`s; in the file they are JSON. `reads` and
    `assigns` are positions in the list of Variables. `calls` has the targets of the custom calls in
    each of its programs, to whose positions `tree` refers.
    """

    name: str
    parameters: tuple[tuple[str, Annotated[str, documents.one_of(*_KINDS)]], ...]
    arguments: tuple[Any, ...]
    result: Any
    reads: tuple[Natural, ...]
    assigns: tuple[Natural, ...]
    platforms: tuple[str, ...]
    gradient_order: Natural
    constraints: tuple[str, ...]
    calls: tuple[tuple[str, ...], ...]
    tree: ProgramTree[int]

    @property
    def graph(self) -> str:
        """The array that has its Graph as text."""
        return f"{OWN}{self.name}/graph"

    @property
    def programs(self) -> tuple[str, ...]:
        """The arrays that its programs are, its own first."""
        return tuple(f"{OWN}{self.name}/program_{k}" for k in range(len(self.calls)))

    def __str__(self) -> str:
        """What it takes and returns, as one line."""
        pairs = zip(self.parameters, self.arguments, strict=True)
        given = ", ".join(f"{name}: {tree}" for (name, _), tree in pairs)
        return f"{self.name}({given}) -> {self.result}"

    def signature(self) -> inspect.Signature:
        """What it is called with; without default values."""
        return inspect.Signature(
            [inspect.Parameter(name, _KINDS[kind]) for name, kind in self.parameters]
        )


@dataclass(frozen=True)
class Versions:
    """What wrote the file."""

    tracegrad: str
    jax: str
    jaxlib: str

    def __str__(self) -> str:
        return f"tracegrad {self.tracegrad} with JAX {self.jax}"


@dataclass(frozen=True)
class Manifest:
    """All that it says; `single`: one function was saved, and not a dictionary of them."""

    versions: Versions
    single: bool
    variables: tuple[VariableRecord, ...]
    functions: tuple[FunctionRecord, ...]


def to_json(manifest: Manifest) -> Manifest:
    """What is written of it: its trees as JSON has them."""
    functions = (
        replace(
            f,
            arguments=tuple(structure.describe(tree, f.name) for tree in f.arguments),
            result=structure.describe(f.result, f.name),
        )
        for f in manifest.functions
    )
    return replace(manifest, functions=tuple(functions))


# ---------------------------------------------------------------------------------- from a file


def manifest_of(container: Container) -> Manifest:
    """What a file says of its functions.

    Raises ArtefactError, naming the field, where it is no manifest of saved functions in such a
    file.
    """
    if not container.tensors:
        reason = "it names parts of Variables, which load_variables reads, and no functions"
        raise ArtefactError(MANIFEST, reason)
    manifest = documents.parse(Manifest, container.manifest, MANIFEST)
    check_unique([v.key for v in manifest.variables], "variables")
    check_unique([f.name for f in manifest.functions], "functions")
    count = len(manifest.functions)
    if not count or (manifest.single and count != 1):
        reason = f"functions has {count} entries, single is {manifest.single}"
        raise ArtefactError(MANIFEST, reason)
    functions = tuple(_with_trees(f, f"functions[{i}]") for i, f in enumerate(manifest.functions))
    for i, function in enumerate(functions):
        _check_function(function, f"functions[{i}]", len(manifest.variables))
    of_functions = {a for f in manifest.functions for a in (f.graph, *f.programs)}
    keys = {v.key for v in manifest.variables}
    if any(key.startswith(OWN) for key in keys):
        raise ArtefactError(MANIFEST, f"a Variable has a key that begins with {OWN}")
    wanted, found = keys | of_functions, set(container.tensors)
    for name in sorted(wanted - found):
        reason = "the manifest refers to it, and the file has no such array"
        raise ArtefactError(name or MANIFEST, reason)
    for name in sorted(found - wanted):
        raise ArtefactError(name or HEADER, "the manifest does not refer to it")
    return replace(manifest, functions=functions)


def _with_trees(record: FunctionRecord, where: str) -> FunctionRecord:
    arguments = tuple(
        structure.read(tree, MANIFEST, f"{where}.arguments[{i}]")
        for i, tree in enumerate(record.arguments)
    )
    result = structure.read(record.result, MANIFEST, f"{where}.result")
    return replace(record, arguments=arguments, result=result)


def _check_function(record: FunctionRecord, where: str, variables: int) -> None:
    for field, positions in (("reads", record.reads), ("assigns", record.assigns)):
        if any(i >= variables for i in positions) or len(set(positions)) < len(positions):
            raise ArtefactError(
                MANIFEST, f"{where}.{field} names a Variable twice, or one that is not listed"
            )
    for program, order in record.tree.all():
        if documents.natural(program) is not None or program >= len(record.calls):
            reason = f"{where}.tree refers to a program {documents.show(program)}, of which there "
            raise ArtefactError(MANIFEST, f"{reason}are {len(record.calls)}")
        if order > HIGHEST_ORDER:
            raise ArtefactError(MANIFEST, f"{where} has derivatives beyond order {HIGHEST_ORDER}")
    unused = set(range(len(record.calls))) - {program for program, _ in record.tree.all()}
    if unused:
        raise ArtefactError(record.programs[min(unused)], "nothing in the manifest refers to it")
    if len(record.parameters) != len(record.arguments):
        raise ArtefactError(MANIFEST, f"{where} has not one parameter for each argument")
    for name, _ in record.parameters:
        if (why := structure.why_no_name(name)) is not None:
            raise ArtefactError(MANIFEST, f"{where}.parameters: {why}")
    try:
        record.signature()
    except ValueError as error:
        raise ArtefactError(MANIFEST, f"{where}.parameters: {error}") from None


def check_unique(names: Sequence[str], where: str) -> None:
    """Raises ArtefactError if something in a manifest has a name twice."""
    if len(set(names)) != len(names):
        raise ArtefactError(MANIFEST, f"{where} has two entries of one name")
