"""Refuses, while a function is being differentiated, what a custom derivative would lose.

JAX asks the rule of a `jax.custom_jvp` for the derivative with respect to the arguments, and takes
zero for what the function closes over, in silence. A graph is lowered with a check of that (see
`tracegrad.lowering.closed_over`); what is differentiated as it runs is checked as it runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import CustomGradient, RegionNode, Source
from tracegrad.ir.importer import lone_node
from tracegrad.lowering.closed_over import refuse_derivatives
from tracegrad.lowering.evaluate import evaluate_node
from tracegrad.variables.overriding import ForwardingTrace


def refusing(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The same function. Differentiated by JAX, it raises ValueError where a `jax.custom_jvp` in it
    closes over a value that is differentiated, and its result depends on that value."""

    @functools.wraps(fun, updated=())
    def checked(*args: Any) -> Any:
        with _Checking(_jax.current_trace(None)).in_place():
            return fun(*args)

    return checked


class _Checking(ForwardingTrace):
    """Looks at the operations that have such a rule."""

    def __init__(self, parent: Any):
        super().__init__(parent)
        self.requires_low = parent.requires_low

    def process_primitive(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        node = _closing_over(primitive, params, args)
        if node is None:
            return self.parent_trace.process_primitive(primitive, args, params)
        with _jax.set_current_trace(self.parent_trace):
            results = evaluate_node(node, args)
            return results if primitive.multiple_results else results[0]

    def run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        def bound(*args: Any) -> list[Any]:
            return list(primitive.bind(*args, subfuns=subfuns, **params))

        function = subfuns[0]
        with _jax.set_current_trace(self.parent_trace):
            # Of a custom_vjp JAX refuses it itself.
            is_jvp = primitive is _jax.CUSTOM_JVP
            if is_jvp and _may_close_over(_jax.rule_functions(subfuns)[0][0]):
                _refuse(bound, args)
                _jax.forget_result_trees(function)
            return bound(*args)


def _refuse(bound: Callable[..., list[Any]], args: Sequence[Any]) -> None:
    """Raises if a call of a function with a rule loses a derivative."""
    source = Source(_jax.current_source_info(), None)
    try:
        # Anew for each call: what it closes over may be another value each time.
        program = jax.make_jaxpr(lambda *args: bound(*args))(*args)
    except Exception:  # it cannot be traced by itself, where it asks for values
        return
    open_form, constants = _jax.parts_of(program)
    values = dict(zip(open_form.constvars, constants, strict=True))
    values.update(zip(open_form.invars, args, strict=True))
    for equation in open_form.eqns:
        if equation.primitive is _jax.CUSTOM_JVP:
            operands = [v.val if hasattr(v, "val") else values[v] for v in equation.invars]
            avals = [atom.aval for atom in equation.invars]
            node = lone_node(equation.primitive, equation.params, avals, source)
            assert isinstance(node, CustomGradient)
            refuse_derivatives(node, operands)


def _may_close_over(function: Any) -> bool:
    """Whether a function can hold values of the one that calls it."""
    while isinstance(function, functools.partial):
        if function.args or function.keywords:
            return True
        function = function.func
    function = inspect.unwrap(function)
    return bool(getattr(function, "__closure__", None)) or not inspect.isfunction(function)


# ------------------------------------------------------------------------- programs as operations


def _closing_over(primitive: Any, params: dict[str, Any], args: Sequence[Any]) -> Any:
    """The node of an operation with programs in which something closes over; else None."""
    if not params or not _jax.facts_below(params).closes_over:
        return None
    source = Source(_jax.current_source_info(), None)
    node = lone_node(primitive, params, list(map(jax.typeof, args)), source)
    return node if isinstance(node, RegionNode) else None
