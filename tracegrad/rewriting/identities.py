"""Functions that hand on a value and change what becomes of its derivative; put into a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Fragment, Graph, Literal, Node, Occurrence, Value
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.grouping import entering
from tracegrad.rewriting.edits import Edit, hand_out, leaving
from tracegrad.rewriting.norms import at_least_32_bits


def through(identity: Callable[[Any], Any], inputs: int | Sequence[int] | None = None) -> Edit:
    """Sends what leaves a match, or what enters it at some positions, through a function that
    returns it as it is."""
    positions: tuple[int, ...] | None = None
    if inputs is not None:
        several = inputs if isinstance(inputs, Iterable) else (inputs,)
        if not all(isinstance(i, SupportsIndex) for i in several):
            raise TypeError(
                "inputs is the position of an input or a sequence of positions, as in inputs=0; it "
                f"was given {inputs!r}"
            )
        positions = tuple(map(operator.index, several))

    def edit(graph: Graph, nodes: Sequence[Node], match: Occurrence) -> None:
        if positions is None:
            replace_outputs(graph, nodes, identity)
        else:
            replace_inputs(graph, nodes, match, positions, identity)

    return edit


def replace_outputs(graph: Graph, nodes: Sequence[Node], identity: Callable[[Any], Any]) -> None:
    """Sends the float values that leave some nodes through a function that returns them."""
    for value in leaving(graph, nodes):
        if value.has_gradient:
            (new,) = graph.insert(identity, [value], after=value.producer)
            hand_out(graph, nodes, value, new)


def replace_inputs(
    graph: Graph,
    nodes: Sequence[Node],
    match: Occurrence,
    positions: Sequence[int],
    identity: Callable[[Any], Any],
) -> None:
    """Sends some float inputs of the nodes of a match through a function that returns them."""
    operands: Sequence[Value | Literal] = (
        entering(nodes) if isinstance(match, Fragment) else nodes[0].inputs
    )
    for position in positions:
        if not -len(operands) <= position < len(operands):
            have = ", ".join(map(str, operands)) or "none"
            raise IndexError(f"{match} has {len(operands)} inputs ({have}), no {position}")
    first = next(node for node in graph.nodes if node in nodes)
    replaced: dict[int, Value | Literal] = {}
    for i in {position % len(operands) for position in positions}:
        value = operands[i]
        if isinstance(value, Value) and value.has_gradient and not value.is_reference:
            (replaced[i],) = graph.insert(identity, [value], before=first)
    if not isinstance(match, Fragment):  # which may take one value twice
        (node,) = nodes
        graph.set_inputs(node, [replaced.get(i, v) for i, v in enumerate(operands)])
        return
    members = set(nodes)
    for i, new in replaced.items():
        value = operands[i]
        assert isinstance(value, Value)
        graph.replace_uses(value, new, where=members.__contains__, outputs=False)


def with_cotangent(change: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    """The identity, whose cotangent is changed; in derivatives of derivatives it is the identity,
    so that forward mode over reverse mode has them too."""

    def identity(value: Any) -> Any:
        return value

    @CHANGES_GRADIENT
    def backward(_: None, cotangent: Any) -> tuple[Any]:
        return (change(cotangent),)

    identity.__name__ = identity.__qualname__ = name
    rule = jax.custom_vjp(identity)
    rule.defvjp(lambda value: (value, None), backward)
    return rule


@jax.custom_jvp
def scaled(value: Any, factor: Any) -> Any:
    """The value, whose tangent and cotangent are multiplied by a factor."""
    return value


@scaled.defjvp
@CHANGES_GRADIENT
def _(primals: Any, tangents: Any) -> Any:
    (_, factor), (tangent, _) = primals, tangents
    if jnp.iscomplexobj(factor) and not jnp.iscomplexobj(tangent):
        kind = _jax.type_text(jax.typeof(tangent))
        raise TypeError(f"scale_gradient was given a complex factor for the gradient of a {kind}")
    wide = at_least_32_bits(tangent)  # for loss scaling: by more than half precision can hold
    tangent_out = wide * jnp.asarray(factor).astype(wide.dtype)
    return _jax.keeping_rule(scaled, primals), tangent_out.astype(tangent.dtype)
