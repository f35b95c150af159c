"""The computation of an operation: a function of arrays, and the programs compiled for it.

Under a custom trace, JAX looks up the compiled program of an operation by all parameters, which is
slow. JAX calls a jitted function fast if the function stays the same object. So a `Computation` has
one jitted function, and one more for each way of pulling cotangents back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.lookups import with_slices
from tracegrad.ir import Graph
from tracegrad.ir.dependence import of_each
from tracegrad.ir.importer import graph_of
from tracegrad.tape.derivatives import PullBack, add_residuals, pull_back_at_operands
from tracegrad.tracing.in_force import without_editing

Fun = Callable[..., list[Any]]
_numbers = itertools.count()


@dataclass(eq=False)
class Computation:
    """A function of arrays, and the programs compiled for it.

    A derived computation does not refer to the computation that it is derived from. So a dropped
    function is freed without the garbage collector.

    Attributes:
      fun: ``(*operands) -> results``, to be traced.
      name: the name in messages and profilers.
      run: the function to call: the compiled `fun`, or `fun` itself (the default).
      pull_back: pulls cotangents back; default: by JAX's VJP at the operands.
      primitive, params: of the JAX operation; None and empty for a pull-back.
      captured: the arrays that its programs close over: the first operands.
      refused: maps the id of each array that a custom derivative closes over to the name of the
        function with that derivative.
      constants: how many leading operands a custom rule closes over.
      saves: whether a tape runs `forward` instead, which saves residuals.
      is_run_once: whether XLA cannot merge two runs of `fun` (a loop, a branch, a call of the
        host): then a tape runs `forward` inside a traced function too.
      has_rules: whether a function in its programs has a custom derivative.
      has_nones: whether a custom VJP in its programs may return None, which zeros may hide.
      has_effects: whether it prints or calls the host.
      has_references: whether it uses a `jax.Ref`.
      is_simple: whether it closes over no arrays and has no effects.
      is_kept: whether it is cached for later calls; only then its pull-backs are compiled.
      called: `fun` as it was before residuals were added to its results; default: `fun`.
      count, tree: the number and the tree of the results that are not residuals; None: all results.
      count_without_last_residuals: see `add_residuals`; 0 without residuals.
      constant_results: the results that are constants to a derivative; see `add_residuals`.
      number: unique in the process; unlike an id, never reused.
      derived: a cache of facts and of derived computations.
    """

    fun: Fun
    name: str
    run: Any = None
    pull_back: Any = None
    _: KW_ONLY
    primitive: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    captured: Sequence[Any] = ()
    refused: Mapping[int, str] = field(default_factory=dict)
    constants: int = 0
    saves: bool = False
    is_run_once: bool = False
    has_rules: bool = False
    has_nones: bool = False
    has_effects: bool = False
    has_references: bool = False
    is_simple: bool = False
    is_kept: bool = True
    called: Any = None
    count: int | None = None
    tree: Any = None
    count_without_last_residuals: int = 0
    constant_results: frozenset[int] = frozenset()
    number: int = field(default_factory=lambda: next(_numbers), init=False)
    derived: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.run = self.run or self.fun
        self.called = self.called or self.fun
        is_whole = self.primitive is _jax.REMAT
        if self.pull_back is None:
            self.pull_back = pull_back_at_operands(self.fun, is_whole, self.has_references)

    @property
    def is_compiled(self) -> bool:
        """Whether it runs as one compiled program; then the results are always new arrays."""
        return self.run is not self.fun

    @functools.cached_property
    def inlined(self) -> Callable[..., Any]:
        """`fun`, to be called while JAX traces another program. JAX traces a pull-back once for
        operands of the same types, and then copies its operations into the program."""
        is_pull_back = self.primitive is None and self.is_kept
        if not is_pull_back or self.has_rules or self.has_references or self.is_run_once:
            return self.fun
        return jax.jit(self.fun, inline=_jax.INLINED_WHEN_TRACED)

    def forward(
        self, active_groups: Sequence[tuple[int, ...]], operands: Sequence[Any], orders: int
    ) -> Computation:
        """Returns a computation that also returns the residuals of derivatives up to `orders`.

        Returns this computation if JAX cannot differentiate it; JAX's error is raised only when a
        gradient is asked for. `active_groups`: as for `add_residuals`.
        """
        has_types = self.primitive is _jax.JIT
        key = active_groups, orders, None if has_types else tuple(map(_jax.type_key, operands))
        known: Computation | None = self.derived.get(key)
        if known is not None:
            return known
        types = list(map(jax.typeof, operands))
        forward = self
        try:
            with without_editing():
                for _ in range(orders):
                    forward = _add_residuals(forward, active_groups, types)
        except Exception:
            pass
        self.derived[key] = forward
        return forward

    def closed_over(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns the arrays, besides operands, that a custom rule in its programs closes over."""
        key = "closed over", *map(_jax.type_key, operands)
        known: Sequence[Any] | None = self.derived.get(key)
        if known is None:
            program = jax.make_jaxpr(self.run)(*map(jax.typeof, operands))
            known = self.derived[key] = _jax.program_facts(program).arrays
        return known

    def refuse_second_run(self, active: tuple[int, ...], operands: Sequence[Any]) -> None:
        """Raises JAX's error, or NotImplementedError, for a computation with effects that has saved
        no residuals: to differentiate the computation, it would have to run again."""
        with without_editing():
            _add_residuals(self, (active,), list(map(jax.typeof, operands)))
        raise NotImplementedError(
            f"{self.name} has effects, and ran where the tape could not save what its derivative "
            "needs (it uses a jax.Ref, or rules were in force): to differentiate it, it would have "
            "to run once more. Call the functions with effects outside of it, and pass their "
            "results in"
        )

    def pull(
        self, active: tuple[int, ...], seeded: tuple[int, ...], count: int, sparse: tuple[bool, ...]
    ) -> Computation:
        """Returns the pull-back ``(*operands, *results, *cotangents) -> {position: cotangent}``.

        Args:
          active: the operands that get cotangents; `position` counts in `active`.
          seeded: the results that have a cotangent.
          count: the number of operands.
          sparse: for each active operand, whether its cotangent may be slices.
        """
        key = active, seeded, count, sparse
        known: Computation | None = self.derived.get(key)
        if known is None:
            pull_back = self.pull_back
            into_residual = self.count is not None and any(k >= self.count for k in seeded)
            if self.has_rules and not into_residual:
                pull_back = _for_linked(self.called, pull_back, self.has_nones)
            pull = _pull_function(pull_back, active, seeded, count)
            if any(sparse):
                pull = _pull_slices(pull, sparse)
            name = f"pull {self.name}"
            known = self.derived[key] = Computation(
                pull,
                name,
                compiled(pull, name) if self.is_kept else pull,
                saves=self.saves or self.count is not None,
                is_run_once=self.is_run_once,
                is_kept=self.is_kept,
                has_rules=self.has_rules,
                has_references=self.has_references,
            )
        return known


def compiled(fun: Fun, name: str) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        return fun(*operands)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run)


def _add_residuals(
    base: Computation, active_groups: Sequence[tuple[int, ...]], types: Sequence[Any]
) -> Computation:
    """Returns the computation with the residuals of one more order of derivative."""
    fun, pull_back, count, tree, constant_results = add_residuals(
        base.fun,
        base.pull_back,
        base.count_without_last_residuals,
        active_groups,
        types,
        base.primitive is _jax.REMAT,
        base.has_rules,
    )
    return replace(
        base,
        fun=fun,
        run=compiled(fun, base.name) if base.is_kept else fun,
        pull_back=pull_back,
        saves=True,
        constants=0,
        refused={},
        has_effects=False,
        count=base.count or count,
        tree=base.tree or tree,
        count_without_last_residuals=count,
        constant_results=base.constant_results | constant_results,
    )


def _pull_function(
    pull_back: PullBack, active: tuple[int, ...], seeded: tuple[int, ...], count: int
) -> Callable[..., Any]:
    def pull(*arrays: Any) -> dict[int, Any]:
        first = len(arrays) - len(seeded)
        cotangents = dict(zip(seeded, arrays[first:], strict=True))
        with without_editing():
            return pull_back(active, arrays[:count], arrays[count:first], cotangents)

    return pull


def trace_for_types(called: Fun, types: Sequence[Any]) -> Graph:
    return graph_of(jax.make_jaxpr(lambda *args: jax.tree.leaves(called(*args)))(*types))


def trace_operation(called: Fun, types: Sequence[Any], source_info: Any) -> Graph:
    """Traces an operation as it was called; each of its operands is an input of the graph.
    `source_info`: JAX's source info of the call."""
    scope, settings = _jax.equation_context(source_info, None)

    def run(*operands: Any) -> list[Any]:
        with scope, settings:
            return called(*operands)

    return trace_for_types(run, types)


def links_of(called: Fun, types: Sequence[Any], active: Collection[int]) -> Sequence[int]:
    """Returns, for each result of an operation, the mask of the connected active operands.

    (Where the derivative of a program runs a rule, as in a loop, JAX makes zeros of the rule's
    None. If a rule is recorded by itself, `transpose_derivative` tells None from zeros.)

    Args:
      active: the positions of the active operands. A rule may refuse to be differentiated with
        respect to other operands, and after that JAX cannot use the rule.
    """
    chosen = [_jax.has_gradient(aval) and i in active for i, aval in enumerate(types)]
    with without_editing():
        return Walk().region(trace_for_types(called, types), of_each(chosen))


def _for_linked(called: Fun, pull_back: PullBack, has_nones: bool) -> PullBack:
    """Wraps a pull-back to return cotangents of exactly the connected operands (`links_of`). JAX
    may have zeros where a custom VJP returns None, and no cotangent where a custom JVP returns
    zeros. `has_nones`: whether a custom VJP may return None."""

    def linked_only(
        active: tuple[int, ...],
        operands: Sequence[Any],
        results: Sequence[Any],
        cotangents: Mapping[int, Any],
    ) -> dict[int, Any]:
        found = pull_back(active, operands, results, cotangents)
        if not has_nones and len(found) == len(active):
            return found
        rows = links_of(called, list(map(jax.typeof, operands)), active)
        return {
            place: found[place] if place in found else jnp.zeros_like(operands[i])
            for place, i in enumerate(active)
            if any(rows[k] >> i & 1 for k in cotangents)
        }

    return linked_only


def _pull_slices(pull: Callable[..., Any], sparse: tuple[bool, ...]) -> Callable[..., Any]:
    """Wraps a pull-back: a cotangent that is zeros except in some rows becomes `IndexedSlices`.

    `sparse`: for each position, whether its cotangent may be slices.
    """

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


def _add(left: Any, right: Any) -> list[Any]:
    return [jnp.add(left, right)]


add_computation = Computation(_add, "add", compiled(_add, "add"))
