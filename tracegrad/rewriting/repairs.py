"""Rules that repair the problems that `explain` finds: they change gradients, but no values.

`strong_zero` and `finite_derivative` change only NaN and Inf; `straight_through` and
`own_derivative` change finite gradients too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.ir import (
    Atom,
    CustomGradient,
    Fragment,
    Graph,
    GraphError,
    Occurrence,
    Value,
    has_gradient,
    match,
)
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.node_groups import operands_of, values_leaving
from tracegrad.ir.nodes import same_type
from tracegrad.ir.selector import Selection, Selector, covered_by
from tracegrad.ir.wording import counted
from tracegrad.rewriting.edits import check_selector
from tracegrad.rewriting.kept_zeros import may_make_nan, replace_keeping_zeros
from tracegrad.rewriting.match_rule import MatchRule, edit_around, shows_arguments


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
      (`jax.custom_jvp`: `jax.nn.softmax`, `jnp.logaddexp`), but not of kind VJP. Second
      derivatives by forward mode (`tracegrad.hessian`, `tracegrad.hvp`) keep zeros too.
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
    return MatchRule("strong_zero", _SingleNodes(where), edit, missing_ok)


@shows_arguments
def finite_derivative(where: Selector, *, missing_ok: bool = False) -> MatchRule:
    """Replaces gradients that are NaN or Inf with zero, where a derivative is not finite.

    There is no derivative at the kink of a norm, at the ends of the domain of `arccos`, or at
    0 / 0. Zero is the usual choice (for a norm at zero it is a subgradient).

    Args:
      where: a selector; the rule changes the operations in its matches whose derivative may not be
        finite, as in `strong_zero`: not the rules of a `jax.custom_vjp`.
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
    edit = edit_around(replace_keeping_zeros(every=True))
    return MatchRule("finite_derivative", _SingleNodes(where), edit, missing_ok)


class _SingleNodes(Selector):
    """Selects the single nodes in a selector's matches for which `may_make_nan` is true. ``where &
    match.where(may_make_nan)`` would select a scope with only such nodes as one match."""

    def __init__(self, where: Selector):
        super().__init__(*where.patterns)
        self.where = where

    def select_in(self, graph: Graph) -> Selection:
        covers = self.where.select_in(graph).covers
        matches = [o for o in graph.walk() if covers(o.path, o.node) and may_make_nan(o)]
        return Selection(matches, covered_by(matches))

    def names(self, graph: Graph) -> list[str]:
        return [] if self.where.select_in(graph).matches else self.where.names(graph)

    def __repr__(self) -> str:
        return repr(self.where)


# ------------------------------------------------------ rules that change finite gradients too


@shows_arguments
def straight_through(where: Selector, *, missing_ok: bool = False) -> MatchRule:
    """Differentiates each match as if it were the identity.

    Use it for operations whose derivative is zero or does not exist: a rounding, a sign, a clamp
    that bounds every element, a rectifier that is never active, a `stop_gradient` in somebody
    else's code.

    Args:
      where: a selector; each match is one function with one result. The function gets the gradient
        of the identity with respect to its one input of the result's type; for `lax.clamp` the
        bounded operand.
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
        positions: dict[Occurrence, int] = {}
        for match_ in matches:
            single = not isinstance(match_, Fragment)
            operands = match_.node.inputs if single else operands_of(match_.nodes)
            results = values_leaving(graph.region_of(match_), match_.nodes)
            possible = positions_past(operands, results, match_.node.op if single else "")
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


def positions_past(operands: Sequence[Atom], results: Sequence[Value], op: str = "") -> list[int]:
    """Returns the positions of the operands that could get the gradient of a match by
    `straight_through`: the operands with the type of the match's one result. `op` is the name of
    the primitive, if the match is one operation."""
    if len(results) != 1 or not has_gradient(results[0]):
        return []
    fitting = [
        i
        for i, value in enumerate(operands)
        if isinstance(value, Value) and same_type(value.aval, results[0].aval)
    ]
    return [1] if op == "clamp" and 1 in fitting else fitting  # clamp(lower, operand, upper)


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
