"""The file of a plan: JSON, with what the plan prints as, for whoever reviews it, and what it takes
to make it again of its function, sealed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from tracegrad.differentiation.graph_gradient import gradient_of, with_operands
from tracegrad.ir import Graph
from tracegrad.saving import documents
from tracegrad.saving.atomic import replacing
from tracegrad.saving.errors import ArtefactError

_FORMAT = "tracegrad recompute plan"
_VERSION = 11
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


def fingerprint(graph: Graph) -> str:
    """What tells a program from others, in any process: what JAX writes of it and of its gradient.

    In that stand operations, parameters, regions, types and, as the gradient takes them, custom
    rules, in their order, at any depth. The values of constants do not count, since no plan depends
    on them, nor does what functions do on the host.
    """
    constants = list(graph.constants)
    operands = [*graph.inputs, *constants]
    active = [i for i, value in enumerate(operands) if value.has_gradient]
    types = [value.aval for value in operands]
    cotangents = [value.aval for value in graph.outputs if value.has_gradient]
    written = [str(jax.make_jaxpr(with_operands(graph, constants))(types))]
    with contextlib.suppress(Exception):  # who differentiates it is told why
        gradient = gradient_of(graph, constants, active)
        written.append(str(jax.make_jaxpr(gradient)(types, cotangents)))
    text = re.sub(r" at 0x[0-9a-f]+", "", "".join(written))  # as every process writes it
    text = re.sub(r"set\(\{([^{}]*)\}", lambda found: str(sorted(found[1].split(", "))), text)
    return _digest(text)
