"""Rules that cure what `explain` finds: they leave values as they are, and mend gradients.

`strong_zero` and `finite_derivative` change what is NaN or Inf and nothing else; `straight_through`
and `own_derivative` change finite gradients too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import (
    Atom,
    CustomGradient,
    Fragment,
    Graph,
    GraphError,
    Node,
    Occurrence,
    Value,
    has_gradient,
    match,
)
from tracegrad.ir.closed_over import not_differentiated
from tracegrad.ir.dependence import mask_of, spread_below
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.nodes import same_type
from tracegrad.ir.running import run_node
from tracegrad.ir.selector import Found, Selector, within
from tracegrad.ir.stretches import entering, leaving
from tracegrad.rewriting.edits import check_selector
from tracegrad.rewriting.kept_zeros import keeping_zeros, may_make_nan
from tracegrad.rewriting.match_rule import MatchRule, around, shows_arguments
from tracegrad.rewriting.overriding import with_gradient


@shows_arguments
def strong_zero(where: Selector | None = None, *, missing_ok: bool = False) -> MatchRule:
    """Keeps zeros zero on their way back: 0 * inf is 0 in the gradient, and so is 0 * nan.

    `jnp.where` takes one side, and gives the other a cotangent of zero. If the derivative is
    infinite there, JAX makes NaN of that zero, and the whole gradient is lost. With this rule zero
    leaves an operation element by element where zero comes in, whatever its derivative is.

    Args:
      where: a selector; what lies in its matches and may have a derivative that is not finite is
        concerned. None: the whole program.
      missing_ok: whether nothing of that kind may be there; always with None.

    Returns:
      A rule. Values stay as they are. Each product of a cotangent and a factor in the backward pass
      is followed by a selection: where the cotangent is zero, the product is zero, and where it is
      not, the product is what it was. (The last bits of a compiled program may differ, where XLA
      fuses it another way.) Rules of kind JVP (`jax.custom_jvp`: `jax.nn.softmax`,
      `jnp.logaddexp`) are looked into, those of kind VJP are left alone. It holds for second
      derivatives too. Of several rules let it be the last: what it has replaced is a custom
      gradient to those behind it.

    What it replaces has a backward of its own. So forward mode is `tracegrad.jvp`, `tracegrad.hvp`
    and `tracegrad.hessian`; `jax.jvp` and `jax.hessian` refuse, as for any `jax.custom_vjp`.

    A product of matrices adds up many products, and a NaN in one operand is in the sum whatever the
    cotangent of its row is: no zero is kept there. Choose before the product, by `jnp.where` of
    the operand.

    The gradient at a place where the function itself is on the side that counts, and has no finite
    derivative, is not finite as before; see `finite_derivative`.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def entropy(p):
    ...     return -jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0.0))
    >>> p = jnp.array([0.5, 0.5, 0.0])
    >>> print(jax.grad(entropy)(p))
    [-0.30685282 -0.30685282         nan]
    >>> print(jax.grad(tg.rewrite(entropy, tg.rules.strong_zero()))(p))
    [-0.30685282 -0.30685282  0.        ]

    The name is Enzyme's; the way round without it is to choose twice (jax.numpy's FAQ).
    """
    concerned = match.where(may_make_nan)
    edit = around(keeping_zeros(every=False))
    if where is None:
        return MatchRule("strong_zero", concerned, edit, True)
    check_selector(where)
    return MatchRule("strong_zero", _Within(where, may_make_nan), edit, missing_ok)


@shows_arguments
def finite_derivative(where: Selector, *, missing_ok: bool = False) -> MatchRule:
    """Puts zero in the place of a gradient that is NaN or Inf, where a derivative is not finite.

    At the kink of a norm, at the end of the domain of `arccos`, at 0 / 0: there is no derivative,
    and zero is the usual choice (of a norm at zero it is a subgradient: that of a safe norm).

    Args:
      where: a selector; what lies in its matches and may have such a derivative is concerned:
        operations element by element, rules of kind JVP, and calls of functions with a rule of kind
        VJP (`jax.custom_vjp`, `tracegrad.custom_gradient`), of which as a whole.
      missing_ok: whether nothing of that kind may be there.

    Returns:
      A rule. Nothing is changed but NaN and Inf that come of finite cotangents; values and forward
      mode (`tracegrad.jvp`; `jax.jvp` refuses, as with `strong_zero`) stay as they are, with an
      infinite tangent there. What is infinite by rights is hidden as well: so there is no default
      for `where`, as `strong_zero` has it.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def distance(x):
    ...     return jnp.sqrt(jnp.sum(x**2))
    >>> safe = tg.rewrite(distance, tg.rules.finite_derivative(tg.match.op("sqrt")))
    >>> print(jax.grad(distance)(jnp.zeros(2)), jax.grad(safe)(jnp.zeros(2)))
    [nan nan] [0. 0.]
    >>> print(jax.grad(safe)(jnp.array([3.0, 4.0])))
    [0.6 0.8]
    """
    check_selector(where)

    keeping = keeping_zeros(every=True)

    def finite(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        if not isinstance(node, CustomGradient) or node.kind == "jvp":
            return keeping(op, *operands)
        if node.effects:
            raise GraphError(
                f"rules.finite_derivative: {op.match} has effects, which would happen again where "
                "its gradient is mended. Mend it in its own rule, by "
                "jnp.where(jnp.isfinite(...), ...)"
            )
        closed_over = node.closed_over
        gradient = _finite_gradient(node, closed_over)

        def primal(*operands: Any) -> list[Any]:
            return op.results(*operands)

        primal.__name__ = primal.__qualname__ = node.name
        asks = bool(node.params.get("symbolic_zeros"))  # it may refuse what does not vary
        mended = with_gradient(primal, gradient, node.params, node.name, op.match.origin, asks)
        first = [not_differentiated(node, operand) for operand in operands[:closed_over]]
        return mended(*first, *operands[closed_over:])

    concerned = _Within(where, lambda found: may_make_nan(found) or _is_vjp_rule(found))
    return MatchRule("finite_derivative", concerned, around(finite), missing_ok)


class _Within(Selector):
    """The single nodes in the matches of a selector that are concerned, one by one: of a scope in
    which every node is, ``&`` would give the scope."""

    def __init__(self, where: Selector, is_concerned: Callable[[Occurrence], bool]):
        super().__init__(*where.patterns)
        self.where, self.is_concerned = where, is_concerned

    def look(self, graph: Graph) -> Found:
        covers = self.where.look(graph).covers
        matches = [o for o in graph.walk() if covers(o.path, o.node) and self.is_concerned(o)]
        return Found(matches, within(matches))

    def names(self, graph: Graph) -> list[str]:
        return [] if self.where.look(graph).matches else self.where.names(graph)

    def __repr__(self) -> str:
        return repr(self.where)


def _is_vjp_rule(found: Occurrence) -> bool:
    return isinstance(found.node, CustomGradient) and found.node.kind == "vjp"


def _finite_gradient(node: Node, closed_over: int) -> Any:
    """What the rule of a node gives, with zeros for what is NaN or Inf though all that came in was
    finite; for the first operands, which the function closes over, it gives nothing."""

    def gradient(op: Any, *dys: Any, active: Sequence[int] | None = None) -> list[Any]:
        places = range(closed_over, len(op.inputs)) if active is None else active
        active = [i for i in places if _jax.has_gradient(op.inputs[i])]
        _, back = _jax.vjp_of_some(lambda xs: run_node(node, xs), op.inputs, active)
        avals = list(map(jax.typeof, op.outputs))
        flowing = [dy for dy, aval in zip(dys, avals, strict=True) if _jax.has_gradient(aval)]
        is_bad = [~jnp.all(jnp.isfinite(dy)) for dy in flowing]
        came_in = jnp.any(jnp.stack(is_bad))
        given: list[Any] = [None] * len(op.inputs)
        for i, ct in zip(active, back(_jax.align(avals, flowing)), strict=True):
            given[i] = _finite(ct, came_in)
        return given

    return gradient


def _zeros_for_bad(cotangent: Any, came_in: Any) -> Any:
    return jnp.where(came_in | jnp.isfinite(cotangent), cotangent, jnp.zeros_like(cotangent))


# Its tangent is that of the identity: forward mode is the transpose of the rule, and stays what it
# was.
_finite = _jax.with_tangent(_zeros_for_bad, lambda primals, tangents: tangents[0], "_finite")
"""A cotangent, in which what is NaN or Inf is zero, but where such `came_in`."""


# ------------------------------------------------------------ what changes finite gradients too


@shows_arguments
def straight_through(where: Selector, *, missing_ok: bool = False) -> MatchRule:
    """Hands the gradient past what matches, as if that were the identity.

    For what has a derivative of zero, or none: a rounding, a sign, a bound that cuts everything
    off, a rectifier that is never active, a `stop_gradient` in somebody else's code.

    Args:
      where: a selector; each match is one function, of which one input has the type of its one
        result. Of several it is the first that depends on an argument of the program, and that the
        function does not close over; of `lax.clamp` what it bounds.
      missing_ok: whether it may match nothing.

    Returns:
      A rule. It gives up the true derivative of what matches, finite or not. Tangents of forward
      mode go the same way, and other inputs get no gradient. It raises GraphError, when it is
      applied, for a match without such an input.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(w):
    ...     return jnp.sum(jnp.round(w) ** 2)
    >>> f = tg.rewrite(loss, tg.rules.straight_through(tg.match.op("round")))
    >>> print(jax.grad(loss)(jnp.array([0.7, 1.8])), jax.grad(f)(jnp.array([0.7, 1.8])))
    [0. 0.] [2. 4.]

    The straight-through estimator (Bengio et al., 2013), as `tracegrad.grad_pass_through`.
    """
    check_selector(where)

    def edit(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        varying = spread_below(graph, [1] * len(graph.inputs))

        positions: dict[Occurrence, int] = {}
        for found in matches:
            node = None if isinstance(found, Fragment) else found.node
            operands = entering(found.nodes) if node is None else node.inputs
            results = leaving(graph.region_of(found), found.nodes)
            position = position_past(operands, results, varying, node)
            if position is None:
                raise GraphError(
                    f"rules.straight_through: {found} has no float input of the type of its one "
                    "result, to which a gradient could be handed on. Match the function around "
                    "it, or write one by rules.override_gradient"
                )
            positions[found] = position

        def past(op: Op, *operands: Any) -> Any:
            position = positions[op.match]

            def straight_through(*operands: Any) -> list[Any]:
                return op.results(*operands)

            @CHANGES_GRADIENT
            def tangent(primals: Any, tangents: Any) -> Any:
                return [tangents[position]]

            return _jax.with_tangent(straight_through, tangent)(*operands)

        return around_each(graph, matches, past, depends_on=positions.__getitem__).graph

    return MatchRule("straight_through", where, edit, missing_ok)


def position_past(
    operands: Sequence[Atom],
    results: Sequence[Value],
    varying: Mapping[Value, int] | None = None,
    node: Node | None = None,
) -> int | None:
    """The position of the operand to which `straight_through` hands the gradient of the one result
    of a match; None if there is none.

    Args:
      operands, results: of the match.
      varying: those of the values that depend on an argument of the program, if that is known. A
        bound or a threshold that is a constant would take the gradient, and nobody would see it.
      node: the match, if it is one node.
    """
    if len(results) != 1 or not has_gradient(results[0]):
        return None
    fitting = [
        i
        for i, value in enumerate(operands)
        if isinstance(value, Value) and same_type(value.aval, results[0].aval)
    ]
    if node is not None and node.op == "clamp" and 1 in fitting:  # between its bounds
        return 1
    flowing = [i for i in fitting if varying is None or mask_of(operands[i], varying)]
    given = [i for i in flowing if node is None or not _is_closed_over(node, i)]
    return next(iter(given or flowing or fitting), None)


def _is_closed_over(node: Node, position: int) -> bool:
    """Whether an operand is one that a function closes over: JAX puts these before its own, and
    knows no names of theirs."""
    if isinstance(node, CustomGradient):
        return position < node.closed_over
    hints = node.regions["jaxpr"].hints if node.primitive is _jax.JIT else ()
    return bool(hints) and not hints[position]


@shows_arguments
def own_derivative(where: Selector, *, missing_ok: bool = False) -> MatchRule:
    """Gives functions with a custom gradient the derivative of what they compute.

    Args:
      where: a selector of calls of such functions: ``match.call("square")``.
      missing_ok: whether it may match nothing.

    Returns:
      A rule. It takes the rule of each match away, of `jax.custom_vjp`, `jax.custom_jvp` and
      `tracegrad.custom_gradient`. It raises GraphError, when it is applied, for what has none.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> @tg.custom_gradient
    ... def square(x):
    ...     return x**2, lambda dy: dy * x  # forgets the 2
    >>> mended = tg.rewrite(square, tg.rules.own_derivative(tg.match.call("square")))
    >>> print(jax.grad(square)(3.0), jax.grad(mended)(3.0))
    3.0 6.0
    """
    check_selector(where)

    def of_primal(op: Op, *operands: Any) -> list[Any]:
        (node, *more) = op.nodes
        if more or not isinstance(node, CustomGradient):
            raise GraphError(
                f"rules.own_derivative: {op.match} is no call of a function with a custom "
                "gradient; match one by its name, match.call(...)"
            )
        return node.primal(*operands)

    return MatchRule("own_derivative", where, around(of_primal), missing_ok)
