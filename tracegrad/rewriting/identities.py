"""Identity functions that change the derivative, and rules that insert them into a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Atom, Fragment, Graph, Occurrence, Value, has_gradient
from tracegrad.ir.editing import Op, around_each, behind_each
from tracegrad.ir.errors import NoMatchError
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.node_groups import operands_of
from tracegrad.ir.parameters import Parameters
from tracegrad.ir.selector import Selector
from tracegrad.ir.text import value_text
from tracegrad.rewriting.match_rule import Edit, MatchRule, refusing_refs
from tracegrad.rewriting.norms import at_least_32_bits


def identity_rule(
    name: str,
    where: Selector | Parameters,
    identity: Callable[[Any], Any],
    missing_ok: bool,
    inputs: int | Sequence[int] | None = None,
    *,
    of_parameter: Callable[[Any], Any] | None = None,
    outer: Callable[[Any], Any] | None = None,
) -> MatchRule:
    """Makes a rule that passes values through `identity`, which changes the tangent. The values are
    parameters; the operands of a match at `inputs`; or, by default, the results of a match.

    `of_parameter` is the identity for parameters, by default `identity`; for `outer` see
    `MatchRule.outer_identity`.
    """
    if isinstance(where, Parameters) and inputs is not None:
        raise TypeError(
            f"inputs={inputs!r} are positions of the inputs of an operation; {where!r} selects "
            "parameters: leave out inputs="
        )

    def edit_results(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        return behind_each(graph, matches, lambda match: identity, selects=has_gradient).graph

    edit = edit_results if inputs is None else _edit_of_inputs(identity, inputs, missing_ok)
    for_parameter = of_parameter or identity
    return MatchRule(
        name,
        where,
        refusing_refs(edit),
        missing_ok,
        identity=lambda place: for_parameter,
        outer_identity=outer and (lambda place: outer),
    )


def _edit_of_inputs(
    identity: Callable[[Any], Any], inputs: int | Sequence[int], missing_ok: bool
) -> Edit:
    """Returns an edit that passes the operands of a match at the positions `inputs` through
    `identity`. Unless `missing_ok`, the edit raises NoMatchError if no match has an operand with a
    gradient at these positions."""
    sequence = inputs if isinstance(inputs, Iterable) else (inputs,)
    if not all(isinstance(i, SupportsIndex) for i in sequence):
        raise TypeError(
            "inputs is the position of an input or a sequence of positions, as in inputs=0; it "
            f"was given {inputs!r}"
        )
    positions = tuple(map(operator.index, sequence))

    def edit(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        def inputs_text(match: Occurrence) -> str:
            region = graph.region_of(match)
            return ", ".join(value_text(region, atom) for atom in _operands(match)) or "none"

        acts = missing_ok
        for match in matches:
            operands = _operands(match)
            count = len(operands)
            for position in positions:
                if not -count <= position < count:
                    have = inputs_text(match)
                    raise IndexError(f"{match} has {count} inputs ({have}), no {position}")
            chosen = [operands[position] for position in positions]
            acts |= any(isinstance(atom, Value) and has_gradient(atom) for atom in chosen)
        if not acts:
            others = " and of the other matches" if len(matches) > 1 else ""
            raise NoMatchError(
                lambda: (
                    f"no gradient leaves through inputs={inputs!r} of {match}, whose inputs are "
                    f"({inputs_text(match)}){others}: numbers that are written into the program, "
                    "and integers, have none. Name another input"
                )
            )
        return around_each(graph, matches, around).graph

    def around(op: Op, *operands: Any) -> list[Any]:
        places = {position % len(operands) for position in positions}
        return op.results(
            *(
                identity(x) if i in places and _jax.has_gradient(x) else x
                for i, x in enumerate(operands)
            )
        )

    return edit


def _operands(match: Occurrence) -> Sequence[Atom]:
    """Returns the inputs of a match, in the order in which an edit gets them."""
    if isinstance(match, Fragment):
        return operands_of(match.nodes)
    return match.node.inputs  # type: ignore[no-any-return]


@CHANGES_GRADIENT
def _scaled_tangent(primals: Any, tangents: Any) -> Any:
    (_, factor), (tangent, _) = primals, tangents
    if jnp.iscomplexobj(factor) and not jnp.iscomplexobj(tangent):
        kind = _jax.type_text(jax.typeof(tangent))
        raise TypeError(f"scale_gradient was given a complex factor for the gradient of a {kind}")
    wide = at_least_32_bits(tangent)  # a loss scale may be larger than half precision can hold
    return (wide * jnp.asarray(factor).astype(wide.dtype)).astype(tangent.dtype)


scaled = _jax.with_tangent(lambda value, factor: value, _scaled_tangent, "scaled")
"""Returns the value; multiplies its tangent and cotangent by the factor, at any order."""

scaled_once = _jax.with_tangent(
    lambda value, factor: value, _scaled_tangent, "scaled", at_any_order=False
)
"""Returns the value; multiplies its tangent and cotangent by the factor. Derivatives of the product
see the identity."""

perturbed = _jax.with_tangent(
    lambda value, perturbation: value,
    lambda primals, tangents: tangents[0] + tangents[1],
    "perturbed",
)
"""Returns the value bit for bit, with the derivative of ``value + perturbation``.

The perturbation is zero, and the program is differentiated with respect to it."""
