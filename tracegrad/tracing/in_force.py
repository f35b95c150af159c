"""The rules in force: the rules of the enclosing traces, which act where differentiation happens.

The program of a train step that differentiates its loss holds only the differentiated loss: custom
gradients are gone, and an edit of how gradients flow would do nothing. So while a function with
rules is being traced, its rules are *in force*: `tracegrad.grad` and its like, tapes and
`gradients` inside the function ask here for the rules, and apply them to the function that they
are about to differentiate.

JAX caches the traces of jitted functions, of loops and of branches. The rules in force are part of
JAX's cache key, so that a trace made under some rules is not reused under others.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError
from tracegrad.ir.engine import engine
from tracegrad.ir.errors import NoMatchError
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.ir.scopes_in_scans import in_scope_in_scans
from tracegrad.tracing.argument_paths import (
    argument_path,
    derivatives_of_argument,
    known_by_path,
)
from tracegrad.tracing.graphs import Rule, function_name, graph
from tracegrad.tracing.passed_by import marked, passed_by
from tracegrad.tracing.signatures import leaves_of_call
from tracegrad.tracing.taken_before import warn_of_taken_before
from tracegrad.variables.overriding import ForwardingTrace
from tracegrad.variables.parted import Parted

_key = _jax.user_context()
_numbers = itertools.count()
_KEPT_SIGNATURES = 64  # of one function


class Force:
    """Rules, and how often each of them has matched since they came in force.

    Each trace of a function has a `Force` of its own. So whether a rule matches is decided for the
    signature that is traced, whatever was traced before or is traced on another thread: JAX caches
    the inner functions under the `key` of the force.

    Args:
      everywhere: whether the rules act on every function that is traced inside the block, not only
        on functions that are differentiated there.
      key: forces with equal keys share JAX's cached traces; default: a unique key.
    """

    def __init__(self, rules: Sequence[Rule], *, everywhere: bool = False, key: Any = None):
        self.rules = tuple(rules)
        self.everywhere = everywhere
        self.key = next(_numbers) if key is None else key
        # By the index of the rule: how often it matched; the error of its latest miss.
        self._matches: Counter[int] = Counter()
        self._missed: dict[int, NoMatchError] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Force) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def matches(self) -> Counter[int]:
        """Returns how often each rule has matched, by its index."""
        return self._matches.copy()

    def apply(self, program: Graph, since: Counter[int] | None = None) -> Graph:
        """Applies the rules to a program that is about to be differentiated; a rule may match
        nothing in it.

        `since`: how often each rule had matched before the program was traced. A rule that has
        matched since then acts on derivatives that the program takes; if it has a method `again`,
        that is applied to the program.
        """
        is_inner = _INNER in _in_force.forces
        for place, rule in enumerate(self.rules):
            if is_inner and getattr(rule, "for_the_outermost", False):
                continue
            is_inside = since is not None and self._matches[place] > since[place]
            rule = getattr(rule, "again", rule) if is_inside else rule
            try:
                with differentiating():
                    program = _applied(rule, program)
            except NoMatchError as error:
                if not self.everywhere:  # rules that act everywhere are not required to match
                    self._missed[place] = error.with_traceback(None)
                continue
            self._matches[place] += 1
        return program

    def refuse_outer(self, program: Graph, outer: Mapping[Any, Sequence[Any]]) -> None:
        """Raises GraphError for a rule for parameters that does not reach an outer derivative.

        `outer`: for inputs of the program, the derivatives that are taken around it.
        """
        for rule in self.rules:
            found: Any = getattr(rule, "parameters_in", lambda _: {})(program)
            tangents = getattr(rule, "has_tangents", True)
            for value, path in found.items():
                around = map(_jax.trace_of, outer.get(value, ()))
                if any(tangents or isinstance(each, _jax.ReverseTrace) for each in around):
                    raise GraphError(
                        f"{rule!r}: a gradient with respect to {path} is taken of "
                        f"{program.name}, and another one around it, which the rule does not "
                        "reach: by a function of JAX that was imported by name (`from jax import "
                        "grad`) or made before the trace. Call jax.grad there, inside of the "
                        "traced function; or give the rule to the inner loss alone: "
                        "jax.grad(tracegrad.rewrite(loss, rule))"
                    )

    def finish(self, program: Graph) -> Graph:
        """Applies the rules to the traced function itself. Raises NoMatchError for a rule that has
        matched neither here nor in a function that was differentiated inside."""
        if any(hasattr(rule, "where") for rule in self.rules):
            warn_of_taken_before(program)
        before, self._missed = self._missed, {}
        for place, rule in enumerate(self.rules):
            for words in passed_by(program, rule):
                if not self._matches[place]:
                    # The rule would match the parameter here, without effect on the gradient.
                    raise before[place].with_text()
                warn_where_called(f"{rule!r} {words}", UserWarning)
        program = self.apply(program, Counter())
        # The errors of differentiated functions say more. (Errors hold graphs, and cache keys hold
        # this force: so none is kept.)
        missed, self._missed = self._missed | before, {}
        for place in range(len(self.rules)):
            if not self._matches[place]:
                raise missed[place].with_text()
        for force in _in_force.forces:
            if force.everywhere:
                program = force.apply(program)
        return program


# A marker without rules. It is in force while a function is traced of which the gradient is taken,
# so that `apply` knows gradients inside that function; there it is part of JAX's cache key.
_INNER = Force((), key="inside of a gradient")


def _applied(rule: Rule, program: Graph) -> Graph:
    """Returns the result of a rule. Raises TypeError, naming the rule, if it is not a `Graph`."""
    result = rule(program)
    if not isinstance(result, Graph):
        raise TypeError(
            f"a rule is a function Graph -> Graph; {function_name(rule)} returned "
            f"{type(result).__name__}"
        )
    return result


class _InForce(threading.local):
    forces: tuple[Force, ...] = ()  # the innermost first
    since: Any = None  # JAX's trace that was current when the innermost came in force


_in_force = _InForce()


@contextmanager
def in_force(force: Force) -> Iterator[None]:
    """A block in which the rules of `force` are in force, and apply before the outer ones."""
    if not force.rules:
        yield
        return
    try:
        with _only((force, *_in_force.forces)), engine.derivatives_by_rules():
            yield
    except BaseException:
        force._missed.clear()  # `finish` will not run
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


def traced_under(
    rules: Sequence[Rule],
    trace: Callable[[], Graph],
    earlier: dict[Any, tuple[Any, Counter[int]]] | None = None,
    signature: Any = None,
) -> Graph:
    """Traces a function with rules in force, then applies the rules to its graph.

    `earlier`: of earlier traces of the function with these rules, by the signature of the call: the
    key under which JAX keeps the inner functions that it traced, and how often the rules matched in
    these. JAX does not trace (and compile) them again for equal signatures."""
    if not rules and not _in_force.forces:
        return trace()
    force = Force(rules)
    if earlier is not None and signature in earlier:
        force.key, matches = earlier[signature]
        force._matches += matches
    with in_force(force):
        traced = trace()
    if earlier is not None:
        if len(earlier) >= _KEPT_SIGNATURES:
            earlier.clear()
        earlier[signature] = force.key, force.matches()
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
    """A block without rules in force, for gradient functions of the user, which are not edited."""
    return _only(())


def differentiating() -> AbstractContextManager[None]:
    """A block without rules in force, in which JAX differentiates an edited program: if a
    derivative rule of JAX or of a library differentiates something itself, that is not edited.

    JAX's cache key stays that of the rules: a rule of `jax.custom_jvp` must return the same tree as
    its function, and the trees of some libraries contain programs that JAX traced.
    """
    return _only((), same_key=True)


def rules_in_force() -> tuple[Force, ...]:
    """Returns the forces of this thread, innermost first; caches use them as part of their keys.

    Inside a function with a derivative rule of its own, no rules are in force: JAX may run the
    derivative rule instead, with no rules in force, and both must return the same (see
    `differentiating`).
    """
    forces = _in_force.forces
    within = _jax.outward(_jax.current_trace(None), _in_force.since) if forces else ()
    return () if any(map(_jax.is_of_a_custom_rule, within)) else forces


def rules_for_recorded() -> tuple[Force, ...]:
    """Returns the forces that act on a recorded program, innermost first. Leaves out those of a
    block that applies its rules to each operation at the moment the operation runs."""
    forces = rules_in_force()
    for trace in _jax.outward(_jax.current_trace(None)) if forces else ():
        if not isinstance(trace, ForwardingTrace):
            break
        forces = tuple([force for force in forces if force is not trace.force])
    return forces


def apply_in_force(program: Graph, forces: Sequence[Force] | None = None) -> Graph:
    """Returns a program after the rules in force, or after `forces`; a rule may match nothing."""
    for force in rules_in_force() if forces is None else forces:
        program = force.apply(program)
    return program


def under_rules(
    fun: Callable[..., Any],
    name: str,
    lower: Callable[[Graph], Callable[..., Any]] = Graph.to_callable,
    *,
    forward: bool = False,
    paths: Callable[[], Sequence[str]] | None = None,
) -> Callable[..., Any]:
    """Returns a function with the rules in force applied, to differentiate instead of `fun`.

    A rule with `for_the_outermost` is not applied if the gradient of `fun` is taken inside another
    function whose gradient is taken.

    Args:
      fun: takes and returns trees; their traced leaves are differentiated.
      name: the name of the program in messages.
      lower: makes a function of the edited program.
      forward: whether `fun` is differentiated in forward mode, so that no gradient is taken here.
      paths: returns the paths of the leaves of the arguments; default: by parameter names.
    """
    forces = rules_in_force()
    if not forces:
        return fun

    def edited(*args: Any, **kwargs: Any) -> Any:
        # As in `jax.grad`, leaves that are not traced stay Python values or constants.
        arguments = Parted.of((args, kwargs), _jax.is_tracer)
        given, rest = arguments.chosen, arguments.rest
        others: list[Parted] = []  # the leaves of the result that are not traced
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

        before = [force.matches() for force in forces]
        with _only(forces if forward or _INNER in forces else (*forces, _INNER)):
            program = graph(of_traced, *given)
        program = replace(
            program,
            hints=(*known, *program.hints[len(known) :]),
            aliases=(*own, *program.hints[len(own) :]),
            differentiated=() if forward else _differentiated(program, given),
        )
        moved = program.differentiated
        here = _jax.current_trace_outside_of(ForwardingTrace)
        outer = {
            value: [each for each in derivatives_of_argument(x) if _jax.trace_of(each) is not here]
            for value, x in zip(program.inputs, given, strict=False)
        }
        with _only(forces):
            for force, since in zip(forces, before, strict=True):
                force.refuse_outer(program, outer)
                program = force.apply(program, since)
            run = under_rules_already(program, lower)
            if moved:
                all_rules = [rule for force in forces for rule in force.rules]
                given = marked(given, list(zip(known, own, strict=True)), moved, all_rules)
        results = run(*given)
        return others[0].combine(results)

    return edited


def _differentiated(program: Graph, given: Sequence[Any]) -> tuple[bool, ...]:
    """Returns, for each input of a program, whether the current transformation differentiates it;
    () if it differentiates none, since a transformation further out does."""
    here = _jax.current_trace_outside_of(ForwardingTrace)
    moved = [_jax.trace_of(leaf) is here for leaf in jax.tree.leaves(given)]
    return (*moved, *[False] * (len(program.inputs) - len(moved))) if any(moved) else ()


def under_rules_already(
    program: Graph, lower: Callable[[Graph], Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns ``lower(program)``, marked as a program to which the rules in force were applied, so
    that they are not applied to it again when it is differentiated inside a traced function."""
    if not rules_in_force():
        return lower(program)
    return jax.named_call(lower(in_scope_in_scans(program, UNDER_RULES)), name=UNDER_RULES)
