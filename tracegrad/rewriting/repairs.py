"""Rules that repair the problems that `explain` finds: they change gradients, but no values.

`strong_zero` and `finite_derivative` change only NaN and Inf; `straight_through` and
`own_derivative` change finite gradients too.
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
from tracegrad.ir.node_groups import operands_of, values_leaving
from tracegrad.ir.nodes import same_type
from tracegrad.ir.running import run_node
from tracegrad.ir.selector import Selection, Selector, covered_by
from tracegrad.ir.wording import counted
from tracegrad.rewriting.kept_zeros import may_make_nan, replace_keeping_zeros
from tracegrad.rewriting.match_rule import MatchRule, edit_around, shows_arguments
from tracegrad.rewriting.matches import check_selector
from tracegrad.rewriting.overriding import with_gradient


@shows_arguments
def strong_zero(where: Selector | None = None, *, missing_ok: bool = False) -> MatchRule:
    """Keeps zero cotangents zero in the backward pass: 0 * inf gives 0, and so does 0 * nan.

    `jnp.where` selects one of two values, and gives the other value a cotangent of zero. If the
    derivative of the other value is infinite, zero times infinity is NaN, and the whole gradient is
    lost. With this rule, an elementwise operation maps a zero cotangent to zero for any derivative,
    and a matrix product or convolution omits the terms whose cotangent is zero and whose factor is
    not finite.

    Args:
      where: a selector; the rule changes the operations in its matches whose derivative may not be
        finite. None: the whole program.
      missing_ok: whether there may be no such operation; always true for None.

    Returns:
      A rule. Values do not change. A select follows each elementwise product of a cotangent and a
      factor in the backward pass: where the cotangent is zero, the product becomes zero, and
      elsewhere it does not change. (The last bits of a compiled program may differ, since XLA may
      fuse it in another way.) The rule also changes the derivatives of rules of kind JVP
      (`jax.custom_jvp`: `jax.nn.softmax`, `jnp.logaddexp`), but not of kind VJP. It holds for
      second derivatives too.
      Make it the last of several rules: the rules after it would find, instead of the original
      operations, its replacements, which are custom gradients.

    Its replacements have a custom backward pass. So use `tracegrad.jvp`, `tracegrad.hvp` and
    `tracegrad.hessian` for forward mode; `jax.jvp` and `jax.hessian` raise an error, as for any
    `jax.custom_vjp`.

    If the selected value itself has a derivative that is not finite, the gradient is not finite
    either; see `finite_derivative`.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def entropy(p):
    ...     return -jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0.0))
    >>> p = jnp.array([0.5, 0.5, 0.0])
    >>> print(jax.grad(entropy)(p))
    [-0.30685282 -0.30685282         nan]
    >>> print(jax.grad(tg.rewrite(entropy, tg.rules.strong_zero()))(p))
    [-0.30685282 -0.30685282  0.        ]

    The name is Enzyme's. Without the rule, apply `jnp.where` to the operand, too (JAX's FAQ).
    """
    concerned = match.where(may_make_nan)
    edit = edit_around(replace_keeping_zeros(every=False))
    if where is None:
        return MatchRule("strong_zero", concerned, edit, True)
    check_selector(where)
    return MatchRule("strong_zero", _SingleNodes(where, may_make_nan), edit, missing_ok)


@shows_arguments
def finite_derivative(where: Selector, *, missing_ok: bool = False) -> MatchRule:
    """Replaces gradients that are NaN or Inf with zero, where a derivative is not finite.

    There is no derivative at the kink of a norm, at the ends of the domain of `arccos`, or at
    0 / 0. Zero is the usual choice (for a norm at zero it is a subgradient).

    Args:
      where: a selector; the rule changes the operations in its matches whose derivative may not be
        finite: elementwise operations, matrix products and convolutions, rules of kind JVP, and
        calls of functions with a rule of kind VJP (`jax.custom_vjp`, `tracegrad.custom_gradient`),
        each call as one operation.
      missing_ok: whether there may be no such operation.

    Returns:
      A rule. It changes only NaN and Inf that result from finite cotangents. Values do not change,
      nor do tangents of forward mode (`tracegrad.jvp`; `jax.jvp` raises an error, as with
      `strong_zero`). The rule also hides derivatives that are rightly infinite, so `where` has no
      default, unlike in `strong_zero`.

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

    keep_zeros = replace_keeping_zeros(every=True)

    def mend(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        if not isinstance(node, CustomGradient) or node.kind == "jvp":
            return keep_zeros(op, *operands)
        if node.effects:
            raise GraphError(
                f"rules.finite_derivative: {op.match} has effects, which would happen again where "
                "its gradient is mended. Mend the gradient in its own rule, by "
                "jnp.where(jnp.isfinite(...), ...)"
            )
        closed_over = node.closed_over
        gradient = _finite_gradient(node, closed_over)

        def primal(*operands: Any) -> list[Any]:
            return op.results(*operands)

        primal.__name__ = primal.__qualname__ = node.name
        # With symbolic zeros, the node's rule may raise for inputs that are not differentiated.
        takes_active = bool(node.params.get("symbolic_zeros"))
        mended = with_gradient(
            primal, gradient, node.params, node.name, op.match.origin, takes_active
        )
        constants = [not_differentiated(node, operand) for operand in operands[:closed_over]]
        return mended(*constants, *operands[closed_over:])

    concerned = _SingleNodes(where, lambda o: may_make_nan(o) or _is_vjp_rule(o))
    return MatchRule("finite_derivative", concerned, edit_around(mend), missing_ok)


class _SingleNodes(Selector):
    """Selects the single nodes in a selector's matches for which `is_concerned` is true. ``where &
    match.where(is_concerned)`` would select a scope with only such nodes as one match."""

    def __init__(self, where: Selector, is_concerned: Callable[[Occurrence], bool]):
        super().__init__(*where.patterns)
        self.where, self.is_concerned = where, is_concerned

    def select_in(self, graph: Graph) -> Selection:
        covers = self.where.select_in(graph).covers
        matches = [o for o in graph.walk() if covers(o.path, o.node) and self.is_concerned(o)]
        return Selection(matches, covered_by(matches))

    def names(self, graph: Graph) -> list[str]:
        return [] if self.where.select_in(graph).matches else self.where.names(graph)

    def __repr__(self) -> str:
        return repr(self.where)


def _is_vjp_rule(occurrence: Occurrence) -> bool:
    node = occurrence.node
    return isinstance(node, CustomGradient) and node.kind == "vjp"


def _finite_gradient(node: CustomGradient, closed_over: int) -> Any:
    """Returns the gradient function of a node's rule, with zeros instead of NaN and Inf if all
    cotangents of the results are finite. The first `closed_over` operands get no gradient."""

    def gradient(op: Any, *dys: Any, active: Sequence[int] | None = None) -> list[Any]:
        places = range(closed_over, len(op.inputs)) if active is None else active
        active = [i for i in places if _jax.has_gradient(op.inputs[i])]
        _, back = _jax.vjp_of_some(lambda xs: run_node(node, xs), op.inputs, active)
        avals = list(map(jax.typeof, op.outputs))
        float_dys = [dy for dy, aval in zip(dys, avals, strict=True) if _jax.has_gradient(aval)]
        is_bad = jnp.any(jnp.stack([~jnp.all(jnp.isfinite(dy)) for dy in float_dys]))
        cotangents: list[Any] = [None] * len(op.inputs)
        for i, ct in zip(active, back(_jax.insert_float0(avals, float_dys)), strict=True):
            cotangents[i] = _finite(ct, is_bad)
        return cotangents

    return gradient


def _replace_not_finite(cotangent: Any, is_incoming_bad: Any) -> Any:
    keep = is_incoming_bad | jnp.isfinite(cotangent)
    return jnp.where(keep, cotangent, jnp.zeros_like(cotangent))


# Its tangent is that of the identity, so forward mode, the rule's transpose, does not change.
_finite = _jax.with_tangent(_replace_not_finite, lambda primals, tangents: tangents[0], "_finite")
"""Replaces NaN and Inf in a cotangent with zero, unless an incoming cotangent was not finite."""


# ------------------------------------------------------ rules that change finite gradients too


@shows_arguments
def straight_through(where: Selector, *, missing_ok: bool = False) -> MatchRule:
    """Differentiates each match as if it were the identity.

    Use it for operations whose derivative is zero or does not exist: a rounding, a sign, a clamp
    that bounds every element, a rectifier that is never active, a `stop_gradient` in somebody
    else's code.

    Args:
      where: a selector; each match is one function with one result. The function gets the gradient
        of the identity with respect to an input of the result's type. If there are several such
        inputs, the rule takes the input that depends on an argument of the program and that the
        function does not close over; for `lax.clamp`, the bounded operand.
      missing_ok: whether `where` may match nothing.

    Returns:
      A rule. It replaces the true derivative, finite or not, in forward mode too. Other inputs get
      no gradient. Applied to a program, the rule raises GraphError for a match with no such input,
      or with several.

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
        for match_ in matches:
            node = None if isinstance(match_, Fragment) else match_.node
            operands = operands_of(match_.nodes) if node is None else node.inputs
            results = values_leaving(graph.region_of(match_), match_.nodes)
            possible = positions_past(operands, results, varying, node)
            if len(possible) != 1:
                many = counted(len(possible), "float input") if possible else "no float input"
                raise GraphError(
                    f"rules.straight_through: {match_} has {many} of the type of its one result, "
                    "and the gradient is handed on to one such input. Match another function, "
                    "around it or inside it, or write a gradient function for "
                    "rules.override_gradient"
                )
            (positions[match_],) = possible

        def pass_through(op: Op, *operands: Any) -> Any:
            position = positions[op.match]

            def straight_through(*operands: Any) -> list[Any]:
                return op.results(*operands)

            @CHANGES_GRADIENT
            def tangent(primals: Any, tangents: Any) -> Any:
                return [tangents[position]]

            return _jax.with_tangent(straight_through, tangent)(*operands)

        return around_each(graph, matches, pass_through, depends_on=positions.__getitem__).graph

    return MatchRule("straight_through", where, edit, missing_ok)


def positions_past(
    operands: Sequence[Atom],
    results: Sequence[Value],
    varying: Mapping[Value, int] | None = None,
    node: Node | None = None,
) -> list[int]:
    """Returns the positions of the operands that could get the gradient of a match by
    `straight_through`: the operands with the type of the match's one result.

    Args:
      varying: masks, which are not 0 for the values that depend on an argument of the program; None
        if unknown. Then a constant bound or threshold could get the gradient, and lose it.
      node: the match, if it is one node.
    """
    if len(results) != 1 or not has_gradient(results[0]):
        return []
    fitting = [
        i
        for i, value in enumerate(operands)
        if isinstance(value, Value) and same_type(value.aval, results[0].aval)
    ]
    if node is not None and node.op == "clamp" and 1 in fitting:  # (lower, operand, upper)
        return [1]
    flowing = [i for i in fitting if varying is None or mask_of(operands[i], varying)]
    arguments = [i for i in flowing if node is None or not _is_closed_over(node, i)]
    return arguments or flowing or fitting[:1]


def _is_closed_over(node: Node, position: int) -> bool:
    """Whether an operand is a value that a function closes over. JAX puts these operands before the
    arguments, and has no names for them."""
    if isinstance(node, CustomGradient):
        return position < node.closed_over
    hints = node.regions["jaxpr"].hints if node.primitive is _jax.JIT else ()
    return bool(hints) and not hints[position]


@shows_arguments
def own_derivative(where: Selector, *, missing_ok: bool = False) -> MatchRule:
    """Removes custom gradients: differentiates the functions' own operations instead.

    Args:
      where: a selector of calls of such functions: ``match.call("square")``.
      missing_ok: whether `where` may match nothing.

    Returns:
      A rule. It removes the custom gradient of each match, made by `jax.custom_vjp`,
      `jax.custom_jvp` or `tracegrad.custom_gradient`. Applied to a program, the rule raises
      GraphError for a match without a custom gradient.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> @tg.custom_gradient
    ... def square(x):
    ...     return x**2, lambda dy: dy * x  # forgets the 2
    >>> mended = tg.rewrite(square, tg.rules.own_derivative(tg.match.call("square")))
    >>> print(jax.grad(square)(3.0), jax.grad(mended)(3.0))
    3.0 6.0
    """
    check_selector(where)

    def run_primal(op: Op, *operands: Any) -> list[Any]:
        (node, *more) = op.nodes
        if more or not isinstance(node, CustomGradient):
            raise GraphError(
                f"rules.own_derivative: {op.match} is no call of a function with a custom "
                "gradient; match one by its name, match.call(...)"
            )
        return node.primal(*operands)

    return MatchRule("own_derivative", where, edit_around(run_primal), missing_ok)
