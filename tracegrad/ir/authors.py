"""Who wrote a custom gradient or a `stop_gradient` of a program, by the files of its frames."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Sequence
from os.path import dirname
from types import CodeType
from typing import Any

from tracegrad import _jax
from tracegrad.ir.nodes import CustomGradient, StopGradient
from tracegrad.ir.occurrence import (
    Occurrence,
    is_jaxs_file,
    is_own_file,
    is_user_file,
    origin_of_function,
)

A_RULE = "a rule"  # the author of each `stop_gradient` that a rule of this package adds
_EDITORS = dirname(__file__)  # the folder of the code that edits graphs


def author_of(occurrence: Occurrence) -> str:
    """Returns who made a custom gradient or a `stop_gradient`: ``"yours"``, also if no frame is
    known; ``"jax"``; `A_RULE`; or the name of the library whose code calls it (``"a library"`` if
    the file of that code is in no known folder)."""
    node = occurrence.node
    stack = _jax.frames(node.source.info)
    if isinstance(node, StopGradient):
        callers = _frames_above_stop_gradient(stack)
        # A rule gives its `stop_gradient` the frames of the operation at which the rule acts; or
        # the editor of graphs calls `stop_gradient`.
        if callers is None or (callers and dirname(callers[0].file_name) == _EDITORS):
            return A_RULE
        stack = callers
        if stack and is_own_file(stack[0].file_name):
            return "jax"
    for frame in stack:
        if is_user_file(frame.file_name):
            return "yours"
        if not is_own_file(frame.file_name):
            return _package_name(frame.file_name)
    return "yours"


def file_of_primal(node: CustomGradient) -> str:
    """Returns an empty text if the file is unknown."""
    function = origin_of_function(node.primal.function_source)
    return function.file if function else ""


def is_jaxs_rule(node: CustomGradient) -> bool:
    """Whether JAX wrote the rule, which then is the true derivative of its function."""
    return is_jaxs_file(file_of_rule(node))


def may_change(node: CustomGradient) -> bool:
    """Whether the user or this package wrote the rule, so that the rule may change a gradient."""
    file = file_of_rule(node)
    is_of_package = is_own_file(file) and not is_jaxs_file(file)
    return bool(file) and (is_user_file(file) or is_of_package)


def file_of_rule(node: CustomGradient) -> str:
    """Returns the file of a custom gradient's rule. The primal may be in another file: in
    ``custom_gradient(jnp.round)`` the primal is JAX's. For ``defjvps``, where JAX makes the rule,
    returns the file of the primal."""
    code = code_of_rule(node)
    if code is None or (node.kind == "jvp" and is_jaxs_file(code.co_filename)):
        return file_of_primal(node)
    return code.co_filename


def code_of_rule(node: CustomGradient) -> CodeType | None:
    """Returns the code of a VJP's backward function or of a JVP's rule; None if it is not a Python
    function."""
    rule = node.params["bwd" if node.kind == "vjp" else "jvp_jaxpr_fun"]
    function = _jax.users_function(rule)
    if getattr(function, "__qualname__", "").startswith("filter_custom_vjp."):  # equinox's
        function = inspect.getclosurevars(function).nonlocals["self"].fn_bwd
    code = getattr(function, "__code__", None)
    if code is not None and is_own_file(code.co_filename):  # a wrapper around the user's rule
        code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _frames_above_stop_gradient(stack: Sequence[Any]) -> Sequence[Any] | None:
    """Returns the frames that call `stop_gradient`, or that call `tree_map` on it; None if no frame
    is of `stop_gradient`. `stack` is ordered from the inside out."""
    library = list(itertools.takewhile(is_own_file, (str(f.file_name) for f in stack)))
    names = [str(f.function_name) for f in stack[: len(library)]]
    # Under `vmap`, `stop_gradient` has several frames: the outermost frame is the user's call.
    calls = [i for i, name in enumerate(names) if "stop_gradient" in name]
    if not calls:
        return None
    caller = calls[-1] + 1
    while caller < len(names) and re.match(r"tree_map|map$", names[caller]):
        caller += 1
    return stack[caller:]


def _package_name(file: str) -> str:
    match = re.search(r"(?:site|dist)-packages[\\/]([^\\/]+)", file)
    return match[1].removesuffix(".py") if match else "a library"
