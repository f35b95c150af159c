"""Calls of functions of JAX's own that have a rule: they are traced once, and not at each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.tape.computations import Computation, rule_computation, sole_equation
from tracegrad.tape.keys import is_jaxs_own, settings_now


class OwnRule:
    """A call of a function of JAX's own that has a rule (relu, softplus, ...).

    Attributes:
      program: what it traces to.
      result_trees: what a run of the function leaves behind.
      lone: what the program computes, if it is just the call of that rule: to be compiled.
    """

    __slots__ = ("lone", "program", "result_trees")

    def __init__(self, program: Any, result_trees: tuple[Any, ...]):
        self.program = program
        self.result_trees = result_trees
        self.lone: Computation | None = None
        call = sole_equation(program)
        is_rule = call is not None and call.primitive in (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP)
        if call is not None and is_rule and not call.params.get("num_consts", 0):
            self.lone = rule_computation(call.primitive, call.params)


def own_rule_key(
    primitive: Any, subfuns: Sequence[Any], args: Sequence[Any], params: dict[str, Any]
) -> Any:
    """What tells one call of a function of JAX's own from another; None for anybody else's.

    Somebody else's function may read what has changed since its last call, so that it is traced at
    each, as JAX does.
    """
    functions, trees = _jax.rule_functions(subfuns)
    if params.get("symbolic_zeros") or trees is None or not all(map(is_jaxs_own, functions)):
        return None
    return OwnRule, primitive, functions, trees, tuple(map(_jax.type_key, args)), settings_now()
