"""Unwraps functions with custom derivatives, in the form in which JAX passes them to a trace.

A wrapped function has the user's function (`f`), the functions of JAX around it (`transforms`), and
`stores`, in which a run leaves the pytree structure of its results for the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any


def rule_functions(wrapped: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    """Returns (the user's functions of a rule, the pytree structures of its arguments). The
    structures are None in other than the plain form, for example with ``nondiff_argnums``."""
    functions = tuple(fun.f for fun in wrapped)
    if any(len(fun.transforms) != 1 for fun in wrapped):
        return functions, None
    ((_, trees),) = wrapped[0].transforms
    return functions, trees


def users_function(wrapped: Any) -> Any:
    """Returns the user's backward function of a VJP, or the user's JVP rule. `wrapped`: the
    function in a program; JAX's functions there close over the wrapped function of the rule."""
    inner = _wrapped_inside(wrapped.f)
    return wrapped.f if inner is None else users_function(inner)


def _wrapped_inside(function: Any, depth: int = 3) -> Any:
    """The wrapped function that a function of JAX closes over, if any; None for a function that is
    not JAX's."""
    if depth and str(getattr(function, "__module__", "")).startswith("jax._src"):
        for content in map(cell_content, getattr(function, "__closure__", None) or ()):
            inner = content if hasattr(content, "transforms") else None
            if isinstance(content, FunctionType):  # for a JVP: JAX's cache of traces
                inner = _wrapped_inside(content, depth - 1)
            if inner is not None:
                return inner
    return None


def count_closed_over(params: Mapping[str, Any]) -> int:
    """Counts the leading operands of a function with a custom rule that are closed-over values.

    JAX's own number, `num_consts`, counts only the values since the function was last bound. If a
    `jax.custom_vjp` is bound again from a program, the values that it closed over before are
    arguments of the new function, but JAX still refuses to differentiate with respect to them.
    """
    count = int(params.get("num_consts", 0))
    pending: list[Any] = [params.get("fwd_jaxpr_thunk")]
    seen: set[int] = set()
    while pending and len(seen) < _MOST_INSIDE:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if hasattr(value, "transforms"):
            pending.append(value.f)
        elif isinstance(value, FunctionType) and value.__module__.startswith("jax._src"):
            contents = tuple(map(cell_content, value.__closure__ or ()))
            pending.extend(contents)
            if value.__qualname__.startswith("lift_fwd."):
                count += contents[value.__code__.co_freevars.index("num_consts")]
    return count


_MOST_INSIDE = 256  # the most nested functions of JAX to look at


def cell_content(cell: Any) -> Any:
    """None before the first assignment."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def result_trees(wrapped: Any) -> tuple[Any, ...]:
    """The structures of results that a run of the function has stored."""
    return tuple(store and SimpleNamespace(val=store.val) for store in wrapped.stores)


def leave_result_trees(wrapped: Any, trees: tuple[Any, ...]) -> None:
    """Stores `trees` for the caller, as a run of the function would."""
    wrapped.populate_stores(trees)


def forget_result_trees(wrapped: Any) -> None:
    """Empties the stores, as if the function had not run."""
    for store in filter(None, wrapped.stores):
        store.reset()


def has_run(wrapped: Any) -> bool:
    """A run of the function has stored the structure of its results."""
    for store in filter(None, wrapped.stores):
        try:
            if store.val is not None:
                return True
        except Exception:
            pass
    return False
