"""What `jax.export` has no public way for: constraints, folders, and what a program calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.mlir import deserialize_portable_artifact
from jax.interpreters import mlir  # noqa: TID251 (see `identity_primitive`)


def symbolic_constraints(avals: Sequence[Any]) -> list[str]:
    """The constraints that a user put on the symbolic dimensions of types: ``b >= 4``.

    `jax.export` does not write them, and has no public way to ask for them.
    """
    found: dict[str, None] = {}
    for aval in avals:
        for dimension in aval.shape:
            for constraint in getattr(
                getattr(dimension, "scope", None), "_explicit_constraints", ()
            ):
                found[constraint.debug_str] = None
    return list(found)


@contextmanager
def without_folders() -> Iterator[None]:
    """Leaves the folders of source files out of programs that are lowered inside it: what is
    written to be given away does not tell where it was made, and is the same wherever that was.

    JAX's setting for that holds for the whole process; a user's own is left as it is.
    """
    name = "jax_hlo_source_file_canonicalization_regex"
    is_free = getattr(jax.config, name) is None
    if is_free:
        jax.config.update(name, r".*[/\\]")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if is_free:
            jax.config.update(name, None)  # type: ignore[no-untyped-call]


# The dialects in which `jax.export` writes programs, with what holds the functions together.
_DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "sdy"})


def outside_calls(exported: Any) -> list[str]:
    """What a written program (`jax.export.Exported`) calls that is not in it, by its names: the
    targets of XLA's custom calls, and operations of no dialect that JAX writes.

    JAX shows a program as text only; that of a large one is several times its size. Raises
    whatever XLA raises; of bytes that no JAX wrote it may end the process.
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
