"""Python function → `Graph`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.frames import CALLS_TRACED
from tracegrad.ir.importer import import_program
from tracegrad.tracing.argument_paths import argument_path, known_by_path
from tracegrad.tracing.attempts import Attempt
from tracegrad.tracing.call_scopes import call_scopes
from tracegrad.tracing.signatures import argument_names, leaves_of_call
from tracegrad.tracing.static import Indices, Names, StaticArguments, resolve
from tracegrad.tracing.user_errors import explain
from tracegrad.variables.inside import Inside
from tracegrad.variables.states import Changes, States, is_passed_on
from tracegrad.variables.variable import Variable

Rule = Callable[[Graph], Graph]
Within = Callable[[], AbstractContextManager[Any]]  # makes a block to trace a function in


def graph(
    fun: Callable[..., Any],
    *,
    static_argnums: Indices = None,
    static_argnames: Names = None,
) -> Callable[..., Graph]:
    """Traces a function to a `Graph` that can be read, searched, edited and run.

    Args:
      fun: any function that `jax.jit` takes; a traced function is seen without its own rules.
      static_argnums, static_argnames: arguments that are Python values, as in `jax.jit`.

    Returns:
      A function that takes the arguments of `fun` (arrays, or `jax.ShapeDtypeStruct`s in their
      place) and returns the graph. Nothing is computed. The `Variable`s that `fun` reads are
      further inputs, behind its arguments, and their last assigned values further outputs;
      `Graph.to_callable` reads and assigns them at each call, as `fun` does.

    Raises:
      TypeError: `fun` is not callable, or an argument is neither an array nor static.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x @ tg.stop_gradient(w)))
    >>> g = tg.graph(loss)(jax.ShapeDtypeStruct((4, 2), "float32"), jnp.ones((8, 4)))
    >>> g
    <Graph loss(f32[4,2], f32[8,4]) -> (f32[]), 4 nodes>
    >>> [str(o.node.op) for o in g.find(lambda o: isinstance(o.node, tg.ir.StopGradient))]
    ['stop_gradient']
    >>> float(g.to_callable()(jnp.zeros((4, 2)), jnp.ones((8, 4))))
    0.0
    """
    require_function(fun)
    static = resolve(fun, static_argnums, static_argnames)

    @functools.wraps(fun, updated=())
    def make_graph(*args: Any, **kwargs: Any) -> Graph:
        try:
            return trace_to_graph(fun, *static.given(args, kwargs)[0], static)
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)

    make_graph.__name__ = make_graph.__qualname__ = f"graph({function_name(fun)})"
    return make_graph


def require_function(fun: Callable[..., Any], purpose: str = "trace") -> None:
    """Raises TypeError for what cannot be called, and for what is over before it has run;
    `purpose`: what somebody wants to do with the function."""
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
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: StaticArguments,
) -> Graph:
    """Traces `fun` on these arguments; `in_tree` of the result is that of the dynamic ones."""
    args = tuple(args)  # Variables among them are `Given`
    dynamic, positions, static_kwargs = static.apart(args, kwargs)
    for name, value in static_kwargs.items():
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                "Non-hashable static arguments are not supported: programs are kept by the values "
                f"of static arguments, and {name}={value!r} is of type {type(value).__name__}"
            ) from error

    paths = [leaf.name for leaf in leaves_of_call(fun, args, dynamic[1], positions)]
    arrays = jax.tree.leaves(dynamic)
    known = [argument_path(x) or path for x, path in zip(arrays, paths, strict=True)]
    program = None
    within: Within = nullcontext
    apart = set[Variable]()
    while program is None:
        with Attempt() as attempt:
            inside = Inside(functools.partial(attempt.leave, within), apart)
            fresh = _fresh(fun, static_kwargs, within, inside, known)
            program = jax.make_jaxpr(fresh, static_argnums=positions)(*args, **dynamic[1])
        if attempt.is_left:
            program, within = None, attempt.found
    explicit, variables = inside.variables.explicit(program)
    traced = _jax.traced_from(program)
    arguments = (*paths, *(variable.name for variable in variables))
    signature = _dynamic_signature(fun, set(positions), static.names)
    function = _jax.TracedFrom(function_name(fun), traced.source, arguments)
    is_lost = inside.lost.paths or inside.lost.structures
    return dataclasses.replace(
        import_program(explicit, function),
        in_tree=jax.tree.structure(dynamic),
        out_tree=inside.out_tree,
        signature=signature,
        variables=tuple(variables),
        assigned=inside.variables.assigned,
        updates=inside.updates,
        settings=inside.settings,
        loses=_lost(inside.lost, fun, args, kwargs, static) if is_lost else (),
    )


def _lost(
    changes: Changes,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    static: StaticArguments,
) -> tuple[str, ...]:
    """The paths of those changes in an nnx.State that are changes of values too.

    A jitted function that is given one (`nnx.jit`) gives all of it back, as values of its own.
    What they are shows in a program that returns them; it is traced for that alone.
    """

    @functools.wraps(fun, updated=())
    def before_and_after(*args: Any, **kwargs: Any) -> Any:
        names = argument_names(fun, len(args))
        states = States({**dict(zip(names, args, strict=True)), **kwargs})
        return states.changes(fun(*args, **kwargs)).values

    outputs = trace_to_graph(before_and_after, args, kwargs, static).outputs
    pairs = zip(changes.paths, outputs[::2], outputs[1::2], strict=False)
    lost = [path for path, before, after in pairs if not is_passed_on(before, after)]
    return (*changes.structures, *lost)


def _fresh(
    fun: Callable[..., Any],
    static_kwargs: Mapping[str, Any],
    within: Within,
    inside: Inside,
    paths: Sequence[str],
) -> Callable[..., Any]:
    """The function under a new identity, by which JAX caches traces with whatever the function
    closed over at that time: under a new one it sees the world as it is now.

    It returns what `Inside.run` does. `paths`: by which its traced arguments are known.
    """
    if isinstance(fun, functools.partial):  # JAX looks into partials for names and source lines
        inner = _fresh(fun.func, static_kwargs, within, inside, paths)
        return functools.partial(inner, *fun.args, **fun.keywords)

    called = functools.partial(_call, fun, within)
    names = functools.partial(argument_names, fun)

    @functools.wraps(fun, updated=())
    def fresh(*args: Any, **kwargs: Any) -> Any:
        here = _jax.current_trace(None)
        leaves = filter(_jax.is_tracer, jax.tree.leaves((args, kwargs)))
        traced = [tracer for tracer in leaves if _jax.trace_of(tracer) is here]
        with known_by_path(traced, paths):
            return inside.run(called, args, {**kwargs, **static_kwargs}, names)

    fresh.__name__ = fresh.__qualname__ = function_name(fun)
    if static_kwargs and (signature := _dynamic_signature(fun, set(), frozenset(static_kwargs))):
        fresh.__signature__ = signature  # type: ignore[attr-defined]
    return fresh


@CALLS_TRACED
def _call(fun: Callable[..., Any], within: Within, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the user's function: what is computed inside of this is its program."""
    with within(), call_scopes():
        return fun(*args, **kwargs)


def _dynamic_signature(
    fun: Callable[..., Any], positions: set[int], names: frozenset[str]
) -> inspect.Signature | None:
    try:
        signature = inspect.signature(fun)
    except (ValueError, TypeError):
        return None
    kept = [
        p
        for i, p in enumerate(signature.parameters.values())
        if i not in positions and p.name not in names
    ]
    try:
        return signature.replace(parameters=kept)
    except ValueError:  # a parameter with a default now stands before one without
        return None


def function_name(fun: Callable[..., Any]) -> str:
    """The name that `jax.jit` gives to the program of a function."""
    if isinstance(fun, functools.partial):
        return function_name(fun.func)
    return str(getattr(fun, "__name__", "<unnamed function>"))
