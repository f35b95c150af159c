"""What an operation computes: a function of arrays, and what was compiled for it, each known once.

JAX binds an operation under a trace that is not its own by a slow way (it looks the compiled
program up by all its parameters), and takes the fast one for a function that stays the same object.
So a `Computation` has one jitted function, and one for each way in which it is pulled back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.lookups import with_slices
from tracegrad.ir import Graph
from tracegrad.ir.dependence import of_each
from tracegrad.ir.importer import import_program
from tracegrad.tape.derivatives import PullBack, next_forward, pull_back_at_operands
from tracegrad.tracing.in_force import differentiating

Fun = Callable[..., list[Any]]
_numbers = itertools.count()


@dataclass(eq=False)
class Computation:
    """A function of arrays, and what was compiled for it.

    Nothing here holds the computation that it was derived from: then a dropped function is freed
    without the garbage collector.

    Attributes:
      fun: ``(*operands) -> results``, to be traced.
      name: shown in messages, and by profilers.
      run: the function as it is called: `compiled`, or `fun` itself (the default).
      pull_back: how the function is differentiated; default: by JAX's VJP at the operands.
      primitive, params: JAX's, of an operation; None and nothing for a pull.
      captured: the arrays that its programs close over. They are its first operands.
      refused: of arrays that a custom derivative in it closes over, by identity, the name of the
        function that has the derivative.
      constants: how many leading operands are closed over by a custom rule.
      saves: whether a tape runs its `forward` in its place.
      is_run_once: whether that is so in a function that is being traced too: XLA would not make
        one of two loops, branches or calls of the host.
      has_rules: whether a function in it has a derivative of its own.
      has_nones: whether such a derivative may give None for an operand.
      has_effects: whether it prints or calls the host.
      is_simple: whether it closes over no arrays and has no effects.
      is_kept: whether further calls find it: what is derived from it is compiled then.
      called: ``(*operands) -> its own results``, without residuals; default: `fun`.
      count, tree: how many results are the operation's own, and their structure; None: all are.
      before: how many results there were without the residuals of the last order; 0: it has none.
      number: its own for ever, by which it is known after it has gone.
      derived: what was found out about it, and made for it.
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
    is_simple: bool = False
    is_kept: bool = True
    called: Any = None
    count: int | None = None
    tree: Any = None
    before: int = 0
    number: int = field(default_factory=lambda: next(_numbers), init=False)
    derived: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.run = self.run or self.fun
        self.called = self.called or self.fun
        is_whole = self.primitive is _jax.REMAT
        self.pull_back = self.pull_back or pull_back_at_operands(self.fun, is_whole)

    @property
    def is_compiled(self) -> bool:
        """Whether it runs as one program, whose results are arrays that nobody else has."""
        return self.run is not self.fun

    def forward(
        self, groups: Sequence[tuple[int, ...]], operands: Sequence[Any], orders: int
    ) -> Computation:
        """What runs in its place, and saves what that many derivatives of one another need.

        It is this computation itself if JAX has no derivative of it: whoever asks for one is told.
        `groups`: as of `next_forward`.
        """
        has_types = self.primitive is _jax.JIT
        key = groups, orders, None if has_types else tuple(map(_jax.type_key, operands))
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
            name = f"pull {self.name}"
            known = self.derived[key] = Computation(
                pull,
                name,
                compiled(pull, name) if self.is_kept else pull,
                saves=self.saves or self.count is not None,
                is_run_once=self.is_run_once,
                is_kept=self.is_kept,
                has_rules=self.has_rules,
            )
        return known


def compiled(fun: Fun, name: str) -> Callable[..., Any]:
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
    return replace(
        of,
        fun=fun,
        run=compiled(fun, of.name) if of.is_kept else fun,
        pull_back=pull_back,
        saves=True,
        constants=0,
        refused={},
        has_effects=False,
        count=of.count or count,
        tree=of.tree or tree,
        before=count,
    )


def _pull_function(
    pull_back: PullBack, active: tuple[int, ...], given: tuple[int, ...], count: int
) -> Callable[..., Any]:
    def pull(*arrays: Any) -> dict[int, Any]:
        first = len(arrays) - len(given)
        cotangents = dict(zip(given, arrays[first:], strict=True))
        with differentiating():
            return pull_back(active, arrays[:count], arrays[count:first], cotangents)

    return pull


def traced(called: Fun, types: Sequence[Any]) -> Graph:
    """The graph of a function of arrays of these types."""
    return import_program(jax.make_jaxpr(lambda *args: jax.tree.leaves(called(*args)))(*types))


def links_of(called: Fun, types: Sequence[Any]) -> Sequence[int]:
    """For each result of an operation the mask of the operands that are connected to it.

    Of an operand for which a rule gives None the derivative of the program does not tell that.
    """
    with differentiating():
        return Walk().region(traced(called, types), of_each(map(_jax.has_gradient, types)))


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


def _add(left: Any, right: Any) -> list[Any]:
    return [jnp.add(left, right)]


add_computation = Computation(_add, "add", compiled(_add, "add"))
