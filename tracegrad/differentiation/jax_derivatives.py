"""JAX's own derivatives, which go by the rules in force while a function is traced under some.

A train step calls `jax.grad`, or `nnx.value_and_grad` and `equinox.filter_grad`, which call it.
While rules are in force on a thread, `jax.grad` and the like are functions that, on that thread,
apply the rules to what they are given, and then do as JAX does. Nothing is replaced while no thread
has rules.

What was imported by name before (``from jax import grad``) is JAX's own, and so is a derivative
that was made before the trace began: code that they have differentiated is refused by the rules
that match in it (see `rewriting.edits`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir.engine import engine
from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.tracing import in_force, to_callable
from tracegrad.tracing.graphs import function_name

# By the name under which each stands in `jax`, whether the function given is differentiated in
# forward mode first, where a custom gradient has to be transposed.
_FORWARD_FIRST = {
    "grad": False,
    "value_and_grad": False,
    "vjp": False,
    "jvp": True,
    "linearize": True,
    "jacrev": False,
    "jacobian": False,
    "jacfwd": True,
    "hessian": False,
}


def _by_rules(original: Callable[..., Any], forward: bool) -> Callable[..., Any]:
    """JAX's function, given what the rules in force make of the function that it is given."""
    lower = (lambda graph: to_callable(with_forward_mode(graph))) if forward else to_callable

    def by_rules(take: Callable[[Any], Any], fun: Callable[..., Any]) -> Any:
        if not in_force.rules_in_force():
            return take(fun)
        edited = in_force.under_rules(fun, function_name(fun), lower, forward=forward)
        if getattr(fun, "__qualname__", None) == "filter_jvp.<locals>._fn":  # of equinox
            edited = _parted_anew(edited)
        with in_force.differentiating():
            return take(functools.wraps(fun, updated=())(edited))

    @functools.wraps(original)
    def derivative(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not in_force.rules_in_force():
            return original(fun, *args, **kwargs)
        if original in _AT_ONCE:
            found = by_rules(lambda fun: original(fun, *args, **kwargs), fun)
            return (found[0], _Pullback(found[1]), *found[2:]) if original is _jax.vjp else found

        # Made here too: for its name, and since it says at once what is wrong with the arguments.
        @functools.wraps(original(fun, *args, **kwargs))
        def called(*of: Any, **named: Any) -> Any:
            return by_rules(lambda fun: original(fun, *args, **kwargs)(*of, **named), fun)

        return called

    return derivative


@jax.tree_util.register_pytree_node_class
class _Pullback:
    """What `jax.vjp` returns, which runs rules of derivatives when it is called."""

    def __init__(self, pullback: Any):
        self.pullback = pullback

    def __call__(self, *cotangents: Any) -> Any:
        with in_force.differentiating():
            return self.pullback(*cotangents)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pullback, name)

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.pullback,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> _Pullback:
        return cls(*children)


def _parted_anew(edited: Callable[..., Any]) -> Callable[..., Any]:
    """What `equinox.filter_jvp` differentiates: a function that itself says which of its results
    have tangents, those that are tracers of the derivative. While its graph is made none is."""

    def is_moving(result: Any) -> bool:
        return _jax.is_tracer(result) and _jax.trace_of(result) is _jax.current_trace(None)

    def parted(*args: Any) -> tuple[Any, Any, Any]:
        _, arrays, others = edited(*args)
        equinox = sys.modules["equinox"]
        return *equinox.partition(arrays, is_moving), others

    return parted


_AT_ONCE = (_jax.vjp, _jax.jvp, _jax.linearize)  # the others return functions
_PLACES = tuple(
    (jax, name, functools.partial(_by_rules, forward=f)) for name, f in _FORWARD_FIRST.items()
)

engine.derivatives_by_rules = functools.partial(_jax.Replacement().in_place, _PLACES)
