"""What stands in the file of a plan: JSON, as these records say."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tracegrad.planning.simulation import Segment
from tracegrad.saving import documents
from tracegrad.saving.atomic import replacing
from tracegrad.saving.documents import Natural
from tracegrad.saving.errors import ArtefactError

FORMAT = "tracegrad recompute plan"
VERSION = 10
AGAIN = "Plan again, and save that: plan_recompute(fun, memory_budget)(*args).save(path)"


@dataclass(frozen=True)
class PlanRecord:
    """A `tracegrad.planning.plan.RecomputePlan`: what it takes to make it again of its function.

    `program` tells the program from others (see `fingerprint`), and `summary` is what the plan
    prints as, for whoever looks into the file. For `fusion` and `beside` see `fusion.written_down`;
    `scan_variant` is the number of the way to run its scans.
    """

    format: str
    version: int
    name: str
    program: str
    summary: tuple[str, ...]
    budget: Natural
    held: Natural | None
    held_without: Natural | None
    measured_on: str
    target: Natural
    transfer: float | None
    fusion: str | None
    beside: dict[str, Natural]
    scans: str
    scan_variant: Natural
    segments: tuple[Segment, ...]
    differentiated: tuple[bool, ...]


def write(record: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Raises OSError; a file that was there is whole then."""
    text = json.dumps(
        record, default=lambda x: sorted(x) if isinstance(x, frozenset) else vars(x), indent=1
    )
    with replacing(path) as file:
        file.write(f"{text}\n".encode())


def read(path: str | os.PathLike[str]) -> PlanRecord:
    """Raises OSError, and ValueError for a file that is no plan, or not one of this version."""
    try:
        data = documents.read(Path(path).read_bytes(), "plan")
        if data.get("format") != FORMAT:
            raise ArtefactError("plan", f"there is no {FORMAT!r} in it")
        if data.get("version") != VERSION:
            version = documents.show(data.get("version"))
            raise ArtefactError("plan", f"it is of version {version}, and {VERSION} can be read")
        return documents.parse(PlanRecord, data, "plan")
    except ArtefactError as error:
        raise ValueError(f"{path} is not a recompute plan: {error.reason}. {AGAIN}") from error
