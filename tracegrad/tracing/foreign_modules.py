"""Whose it is what a function changes in a module of flax.nnx, where flax does not allow that.

flax keeps a module from being changed in a trace other than the one that it belongs to, as one that
a traced function closes over would be: the change could not come out. It does not say which module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import jax

from tracegrad.ir.occurrence import is_own_file
from tracegrad.variables.modules import is_module_or_variable
from tracegrad.variables.nnx_objects import find, is_module
from tracegrad.variables.paths import PathKey, path_name

CURE = (
    "belongs to a module that was made outside of the function that changes it here. "
    "Give it as an argument, or use nnx.scan, nnx.cond; where nothing is to change: "
    "nnx.clone(model)(x)"
)

# What flax's own transformations say of a module that they are given: a ValueError of no own kind.
_FROM_TRANSFORMATIONS = "graph node from different trace level"


def advice(error: Exception) -> str | None:
    """The path of what was changed, and what to do, where it is flax that refuses a change."""
    kind = getattr(sys.modules.get("flax.errors"), "TraceContextError", None)
    if kind is None or not (isinstance(error, kind) or _FROM_TRANSFORMATIONS in str(error)):
        return None
    frames = list(_frames(error.__traceback__))
    refused = (frame.f_locals.get(k) for frame in reversed(frames) for k in ("self", "value"))
    changed = next((each for each in refused if is_module(each)), None)
    paths = (path for frame in frames for path in _paths_in(frame, changed))
    path = next(paths, f"a {type(changed).__name__}")
    return f"`{path}` {CURE}"


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    """Those below a frame of a traceback, from the outside in, but for our own."""
    while traceback is not None:
        if not is_own_file(traceback.tb_frame.f_code.co_filename):
            yield traceback.tb_frame
        traceback = traceback.tb_next


def _paths_in(frame: FrameType, wanted: object) -> Iterator[str]:
    """By which names the code of a frame gets to an object in a module: ``self.model.linear``."""
    code = frame.f_code
    globals_ = {k: frame.f_globals[k] for k in code.co_names if k in frame.f_globals}
    for name, value in {**globals_, **frame.f_locals}.items():
        for prefix, tree in _trees(name, value):
            with suppress(TypeError, ValueError):  # JAX wants keys that it can sort
                leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_module_or_variable)
                for path, leaf in leaves:
                    inner = find(wanted, leaf) if is_module(leaf) else None
                    if inner is not None:
                        yield path_name((*path, PathKey(inner)), prefix)


def _trees(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value, and if it is an object of the user's, its attributes."""
    if isinstance(value, (dict, list, tuple)) or is_module(value):
        yield name, value
    elif isinstance(getattr(value, "__dict__", None), Mapping) and not isinstance(value, type):
        yield from ((f"{name}.{k}", v) for k, v in vars(value).items() if is_module(v))
