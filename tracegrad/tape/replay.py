"""What of a block is evaluated once more, so that its gradient has a gradient as JAX's has.

A function with a rule has that rule for its derivative once. Whoever differentiates its gradient
differentiates, in JAX, what the rule's forward pass computes: a result that another operation needs
for its own derivative (``y`` in ``x * y``) counts there as the forward pass computed it, not as the
result of a function with a rule. A tape has recorded just the one ``y``, with its rule, which stays
what the gradients of ``y`` itself go by. So where a gradient may be differentiated in its turn, the
operations after a rule run again in the program that computes it, on what the forward pass gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tracegrad import _jax
from tracegrad._jax.caches import of_program
from tracegrad.ir import CustomGradient, Graph, Node, Source, Value
from tracegrad.ir.dependence import Masks, data_flow, enter, joined, spread
from tracegrad.ir.importer import lone_node
from tracegrad.lowering import evaluate_node, read
from tracegrad.tape.block import Block
from tracegrad.tape.keys import RULES, is_jaxs_own
from tracegrad.tape.linearised import Linearised
from tracegrad.tracing.in_force import Force

# From the cotangents of results of a node to those of operands.
PullBack = Callable[[Sequence[Any]], list[Any]]


class Replay(NamedTuple):
    """What of a block runs again.

    Attributes:
      operations: which of its operations, by position.
      slots: those that they give.
      as_called: which of its operations have saved what another derivative needs: they count as
        they were called.
    """

    operations: tuple[int, ...] = ()
    slots: frozenset[int] = frozenset()
    as_called: frozenset[int] = frozenset()


NOTHING = Replay()


def replay_of(block: Block, stopped: Collection[int], rules: Sequence[Force]) -> Replay:
    """What of a block runs again: what has a rule, if another operation reads its results, and
    what comes after it. `stopped`: slots of the block that count as constants.

    With `rules` in force all of it does, and of what it gives only sources have their places.
    """
    if rules:
        made = {slot for operation in block.operations for slot in operation.results}
        return Replay((), frozenset(made.intersection(block.sources).difference(stopped)))
    if not any(has_a_rule(operation.computation) for operation in block.operations):
        return NOTHING
    used = {slot for operation in block.operations for slot in operation.args}
    reached, again = set(block.sources), set[int]()
    chosen, as_called = [], set[int]()
    for i, (computation, args, results, _) in enumerate(block.operations):
        active = tuple([place for place, slot in enumerate(args) if slot in reached])
        if not active:
            continue
        flowing = [r for r in results if _jax.has_gradient(block.types[r]) and r not in stopped]
        reached.update(flowing)
        has_one, saved = has_a_rule(computation), list[int]()
        if isinstance(computation, Linearised):
            saved = [r for r in results[computation.count :] if r in used]
            # It saved what the forward passes of rules give, of all that the tapes follow.
            types = [block.types[slot] for slot in args]
            if has_one and not _reaches_every_rule(computation, active, types):
                as_called.add(i)
        if again.isdisjoint(args):
            if not has_one:
                continue
            flowing = [r for r in flowing if r not in saved]  # which are of forward passes
        if not used.isdisjoint(flowing):
            chosen.append(i)
            again.update(flowing)
            if isinstance(computation, Linearised) and not saved:
                as_called.add(i)
    return Replay(tuple(chosen), frozenset(again), frozenset(as_called))


def has_a_rule(computation: Any) -> bool:
    """Whether the derivative of an operation is, somewhere in it, another than that of its forward
    pass: it has a rule of somebody's own. (JAX's own rules are the derivatives.)"""
    of = computation.original if isinstance(computation, Linearised) else computation
    if of.primitive in RULES:
        return not _is_the_derivative(of.primitive, of.params)
    return any(map(_has_rules, of.programs))


@of_program
def _has_rules(program: Any) -> bool:
    return any(
        not _is_the_derivative(equation.primitive, equation.params)
        if equation.primitive in RULES
        else any(_has_rules(inner) for _, inner in _jax.sub_programs(equation.params))
        for equation in _jax.opened(program).eqns
    )


def _is_the_derivative(primitive: Any, params: Mapping[str, Any]) -> bool:
    rule = params["bwd" if primitive is _jax.CUSTOM_VJP else "jvp_jaxpr_fun"]
    functions, around = _jax.inside_of_rule(rule)
    own = (fun is _moves_with_both or is_jaxs_own(fun) for fun in functions)
    return bool(functions or around) and all(own)


def _reaches_every_rule(of: Linearised, active: Sequence[int], types: Sequence[Any]) -> bool:
    """Whether each rule in an operation that some followed operand reaches is reached by one of
    the active operands."""
    if of.active == tuple(active) or of.original.primitive in RULES:
        return True
    # By the calls that lead to it: a function that is called twice may be reached by other operands
    # each time. Of a loop the last that is told is that of all its turns.
    reached: dict[tuple[Node, ...], int] = {}
    path: list[Node] = []

    def run(graph: Graph, ins: Masks) -> Masks:
        return spread(graph, ins, through)

    def through(node: Node, ins: Masks) -> Masks:
        path.append(node)
        if isinstance(node, CustomGradient):
            reached[tuple(path)] = joined(ins)
        entered = enter(node, ins, run)
        path.pop()
        return data_flow(node, ins) if entered is None else entered[0]

    node = lone_node(of.original.primitive, of.original.params, types, Source(None, None))
    through(node, [(i in active) | (i in of.active) << 1 for i in range(len(types))])
    return all(mask & 1 or not mask for mask in reached.values())


def run_again(
    node: Node, known: Mapping[Value, Any], active: Sequence[int], given: Sequence[int]
) -> tuple[list[Any], PullBack]:
    """The results of a node as JAX computes them where it differentiates it with respect to some
    of its operands, by the forward pass of each rule; and from the cotangents of some of them to
    those of these operands.

    Both come of one run: a rule in it that is not linear is called with all that comes to it.
    """
    args = read(node.inputs, known)
    if not active:
        return evaluate_node(node, args), lambda _: []

    def run(operands: list[Any]) -> tuple[list[Any], list[Any]]:
        results = evaluate_node(node, operands)
        return [results[i] for i in given], results

    along = _jax.of_some(run, args, active)
    _, pull_back, results = _jax.vjp(along, *(args[i] for i in active), has_aux=True)
    return results, lambda cotangents: list(pull_back(list(cotangents)))


@jax.custom_jvp
def with_stand_in(value: Any, stand_in: Any) -> Any:
    """A value that was computed again, with a derivative with respect to the recorded one.

    That one may be asked for as a source, but what it was computed from gets nothing through it,
    since it does through `value`. So not the recorded array takes part, but an array in its stead.
    """
    return value


@with_stand_in.defjvp
def _moves_with_both(primals: Any, tangents: Any) -> tuple[Any, Any]:
    moved, moved_in_its_stead = tangents
    return primals[0], moved + moved_in_its_stead
