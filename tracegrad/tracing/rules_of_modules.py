"""Refuses rules of JAX that read a module of flax.nnx which a traced function closes over.

What the function itself reads of a module is an input of its program. The rule of a
`jax.custom_vjp` or `jax.custom_jvp` is run when the program is differentiated, and JAX keeps what
it found: gradients would be those of the weights of that time, beside values of today's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Occurrence, has_gradient, scopes
from tracegrad.ir.authors import file_of_primal
from tracegrad.ir.occurrence import is_own_file
from tracegrad.ir.running import run_node
from tracegrad.variables.listening import Listener, listening
from tracegrad.variables.outside import ModuleArray, Outside
from tracegrad.variables.variable import Variable


def refuse_rules_that_read(graph: Graph) -> None:
    """Raises RuntimeError for a rule in a graph, or below it, that reads an array of a module."""
    for found in graph.walk():
        node = found.node
        if isinstance(node, CustomGradient) and not is_own_file(file_of_primal(node)):
            stacks = map(scopes.around, found.steps)
            # Of code that is differentiated already the rule was run there.
            if not any("jvp" in scopes.transformations(stack) for stack in stacks):
                _refuse_reads(node)


def _refuse_reads(node: CustomGradient) -> None:
    reads = _Reads()
    avals = [value.aval for value in node.inputs]
    flowing = [i for i, value in enumerate(node.inputs) if has_gradient(value)]
    # What a rule raises is raised where somebody differentiates the function.
    with suppress(Exception):
        # By the last one: what the function closes over comes first, and JAX, which refuses to
        # differentiate a rule by that, keeps a rule that was refused as one without results.
        jax.make_jaxpr(functools.partial(_derivative, node, flowing[-1:], reads))(*avals)
    if reads.first is not None:
        raise RuntimeError(
            f"{Occurrence((), node)} has a jax.custom_{node.kind}, whose rule reads "
            f"{reads.first.name}, an array of a module that the traced function closes over: "
            "gradients would keep the value that it has now. Pass the array as an argument, or "
            "write the rule with tracegrad.custom_gradient"
        )


def _derivative(node: CustomGradient, active: Sequence[int], reads: _Reads, *operands: Any) -> Any:
    with Outside().watched(), listening(reads):
        if node.kind == "jvp":
            run = _jax.of_some(lambda xs: run_node(node, xs), operands, active)
            primals = [operands[i] for i in active]
            return _jax.jvp(run, primals, [jnp.ones_like(primal) for primal in primals])
        outs, back = _jax.vjp_of_some(lambda xs: run_node(node, xs), operands, active)
        flowing = [out for out in outs if _jax.has_gradient(jax.typeof(out))]
        return back(_jax.align(list(map(jax.typeof, outs)), flowing))


class _Reads(Listener):
    """Hears which array of a module is read first."""

    first: ModuleArray | None = None

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        if isinstance(variable, ModuleArray):
            self.first = self.first or variable
        return outside()
