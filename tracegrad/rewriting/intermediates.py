"""Values inside of a function, and the gradients there, without touching the function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Occurrence, has_gradient
from tracegrad.ir.editing import behind_each, place_of, shown_behind
from tracegrad.ir.occurrence import is_of_nothing, is_under_rules
from tracegrad.ir.running import run_graph
from tracegrad.ir.selector import Selector
from tracegrad.ir.stretches import refuse_references
from tracegrad.ir.wording import with_article
from tracegrad.rewriting.edits import (
    check_selector,
    made_different,
    matches_of,
    place_name,
    place_names,
)
from tracegrad.rewriting.identities import perturbed
from tracegrad.rewriting.marks import Marks, Shown
from tracegrad.tracing.arguments import Call, TakingApart
from tracegrad.tracing.callable import settle_call
from tracegrad.tracing.graphs import function_name, graph_of_call
from tracegrad.tracing.in_force import apply_in_force, differentiating, under_rules_already
from tracegrad.tracing.tools import tool


@tool
def intermediates(
    fun: Callable[..., Any], /, *args: Any, where: Selector, missing_ok: bool = False, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """What a function computes at some places, beside its result.

    Args:
      fun: a function of arrays and pytrees of arrays, as for `jax.jit`.
      *args, **kwargs: its arguments.
      where: a selector.
      missing_ok: whether it may match nothing.

    Returns:
      ``(output, values)``: the output of `fun`, and by the scope and name of each match the array
      that it computes (a tuple of several). Inside of a scan they are stacked over its steps along
      a new axis 0; of a branch that was not taken they are zeros. It traces `fun` at every call,
      and runs under every JAX transformation: ``jax.jit`` of a function that calls it compiles it.

    Raises:
      NoMatchError: nothing matches (unless `missing_ok`).
      GraphError: a match lies where its values cannot be led out of: in a while loop, a shard_map,
        or inside of a custom gradient.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def model(x):
    ...     for i in range(2):
    ...         with jax.named_scope(f"layer_{i}"):
    ...             x = 2 * x
    ...     return jnp.sum(x)
    >>> x = jnp.array([1.0, 3.0])
    >>> out, values = tg.intermediates(model, x, where=tg.match.scope("layer_*"))
    >>> print(out, values["layer_0"])
    16.0 [2. 6.]

    Of a train step that differentiates its loss itself, what is in the loss is found as well, as it
    is before that: see `intermediate_gradients`.

    As forward hooks of PyTorch's modules and flax's ``sow``.
    """
    _check(fun, where)
    marks = Marks(where, gradients=False)
    program = marks.trace(lambda: graph_of_call(fun, args, kwargs))
    inside = marks.shown(program)
    may_miss = missing_ok or bool(inside)
    found = matches_of(where, program, may_miss, marks, gradients=False)
    if inside:  # what is left of it when it is differentiated is not asked for as well
        found = [m for m in found if not (is_under_rules(m) or is_of_nothing(m))]
    return _led_out(program, inside, found, args, kwargs)


@tool
def intermediate_gradients(
    fun: Callable[..., Any],
    /,
    *args: Any,
    where: Selector,
    has_aux: bool = False,
    missing_ok: bool = False,
    **kwargs: Any,
) -> tuple[Any, dict[str, Any]]:
    """The gradients of a scalar function with respect to what it computes at some places.

    They are exact: what arrives there in the backward pass, by whatever custom gradients lie
    behind it; of a scope or call with several results, from outside of it. No value is changed.

    Of a function that differentiates its loss itself, as a train step does (by `jax.grad` and what
    calls that, `nnx.value_and_grad`, `eqx.filter_grad`; by `tracegrad.grad` or a tape), they are
    the gradients inside of that loss, in the one backward pass that the step runs. Under a
    `jax.vmap` or a scan around it they are stacked along axis 0, as is what the step computes.

    Args:
      fun: a function of arrays and pytrees of arrays that returns a float scalar; or one that
        differentiates a function in which `where` matches, which returns anything.
      *args, **kwargs: its arguments.
      where: a selector.
      has_aux: whether `fun` returns ``(value, aux)``, of which ``value`` is differentiated.
      missing_ok: whether it may match nothing.

    Returns:
      ``(output, gradients)``, as `intermediates`: the output of `fun`, which the same pass
      computes, and by the scope and name of each match the gradient (a tuple of several), of the
      shape and dtype of the value; stacked over the steps of a scan along a new axis 0. Values that
      are not float have none.

    Raises:
      NoMatchError, GraphError: as `intermediates`; GraphError too for a match in what a `jax.grad`
        that was imported by name has differentiated, for one that nothing leads to from what a
        train step differentiates with respect to, and where both the gradients of a scalar
        result and those inside may be meant.
      TypeError: the result is no float scalar, and nothing is differentiated inside.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(x):
    ...     hidden = jnp.maximum(x, 0)
    ...     return jnp.sum(hidden**2)
    >>> x, hidden = jnp.array([-1.0, 3.0]), tg.match.op("max")
    >>> value, gradients = tg.intermediate_gradients(loss, x, where=hidden)
    >>> print(value, gradients["max"])  # 2 hidden
    9.0 [0. 6.]
    >>> def step(x):
    ...     value, gradient = jax.value_and_grad(loss)(x)
    ...     return x - 0.1 * gradient, value
    >>> (trained, value), gradients = tg.intermediate_gradients(step, x, where=hidden)
    >>> print(trained, gradients["max"])
    [-1.   2.4] [0. 6.]

    As PyTorch's ``retain_grad`` and flax's ``perturb``, on an unmodified model.
    """
    _check(fun, where)
    marks = Marks(where, gradients=True)
    program = marks.trace(lambda: graph_of_call(fun, args, kwargs))
    inside = marks.shown(program)
    value = _type_of_value(fun, program, has_aux)
    if inside:
        _refuse_both(fun, program, where, marks)
        return _led_out(program, inside, [], args, kwargs)
    if not _is_float_scalar(value):
        matches_of(where, program, True, marks)  # raises for what is out of reach
        raise TypeError(
            f"intermediate_gradients wants a float scalar; {function_name(fun)} returned "
            f"{_kind(value)}. Sum its outputs, weighted by cotangents of your choice; with "
            "has_aux=True it may return a pair of a scalar and anything"
        )
    program = apply_in_force(program)
    found = matches_of(where, program, missing_ok, marks)
    for match in found:
        refuse_references(program.region_of(match), match.nodes, match)
    tapped = behind_each(program, found, lambda match: perturbed, wanted=has_gradient, tapped=True)
    call = TakingApart()(args, kwargs)

    def result(taps: Sequence[Any]) -> tuple[Any, list[Any]]:
        results = _run(tapped.graph, call, taps)
        return results[0], results

    # The rules in force were applied; who applies them to what is around it leaves it alone.
    marked = under_rules_already(result)
    zeros = [jnp.zeros(port.value.aval.shape, port.value.aval.dtype) for port in tapped.ins]
    with differentiating():
        cotangents, results = _jax.grad(marked, has_aux=True)(zeros)
    output = settle_call(program, call, results)
    by_match = [
        [ct for port, ct in zip(tapped.ins, cotangents, strict=True) if port.place == place]
        for place in map(place_of, found)
    ]
    return output, dict(zip(place_names(found), map(_alone, by_match), strict=True))


def _check(fun: object, where: object) -> None:
    if not callable(fun):
        raise TypeError(f"expected a function, got {fun!r}")
    check_selector(where)


def _type_of_value(fun: Callable[..., Any], program: Graph, has_aux: bool) -> Any:
    """The type of what a function returns, or of the first of the pair that it returns.

    Raises TypeError if that is no pair.
    """
    result = jax.tree.unflatten(program.out_tree, program.out_avals[: program.result_count])
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        got = f"{len(result)} values" if isinstance(result, tuple) else _kind(result)
        raise TypeError(
            f"has_aux=True: {function_name(fun)} is to return a pair (value, aux), not {got}"
        )
    return result[0] if has_aux else result


def _kind(value: Any) -> str:
    is_array = isinstance(value, jax.core.AbstractValue)
    return _jax.type_text(value) if is_array else with_article(type(value).__name__)


def _led_out(
    program: Graph,
    inside: Sequence[tuple[str, Sequence[Shown]]],
    outside: Sequence[Occurrence],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Runs a program; its result, and by name what is shown inside of what it differentiates and
    what leaves further matches."""
    shown = [each for _, of in inside for each in of]
    matches = [*(each.at for each in shown), *outside]
    wide = shown_behind(program, list({place_of(match): match for match in matches}.values()))
    call = TakingApart()(args, kwargs)
    results = _run(wide.graph, call)
    output = settle_call(program, call, results)
    further = results[len(program.outputs) :]
    pairs = list(zip(wide.outs, further, strict=True))
    led_out = [[v for port, v in pairs if port.place == place_of(match)] for match in matches]
    rest = iter(led_out)
    by_match = [
        [jnp.zeros_like(v) if each.is_zero else v for each in of for v in next(rest)]
        for _, of in inside
    ]
    names = made_different([*(name for name, _ in inside), *map(place_name, outside)])
    values = map(_alone, [*by_match, *rest])
    return output, dict(zip(names, values, strict=True))


def _refuse_both(fun: Callable[..., Any], program: Graph, where: Selector, asked: object) -> None:
    """Raises GraphError for a loss that differentiates something itself, where it is not clear
    whose gradients are meant."""
    outputs = program.outputs[: program.result_count]
    if len(outputs) != 1 or not _is_float_scalar(outputs[0].aval):
        return
    for match in where.look(program).matches:
        if not (is_under_rules(match) or is_of_nothing(match)):
            raise GraphError(
                f"{asked!r}: {match} lies in {function_name(fun)} itself, and other matches in "
                "what it differentiates: the gradients of its result may be meant, or those "
                "inside. Narrow the selector to one of them"
            )


def _is_float_scalar(aval: Any) -> bool:
    """Whether it is the type of one float."""
    is_array = isinstance(aval, _jax.ARRAY)
    return is_array and aval.shape == () and bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _run(program: Graph, call: Call, taps: Sequence[Any] = ()) -> list[Any]:
    values = [variable.value for variable in program.variables]
    return run_graph(program, [*jax.tree.leaves((call.args, call.kwargs)), *values, *taps])


def _alone(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
