"""Names the results of a node (`jax.ad_checkpoint.checkpoint_name`), for a policy to save them.

A name is an operation behind the node, and the policy saves the result of this operation. If
another operation reads the node's own result, the node is recomputed all the same: JAX's derivative
of ``tanh`` reads the result of ``tanh``. So a node whose derivative reads the node's results
becomes a function with a derivative of its own: JAX's derivative of the node, reading named
results.
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
    """Runs a node and names its results. `reads_results`: whether the node's derivative reads
    them."""
    # The derivatives of loops and calls read values inside of the loop or call, and not its
    # results.
    is_open = not node.regions or (isinstance(node, CustomGradient) and node.kind == "jvp")
    if reads_results and is_open:
        return _run_with_named_results(node, names)(*operands)
    return _name_values(run_node(node, operands), names)


def _name_value(value: Any, name: str) -> Any:
    if jnp.iscomplexobj(value):  # JAX rounds saved values, and cannot round complex ones
        return jax.lax.complex(
            _name_value(jnp.real(value), name), _name_value(jnp.imag(value), name)
        )
    return checkpoint_name(value, name)  # type: ignore[no-untyped-call]


def _name_values(values: Sequence[Any], names: Sequence[str]) -> list[Any]:
    return [_name_value(value, name) for value, name in zip(values, names, strict=True)]


def _run_with_named_results(node: Node, names: Sequence[str]) -> Callable[..., list[Any]]:
    """Returns a function that runs a node. Also inside the derivative, all readers of the node's
    results read named results."""

    def run(*args: Any) -> list[Any]:
        return run_node(node, args)

    def original(*args: Any) -> list[Any]:
        return _name_values(run(*args), names)

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
            found: functools.partial(_name_value, name=by_name[value])
            for found in map(functools.partial(Occurrence, ()), graph.nodes)
            for value in found.node.outputs
            if value in by_name
        }
        graph = behind_each(
            graph, list(named), named.__getitem__, selects=by_name.__contains__
        ).graph
        found = run_graph(graph, [*primals, *tangents])
        outs, flowing = found[: len(names)], found[len(names) :]
        return outs, _jax.insert_float0([value.aval for value in node.outputs], flowing)

    return with_tangents(original, node.name, differentiated)
