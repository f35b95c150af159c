"""What recorded operations compute: a primitive with its parameters, each known once.

Two operations that compute the same function have the same `Computation`, which is told apart by
identity from then on. It holds what is needed to run the operation fast: JAX binds an operation
under a trace that is not its own by a slow way (it looks the compiled program up by all its
parameters), and takes the fast one for a function that stays the same object.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np

from tracegrad import _jax
from tracegrad._jax.caches import Cache, WeakCache, of_program, when_clearing
from tracegrad.ir import CustomGradient, Source
from tracegrad.ir.importer import lone_node
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.tape.keys import is_jaxs_own, jax_settings, params_key, rule_keys
from tracegrad.tape.lifting import lift_anew, refused_to_lift
from tracegrad.tracing.in_force import differentiating

_JIT = _jax.JIT
jit_settings = _jax.jit_settings

# A program of so many operations is compiled once more for the tape, so that it is called fast:
# compiling takes little. A larger one shares what JAX has compiled.
_SMALL = 10
# The forward pass of one of more than so many saves what its derivative needs.
_LARGE = 32


class Computation:
    """A primitive with parameters.

    Attributes:
      primitive, params: JAX's; no argument is donated.
      constants: how many leading operands are closed over: they carry no gradient through a custom
        rule.
      rule: of a custom rule that was made for one call: it is known by what it traces to.
      run: the compiled operation, which returns what the primitive does; None if it is bound.
      has_effects: whether it prints or calls the host.
      hands_to_host: whether something in its programs is handed to the host.
      is_run_once: whether it holds what is not to run again for a derivative, whoever compiles it:
        a loop, a branch, a call of the host, or a recomputed function, which says itself what is
        run again.
      saves: whether its forward pass is to save what its derivative needs even where the parts of
        one compiled program are not in question (see `linearised`).
      programs: whether it has sub-programs.
      is_shared: whether another operation may have the same one.
      is_used: whether it has run since the last `_clean_up`.
    """

    __slots__ = (
        "_keys",
        "constants",
        "hands_to_host",
        "has_effects",
        "is_run_once",
        "is_shared",
        "is_used",
        "params",
        "primitive",
        "programs",
        "rule",
        "run",
        "saved",
        "saves",
    )

    def __init__(
        self,
        primitive: Any,
        params: Mapping[str, Any],
        constants: int = 0,
        rule: CustomGradient | None = None,
        key: Any = None,
        is_shared: bool = True,
    ):
        self.primitive = primitive
        self.params = params
        self.constants = constants
        self.rule = rule
        self.is_shared = is_shared and rule is None
        self._keys = None if key is None else (key, key)
        self.programs = [program for _, program in _jax.sub_programs(params)]
        facts = _jax.facts_below(params)
        self.has_effects = facts.has_effects
        self.hands_to_host = TO_HOST in facts.primitives
        self.is_used = True
        self.run: Callable[..., Any] | None = None
        # (A `while` loop has no backward pass.)
        self.is_run_once = primitive in _RUN_ONCE or not _RUN_ONCE.isdisjoint(facts.primitives)
        self.saves = self.is_run_once
        self.saved: dict[Any, Any] = {}  # by what is differentiated; see `linearised`
        if self.is_shared and not self.has_effects:
            self._prepare(facts)

    def _prepare(self, facts: _jax.ProgramFacts) -> None:
        if self.primitive is _JIT:
            if not _jax.is_plain_jit(self.params):
                return
            # What says something of their derivatives is asked in the backward pass.
            if facts.operations > 1 and not facts.closes_over and not self.saves:
                self.saves = facts.operations > _LARGE or _is_heavy(self.params["jaxpr"])
            if not self.saves or facts.operations <= _SMALL:
                self.run = _compiled_program(self.params)
        elif self.primitive is _jax.CUSTOM_JVP or (
            _jax.runs_compiled(self.primitive) and not self.programs
        ):
            self.run = _compiled_primitive(self.primitive, self.params)

    @property
    def keys(self) -> tuple[Any, Any]:
        """Two keys: equal for operations that compute the same function with the same derivative;
        and equal only if their derivatives of every order are the same. They differ for rules.

        A rule is traced for it, and that may not happen before it has run.
        """
        if self._keys is None:
            if self.rule is None:
                key = self.primitive, params_key(self.params), self.constants
                self._keys = key, key
            else:
                with differentiating():
                    once, exact = rule_keys(self.rule)
                self._keys = (once, self.constants), (exact, self.constants)
        return self._keys


def sole_equation(program: Any) -> Any:
    """The equation of a program that is nothing but it, on the same operands; else None."""
    open_form = _jax.opened(program)
    if len(open_form.eqns) != 1:
        return None
    (equation,) = open_form.eqns
    same = equation.invars == open_form.invars and equation.outvars == open_form.outvars
    return equation if same else None


_RUN_ONCE = frozenset({_jax.SCAN, _jax.COND, _jax.REMAT, TO_HOST})


# Their results are worth keeping for the backward pass.
_HEAVY = frozenset({"conv_general_dilated", "ragged_dot", "ragged_dot_general"})
# Those of a matrix product are, if it has so many terms: fewer are computed in the time that it
# takes to hand an array from one compiled program to the next.
_WORTH_KEEPING = 1 << 16


@of_program
def _is_heavy(program: Any) -> bool:
    """Whether one of the operations of a program is costly."""
    return any(_is_costly(equation) for equation in _jax.opened(program).eqns)


def _is_costly(equation: Any) -> bool:
    inner = _jax.sub_programs(equation.params)
    if inner:
        is_call = equation.primitive in (_JIT, _jax.CUSTOM_JVP)
        return not is_call or any(_is_heavy(program) for _, program in inner)
    if equation.primitive.name != "dot_general":
        return equation.primitive.name in _HEAVY
    (summed, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    terms = math.prod(left.shape[axis] for axis in summed)
    return bool(terms * equation.outvars[0].aval.size >= _WORTH_KEEPING)


def _compiled_program(params: Mapping[str, Any]) -> Callable[..., Any]:
    run = jax.extend.core.jaxpr_as_fun(params["jaxpr"])

    def program(*args: Any) -> Any:
        return run(*args)

    program.__name__ = program.__qualname__ = str(params["name"])
    return jax.jit(program)


def _compiled_primitive(primitive: Any, params: Mapping[str, Any]) -> Callable[..., Any]:
    def operation(*args: Any) -> Any:
        results = _jax.bind(primitive, args, params)
        return results if primitive.multiple_results else results[0]

    operation.__name__ = operation.__qualname__ = str(primitive.name)
    return jax.jit(operation)


# ------------------------------------------------------------------------------ those that we know

_lock = threading.Lock()
# By what their parameters mean. Those without sub-programs also by the parameters as they are: that
# saves a tenth of what it takes to record an operation that has some.
_known: Cache[Any, Computation] = Cache(4096)
_LIMIT = 512
_made = 0
_forgetting: list[Callable[[], None]] = []  # what else holds computations


def computation_of(primitive: Any, params: Mapping[str, Any]) -> Computation:
    """The one computation of a primitive with parameters."""
    names = tuple(params)
    values = tuple(params.values())
    # 1, 1.0 and True are equal, but not the same parameter.
    key = primitive, names, values, tuple(map(type, values))
    try:
        known = _known.get(key)
    except TypeError:  # not hashable
        return _interned(primitive, params)
    if known is None:
        known = _interned(primitive, params)
        if not known.programs and not known.has_effects and float not in key[3]:  # 0.0 is -0.0
            _known.put(key, known)
    known.is_used = True
    return known


def _interned(primitive: Any, params: Mapping[str, Any], constants: int = 0) -> Computation:
    key = primitive, params_key(params), constants
    known = _known.get(key)
    if known is None:
        known = _known.put(key, Computation(primitive, dict(params), constants, key=key))
        _count_made()
    known.is_used = True
    return known


rule_computation = _interned


def own_computation(equation: Any) -> Computation:
    """The computation of an equation that was traced for one run. A rule in it is known by what it
    traces to."""
    primitive, params = equation.primitive, dict(equation.params)
    if primitive not in (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP):
        return Computation(primitive, params, is_shared=False)
    types = [atom.aval for atom in equation.invars]
    node = lone_node(primitive, params, types, Source(equation.source_info, equation.ctx))
    assert isinstance(node, CustomGradient)
    return Computation(primitive, params, node.closed_over, node)


def _count_made() -> None:
    global _made
    _made += 1
    if _made > _LIMIT:
        _clean_up()


def _clean_up() -> None:
    """Forgets computations that have not run since the last time, and all structures of them."""
    global _made
    with _lock:
        _made = 0
        for key, computation in list(_known.items()):
            if not computation.is_used:
                _known.pop(key, None)
        # Each holds its program, or one like it.
        _calls.forget(lambda call: not call.computation.is_used)
        for computation in (*_known.values(), *(call.computation for call in _calls.values())):
            computation.is_used = False
    for forget in _forgetting:
        forget()


def when_forgetting(forget: Callable[[], None]) -> None:
    """Has a function called whenever computations are forgotten."""
    _forgetting.append(forget)
    when_clearing(forget)


# -------------------------------------------------------------------------------- jitted functions


class JittedCall:
    """A call of a jitted function, as the tape has it: what it closes over are operands.

    Attributes:
      constants: what it closes over.
      has_tracers: whether some of that belongs to a transformation, and is gone with it.
      captured: those that come before the operands.
      refused: arrays that cannot be operands, by identity, and why.
    """

    __slots__ = ("captured", "computation", "constants", "has_tracers", "refused", "settings")

    def __init__(self, params: Mapping[str, Any], settings: tuple[Any, ...]):
        self.settings = settings
        self.captured: Sequence[Any] = ()
        self.refused: Mapping[int, Exception] = {}
        facts = _jax.program_facts(params["jaxpr"])
        # The owner of a NumPy array may change it before a gradient is asked for.
        constants, changeable = facts.arrays, facts.numpy_arrays
        self.has_tracers = any(map(_jax.is_tracer, constants))
        if (constants or changeable) and not self.has_tracers:
            types = [variable.aval for variable in _jax.opened(params["jaxpr"]).invars]
            self.refused = refused_to_lift(params, (*constants, *changeable), types)
            lifted = [c for c in (*constants, *changeable) if id(c) not in self.refused]
            if lifted:
                params = lift_anew(_JIT, params, lifted, types)
            self.captured = [np.array(c) if isinstance(c, np.ndarray) else c for c in lifted]
        self.constants = (*constants, *self.captured) if changeable else constants
        # One that holds values of a transformation is not kept.
        self.computation = (
            Computation(_JIT, params, is_shared=False)
            if self.has_tracers
            else _interned(_JIT, params)
        )


# Of programs. A step over a jitted function takes 90 µs with it and 140 µs without.
_calls: WeakCache[JittedCall] = WeakCache()


def jitted_call(params: Mapping[str, Any]) -> JittedCall | None:
    """The call of a jitted function with these parameters, if there was one before."""
    known = _calls.get(params["jaxpr"])
    if known is None or known.settings != jit_settings(params):
        return None
    return known


def new_jitted_call(params: Mapping[str, Any]) -> JittedCall:
    """That of another function, for the next time."""
    call = JittedCall(without_donation(params), jit_settings(params))
    return call if call.has_tracers else _calls.put(params["jaxpr"], call)


def without_donation(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tape still needs the arguments of a compiled function: none is given up under it."""
    donated = params.get("donated_invars", ())
    if any(donated):
        return {**params, "donated_invars": (False,) * len(donated)}
    return params


# ----------------------------------------------------------------- rules of functions of JAX's own


class JaxRuleCall:
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
        if call is not None and is_rule and not _jax.closed_over(call.params):
            self.lone = rule_computation(call.primitive, call.params)


def jax_rule_key(
    primitive: Any, subfuns: Sequence[Any], args: Sequence[Any], params: dict[str, Any]
) -> Any:
    """What tells one call of a function of JAX's own from another; None for anybody else's.

    Somebody else's function may read what has changed since its last call, so that it is traced at
    each, as JAX does.
    """
    functions, trees = _jax.rule_functions(subfuns)
    if params.get("symbolic_zeros") or trees is None or not all(map(is_jaxs_own, functions)):
        return None
    types, settings = tuple(map(_jax.type_key, args)), jax_settings(jax.config)
    return JaxRuleCall, primitive, functions, trees, types, settings
