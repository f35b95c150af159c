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
from tracegrad._jax.caches import Cache, WeakCache
from tracegrad.differentiation.lookups import with_slices
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.tape.derivatives import PullBack, next_forward, pull_back_at_operands
from tracegrad.tape.programs import bind_with, evaluate, refused_arrays
from tracegrad.tracing.in_force import differentiating
from tracegrad.tracing.user_errors import explain_loop

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
      refused: arrays that a custom derivative in it closes over, by identity.
      constants: how many leading operands are closed over by a custom rule.
      saves: whether a tape runs its `forward` in its place.
      is_run_once: whether that is so in a function that is being traced too: XLA would not make
        one of two loops, branches or calls of the host.
      has_effects: whether it prints or calls the host.
      called: ``(*operands) -> its own results``, without residuals.
      count: how many results are the operation's own; None: all.
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
    ):
        self.fun, self.called, self.name = fun, fun, name
        self.primitive, self.params = primitive, params or {}
        self.captured: Sequence[Any] = ()
        self.refused: frozenset[int] = frozenset()
        self.constants = 0
        self.saves, self.is_run_once, self.has_effects = saves, is_run_once, has_effects
        self.count: int | None = None
        self.pull_back = pull_back or pull_back_at_operands(fun, primitive is _jax.REMAT)
        self.run: Callable[..., Any] = _compiled(fun, name) if is_compiled else fun
        self.derived: dict[Any, Any] = {}

    def forward(self, active: tuple[int, ...], operands: Sequence[Any], orders: int) -> Computation:
        """What runs in its place, and saves what that many derivatives of one another need.

        It is this computation itself if JAX has no derivative of it: whoever asks for one is told.
        """
        types = list(map(jax.typeof, operands))
        key = active, orders, tuple(map(_jax.type_key, operands))
        known: Computation | None = self.derived.get(key)
        if known is not None:
            return known
        found = self
        try:
            with differentiating():
                for _ in range(orders):
                    found = _forward(found, active, types)
        except Exception:
            pass
        self.derived[key] = self if found is self else found
        return found

    def require_forward(self, active: tuple[int, ...], operands: Sequence[Any]) -> None:
        """Raises why a computation with effects has no forward: it does not run again."""
        try:
            with differentiating():
                _forward(self, active, list(map(jax.typeof, operands)))
        except Exception as error:
            explain_loop(error)
            raise
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
            pull = _pull_function(self.pull_back, active, given, count, self.name)
            if any(sparse):
                pull = _with_slices(pull, sparse)
            known = self.derived[key] = Computation(
                pull,
                f"pull {self.name}",
                saves=self.saves or self.count is not None,
                is_run_once=self.is_run_once,
            )
        return known


def _compiled(fun: Fun, name: str) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        return fun(*operands)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run)


def _forward(of: Computation, active: tuple[int, ...], types: Sequence[Any]) -> Computation:
    fun, pull_back, count = next_forward(of.fun, of.pull_back, of.count, active, types)
    found = Computation(
        fun, of.name, primitive=of.primitive, params=of.params, pull_back=pull_back, saves=True
    )
    found.captured, found.called, found.is_run_once = of.captured, of.called, of.is_run_once
    found.count = of.count or count
    return found


def _pull_function(
    pull_back: PullBack, active: tuple[int, ...], given: tuple[int, ...], count: int, name: str
) -> Callable[..., Any]:
    def pull(*arrays: Any) -> dict[int, Any]:
        first = len(arrays) - len(given)
        cotangents = dict(zip(given, arrays[first:], strict=True))
        try:
            with differentiating():
                return pull_back(active, arrays[:count], arrays[count:first], cotangents)
        except Exception as error:
            explain_loop(error)
            if not getattr(error, "__notes__", ()):  # a region names its operation as well
                error.add_note(f"while differentiating {name}")
            raise

    return pull


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
    )


def computation_with_programs(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any], is_new: bool = False
) -> Computation:
    """The one computation of an operation that has programs.

    Args:
      primitive, params: JAX's.
      captured: the arrays that the programs close over and that are to be operands.
      is_new: whether it is traced for one run.
    """
    if is_new or any(map(_jax.is_tracer, captured)):  # gone with its transformation
        return _with_programs(primitive, without_donation(params), captured)
    name, program = _jax.sub_programs(params)[0]
    ids = tuple(map(id, captured))
    if primitive is _JIT:
        key = primitive, _jax.jit_settings(params), ids
    else:
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
        found = known[key] = _with_programs(primitive, without_donation(params), captured)
    return found


def _with_programs(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any]
) -> Computation:
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
    is_run_once |= any(_jax.calls_host(p.name) for p in facts.primitives)
    found = Computation(
        fun,
        str(params.get("name", primitive.name)),
        primitive=primitive,
        params=params,
        saves=is_run_once or _is_costly(params, facts),
        is_run_once=is_run_once,
        has_effects=facts.has_effects,
        is_compiled=False,
    )
    if is_plain:

        def inlined(*operands: Any) -> list[Any]:
            instead = dict(zip(ids, operands))
            return evaluate(params["jaxpr"], operands[len(ids) :], instead)

        found.run = _compiled(inlined, found.name)
    elif primitive in (_jax.SCAN, _jax.COND, _jax.WHILE):
        found.run = _compiled(fun, found.name)
    found.captured, found.refused = captured, frozenset(refused)
    return found


def _scans(primitive: Any, facts: Any) -> bool:
    return primitive is _jax.SCAN or _jax.SCAN in facts.primitives


def _copied(value: Any) -> Any:
    if isinstance(value, _jax.PROGRAM_TYPES):
        return value.replace()
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
