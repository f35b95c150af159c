"""Who wrote a custom rule: the user, a library, this package or JAX."""

from __future__ import annotations

from types import CodeType

from tracegrad import _jax
from tracegrad.ir import CustomGradient
from tracegrad.ir.authors import file_of_primal
from tracegrad.ir.occurrence import is_jaxs_file, is_own_file, is_user_file


def is_jaxs_rule(node: CustomGradient) -> bool:
    """Whether a rule is one of JAX's own, which are derivatives."""
    return is_jaxs_file(file_of_rule(node))


def may_change(node: CustomGradient) -> bool:
    """Whether a rule is the user's, or one that this package puts in to change a gradient."""
    file = file_of_rule(node)
    return is_user_file(file) or (is_own_file(file) and not is_jaxs_file(file)) if file else False


def file_of_rule(node: CustomGradient) -> str:
    """Where the rule is written; of a JVP its function. (The rule of ``custom_gradient(jnp.round)``
    is not JAX's, though the function is.)"""
    code = code_of_rule(node)
    return file_of_primal(node) if code is None else code.co_filename


def code_of_rule(node: CustomGradient) -> CodeType | None:
    """The code of a rule's backward function; of a JVP, and of what is no Python function, None."""
    if node.kind != "vjp":
        return None
    (backward,), _ = _jax.rule_functions([node.params["bwd"]])
    code = getattr(backward, "__code__", None)
    return code if isinstance(code, CodeType) else None
