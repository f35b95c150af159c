"""The file of a plan: JSON, with what the plan prints as, for whoever reviews it, and what it takes
to make it again of its function, sealed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracegrad.saving import documents
from tracegrad.saving.atomic import replacing
from tracegrad.saving.errors import ArtefactError

_FORMAT = "tracegrad recompute plan"
_VERSION = 12
AGAIN = "Plan again, and save that: plan_recompute(fun, memory_budget)(*args).save(path)"


def write(path: str | os.PathLike[str], summary: Sequence[str], plan: dict[str, Any]) -> None:
    """Raises OSError; a file that was there is whole then."""
    text = json.dumps(plan, default=lambda x: sorted(x) if isinstance(x, frozenset) else vars(x))
    head = {"format": _FORMAT, "version": _VERSION, "summary": list(summary)}
    seal = _digest(f"{head['summary']}{text}")
    with replacing(path) as file:
        file.write(json.dumps(head | {"plan": text, "seal": seal}, indent=1).encode())


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What was written, frozen sets as lists.

    Raises OSError, and ValueError for a file that is no plan, or not as this version wrote it.
    """
    try:
        data = documents.read(Path(path).read_bytes(), "plan")
        if data.get("format") != _FORMAT:
            raise ArtefactError("plan", f"there is no {_FORMAT!r} in it")
        if data.get("version") != _VERSION:
            version = documents.show(data.get("version"))
            raise ArtefactError("plan", f"it is of version {version}, and {_VERSION} can be read")
        if data.get("seal") != _digest(f"{data.get('summary')}{data.get('plan')}"):
            raise ArtefactError("plan", "it was changed after it was written, by its seal")
    except ArtefactError as error:
        raise ValueError(f"{path} is not a recompute plan: {error.reason}. {AGAIN}") from error
    found: dict[str, Any] = json.loads(data["plan"])
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
