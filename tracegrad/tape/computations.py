"""What an operation computes: a function of arrays, and what was compiled for it, each known once.

JAX binds an operation under a trace that is not its own by a slow way (it looks the compiled
program up by all its parameters), and takes the fast one for a function that stays the same object.
So a `Computation` has one jitted function, and one for each way in which it is pulled back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad._jax.caches import Cache, WeakCache, of_program
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.lookups import with_slices
from tracegrad.ir.dependence import of_each
from tracegrad.ir.importer import import_program
from tracegrad.ir.program_keys import params_key
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.tape.derivatives import PullBack, next_forward, pull_back_at_operands
from tracegrad.tape.programs import RULES, bind_with, evaluate, refused_arrays
from tracegrad.tracing.in_force import differentiating

_JIT = _jax.JIT
Fun = Callable[..., list[Any]]


class Computation:
    """A function of arrays, and what was compiled for it.

    Nothing here holds the computation that it was derived from: then a dropped function is freed
    without the garbage collector.

    Attributes:
      fun: ``(*operands) -> results``, to be traced.
      run: the same, compiled where it can be.
      name: shown in messages, and by profilers.
      primitive, params: JAX's, of an operation; None and nothing for a pull.
      captured: the arrays that its programs close over. They are its first operands.
      refused: of arrays that a custom derivative in it closes over, by identity, the name of the
        function that has the derivative.
      constants: how many leading operands are closed over by a custom rule.
      saves: whether a tape runs its `forward` in its place.
      is_run_once: whether that is so in a function that is being traced too: XLA would not make
        one of two loops, branches or calls of the host.
      has_rules: whether a function in it has a derivative of its own.
      has_nones: whether it may give None for an operand.
      has_effects: whether it prints or calls the host.
      has_program: whether it is a jitted function.
      is_kept: whether further calls find it: what is derived from it is compiled then.
      called: ``(*operands) -> its own results``, without residuals.
      count, tree: how many results are the operation's own, and their structure; None: all are.
      before: how many results there were without the residuals of the last order; 0: it has none.
    """

    def __init__(
        self,
        fun: Fun,
        name: str,
        *,
        primitive: Any = None,
        params: Mapping[str, Any] | None = None,
        pull_back: PullBack | None = None,
        saves: bool = False,
        is_run_once: bool = False,
        has_effects: bool = False,
        is_compiled: bool = True,
        is_kept: bool = True,
    ):
        self.fun, self.called, self.name = fun, fun, name
        self.primitive, self.params = primitive, params or {}
        self.captured: Sequence[Any] = ()
        self.refused: Mapping[int, str] = {}
        self.constants = 0
        self.saves, self.is_run_once, self.has_effects = saves, is_run_once, has_effects
        self.has_rules = self.has_nones = False
        self.count: int | None = None
        self.tree: Any = None
        self.before = 0
        self.pull_back = pull_back or pull_back_at_operands(fun, primitive is _jax.REMAT)
        self.is_kept, self.has_program = is_kept, primitive is _JIT
        self.run: Callable[..., Any] = _compiled(fun, name) if is_compiled else fun
        self.derived: dict[Any, Any] = {}

    def compile(self) -> None:
        """Has it, and what is derived from it, run as compiled programs."""
        self.run, self.is_kept = _compiled(self.fun, self.name), True

    def forward(
        self, groups: Sequence[tuple[int, ...]], operands: Sequence[Any], orders: int
    ) -> Computation:
        """What runs in its place, and saves what that many derivatives of one another need.

        It is this computation itself if JAX has no derivative of it: whoever asks for one is told.
        `groups`: as of `next_forward`.
        """
        # The operands of a program are of its types.
        key = groups, orders, None if self.has_program else tuple(map(_jax.type_key, operands))
        known: Computation | None = self.derived.get(key)
        if known is not None:
            return known
        types = list(map(jax.typeof, operands))
        found = self
        try:
            with differentiating():
                for _ in range(orders):
                    found = _forward(found, groups, types)
        except Exception:
            pass
        self.derived[key] = self if found is self else found
        return found

    def links(self, types: Sequence[Any]) -> Sequence[int]:
        """For each of its own results the mask of the operands that are connected to it."""
        key = Walk, tuple(types)
        known: Sequence[int] | None = self.derived.get(key)
        if known is None:
            known = self.derived[key] = links_of(self.called, types)
        return known

    def require_forward(self, active: tuple[int, ...], operands: Sequence[Any]) -> None:
        """Raises why a computation with effects has no forward: it does not run again."""
        with differentiating():
            _forward(self, (active,), list(map(jax.typeof, operands)))
        raise NotImplementedError(
            f"{self.name} has effects, and ran where the tape could not save what its derivative "
            "needs (rules were in force): to differentiate it, it would have to run once more. "
            "Call what has the effects outside of it, and pass the results in"
        )

    def pull(
        self, active: tuple[int, ...], given: tuple[int, ...], count: int, sparse: tuple[bool, ...]
    ) -> Computation:
        """The computation ``(*operands, *results, *cotangents) -> {place in active: cotangent}``.

        Args:
          active: the operands whose cotangents are wanted.
          given: the results that have a cotangent.
          count: how many operands there are.
          sparse: for each of `active`, whether its cotangent may be slices.
        """
        key = active, given, count, sparse
        known: Computation | None = self.derived.get(key)
        if known is None:
            pull_back = self.pull_back
            if self.has_rules and all(k < (self.count or k + 1) for k in given):
                pull_back = _of_linked(self.called, pull_back, self.has_nones)
            pull = _pull_function(pull_back, active, given, count)
            if any(sparse):
                pull = _with_slices(pull, sparse)
            known = self.derived[key] = Computation(
                pull,
                f"pull {self.name}",
                saves=self.saves or self.count is not None,
                is_run_once=self.is_run_once,
                is_compiled=self.is_kept,
                is_kept=self.is_kept,
            )
            known.has_rules = self.has_rules
        return known


def _compiled(fun: Fun, name: str) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        return fun(*operands)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run)


def _forward(
    of: Computation, groups: Sequence[tuple[int, ...]], types: Sequence[Any]
) -> Computation:
    fun, pull_back, count, tree = next_forward(
        of.fun, of.pull_back, of.before, groups, types, of.primitive is _jax.REMAT, of.has_rules
    )
    found = Computation(
        fun,
        of.name,
        primitive=of.primitive,
        params=of.params,
        pull_back=pull_back,
        saves=True,
        is_compiled=of.is_kept,
        is_kept=of.is_kept,
    )
    found.captured, found.called, found.is_run_once = of.captured, of.called, of.is_run_once
    found.has_rules, found.has_nones = of.has_rules, of.has_nones
    found.before = count
    found.count, found.tree = of.count or count, of.tree or tree
    return found


def _pull_function(
    pull_back: PullBack, active: tuple[int, ...], given: tuple[int, ...], count: int
) -> Callable[..., Any]:
    def pull(*arrays: Any) -> dict[int, Any]:
        first = len(arrays) - len(given)
        cotangents = dict(zip(given, arrays[first:], strict=True))
        with differentiating():
            return pull_back(active, arrays[:count], arrays[count:first], cotangents)

    return pull


def links_of(called: Fun, types: Sequence[Any]) -> Sequence[int]:
    """For each result of an operation the mask of the operands that are connected to it.

    Of an operand for which a rule gives None the derivative of the program does not tell that.
    """
    with differentiating():
        program = jax.make_jaxpr(lambda *args: jax.tree.leaves(called(*args)))(*types)
        return Walk().region(import_program(program), of_each(map(_jax.has_gradient, types)))


def _of_linked(called: Fun, pull_back: PullBack, has_nones: bool) -> PullBack:
    """The same without the operands for which rules of cotangents on the way have given None
    (`has_nones`: whether there are such rules), and with the zeros that rules of tangents wrote."""

    def linked_only(
        active: tuple[int, ...],
        operands: Sequence[Any],
        results: Sequence[Any],
        given: Mapping[int, Any],
    ) -> dict[int, Any]:
        found = pull_back(active, operands, results, given)
        if not has_nones and len(found) == len(active):
            return found
        rows = links_of(called, list(map(jax.typeof, operands)))
        return {
            place: found[place] if place in found else jnp.zeros_like(operands[i])
            for place, i in enumerate(active)
            if any(rows[k] >> i & 1 for k in given)
        }

    return linked_only


def _with_slices(pull: Callable[..., Any], sparse: tuple[bool, ...]) -> Callable[..., Any]:
    """The same with slices in the place of a table of zeros in which they stand."""

    def run(*arrays: Any) -> dict[int, Any]:
        places: list[int] = []

        def flat(*arrays: Any) -> list[Any]:
            found = pull(*arrays)
            places[:] = found
            return list(found.values())

        program = jax.make_jaxpr(flat)(*arrays)
        found = with_slices(program, [sparse[place] for place in places])(*arrays)
        return dict(zip(places, found, strict=True))

    return run


add_computation = Computation(lambda left, right: [jnp.add(left, right)], "add")


# ---------------------------------------------------------------------------- one of each operation

# Those of primitives without programs, by their parameters; of others by the first of their
# programs, as long as JAX keeps that. A hit saves the compilation of the operation and its pulls.
_computations: Cache[Any, Computation] = Cache(2048)
_of_programs: WeakCache[dict[Any, Computation]] = WeakCache(2048)

# A jitted function of at most so many cheap operations is computed again for its derivative: that
# costs no more than to hand what was computed from one program to the next.
_MOST_AGAIN = 12
_WORTH_KEEPING = 1 << 16  # so many terms of a matrix product cost more than to hand on its result
_COSTLY = frozenset(
    {"conv_general_dilated", "ragged_dot", "ragged_dot_general", "cholesky", "lu", "qr", "eigh"}
    | {"svd", "eig", "triangular_solve", "sort", "fft", "custom_linear_solve", "pallas_call"}
)
_RUN_ONCE = frozenset({_jax.SCAN, _jax.COND, _jax.REMAT, TO_HOST, *_jax.WHILES})


def computation_of(primitive: Any, params: Mapping[str, Any]) -> Computation:
    """The one computation of a primitive without programs, with these parameters."""
    values = tuple(params.values())
    key = primitive, tuple(params), values, tuple(map(type, values))  # 1, 1.0 and True are equal
    try:
        known = _computations.get(key)
    except TypeError:  # a parameter without a hash
        return _new(primitive, params)
    if known is None:
        known = _new(primitive, params)
        if float not in key[3]:  # 0.0 is -0.0
            _computations.put(key, known)
    return known


def _new(primitive: Any, params: Mapping[str, Any]) -> Computation:
    def fun(*operands: Any) -> list[Any]:
        return _jax.bind(primitive, operands, params)

    return Computation(
        fun,
        str(primitive.name),
        primitive=primitive,
        params=params,
        saves=primitive.name in _COSTLY and primitive.name != "sort",
        is_compiled=_jax.runs_compiled(primitive),
        is_kept=_jax.runs_compiled(primitive),
    )


def computation_of_rule(primitive: Any, params: Mapping[str, Any]) -> Computation:
    """The computation of a function with a rule, traced for this call: of no other one, since a
    rule is a Python function, which may read what has changed."""
    return _with_programs(primitive, params, (), is_kept=False)


def computation_with_programs(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any]
) -> Computation:
    """The one computation of an operation that has programs.

    Args:
      primitive, params: JAX's.
      captured: the arrays that the programs close over and that are to be operands.
    """
    if any(map(_jax.is_tracer, captured)):  # gone with its transformation
        return _with_programs(primitive, without_donation(params), captured)
    ids = tuple(map(id, captured))
    if primitive is _JIT:
        program: Any = params["jaxpr"]
        key: Any = primitive, _jax.jit_settings(params), ids
    else:
        name, program = _jax.sub_programs(params)[0]
        rest = {k: tuple(v) if type(v) is list else v for k, v in params.items()}
        rest.pop(name.split("[")[0].split(".")[0])
        others = tuple(id(p) for _, p in _jax.sub_programs(params))
        key = primitive, tuple(rest.items()), others, ids
    known = _of_programs.get(program)
    if known is None:
        known = _of_programs.put(program, {})
    try:
        found = known.get(key)
    except TypeError:
        return _with_programs(primitive, without_donation(params), captured)
    if found is None:
        found = known[key] = _of_structure(primitive, without_donation(params), captured)
    elif not found.is_kept:  # it has come again
        found.is_kept = True
        found.derived.clear()
    return found


def _of_structure(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any]
) -> Computation:
    """That of a program that JAX has just traced: a function may be made anew for each call, as
    a recomputed one is. Programs with rules are each by themselves."""
    if captured:
        return _with_programs(primitive, params, captured)
    if not _jax.facts_below(params).primitives.isdisjoint(RULES):
        return _with_programs(primitive, params, (), is_kept=primitive is not _jax.REMAT)
    key = primitive, params_key(params)
    known = _computations.get(key)
    return _computations.put(key, _with_programs(primitive, params, ())) if known is None else known


def _with_programs(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any], is_kept: bool = True
) -> Computation:
    """`is_kept`: whether another call will find it; else nothing is compiled for it."""
    # The table that has the computation knows it by its program, which it may not hold itself.
    params = {name: _copied(value) for name, value in params.items()}
    facts = _jax.facts_below(params)
    refused = refused_arrays(primitive, params, captured)
    captured = [array for array in captured if id(array) not in refused]
    ids = list(map(id, captured))
    hands_to_host = TO_HOST in facts.primitives
    is_edited = bool(ids) or hands_to_host or (facts.has_effects and _scans(primitive, facts))

    def fun(*operands: Any) -> list[Any]:
        instead = dict(zip(ids, operands))
        args = operands[len(ids) :]
        if is_edited:
            return bind_with(primitive, params, args, instead)
        return _jax.bind(primitive, args, params)

    is_plain = primitive is _JIT and _jax.is_plain_jit(params)
    is_run_once = primitive in _RUN_ONCE or not _RUN_ONCE.isdisjoint(facts.primitives)
    calls_host = any(_jax.calls_host(p.name) for p in facts.primitives)
    is_run_once |= calls_host
    has_references = any(_has_references(program) for _, program in _jax.sub_programs(params))
    found = Computation(
        fun,
        str(params.get("name", primitive.name)),
        primitive=primitive,
        params=params,
        pull_back=pull_back_at_operands(fun, primitive is _jax.REMAT, has_references),
        saves=not has_references and (is_run_once or _is_costly(params, facts)),
        is_run_once=is_run_once and not has_references,
        has_effects=facts.has_effects and calls_host,
        is_compiled=False,
        is_kept=is_kept,
    )
    if is_plain:

        def inlined(*operands: Any) -> list[Any]:
            instead = dict(zip(ids, operands))
            return evaluate(params["jaxpr"], operands[len(ids) :], instead)

        found.run = _compiled(inlined, found.name)
    elif primitive in (_jax.SCAN, _jax.COND, _jax.WHILE):
        found.run = _compiled(fun, found.name)
    found.has_rules = primitive in RULES or not facts.primitives.isdisjoint(RULES)
    found.has_nones = _jax.CUSTOM_VJP in (primitive, *facts.primitives)
    found.captured, found.refused = captured, refused
    return found


@of_program
def _has_references(program: Any) -> bool:
    """Whether a program uses a `jax.Ref`."""
    return any(
        any(_jax.is_reference(v.aval) for v in (*equation.invars, *equation.outvars))
        or any(_has_references(inner) for _, inner in _jax.sub_programs(equation.params))
        for equation in _jax.opened(program).eqns
    )


def _scans(primitive: Any, facts: Any) -> bool:
    return primitive is _jax.SCAN or _jax.SCAN in facts.primitives


def _copied(value: Any) -> Any:
    program: Any = value
    if isinstance(value, _jax.PROGRAM_TYPES):
        return program.replace()
    if isinstance(value, (tuple, list)) and any(isinstance(v, _jax.PROGRAM_TYPES) for v in value):
        copies = [_copied(item) for item in value]
        return type(value)(*copies) if hasattr(value, "_fields") else type(value)(copies)
    return value


def _is_costly(params: Mapping[str, Any], facts: Any) -> bool:
    if facts.operations > _MOST_AGAIN or facts.has_effects:
        return True
    if any(p.name in _COSTLY for p in facts.primitives):
        return True
    if facts.operations == 1:
        return False
    return any(_has_large_product(program) for _, program in _jax.sub_programs(params))


def _has_large_product(program: Any) -> bool:
    for equation in _jax.opened(program).eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            terms = math.prod(equation.invars[0].aval.shape[axis] for axis in summed)
            if terms * equation.outvars[0].aval.size >= _WORTH_KEEPING:
                return True
        if any(_has_large_product(inner) for _, inner in _jax.sub_programs(equation.params)):
            return True
    return False


def without_donation(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tape still needs the arguments of a compiled function: none is given up under it."""
    donated = params.get("donated_invars", ())
    if any(donated):
        return {**params, "donated_invars": (False,) * len(donated)}
    return params
