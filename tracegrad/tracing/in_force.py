"""The rules in force: the rules of enclosing traces, applied to functions that are differentiated.

The program of a train step that differentiates its loss has only the differentiated loss: custom
gradients are gone, and an edit of the gradient flow would do nothing. So while a function with
rules is being traced, its rules are *in force*: `tracegrad.grad` and its like, tapes and
`gradients` inside the function ask this module for the rules, and apply the rules to the function
before they differentiate it.

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
from tracegrad.ir import Graph, GraphError, engine
from tracegrad.ir.errors import NoMatchError
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.ir.scopes_in_scans import add_scope_in_scans
from tracegrad.tracing.argument_paths import (
    derivatives_of_argument,
    known_by_path,
    known_paths,
)
from tracegrad.tracing.earlier_derivatives import warn_of_earlier_derivatives
from tracegrad.tracing.graphs import Rule, function_name, graph
from tracegrad.tracing.misdirected_rules import find_misdirected, mark_inputs
from tracegrad.tracing.overriding import ForwardingTrace
from tracegrad.tracing.parted import Parted
from tracegrad.tracing.signatures import leaves_of_call

_key = _jax.user_context()
_numbers = itertools.count()
_KEPT_SIGNATURES = 64  # of one function


class RuleSet:
    """The rules of one trace of a function, and how often each rule has matched.

    Each trace has a rule set of its own. So whether a rule matches is decided for the signature
    that is traced, whatever was traced before or is traced on another thread: JAX caches the inner
    functions under the `key` of the rule set.

    Args:
      acts_everywhere: whether the rules act on every function that is traced inside the block, not
        only on functions that are differentiated there.
      key: rule sets with equal keys share JAX's cached traces; default: a key that the rule set
        shares with others until `rules_in_force` returns one of them. Until then no trace depends
        on the rules.
    """

    def __init__(self, rules: Sequence[Rule], *, acts_everywhere: bool = False, key: Any = None):
        self.rules = tuple(rules)
        self.acts_everywhere = acts_everywhere
        if key is None:
            key = next(_numbers) if _in_force.rule_sets else _in_force.shared_key
        self.key = key
        # By the index of the rule: how often it matched; the error of its latest miss.
        self._matches: Counter[int] = Counter()
        self._missed: dict[int, NoMatchError] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RuleSet) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def count_matches(self) -> Counter[int]:
        """By the index of the rule."""
        return self._matches.copy()

    def apply(self, program: Graph, counts_before: Counter[int] | None = None) -> Graph:
        """Applies the rules to a program that is about to be differentiated. A rule may match
        nothing.

        `counts_before`: how often each rule had matched before the program was traced. If a rule
        has matched since then, the rule acts on derivatives that the program takes: then the rule's
        method `apply_to_outer`, if any, is applied to the program instead of the rule.
        """
        is_inner = _INNER in _in_force.rule_sets
        for place, rule in enumerate(self.rules):
            if is_inner and getattr(rule, "for_the_outermost", False):
                continue
            is_outer = counts_before is not None and self._matches[place] > counts_before[place]
            rule = getattr(rule, "apply_to_outer", rule) if is_outer else rule
            try:
                with without_editing():
                    program = _apply_rule(rule, program)
            except NoMatchError as error:
                if not self.acts_everywhere:  # rules that act everywhere are not required to match
                    self._missed[place] = error.with_traceback(None)
                continue
            self._matches[place] += 1
        return program

    def refuse_outer(self, program: Graph, outer: Mapping[Any, Sequence[Any]]) -> None:
        """Raises GraphError for a rule for parameters that does not reach an outer derivative.

        `outer`: for each input of the program, the derivatives that are taken around the program.
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
        """Applies the rules to the traced function itself. Raises NoMatchError for a rule that
        matches neither here nor in a function that was differentiated inside."""
        if any(hasattr(rule, "where") for rule in self.rules):
            warn_of_earlier_derivatives(program)
        before, self._missed = self._missed, {}
        for place, rule in enumerate(self.rules):
            for words in find_misdirected(program, rule):
                if not self._matches[place]:
                    # The rule would match the parameter here, without effect on the gradient.
                    raise before[place].with_text()
                warn_where_called(f"{rule!r} {words}", UserWarning)
        program = self.apply(program, Counter())
        # The errors of differentiated functions say more. (Errors hold graphs, and JAX's cache keys
        # hold this rule set, so it keeps no error.)
        missed, self._missed = self._missed | before, {}
        for place in range(len(self.rules)):
            if not self._matches[place]:
                raise missed[place].with_text()
        for rule_set in _in_force.rule_sets:
            if rule_set.acts_everywhere:
                program = rule_set.apply(program)
        return program


# A marker without rules. It is in force, and part of JAX's cache key, while a function is traced
# whose gradient is taken, so that `apply` recognises a gradient inside that function.
_INNER = RuleSet((), key="inside of a gradient")


def _apply_rule(rule: Rule, program: Graph) -> Graph:
    """Raises TypeError if the rule returns anything but a `Graph`."""
    result = rule(program)
    if not isinstance(result, Graph):
        raise TypeError(
            f"a rule is a function Graph -> Graph; {function_name(rule)} returned "
            f"{type(result).__name__}"
        )
    return result


class _InForce(threading.local):
    rule_sets: tuple[RuleSet, ...] = ()  # the innermost first
    trace: Any = None  # the current JAX trace when the innermost rule set came in force

    def __init__(self) -> None:
        self.shared_key = next(_numbers)  # of rule sets on which no trace has depended


_in_force = _InForce()


@contextmanager
def in_force(rule_set: RuleSet) -> Iterator[None]:
    """A block in which the rules of `rule_set` are in force; they apply before outer rules."""
    if not rule_set.rules:
        yield
        return
    try:
        with _put_in_force((rule_set, *_in_force.rule_sets)), engine.derivatives_by_rules():
            yield
    except BaseException:
        rule_set._missed.clear()  # `finish` will not run
        raise


@contextmanager
def _put_in_force(rule_sets: tuple[RuleSet, ...], *, same_key: bool = False) -> Iterator[None]:
    before = _in_force.rule_sets, _in_force.trace
    _in_force.rule_sets, _in_force.trace = rule_sets, _jax.current_trace(None)
    try:
        with nullcontext() if same_key else _key(tuple([rule_set.key for rule_set in rule_sets])):
            yield
    finally:
        _in_force.rule_sets, _in_force.trace = before


def trace_under_rules(
    rules: Sequence[Rule],
    trace: Callable[[], Graph],
    earlier: dict[Any, tuple[Any, Counter[int]]] | None = None,
    signature: Any = None,
) -> Graph:
    """Traces a function with rules in force, then applies the rules to its graph.

    `earlier`: maps the signatures of earlier calls of the function with these rules to the keys of
    their rule sets, and to how often the rules matched inside. So for an equal signature JAX does
    not trace (and compile) the inner functions again."""
    if not rules and not _in_force.rule_sets:
        return trace()
    rule_set = RuleSet(rules)
    if earlier is not None and signature in earlier:
        rule_set.key, matches = earlier[signature]
        rule_set._matches += matches
    with in_force(rule_set):
        traced = trace()
    if earlier is not None and rule_set.key != _in_force.shared_key:
        if len(earlier) >= _KEPT_SIGNATURES:
            earlier.clear()
        earlier[signature] = rule_set.key, rule_set.count_matches()
    graph = rule_set.finish(traced)
    if not graph.variables and not graph.assigned:  # a rule may make a new graph
        graph = replace(graph, variables=traced.variables, assigned=traced.assigned)
    return replace(graph, updates=traced.updates, loses=traced.loses)


def without_rules() -> AbstractContextManager[None]:
    """A block without rules in force, for the user's gradient functions, which are not edited."""
    return _put_in_force(())


def without_editing() -> AbstractContextManager[None]:
    """A block without rules in force, in which JAX differentiates an edited program: if a
    derivative rule of JAX or of a library takes a derivative itself, no rule edits that derivative.

    JAX's cache key is unchanged: a rule of `jax.custom_jvp` must return the same tree as its
    function, and the trees of some libraries contain programs that JAX traced.
    """
    return _put_in_force((), same_key=True)


def rules_in_force() -> tuple[RuleSet, ...]:
    """The rule sets of this thread, innermost first; caches use them as part of their keys.

    No rules are in force inside a function with a derivative rule of its own: JAX may run the
    derivative rule instead, without rules in force, and both must return the same tree (see
    `without_editing`).
    """
    rule_sets = _in_force.rule_sets
    if rule_sets:
        _in_force.shared_key = next(_numbers)
    within = _jax.outward(_jax.current_trace(None), _in_force.trace) if rule_sets else ()
    return () if any(map(_jax.is_of_a_custom_rule, within)) else rule_sets


def rules_for_recorded() -> tuple[RuleSet, ...]:
    """The rule sets that act on a recorded program, innermost first: without the rule set of a
    block that applies its rules to each operation when the operation runs."""
    rule_sets = rules_in_force()
    for trace in _jax.outward(_jax.current_trace(None)) if rule_sets else ():
        if not isinstance(trace, ForwardingTrace):
            break
        rule_sets = tuple([rule_set for rule_set in rule_sets if rule_set is not trace.rule_set])
    return rule_sets


def apply_rules_in_force(program: Graph, rule_sets: Sequence[RuleSet] | None = None) -> Graph:
    """Applies the rules in force, or `rule_sets`. A rule may match nothing."""
    for rule_set in rules_in_force() if rule_sets is None else rule_sets:
        program = rule_set.apply(program)
    return program


def under_rules(
    fun: Callable[..., Any],
    name: str,
    lower: Callable[[Graph], Callable[..., Any]] = Graph.to_callable,
    *,
    forward: bool = False,
    paths: Callable[[], Sequence[str]] | None = None,
) -> Callable[..., Any]:
    """Applies the rules in force to `fun`; returns the function to differentiate instead of `fun`.

    A rule with `for_the_outermost` is not applied if the gradient of `fun` is taken inside another
    function whose gradient is taken.

    Args:
      fun: takes and returns trees; their traced leaves are differentiated.
      name: the name of the program in messages.
      lower: makes a function of the edited program.
      forward: whether `fun` is differentiated in forward mode: then this is no gradient.
      paths: returns the paths of the leaves of the arguments; default: by parameter names.
    """
    rule_sets = rules_in_force()
    if not rule_sets:
        return fun

    def edited(*args: Any, **kwargs: Any) -> Any:
        # As in `jax.grad`, leaves that are not traced stay Python values or constants.
        arguments = Parted.of((args, kwargs), _jax.is_tracer)
        given, rest = arguments.chosen, arguments.rest
        others: list[Parted] = []  # the leaves of the result that are not traced
        names = paths() if paths else [x.name for x in leaves_of_call(fun, args, kwargs)]
        own = arguments.of_chosen(names)
        known = known_paths(given, own)

        def of_traced(*given: Any) -> Any:
            args, kwargs = rest.combine(given)
            with known_by_path(given, known):
                results = Parted.of(fun(*args, **kwargs), _jax.is_tracer)
            others[:] = [results.rest]
            return results.chosen

        of_traced.__name__ = of_traced.__qualname__ = name

        counts = [rule_set.count_matches() for rule_set in rule_sets]
        with _put_in_force(rule_sets if forward or _INNER in rule_sets else (*rule_sets, _INNER)):
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
        with _put_in_force(rule_sets):
            for rule_set, counts_before in zip(rule_sets, counts, strict=True):
                rule_set.refuse_outer(program, outer)
                program = rule_set.apply(program, counts_before)
            run = under_rules_already(program, lower)
            if moved:
                all_rules = [rule for rule_set in rule_sets for rule in rule_set.rules]
                given = mark_inputs(given, list(zip(known, own, strict=True)), moved, all_rules)
        results = run(*given)
        return others[0].combine(results)

    return edited


def _differentiated(program: Graph, given: Sequence[Any]) -> tuple[bool, ...]:
    """Says for each input of a program whether the current transformation differentiates it; () if
    a transformation further out differentiates the inputs."""
    here = _jax.current_trace_outside_of(ForwardingTrace)
    moved = [_jax.trace_of(leaf) is here for leaf in jax.tree.leaves(given)]
    return (*moved, *[False] * (len(program.inputs) - len(moved))) if any(moved) else ()


def under_rules_already(
    program: Graph, lower: Callable[[Graph], Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns ``lower(program)`` in a scope which says that the rules in force were applied to the
    program: a traced function that differentiates the program does not apply them again."""
    if not rules_in_force():
        return lower(program)
    return jax.named_call(lower(add_scope_in_scans(program, UNDER_RULES)), name=UNDER_RULES)
