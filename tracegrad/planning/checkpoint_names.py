"""Names the results of a node (`jax.ad_checkpoint.checkpoint_name`), for a policy to save them.

A name is an operation that comes after the node, and the policy saves the result of this operation.
The node is not recomputed only if no other operation reads the node's own result. But JAX's
derivative of ``tanh`` reads the result of ``tanh``. So a node whose derivative reads the node's
results becomes a function with JAX's derivative of the node, in which the results are named, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Node, Occurrence
from tracegrad.ir.editing import behind_each
from tracegrad.ir.importer import trace_jvp
from tracegrad.ir.running import run_graph, run_node
from tracegrad.rewriting.overriding import with_tangents


def named_results(
    node: Node, operands: Sequence[Any], names: Sequence[str], reads_results: bool
) -> list[Any]:
    """Runs a node and names its results; `reads_results`: whether the derivative reads them."""
    # The derivatives of loops and calls read values inside of them, and not their results.
    is_open = not node.regions or (isinstance(node, CustomGradient) and node.kind == "jvp")
    if reads_results and is_open:
        return _with_names(node, names)(*operands)
    return _named(run_node(node, operands), names)


def _with_name(value: Any, name: str) -> Any:
    """Returns the value with a name, by which a policy may save it."""
    if jnp.iscomplexobj(value):  # JAX rounds saved values, and cannot round complex ones
        return jax.lax.complex(_with_name(jnp.real(value), name), _with_name(jnp.imag(value), name))
    return checkpoint_name(value, name)  # type: ignore[no-untyped-call]


def _named(values: Sequence[Any], names: Sequence[str]) -> list[Any]:
    return [_with_name(value, name) for value, name in zip(values, names, strict=True)]


def _with_names(node: Node, names: Sequence[str]) -> Callable[..., list[Any]]:
    """Returns a function that runs a node, and in which all readers of its results read named
    ones."""

    def run(*args: Any) -> list[Any]:
        return run_node(node, args)

    def original(*args: Any) -> list[Any]:
        return _named(run(*args), names)

    def differentiated(
        primals: Sequence[Any], active: Sequence[int], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        # The JVP of the node, in which the results are replaced by named results.
        graph = trace_jvp(run, [atom.aval for atom in node.inputs], active)
        by_name = {
            value: name
            for value, name in zip(graph.outputs[: len(names)], names, strict=True)
            if value in graph.producers
        }
        named = {
            found: functools.partial(_with_name, name=by_name[value])
            for found in map(functools.partial(Occurrence, ()), graph.nodes)
            for value in found.node.outputs
            if value in by_name
        }
        graph = behind_each(
            graph, list(named), named.__getitem__, wanted=by_name.__contains__
        ).graph
        found = run_graph(graph, [*primals, *tangents])
        outs, flowing = found[: len(names)], found[len(names) :]
        return outs, _jax.align([value.aval for value in node.outputs], flowing)

    return with_tangents(original, node.name, differentiated)
