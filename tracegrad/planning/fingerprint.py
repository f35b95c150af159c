"""What tells one program from another, in any process: what JAX writes of it and of its gradient.

In that stand operations, parameters, regions, types and, as the gradient takes them, custom rules.
The values of constants do not count, since no plan depends on them, nor does what functions do on
the host.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.lowering.evaluate import evaluate


def fingerprint(graph: Graph) -> str:
    """Equal for programs of the same operations with the same parameters, on the same types in the
    same order, at any depth."""
    values = (*graph.inputs, *graph.constants)
    active = [i for i, value in enumerate(values) if value.has_gradient]
    flowing = [i for i, value in enumerate(graph.outputs) if value.has_gradient]
    cotangents = [graph.outputs[i].aval for i in flowing]

    def run(operands: Any) -> list[Any]:
        here = graph.copy()
        for value, array in zip(here.constants, operands[len(graph.inputs) :], strict=True):
            here.set_constant(value, array)
        return evaluate(here, operands[: len(graph.inputs)])

    def gradient(operands: Any, given: list[Any]) -> Any:
        return _jax.vjp_of_some(run, operands, active, flowing)[1](given)

    types = [value.aval for value in values]
    written = [str(jax.make_jaxpr(run)(types))]
    with contextlib.suppress(Exception):  # who differentiates it is told why
        written.append(str(jax.make_jaxpr(gradient)(types, cotangents)))
    return hashlib.sha256(_everywhere("".join(written)).encode()).hexdigest()


def _everywhere(text: str) -> str:
    """A program as text, as every process writes it: without addresses, and with sets in order."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"set\(\{([^{}]*)\}", lambda found: str(sorted(found[1].split(", "))), text)
