"""Rules for while loops: what their derivatives are, and where the loops of a match are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Node, Occurrence, match
from tracegrad.ir.occurrence import at
from tracegrad.ir.selector import Selector
from tracegrad.rewriting.edits import Edit, edited
from tracegrad.rewriting.implicit import SOLVERS, FixedPoint, LinearSolve, implicit
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

    edit = _checkpointed(checkpoints)
    if where is None:
        return MatchRule("checkpointed_loop", match.where(_is_loop), at_each(edit), True, text="")
    at_loops = at_each_loop(edit, "rules.checkpointed_loop", nested=True)
    return MatchRule("checkpointed_loop", where, at_loops, missing_ok)


def _checkpointed(checkpoints: int) -> Edit:
    def edit(graph: Graph, nodes: Sequence[Node], found: Occurrence) -> None:
        (node,) = nodes
        ours = {"checkpoints": checkpoints, "place": f"the while loop{at(found.origin)}"}
        graph.set_params(node, {**node.params, **ours}, primitive=_jax.CHECKPOINTED_WHILE)

    return edit


def fixed_point(
    where: Selector,
    solve: str | LinearSolve = "neumann",
    *,
    rtol: float = 1e-3,
    atol: float = 1e-6,
    missing_ok: bool = False,
) -> MatchRule:
    """Differentiates what a while loop converges to as the fixed point of its steps.

    Where ``x = step(c, x)``, the derivative of x by c is the solution of one linear equation,
    ``(1 - d step / d x) dx = (d step / d c) dc``, whatever steps led there. So no state is kept and
    no step is run backwards, however many there were; and where they began has no influence.

    Args:
      where: a selector; what matches is such loops, or holds some.
      solve: of that equation. ``"neumann"``: the sum of what further steps would add, as many as
        the loop itself would need, at most 1000. ``"gmres"``: `jax.scipy.sparse.linalg.gmres`, for
        steps that converge slowly. Or a function ``solve(matvec, b)``, which gives the vector u
        with ``matvec(u) = b``; vectors are real, of all floats of the state.
      rtol, atol: how far from the fixed point a loop may have ended, relative to the largest
        element of an array and absolutely; the first also for how well the equation is solved.
      missing_ok: whether it may match nothing.

    Returns:
      A rule. Values are what they were, and so is the compiled program where nothing is
      differentiated. Forward and reverse mode of any order, `jax.vmap`, `jax.checkpoint` and the
      like go by it. It raises, when it is applied, GraphError where a match holds no while loop, or
      one that has an effect or a collective in each step.

    **A gradient is NaN, not wrong**, where the loop ended at no fixed point (at its limit of steps,
    as a rule), or where the equation has no solution or was not solved: where the steps are no
    contraction. So it is for a bisection, whose steps only compare; `tracegrad.explain` says so.

    What x is, is found out: of what the loop carries, the floats from which a derivative leads to
    the result by way of any number of steps. Counters and flags are constants, with the values that
    they ended with; the state before, or an error that only the condition reads, is no part of it.
    A float that goes on in each step and takes part in x (a time, a momentum's weight) makes NaN. A
    loop that was batched before the rule sees it is one loop: if one element did not converge, all
    is NaN. Give the rule to the function that `jax.vmap` is given.

    A loop inside of the steps that does not match is differentiated as by `checkpointed_loop`.

    Raises ValueError for another `solve`.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def kepler(mean, eccentricity):
    ...     def step(carry):
    ...         angle, _ = carry
    ...         new = mean + eccentricity * jnp.sin(angle)
    ...         return new, jnp.abs(new - angle)
    ...     return jax.lax.while_loop(lambda carry: carry[1] > 1e-6, step, (mean, 1.0))[0]
    >>> f = tg.rewrite(kepler, tg.rules.fixed_point(tg.match.op("while")))
    >>> print(f"{jax.grad(f)(1.0, 0.1):.4f}, by hand {1 / (1 - 0.1 * jnp.cos(f(1.0, 0.1))):.4f}")
    1.0486, by hand 1.0486

    The idea is that of `jax.lax.custom_root` and of jaxopt (Blondel et al., *Efficient and Modular
    Implicit Differentiation*, 2022), which solvers must be written with.
    """
    if not callable(solve) and solve not in SOLVERS:
        names = ", ".join(map(repr, SOLVERS))
        raise ValueError(f"fixed_point solves by {names} or a function (matvec, b), not {solve!r}")
    how = FixedPoint(solve if callable(solve) else SOLVERS[solve], rtol, atol)

    def edit(graph: Graph, nodes: Sequence[Node], found: Occurrence) -> None:
        (node,) = nodes
        body = node.region("body_jaxpr")
        if any(map(_jax.is_collective, body.effects)):
            raise GraphError(
                f"rules.fixed_point: each step of {found} computes with others along an axis, so "
                "that its fixed point is that of all of them together, for which none has the "
                "whole equation. rules.checkpointed_loop differentiates such loops"
            )
        body = edited(body, [each for each in body.walk() if _is_loop(each)], _checkpointed(16))
        graph.replace(node, implicit(node, body, how))

    at_loops = at_each_loop(edit, "rules.fixed_point", nested=False)
    return MatchRule("fixed_point", where, at_loops, missing_ok)


def at_each_loop(
    edit: Edit, asked: str, *, nested: bool
) -> Callable[[Graph, Sequence[Occurrence]], Graph]:
    """What edits the while loops of the matches, the inner before the outer.

    Those of which a custom gradient replaces the derivative are left as they are. It raises
    GraphError for a match without a loop, and for a loop whose steps cannot be run again.

    Args:
      edit: is given one loop.
      asked: the rule, for messages.
      nested: whether the loops inside of another one of a match are meant too.
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
            for loop in loops if nested else _outermost(loops):
                _require_pure(graph, loop, asked)
                found[loop.path, loop.node] = loop
        return edited(graph, list(found.values()), edit)

    return edit_loops


def _is_loop(found: Occurrence) -> bool:
    return found.node.primitive in _jax.WHILES and found.rule_around is None


def _outermost(loops: Sequence[Occurrence]) -> list[Occurrence]:
    return [each for each in loops if not any(_holds(o, each) for o in loops if o is not each)]


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
        "and steps are run again for the derivative, where it would happen once more. Take it out "
        "of the loop; jax.debug.print (without ordered=True) may stay, and prints again"
    )
