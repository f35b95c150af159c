"""Bounds the loops of a function, so that they end at points near one where they end.

A loop that runs three times at one point may run for ever at a nearby point: if it waits for a
number to be met exactly, or if its condition and its body take one array as two operands, and only
one of these is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tracegrad import _jax
from tracegrad.insight.explaining.measuring import MeasuredPass
from tracegrad.insight.explaining.visits import strong
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence
from tracegrad.ir.importer import graph_of
from tracegrad.ir.running import run_graph, run_node

Function = Callable[[Sequence[Any]], list[Any]]


def bounded(fun: Function, at: Sequence[Any]) -> Function:
    """Compiles a function of arrays; the result returns NaN if a `while` loop runs far longer than
    the longest loop runs at `at`."""
    program = jax.make_jaxpr(fun)(list(at))
    if _jax.program_facts(program).primitives.isdisjoint(_jax.WHILES):
        return jax.jit(fun)
    counting = _CountingPass(graph_of(program))
    run = jax.jit(counting.counted)
    _, longest = run(list(at), jnp.inf)
    most = 16 * float(longest) + 1000

    def beside(leaves: Sequence[Any]) -> list[Any]:
        outs, longest = run(list(leaves), most)
        if longest < most:
            return list(outs)
        return [jnp.full_like(out, jnp.nan) if _jax.has_gradient(out) else out for out in outs]

    return beside


class _CountingPass(MeasuredPass):
    """A forward pass that counts the iterations of each `while` loop, and stops at a limit."""

    _limit: Any = jnp.inf

    def counted(self, leaves: Sequence[Any], limit: Any) -> tuple[list[Any], Any]:
        """Returns the results, and the iterations of the loop that had the most."""
        self._limit = limit
        return self._run(self.graph, leaves, ())

    def is_measured(self, node: Node) -> bool:
        return node.primitive in _jax.WHILES or isinstance(node, CustomGradient)

    def operation(self, here: Occurrence, operands: list[Any]) -> list[Any]:
        node = here.node
        if isinstance(node, CustomGradient):
            return self.forward(node.primal, operands, here.into("call_jaxpr"))[0]
        if node.has_references:
            return run_node(node, operands)
        split = node.params["cond_nconsts"]
        start = split + node.params["body_nconsts"]
        condition, body = node.region("cond_jaxpr"), node.region("body_jaxpr")

        def runs_on(carry: list[Any]) -> Any:
            (more,) = run_graph(condition, [*operands[:split], *carry])
            return more

        def again(state: Any) -> Any:
            steps, longest, carry = state
            more = jnp.any(runs_on(carry))
            return more & (steps < self._limit) & (longest < self._limit)

        def step(state: Any) -> Any:
            steps, longest, carry = state
            inside = [*operands[split:start], *carry]
            outs, inner = self._run(body, inside, here.into("body_jaxpr"))
            outs = list(map(strong, outs))
            if condition.out_avals[0].shape:  # under vmap, ended examples keep their carry
                outs = _where(runs_on(carry), outs, carry)
            return steps + 1.0, jnp.maximum(longest, inner), outs

        zero = jnp.zeros((), float)
        init = list(map(strong, operands[start:]))
        steps, longest, outs = lax.while_loop(again, step, (zero, zero, init))
        self.note("steps", here, 0, jnp.maximum, steps, longest)
        return outs

    def _run(self, graph: Graph, args: Sequence[Any], path: Any) -> tuple[list[Any], Any]:
        with self.collecting() as found:
            outs, _ = self.forward(graph, args, path)
        longest = jnp.zeros((), float)
        for steps in found.values():  # NaN: the loop is in a branch that was not taken
            longest = jnp.maximum(longest, jnp.nanmax(steps, initial=0.0))
        return outs, longest


def _where(more: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Selects the new arrays where `more` holds, else the old ones; `more` has their first axes."""

    def choose(new: Any, old: Any) -> Any:
        axes = tuple(range(more.ndim, jnp.ndim(new)))
        return jnp.where(jnp.expand_dims(more, axes), new, old)

    return list(map(choose, new, old))
