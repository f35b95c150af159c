"""Rules that change the gradients of a program without changing its source code.

Each function of this module makes a rule: a function ``Graph -> Graph``, for `tracegrad.rewrite`,
``tracegrad.trace(rules=...)``, or to call on a graph. All rules act at the matches of a selector
(see `tracegrad.match`), some also on parameters (`match.param`). Rules keep the values of the
program bit for bit, and change no operation that does not match. Your own rule can be any function
from graph to graph.

>>> import jax, jax.numpy as jnp, tracegrad as tg
>>> def model(x):
...     return jnp.sum(jax.nn.relu(x) * x)
>>> def straight_through(op, dy):
...     return dy
>>> edited = tg.rewrite(model, tg.rules.override_gradient(tg.match.call("relu"), straight_through))
>>> print(jax.grad(model)(jnp.array([-2.0, 3.0])), jax.grad(edited)(jnp.array([-2.0, 3.0])))
[0. 6.] [-2.  6.]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph, Occurrence, has_gradient
from tracegrad.ir.editing import Op, behind_each
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.parameters import Parameters
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import brief
from tracegrad.rewriting import identities
from tracegrad.rewriting.loops import checkpointed_loop as checkpointed_loop
from tracegrad.rewriting.match_rule import MatchRule as MatchRule
from tracegrad.rewriting.match_rule import edit_around, refusing_refs, shows_arguments
from tracegrad.rewriting.matches import place_names
from tracegrad.rewriting.norms import within_norm, within_value
from tracegrad.rewriting.overriding import (
    GradientFunction,
    overriding,
    require_gradient_function,
)
from tracegrad.rewriting.repairs import finite_derivative as finite_derivative
from tracegrad.rewriting.repairs import own_derivative as own_derivative
from tracegrad.rewriting.repairs import straight_through as straight_through
from tracegrad.rewriting.repairs import strong_zero as strong_zero
from tracegrad.tracing.signatures import require_takes
from tracegrad.tracing.statics import is_array

__all__ = [
    "MatchRule",
    "checkpointed_loop",
    "clip_gradient",
    "finite_derivative",
    "override_gradient",
    "own_derivative",
    "recompute",
    "scale_gradient",
    "stop_gradient",
    "straight_through",
    "strong_zero",
    "tap_gradient",
]


# --------------------------------------------------------------------------- overriding a gradient


@shows_arguments
def override_gradient(
    where: Selector, grad: GradientFunction, *, missing_ok: bool = False
) -> MatchRule:
    """Gives each match a gradient function.

    Args:
      where: a selector; each match is one operation for `grad`.
      grad: ``grad(op, *dys)``. `op` has ``op.inputs`` and ``op.outputs`` (tuples of arrays),
        ``op.params`` (a primitive's parameters) and ``op.name``; `dys` are one cotangent for each
        output, of its shape and dtype. `grad` returns one cotangent or None for each input; for a
        single input also the cotangent alone. The inputs of a single operation are its operands,
        also scalars written into the program; the inputs of an inlined call or a scope are the
        arrays that enter it, in the order of their first use. (A broadcast or cast is not a use of
        its array; a use of its result is.) Higher derivatives differentiate the operations in
        `grad`.
      missing_ok: whether `where` may match nothing.

    Returns:
      A rule. If a match is inside of another match, of this rule or of an earlier rule, only the
      outer match counts: its gradient function replaces the derivative of all operations in it.

    Computing a gradient checks the result of `grad`: raises ValueError or TypeError for a wrong
    number, shape or dtype of cotangents, with the operation and its source line.

    It corresponds to TensorFlow 1's ``gradient_override_map``, and to module hooks in PyTorch.
    Guided backpropagation (Springenberg et al., 2015):

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def guided(op, dy):
    ...     return jnp.where((op.inputs[0] > 0) & (dy > 0), dy, 0.0)
    >>> f = tg.rewrite(lambda x: jnp.sum(jax.nn.relu(x) * jnp.array([1.0, -1.0, 1.0])),
    ...                tg.rules.override_gradient(tg.match.call("relu"), guided))
    >>> print(jax.grad(f)(jnp.array([1.0, 1.0, -1.0])))
    [1. 0. 0.]
    """
    require_gradient_function(grad)
    edit = refusing_refs(edit_around(overriding(grad), _name))
    return MatchRule("override_gradient", where, edit, missing_ok)


_name = operator.attrgetter("name")


# ------------------------------------------------------------------------------- stop, recompute


@shows_arguments
def stop_gradient(
    where: Selector | Parameters,
    inputs: int | Sequence[int] | None = None,
    *,
    missing_ok: bool = False,
) -> MatchRule:
    """Stops the gradient at each match.

    Args:
      where: a selector; or `match.param`, which freezes those parameters.
      inputs: the positions of the inputs that get no gradient (see `override_gradient` for the
        inputs of a match); None: all.
      missing_ok: whether `where` may match nothing.

    Returns:
      A rule. Applied to a program, it raises IndexError for a match without such an input, and
      NoMatchError if the inputs have no gradient in any match (numbers that are written into the
      program, integers).

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> f = tg.rewrite(lambda w, x: jnp.sum(x @ w),
    ...                tg.rules.stop_gradient(tg.match.op("dot_general"), inputs=1))
    >>> print(jax.grad(f, (0, 1))(2 * jnp.ones(2), jnp.ones((1, 2))))
    (Array([0., 0.], dtype=float32), Array([[2., 2.]], dtype=float32))
    """
    stop: Any = jax.lax.stop_gradient
    return identities.identity_rule("stop_gradient", where, stop, missing_ok, inputs)


@shows_arguments
def recompute(
    where: Selector, policy: Callable[..., Any] | None = None, *, missing_ok: bool = False
) -> MatchRule:
    """Recomputes the intermediates of each match in the backward pass, instead of saving them.

    Args:
      where: a selector; each match is recomputed by itself.
      policy: the intermediates to save nevertheless (`jax.checkpoint_policies`); None: save none.
      missing_ok: whether `where` may match nothing.

    Returns:
      A rule. Applied to a program, it raises GraphError if nodes of a match have effects, or if an
      operation outside of a match depends on a node of the match and leads to another node of the
      match.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def model(x):
    ...     for i in range(2):
    ...         with jax.named_scope(f"block_{i}"):
    ...             x = jnp.sin(jnp.cos(x))
    ...     return x
    >>> recomputed = tg.rewrite(model, tg.rules.recompute(tg.match.scope("block_*")))
    >>> print(tg.graph(recomputed, 1.0))  # doctest: +ELLIPSIS
    model(x: ~f32[]) -> ~f32[]
    ...

    It is ``jax.checkpoint`` (or ``tf.recompute_grad``) around parts of an unmodified model.
    """

    if policy is not None:
        require_takes(policy, 0, "policy of jax.checkpoint_policies")

    def recomputed(op: Op, *operands: Any) -> Any:
        def run(*operands: Any) -> list[Any]:
            return op.results(*operands)

        run.__name__ = run.__qualname__ = op.name
        return jax.checkpoint(run, policy=policy)(*operands)

    return MatchRule("recompute", where, refusing_refs(edit_around(recomputed, _name)), missing_ok)


# ------------------------------------------------------------------- the cotangents of the outputs


@shows_arguments
def clip_gradient(
    where: Selector | Parameters,
    max_norm: float | None = None,
    max_value: float | None = None,
    *,
    missing_ok: bool = False,
) -> MatchRule:
    """Clips the cotangents of a match's outputs: the gradients that arrive from outside.

    Args:
      where: a selector; or `match.param`, for the gradients of parameters.
      max_norm: the largest Euclidean norm of the cotangent of an output; a cotangent with a larger
        norm is scaled down. If the function with the rule is mapped by `jax.vmap`, each example has
        its own norm; an array that the program itself maps has one norm. In a `jax.shard_map`, the
        part on each device has its own norm. If entries are infinite, the finite entries become
        zero: only the infinite entries give the direction. A cotangent with a NaN is not changed.
      max_value: the largest absolute value of an element, applied first, as by ``jnp.clip``: an
        infinite element becomes the limit, and NaN stays NaN. Complex elements keep their phase.
      missing_ok: whether `where` may match nothing.

    Returns:
      A rule. Both limits hold for any cotangents, up to rounding: no step of the computation
      overflows or underflows, not even in half precision. The limits apply to the cotangents of a
      first derivative. Higher derivatives differentiate the clipped first derivative, and do not
      clip again, as with a `jax.custom_vjp` whose forward function returns its argument.
      (`override_gradient` acts on the cotangents of higher derivatives too, and so does clipping
      where nested tapes record each operation.)

    Raises ValueError without a limit, and for a limit that is not positive.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> f = tg.rewrite(lambda x: 10.0 * jnp.sin(x), tg.rules.clip_gradient(
    ...     tg.match.op("sin"), max_value=1.0))
    >>> print(jax.grad(f)(0.0))
    1.0

    Clipping at a module's output differs from clipping the gradients of its parameters. Here 3
    arrives at the output of ``dense``, and 3 · (3, 4) at its parameter:

    >>> def loss(params, x):
    ...     with jax.named_scope("dense"):
    ...         y = x @ params["dense"]["w"]
    ...     return 3 * jnp.sum(y)
    >>> params, x = {"dense": {"w": jnp.zeros(2)}}, jnp.array([3.0, 4.0])
    >>> at_output = tg.rules.clip_gradient(tg.match.scope("dense"), max_norm=1.0)
    >>> print(jax.grad(tg.rewrite(loss, at_output))(params, x)["dense"]["w"])
    [3. 4.]
    >>> of_parameter = tg.rules.clip_gradient(tg.match.param("dense.*"), max_norm=1.0)
    >>> print(jax.grad(tg.rewrite(loss, of_parameter))(params, x)["dense"]["w"])
    [0.6 0.8]
    """
    if max_norm is None and max_value is None:
        raise ValueError("clip_gradient wants max_norm, max_value or both")
    for name, limit in (("max_norm", max_norm), ("max_value", max_value)):
        if limit is not None and not (is_array(limit) and limit > 0):
            raise ValueError(f"clip_gradient wants a positive {name}, not {limit!r}")

    @CHANGES_GRADIENT
    def clip(cotangent: Any) -> Any:
        if max_value is not None:
            cotangent = within_value(cotangent, max_value)
        if max_norm is not None:
            cotangent = within_norm(cotangent, max_norm)
        return cotangent

    clipped, outer = _jax.with_cotangent(clip, "clip_gradient"), _jax.with_cotangent_alone(clip)
    return identities.identity_rule("clip_gradient", where, clipped, missing_ok, outer=outer)


@shows_arguments
def scale_gradient(
    where: Selector | Parameters,
    factor: Any,
    inputs: int | Sequence[int] | None = None,
    *,
    missing_ok: bool = False,
) -> MatchRule:
    """Multiplies the gradient that arrives at a match's outputs, or that leaves its inputs.

    Args:
      where: a selector; or `match.param`, for the gradients of parameters.
      factor: a number or a scalar array, which may be a traced value. A negative factor reverses
        the gradient (Ganin and Lempitsky, 2015, for domain-adversarial training).
      inputs: positions of inputs (see `override_gradient`): multiplies the gradients of these
        inputs; other inputs, such as weights, keep their gradients. None: multiplies at the
        outputs.
      missing_ok: whether `where` may match nothing.

    Returns:
      A rule. Tangents of forward mode are multiplied as well. Applied to a program, the rule raises
      IndexError for a match without such an input, and NoMatchError as `stop_gradient`.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> f = tg.rewrite(lambda x: jnp.sin(x), tg.rules.scale_gradient(tg.match.op("sin"), -0.5))
    >>> print(f(0.0), jax.grad(f)(0.0))
    0.0 -0.5
    """
    if not is_array(factor) or jnp.shape(factor) != ():
        raise ValueError(f"scale_gradient wants a scalar factor, not {brief(factor)}")
    return identities.identity_rule(
        "scale_gradient",
        where,
        lambda x: identities.scaled(x, factor),
        missing_ok,
        inputs,
        of_parameter=lambda x: identities.scaled_once(x, factor),
    )


@shows_arguments
def tap_gradient(
    where: Selector | Parameters, callback: Callable[[str, Any], Any], *, missing_ok: bool = False
) -> MatchRule:
    """Calls a function with the gradients that arrive at a match's outputs from outside.

    `tracegrad.intermediate_gradients` returns these gradients as values.

    Args:
      where: a selector; or `match.param`, for the gradients of parameters, by their paths.
      callback: ``callback(place, cotangent)``, called on the host each time a gradient arrives in
        a first derivative, in any order (`jax.debug.callback`). `place` is the scope and name of
        the match, as in `tracegrad.intermediates` (or the path of the parameter), `cotangent` a
        NumPy array.
      missing_ok: whether `where` may match nothing.

    Returns:
      A rule.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(x):
    ...     return jnp.sum(jnp.maximum(x, 0) ** 2)
    >>> show = tg.rules.tap_gradient(tg.match.op("max"), lambda place, dy: print(place, dy))
    >>> gradient = jax.grad(tg.rewrite(loss, show))(jnp.array([-1.0, 3.0]))
    max [0. 6.]
    """
    require_takes(callback, 2, "function callback(place, cotangent)")

    def make_tap(place: str) -> Callable[[Any], Any]:
        @CHANGES_GRADIENT
        def tap(cotangent: Any) -> Any:
            jax.debug.callback(lambda array: callback(place, array), cotangent)
            return cotangent

        return tap

    def identity(place: str) -> Callable[[Any], Any]:
        return _jax.with_cotangent(make_tap(place), "tap_gradient")

    def outer_identity(place: str) -> Callable[[Any], Any]:
        return _jax.with_cotangent_alone(make_tap(place))

    def edit(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        places = dict(zip(matches, place_names(matches), strict=True))
        edits = {match: identity(place) for match, place in places.items()}
        return behind_each(
            graph, matches, edits.__getitem__, selects=has_gradient, depends_on=places.__getitem__
        ).graph

    return MatchRule(
        "tap_gradient",
        where,
        refusing_refs(edit),
        missing_ok,
        identity=identity,
        outer_identity=outer_identity,
    )
