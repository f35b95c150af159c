"""Arrays that a compiled function closes over become its operands, so that they get a gradient.

JAX holds them as constants of the function's program, at any depth of calls. There they would
silently have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad._jax.caches import of_program
from tracegrad.ir import CustomGradient, Graph, Node, RegionNode, Source
from tracegrad.ir.dependence import Masks, data_flow, enter, spread
from tracegrad.ir.importer import lone_node
from tracegrad.lowering import evaluate_node
from tracegrad.tape.keys import params_key


def lift(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any], args: Sequence[Any]
) -> dict[str, Any]:
    """The parameters of a jitted call that computes the same from ``(*captured, *args)``.

    Raises ValueError if a `jax.custom_jvp` closes over one of the captured arrays.
    """
    first = next(p for _, p in _jax.sub_programs(params) if _jax.program_facts(p).arrays)
    key = (
        primitive,
        params_key(params),
        tuple(map(id, captured)),
        tuple(map(_jax.type_key, args)),
    )
    # Remembered with a program, which holds the captured arrays, so that their identities are good.
    known = _lifted(first)
    if key not in known:
        known[key] = lift_anew(primitive, params, captured, args)
    return known[key]


@of_program
def _lifted(program: Any) -> dict[Any, dict[str, Any]]:
    """What has been lifted out of a program, by all that it depends on."""
    return {}


def lift_anew(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any], args: Sequence[Any]
) -> dict[str, Any]:
    """As `lift`, not remembered; `args` may be types."""
    places = {id(array): i for i, array in enumerate(captured)}
    count = len(captured)

    def lifted(*operands: Any) -> list[Any]:
        source = Source(_jax.current_source_info(), None)
        node = lone_node(primitive, params, [*map(jax.typeof, operands[count:])], source)
        assert isinstance(node, RegionNode)
        _refuse_closed_over(node, places)
        for region in node.regions.values():
            _replace_constants(region, places, operands)
        try:
            return evaluate_node(node, list(operands[count:]))
        finally:
            node.let_go()

    if primitive is _jax.JIT:
        lifted.__name__ = lifted.__qualname__ = str(params["name"])
    program = jax.make_jaxpr(jax.jit(lifted))(*captured, *args)
    (equation,) = _jax.opened(program).eqns
    return dict(equation.params)


def refused_to_lift(
    params: Mapping[str, Any], captured: Sequence[Any], types: Sequence[Any]
) -> dict[int, Exception]:
    """Those of the arrays that a jitted call closes over to which a custom derivative is blind, by
    identity, with the error for a tape that watches one."""
    node = lone_node(_jax.JIT, params, types, Source(None, None))
    refused: dict[int, Exception] = {}
    for array in captured:
        try:
            _refuse_closed_over(node, {id(array): 0})
        except ValueError as error:
            refused[id(array)] = error.with_traceback(None)
    node.let_go()
    return refused


def _refuse_closed_over(node: Node, captured: Mapping[int, int]) -> None:
    """What a custom derivative closes over would silently get none: JAX does not look at it."""

    def run(graph: Graph, ins: Masks) -> Masks:
        constants = {v: int(id(array) in captured) for v, array in graph.constants.items()}
        return spread(graph, ins, rule, constants)

    def rule(node: Node, ins: Masks) -> Masks:
        if isinstance(node, CustomGradient):
            facts = _jax.facts_below(node.params)  # of the calls in it: they are no operands
            is_within = any(id(each) in captured for each in (*facts.arrays, *facts.numpy_arrays))
            if is_within or any(ins[: node.closed_over]):
                raise closes_over_watched(node.name)
        entered = enter(node, ins, run)
        return data_flow(node, ins) if entered is None else entered[0]

    rule(node, [0] * len(node.inputs))


def closes_over_watched(function: str) -> ValueError:
    return ValueError(
        f"the custom derivative of {function} closes over an array that a tape watches: its rule "
        "cannot tell the derivative with respect to it. Pass the array as an argument"
    )


def _replace_constants(graph: Graph, places: Mapping[int, int], operands: Sequence[Any]) -> None:
    for value, array in graph.constants.items():
        if id(array) in places:
            graph.set_constant(value, operands[places[id(array)]], everywhere=True)
    for node in graph.nodes:
        for region in node.regions.values():
            _replace_constants(region, places, operands)
