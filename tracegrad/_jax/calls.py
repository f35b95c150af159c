"""A jitted function whose calls go to a handler where nothing is compiled for them yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Takes what goes on as jit does, and the arguments; returns the result if it does not call that.
Handle = Callable[[Callable[[], None], tuple[Any, ...], dict[str, Any]], Any]


def handling_misses(
    jitted: Any, handle: Handle, explain: Callable[[Exception], Exception]
) -> Callable[..., Any]:
    """A jitted function whose calls go to `handle` where nothing is compiled for them yet.

    A Python function around it would cost a tenth of a warm call. But jit calls one itself in this
    case: its pickled state names it, and here `handle` comes before that. Where a JAX has another
    form of state, it is the function around.

    Args:
      explain: makes the error of an error that the outermost frame raises.
    """
    try:
        state = jitted.__getstate__()
        compile_and_run = _handling(state["cache_miss"], _not_compiled, handle, explain)
        kind: Any = type(jitted)
        copy = kind.__new__(kind)
        copy.__setstate__({**state, "cache_miss": compile_and_run})
        copy.__dict__.update(jitted.__dict__)
    except (AttributeError, KeyError, TypeError):
        return _handling(jitted, _as_it_is, handle, explain)
    made: Callable[..., Any] = copy
    return made


def _not_compiled(result: Any) -> tuple[Any, None, bool]:
    return result, None, False


def _as_it_is(result: Any) -> Any:
    return result


def _handling(
    fun: Callable[..., Any],
    returned: Callable[[Any], Any],
    handle: Handle,
    explain: Callable[[Exception], Exception],
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        try:
            result = handle(lambda: found.append(fun(*args, **kwargs)), args, kwargs)
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)
        return found[0] if found else returned(result)

    return run
