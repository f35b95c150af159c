"""The file of a plan: JSON, with what the plan prints as, for whoever reviews it, and what it takes
to make it again of its function, sealed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracegrad.saving.atomic import replacing
from tracegrad.saving.errors import printable

_FORMAT = "tracegrad recompute plan"
_VERSION = 13
AGAIN = "Plan again, and save that: plan_recompute(fun, memory_budget)(*args).save(path)"


def write(path: str | os.PathLike[str], summary: Sequence[str], plan: dict[str, Any]) -> None:
    """Raises OSError; a file that was there is whole then."""
    text = json.dumps(plan, default=lambda x: sorted(x) if isinstance(x, frozenset) else vars(x))
    head = {"format": _FORMAT, "version": _VERSION, "summary": list(summary)}
    seal = _digest(f"{head['summary']}{text}")
    with replacing(path) as partial:
        Path(partial).write_text(json.dumps(head | {"plan": text, "seal": seal}, indent=1))


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What was written, frozen sets as lists.

    Raises OSError, and ValueError for a file that is no plan, or not as this version wrote it.
    """
    try:
        data = json.loads(Path(path).read_bytes())
        format_, version, summary, plan, seal = (
            data.get(key) for key in ("format", "version", "summary", "plan", "seal")
        )
    except (ValueError, AttributeError, RecursionError) as error:
        raise _no_plan(path, f"it is no JSON object: {error}") from error
    if format_ != _FORMAT:
        raise _no_plan(path, f"there is no {_FORMAT!r} in it")
    if version != _VERSION:
        raise _no_plan(path, f"it is of version {version!r:.60}, and {_VERSION} can be read")
    if seal != _digest(f"{summary}{plan}"):
        raise _no_plan(path, "it was changed after it was written, by its seal")
    found: dict[str, Any] = json.loads(plan)
    return found


def _no_plan(path: str | os.PathLike[str], reason: str) -> ValueError:
    return ValueError(printable(f"{path} is not a recompute plan: {reason}. {AGAIN}"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
