"""Arrays that a compiled function closes over become its operands, so that they get a gradient.

JAX holds them as constants of the function's program, at any depth of calls. There they would
silently have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph, RegionNode, Source
from tracegrad.lowering import Lowering
from tracegrad.lowering.evaluate import evaluate_node
from tracegrad.tracing.importer import make_node, sub_programs


def captured_arrays(params: Mapping[str, Any]) -> list[Any]:
    """The arrays among the constants of a primitive's programs, each once."""
    found = {id(a): a for _, program in sub_programs(params) for a in _constants(program)}
    return list(found.values())


def _constants(program: Any) -> Iterator[Any]:
    yield from (c for c in _jax.constants_of(program) if isinstance(c, jax.Array))
    for equation in _jax.opened(program).eqns:
        for _, inner in sub_programs(equation.params):
            yield from _constants(inner)


def lift(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any], args: Sequence[Any]
) -> dict[str, Any]:
    """The parameters of a jitted call that computes the same from ``(*captured, *args)``."""
    places = {id(array): i for i, array in enumerate(captured)}
    count = len(captured)

    def lifted(*operands: Any) -> list[Any]:
        inputs = Graph("lifted")
        values = tuple(inputs.add_input(jax.typeof(arg)) for arg in operands[count:])
        source = Source(_jax.current_source_info(), None)
        node = make_node(primitive, params, values, source, (), {})
        assert isinstance(node, RegionNode)
        for region in node.regions.values():
            _replace_constants(region, places, operands)
        return evaluate_node(node, list(operands[count:]), Lowering())

    if primitive is _jax.JIT:
        lifted.__name__ = lifted.__qualname__ = str(params["name"])
    program = jax.make_jaxpr(jax.jit(lifted))(*captured, *args)
    (equation,) = _jax.opened(program).eqns
    return dict(equation.params)


def _replace_constants(graph: Graph, places: Mapping[int, int], operands: Sequence[Any]) -> None:
    for value, array in graph.constants.items():
        if id(array) in places:
            graph.constants[value] = operands[places[id(array)]]
            graph.program = None
    for node in graph.nodes:
        for region in node.regions.values():
            _replace_constants(region, places, operands)
