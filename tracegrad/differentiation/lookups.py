"""Returns the gradient of a table as the rows that a program looked up, without a dense array.

JAX's derivative of a lookup adds the cotangents of the rows to zeros of the table's shape. In a
traced backward program such a gradient is a sum of scatters into zeros. The scattered rows and
their indices then stand for the gradient, and the operations that only serve the scatter do not
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from tracegrad import _jax
from tracegrad.differentiation.indexed_slices import IndexedSlices, row_indices
from tracegrad.ir import Atom, Literal, Node, Occurrence, Value, has_gradient
from tracegrad.ir.importer import graph_of
from tracegrad.ir.inlined import Inlined, PlacedAtom
from tracegrad.ir.occurrence import Path
from tracegrad.ir.running import run_node
from tracegrad.variables.reading import ReadsOutside


def with_slices(program: Any, sparse: Sequence[bool]) -> Callable[..., list[Any]]:
    """Returns a function that runs a backward program, and returns slices instead of dense tables.

    `program` is a ``ClosedJaxpr`` that returns gradients; `sparse` says of each gradient whether it
    may become `IndexedSlices`. A gradient becomes slices if all of it comes from lookups along axis
    0 (``table[ids]``, `jax.numpy.take`), also in jitted functions: one slice for each lookup, in
    the order in which the lookups ran. It stays an array if it includes a dense gradient or a
    lookup in the body of a loop, of a branch or of a recomputed function, or in a table on a mesh
    with explicit axes. Unused results are not computed; effects are kept.
    """
    graph = graph_of(program)
    inlined = Inlined(graph)
    scatters = [
        _find_scatters(inlined, value) if flag and has_gradient(value) else None
        for value, flag in zip(graph.outputs, sparse, strict=True)
    ]
    all_scatters = [scatter for each in scatters for scatter in each or ()]
    # Only the calls that contain a scatter, at any depth, are inlined.
    calls = {each.path[:depth] for each in all_scatters for depth in range(1, len(each.path) + 1)}
    main = Inlined(graph, lambda path, node: (*path, (node, "jaxpr")) in calls)
    results = list(zip(graph.outputs, scatters, strict=True))
    dense = [main.origin((), value) for value, rows in results if not rows]
    for_slices = [
        main.origin(each.path, v) for each in all_scatters for v in (each.updates, each.indices)
    ]
    steps = _needed_operations(main, [*dense, *for_slices])

    def run(*args: Any) -> list[Any]:
        values = _run_operations(main, steps, args)
        return [
            _make_slices(rows, value.aval, main, values)
            if rows
            else _read_value(values, main, (), value)
            for value, rows in results
        ]

    return run


def call_with_slices(
    fun: Callable[[list[Any]], tuple[Any, list[Any]]], leaves: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Calls a function that returns ``(values, gradients)``; the gradients may become slices. The
    function is traced, so it takes leaves that `jax.jit` takes. It may read Variables as without a
    trace. A value that is not computed from the leaves may be any object, and is returned
    unchanged."""
    leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
    variables = ReadsOutside()
    returned: Any = None

    # A new function at each call: JAX caches traces by the identity of the function.
    def run_listening(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal returned
        with variables.around():
            values, gradients = fun(leaves)
        returned = jax.tree.map(lambda leaf: _COMPUTED if _jax.is_tracer(leaf) else leaf, values)
        return list(filter(_jax.is_tracer, jax.tree.leaves(values))), gradients

    program = jax.make_jaxpr(run_listening)(leaves)
    count = sum(leaf is _COMPUTED for leaf in jax.tree.leaves(returned))
    flags = [i >= count for i in range(len(program.out_avals))]
    flat = with_slices(program, flags)(*leaves)
    computed = iter(flat[:count])
    values = jax.tree.map(lambda leaf: next(computed) if leaf is _COMPUTED else leaf, returned)
    return values, flat[count:]


_COMPUTED = object()  # marks a value that the program computes


# ------------------------------------------------------------------------- running the operations

_Values = dict[PlacedAtom, Any]


def _needed_operations(main: Inlined, wanted: Iterable[PlacedAtom]) -> list[Occurrence]:
    """Returns the operations that the wanted values need, and the operations with effects."""
    needed, chosen = set(_drop_literals(wanted)), []
    for step in reversed(main.steps):
        if step.node.effects or any((step.path, v) in needed for v in step.node.outputs):
            needed.update(_drop_literals(main.origin(step.path, v) for v in step.node.operands))
            chosen.append(step)
    return chosen[::-1]


def _drop_literals(refs: Iterable[PlacedAtom]) -> list[PlacedAtom]:
    return [ref for ref in refs if isinstance(ref[1], Value)]


def _run_operations(main: Inlined, steps: Sequence[Occurrence], args: Sequence[Any]) -> _Values:
    """Returns the values of the operations' results and of the inputs."""
    values: _Values = {((), v): arg for v, arg in zip(main.graph.inputs, args, strict=True)}
    for path, node in ((step.path, step.node) for step in steps):
        operands = [_read_value(values, main, path, v) for v in node.inputs]
        with ExitStack() as contexts:
            for call, _ in path:
                for context in _jax.equation_context(*call.source):
                    contexts.enter_context(context)
            results = run_node(node, operands)
        values.update(zip([(path, v) for v in node.outputs], results, strict=True))
    return values


def _read_value(values: _Values, main: Inlined, path: Path, atom: Atom) -> Any:
    path, atom = main.origin(path, atom)
    if isinstance(atom, Literal):
        return atom.val
    constants = main.region(path).constants
    return constants[atom] if atom in constants else values[path, atom]


# --------------------------------------------------------------------------------- finding zeros

_KEEPS_ZEROS = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"})


def _is_zeros(program: Inlined, path: Path, value: Atom) -> bool:
    """Whether the value is zeros for all inputs."""
    while True:
        path, value = program.origin(path, value)
        if isinstance(value, Literal):
            return bool(np.all(np.asarray(value.val) == 0))
        node = program.made_by(path, value)
        if node is None or node.op not in _KEEPS_ZEROS:
            return False
        value = node.inputs[0]


# --------------------------------------------------------------------------------------- scatters

# Converts the updates and indices of the program to slices [n, ...] and their rows [n].
_Rows = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class _Scatter:
    """Rows written into zeros. `rows` converts the updates and their indices to slices and rows."""

    path: Path
    updates: Atom
    indices: Atom
    rows: _Rows


def _find_scatters(program: Inlined, value: Atom) -> list[_Scatter] | None:
    """Returns scatters into zeros whose sum is the value, in the order of the lookups, or None."""
    found: list[_Scatter] = []
    pending: list[PlacedAtom] = [((), value)]
    while pending:
        path, value = program.origin(*pending.pop())
        if _is_zeros(program, path, value):
            continue
        node = program.made_by(path, value)
        if node is None:
            return None
        if node.op in ("add", "add_any"):
            pending += [(path, v) for v in node.inputs[::-1]]
            continue
        is_cast = node.op == "convert_element_type" and has_gradient(node.inputs[0])
        if is_cast or node.op == "copy":
            pending.append((path, node.inputs[0]))
            continue
        scatter = _read_scatter_add(path, node) if node.op == "scatter-add" else None
        if scatter is None:
            return None
        found.append(scatter)
        pending.append((path, node.inputs[0]))
    return found[::-1]  # the backward pass meets the last lookup first


def _read_scatter_add(path: Path, node: Node) -> _Scatter | None:
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
        or tuple(sizes) != (1, *table[1:])  # parts of rows, or several rows
        or mode not in _MODES
    ):
        return None
    batch = [d for d in range(len(updates.aval.shape)) if d not in window]

    def rows(updates: Any, indices: Any) -> tuple[Any, Any]:
        slices = jnp.transpose(updates, (*batch, *window)).reshape(-1, *table[1:])
        starts = indices.reshape(-1, len(columns))
        ids = row_indices(starts[:, columns.index(0)], table[0])
        if mode is GatherScatterMode.CLIP:
            return slices, jnp.clip(ids, 0, table[0] - 1)
        others = np.array([i for i, d in enumerate(columns) if d != 0], int)
        # A window as wide as the table begins at the table's edge; otherwise it is out of range.
        inside = jnp.all(starts[:, others] == 0, axis=1) if others.size else True
        is_row = inside & (ids >= 0) & (ids < table[0])
        flags = is_row.reshape(is_row.shape + (1,) * (slices.ndim - 1))
        return jnp.where(flags, slices, 0), jnp.where(is_row, ids, table[0])

    return _Scatter(path, updates, indices, rows)


_MODES = (
    GatherScatterMode.CLIP,
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
)


def _make_slices(
    scatters: Sequence[_Scatter], aval: Any, main: Inlined, values: _Values
) -> IndexedSlices:
    pairs = []
    for each in scatters:
        operands = [_read_value(values, main, each.path, v) for v in (each.updates, each.indices)]
        pairs.append(each.rows(*operands))
    slices, rows = (jnp.concatenate(parts) if len(pairs) > 1 else parts[0] for parts in zip(*pairs))
    return IndexedSlices(slices.astype(aval.dtype), rows, aval.shape)
