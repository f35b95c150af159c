"""Runs a node with functions in the place of its regions, by JAX's public functions.

The functions may have other types than the regions: so a program can run in another precision than
it was traced in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tracegrad import _jax
from tracegrad.ir.borders import rule_of_faces
from tracegrad.ir.graph import Graph
from tracegrad.ir.importer import graph_of
from tracegrad.ir.nodes import CustomGradient, Node, Recompute, RegionNode
from tracegrad.ir.running import read, run_node, run_nodes

Function = Callable[..., list[Any]]
FlatFunction = Callable[[Sequence[Any]], list[Any]]

_MOST = 100_000  # iterations of a bounded loop


def bounded(fun: FlatFunction, at: Sequence[Any]) -> FlatFunction:
    """Compiles a function of arrays so that it also ends at points near a point where it ends: a
    `while` loop that runs more than 100,000 times is ended, and its results are NaN.

    A loop that runs three times at one point may run for ever at a nearby point: if it waits for a
    number to be met exactly, or if its condition and its body take one array as two operands, and
    only one of these is moved."""
    program = jax.make_jaxpr(fun)(list(at))
    if _jax.program_facts(program).primitives.isdisjoint(_jax.WHILES):
        return jax.jit(fun)
    return jax.jit(functools.partial(_run_bounded, graph_of(program)))


def _run_bounded(graph: Graph, args: Sequence[Any]) -> list[Any]:
    instead: dict[Node, FlatFunction] = {
        node: functools.partial(_run_bounded_regions, node)
        for node in graph.nodes
        if isinstance(node, RegionNode) and not node.has_references
    }
    return read(graph.outputs, run_nodes(graph, args, instead=instead))


def _run_bounded_regions(node: RegionNode, args: Sequence[Any]) -> list[Any]:
    if isinstance(node, CustomGradient):
        return _run_bounded(node.primal, args)

    def function_of(name: str) -> Function:
        return lambda *args: _run_bounded(node.region(name), args)

    results = bind_functions(node, args, function_of, _MOST)
    return run_node(node, args) if results is None else results


def bind_functions(
    node: Node,
    args: Sequence[Any],
    function_of: Callable[[str], Function],
    most: float = math.inf,
) -> list[Any] | None:
    """Returns the results of a node that runs with functions in the place of its regions and of its
    rule's faces. Returns None if JAX has no public function for such a node.

    Args:
      function_of: returns the function for the name of a region or a face.
      most: after so many iterations a `while` loop ends, and its results are NaN.
    """
    if node.primitive is _jax.JIT:
        return function_of("jaxpr")(*args)
    if isinstance(node, CustomGradient):
        return list(rule_of_faces(node, function_of)(*args))
    if node.op == "shard_map":
        mapped = jax.shard_map(
            function_of("jaxpr"),
            mesh=node.params["mesh"],
            in_specs=tuple(node.params["in_specs"]),
            out_specs=list(node.params["out_specs"]),
            **_jax.shard_map_options(node.params),
        )
        return list(mapped(*args))
    if isinstance(node, Recompute):
        options = {k: node.params[k] for k in ("prevent_cse",) if k in node.params}
        return list(jax.checkpoint(function_of("jaxpr"), policy=node.policy, **options)(*args))
    if node.primitive is _jax.SCAN:
        return _scan(node, args, function_of("jaxpr"))
    if node.primitive is _jax.COND:
        branches = [function_of(name) for name in node.regions]
        return list(lax.switch(args[0], branches, *args[1:]))
    # Without a bound, a checkpointed loop is left to JAX, which can differentiate it.
    if node.primitive is _jax.WHILE or (node.primitive in _jax.WHILES and most < math.inf):
        return _while(node, args, function_of, most)
    return None


def _scan(node: Node, args: Sequence[Any], body: Function) -> list[Any]:
    constants, carried = _jax.scan_split(node.params)
    fixed, carry = args[:constants], list(args[constants : constants + carried])

    def step(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*fixed, *state, *slices)
        return results[:carried], results[carried:]

    how = {name: node.params[name] for name in ("length", "reverse", "unroll")}
    final, stacked = lax.scan(step, carry, list(args[constants + carried :]), **how)
    return [*final, *stacked]


def _while(
    node: Node, args: Sequence[Any], function_of: Callable[[str], Function], most: float
) -> list[Any]:
    condition, body = function_of("cond_jaxpr"), function_of("body_jaxpr")
    split = node.params["cond_nconsts"]
    end = split + node.params["body_nconsts"]

    def runs_on(carry: list[Any]) -> Any:
        return condition(*args[:split], *carry)[0]

    def goes_on(state: tuple[Any, list[Any]]) -> Any:
        count, carry = state
        return jnp.any(runs_on(carry)) & (count < most)

    def step(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        count, carry = state
        results = body(*args[split:end], *carry)
        if node.region("cond_jaxpr").out_avals[0].shape:  # under vmap, ended examples stay
            results = list(map(functools.partial(_where, runs_on(carry)), results, carry))
        return count + 1, results

    count, results = lax.while_loop(goes_on, step, (0, list(args[end:])))
    unknown = count >= most
    return [jnp.where(unknown, jnp.nan, y) if _jax.has_gradient(y) else y for y in results]


def _where(more: Any, new: Any, old: Any) -> Any:
    """Returns the elements of `new` where `more` holds, which has the first axes, else of `old`."""
    return jnp.where(jnp.expand_dims(more, range(more.ndim, jnp.ndim(new))), new, old)
