"""Rules for while loops: what their derivatives are, and where the loops of a match are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Node, Occurrence, match
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.occurrence import at
from tracegrad.ir.selector import Selector, within
from tracegrad.rewriting.loop_reverse import bind_checkpointed_while
from tracegrad.rewriting.match_rule import MatchRule, shows_arguments


@shows_arguments
def checkpointed_loop(
    where: Selector | None = None, checkpoints: int = 16, *, missing_ok: bool = False
) -> MatchRule:
    """Gives a while loop reverse mode: some of its states are kept, and the steps between them are
    run again in the backward pass.

    That is for `jax.lax.while_loop`, and for `jax.lax.fori_loop` where the number of steps is not
    known before it runs. Nested loops inside of what matches get it too.

    Args:
      where: a selector; what matches is such loops, or holds some. None: all of the program.
      checkpoints: how many states of a loop are kept on the way forward, beside the first. In the
        backward pass nearly as many more are, so that memory is at most ``2 * checkpoints`` times
        what the loop carries, and what the backward pass of one step needs, however many steps
        there are. Up to one step more than that none is run again, up to half of their square each
        once at most; beyond, no more than if the number of steps had been known from the start,
        and so many states placed best for it.
      missing_ok: whether it may match nothing; always with None.

    Returns:
      A rule. Values and forward mode are what they were, and so is the compiled program where
      nothing is differentiated in reverse. Derivatives of any order, `jax.vmap` (also where the
      numbers of steps differ), `jax.checkpoint` and the like go by it. It raises, when it is
      applied, GraphError where a match holds no while loop, or one that has an effect in each step;
      with None a loop of that kind may be there as long as nothing differentiates it in reverse.

    In a batch an element that takes no step adds nothing to a gradient, even where its step would
    divide by zero; except by what the loop closes over, which is no state.

    The number of steps may depend on what is differentiated; the gradient is that of the steps that
    were run, as if their number was fixed. So nothing is left of a bisection's, whose steps only
    compare.

    Raises ValueError for less than one checkpoint.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def newton(a):  # the square root
    ...     return jax.lax.while_loop(lambda x: jnp.abs(x * x - a) > 1e-5,
    ...                               lambda x: 0.5 * (x + a / x), a)
    >>> f = tg.rewrite(newton, tg.rules.checkpointed_loop())
    >>> print(f"{jax.grad(f)(4.0):.4f}")
    0.2500

    Which states are kept is the problem of Stumm and Walther, *New algorithms for optimal online
    checkpointing* (2010), and how they are replayed that of Griewank and Walther, *Revolve* (2000).
    """
    if checkpoints < 1:
        raise ValueError(f"checkpointed_loop wants one checkpoint or more, not {checkpoints!r}")

    def checkpointed(op: Op, *operands: Any) -> list[Any]:
        place = f"the while loop{at(op.match.origin)}"
        params = {**op.params, "checkpoints": checkpoints, "place": place}
        return bind_checkpointed_while(operands, params)

    def edit(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        # The inner before the outer, whose regions they are in.
        for depth in sorted({len(loop.path) for loop in matches}, reverse=True):
            here = [loop for loop in matches if len(loop.path) == depth]
            graph = around_each(graph, here, checkpointed, depends_on=str).graph
        return graph

    if where is None:
        return MatchRule("checkpointed_loop", match.where(_is_loop), edit, True)
    return MatchRule(
        "checkpointed_loop",
        where,
        lambda graph, matches: edit(graph, _loops_of(graph, matches)),
        missing_ok,
    )


def _loops_of(graph: Graph, matches: Sequence[Occurrence]) -> list[Occurrence]:
    """The while loops of the matches, but those of which a custom gradient replaces the derivative.

    Raises GraphError for a match without a loop, and for a loop whose steps cannot be run again.
    """
    found: dict[tuple[object, Node], Occurrence] = {}
    for matched in matches:
        holds = within([matched])
        loops = [each for each in graph.walk() if _is_loop(each) and holds(each.path, each.node)]
        if not loops:
            raise GraphError(
                f"rules.checkpointed_loop: {matched} is no while loop and holds none. "
                "match.op('while') finds the loops of a program; one whose number of steps is "
                "known is a scan, which has reverse mode as it is"
            )
        for loop in loops:
            _require_pure(graph, loop)
            found[loop.path, loop.node] = loop
    return list(found.values())


def _is_loop(found: Occurrence) -> bool:
    return found.node.primitive in _jax.WHILES and found.rule_around is None


def _is_pure(found: Occurrence) -> bool:
    return all(map(_jax.may_be_repeated, found.node.effects))


def _require_pure(graph: Graph, loop: Occurrence) -> None:
    """Raises GraphError for a loop whose steps do more than compute, since they are run again."""
    if _is_pure(loop):
        return
    holds = within([loop])
    inside = (each for each in graph.walk() if holds(each.path, each.node))
    *_, culprit = (each for each in inside if not _is_pure(each))
    raise GraphError(
        f"rules.checkpointed_loop: {loop} has an effect in each step "
        f"({culprit.node.name}{at(culprit.origin)}), and steps are run again for the derivative, "
        "where it would happen once more. Take it out of the loop; jax.debug.print (without "
        "ordered=True) may stay, and prints again"
    )
