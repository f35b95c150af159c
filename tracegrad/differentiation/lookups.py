"""Gradients of tables by the rows that a program looked up, never as a whole table of zeros.

JAX's derivative of a lookup adds the cotangents of the rows up in an array of zeros of the table's
shape. In a backward program, as it was traced, such an array can be told from any other: it is a
sum of scatters into zeros. Then the scattered rows and their indices are the gradient, and what
only served to scatter them is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from tracegrad import _jax
from tracegrad.differentiation.indexed_slices import IndexedSlices, row_indices
from tracegrad.ir import Atom, Graph, Literal, Node, Value, has_gradient
from tracegrad.ir.importer import import_program
from tracegrad.ir.running import run_node
from tracegrad.variables.reading import ReadsOutside


def with_slices(program: Any, sparse: Sequence[bool]) -> Callable[..., list[Any]]:
    """The function that a backward program computes, with slices in place of tables of them.

    Args:
      program: a ``ClosedJaxpr`` that returns gradients.
      sparse: for each of its results, whether it may be `IndexedSlices`.

    Returns:
      A function ``(*args) -> results``. A result is `IndexedSlices` where the whole of it comes
      from lookups by axis 0 (``table[ids]``, `jax.numpy.take`), also in jitted functions: one
      slice for each lookup, the lookup that ran first in front. What meets a dense gradient, and
      what was looked up in the body of a loop, of a branch or of a recomputed function, or in a
      table on a mesh with explicit axes, is an array. Results that nobody needs any more are not
      computed; effects are kept.
    """
    main = _Entered(import_program(program))
    outputs = main.graph.outputs
    found = [
        _scatters(main, value) if flag and has_gradient(value) else None
        for value, flag in zip(outputs, sparse, strict=True)
    ]
    for value, scatters in zip(outputs, found, strict=True):
        for scatter in scatters or ():
            for operand in (scatter.updates, *scatter.indices):
                scatter.place.need(operand)
        if not scatters:
            main.need(value)
    _find_needed(main)

    def run(*args: Any) -> list[Any]:
        values: _Values = {}
        _run(main, args, values)
        return [
            _slices(scatters, value.aval, values) if scatters else _read(main, value, values)
            for value, scatters in zip(outputs, found, strict=True)
        ]

    return run


def call_with_slices(
    fun: Callable[[list[Any]], tuple[Any, list[Any]]], leaves: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Calls a function that returns ``(values, gradients)``; the gradients may be slices then.

    It is traced, and so takes what `jax.jit` takes. It may read Variables as if it were not, and
    what is not computed from the leaves may be anything among the values, which is handed on.
    """
    leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
    variables = ReadsOutside()
    returned: Any = None

    # Under a new identity: JAX remembers traces by that of the function.
    def listened(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal returned
        with variables.around():
            values, gradients = fun(leaves)
        returned = jax.tree.map(lambda leaf: _COMPUTED if _jax.is_tracer(leaf) else leaf, values)
        return list(filter(_jax.is_tracer, jax.tree.leaves(values))), gradients

    program = jax.make_jaxpr(listened)(leaves)
    count = sum(leaf is _COMPUTED for leaf in jax.tree.leaves(returned))
    flags = [i >= count for i in range(len(program.out_avals))]
    flat = with_slices(program, flags)(*leaves)
    computed = iter(flat[:count])
    values = jax.tree.map(lambda leaf: next(computed) if leaf is _COMPUTED else leaf, returned)
    return values, flat[count:]


_COMPUTED = object()  # what the program gives, in a tree of what the function returned


# ---------------------------------------------------------------------------- programs as entered

_Values = dict["_Entered", dict[Value, Any]]


@dataclass(eq=False)
class _Entered:
    """A graph and the call by which it was entered: regions are shared, and each call of one is
    another place. A jitted function whose call is not `opened` is called as it is."""

    graph: Graph
    node: Node | None = None
    outside: _Entered | None = None
    inner: dict[Node, _Entered] = field(default_factory=dict)
    opened: bool = False
    needed: set[Value] = field(default_factory=set)
    nodes: list[Node] = field(default_factory=list)  # what is run: see `_find_needed`

    def region(self, node: Node) -> _Entered:
        if node not in self.inner:
            self.inner[node] = _Entered(node.regions["jaxpr"], node, self)
        return self.inner[node]

    def need(self, value: Atom) -> None:
        """Has a value kept for who runs this, at whatever depth it is."""
        if isinstance(value, Value):
            self.needed.add(value)
        place: _Entered | None = self
        while place is not None:
            place.opened, place = True, place.outside


def _find_needed(place: _Entered) -> None:
    """Chooses the nodes that what is needed depends on, and those with effects."""
    needed, chosen = place.needed, []
    for node in reversed(place.graph.nodes):
        inner = place.inner.get(node)
        inputs: Sequence[Atom]
        if inner is not None and inner.opened:
            pairs = zip(node.outputs, inner.graph.outputs, strict=True)
            inner.needed.update(v for out, v in pairs if out in needed and isinstance(v, Value))
            _find_needed(inner)
            operands = zip(node.inputs, inner.graph.inputs, strict=True)
            inputs = [operand for operand, v in operands if v in inner.needed]
        elif node.effects or any(v in needed for v in node.outputs):
            inputs = node.inputs
        else:
            continue
        needed.update(v for v in inputs if isinstance(v, Value))
        chosen.append(node)
    place.nodes = chosen[::-1]


def _run(place: _Entered, args: Sequence[Any], values: _Values) -> None:
    """Runs the chosen nodes; `values` gets what every place has computed."""
    here = values[place] = dict(place.graph.constants)
    here.update(zip(place.graph.inputs, args, strict=True))
    for node in place.nodes:
        operands = [_read(place, v, values) for v in node.inputs]
        inner = place.inner.get(node)
        if inner is None or not inner.opened:
            results = run_node(node, operands)
        else:
            scope, settings = _jax.equation_context(*node.source)
            with scope, settings:
                _run(inner, operands, values)
            results = [_read(inner, v, values) for v in inner.graph.outputs]
        here.update(zip(node.outputs, results, strict=True))


def _read(place: _Entered, value: Atom, values: _Values) -> Any:
    """A value of a place; None if it was not needed."""
    return value.val if isinstance(value, Literal) else values[place].get(value)


# ---------------------------------------------------------------------------------- what is zeros


def _origin(place: _Entered, value: Atom) -> tuple[_Entered, Atom]:
    """Where a value comes from, in or out of jitted functions."""
    while isinstance(value, Value):
        node = place.graph.producers.get(value)
        if node is not None and node.primitive is _jax.JIT:
            index = node.outputs.index(value)
            place = place.region(node)
            value = place.graph.outputs[index]
        elif node is None and place.node is not None and value in place.graph.inputs:
            assert place.outside is not None
            value = place.node.inputs[place.graph.inputs.index(value)]
            place = place.outside
        else:
            break
    return place, value


_KEEPS_ZEROS = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"})


def _is_zeros(place: _Entered, value: Atom) -> bool:
    """Whether a value is zeros by the program itself."""
    while True:
        place, value = _origin(place, value)
        if isinstance(value, Literal):
            return bool(np.all(np.asarray(value.val) == 0))
        node = place.graph.producers.get(value)
        if node is None or node.op not in _KEEPS_ZEROS:
            return False
        value = node.inputs[0]


# --------------------------------------------------------------------------------------- scatters

# Updates and indices as they are in the program -> slices [n, ...] and the row [n] of each.
_Rows = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class _Scatter:
    """Rows written into zeros: what is written, to where, and how to read that."""

    place: _Entered
    updates: Atom
    indices: tuple[Atom, ...]
    rows: _Rows


def _scatters(place: _Entered, value: Atom) -> list[_Scatter] | None:
    """The scatters of which a value is the sum, in the order of the lookups; None if it is not."""
    found: list[_Scatter] = []
    pending = [(place, value)]
    while pending:
        place, value = _origin(*pending.pop())
        if _is_zeros(place, value):
            continue
        node = place.graph.producers.get(value) if isinstance(value, Value) else None
        if node is None:
            return None
        if node.op in ("add", "add_any"):
            pending += [(place, v) for v in node.inputs[::-1]]
            continue
        is_cast = node.op == "convert_element_type" and has_gradient(node.inputs[0])
        if is_cast or node.op == "copy":
            pending.append((place, node.inputs[0]))
            continue
        scatter = _SCATTERS.get(node.op, _no_scatter)(place, node)
        if scatter is None:
            return None
        found.append(scatter)
        if node.op == "scatter-add":
            pending.append((place, node.inputs[0]))
    return found[::-1]  # the reverse pass comes to the last lookup first


def _no_scatter(place: _Entered, node: Node) -> _Scatter | None:
    return None


def _scatter_add(place: _Entered, node: Node) -> _Scatter | None:
    """The transpose of a gather."""
    numbers, mode = node.params["dimension_numbers"], node.params["mode"]
    table = tuple(node.outputs[0].aval.shape)
    _, indices, updates = node.inputs
    window = tuple(numbers.update_window_dims)
    sizes = [updates.aval.shape[d] for d in window]
    if numbers.inserted_window_dims:
        sizes = [1, *sizes]
    columns = tuple(numbers.scatter_dims_to_operand_dims)
    if (
        numbers.operand_batching_dims
        or tuple(numbers.inserted_window_dims) not in ((), (0,))
        or 0 not in columns
        or tuple(sizes[1:]) != table[1:]  # parts of rows
        or mode not in _MODES
    ):
        return None
    batch = [d for d in range(len(updates.aval.shape)) if d not in window]

    def rows(updates: Any, indices: Any) -> tuple[Any, Any]:
        slices = jnp.transpose(updates, (*batch, *window)).reshape(-1, *sizes)
        starts = indices.reshape(-1, len(columns))
        others = np.array([i for i, d in enumerate(columns) if d != 0], int)
        # A window as wide as the table begins at its edge, or reaches out of it.
        inside = jnp.all(starts[:, others] == 0, axis=1) if others.size else True
        return _within(
            slices, starts[:, columns.index(0)], inside, table[0], mode is GatherScatterMode.CLIP
        )

    return _Scatter(place, updates, (indices,), rows)


def _update_slice(place: _Entered, node: Node) -> _Scatter | None:
    """The transpose of ``table[i]``, whose index is one number."""
    table, updates, *starts = node.inputs
    if updates.aval.shape[1:] != table.aval.shape[1:] or not _is_zeros(place, table):
        return None
    count = table.aval.shape[0]

    def rows(updates: Any, start: Any) -> tuple[Any, Any]:
        return _within(updates[None], jnp.asarray(start)[None], True, count, clips=True)

    return _Scatter(place, updates, (starts[0],), rows)


def _pad(place: _Entered, node: Node) -> _Scatter | None:
    """The transpose of ``table[3]``, whose index is written in the program."""
    updates, padding = node.inputs
    (row, *first), *others = [tuple(map(int, config)) for config in node.params["padding_config"]]
    is_row = updates.aval.shape[0] == 1 and row >= 0 and first[0] >= 0 and not any(map(any, others))
    if not is_row or not _is_zeros(place, padding):
        return None
    return _Scatter(place, updates, (), lambda updates: (updates, jnp.array([row])))


_SCATTERS: dict[str, Callable[[_Entered, Node], _Scatter | None]] = {
    "scatter-add": _scatter_add,
    "dynamic_update_slice": _update_slice,
    "pad": _pad,
}
_MODES = (
    GatherScatterMode.CLIP,
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
)


def _within(windows: Any, starts: Any, inside: Any, count: int, clips: bool) -> tuple[Any, Any]:
    """Windows ``[n, k, ...]`` of k rows each, from the row where each starts, as single rows.

    What is out of range moves in if `clips`; else it is zeros for the row `count`, which is none.
    """
    size = windows.shape[1]
    starts = row_indices(starts, count)
    if clips:
        starts = jnp.clip(starts, 0, count - size)
    else:
        inside = inside & (starts >= 0) & (starts <= count - size)
    rows = starts[:, None] + jnp.arange(size, dtype=starts.dtype)[None]
    if not clips:
        rows = jnp.where(inside[:, None], rows, count)
        flags = inside.reshape(inside.shape + (1,) * (windows.ndim - 1))
        windows = jnp.where(flags, windows, 0)
    return windows.reshape(-1, *windows.shape[2:]), rows.reshape(-1)


def _slices(scatters: Sequence[_Scatter], aval: Any, values: _Values) -> IndexedSlices:
    found = []
    for scatter in scatters:
        operands = [_read(scatter.place, v, values) for v in (scatter.updates, *scatter.indices)]
        found.append(scatter.rows(*operands))
    slices, rows = (jnp.concatenate(parts) if len(found) > 1 else parts[0] for parts in zip(*found))
    return IndexedSlices(slices.astype(aval.dtype), rows, aval.shape)
