"""Traces the code that an edit writes into nodes that define the replaced values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.errors import GraphError
from tracegrad.ir.importer import node_of
from tracegrad.ir.nodes import Atom, Node, Value, is_reference, renamed
from tracegrad.ir.notes import add_note
from tracegrad.ir.occurrence import Occurrence

Place = tuple[Any, ...]


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a region. `meshes` are the enclosing `jax.shard_map`s, from the outside
    in. Without `may_hold_arrays`, closed-over arrays become inputs of the region, not constants."""

    meshes: tuple[Node, ...] = ()
    may_hold_arrays: bool = True

    def inside(self, node: Node) -> Surroundings:
        meshes = (*self.meshes, node) if node.op == "shard_map" else self.meshes
        return Surroundings(meshes, node.op not in _jax.OPEN_PROGRAM_PRIMITIVES)


@dataclass(frozen=True, eq=False)
class Port:
    """A value that crosses the border of a region.

    Attributes:
      place: identifies the match that needs the port: the keys of nodes and the names of regions
        that lead from this region to the match, and the key of the match.
      value: the new input of the region, or the value or literal that becomes an output.
      closed_over: the array that an edit closes over, the same in each execution; None for taps
        and outputs.
    """

    place: Place
    value: Any
    closed_over: Any = None


@dataclass(frozen=True, eq=False)
class Written:
    """New nodes for a region, and the ports and constants that these nodes need.

    Attributes:
      nodes: define the values that the edit replaces, except the values in `names`.
      names: maps each replaced value that is not a result of `nodes` to another value or literal.
      ins, outs: the ports that the region has to add.
      constants: arrays that the region has to hold.
    """

    nodes: Sequence[Node]
    names: Mapping[Value, Atom]
    ins: Sequence[Port] = ()
    outs: Sequence[Port] = ()
    constants: Mapping[Value, Any] = dataclasses.field(default_factory=dict)


def write(
    run: Callable[..., Sequence[Any]],
    operands: Sequence[Atom],
    results: Sequence[Value],
    beside: Node,
    match: Occurrence,
    surroundings: Surroundings,
    *,
    scope: Any = None,
    shared: tuple[Any, dict[Any, Any]] | None = None,
    taps: Sequence[Any] = (),
    shown: list[Any] | None = None,
    has_line: bool = True,
) -> Written:
    """Traces a function into nodes that define some values of a region.

    Args:
      run: the function of the operands and the taps; returns new values for `results`.
      operands, results: values of the region.
      beside: the node whose source line and settings the new nodes get.
      match: the place of the edit, for ports and for errors.
      scope: the scope of the new nodes; default: the scope of `beside`. `run` is traced outside of
        this scope.
      shared: a key of everything besides types that the trace depends on, and a cache of programs.
      taps: the types of the taps.
      shown: the list to which `run` appends arrays that become outputs.
      has_line: whether the new nodes keep the lines at which they were traced; else all nodes are
        at the line of `beside`.

    Raises GraphError for a wrong number or type of results.
    """
    shown = [] if shown is None else shown

    def run_checked(*args: Any) -> list[Any]:
        shown.clear()
        with _jax.standing_for(_jax.below_scope(info.name_stack, info)):
            try:
                new = list(run(*args))
            except Exception as error:
                of = f"{match}, whose operands are {_types_text(operands)}"
                add_note(error, f"This was raised by the code that replaces {of}")
                raise
            if len(new) != len(results):
                raise GraphError(
                    f"{match}: expected {len(results)} results ({_types_text(results)}), one for "
                    f"each result of the match; the edit gave {len(new)}"
                )
            pairs = zip(new, results, strict=True)
            return [*(_convert_to_type(array, value.aval, match) for array, value in pairs), *shown]

    info, settings = beside.source
    avals = [*(atom.aval for atom in operands), *taps]
    key, traced = shared or (None, {})
    key = key, *avals, *(value.aval for value in results), settings, surroundings.meshes
    if key not in traced:
        traced[key] = _trace_under_settings(run_checked, avals, settings, surroundings)
    call = info if scope is None else info.replace(name_stack=scope)
    place = beside.function, match.key, surroundings
    return _make_defining_nodes(results, operands, traced[key], *place, call, has_line=has_line)


def write_through(
    run: Callable[..., Any],
    operand: Atom,
    result: Value,
    beside: Node,
    match: Occurrence,
    surroundings: Surroundings,
    traced: dict[Any, Any],
    *,
    taps: Sequence[Any],
) -> Written:
    """Traces a function of a value and the taps into nodes that define another value, as `write`.
    `traced` caches programs: a function is traced once for all values of one type."""
    place = beside, match, surroundings
    return write(
        lambda *args: [run(*args)],
        [operand],
        [result],
        *place,
        shared=(run, traced),
        taps=taps,
        has_line=False,
    )


def write_first(
    run: Callable[[Any], Any], operand: Value, result: Value, graph: Any, traced: dict[Any, Any]
) -> Written:
    """Traces a function of one input of a graph, as `write_through`. The new nodes are meant to be
    the first of the graph, and are outside of all scopes."""
    key = run, operand.aval
    if key not in traced:
        place = f"the input {graph.names[operand]} of {graph.name}"
        traced[key] = jax.make_jaxpr(_with_result_type(run, result.aval, place))(operand.aval)
    return _make_defining_nodes(
        [result], [operand], traced[key], graph.function_source, None, Surroundings()
    )


def _with_result_type(run: Callable[..., Any], aval: Any, place: object) -> Callable[..., Any]:
    return lambda *args: _convert_to_type(run(*args), aval, place)


def _trace_under_settings(
    run: Callable[..., Any], avals: Sequence[Any], settings: Any, surroundings: Surroundings
) -> Any:
    """Traces a function under the settings of an equation, and in the meshes around it."""
    programs: list[Any] = []

    def trace() -> None:
        with settings.manager:
            programs.append(jax.make_jaxpr(run)(*avals))

    for node in reversed(surroundings.meshes):
        trace = _jax.in_mesh_of(node.params, trace)
    trace()
    return programs[0]


def _make_defining_nodes(
    results: Sequence[Value],
    operands: Sequence[Atom],
    program: Any,
    function: str,
    key: Any,
    surroundings: Surroundings,
    call: Any = None,
    *,
    has_line: bool = False,
) -> Written:
    """Returns nodes that define `results`: the nodes of a program of `operands` and taps. The
    program returns the results, then further arrays to show.

    The nodes have equations and values of their own, so that one program can be written often.
    `function` is the nodes' `Node.function`, `key` the key of the match. The nodes get the scopes
    of the source info `call` around their own, and its line unless `has_line`; without `call`, they
    keep the scopes and lines of their trace.
    """
    open_form, arrays = _jax.parts_of(program)
    inputs, count = open_form.invars, len(operands)
    names: dict[Value, Atom] = dict(zip(inputs[:count], operands, strict=True))
    made = {value for equation in open_form.eqns for value in equation.outvars}
    others: dict[Value, Value] = {}  # results that are operands, literals, or an earlier result
    for old, new in zip(results, open_form.outvars, strict=False):
        if isinstance(new, Value) and new in made and new not in names:
            names[new] = old
        else:
            others[old] = new
    for value in (*inputs, *open_form.constvars, *made):
        if value not in names and not is_reference(value):  # effects name references
            names[value] = type(value)(value.aval)
    ins = [Port((key,), value) for value in renamed(inputs[count:], names)]
    constants: dict[Any, Any] = {}
    for value, array in zip(renamed(open_form.constvars, names), arrays, strict=True):
        # A tracer must not be a constant of a region: JAX would take its derivative to be zero.
        if isinstance(array, jax.core.Tracer) or not surroundings.may_hold_arrays:
            ins.append(Port((key,), value, array))
        else:
            constants[value] = array

    def copy_to_node(equation: Any) -> Node:
        info = equation.source_info
        info = info if call is None else _jax.inside_call(call, info, has_line=has_line)
        results = [names.get(value, value) for value in equation.outvars]
        operands = renamed(equation.invars, names)
        copy = equation.replace(source_info=info, invars=operands, outvars=results)
        return node_of(copy, function)

    nodes = list(map(copy_to_node, open_form.eqns))
    outs = [Port((key,), atom) for atom in renamed(open_form.outvars[len(results) :], names)]
    renames = dict(zip(others, renamed(list(others.values()), names), strict=True))
    return Written(nodes, renames, ins, outs, constants)


def _convert_to_type(new: Any, aval: Any, place: object) -> Any:
    """Converts a new result to the exact type of the value that it replaces: adapts its weak type
    and the mesh axes over which it varies. Raises GraphError for another shape or dtype."""
    if not isinstance(aval, jax.core.ShapedArray):
        return new
    if new is None:
        raise GraphError(f"{place}: expected {_jax.type_text(aval)}; the edit gave None")
    new = new if isinstance(new, jax.core.Tracer) else jnp.asarray(new)
    have = jax.typeof(new)
    if have == aval:
        return new
    if have.shape == aval.shape and have.dtype != aval.dtype and have.weak_type:
        new = new.astype(aval.dtype)  # a number that the edit wrote
        have = jax.typeof(new)
    if (have.shape, have.dtype) != (aval.shape, aval.dtype):
        raise GraphError(
            f"{place}: expected {_jax.type_text(aval)} for a value that is replaced; the edit gave "
            f"{_jax.type_text(have)}"
        )
    return _jax.weak_as(_jax.varying_as(new, aval), aval)


def _types_text(values: Sequence[Atom]) -> str:
    return ", ".join(_jax.type_text(value.aval) for value in values) or "none"
