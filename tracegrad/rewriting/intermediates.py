"""Intermediate values of an unmodified function, and the gradients with respect to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Occurrence, has_gradient, scopes
from tracegrad.ir.editing import behind_each, by_match, show_each
from tracegrad.ir.node_groups import refuse_references
from tracegrad.ir.occurrence import is_under_rules
from tracegrad.ir.running import run_graph
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import with_article
from tracegrad.ir.writing import Port
from tracegrad.rewriting.identities import perturbed
from tracegrad.rewriting.matches import check_selector, find_matches, place_names
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
        cannot be returned; or in code that JAX has already differentiated.

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

    It corresponds to forward hooks of PyTorch's modules and to flax's ``sow``.
    """
    _check_arguments(fun, where)
    program = graph_of_call(fun, args, kwargs)
    asked = f"intermediates({where!r})"
    matches = find_matches(where, program, missing_ok, asked, gradients=False)
    _refuse_differentiated(asked, matches)
    wide = show_each(program, matches)
    call = CallPacker()(args, kwargs)
    results = _run_program(wide.graph, call)
    output = finish_call(program, call, results)
    return output, _arrays_by_name(matches, wide.outs, results[len(program.outputs) :])


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

    For the gradients inside of a train step, ask for those of the loss that it differentiates, or
    give the step the rule `rules.tap_gradient`.

    Args:
      fun: a function of arrays and pytrees of arrays that returns a float scalar.
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
      NoMatchError, GraphError: as `intermediates`. Also GraphError for a match in code that JAX has
        already differentiated.
      TypeError: the result is not a float scalar.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(x):
    ...     hidden = jnp.maximum(x, 0)
    ...     return jnp.sum(hidden**2)
    >>> x, hidden = jnp.array([-1.0, 3.0]), tg.match.op("max")
    >>> value, gradients = tg.intermediate_gradients(loss, x, where=hidden)
    >>> print(value, gradients["max"])  # 2 hidden
    9.0 [0. 6.]

    It corresponds to PyTorch's ``retain_grad`` and flax's ``perturb``, on an unmodified model.
    """
    _check_arguments(fun, where)
    program = graph_of_call(fun, args, kwargs)
    value = _type_of_value(fun, program, has_aux)
    if not _is_float_scalar(value):
        raise TypeError(
            f"intermediate_gradients wants a float scalar; {function_name(fun)} returned "
            f"{_type_text(value)}. Call it with the loss, not with the train step. Return the sum "
            "of the outputs, weighted by cotangents of your choice. With has_aux=True the function "
            "may return a pair of a scalar and anything"
        )
    program = apply_rules_in_force(program)
    asked = f"intermediate_gradients({where!r})"
    every = find_matches(where, program, True, asked, gradients=False)
    _refuse_differentiated(asked, [match for match in every if not is_under_rules(match)])
    matches = find_matches(where, program, missing_ok, asked)
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
    zeros = [_jax.zeros_of(port.value.aval) for port in tapped.ins]
    with without_editing():
        cotangents, results = _jax.grad(marked, has_aux=True)(zeros)
    output = finish_call(program, call, results)
    return output, _arrays_by_name(matches, tapped.ins, cotangents)


def _refuse_differentiated(asked: str, matches: Sequence[Occurrence]) -> None:
    for match in matches:
        if any(map(scopes.is_differentiated, match.steps)):
            raise GraphError(
                f"{asked}: {match} lies in code that JAX has differentiated already, in which the "
                "operations of the function and of its derivative are mixed. Call it with the "
                "function that is differentiated (the loss)"
            )


def _arrays_by_name(
    matches: Sequence[Occurrence], ports: Sequence[Port], arrays: Sequence[Any]
) -> dict[str, Any]:
    """Returns the arrays of ports by the names of their matches; several of one as a tuple."""
    of_matches = by_match(matches, ports, arrays)
    values = [each[0] if len(each) == 1 else tuple(each) for each in of_matches]
    return dict(zip(place_names(matches), values, strict=True))


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


def _is_float_scalar(aval: Any) -> bool:
    is_array = isinstance(aval, _jax.ARRAY)
    return is_array and aval.shape == () and bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _run_program(program: Graph, call: PackedCall, taps: Sequence[Any] = ()) -> list[Any]:
    values = [variable.value for variable in program.variables]
    return run_graph(program, [*jax.tree.leaves((call.args, call.kwargs)), *values, *taps])
