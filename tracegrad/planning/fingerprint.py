"""What tells one program from another, in any process: what JAX writes of it and of its gradient.

In that stand operations, parameters, regions, types and, as the gradient takes them, custom rules.
The values of constants do not count, since no plan depends on them, nor does what functions do on
the host.
"""

from __future__ import annotations

import contextlib
import hashlib
import re

import jax

from tracegrad.differentiation.graph_gradient import gradient_of, with_operands
from tracegrad.ir import Graph


def fingerprint(graph: Graph) -> str:
    """Equal for programs of the same operations with the same parameters, on the same types in the
    same order, at any depth."""
    constants = list(graph.constants)
    operands = [*graph.inputs, *constants]
    active = [i for i, value in enumerate(operands) if value.has_gradient]
    types = [value.aval for value in operands]
    cotangents = [value.aval for value in graph.outputs if value.has_gradient]
    written = [str(jax.make_jaxpr(with_operands(graph, constants))(types))]
    with contextlib.suppress(Exception):  # who differentiates it is told why
        gradient = gradient_of(graph, constants, active)
        written.append(str(jax.make_jaxpr(gradient)(types, cotangents)))
    return hashlib.sha256(_everywhere("".join(written)).encode()).hexdigest()


def _everywhere(text: str) -> str:
    """A program as text, as every process writes it: without addresses, and with sets in order."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"set\(\{([^{}]*)\}", lambda found: str(sorted(found[1].split(", "))), text)
