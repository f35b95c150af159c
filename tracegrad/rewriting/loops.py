"""Rules for while loops: what their derivatives are, and where the loops of a match are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, GraphError, Node, Occurrence, match
from tracegrad.ir.occurrence import at
from tracegrad.ir.selector import Selector
from tracegrad.rewriting.edits import Edit, edited
from tracegrad.rewriting.match_rule import MatchRule, at_each


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

    def edit(graph: Graph, nodes: Sequence[Node], found: Occurrence) -> None:
        (node,) = nodes
        ours = {"checkpoints": checkpoints, "place": f"the while loop{at(found.origin)}"}
        graph.set_params(node, {**node.params, **ours}, primitive=_jax.CHECKPOINTED_WHILE)

    if where is None:
        return MatchRule("checkpointed_loop", match.where(_is_loop), at_each(edit), True, text="")
    at_loops = at_each_loop(edit, "rules.checkpointed_loop", _require_pure)
    return MatchRule("checkpointed_loop", where, at_loops, missing_ok)


def at_each_loop(
    edit: Edit, asked: str, check: Callable[[Graph, Occurrence, str], None]
) -> Callable[[Graph, Sequence[Occurrence]], Graph]:
    """What edits the while loops of the matches, nested ones included, the inner before the outer.

    Those of which a custom gradient replaces the derivative are left as they are. It raises
    GraphError for a match without a loop.

    Args:
      edit: is given one loop.
      asked: the rule, for messages.
      check: raises for a loop of the graph that cannot be edited so.
    """

    def edit_loops(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        found: dict[tuple[object, Node], Occurrence] = {}
        for matched in matches:
            loops = [each for each in graph.walk() if _is_loop(each) and _holds(matched, each)]
            if not loops:
                raise GraphError(
                    f"{asked}: {matched} is no while loop and holds none. match.op('while') finds "
                    "the loops of a program; one whose number of steps is known is a scan, which "
                    "has reverse mode as it is"
                )
            for loop in loops:
                check(graph, loop, asked)
                found[loop.path, loop.node] = loop
        return edited(graph, list(found.values()), edit)

    return edit_loops


def _is_loop(found: Occurrence) -> bool:
    return found.node.primitive in _jax.WHILES and not any(
        isinstance(node, CustomGradient) for node, _ in found.path
    )


def _holds(match: Occurrence, found: Occurrence) -> bool:
    depth = len(match.path)
    if found.path[:depth] != match.path:
        return False
    node = found.path[depth][0] if len(found.path) > depth else found.node
    return node in match.nodes


def _is_pure(found: Occurrence) -> bool:
    return all(map(_jax.may_be_repeated, found.node.effects))


def _require_pure(graph: Graph, loop: Occurrence, asked: str) -> None:
    """Raises GraphError for a loop whose steps do more than compute, since they are run again."""
    if _is_pure(loop):
        return
    *_, culprit = (each for each in graph.walk() if _holds(loop, each) and not _is_pure(each))
    raise GraphError(
        f"{asked}: {loop} has an effect in each step ({culprit.node.name}{at(culprit.origin)}), "
        "and its steps are run again in the backward pass, where it would happen once more. Take "
        "it out of the loop; jax.debug.print (without ordered=True) may stay, and prints again"
    )
