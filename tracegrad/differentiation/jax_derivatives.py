"""Makes `jax.grad` and the like apply the rules in force while a function is traced under rules.

A train step calls `jax.grad`, also through `nnx.value_and_grad` and `equinox.filter_grad`. While
rules are in force on a thread, `jax.grad` and the like are replaced. On that thread a replacement
applies the rules to the differentiated function, and then calls JAX's function. On other threads it
only calls JAX's function. While no thread has rules, JAX is unchanged.

A name that was imported before (``from jax import grad``) is still JAX's function, and a derivative
that was made before the trace began is still JAX's derivative. Both differentiate without the
rules; if a rule then matches an operation in their code, the rule raises an error (see
`rewriting.matches`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.tracing import in_force, to_callable
from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.signatures import argument_names

# Maps a function of `jax` to whether it differentiates in forward mode. There, a custom gradient
# needs a JVP: the transpose of its backward.
_FORWARD_FIRST = {
    "grad": False,
    "value_and_grad": False,
    "vjp": False,
    "jvp": True,
    "linearize": True,
    "jacrev": False,
    "jacobian": False,
    "jacfwd": True,
}


def _wrap_derivative(original: Callable[..., Any], forward: bool) -> Callable[..., Any]:
    """The derivative applies the rules in force to `fun` first."""
    lower = (lambda graph: to_callable(with_forward_mode(graph))) if forward else to_callable

    def by_rules(take: Callable[[Any], Any], fun: Callable[..., Any]) -> Any:
        if not in_force.rules_in_force():
            return take(fun)
        _name_by_users_parameter(fun)
        edited = in_force.under_rules(fun, function_name(fun), lower, forward=forward)
        # The function that `equinox.filter_jvp` differentiates.
        if getattr(fun, "__qualname__", None) == "filter_jvp.<locals>._fn":
            edited = _separate_results_again(edited)
        with in_force.without_editing():
            return take(functools.wraps(fun, updated=())(edited))

    @functools.wraps(original)
    def derivative(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not in_force.rules_in_force():
            return original(fun, *args, **kwargs)
        if original in _AT_ONCE:
            found = by_rules(lambda fun: original(fun, *args, **kwargs), fun)
            return (found[0], _Pullback(found[1]), *found[2:]) if original is _jax.vjp else found

        # JAX's function is called here too: it checks its arguments now, not when `called` is
        # called, and its result has the name and the docstring of `called`.
        @functools.wraps(original(fun, *args, **kwargs))
        def called(*of: Any, **named: Any) -> Any:
            return by_rules(lambda fun: original(fun, *args, **kwargs)(*of, **named), fun)

        return called

    return derivative


@jax.tree_util.register_pytree_node_class
class _Pullback:
    """Calls the pullback of `jax.vjp` under `in_force.without_editing`. Otherwise rules would apply
    to functions that the backward passes of custom rules differentiate."""

    def __init__(self, pullback: Any):
        self.pullback = pullback

    def __call__(self, *cotangents: Any) -> Any:
        with in_force.without_editing():
            return self.pullback(*cotangents)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pullback, name)

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.pullback,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> _Pullback:
        return cls(*children)


def _name_by_users_parameter(fun: Any) -> None:
    """`equinox.filter_grad` differentiates a function of its own, with its own parameter. Gives the
    parameter the name of the user's parameter, because `match.param` finds leaves by the name."""
    if getattr(fun, "__qualname__", "").endswith("Wrapper.__call__.<locals>.fun_value_and_grad"):
        (name,) = argument_names(inspect.getclosurevars(fun).nonlocals["self"].__wrapped__, 1)
        first, *others = inspect.signature(fun).parameters.values()
        if name.isidentifier():
            fun.__signature__ = inspect.Signature([first.replace(name=name), *others])


def _separate_results_again(edited: Callable[..., Any]) -> Callable[..., Any]:
    """Separates the results with tangents from the results without tangents again.

    `equinox.filter_jvp` differentiates a function that takes each tracer of the JVP for a result
    with a tangent. While `edited` is traced to a graph, results are tracers of that trace, so
    equinox finds no such result.
    """

    def is_moving(result: Any) -> bool:
        return _jax.is_tracer(result) and _jax.trace_of(result) is _jax.current_trace(None)

    def parted(*args: Any) -> tuple[Any, Any, Any]:
        _, arrays, others = edited(*args)
        equinox = sys.modules["equinox"]
        return *equinox.partition(arrays, is_moving), others

    return parted


def _wrap_hessian(original: Callable[..., Any]) -> Callable[..., Any]:
    """Applies the rules in force to both derivatives of `jax.hessian`."""

    @functools.wraps(original)
    def hessian(fun: Callable[..., Any], argnums: Any = 0, *options: Any, **named: Any) -> Any:
        if not in_force.rules_in_force():
            return original(fun, argnums, *options, **named)
        return jax.jacfwd(jax.jacrev(fun, argnums, *options, **named), argnums, *options, **named)

    return hessian


# These functions return results at once; the others return a function.
_AT_ONCE = (_jax.vjp, _jax.jvp, _jax.linearize)
_PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    *(
        (jax, name, functools.partial(_wrap_derivative, forward=f))
        for name, f in _FORWARD_FIRST.items()
    ),
    (jax, "hessian", _wrap_hessian),
)

derivatives_by_rules = functools.partial(_jax.Replacement().in_place, _PLACES)
