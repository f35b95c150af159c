"""Makes a `Graph` of a program that `jax.make_jaxpr` has traced.

A program has one graph as long as anything refers to the graph: a function that is called forty
times is one region, in one trace or in several traces. Nothing is interpreted and nothing is lost:
a node holds JAX's equation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import jax

from tracegrad import _jax
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import (
    NO_REGIONS,
    Apply,
    Atom,
    Call,
    CustomGradient,
    Node,
    Recompute,
    StopGradient,
    Value,
)

# Graphs by the id of their program. A graph holds its program, so the id stays unique.
_graphs: WeakValueDictionary[int, Graph] = WeakValueDictionary()

_NO_HINTS: Mapping[Value, str] = MappingProxyType({})
_KINDS: dict[Any, type[Node]] = {
    _jax.REMAT: Recompute,
    _jax.CUSTOM_JVP: CustomGradient,
    _jax.CUSTOM_VJP: CustomGradient,
}


def import_program(program: Any, function: _jax.TracedFrom) -> Graph:
    """Returns a new graph of a program that was traced from `function`, although JAX may have
    recorded another function as the program's origin."""
    made: dict[str, tuple[Node, ...]] = {}  # copies of the graph, in all threads, share the nodes

    def make_nodes() -> tuple[Node, ...]:
        if "nodes" not in made:
            open_form = _jax.opened(program)
            hints = dict(zip(open_form.invars, function.arguments, strict=False))
            nodes = [node_of(each, function.source, hints) for each in open_form.eqns]
            made.setdefault("nodes", tuple(nodes))
        return made["nodes"]

    hints = tuple([name.removesuffix(".value") for name in function.arguments])  # flax.nnx adds it
    count = len(program.in_avals)
    return Graph(
        program=program,
        make_nodes=make_nodes,
        name=function.name,
        function_source=function.source,
        hints=hints if len(hints) == count else ("",) * count,
    )


def graph_of(
    program: Any, operands: Sequence[Atom] = (), hints: Mapping[Value, str] = _NO_HINTS
) -> Graph:
    """Returns the graph of a program; for the same program the same graph. If the program is a
    region, `operands` are the operands of its call, and `hints` has their names, for a region whose
    arguments have no names."""
    graph = _graphs.get(id(program))
    if graph is None:
        function = _jax.traced_from(program)
        if len(function.arguments) != len(_jax.opened(program).invars):
            names = [hints.get(atom, "") if isinstance(atom, Value) else "" for atom in operands]
            function = function._replace(arguments=tuple(names))
        graph = _graphs[id(program)] = import_program(program, function)
    return graph


def node_of(equation: Any, function: str = "", hints: Mapping[Value, str] = _NO_HINTS) -> Node:
    """Returns the node of an equation in the program of a function (see `Node.function`); `hints`
    has the names of the program's inputs."""
    primitive = equation.primitive
    if primitive is _jax.STOP_GRADIENT:
        return StopGradient(equation, equation, NO_REGIONS, function)
    programs = _jax.programs_in(primitive, equation.params)
    if not programs:
        return Apply(equation, equation, NO_REGIONS, function)
    regions = MappingProxyType(
        {name: graph_of(program, equation.invars, hints) for name, program in programs}
    )
    kind = _KINDS.get(primitive, Call)
    if kind is CustomGradient:
        return CustomGradient(equation, equation, regions, function, trace_faces)
    return kind(equation, equation, regions, function)


# ---------------------------------------------------------------------- rules of custom gradients


def trace_faces(node: CustomGradient) -> tuple[Mapping[str, Graph], frozenset[int]]:
    """Traces the faces of a rule to graphs, by differentiating the node as JAX does.

    Returns the faces by name and, for a vjp, the inputs for which the rule returns a gradient. Both
    faces of a vjp are traced together, since the backward face takes the residuals that the forward
    face returns. The operands that a vjp closes over (the first ones) are not differentiated: JAX
    would raise an error.
    """
    closed_over = node.closed_over
    avals = [atom.aval for atom in node.inputs]
    equation = node.equation  # the traced functions keep the equation alive, but not the node

    def bind(*args: Any) -> list[Any]:
        return _jax.bind(equation.primitive, args, equation.params)

    if node.kind == "jvp":
        return {"jvp": trace_jvp(bind, avals)}, frozenset()

    returned: set[int] = set()
    active = [i for i in range(closed_over, len(avals)) if _jax.has_gradient(avals[i])]

    def run(operands: list[Any]) -> list[Any]:
        for i in active:
            operands[i] = _jax.with_witness(operands[i], i, returned)
        return bind(*operands)

    forward, backward, residuals, cotangents = trace_vjp(run, avals, active)
    hints = ["residual"] * residuals + ["ct"] * len(cotangents)
    faces = {
        "forward": _import_face(forward, "forward", ["x"] * len(avals)),
        "backward": _import_face(backward, "backward", hints),
    }
    return faces, frozenset(returned)


def trace_vjp(
    run: Callable[[list[Any]], list[Any]], avals: Sequence[Any], active: Sequence[int]
) -> tuple[Any, Any, int, list[Any]]:
    """Traces JAX's VJP of a function by its inputs `active`. Returns the forward program, inputs ->
    results and residuals; the backward program, residuals and cotangents of the float results ->
    cotangents of the active inputs; the number of residuals; and the types of these cotangents."""
    # The traced function does not return the tree: JAX caches the trees of results, and would keep
    # the function and its closed-over values alive.
    trees: list[Any] = []

    def vjp(*args: Any) -> Any:
        outs, pullback = _jax.vjp_of_some(run, args, active)
        residuals, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return outs, residuals

    forward, (outs, residuals) = jax.make_jaxpr(vjp, return_shape=True)(*avals)
    cotangents = [shape for shape in outs if _jax.has_gradient(shape)]

    def pull(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        pullback = jax.tree.unflatten(trees[-1], residuals)
        return list(pullback(_jax.insert_float0(outs, cotangents)))

    return forward, jax.make_jaxpr(pull)(residuals, cotangents), len(residuals), cotangents


def trace_jvp(
    fun: Callable[..., Any], avals: Sequence[Any], active: Sequence[int] | None = None
) -> Graph:
    """Traces JAX's JVP of a function of arrays to a graph. The inputs are the primals, and the
    tangents at the positions `active` (default: of all float and complex primals). The outputs are
    the results, and the tangents of the float and complex results."""
    if active is None:
        active = [i for i, aval in enumerate(avals) if _jax.has_gradient(aval)]

    def jvp(*primals_and_tangents: Any) -> list[Any]:
        primals = primals_and_tangents[: len(avals)]
        tangents = primals_and_tangents[len(avals) :]
        primal = _jax.of_some(lambda operands: fun(*operands), primals, active)
        outs, out_tangents = _jax.jvp(primal, tuple(primals[i] for i in active), tangents)
        float_tangents = [
            t
            for out, t in zip(outs, out_tangents, strict=True)
            if _jax.has_gradient(jax.typeof(out))
        ]
        return [*outs, *float_tangents]

    program = jax.make_jaxpr(jvp)(*avals, *(avals[i] for i in active))
    return _import_face(program, "jvp", ["x"] * len(avals) + ["tangent"] * len(active))


def _import_face(program: Any, name: str, hints: Sequence[str]) -> Graph:
    source = _jax.traced_from(program).source
    return import_program(program, _jax.TracedFrom(name, source, tuple(hints)))
