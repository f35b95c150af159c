"""Where in the user's code an equation comes from: frames, scopes and names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util

from tracegrad._jax.compat import opened


def frames(source_info: Any) -> Sequence[Any]:
    """The Python frames that bound an equation, innermost first.

    Each has ``file_name``, ``function_name`` (qualified), ``function_start_line`` and ``line_num``.
    """
    traceback = source_info.traceback
    return () if traceback is None else tuple(traceback.frames)


def inside_call(call: Any, source_info: Any, *, has_line: bool) -> Any:
    """The source of a called function's equation, as an equation of the caller: inside the scopes
    of the call. `has_line`: the equation keeps its own line; else it has the line of the call."""
    return source_info.replace(
        traceback=(source_info if has_line else call).traceback,
        name_stack=call.name_stack + source_info.name_stack,
    )


def user_context() -> Callable[[Any], AbstractContextManager[Any]]:
    """A context whose value is part of the key under which JAX keeps traces and programs."""
    make: Callable[[Any], Callable[[Any], AbstractContextManager[Any]]] = jax.make_user_context
    return make(())


def frame_positions(source_info: Any) -> tuple[list[Any], list[int]]:
    """The code object of each of those frames, and the offsets of the instructions they were at."""
    traceback = source_info.traceback
    return ([], []) if traceback is None else traceback.raw_frames()


# A name, and whether a transformation has it; else a named scope has it.
Around = tuple[str, bool]


def scopes_around(source_info: Any) -> tuple[Around, ...]:
    """The names in an equation's name stack, from the outside in: named scopes, and between them
    the transformations that the equation came through."""
    return tuple((x.name, isinstance(x, _Transformation)) for x in source_info.name_stack.stack)


# The class of a transformation in a stack of names: it has no public name.
_Transformation = type(source_info_util.new_name_stack().transform("jvp").stack[0])


# The traceback and the named scopes of what is being bound now.
current_source_info: Callable[[], Any] = source_info_util.current


class TracedFrom(NamedTuple):
    """The Python function that a program was traced from.

    `name` and `source` say which (``relu at /usr/lib/.../functions.py:71``), `arguments` are the
    names of its arguments with their pytree paths (``params['w']``), one per input; () if unknown.
    """

    name: str
    source: str
    arguments: tuple[str, ...]


def traced_from(program: Any) -> TracedFrom:
    """The function that a program was traced from."""
    told = opened(program).debug_info
    arguments = tuple(str(name) for name in told.arg_names or ())
    return TracedFrom(str(told.func_name), str(told.func_src_info or ""), arguments)


def hide_frames(directory: str) -> None:
    """Keeps the files below a directory out of JAX's tracebacks and source lines."""
    source_info_util.register_exclusion(directory)


def filters_tracebacks() -> bool:
    """Whether the user wants tracebacks without frames of libraries (JAX's own setting)."""
    return str(getattr(jax.config, "jax_traceback_filtering", "")) != "off"
