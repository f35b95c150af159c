"""Functions with derivatives of their own, as JAX hands them to a trace.

They come wrapped: the user's function, what JAX puts around it, and places in which a run of it
leaves the tree of its results for its caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any


def rule_functions(wrapped: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    """The user's functions of a rule, and the trees of its arguments (None: not of the plain form,
    as where some arguments are not differentiated)."""
    functions = tuple(fun.f for fun in wrapped)
    if any(len(fun.transforms) != 1 for fun in wrapped):
        return functions, None
    ((_, trees),) = wrapped[0].transforms
    return functions, trees


def users_function(wrapped: Any) -> Any:
    """The user's function of a rule that stands in a program, the backward of a VJP or the rule of
    a JVP: JAX puts functions of its own around it, which close over the rule as it was."""
    inner = _wrapped_inside(wrapped.f)
    return wrapped.f if inner is None else users_function(inner)


def _wrapped_inside(function: Any, depth: int = 3) -> Any:
    """What a function of JAX closes over that is a wrapped function; None if it is not JAX's, or
    closes over none."""
    if depth and str(getattr(function, "__module__", "")).startswith("jax._src"):
        for content in map(cell_content, getattr(function, "__closure__", None) or ()):
            inner = content if hasattr(content, "transforms") else None
            if isinstance(content, FunctionType):  # of a JVP JAX keeps what it has traced
                inner = _wrapped_inside(content, depth - 1)
            if inner is not None:
                return inner
    return None


def count_closed_over(params: Mapping[str, Any]) -> int:
    """How many operands of a function with a rule, the first ones, are what it closes over.

    JAX's own number is of those since it was last bound. What a `jax.custom_vjp` closed over when
    it was bound as it stands in a program is an argument of the next one, which JAX refuses to
    differentiate all the same.
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


_MOST_INSIDE = 256  # functions of JAX's around one another


def cell_content(cell: Any) -> Any:
    """The value of a variable that a function closes over; None before the first assignment."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def result_trees(wrapped: Any) -> tuple[Any, ...]:
    """What a run of a wrapped function has left about the trees of its results."""
    return tuple(store and SimpleNamespace(val=store.val) for store in wrapped.stores)


def leave_result_trees(wrapped: Any, trees: tuple[Any, ...]) -> None:
    """Leaves that for the caller in the place of a run."""
    wrapped.populate_stores(trees)


def forget_result_trees(wrapped: Any) -> None:
    """Makes it as if the function had not been run."""
    for store in filter(None, wrapped.stores):
        store.reset()


def has_run(wrapped: Any) -> bool:
    """Whether a wrapped function has left the tree of its results."""
    for store in filter(None, wrapped.stores):
        try:
            if store.val is not None:
                return True
        except Exception:
            pass
    return False
