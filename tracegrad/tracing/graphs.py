"""Python function → `Graph`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.importer import import_program
from tracegrad.ir.paths import path_name
from tracegrad.tracing.argument_paths import known_paths
from tracegrad.tracing.arguments import (
    NONE_STATIC,
    CallPacker,
    PackedCall,
    StaticArguments,
    resolve_static,
)
from tracegrad.tracing.attempts import Attempt
from tracegrad.tracing.call_in_trace import CallInTrace, Within
from tracegrad.tracing.tools import tool
from tracegrad.tracing.user_errors import explain_error

Rule = Callable[[Graph], Graph]


@tool
def graph(
    fun: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Graph:
    """Traces a function to a `Graph` that can be read, searched, edited and run.

    Args:
      fun: any function that `jax.jit` takes; for a traced function, its own rules do not apply.
      *args, **kwargs: its arguments: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The graph. Nothing is computed. The `Variable`s that `fun` reads are inputs after its
      arguments, and the last values that it assigns are outputs after its results;
      `Graph.to_callable` reads and assigns the Variables at each call, as `fun` does.

    Raises:
      TypeError: `fun` is not callable, or an argument is neither an array nor static.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x @ tg.stop_gradient(w)))
    >>> g = tg.graph(loss, jax.ShapeDtypeStruct((4, 2), "float32"), jnp.ones((8, 4)))
    >>> g
    <Graph loss(f32[4,2], f32[8,4]) -> (f32[]), 4 nodes>
    >>> [str(o.node.op) for o in g.find(lambda o: isinstance(o.node, tg.ir.StopGradient))]
    ['stop_gradient']
    >>> float(g.to_callable()(jnp.zeros((4, 2)), jnp.ones((8, 4))))
    0.0
    """
    require_function(fun)
    return graph_of_call(fun, args, kwargs)


def graph_of_call(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """Like `graph`; all keywords belong to the function."""
    static = resolve_static(fun, None, None)
    try:
        return trace_to_graph(fun, CallPacker(static)(args, kwargs))
    except Exception as error:
        raise explain_error(error)  # noqa: B904 (the same error)


def as_rules(rules: Rule | Sequence[Rule]) -> tuple[Rule, ...]:
    """Raises TypeError for a rule that is not callable."""
    several: Any = [rules] if callable(rules) else rules
    found = tuple(several) if isinstance(several, Iterable) else (several,)
    if not all(map(callable, found)):
        raise TypeError(f"rules are functions Graph -> Graph, one or a list; got {rules!r}")
    return found


def require_function(fun: Callable[..., Any], purpose: str = "trace") -> None:
    """Raises TypeError if `fun` cannot be called, and for async and generator functions, whose
    calls return before the body has run. `purpose`: a verb for the message."""
    if not callable(fun):
        raise TypeError(
            f"expected a function to {purpose}, got {fun!r} of type {type(fun).__name__}"
        )
    if inspect.iscoroutinefunction(fun) or inspect.isasyncgenfunction(fun):
        raise TypeError(
            f"expected a function, got {fun!r}, which is async: trace what it computes, and "
            "await around that"
        )
    if inspect.isgeneratorfunction(fun):
        raise TypeError(
            f"expected a function, got {fun!r}, which is a generator: trace what it computes, and "
            "yield around that, or return a list"
        )


def trace_to_graph(
    fun: Callable[..., Any],
    call: PackedCall,
    donated: StaticArguments = NONE_STATIC,
    shardings: Sequence[Any] = (),
) -> Graph:
    """Traces `fun` on the arguments of a call.

    `in_tree` of the graph is the structure of the arguments that are not static. If a module is
    donated, or if its sharding is an `nnx.StateSharding`, all its arrays are outputs, changed or
    not.

    Args:
      shardings: the shardings of the arguments that are not static.
    """
    args, kwargs = call.dynamic
    paths = [
        path_name(path, name)
        for name, tree in call.by_name[0]
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    leaves, in_tree = jax.tree.flatten(call.dynamic)
    known = known_paths(leaves, paths)
    name, signature = function_name(fun), _dynamic_signature(fun, call)
    program = None
    within: Within = nullcontext
    while program is None:
        with Attempt() as attempt:
            traced_call = CallInTrace(fun, call, name, signature, donated, shardings, known, within)
            program = jax.make_jaxpr(traced_call)(*args, **kwargs)
        if attempt.is_left:
            program, within = None, attempt.within
    explicit, variables = traced_call.variables.with_explicit_inputs(program)
    names = (*paths, *(variable.name for variable in variables))
    function = _jax.TracedFrom(name, _jax.traced_from(program).source, names)
    return dataclasses.replace(
        import_program(explicit, function),
        in_tree=in_tree,
        out_tree=traced_call.out_tree,
        signature=signature,
        variables=tuple(variables),
        assigned=traced_call.variables.assigned,
        updates=traced_call.updates,
        loses=traced_call.lost,
    )


def _dynamic_signature(fun: Callable[..., Any], call: PackedCall) -> inspect.Signature | None:
    """The signature without the static parameters; None if `fun` has no signature."""
    try:
        signature = inspect.signature(fun)
    except (ValueError, TypeError):
        return None
    positions, names = call.static.within(call.args), call.static.names
    kept = [
        p
        for i, p in enumerate(signature.parameters.values())
        if i not in positions and p.name not in names
    ]
    try:
        return signature.replace(parameters=kept)
    except ValueError:  # a parameter with a default now comes before one without
        return None


def function_name(fun: Callable[..., Any]) -> str:
    """The name that `jax.jit` gives to the program of a function."""
    if isinstance(fun, functools.partial):
        return function_name(fun.func)
    return str(getattr(fun, "__name__", "<unnamed function>"))
