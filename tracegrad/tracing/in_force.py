"""The rules in force: those of an enclosing trace, which act where differentiation happens.

A train step that differentiates its loss holds, in its own program, only what is left of the loss:
custom gradients are gone, and an edit of how gradients flow would do nothing. So while a function
with rules is being traced, `tracegrad.grad` and its like, tapes and `gradients` inside it ask here
for the rules, and apply them to what they are about to differentiate.

JAX keeps the traces of jitted functions, of loops and of branches; what is in force is part of the
key under which it does, so that a trace made under some rules is not found under others.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.dependence import flat_forms
from tracegrad.ir.engine import engine
from tracegrad.ir.errors import NoMatchError
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.tracing.argument_paths import argument_path, known_by_path
from tracegrad.tracing.graphs import Rule, function_name, graph
from tracegrad.tracing.signatures import leaves_of_call
from tracegrad.variables.overriding import ForwardingTrace
from tracegrad.variables.parted import Parted

_key = _jax.user_context()
_numbers = itertools.count()


class Force:
    """Rules, and which of them have matched something since they were first in force.

    Each trace of a function has one of its own, so that whether a rule matches is decided for the
    signature that is traced, and by nothing that was traced before or is on another thread: what
    JAX keeps of inner functions is kept under its `key`.

    `everywhere`: they act on every traced function inside the block, not only on what is
    differentiated there. Those of equal `key` (default: none other has it) are one to JAX's caches.
    """

    def __init__(self, rules: Sequence[Rule], *, everywhere: bool = False, key: Any = None):
        self.rules = tuple(rules)
        self.everywhere = everywhere
        self.key = next(_numbers) if key is None else key
        self._matches: Counter[int] = Counter()  # how often each matched, by place
        self._missed: dict[int, NoMatchError] = {}  # why, by the rule's place
        self._passed_by: dict[int, set[Any]] = {}  # the shapes of what was differentiated then

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Force) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def matches(self) -> Counter[int]:
        """How often each rule has matched, by place."""
        return self._matches.copy()

    def apply(self, program: Graph, since: Counter[int] | None = None) -> Graph:
        """Applies them to what is about to be differentiated: a rule may match nothing there.

        `since`: how often each had matched before the program was traced. A rule `of_parameters`
        that has matched since then acts on gradients inside of the program, and not on its own.
        """
        is_inner = _INNER in _in_force.forces
        for place, rule in enumerate(self.rules):
            if is_inner and getattr(rule, "for_the_outermost", False):
                continue
            is_inside = since is not None and self._matches[place] > since[place]
            if is_inside and getattr(rule, "of_parameters", False):
                continue
            try:
                with differentiating():
                    program = _applied(rule, program)
            except NoMatchError as error:
                if not self.everywhere:  # else nobody asks
                    self._missed[place] = error.with_traceback(None)
                    each = zip(program.inputs, program.differentiated, strict=False)
                    shapes = {_shape(value) for value, is_moved in each if is_moved}
                    self._passed_by.setdefault(place, set()).update(shapes)
                continue
            self._matches[place] += 1
        return program

    def finish(self, program: Graph) -> Graph:
        """Applies them to the traced function itself. A rule that matches nothing there must have
        matched before."""
        before, self._missed = self._missed, {}
        for place in set(before) - set(self._matches):
            # A parameter that was differentiated inside under no path of its own (from a list of
            # leaves, after a computation, as a part of one flat array): here a rule would do
            # nothing, and nobody would know.
            found: Any = getattr(self.rules[place], "parameters_in", lambda _: {})(program)
            shapes = {*map(_shape, found), *map(_shape, flat_forms(program, found))}
            if not self._passed_by[place].isdisjoint(shapes):
                raise before[place].with_text()
        program = self.apply(program, Counter())
        # What was differentiated is what a rule was meant for. (They hold graphs, and keys of
        # programs hold this.)
        missed, self._missed = self._missed | before, {}
        for place in range(len(self.rules)):
            if not self._matches[place]:
                raise missed[place].with_text()
        for force in _in_force.forces:
            if force.everywhere:
                program = force.apply(program)
        return program


# In force, beside others, where a function is traced of which somebody takes the gradient: that of
# gradients inside. It has no rules, and is part of the keys of what is traced there.
_INNER = Force((), key="inside of a gradient")


def _shape(value: Any) -> Any:
    return getattr(value.aval, "shape", None)


def _applied(rule: Rule, program: Graph) -> Graph:
    """What a rule makes of a program. Raises TypeError, naming the rule, if that is no `Graph`."""
    result = rule(program)
    if not isinstance(result, Graph):
        raise TypeError(
            f"a rule is a function Graph -> Graph; {function_name(rule)} returned "
            f"{type(result).__name__}"
        )
    return result


class _InForce(threading.local):
    forces: tuple[Force, ...] = ()  # the innermost first
    since: Any = None  # the trace around the innermost


_in_force = _InForce()


@contextmanager
def in_force(force: Force) -> Iterator[None]:
    """A block in which these rules are in force, before those that are already."""
    if not force.rules:
        yield
        return
    try:
        with _only((force, *_in_force.forces)), engine.derivatives_by_rules():
            yield
    except BaseException:
        force._missed.clear()  # nobody will ask
        raise


@contextmanager
def _only(forces: tuple[Force, ...], *, same_key: bool = False) -> Iterator[None]:
    before = _in_force.forces, _in_force.since
    _in_force.forces, _in_force.since = forces, _jax.current_trace(None)
    try:
        with nullcontext() if same_key else _key(tuple([force.key for force in forces])):
            yield
    finally:
        _in_force.forces, _in_force.since = before


def traced_under(rules: Sequence[Rule], trace: Callable[[], Graph]) -> Graph:
    """The graph of a function that is traced while rules are in force, after these."""
    force = Force(rules)
    with in_force(force):
        traced = trace()
    graph = force.finish(traced)
    if not graph.variables and not graph.assigned:  # a rule may make a new graph
        graph = replace(graph, variables=traced.variables, assigned=traced.assigned)
    return replace(
        graph,
        updates=traced.updates,
        changes_structure=traced.changes_structure,
        loses=traced.loses,
    )


def without_rules() -> AbstractContextManager[None]:
    """A block in which none is in force: a gradient that somebody wrote is theirs as it is."""
    return _only(())


def differentiating() -> AbstractContextManager[None]:
    """A block in which JAX differentiates what was edited: what its rules, and those of libraries
    for their operations, differentiate in their turn is theirs as it is.

    JAX's caches are those of the rules: a rule of `jax.custom_jvp` is to return what the function
    has returned, in whose tree libraries have programs that JAX traced.
    """
    return _only((), same_key=True)


def rules_in_force() -> tuple[Force, ...]:
    """What is in force, the innermost first: a part of every key that depends on it.

    Nothing is in a function that has a rule of derivatives: JAX runs that rule instead, in which
    nothing is either, and which is to return the same (see `differentiating`).
    """
    forces = _in_force.forces
    within = _jax.outward(_jax.current_trace(None), _in_force.since) if forces else ()
    return () if any(map(_jax.is_of_a_custom_rule, within)) else forces


def rules_for_recorded() -> tuple[Force, ...]:
    """Those in force that act on what was recorded, the innermost first: not those whose block has
    given every operation in it another gradient when that was computed, and none before."""
    forces = rules_in_force()
    for trace in _jax.outward(_jax.current_trace(None)) if forces else ():
        if not isinstance(trace, ForwardingTrace):
            break
        forces = tuple([force for force in forces if force is not trace.force])
    return forces


def apply_in_force(program: Graph, forces: Sequence[Force] | None = None) -> Graph:
    """A program with the rules in force applied, or these of them; they may match nothing in it."""
    for force in rules_in_force() if forces is None else forces:
        program = force.apply(program)
    return program


def traced_in_force(trace: Callable[[], Graph]) -> Graph:
    """What `trace` returns, with the rules in force applied."""
    before = [(force, force.matches()) for force in rules_in_force()]
    program = trace()
    for force, since in before:
        program = force.apply(program, since)
    return program


def under_rules(
    fun: Callable[..., Any],
    name: str,
    lower: Callable[[Graph], Callable[..., Any]] = Graph.to_callable,
    *,
    forward: bool = False,
    paths: Callable[[], Sequence[str]] | None = None,
) -> Callable[..., Any]:
    """A function as it is to be `differentiating`: with the rules in force applied to it.

    A rule that is `for_the_outermost` is applied to no function of which the gradient is taken
    inside of another such.

    Args:
      fun: takes and returns trees, of which what is traced is differentiated.
      name: what the program is called in messages.
      lower: how the edited program becomes a function again.
      forward: whether it is differentiated forward, so that nobody takes its gradient here.
      paths: gives those of the leaves of its arguments; default: as the function calls them.
    """
    forces = rules_in_force()
    if not forces:
        return fun

    def edited(*args: Any, **kwargs: Any) -> Any:
        # What is not traced is left to be the Python value or the constant that it is, as in
        # `jax.grad`.
        arguments = Parted.of((args, kwargs), _jax.is_tracer)
        given, rest = arguments.chosen, arguments.rest
        others: list[Parted] = []  # what in the result is not traced
        names = paths() if paths else [x.name for x in leaves_of_call(fun, args, kwargs)]
        own = arguments.of_chosen(names)
        known = [argument_path(x) or name for x, name in zip(given, own, strict=True)]

        def of_traced(*given: Any) -> Any:
            args, kwargs = rest.combine(given)
            with known_by_path(given, known):
                results = Parted.of(fun(*args, **kwargs), _jax.is_tracer)
            others[:] = [results.rest]
            return results.chosen

        of_traced.__name__ = of_traced.__qualname__ = name

        def trace() -> Graph:
            with _only(forces if forward or _INNER in forces else (*forces, _INNER)):
                program = graph(of_traced, *given)
            return replace(
                program,
                hints=(*known, *program.hints[len(known) :]),
                aliases=(*own, *program.hints[len(own) :]),
                differentiated=() if forward else _differentiated(program, given),
            )

        with _only(forces):
            run = under_rules_already(lower(traced_in_force(trace)))
        results = run(*given)
        return others[0].combine(results)

    return edited


def _differentiated(program: Graph, given: Sequence[Any]) -> tuple[bool, ...]:
    """Which inputs of a program the transformation moves in which it is called; () if none: then
    that is done further out."""
    here = _jax.current_trace_outside_of(ForwardingTrace)
    moved = [_jax.trace_of(leaf) is here for leaf in jax.tree.leaves(given)]
    return (*moved, *[False] * (len(program.inputs) - len(moved))) if any(moved) else ()


def under_rules_already(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function to which the rules in force were applied, and so are not applied again."""
    return jax.named_call(fun, name=UNDER_RULES) if rules_in_force() else fun
