"""The authors of annotations in a program: the user, a library, this package or JAX."""

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

A_RULE = "a rule"  # the author of what `tracegrad.rules.stop_gradient` writes into a graph
_EDITORS = dirname(__file__)


def whose(occurrence: Occurrence) -> str:
    """Returns the author of an annotation: ``"yours"``, `A_RULE`, or the library's name. The author
    is the author of the code that calls the annotation's function."""
    node = occurrence.node
    stack = _jax.frames(node.source.info)
    if isinstance(node, StopGradient):
        around = _frames_above_stop_gradient(stack)
        # A rule's operation has the frames of the operation at which the rule acts.
        if around is stack or (around and dirname(around[0].file_name) == _EDITORS):
            return A_RULE
        stack = around
        if stack and is_own_file(stack[0].file_name):
            return "jax"
    for frame in stack:
        if is_user_file(frame.file_name):
            return "yours"
        if not is_own_file(frame.file_name):
            return _package_name(frame.file_name)
    return "yours"


def file_of_primal(node: CustomGradient) -> str:
    """ "" if unknown."""
    function = origin_of_function(node.primal.function_source)
    return function.file if function else ""


def is_jaxs_rule(node: CustomGradient) -> bool:
    """Then the rule is the derivative of its function."""
    return is_jaxs_file(file_of_rule(node))


def may_change(node: CustomGradient) -> bool:
    """Whether a rule may change a gradient: the user or this package has made the rule."""
    file = file_of_rule(node)
    return is_user_file(file) or (is_own_file(file) and not is_jaxs_file(file)) if file else False


def file_of_rule(node: CustomGradient) -> str:
    """Returns the file of a custom gradient's rule. The function may be in another file: in
    ``custom_gradient(jnp.round)`` only the function is JAX's. For ``defjvps``, whose rule JAX
    makes, returns the file of the function."""
    code = code_of_rule(node)
    is_given = code is not None and (node.kind == "vjp" or not is_jaxs_file(code.co_filename))
    return code.co_filename if code is not None and is_given else file_of_primal(node)


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


def _frames_above_stop_gradient(stack: Sequence[Any]) -> Sequence[Any]:
    """Returns the frames around a call of `stop_gradient`, or around its `tree_map`; `stack` itself
    if it has no such call."""
    # Under `vmap`, frames of JAX are inside of the call: take the outermost `stop_gradient`.
    inner = list(itertools.takewhile(is_own_file, (str(f.file_name) for f in stack)))
    names = [str(f.function_name) for f in stack[: len(inner)]]
    calls = [i for i, name in enumerate(names) if "stop_gradient" in name]
    if not calls:
        return stack
    end = calls[-1] + 1
    while end < len(names) and re.match(r"tree_map|map$", names[end]):
        end += 1
    return stack[end:]


def _package_name(file: str) -> str:
    match = re.search(r"(?:site|dist)-packages[\\/]([^\\/]+)", file)
    return match[1].removesuffix(".py") if match else "a library"
