"""Facts about a program and its sub-programs at any depth, collected in one walk, and cached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

from tracegrad._jax.arrays import ARRAY, has_gradient
from tracegrad._jax.caches import of_program
from tracegrad._jax.compat import parts_of
from tracegrad._jax.programs import (
    CUSTOM_JVP,
    CUSTOM_VJP,
    OBJECT_PRIMITIVE,
    OPAQUE_PRIMITIVES,
    sub_programs,
)
from tracegrad._jax.rules import count_closed_over


class ProgramFacts(NamedTuple):
    """Facts about one or more programs, including their sub-programs.

    Attributes:
      primitives: the primitives of the operations.
      operations: the number of operations. The operations of a sub-program count once for each
        equation that calls it (the operations of a loop's body once). Calls do not count.
      arrays, numpy_arrays: the constants that are `jax.Array`s, and the constants that are NumPy
        arrays, without duplicates.
      has_effects: whether there are side effects, such as printing or callbacks.
      closes_over: whether a `jax.custom_jvp` closes over a value of a float or complex dtype.
      rules_see_active: whether a custom rule learns which operands are differentiated
        (``symbolic_zeros=True``): then its result for one operand may depend on whether another
        operand is differentiated.
      has_references: whether an operation uses a `jax.Ref`.
    """

    primitives: frozenset[Any] = frozenset()
    operations: int = 0
    arrays: tuple[Any, ...] = ()
    numpy_arrays: tuple[Any, ...] = ()
    has_effects: bool = False
    closes_over: bool = False
    rules_see_active: bool = False
    has_references: bool = False


_NO_PROGRAM = ProgramFacts()
_WITHOUT_REGIONS = OPAQUE_PRIMITIVES - {OBJECT_PRIMITIVE}


@of_program
def program_facts(program: Any) -> ProgramFacts:
    open_form, constants = parts_of(program)
    primitives, kinds = set[Any](), set[type]()  # kinds: of types; few, of many values
    count, see_active, below = 0, False, []
    for equation in open_form.eqns:
        primitives.add(equation.primitive)
        see_active |= bool(equation.params.get("symbolic_zeros"))
        kinds.update([type(v.aval) for v in equation.invars])
        kinds.update([type(v.aval) for v in equation.outvars])
        inner = facts_below(equation.params) if equation.params else _NO_PROGRAM
        if inner is _NO_PROGRAM:
            count += 1
            continue
        if equation.primitive.name in _WITHOUT_REGIONS:
            inner = inner._replace(primitives=frozenset())  # of no nodes
        if equation.primitive in (CUSTOM_JVP, CUSTOM_VJP):  # their bodies are not differentiated
            inner = inner._replace(closes_over=rule_closes_over(equation))
        below.append(inner)
    distinct = _drop_repeated(constants)
    at_top = ProgramFacts(
        frozenset(primitives),
        count,
        tuple([each for each in distinct if isinstance(each, jax.Array)]),
        tuple([each for each in distinct if isinstance(each, np.ndarray)]),
        bool(open_form.effects),
        rules_see_active=see_active,
        has_references=not all(issubclass(kind, ARRAY) for kind in kinds),
    )
    return _combine([at_top, *below]) if below else at_top


def facts_below(params: Mapping[str, Any]) -> ProgramFacts:
    """Returns the combined facts of all programs among the parameters of an operation, or in the
    object that is a parameter of the `OBJECT_PRIMITIVE`."""
    kept = params.get("_prim")
    programs = sub_programs(params if kept is None else vars(kept))
    return (
        _combine([program_facts(program) for _, program in programs]) if programs else _NO_PROGRAM
    )


def _combine(each: Sequence[ProgramFacts]) -> ProgramFacts:
    if len(each) < 2:
        return each[0] if each else _NO_PROGRAM
    return ProgramFacts(
        frozenset().union(*(facts.primitives for facts in each)),
        sum(facts.operations for facts in each),
        _drop_repeated(array for facts in each for array in facts.arrays),
        _drop_repeated(array for facts in each for array in facts.numpy_arrays),
        any(facts.has_effects for facts in each),
        any(facts.closes_over for facts in each),
        any(facts.rules_see_active for facts in each),
        any(facts.has_references for facts in each),
    )


def _drop_repeated(arrays: Iterable[Any]) -> tuple[Any, ...]:
    return tuple({id(array): array for array in arrays}.values())


def rule_closes_over(equation: Any) -> bool:
    """Whether an equation is a `jax.custom_jvp` that closes over a float or complex value."""
    if equation.primitive is not CUSTOM_JVP:
        return False
    operands = equation.invars[: count_closed_over(equation.params)]
    return any(not isinstance(each, jex.Literal) and has_gradient(each.aval) for each in operands)
