"""Widens nodes whose regions were edited: passes further values across the borders of regions.

An edited region may need more inputs (arrays that the new code closes over, or taps) or more
outputs (arrays that the new code shows). So the node that holds the region gets more operands and
results, and so do its enclosing nodes, up to the root. In a loop, a closed-over array becomes a
constant. A scan slices taps, and stacks shown arrays; a branch that does not run returns zeros for
shown arrays.

Three kinds of node are not widened; JAX's own functions trace them anew: a `jax.shard_map`, in its
mesh; a custom gradient, from its faces; and a call with a rule in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir.closed_over import not_differentiated
from tracegrad.ir.errors import GraphError
from tracegrad.ir.graph import Graph
from tracegrad.ir.importer import node_of
from tracegrad.ir.nodes import Atom, CustomGradient, Node, Recompute, Value, has_gradient
from tracegrad.ir.occurrence import Occurrence
from tracegrad.ir.writing import Port, Surroundings, Written, write


@dataclass(frozen=True, eq=False)
class Edited:
    """A region after an edit, and the values that have to cross its border.

    Attributes:
      graph: the edited region, without the inputs and outputs in `ins` and `outs`.
      ins: the inputs to add: for arrays that are closed over, and for taps.
      outs: the values to add as outputs.
    """

    graph: Graph
    ins: Sequence[Port] = field(default_factory=list)
    outs: Sequence[Port] = field(default_factory=list)


def with_regions(node: Node, edits: Mapping[str, Edited], surroundings: Surroundings) -> Written:
    """Replaces the edited regions of a node. Returns nodes with the same results, and the ports
    that the enclosing region has to add."""
    if isinstance(node, CustomGradient):
        return _write_by_jax(node, edits, surroundings, _make_rule(node, edits))
    if node.op == "shard_map":
        inside = _close_over_ports(edits["jaxpr"])
        return _write_by_jax(node, edits, surroundings, _jax.shard_map_like(node.params, inside))
    called = _jax.CALLS_WITH_RULES.get(node.op)
    if called is not None:
        # The call's rule belongs to the unedited program: inline the edited program without it.
        return _write_by_jax(node, edits, surroundings, _close_over_ports(edits[called]))
    return _widen(node, edits)


def why_not_widened(node: Node) -> str | None:
    """Returns why a node cannot get further operands and results; None if it can."""
    if isinstance(node, Recompute) or node.primitive in (_jax.JIT, _jax.SCAN, _jax.COND):
        return None
    return _HAS_NO_PLACE


_HAS_NO_PLACE = "has no place for more inputs and outputs"


def _cannot_widen_error(node: Node, why: str) -> GraphError:
    return GraphError(
        f"a match lies in {node.name} ({node.op}), which {why}, so its values and gradients "
        f"cannot become outputs; a tap with a callback can show them: {Occurrence((), node)}"
    )


# -------------------------------------------------------------------------------- widened in place


def _widen(node: Node, edits: Mapping[str, Edited]) -> Written:
    regions = {n: edits[n].graph if n in edits else g for n, g in node.regions.items()}
    # In the order of the regions, since the constants of a condition precede those of a body.
    edits = {n: edits[n] for n in regions if n in edits}
    ins = [(n, port) for n, edited in edits.items() for port in edited.ins]
    shown = [(n, port) for n, edited in edits.items() for port in edited.outs]
    closed = [(n, port) for n, port in ins if port.closed_over is not None]
    tapped = [(n, port) for n, port in ins if port.closed_over is None]
    if (tapped or shown) and (why := why_not_widened(node)) is not None:
        raise _cannot_widen_error(node, why)
    if not ins and not shown:
        return Written([_replace_regions(node, regions)], {})
    primitive, params = node.primitive, dict(node.params)
    # Where to insert closed-over arrays: for each region, a position of its inputs and of operands.
    input_places = {n: len(g.inputs) for n, g in regions.items()}
    operand_places = dict.fromkeys(regions, len(node.inputs))
    if primitive is _jax.SCAN:
        input_places["jaxpr"] = operand_places["jaxpr"] = _jax.scan_split(params)[0]
        params = _jax.wider_scan(node.equation, len(closed), len(tapped), len(shown))
    elif primitive in _jax.WHILES:
        conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
        input_places = {"cond_jaxpr": conditions, "body_jaxpr": bodies}
        operand_places = {"cond_jaxpr": conditions, "body_jaxpr": conditions + bodies}
        params["cond_nconsts"] += sum(name == "cond_jaxpr" for name, _ in closed)
        params["body_nconsts"] += sum(name == "body_jaxpr" for name, _ in closed)
    elif primitive is _jax.JIT:
        params = _jax.wider_jit(params, len(ins), len(shown))
    elif primitive is not _jax.COND and not isinstance(node, Recompute):
        raise GraphError(
            f"an edit made a region of {node.op} close over a value that is being traced outside "
            f"of it; the value cannot become an operand of {node.op}, and as a constant its "
            "gradient would silently be zero. Pass the value in as an input: "
            f"{Occurrence((), node)}"
        )

    def outer_port(n: str, port: Port) -> Port:
        aval = port.value.aval
        if primitive is _jax.SCAN and port.closed_over is None:
            aval = _jax.stacked_type(aval, params["length"])
        return Port(((node.key, n), *port.place), Value(aval), port.closed_over)

    outer_closed = [(n, outer_port(n, port)) for n, port in closed]
    outer_tapped = [outer_port(n, port) for n, port in tapped]
    outer_shown = [outer_port(n, port) for n, port in shown]
    operands = list(node.inputs)
    for at in sorted(set(operand_places.values()), reverse=True):
        operands[at:at] = [p.value for n, p in outer_closed if operand_places[n] == at]
    operands += [port.value for port in outer_tapped]
    for name, region in regions.items():
        # Branches have the same operands: each takes the inputs of all branches.
        entering = closed if primitive is _jax.COND else [c for c in closed if c[0] == name]
        place = input_places[name]
        regions[name] = _widen_region(region, name, place, entering, tapped, shown, node.function)
    results = [*node.outputs, *(port.value for port in outer_shown)]
    wide = _replace_regions(node, regions, params, operands, results)
    return Written([wide], {}, [*(p for _, p in outer_closed), *outer_tapped], outer_shown)


def _widen_region(
    region: Graph,
    name: str,
    place: int,
    closed: Sequence[tuple[str, Port]],
    tapped: Sequence[tuple[str, Port]],
    shown: Sequence[tuple[str, Port]],
    function: str,
) -> Graph:
    """Adds closed-over inputs at the position `place`, and taps and outputs at the end. Ports of
    other branches become unused inputs, or outputs that are zeros."""

    def input_of(port_name: str, port: Port) -> Value:
        return port.value if port_name == name else Value(port.value.aval)

    inputs, outputs, nodes = list(region.inputs), list(region.outputs), list(region.nodes)
    inputs[place:place] = [input_of(*each) for each in closed]
    inputs += [input_of(*each) for each in tapped]
    for port_name, port in shown:
        if port_name == name:
            outputs.append(port.value)
        else:
            zero = jax.make_jaxpr(functools.partial(_jax.zeros_of, port.value.aval))()
            nodes += [node_of(each, function) for each in _jax.opened(zero).eqns]
            outputs += _jax.opened(zero).outvars
    return region.replace(nodes=nodes, inputs=inputs, outputs=outputs)


def _replace_regions(
    node: Node,
    regions: Mapping[str, Graph],
    params: Mapping[str, Any] | None = None,
    operands: Sequence[Atom] | None = None,
    results: Sequence[Value] | None = None,
) -> Node:
    operands = node.inputs if operands is None else operands
    programs = {name: region.program for name, region in regions.items()}
    equation = node.equation.replace(
        invars=list(operands),
        outvars=list(node.outputs if results is None else results),
        params=_jax.with_programs(node.params if params is None else params, programs),
        effects=_edited_effects(node, regions, operands),
    )
    return node.having(equation, MappingProxyType(dict(regions)))


def _edited_effects(node: Node, regions: Mapping[str, Graph], operands: Sequence[Atom]) -> set[Any]:
    """Returns the effects of a node with other regions and operands. An effect on a Ref refers to
    the Ref by the position of its operand."""
    before = {effect for region in node.regions.values() for effect in region.effects}
    now = {effect for region in regions.values() for effect in region.effects}
    kept = {e for e in node.effects if _jax.is_of_reference(e) or e not in before}
    moved = {_jax.of_operand(effect, node.inputs, operands) for effect in kept}
    return moved | {effect for effect in now if not _jax.is_of_reference(effect)}


# ----------------------------------------------------------------- traced anew by JAX's functions


def _write_by_jax(
    node: Node,
    edits: Mapping[str, Edited],
    surroundings: Surroundings,
    run: Callable[..., Sequence[Any]],
) -> Written:
    for edited in edits.values():
        if edited.outs or any(port.closed_over is None for port in edited.ins):
            raise _cannot_widen_error(node, _HAS_NO_PLACE)
    place = Occurrence((), node)
    return write(run, node.inputs, node.outputs, node, place, surroundings)


def _close_over_ports(
    edited: Edited, guard: Callable[[Any], Any] = lambda array: array
) -> Callable[..., list[Any]]:
    """Returns the edited region as a function that closes over the arrays of its ports; each of
    these arrays passes through `guard`."""
    closed_over = [guard(port.closed_over) for port in edited.ins]
    region = edited.graph
    if closed_over:
        region = region.replace(inputs=[*(p.value for p in edited.ins), *region.inputs])

    def run(*args: Any) -> list[Any]:
        return region(*closed_over, *args)

    run.__name__ = run.__qualname__ = region.name
    return run


def _make_rule(node: CustomGradient, edits: Mapping[str, Edited]) -> Callable[..., Sequence[Any]]:
    """Makes a function with a custom gradient from edited and unedited faces. Under differentiation
    the jvp or forward face runs in place of the primal region: raises GraphError if only the primal
    region is edited, or only the forward face."""
    running = "jvp" if node.kind == "jvp" else "forward"
    primal_alone = "call_jaxpr" in edits and running not in edits
    forward_alone = "call_jaxpr" not in edits and "forward" in edits
    if primal_alone or forward_alone:
        raise GraphError(
            f"of the custom gradient {node.name} only the primal region or only the {running} face "
            "was edited: the function would return one thing, and another under differentiation. "
            f"Edit the matches in `node.primal` and in `node.face({running!r})`, or edit outside "
            f"the rule: {Occurrence((), node)}"
        )

    guard = functools.partial(not_differentiated, node)

    def face(name: str) -> Callable[..., list[Any]]:
        return _close_over_ports(edits[name] if name in edits else Edited(node.region(name)), guard)

    def run(*args: Any) -> list[Any]:
        return list(rule_of_faces(node, face)(*args))

    return run


def rule_of_faces(
    node: CustomGradient, face: Callable[[str], Callable[..., list[Any]]]
) -> Callable[..., Sequence[Any]]:
    """Makes a function with a custom gradient from its faces; ``face(name)`` returns a face as a
    function. Differentiating with respect to a value that the function closes over raises an
    error."""
    rule = _jvp_rule(node, face) if node.kind == "jvp" else _vjp_rule(node, face)
    count = node.closed_over

    def run(*args: Any) -> Sequence[Any]:
        closed_over = [not_differentiated(node, array) for array in args[:count]]
        results: Sequence[Any] = rule(*closed_over, *args[count:])
        return results

    return run


def _jvp_rule(node: CustomGradient, face: Callable[[str], Callable[..., list[Any]]]) -> Any:
    rule, run_jvp = jax.custom_jvp(face("call_jaxpr")), face("jvp")
    has_tangent = [has_gradient(atom) for atom in node.inputs]
    outputs = [value.aval for value in node.outputs]

    def jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        float_tangents = [t for t, has_one in zip(tangents, has_tangent, strict=True) if has_one]
        results = run_jvp(*primals, *float_tangents)
        return results[: len(outputs)], _jax.insert_float0(outputs, results[len(outputs) :])

    rule.defjvp(jvp)
    return rule


def _vjp_rule(node: CustomGradient, face: Callable[[str], Callable[..., list[Any]]]) -> Any:
    rule = jax.custom_vjp(face("call_jaxpr"))
    forward, backward = face("forward"), face("backward")
    count = node.closed_over
    active = [i for i, atom in enumerate(node.inputs) if i >= count and has_gradient(atom)]
    outputs = [value.aval for value in node.outputs]

    def fwd(*primals: Any) -> tuple[list[Any], list[Any]]:
        results = forward(*primals)
        return results[: len(outputs)], results[len(outputs) :]

    def bwd(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        pairs = zip(cotangents, outputs, strict=True)
        float_cotangents = [ct for ct, aval in pairs if _jax.has_gradient(aval)]
        gradients: list[Any] = [None] * len(node.inputs)
        for i, ct in zip(active, backward(*residuals, *float_cotangents), strict=True):
            if i in node.returned:  # for other inputs the rule returned None
                gradients[i] = ct
        return tuple(gradients)

    rule.defvjp(fwd, bwd)
    return rule
