"""Names for the results of a node (`jax.ad_checkpoint.checkpoint_name`), for a policy to save.

A name is an operation behind the node, and what the policy saves is what that returns. It spares
the node only if nothing reads the node itself any more; but JAX's derivative of ``tanh`` reads what
``tanh`` has returned. So a node whose derivative reads its own results becomes a function with the
very derivative that JAX has for it, in which they have their names, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node, Value
from tracegrad.ir.importer import trace_jvp
from tracegrad.lowering.evaluate import evaluate, evaluate_node
from tracegrad.rewriting.overriding import with_tangents


def name_results(graph: Graph, node: Node, names: Iterator[str], reads_results: bool) -> list[str]:
    """Gives names to the results of a node; `reads_results`: whether its derivative reads them."""
    given = [next(names) for _ in node.outputs]
    # Run backwards, loops and calls read what is inside them.
    is_open = not node.regions or (isinstance(node, CustomGradient) and node.kind == "jvp")
    if reads_results and is_open:
        graph.replace(node, _with_names(node, given))
    else:
        name_values(graph, node.outputs, given, after=node)
    return given


def name_values(graph: Graph, values: Sequence[Value], names: Sequence[str], **place: Node) -> None:
    """Puts names behind values, at a place in the graph, one node for each."""
    for value, name in zip(values, names, strict=True):
        (result,) = graph.insert(_naming(name), [value], **place)
        graph.replace_uses(value, result)


def _naming(name: str) -> Callable[[Any], Any]:
    # A function for each: one that JAX has seen is not traced again.
    def named(value: Any) -> Any:
        if jnp.iscomplexobj(value):  # which JAX cannot save, as it rounds what it does
            return jax.lax.complex(named(jnp.real(value)), named(jnp.imag(value)))
        return checkpoint_name(value, name)  # type: ignore[no-untyped-call]

    return named


def _with_names(node: Node, names: Sequence[str]) -> Callable[..., list[Any]]:
    """The function of a node with names for its results, wherever they are read."""

    def run(*args: Any) -> list[Any]:
        return evaluate_node(node, args)

    def original(*args: Any) -> list[Any]:
        return [_naming(name)(result) for result, name in zip(run(*args), names, strict=True)]

    def differentiated(
        primals: Sequence[Any], active: Sequence[int], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        graph = trace_jvp(run, [value.aval for value in node.inputs], active)
        for value, name in zip(graph.outputs[: len(names)], names, strict=True):
            if isinstance(value, Value) and value.producer is not None:
                name_values(graph, [value], [name], after=value.producer)
        found = evaluate(graph, [*primals, *tangents])
        outs, flowing = found[: len(names)], found[len(names) :]
        return outs, _jax.align([value.aval for value in node.outputs], flowing)

    return with_tangents(original, node.name, differentiated)
