"""Raises an error if differentiation would lose the gradient of a value that a custom rule ignores.

JAX asks the rule of a `jax.custom_jvp` for the derivative with respect to the arguments only, and
silently takes zero for the values that the function closes over. Running a graph checks for such
values (see `tracegrad.ir.running`). For a function that is differentiated without a graph, the
check here runs with the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import CustomGradient
from tracegrad.ir.closed_over import refuse_derivatives
from tracegrad.ir.closures import may_hold_tracers
from tracegrad.ir.importer import graph_of, node_of
from tracegrad.ir.running import run_graph
from tracegrad.tracing.overriding import ForwardingTrace


def refuse_lost_derivatives(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a check to a function: while JAX differentiates the function, a `jax.custom_jvp` that
    closes over a differentiated value raises ValueError, if its result depends on the value."""

    @functools.wraps(fun, updated=())
    def checked(*args: Any) -> Any:
        with _Checking(_jax.current_trace(None)).in_place():
            return fun(*args)

    return checked


class _Checking(ForwardingTrace):
    """Checks each operation with a custom rule, and hands on all operations."""

    def __init__(self, parent: Any):
        super().__init__(parent)
        self.requires_low = parent.requires_low

    def process_primitive(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        if not params or not _jax.facts_below(params).closes_over:
            return self.parent_trace.process_primitive(primitive, args, params)
        with _jax.set_current_trace(self.parent_trace):
            results = run_graph(graph_of(_jax.program_of_one(primitive, params, args)), args)
            return results if primitive.multiple_results else results[0]

    def run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        def bound(*args: Any) -> list[Any]:
            return list(primitive.bind(*args, subfuns=subfuns, **params))

        function = subfuns[0]
        with _jax.set_current_trace(self.parent_trace):
            # JAX itself refuses a custom_vjp that closes over a differentiated value.
            is_jvp = primitive is _jax.CUSTOM_JVP
            if is_jvp and may_hold_tracers(_jax.rule_functions(subfuns)[0][0]):
                _refuse_lost_derivative(bound, args)
                _jax.forget_result_trees(function)
            return bound(*args)


def _refuse_lost_derivative(bound: Callable[..., list[Any]], args: Sequence[Any]) -> None:
    here = _jax.current_source_info()
    try:
        # Trace again at each call: the closed-over values may differ.
        program = jax.make_jaxpr(lambda *args: bound(*args))(*args)
    except Exception:  # it needs concrete values, and cannot be traced alone
        return
    open_form, constants = _jax.parts_of(program)
    values = dict(zip(open_form.constvars, constants, strict=True))
    values.update(zip(open_form.invars, args, strict=True))
    for equation in open_form.eqns:
        if equation.primitive is _jax.CUSTOM_JVP:
            operands = [v.val if hasattr(v, "val") else values[v] for v in equation.invars]
            node = node_of(equation.replace(source_info=here))
            assert isinstance(node, CustomGradient)
            refuse_derivatives(node, operands)
