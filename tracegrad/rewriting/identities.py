"""Functions that hand on a value and change its derivative; and what puts them into a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Atom, Graph, Occurrence, Value, has_gradient
from tracegrad.ir.editing import before_each
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.text import value_text
from tracegrad.rewriting.match_rule import Edit, behind
from tracegrad.rewriting.norms import at_least_32_bits
from tracegrad.rewriting.overriding import with_tangent


def through(identity: Callable[[Any], Any], inputs: int | Sequence[int] | None = None) -> Edit:
    """Sends what leaves a match, or what enters it at some positions, through a function that
    returns it as it is."""
    if inputs is None:
        return behind(identity)
    several = inputs if isinstance(inputs, Iterable) else (inputs,)
    if not all(isinstance(i, SupportsIndex) for i in several):
        raise TypeError(
            "inputs is the position of an input or a sequence of positions, as in inputs=0; it "
            f"was given {inputs!r}"
        )
    positions = tuple(map(operator.index, several))

    def chosen(region: Graph, match: Occurrence, operands: Sequence[Atom]) -> list[int]:
        for position in positions:
            if not -len(operands) <= position < len(operands):
                have = ", ".join(value_text(region, atom) for atom in operands) or "none"
                raise IndexError(f"{match} has {len(operands)} inputs ({have}), no {position}")
        places = {position % len(operands) for position in positions}
        return [i for i in places if isinstance(operands[i], Value) and has_gradient(operands[i])]

    def edit(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        return before_each(graph, matches, identity, chosen)

    return edit


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


def _scaled(primals: Any, tangents: Any) -> Any:
    (_, factor), (tangent, _) = primals, tangents
    if jnp.iscomplexobj(factor) and not jnp.iscomplexobj(tangent):
        kind = _jax.type_text(jax.typeof(tangent))
        raise TypeError(f"scale_gradient was given a complex factor for the gradient of a {kind}")
    wide = at_least_32_bits(tangent)  # for loss scaling: by more than half precision can hold
    return (wide * jnp.asarray(factor).astype(wide.dtype)).astype(tangent.dtype)


@with_tangent(_scaled)
def scaled(value: Any, factor: Any) -> Any:
    """The value, whose tangent and cotangent are multiplied by a factor."""
    return value


@with_tangent(lambda primals, tangents: tangents[0] + tangents[1])
def perturbed(value: Any, perturbation: Any) -> Any:
    """The value, as if the perturbation, which is zero, had been added: to the last bit."""
    return value
