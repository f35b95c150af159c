"""What is in an artefact, for people and programs to read: nothing of it is loaded."""

from __future__ import annotations

import os
from typing import Any

from tracegrad.saving.container import FORMAT_VERSION, open_container
from tracegrad.saving.load import graph_text
from tracegrad.saving.manifest import manifest_of


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what a file says of itself: the header with the manifest, and the graphs.

    What is read has been compared with its checksum. The programs and the values of the Variables
    are not read: `verification.verify` does that.

    Args:
        path: the file.

    Returns:
        What JSON can have: `path`, `size` in bytes, `format_version`, `versions` of what wrote it;
        `functions`, each with its name, its `signature` as one line, the `constraints` on its open
        sizes, the keys of the Variables that it `reads` and `assigns`, `platforms`,
        `gradient_order`, the names of its `programs`, what these call that is not in them (`calls`,
        the targets of XLA's custom calls), and its `graph` as text; `variables`, as in the
        manifest, with their `size` in bytes; `arrays`, each with its name, its `size` and the
        `sha256` that it should have.

    Raises:
        ArtefactError: the file is damaged, or none that `save` wrote.
        OSError: it is not there, or may not be read.
    """
    with open_container(path, check=False) as container:
        manifest = manifest_of(container)
        keys = [record.key for record in manifest.variables]
        sizes = {name: tensor.end - tensor.start for name, tensor in container.tensors.items()}
        return {
            "path": container.path,
            "size": container.size,
            "format_version": FORMAT_VERSION,
            "versions": vars(manifest.versions),
            "functions": [
                {
                    "name": record.name,
                    "signature": str(record),
                    "constraints": record.constraints,
                    "reads": [keys[i] for i in record.reads],
                    "assigns": [keys[i] for i in record.assigns],
                    "platforms": record.platforms,
                    "gradient_order": record.gradient_order,
                    "programs": record.programs,
                    "calls": sorted({call for calls in record.calls for call in calls}),
                    "graph": graph_text(container, record),
                }
                for record in manifest.functions
            ],
            "variables": [{**vars(v), "size": sizes[v.key]} for v in manifest.variables],
            "arrays": [
                {"name": name, "size": size, "sha256": container.sha256(name)}
                for name, size in sizes.items()
            ],
        }
