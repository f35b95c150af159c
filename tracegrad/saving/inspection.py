"""Describes the contents of a saved file, without loading a program of it."""

from __future__ import annotations

import os
from typing import Any

from tracegrad.saving.file import open_file, read_header
from tracegrad.saving.libraries import msgspec
from tracegrad.saving.manifest import FORMAT, Manifest


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the manifest of a file, after comparing it with its SHA-256, and the sizes of the
    arrays. The arrays (Variables and programs) are not read; only `load` compares their digests.

    Args:
        path: the file.

    Returns:
        A dictionary that JSON can represent: `path`, `size` in bytes, `format`, and the fields of
        the manifest (``docs/artefact.md``). Each function and Variable has its `size` as well.

    Raises:
        ArtefactError: the header is damaged, or `save` did not write the file.
        OSError: the file does not exist or cannot be read.
    """
    with open_file(path) as file:
        size, manifest, spans = read_header(file, Manifest)
    sizes = {name: end - first for name, (first, end) in spans.items()}
    found: dict[str, Any] = msgspec.to_builtins(manifest)
    for record in found["functions"]:
        record["size"] = sum(sizes.get(name, 0) for name in record["calls"])
    for record in found["variables"]:
        record["size"] = sizes.get(record["key"], 0)
    return {"path": os.fspath(path), "size": size, "format": FORMAT, **found}
