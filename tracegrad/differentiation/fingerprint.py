"""What tells one program, and its gradient, from others."""

from __future__ import annotations

import contextlib
import hashlib
import re

import jax

from tracegrad.differentiation.graph_gradient import gradient_of, with_operands
from tracegrad.ir import Graph, has_gradient


def fingerprint(graph: Graph) -> str:
    """Of what JAX writes of a program and of its gradient: the same in any process.

    In that stand operations, parameters, regions, types and, as the gradient takes them, custom
    rules, in their order, at any depth. The values of constants do not count, since no plan depends
    on them, nor does what functions do on the host.
    """
    constants = list(graph.constants)
    operands = [*graph.inputs, *constants]
    active = [i for i, value in enumerate(operands) if has_gradient(value)]
    types = [value.aval for value in operands]
    cotangents = [value.aval for value in graph.outputs if has_gradient(value)]
    written = [str(jax.make_jaxpr(with_operands(graph, constants))(types))]
    with contextlib.suppress(Exception):  # who differentiates it is told why
        gradient = gradient_of(graph, constants, active)
        written.append(str(jax.make_jaxpr(gradient)(types, cotangents)))
    text = re.sub(r" at 0x[0-9a-f]+", "", "".join(written))  # as every process writes it
    text = re.sub(r"set\(\{([^{}]*)\}", lambda found: str(sorted(found[1].split(", "))), text)
    return hashlib.sha256(text.encode()).hexdigest()
