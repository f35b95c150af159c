"""Runs a node with functions in the place of its regions, by JAX's public functions.

The functions may have other types than the regions: so a program can run in another precision than
it was traced in. There, a `while` loop that waits for an exact number may run for ever: a loop is
ended after 100,000 iterations, and its results are NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tracegrad import _jax
from tracegrad.ir.borders import rule_of_faces
from tracegrad.ir.nodes import CustomGradient, Node, Recompute

Function = Callable[..., list[Any]]

_MOST_ITERATIONS = 100_000


def bind_functions(
    node: Node, args: Sequence[Any], function_of: Callable[[str], Function]
) -> list[Any] | None:
    """Returns the results of a node that runs with functions in the place of its regions and of its
    rule's faces. Returns None if JAX has no public function for such a node.

    Args:
      function_of: returns the function for the name of a region or a face.
    """
    if node.primitive is _jax.JIT:
        return function_of("jaxpr")(*args)
    if isinstance(node, CustomGradient):
        return list(rule_of_faces(node, function_of)(*args))
    if node.op == "shard_map":
        return list(_jax.shard_map_like(node.params, function_of("jaxpr"))(*args))
    if isinstance(node, Recompute):
        options = {k: node.params[k] for k in ("prevent_cse",) if k in node.params}
        return list(jax.checkpoint(function_of("jaxpr"), policy=node.policy, **options)(*args))
    if node.primitive is _jax.SCAN:
        return _scan(node, args, function_of("jaxpr"))
    if node.primitive is _jax.COND:
        branches = [function_of(name) for name in node.regions]
        return list(lax.switch(args[0], branches, *args[1:]))
    return _while(node, args, function_of) if node.primitive is _jax.WHILE else None


def _scan(node: Node, args: Sequence[Any], body: Function) -> list[Any]:
    constants, carried = _jax.scan_split(node.params)
    fixed, carry = args[:constants], list(args[constants : constants + carried])

    def step(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*fixed, *state, *slices)
        return results[:carried], results[carried:]

    how = {name: node.params[name] for name in ("length", "reverse", "unroll")}
    final, stacked = lax.scan(step, carry, list(args[constants + carried :]), **how)
    return [*final, *stacked]


def _while(node: Node, args: Sequence[Any], function_of: Callable[[str], Function]) -> list[Any]:
    condition, body = function_of("cond_jaxpr"), function_of("body_jaxpr")
    split = node.params["cond_nconsts"]
    end = split + node.params["body_nconsts"]

    def runs_on(carry: Any) -> Any:
        return condition(*args[:split], *carry)[0]

    def goes_on(state: Any) -> Any:
        count, carry = state
        more = jnp.any(runs_on(carry)) & (count < _MOST_ITERATIONS)
        return more & (is_nan_at_first | ~_has_nan(carry)) if is_nested else more

    def step(state: Any) -> Any:
        count, carry = state
        results = body(*args[split:end], *carry)
        if node.region("cond_jaxpr").out_avals[0].shape:  # under vmap, ended examples stay
            results = list(map(functools.partial(_where, runs_on(carry)), results, carry))
        return count + 1, results

    # If an inner loop is ended, the outer one ends, too, and does not repeat that 100,000 times.
    is_nested = _jax.WHILE.name in node.region("body_jaxpr").operations
    is_nan_at_first = _has_nan(args[end:])
    _, results = lax.while_loop(goes_on, step, (0, list(args[end:])))
    factor = jnp.where(jnp.any(runs_on(results)), jnp.nan, 1.0)  # makes derivatives NaN, too
    return [y * factor if _jax.has_gradient(y) else y for y in results]


def _has_nan(values: Sequence[Any]) -> Any:
    found = [jnp.any(jnp.isnan(y)) for y in values if _jax.has_gradient(y)]
    return functools.reduce(jnp.logical_or, found, jnp.array(False))


def _where(more: Any, new: Any, old: Any) -> Any:
    """Returns the elements of `new` where `more` holds, which has the first axes, else of `old`."""
    return jnp.where(jnp.expand_dims(more, range(more.ndim, jnp.ndim(new))), new, old)
