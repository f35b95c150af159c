"""JAX programs → graphs: `jax.make_jaxpr` traces, this module reads what came out.

Sub-programs that JAX shares (a jitted function called twice) become one shared region. Nothing is
interpreted and nothing is lost: each node keeps its primitive, parameters, source and effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import (
    Apply,
    Call,
    CustomGradient,
    Literal,
    Node,
    Recompute,
    RegionNode,
    Source,
    StopGradient,
    Value,
)


def import_program(
    program: Any,
    function: _jax.TracedFrom | None = None,
    *,
    name: str | None = None,
    seen: dict[int, Graph] | None = None,
    operands: Sequence[Value | Literal] = (),
) -> Graph:
    """The graph of a program made by `jax.make_jaxpr`.

    Args:
      program: a ``ClosedJaxpr`` (or an open one without constants).
      function: what it was traced from; default: what JAX says.
      name: the graph's name; default: that function's.
      seen: the regions that were imported before, by the identity of their programs.
      operands: what it is called with, where it is a region.
    """
    seen = {} if seen is None else seen
    function = function or _jax.function_of(program)
    open_form, constants = _jax.parts_of(program)
    graph = Graph(name or function.name, function_source=function.source)
    seen[id(program)] = graph
    count, names = len(open_form.invars), function.arguments
    if len(names) != count:  # JAX does not know them: then as the caller calls its operands
        names = tuple(v.hint if isinstance(v, Value) else "" for v in operands)
    names = names if len(names) == count else ("",) * count
    arguments = graph.add_inputs([var.aval for var in open_form.invars], names)
    nodes, outputs = _written(open_form, constants, graph, arguments, seen)
    closes_over = any(isinstance(node, RegionNode) and node.closes_over for node in nodes)
    graph.fill(nodes, outputs, program, closes_over)
    return graph


class TracedProgram:
    """A program that JAX has traced for a place in a graph, where it is imported.

    Attributes:
      out_avals: the types of its outputs.
      effects: its side effects.
    """

    def __init__(self, program: Any, name: str):
        self._parts = _jax.parts_of(program)
        self._name = name
        self.out_avals: list[Any] = list(program.out_avals)
        self.effects = program.effects

    def __repr__(self) -> str:
        return f"{self._name} -> ({', '.join(map(_jax.type_text, self.out_avals))})"

    def written_into(
        self, place: Graph, inputs: Sequence[Value | Literal], beside: Node | None
    ) -> tuple[list[Node], list[Value | Literal]]:
        """See `tracegrad.ir.engine.Insertable`."""
        source = None if beside is None else beside.source
        return _written(*self._parts, place, inputs, {}, source)


def _written(
    open_form: Any,
    constants: Sequence[Any],
    graph: Graph,
    inputs: Sequence[Value | Literal],
    seen: dict[int, Graph],
    source: Source | None = None,
) -> tuple[list[Node], list[Value | Literal]]:
    """The equations of a program as nodes of a graph, where they stand nowhere yet; its outputs.

    `inputs`: what stands for its own. `source`: that of all nodes; None: each its own.
    """
    values: dict[Any, Value | Literal] = dict(zip(open_form.invars, inputs, strict=True))
    for var, constant in zip(open_form.constvars, constants, strict=True):
        values[var] = graph.add_constant(constant, var.aval)
    nodes: list[Node] = []
    for equation in open_form.eqns:
        primitive, params = equation.primitive, equation.params
        inputs = tuple(
            [Literal(a.val, a.aval) if hasattr(a, "val") else values[a] for a in equation.invars]
        )
        origin = source or Source(equation.source_info, equation.ctx)
        effects = equation.effects
        held = (v if isinstance(v, (tuple, list)) else (v,) for v in params.values())
        if (
            primitive is _jax.STOP_GRADIENT
            or any(isinstance(item, _jax.PROGRAM_TYPES) for items in held for item in items)
            or primitive.name == _jax.OF_AN_OBJECT
        ):
            node = make_node(primitive, params, inputs, origin, effects, seen)
        else:  # nearly all: without another call
            node = Apply(primitive, params, inputs, (), origin, frozenset(effects))
        graph.adopt(node, [var.aval for var in equation.outvars])
        nodes.append(node)
        values.update(zip(equation.outvars, node.outputs, strict=True))
    outputs = [
        Literal(a.val, a.aval) if hasattr(a, "val") else values[a] for a in open_form.outvars
    ]
    return nodes, outputs


def make_node(
    primitive: Any,
    params: Mapping[str, Any],
    inputs: tuple[Value | Literal, ...],
    source: Source,
    effects: Iterable[Any],
    seen: dict[int, Graph],
) -> Node:
    """The node of one operation, of the kind that its primitive asks for; for `seen` see
    `import_program`."""
    kind: type[Node] = Apply
    more: dict[str, Any] = {}
    if primitive is _jax.STOP_GRADIENT:
        kind = StopGradient
    else:
        regions = {
            # Alive as long as the root program, which holds it.
            name: seen.get(id(p)) or import_program(p, seen=seen, operands=inputs)
            for name, p in _jax.programs_in(primitive, params)
        }
        if regions:
            kind, more = Call, {"_regions": regions}
        if primitive is _jax.REMAT:
            kind = Recompute
        elif primitive is _jax.CUSTOM_JVP or primitive is _jax.CUSTOM_VJP:
            kind = CustomGradient
            avals = [value.aval for value in inputs]
            more["trace_face"] = lambda face: _trace_rule(primitive, params, avals, face)
    return kind(
        primitive=primitive,
        params=params,
        inputs=inputs,
        source=source,
        effects=frozenset(effects),
        **more,
    )


def lone_node(
    primitive: Any,
    params: Mapping[str, Any],
    avals: Sequence[Any],
    source: Source,
    results: Sequence[Any] | None = None,
) -> Node:
    """The node of one operation that stands in no program, on operands of these types.

    `results`: the types of its results, for one that stands in a graph by itself.
    """
    graph = Graph(primitive.name)
    node = make_node(primitive, params, tuple(map(graph.add_input, avals)), source, (), {})
    if results is not None:
        graph.append(node, results)
    return node


# ---------------------------------------------------------------------- rules of custom gradients


def _trace_rule(
    primitive: Any, params: Mapping[str, Any], avals: Sequence[Any], face: str
) -> tuple[dict[str, Graph], frozenset[int]]:
    """The faces of a rule as graphs, traced by differentiating the node as JAX does; and of a vjp
    the inputs for which it returns a gradient.

    A vjp gives both faces at once: the residuals that one returns are what the other takes. JAX
    refuses to differentiate with respect to what the function closes over, the first operands.
    """
    closed_over = _jax.closed_over(params)

    def bound(*args: Any) -> list[Any]:
        return _jax.bind(primitive, args, params)

    if face == "jvp":
        return {"jvp": trace_jvp(bound, avals)}, frozenset()

    # Not returned by the traced function: JAX remembers the trees of results, and would keep the
    # rule and what it closes over alive.
    trees: list[Any] = []
    returned: set[int] = set()

    def vjp(*args: Any) -> Any:
        constants = args[:closed_over]

        def along(*inputs: Any) -> list[Any]:
            return bound(*constants, *_jax.with_witnesses(inputs, closed_over, returned))

        outs, pullback = _jax.vjp(along, *args[closed_over:])
        residuals, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return outs, residuals

    forward, shapes = jax.make_jaxpr(vjp, return_shape=True)(*avals)
    out_shapes, residuals = shapes
    pullback_tree = trees[-1]

    def backward(*residuals_and_cotangents: Any) -> list[Any]:
        split = len(residuals)
        pullback = jax.tree.unflatten(pullback_tree, residuals_and_cotangents[:split])
        cotangents = _jax.align(out_shapes, residuals_and_cotangents[split:])
        return [
            ct
            for ct, aval in zip(pullback(cotangents), avals[closed_over:], strict=True)
            if _jax.has_gradient(aval)
        ]

    given = [shape for shape in out_shapes if _jax.has_gradient(shape)]
    backward_program = jax.make_jaxpr(backward)(*residuals, *given)
    faces = {
        "forward": import_program(forward, name="forward"),
        "backward": import_program(backward_program, name="backward"),
    }
    _hint(faces["forward"], ["x"] * len(avals))
    _hint(faces["backward"], ["residual"] * len(residuals) + ["ct"] * len(given))
    return faces, frozenset(returned)


def trace_jvp(
    bound: Callable[..., Any], avals: Sequence[Any], active: Sequence[int] | None = None
) -> Graph:
    """JAX's derivative of a function of arrays as a graph: of these and the tangents of some of
    them (`active`, by position; default: of all that have any), to the results and the tangents of
    those that have any."""
    if active is None:
        active = [i for i, aval in enumerate(avals) if _jax.has_gradient(aval)]

    def jvp(*primals_and_tangents: Any) -> list[Any]:
        primals = primals_and_tangents[: len(avals)]
        given = primals_and_tangents[len(avals) :]
        along = _jax.of_some(lambda operands: bound(*operands), primals, active)
        outs, out_tangents = _jax.jvp(along, tuple(primals[i] for i in active), given)
        flowing = [
            t
            for out, t in zip(outs, out_tangents, strict=True)
            if _jax.has_gradient(jax.typeof(out))
        ]
        return [*outs, *flowing]

    tangents = [avals[i] for i in active]
    graph = import_program(jax.make_jaxpr(jvp)(*avals, *tangents), name="jvp")
    _hint(graph, ["x"] * len(avals) + ["tangent"] * len(tangents))
    return graph


def _hint(graph: Graph, names: Sequence[str]) -> None:
    for value, name in zip(graph.inputs, names, strict=True):
        value.hint = name
