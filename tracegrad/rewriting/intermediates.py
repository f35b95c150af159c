"""Intermediate values of an unmodified function, and the gradients with respect to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Occurrence, has_gradient
from tracegrad.ir.editing import behind_each, place_of, show_each
from tracegrad.ir.node_groups import refuse_references
from tracegrad.ir.occurrence import is_call_without_operands, is_under_rules
from tracegrad.ir.running import run_graph
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import with_article
from tracegrad.rewriting.edits import (
    check_selector,
    find_matches,
    number_repeated_names,
    place_name,
    place_names,
)
from tracegrad.rewriting.identities import perturbed
from tracegrad.rewriting.marks import Marks, Shown
from tracegrad.tracing.arguments import CallPacker, PackedCall
from tracegrad.tracing.callable import finish_call
from tracegrad.tracing.graphs import function_name, graph_of_call
from tracegrad.tracing.in_force import apply_rules_in_force, under_rules_already, without_editing
from tracegrad.tracing.tools import tool


@tool
def intermediates(
    fun: Callable[..., Any], /, *args: Any, where: Selector, missing_ok: bool = False, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns intermediate values of a function beside its result.

    Args:
      fun: a function of arrays and pytrees of arrays, as for `jax.jit`.
      *args, **kwargs: the arguments of `fun`.
      where: a selector of the operations whose results are returned.
      missing_ok: whether `where` may match nothing.

    Returns:
      ``(output, values)``: the output of `fun`, and a dict from the scope and name of each match to
      the match's array (to a tuple of several arrays). Values in a scan are stacked over its steps
      along a new axis 0; values in a branch that was not taken are zeros. Each call traces `fun`.
      It works under every JAX transformation: call it in a function under ``jax.jit`` to compile
      it.

    Raises:
      NoMatchError: nothing matches (unless `missing_ok`).
      GraphError: a match is in a while loop, a shard_map or a custom gradient, whose inner values
        cannot be returned.

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

    If `fun` is a train step that differentiates a loss, the selector also finds the operations of
    the loss before differentiation: see `intermediate_gradients`.

    It corresponds to forward hooks of PyTorch's modules and to flax's ``sow``.
    """
    _check_arguments(fun, where)
    marks = Marks(where, gradients=False)
    program = marks.trace(lambda: graph_of_call(fun, args, kwargs))
    in_losses = marks.find_shown(program)
    may_miss = missing_ok or bool(in_losses)
    matches = find_matches(where, program, may_miss, marks, gradients=False)
    if in_losses:  # do not also match the operations of the loss that differentiation left
        matches = [m for m in matches if not (is_under_rules(m) or is_call_without_operands(m))]
    return _run_and_show(program, in_losses, matches, args, kwargs)


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
    """Returns the gradients of a scalar function with respect to intermediate values.

    The gradients are the exact cotangents of the backward pass, after all custom gradients on the
    way. The gradient of a result of a scope or call counts only uses outside of the scope or call.
    No value is changed.

    If `fun` differentiates a loss itself, as a train step does (by `jax.grad` or by a function that
    calls it, such as `nnx.value_and_grad` and `eqx.filter_grad`; by `tracegrad.grad` or a tape),
    the result has the gradients of that loss, from the single backward pass that the step runs. If
    that loss is under a `jax.vmap` or in a scan, the gradients are stacked along axis 0, as the
    step's values are.

    Args:
      fun: a function of arrays and pytrees of arrays that returns a float scalar; or a function
        that returns anything, and differentiates a function in which `where` matches.
      *args, **kwargs: the arguments of `fun`.
      where: a selector of the operations whose results get a gradient.
      has_aux: whether `fun` returns ``(value, aux)``; only ``value`` is differentiated.
      missing_ok: whether `where` may match nothing.

    Returns:
      ``(output, gradients)``, as `intermediates`: the output of `fun`, from the same pass, and a
      dict from the scope and name of each match to the gradient (to a tuple of several gradients).
      A gradient has the shape and dtype of its value; gradients in a scan are stacked over its
      steps along a new axis 0. Values that are not float have no gradient.

    Raises:
      NoMatchError, GraphError: as `intermediates`. Also GraphError for a match in a function that
        was differentiated by a `jax.grad` imported by name; for a match that does not depend on
        anything that a train step differentiates with respect to; and if both the scalar result of
        `fun` and an inner loss could be meant.
      TypeError: the result is not a float scalar, and `fun` differentiates nothing itself.

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

    It corresponds to PyTorch's ``retain_grad`` and flax's ``perturb``, on an unmodified model.
    """
    _check_arguments(fun, where)
    marks = Marks(where, gradients=True)
    program = marks.trace(lambda: graph_of_call(fun, args, kwargs))
    in_losses = marks.find_shown(program)
    value = _type_of_value(fun, program, has_aux)
    if in_losses:
        _refuse_two_losses(fun, program, where, marks)
        return _run_and_show(program, in_losses, [], args, kwargs)
    if not _is_float_scalar(value):
        find_matches(where, program, True, marks)  # raises for a match that cannot be reached
        raise TypeError(
            f"intermediate_gradients wants a float scalar; {function_name(fun)} returned "
            f"{_type_text(value)}. Return the sum of the outputs, weighted by cotangents of your "
            "choice. With has_aux=True the function may return a pair of a scalar and anything"
        )
    program = apply_rules_in_force(program)
    matches = find_matches(where, program, missing_ok, marks)
    for match in matches:
        refuse_references(program.region_of(match), match.nodes, match)
    tapped = behind_each(
        program, matches, lambda match: perturbed, selects=has_gradient, tapped=True
    )
    call = CallPacker()(args, kwargs)

    def to_result(graph: Graph) -> Callable[..., Any]:
        def result(taps: Sequence[Any]) -> tuple[Any, list[Any]]:
            results = _run_program(graph, call, taps)
            return results[0], results

        return result

    # The rules in force were applied here; the mark keeps enclosing code from applying them again.
    marked = under_rules_already(tapped.graph, to_result)
    zeros = [jnp.zeros(port.value.aval.shape, port.value.aval.dtype) for port in tapped.ins]
    with without_editing():
        cotangents, results = _jax.grad(marked, has_aux=True)(zeros)
    output = finish_call(program, call, results)
    by_match = [
        [ct for port, ct in zip(tapped.ins, cotangents, strict=True) if port.place == place]
        for place in map(place_of, matches)
    ]
    return output, dict(zip(place_names(matches), map(_unwrap_single, by_match), strict=True))


def _check_arguments(fun: object, where: object) -> None:
    if not callable(fun):
        raise TypeError(f"expected a function, got {fun!r}")
    check_selector(where)


def _type_of_value(fun: Callable[..., Any], program: Graph, has_aux: bool) -> Any:
    """Returns the type of a function's result or, if `has_aux`, of its first part. Raises TypeError
    if `has_aux` and the result is not a pair."""
    result = jax.tree.unflatten(program.out_tree, program.out_avals[: program.result_count])
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        got = f"{len(result)} values" if isinstance(result, tuple) else _type_text(result)
        raise TypeError(
            f"has_aux=True: {function_name(fun)} is to return a pair (value, aux), not {got}"
        )
    return result[0] if has_aux else result


def _type_text(value: Any) -> str:
    is_array = isinstance(value, jax.core.AbstractValue)
    return _jax.type_text(value) if is_array else with_article(type(value).__name__)


def _run_and_show(
    program: Graph,
    in_losses: Sequence[tuple[str, Sequence[Shown]]],
    matches: Sequence[Occurrence],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Runs a program; returns its result, and arrays by the names of matches: first the arrays of
    the losses that the program differentiates (see `Marks.find_shown`), and then the arrays that
    leave `matches`."""
    sources = [*(each.at for _, shown in in_losses for each in shown), *matches]
    wide = show_each(program, list({place_of(source): source for source in sources}.values()))
    call = CallPacker()(args, kwargs)
    results = _run_program(wide.graph, call)
    output = finish_call(program, call, results)
    ports = list(zip(wide.outs, results[len(program.outputs) :], strict=True))
    # The arrays of each source in turn.
    arrays = iter([[v for port, v in ports if port.place == place_of(each)] for each in sources])
    by_match = [
        [jnp.zeros_like(v) if each.is_zero else v for each in shown for v in next(arrays)]
        for _, shown in in_losses
    ]
    names = number_repeated_names([*(name for name, _ in in_losses), *map(place_name, matches)])
    values = map(_unwrap_single, [*by_match, *arrays])
    return output, dict(zip(names, values, strict=True))


def _refuse_two_losses(
    fun: Callable[..., Any], program: Graph, where: Selector, rule: object
) -> None:
    """Raises GraphError if a scalar function also differentiates a loss, and both have matches: the
    gradients of either may be meant."""
    outputs = program.outputs[: program.result_count]
    if len(outputs) != 1 or not _is_float_scalar(outputs[0].aval):
        return
    for match in where.select_in(program).matches:
        if not (is_under_rules(match) or is_call_without_operands(match)):
            raise GraphError(
                f"{rule!r}: {match} lies in {function_name(fun)} itself, and other matches lie in "
                "a function that it differentiates: the gradients of its result may be meant, or "
                "the gradients of the inner function. Narrow the selector to one of the two"
            )


def _is_float_scalar(aval: Any) -> bool:
    is_array = isinstance(aval, _jax.ARRAY)
    return is_array and aval.shape == () and bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _run_program(program: Graph, call: PackedCall, taps: Sequence[Any] = ()) -> list[Any]:
    values = [variable.value for variable in program.variables]
    return run_graph(program, [*jax.tree.leaves((call.args, call.kwargs)), *values, *taps])


def _unwrap_single(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
