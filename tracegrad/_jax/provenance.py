"""The origin of an equation in the user's code: frames, scopes and names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util

from tracegrad._jax.compat import opened


def frames(source_info: Any) -> Sequence[Any]:
    """The Python frames that bound an equation, innermost first.

    A frame has ``file_name``, ``function_name`` (qualified), ``function_start_line``, ``line_num``.
    """
    traceback = source_info.traceback
    return () if traceback is None else tuple(traceback.frames)


def inside_call(call: Any, source_info: Any, *, has_line: bool) -> Any:
    """The source info of an equation after its call was inlined: inside the scopes of the call.
    `has_line`: whether the equation keeps its own line instead of the line of the call."""
    return source_info.replace(
        traceback=(source_info if has_line else call).traceback,
        name_stack=call.name_stack + source_info.name_stack,
    )


def common_scope(infos: Sequence[Any]) -> Any:
    """The scopes, from the outside in, that all source infos have in common."""
    first, *others = [info.name_stack for info in infos]
    depth = len(first)
    for each in others:
        pairs = zip(first.stack[:depth], each.stack, strict=False)
        depth = next((i for i, (a, b) in enumerate(pairs) if a != b), min(depth, len(each)))
    return first[:depth]


def below_scope(scope: Any, source_info: Any) -> Any:
    """Removes the outermost scopes `scope`, which the source info has."""
    return source_info.replace(name_stack=source_info.name_stack[len(scope) :])


def user_context() -> Callable[[Any], AbstractContextManager[Any]]:
    """Makes a context manager whose value is part of the keys of JAX's trace and program caches."""
    make: Callable[[Any], Callable[[Any], AbstractContextManager[Any]]] = jax.make_user_context
    return make(())


_own_trace = user_context()


def tracing_apart(key: object) -> AbstractContextManager[Any]:
    """A block in which JAX traces inner jitted functions again, once for each key, and does not
    share their programs with others: JAX may not differentiate a custom rule any more in a program
    in which the rule has refused an operand. JAX keeps the programs of each key."""
    return _own_trace(key)


def inside_scope(name: str, source_info: Any) -> Any:
    """Adds a named scope, the outermost."""
    stack = source_info_util.new_name_stack(name) + source_info.name_stack
    return source_info.replace(name_stack=stack)


def frame_positions(source_info: Any) -> tuple[list[Any], list[int]]:
    """Returns (code objects, offsets of the current instructions) of the frames that bound an
    equation."""
    traceback = source_info.traceback
    return ([], []) if traceback is None else traceback.raw_frames()


# (name, whether the name is of a transformation, not of a named scope)
Around = tuple[str, bool]


def scopes_around(source_info: Any) -> tuple[Around, ...]:
    """The names in an equation's name stack, from the outside in: named scopes, and between them
    the transformations that were applied to the equation."""
    return tuple((x.name, isinstance(x, _Transformation)) for x in source_info.name_stack.stack)


# The class of a transformation in a name stack, which has no public name.
_Transformation = type(source_info_util.new_name_stack().transform("jvp").stack[0])


# The traceback and the named scopes for an equation that is bound now.
current_source_info: Callable[[], Any] = source_info_util.current


class TracedFrom(NamedTuple):
    """The Python function that a program was traced from.

    `name` and `source` identify the function (``relu at /usr/lib/.../functions.py:71``).
    `arguments` has the name and pytree path (``params['w']``) of each input; () if unknown.
    """

    name: str
    source: str
    arguments: tuple[str, ...]


def traced_from(program: Any) -> TracedFrom:
    info = opened(program).debug_info
    arguments = tuple(str(name) for name in info.arg_names or ())
    return TracedFrom(str(info.func_name), str(info.func_src_info or ""), arguments)


def hide_frames(directory: str) -> None:
    """Keeps the files below a directory out of JAX's tracebacks and source lines."""
    source_info_util.register_exclusion(directory)


def filters_tracebacks() -> bool:
    """Whether JAX is set to remove the frames of libraries from tracebacks."""
    return str(getattr(jax.config, "jax_traceback_filtering", "")) != "off"
