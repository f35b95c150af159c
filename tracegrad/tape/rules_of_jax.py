"""JAX's own functions with a custom rule (relu, softplus, ...): each is traced and compiled once.

Any other function may read values that change between calls, so it runs at every call.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from tracegrad import _jax
from tracegrad._jax.caches import Cache, of_program
from tracegrad.tape.computations import Computation, compiled
from tracegrad.tape.known_computations import computation_of_rule


class RuleOfJax(NamedTuple):
    """A call of one of JAX's own functions with a rule.

    Attributes:
      result_trees: the trees of the results, which JAX reads from the function after its run.
    """

    computation: Computation
    result_trees: tuple[Any, ...]


_known: Cache[Any, RuleOfJax | None] = Cache(512)


def rule_of_jax(
    primitive: Any, subfuns: Sequence[Any], args: Sequence[Any], params: Mapping[str, Any]
) -> RuleOfJax | None:
    """None for a function that is not JAX's own. Call this outside of recorders."""
    functions, trees = _jax.rule_functions(subfuns)
    if params.get("symbolic_zeros") or trees is None or not all(map(_is_jaxs_own, functions)):
        return None
    types, settings = tuple(map(_jax.type_key, args)), _settings(jax.config)
    key = primitive, functions, trees, types, settings
    if key not in _known:
        _known.put(key, _known_call(primitive, subfuns, args, params))
    known = _known.get(key)
    if known is not None and not _jax.has_run(subfuns[0]):
        _jax.leave_result_trees(subfuns[0], known.result_trees)
    return known


def traced_rule(
    primitive: Any, subfuns: Sequence[Any], args: Sequence[Any], params: Mapping[str, Any]
) -> tuple[Any, list[Any]]:
    """Returns a call of a function with a rule as one JAX equation, and the values of its operands.
    The first operands are the values that the function closes over. Call this outside of recorders.
    """

    def bind(*args: Any) -> list[Any]:
        return list(primitive.bind(*args, subfuns=tuple(subfuns), **params))

    program = jax.make_jaxpr(bind)(*args)
    open_form, constants = _jax.parts_of(program)
    (equation,) = open_form.eqns
    values = dict(zip((*open_form.constvars, *open_form.invars), (*constants, *args), strict=True))
    operands = [atom.val if hasattr(atom, "val") else values[atom] for atom in equation.invars]
    return equation, operands


def _known_call(
    primitive: Any, subfuns: Sequence[Any], args: Sequence[Any], params: Mapping[str, Any]
) -> RuleOfJax | None:
    """None if the function closes over a value."""
    equation, operands = traced_rule(primitive, subfuns, args, params)
    trees = _jax.result_trees(subfuns[0])
    for fun in subfuns[:2]:
        _jax.forget_result_trees(fun)
    if len(operands) != len(args) or any(x is not y for x, y in zip(operands, args)):
        return None  # the function closes over a value
    computation = computation_of_rule(equation.primitive, equation.params)
    run = compiled(computation.fun, computation.name)
    return RuleOfJax(replace(computation, run=run, is_kept=True), trees)


# The settings that JAX's own functions may read while they are traced.
_settings = operator.attrgetter(
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)


def _is_jaxs_own(function: Any) -> bool:
    """Whether a function, and everything that it closes over, is part of JAX. Such a function never
    changes, so its identity determines its results."""
    return _is_from_jax(function) and _closes_over_jax(function)


@of_program
def _closes_over_jax(function: Any) -> bool:
    return _is_own(function, depth=6)


def _is_own(value: Any, depth: int) -> bool:
    """Whether a value, with its closures to this depth, is a plain constant or part of JAX."""
    if value is None or isinstance(value, bool | int | float | str | jax.tree_util.PyTreeDef):
        return True
    if isinstance(value, tuple):
        return all(_is_own(item, depth) for item in value)
    if depth == 0 or not callable(value) or not _is_from_jax(value):
        return False
    inner = getattr(value, "__wrapped__", None)
    if inner is not None and not _is_own(inner, depth - 1):
        return False
    cells = getattr(value, "__closure__", None) or ()
    return all(_is_own(cell.cell_contents, depth - 1) for cell in cells)


def _is_from_jax(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return bool(module.partition(".")[0] == "jax")
