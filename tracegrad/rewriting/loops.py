"""The rule `checkpointed_loop`, which gives while loops reverse mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Node, Occurrence, match
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.occurrence import at
from tracegrad.ir.selector import Selector, covered_by
from tracegrad.rewriting.loop_reverse import bind_checkpointed_while
from tracegrad.rewriting.match_rule import MatchRule, shows_arguments


@shows_arguments
def checkpointed_loop(
    where: Selector | None = None, checkpoints: int = 16, *, missing_ok: bool = False
) -> MatchRule:
    """Gives while loops reverse mode: keeps some states, and runs the steps between them again.

    Use it for `jax.lax.while_loop`, and for a `jax.lax.fori_loop` whose number of steps is not
    known at tracing. Nested loops in a match get reverse mode too.

    Args:
      where: a selector of while loops, or of operations that contain while loops. None: the whole
        program.
      checkpoints: the number of states of a loop that the forward pass keeps, beside the first
        state. The backward pass keeps nearly as many more. So memory is at most ``2 * checkpoints``
        times the loop's carry, plus the memory for the backward pass of one step, for any number of
        steps. Up to ``checkpoints + 1`` steps, no step runs again; up to ``checkpoints**2 / 2``
        steps, each step runs again at most once. Beyond, no more steps run again than by the
        optimal schedule for as many states and a number of steps known from the start.
      missing_ok: whether `where` may match nothing; always true for None.

    Returns:
      A rule. Values and forward mode do not change, and the compiled program changes only if
      something is differentiated in reverse. Derivatives of any order, `jax.vmap` (also if the
      numbers of steps differ), `jax.checkpoint` and the like work with the rule. Applied to a
      program, it raises GraphError if a match contains no while loop. Reverse mode through a loop
      with an effect in each step raises ValueError.

    In a batch, an element that takes no step adds nothing to a gradient, even if its step would
    divide by zero. (An exception is a division by a value that the loop closes over, which is no
    state.)

    The number of steps may depend on the differentiated inputs; the rule differentiates the steps
    that were run, as if their number were constant. So the gradient of a bisection is zero, since
    its steps only compare.

    Raises ValueError for less than one checkpoint.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def newton(a):  # the square root
    ...     return jax.lax.while_loop(lambda x: jnp.abs(x * x - a) > 1e-5,
    ...                               lambda x: 0.5 * (x + a / x), a)
    >>> f = tg.rewrite(newton, tg.rules.checkpointed_loop())
    >>> print(f"{jax.grad(f)(4.0):.4f}")
    0.2500

    On the choice of the kept states see Stumm and Walther, *New algorithms for optimal online
    checkpointing* (2010), and on the replay Griewank and Walther, *Revolve* (2000).
    """
    if checkpoints < 1:
        raise ValueError(f"checkpointed_loop wants one checkpoint or more, not {checkpoints!r}")

    def checkpointed(op: Op, *operands: Any) -> list[Any]:
        place = f"the while loop{at(op.match.origin)}"
        params = {**op.params, "checkpoints": checkpoints, "place": place}
        return bind_checkpointed_while(operands, params)

    def edit(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        # Inner loops first: they are in regions of the outer loops.
        for depth in sorted({len(loop.path) for loop in matches}, reverse=True):
            here = [loop for loop in matches if len(loop.path) == depth]
            graph = around_each(graph, here, checkpointed, depends_on=str).graph
        return graph

    if where is None:
        return MatchRule("checkpointed_loop", match.where(_is_loop), edit, True)
    return MatchRule(
        "checkpointed_loop",
        where,
        lambda graph, matches: edit(graph, _find_loops(graph, matches)),
        missing_ok,
    )


def _find_loops(graph: Graph, matches: Sequence[Occurrence]) -> list[Occurrence]:
    """Returns the while loops in matches, except loops whose derivative a custom gradient replaces.
    Raises GraphError for a match without a loop."""
    found: dict[tuple[object, Node], Occurrence] = {}
    for matched in matches:
        holds = covered_by([matched])
        loops = [each for each in graph.walk() if _is_loop(each) and holds(each.path, each.node)]
        if not loops:
            raise GraphError(
                f"rules.checkpointed_loop: {matched} is no while loop and holds none. "
                "match.op('while') finds the loops of a program; one whose number of steps is "
                "known is a scan, which has reverse mode as it is"
            )
        found |= {(loop.path, loop.node): loop for loop in loops}
    return list(found.values())


def _is_loop(found: Occurrence) -> bool:
    return found.node.primitive in _jax.WHILES and found.rule_around is None
