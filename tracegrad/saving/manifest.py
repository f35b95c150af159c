"""What a manifest says of the functions and Variables in the file: written, read and checked.

``docs/artefact.md`` describes every field.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracegrad.saving import documents, structure
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.structure import Structure

MANIFEST = "manifest.json"
VARIABLES = "variables.safetensors"

HIGHEST_ORDER = 32
"""How many times a saved function can be differentiated at most."""

_KINDS = {
    "positional": inspect.Parameter.POSITIONAL_ONLY,
    "either": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
}
_KIND_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class VariableRecord:
    """One Variable: `key` is the name of its array among the tensors, `name` its own.

    `dtype` and `shape` are those of the Variable. `key_type` is the random number generator of
    one that holds keys, whose array has the keys' words as ``uint32``; else None.
    """

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool
    key_type: str | None = None


@dataclass(frozen=True)
class ProgramRecord:
    """One program: the function itself, or a derivative of it.

    `connected` has, for each result, the operands (by position) from which a gradient arrives.
    `refused` has the operands with respect to which it cannot be differentiated, and why. `calls`
    has the targets of the custom calls in it. `value` is what is run in its place where it is
    differentiated (None: itself), `gradient` its derivative (None: there is none, or it was not
    saved).
    """

    member: str
    connected: tuple[tuple[int, ...], ...]
    refused: tuple[tuple[int, str], ...]
    calls: tuple[str, ...]
    value: ProgramRecord | None
    gradient: ProgramRecord | None

    def all(self) -> Iterator[ProgramRecord]:
        """This one and all below it."""
        yield self
        for below in (self.value, self.gradient):
            if below is not None:
                yield from below.all()


@dataclass(frozen=True)
class FunctionRecord:
    """One function.

    `parameters` are pairs of a name and a kind (a key of ``_KINDS``), one for each of `arguments`,
    the structures of the arguments. `reads` and `assigns` are positions in the list of Variables.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    arguments: tuple[Structure, ...]
    result: Structure
    reads: tuple[int, ...]
    assigns: tuple[int, ...]
    platforms: tuple[str, ...]
    gradient_order: int
    constraints: tuple[str, ...]
    program: ProgramRecord
    graph: str

    @property
    def programs(self) -> tuple[ProgramRecord, ...]:
        """Its programs, each member once, the function's own first."""
        found = {record.member: record for record in reversed(list(self.program.all()))}
        return tuple(reversed(found.values()))

    def signature(self) -> inspect.Signature:
        """What it is called with; without default values."""
        return inspect.Signature(
            [inspect.Parameter(name, _KINDS[kind]) for name, kind in self.parameters]
        )


@dataclass(frozen=True)
class Manifest:
    """All that is said in a manifest beside the members."""

    versions: Mapping[str, str]
    single: bool  # whether one function was saved, not a dictionary of them
    variables: tuple[VariableRecord, ...]
    functions: tuple[FunctionRecord, ...]

    @property
    def written_by(self) -> str:
        return f"tracegrad {self.versions['tracegrad']} with JAX {self.versions['jax']}"


def kind_name(kind: Any) -> str:
    """What the kind of a parameter is called in a manifest."""
    return _KIND_NAMES[kind]


def to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest's own part of the document."""
    return {
        "format": "tracegrad artefact",
        "versions": dict(manifest.versions),
        "single": manifest.single,
        "variables": [asdict(record) for record in manifest.variables],
        "functions": [asdict(record) for record in manifest.functions],
    }


# ---------------------------------------------------------------------------------- from a file


def _parameter(value: Any) -> str | None:
    good = type(value) is list and len(value) == 2 and all(type(each) is str for each in value)
    if good and structure.why_no_name(value[0]) is None and value[1] in _KINDS:
        return None
    return f"a pair of a name and one of {', '.join(_KINDS)}"


_VARIABLE = {
    "key": str,
    "name": str,
    "dtype": str,
    "shape": [documents.natural],
    "trainable": bool,
    "key_type": (str, type(None)),
}
_FUNCTION = {
    "name": str,
    "parameters": [_parameter],
    "arguments": [structure.anything],
    "result": structure.anything,
    "reads": [documents.natural],
    "assigns": [documents.natural],
    "platforms": [str],
    "gradient_order": documents.natural,
    "constraints": [str],
    "program": structure.anything,
    "graph": str,
}


def _refusal(value: Any) -> str | None:
    good = type(value) is list and len(value) == 2 and documents.natural(value[0]) is None
    return None if good and type(value[1]) is str else "a pair of a position and a reason"


_PROGRAM = {
    "member": str,
    "connected": [[documents.natural]],
    "refused": [_refusal],
    "calls": [str],
    "value": structure.anything,
    "gradient": structure.anything,
}
_SCHEMA = {
    "format": documents.one_of("tracegrad artefact"),
    "format_version": int,
    "members": dict,
    "versions": {"tracegrad": str, "jax": str, "jaxlib": str},
    "single": bool,
    "variables": [_VARIABLE],
    "functions": [_FUNCTION],
}


def from_json(document: dict[str, Any]) -> Manifest:
    """What the document says.

    Raises ArtefactError, naming the field, where it is no manifest of saved functions.
    """
    documents.check(document, _SCHEMA, MANIFEST)
    variables = [VariableRecord(**_with_tuples(v, "shape")) for v in document["variables"]]
    _check_unique([v.key for v in variables], "variables")
    functions = [
        _function(record, f"functions[{i}]", len(variables), document["members"])
        for i, record in enumerate(document["functions"])
    ]
    _check_unique([f.name for f in functions], "functions")
    single = document["single"]
    if not functions or (single and len(functions) != 1):
        raise ArtefactError(MANIFEST, f"functions has {len(functions)} entries, single is {single}")
    if variables and VARIABLES not in document["members"]:
        raise ArtefactError(VARIABLES, "the manifest lists Variables, and no such member")
    used = {name for f in functions for name in (f.graph, *(p.member for p in f.programs))}
    unused = sorted(set(document["members"]) - used - ({VARIABLES} if variables else set()))
    if unused:
        raise ArtefactError(unused[0], "nothing in the manifest refers to it")
    return Manifest(document["versions"], single, tuple(variables), tuple(functions))


def _function(
    record: dict[str, Any], where: str, variables: int, members: Mapping[str, Any]
) -> FunctionRecord:
    for i, tree in enumerate(record["arguments"]):
        structure.check(tree, MANIFEST, f"{where}.arguments[{i}]")
    structure.check(record["result"], MANIFEST, f"{where}.result")
    for field in ("reads", "assigns"):
        if any(i >= variables for i in record[field]) or len(set(record[field])) < len(
            record[field]
        ):
            raise ArtefactError(
                MANIFEST, f"{where}.{field} names a Variable twice, or one that is not listed"
            )
    program = _program(record["program"], f"{where}.program")
    for member in (record["graph"], *(each.member for each in program.all())):
        if member not in members:
            raise ArtefactError(MANIFEST, f"{where} refers to the member {member!r}, not listed")
    if len(record["parameters"]) != len(record["arguments"]):
        raise ArtefactError(MANIFEST, f"{where} has not one parameter for each argument")
    plain = _with_tuples(record, "arguments", "reads", "assigns", "platforms", "constraints")
    parameters = tuple((name, kind) for name, kind in record["parameters"])
    found = FunctionRecord(**{**plain, "parameters": parameters, "program": program})
    try:
        found.signature()
    except ValueError as error:
        raise ArtefactError(MANIFEST, f"{where}.parameters: {error}") from None
    return found


def _program(value: Any, where: str, depth: int = 0) -> ProgramRecord:
    if depth > HIGHEST_ORDER:
        raise ArtefactError(MANIFEST, f"{where} has derivatives beyond order {HIGHEST_ORDER}")
    documents.check(value, _PROGRAM, MANIFEST, where)
    below = (
        None if value[key] is None else _program(value[key], f"{where}.{key}", depth + 1)
        for key in ("value", "gradient")
    )
    connected, refused = (tuple(map(tuple, value[key])) for key in ("connected", "refused"))
    return ProgramRecord(value["member"], connected, refused, tuple(value["calls"]), *below)


def _with_tuples(record: Mapping[str, Any], *fields: str) -> dict[str, Any]:
    return {**record, **{field: tuple(record[field]) for field in fields}}


def _check_unique(names: Sequence[str], where: str) -> None:
    if len(set(names)) != len(names):
        raise ArtefactError(MANIFEST, f"{where} has two entries of one name")
