"""Finds, checks and names the matches at which a rule acts."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from tracegrad import _jax
from tracegrad.ir import (
    CustomGradient,
    Fragment,
    Graph,
    GraphError,
    Node,
    Occurrence,
    Origin,
    Value,
    has_gradient,
    scopes,
)
from tracegrad.ir.authors import code_of_rule
from tracegrad.ir.errors import NoMatchError
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.inlined import region_calls
from tracegrad.ir.occurrence import (
    Path,
    is_call_without_operands,
    is_own_file,
    is_under_rules,
    was_called_by,
)
from tracegrad.ir.parameters import Parameters
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import nearest


def check_selector(where: object) -> None:
    if isinstance(where, Parameters):
        raise TypeError(
            f"expected a selector of operations (match.op, match.call, ...); {where!r} says which "
            "parameters, for rules that act on their gradients: only clip_gradient, "
            "scale_gradient, tap_gradient and stop_gradient take it"
        )
    if not isinstance(where, Selector):
        raise TypeError(
            f"expected a selector (tracegrad.match.op, match.call, ...) to say where; got {where!r}"
        )


def parameters_of(graph: Graph) -> dict[Value, tuple[str, str]]:
    """Returns the parameters of a graph, the float inputs, each with its path and its alias. If the
    graph knows with respect to which inputs it is differentiated, only these inputs count."""
    active = graph.differentiated or [True] * len(graph.inputs)
    hints = graph.hints or [""] * len(graph.inputs)
    paths = zip(hints, graph.aliases or hints, strict=True)
    inputs = zip(graph.inputs, paths, active, strict=False)  # taps come last
    return {value: both for value, both, is_active in inputs if is_active and has_gradient(value)}


def check_parameters(
    parameters: Collection[Value], where: Parameters, graph: Graph, missing_ok: bool, rule: object
) -> None:
    """Raises NoMatchError if a rule has no parameters and `missing_ok` is false, and GraphError if
    a parameter enters code that JAX has already differentiated."""
    if not parameters and not missing_ok:
        paths = list(dict.fromkeys(path for path, _ in parameters_of(graph).values()))
        raise NoMatchError(lambda: _no_parameter_message(graph, where, rule, paths))
    if not graph.differentiated:
        for match in _find_readers(graph, frozenset(parameters), (), set()):
            if not is_under_rules(match):
                refuse_differentiated(match, rule, hint=_IN_SOLVER)


def _find_readers(
    graph: Graph, values: frozenset[Value], path: Path, seen: set[tuple[Graph, frozenset[Value]]]
) -> Iterator[Occurrence]:
    """Yields the operations, also in regions, that have one of the values as an operand. Each
    operation comes once for all calls of its region. `seen` has the searched regions, with the
    values searched for."""
    if (graph, values) in seen:
        return
    seen.add((graph, values))
    for node in graph.nodes:
        if values.isdisjoint(node.operands):
            continue
        yield Occurrence(path, node)
        for call in region_calls(node):
            region = node.regions[call.name]
            outer = [node.inputs[i] for i in call.operands]
            inside = frozenset(
                inner
                for inner, atom in zip(region.inputs, outer, strict=True)
                if isinstance(atom, Value) and atom in values
            )
            yield from _find_readers(region, inside, (*path, (node, call.name)), seen)


def _no_parameter_message(
    graph: Graph, where: Parameters, rule: object, paths: Sequence[str]
) -> str:
    near = ", ".join(map(repr, nearest(where.patterns, paths)))
    return (
        f"{rule} matches nothing in {graph.name}: no parameter {where!r}. "
        + (f"The nearest paths: {near}." if near.strip("'") else "It has no parameters with paths.")
        + " A glob begins with the argument's name, or leaves it out. If the rule may match "
        "nothing, give it missing_ok=True"
    )


def find_matches(
    where: Selector, graph: Graph, missing_ok: bool, rule: object, *, gradients: bool = True
) -> list[Occurrence]:
    """Returns the matches of a selector at which a rule acts.

    Args:
      rule: the rule or function that searches, for messages.
      gradients: whether the rule acts on gradients. If so, drops the matches through which no
        gradient passes, and the matches in a loss to which `tracegrad.grad` and the like have
        already applied the rules in force.

    An earlier rule may have put an identity function behind an operation. The identity has the
    scope and the line of the operation, so that the selector finds both as one match. Such an
    identity is dropped from the end of the match: this rule then acts between the operation and the
    identity, and the gradient meets the earlier rule first, and each rule once.

    Raises:
      NoMatchError: nothing matches, and `missing_ok` is false.
      GraphError: a match is in a custom gradient or in a solve or, if `gradients`, in code that JAX
        has already differentiated.
    """
    matches = list(filter(None, map(_strip_rule_identities, where.select_in(graph).matches)))
    if gradients:
        matches = [m for m in matches if not (is_under_rules(m) or is_call_without_operands(m))]
    scans_of = functools.cache(_find_differentiated_scans)  # looks at each region once
    for match in matches:
        if match.path:
            _refuse_inside_of_rules(match, rule)
        if gradients:
            refuse_differentiated(match, rule)
            _refuse_moved(match, graph, scans_of, rule)
    if not matches and not missing_ok:
        raise NoMatchError(lambda: _no_match_message(graph, where, rule))
    return matches


def _strip_rule_identities(match: Occurrence) -> Occurrence | None:
    """Returns a match without the identities of rules at its end; None if nothing else is left."""
    if not any(map(_is_identity_of_rule, match.nodes)):
        return match
    kept: list[Node] = []
    used: set[Value] = set()
    for node in reversed(match.nodes):
        if not _is_identity_of_rule(node) or not used.isdisjoint(node.outputs):
            kept.insert(0, node)
            used.update(node.operands)
    return replace(match, members=tuple(kept)) if isinstance(match, Fragment) and kept else None


def _is_identity_of_rule(node: Node) -> bool:
    if isinstance(node, CustomGradient):
        return not node.primal.nodes and code_of_rule(node) in CHANGES_GRADIENT
    return node.primitive is _jax.CHANGED_COTANGENT


def _no_match_message(graph: Graph, where: Selector, rule: object) -> str:
    users_selector = getattr(where, "where", where)
    if users_selector is not where and (matches := users_selector.select_in(graph).matches):
        _refuse_inside_of_rules(matches[0], rule)
        return (
            f"{rule} concerns nothing in {graph.name}: {matches[0]} matches, but the rule cannot "
            "change its derivative. Use rules.override_gradient for it or, if the rule may concern "
            "nothing, give it missing_ok=True"
        )
    names = where.names(graph)
    near = nearest(where.patterns, names)
    hint = f" The nearest names: {', '.join(map(repr, near))}." if near else ""
    return (
        f"{rule} matches nothing in {graph.name}: no {where!r}.{hint} See the operations with "
        "print(tracegrad.graph(fun, *args)), and try a selector with .find(selector). If it may "
        "match nothing, pass missing_ok=True"
    )


_REWRITTEN_LOSS = "tracegrad.rewrite(loss, rule)"
_IN_SOLVER = (
    ". If the loss itself calls what differentiates (a solver of optimistix or jaxopt, the forces "
    "of jax-md), let the parameters pass through the rule first, in the loss: "
    "`params = tracegrad.rewrite(lambda params: params, rule)(params)`"
)


def refuse_differentiated(
    match: Occurrence, rule: object, instead: str = _REWRITTEN_LOSS, hint: str = ""
) -> None:
    """Raises GraphError, with the line of the `jax.grad`, for a match that JAX has differentiated.

    Args:
      instead: the code of the function to differentiate instead, for the message.
      hint: the end of the message.
    """
    for node in match.steps:
        if scopes.is_differentiated(node):
            raise _differentiated_already_error(match, rule, node, instead, hint)
        if _is_made_by_jet(node):
            raise GraphError(
                f"{rule}: {match} lies in a function of which jax.experimental.jet takes the "
                "Taylor coefficients, by JAX's own derivatives: rules and custom gradients do "
                "nothing there. Nest tracegrad.jvp instead, or leave the match out of the rule"
            )


def _differentiated_already_error(
    match: Occurrence, rule: object, node: Node, instead: str = _REWRITTEN_LOSS, hint: str = ""
) -> GraphError:
    return GraphError(
        f"{rule}: {match} lies in code that JAX has differentiated already"
        f"{_describe_grad_call(node)}, where an edit of gradients would do nothing. The rules of "
        "an enclosing trace reach tracegrad.grad, and jax.grad and the like where they are "
        "looked up in jax while it runs (`import jax` rather than `from jax import grad`), "
        "for derivatives that are made inside of the traced function (call "
        "`jax.value_and_grad(loss)` or `nnx.value_and_grad(loss)` in the step). Or give the rule "
        f"to the function that is differentiated there: jax.grad({instead}){hint}"
    )


def _is_made_by_jet(node: Node) -> bool:
    """Whether `jax.experimental.jet` made a node. Jet leaves no mark in scopes, so the files of the
    node's frames decide."""
    jet = sys.modules.get("jax.experimental.jet")
    return jet is not None and any(
        frame.file_name == jet.__file__ for frame in _jax.frames(node.source.info)
    )


def _find_differentiated_scans(region: Graph) -> list[Node]:
    return [n for n in region.nodes if n.primitive is _jax.SCAN and scopes.is_differentiated(n)]


def _refuse_moved(
    match: Occurrence, graph: Graph, scans_of: Callable[[Graph], list[Node]], rule: object
) -> None:
    """Raises GraphError for a match that JAX moved out of a scan when it differentiated the scan.

    JAX moves operations that are the same at each step. Outside of the scan, no scope marks such an
    operation as differentiated. But it was called by the function of the scan's body, not by the
    function of the enclosing region; and the scan uses its results.
    """
    regions = [graph, *(node.region(name) for node, name in match.path)]
    for depth, (node, region) in enumerate(zip(match.steps, regions, strict=True)):
        scans = scans_of(region)
        if not scans or was_called_by(node, region.function_source):
            continue
        used = set(node.outputs)
        for each in region.nodes:
            if each in scans and not used.isdisjoint(each.operands):
                bodies = [below for body in each.regions.values() for below in body.regions_below]
                sources = {body.function_source for body in bodies}
                if any(was_called_by(step, s) for step in match.steps[depth:] for s in sources):
                    raise _differentiated_already_error(match, rule, each)
            elif not (scopes.is_differentiated(each) or used.isdisjoint(each.operands)):
                used.update(each.outputs)


# The file of JAX's transformations; other files of JAX have functions of the same names.
_JAX_API = inspect.unwrap(_jax.grad).__code__.co_filename
_TRANSFORMS = {"grad", "value_and_grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize"}


def _describe_grad_call(node: Node) -> str:
    """Returns the innermost call of `jax.grad` or the like in the user's code, as text."""
    name = ""
    for frame in _jax.frames(node.source.info):
        if is_own_file(frame.file_name):
            function = frame.function_name.split(".")[0]
            if function in _TRANSFORMS and frame.file_name == _JAX_API:
                name = function
        elif name:
            place = Origin(frame.file_name, frame.line_num, frame.function_name)
            return f" (by jax.{name} at {place})"
    return ""


def _refuse_inside_of_rules(match: Occurrence, rule: object) -> None:
    node = match.rule_around
    if node is None:
        return
    what = "custom gradient"
    advice = ". If they are of a function that you give it, give it rewrite(function, rule) instead"
    whole = f"match.call({node.name!r})"
    if not isinstance(node, CustomGradient):
        what, whole, advice = "operation", f"match.op({node.op!r})", ""
    elif code_of_rule(node) in CHANGES_GRADIENT:
        what = "match of an earlier rule,"
        advice = ", or give this rule before the earlier rule: then both act on the same cotangents"
    raise GraphError(
        f"{rule}: {match} lies inside of the {what} {node.name}, whose own derivative replaces "
        "the derivatives of all operations in it: the edit would vanish. Match the whole, "
        f"{whole}, or exclude the operations in it: "
        f"& ~match.where(lambda found: found.rule_around){advice}"
    )


def _place_name(match: Occurrence) -> str:
    """Returns the scope of a match and its name: ``encoder/block_0/softmax``."""
    stacks = map(scopes.around, match.steps)
    mark = (scopes.UNDER_RULES, False)
    texts = (scopes.text([each for each in stack if each != mark]) for stack in stacks)
    scope = "/".join(filter(None, texts))
    parts = tuple(match.name.split("/"))
    names = tuple(name for name in match.scopes if name != scopes.UNDER_RULES)
    if isinstance(match, Fragment) and names[: len(parts)] == parts:
        return match.name  # the match is a whole scope
    return f"{scope}/{match.name}" if scope else match.name


def place_names(matches: Sequence[Occurrence]) -> list[str]:
    """Numbers repeated names: ``sin``, ``sin_1``. Skips a number if a match has the numbered
    name."""
    names = [_place_name(match) for match in matches]
    originals, number = set(names), dict.fromkeys(names, 0)
    numbered: dict[str, None] = {}
    for name in names:
        unique = name
        while unique in numbered or (unique != name and unique in originals):
            number[name] += 1
            unique = f"{name}_{number[name]}"
        numbered[unique] = None
    return list(numbered)
