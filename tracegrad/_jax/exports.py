"""Adds to `jax.export`: constraints of sizes, programs without folders, and a program's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import deserialize_portable_artifact
from jax.interpreters import mlir  # noqa: TID251 (for a context to parse programs)

from tracegrad._jax.replacement import settings


def symbolic_constraints(avals: Sequence[Any]) -> list[str]:
    """The user's constraints of the symbolic dimensions of types: ``b >= 4``.

    `jax.export` does not write the constraints, and has no public function for them.
    """
    found: dict[str, None] = {}
    for aval in avals:
        for dimension in aval.shape:
            for constraint in getattr(
                getattr(dimension, "scope", None), "_explicit_constraints", ()
            ):
                found[constraint.debug_str] = None
    return list(found)


# Programs that are lowered with this setting do not contain the folders of source files. So saved
# programs do not depend on the folder of the code, nor reveal the folder. A user's own value is
# kept.
_NO_FOLDERS = {"jax_hlo_source_file_canonicalization_regex": r".*[/\\]"}
without_folders = settings(_NO_FOLDERS, unless_set=True)


# The dialects of the programs, modules and functions that `jax.export` writes.
_DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "sdy"})


def outside_calls(exported: Any) -> list[str]:
    """Names the code outside of an exported program (`jax.export.Exported`) that the program calls:
    the targets of XLA's custom calls, and operations of dialects that JAX does not write.

    Parses the program, because the text, its only public form, is several times as large. Raises
    XLA's errors; bytes that JAX did not write may make XLA end the process.
    """
    found: set[str] = set()
    with mlir.make_ir_context():
        module = deserialize_portable_artifact(exported.mlir_module_serialized)
        waiting: list[Any] = [module.operation]
        while waiting:
            operation = waiting.pop()
            name: str = operation.name
            if name == "stablehlo.custom_call":
                target = operation.attributes["call_target_name"]
                found.add(target.value_bytes.decode("utf-8", "backslashreplace"))
            elif name.partition(".")[0] not in _DIALECTS:
                found.add(name)
            waiting += [
                inner.operation
                for region in operation.regions
                for block in region
                for inner in block
            ]
    return sorted(found)
