"""Names the module in flax's error about a change in a module of another trace.

flax refuses to change a module outside of the module's own trace, such as a module that a traced
function closes over: the change could not leave the trace. flax's error does not name the module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import jax

from tracegrad.ir.occurrence import is_own_file
from tracegrad.ir.paths import PathKey, path_name
from tracegrad.tracing.modules import is_module_or_variable
from tracegrad.tracing.nnx_objects import find_path, is_module

CURE = (
    "belongs to a module that was made outside of the function that changes it here. "
    "Give it as an argument, or use nnx.scan, nnx.cond; where nothing is to change: "
    "nnx.clone(model)(x)"
)

# The words of the plain ValueError that flax's transformations raise for such a module.
_FROM_TRANSFORMATIONS = "graph node from different trace level"


def module_advice(error: Exception) -> str | None:
    """The path of the changed module and the cure; None unless flax has refused a change."""
    kind = getattr(sys.modules.get("flax.errors"), "TraceContextError", None)
    if kind is None or not (isinstance(error, kind) or _FROM_TRANSFORMATIONS in str(error)):
        return None
    frames = list(_frames(error.__traceback__))
    refused = (frame.f_locals.get(k) for frame in reversed(frames) for k in ("self", "value"))
    changed = next((each for each in refused if is_module(each)), None)
    paths = (path for frame in frames for path in _paths_to(frame, changed))
    path = next(paths, f"a {type(changed).__name__}")
    return f"`{path}` {CURE}"


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    """Outermost first, without frames of this package."""
    while traceback is not None:
        if not is_own_file(traceback.tb_frame.f_code.co_filename):
            yield traceback.tb_frame
        traceback = traceback.tb_next


def _paths_to(frame: FrameType, wanted: object) -> Iterator[str]:
    """Yields the paths from the names in a frame's code to an object: ``self.model.linear``."""
    code = frame.f_code
    globals_ = {k: frame.f_globals[k] for k in code.co_names if k in frame.f_globals}
    for name, value in {**globals_, **frame.f_locals}.items():
        for prefix, tree in _trees(name, value):
            with suppress(TypeError, ValueError):  # dicts whose keys JAX cannot sort
                leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_module_or_variable)
                for path, leaf in leaves:
                    inner = find_path(wanted, leaf) if is_module(leaf) else None
                    if inner is not None:
                        yield path_name((*path, PathKey(inner)), prefix)


def _trees(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, tree) for trees that may hold the module: a container or a module itself; of
    another object, the attributes that are modules."""
    if isinstance(value, (dict, list, tuple)) or is_module(value):
        yield name, value
    elif isinstance(getattr(value, "__dict__", None), Mapping) and not isinstance(value, type):
        yield from ((f"{name}.{k}", v) for k, v in vars(value).items() if is_module(v))
