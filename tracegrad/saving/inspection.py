"""What is in an artefact, for people and programs to read: nothing of it is loaded."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.saving import dimensions, structure
from tracegrad.saving.container import open_container
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.load import tree_text
from tracegrad.saving.manifest import VARIABLES, FunctionRecord, VariableRecord, from_json
from tracegrad.saving.structure import Structure
from tracegrad.saving.tensors import Tensor, read_header


@dataclass(frozen=True)
class Function:
    """What is known of a saved function.

    Attributes:
        name: of the function.
        signature: what it takes and returns, as one line.
        constraints: those on its open dimensions, such as ``b >= 4``.
        reads, assigns: the keys of the Variables that it reads, and assigns.
        platforms: where it runs.
        gradient_order: how many times it can be differentiated.
        programs: the members with its program and those of its derivatives.
        calls: what these call that is not in them, the targets of XLA's custom calls.
        graph: its Graph as text.
    """

    name: str
    signature: str
    constraints: tuple[str, ...]
    reads: tuple[str, ...]
    assigns: tuple[str, ...]
    platforms: tuple[str, ...]
    gradient_order: int
    programs: tuple[str, ...]
    calls: tuple[str, ...]
    graph: str


@dataclass(frozen=True)
class SavedVariable:
    """What is known of a saved Variable: its name in the file, its own, and its size in bytes."""

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool
    size: int


@dataclass(frozen=True)
class Member:
    """A member of the file: its size in bytes, and the SHA-256 that it should have."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Inspection:
    """What is in an artefact of `size` bytes."""

    path: str
    size: int
    format_version: int
    versions: dict[str, str]
    functions: tuple[Function, ...]
    variables: tuple[SavedVariable, ...]
    members: tuple[Member, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return asdict(self)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Reads what a file says of itself: the manifest, the graphs, the header of the Variables.

    What is read has been compared with its checksum. The programs and the values of the Variables
    are not read: `verification.verify` does that.

    Args:
        path: the file.

    Raises:
        ArtefactError: the file is damaged, or none that `save` wrote.
        OSError: it is not there, or may not be read.
    """
    with open_container(path, check=False) as container:
        manifest = from_json(container.manifest)
        tensors: dict[str, Tensor] = {}
        if manifest.variables:
            tensors = read_header(container.member(VARIABLES), VARIABLES)
        keys = [record.key for record in manifest.variables]
        functions = tuple(
            _function(record, keys, bytes(container.member(record.graph)))
            for record in manifest.functions
        )
        listed = container.manifest["members"]
        return Inspection(
            path=container.path,
            size=container.size,
            format_version=container.manifest["format_version"],
            versions=dict(manifest.versions),
            functions=functions,
            variables=tuple(_variable(record, tensors) for record in manifest.variables),
            members=tuple(
                Member(name, container.length(name), listed[name]["sha256"]) for name in container
            ),
        )


def _function(record: FunctionRecord, keys: list[str], graph: bytes) -> Function:
    try:
        text = graph.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtefactError(record.graph, f"it is no text in UTF-8: {error}") from None
    return Function(
        name=record.name,
        signature=_signature(record),
        constraints=record.constraints,
        reads=tuple(keys[i] for i in record.reads),
        assigns=tuple(keys[i] for i in record.assigns),
        platforms=record.platforms,
        gradient_order=record.gradient_order,
        programs=tuple(program.member for program in record.programs),
        calls=tuple(sorted({call for program in record.programs for call in program.calls})),
        graph=text,
    )


def _variable(record: VariableRecord, tensors: dict[str, Tensor]) -> SavedVariable:
    if record.key not in tensors:
        raise ArtefactError(VARIABLES, "its arrays are not the Variables of the manifest")
    tensor = tensors[record.key]
    size = tensor.end - tensor.start
    return SavedVariable(
        record.key, record.name, record.dtype, record.shape, record.trainable, size
    )


def _signature(record: FunctionRecord) -> str:
    """As `LoadedFunction.signature` has it, but without its programs."""
    given = (
        f"{name}: {_types(tree)}"
        for (name, _), tree in zip(record.parameters, record.arguments, strict=True)
    )
    return f"{record.name}({', '.join(given)}) -> {_types(record.result)}"


def _types(tree: Structure) -> str:
    leaves = (type_text(leaf["dtype"], tuple(leaf["shape"])) for leaf in structure.leaf_types(tree))
    return tree_text(structure.rebuild(tree, leaves))


def type_text(dtype: str, shape: tuple[int | str, ...]) -> str:
    """``f32[b,3]``; names that NumPy does not know, such as those of random keys, stay.

    Example:
        >>> type_text("float32", ("b", 3)), type_text("key<fry>", ())
        ('f32[b,3]', 'key<fry>[]')
    """
    try:
        short = _jax.type_text(jax.core.ShapedArray((), jnp.dtype(dtype))).removesuffix("[]")
    except TypeError:
        short = dtype
    return f"{short}{dimensions.shown(shape)}"
