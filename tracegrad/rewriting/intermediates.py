"""Values inside of a function, and the gradients there, without touching the function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.selector import Selector
from tracegrad.lowering import evaluate
from tracegrad.rewriting.edits import check_selector, matches_of, place_names
from tracegrad.rewriting.ports import with_outputs, with_taps
from tracegrad.tracing.graphs import function_name, graph
from tracegrad.tracing.in_force import apply_in_force, under_rules_already
from tracegrad.variables.trees import given

_TAP = "intermediate"


def intermediates(
    fun: Callable[..., Any], where: Selector, *, missing_ok: bool = False
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """What a function computes at some places, beside its result.

    Args:
      fun: a function of arrays and pytrees of arrays, as for `jax.jit`.
      where: a selector.
      missing_ok: whether it may match nothing.

    Returns:
      A function of the same arguments. It returns ``(output, values)``: the output of `fun`, and
      by the scope and name of each match the array that it computes (a tuple of several). Inside
      of a scan they are stacked over its steps along a new axis 0; of a branch that was not taken
      they are zeros. It traces `fun` at every call, and runs under every JAX transformation.

    Raises, when it is called:
      NoMatchError: nothing matches (unless `missing_ok`).
      GraphError: a match lies where its values cannot be led out of: in a while loop, a shard_map,
        or inside of a custom gradient.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def model(x):
    ...     for i in range(2):
    ...         with jax.named_scope(f"layer_{i}"):
    ...             x = 2 * x
    ...     return jnp.sum(x)
    >>> out, values = tg.intermediates(model, tg.match.scope("layer_*"))(jnp.array([1.0, 3.0]))
    >>> print(out, values["layer_0"])
    16.0 [2. 6.]

    As forward hooks of PyTorch's modules and flax's ``sow``.
    """
    _check(fun, where)

    @functools.wraps(fun, updated=())
    def with_values(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        program = graph(fun)(*args, **kwargs)
        asked = f"intermediates({where!r})"
        found = matches_of(where, program, missing_ok, asked, gradients=False)
        wide, positions = with_outputs(program, found)
        count = len(program.outputs)
        results = _run(wide, args, kwargs)
        _assign(program, results[:count])
        further = results[count:]
        values = {
            name: _alone([further[i] for i in own])
            for name, own in zip(place_names(found), positions, strict=True)
        }
        return _unflatten(program, results[:count]), values

    return with_values


def intermediate_gradients(
    fun: Callable[..., Any],
    where: Selector,
    has_aux: bool = False,
    *,
    missing_ok: bool = False,
) -> Callable[..., Any]:
    """The gradients of a scalar function with respect to what it computes at some places.

    They are exact: what arrives there in the backward pass, by whatever custom gradients lie
    behind it. No value is changed.

    Args:
      fun: a function of arrays and pytrees of arrays that returns a float scalar.
      where: a selector.
      has_aux: whether `fun` returns ``(value, aux)``, where ``aux`` is handed on.
      missing_ok: whether it may match nothing.

    Returns:
      A function of the same arguments. It returns a dict: by the scope and name of each match the
      gradient (a tuple of several), of the shape and dtype of the value; stacked over the steps of
      a scan along a new axis 0. With `has_aux` ``(gradients, aux)``. Values that are not float
      have none.

    Raises, when it is called:
      NoMatchError, GraphError: as `intermediates`; GraphError too for a match in what JAX has
        differentiated already.
      TypeError: the result is no float scalar.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(x):
    ...     hidden = jnp.maximum(x, 0)
    ...     return jnp.sum(hidden**2)
    >>> gradients = tg.intermediate_gradients(loss, tg.match.op("max"))(jnp.array([-1.0, 3.0]))
    >>> print(gradients["max"])  # 2 hidden
    [0. 6.]

    As PyTorch's ``retain_grad`` and flax's ``perturb``, on an unmodified model.
    """
    _check(fun, where)

    @functools.wraps(fun, updated=())
    def gradients(*args: Any, **kwargs: Any) -> Any:
        program = apply_in_force(graph(fun)(*args, **kwargs))
        found = matches_of(where, program, missing_ok, f"intermediate_gradients({where!r})")
        tapped = with_taps(program, _TAP, found)

        def result(taps: Sequence[Any]) -> tuple[Any, tuple[Any, list[Any]]]:
            results = _run(tapped, args, kwargs, taps)
            output = _unflatten(program, results)
            value, aux = output if has_aux else (output, None)
            aval = jax.typeof(value) if not isinstance(value, dict | list | tuple) else None
            if aval is None or aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.floating):
                kind = "a tree" if aval is None else _jax.type_text(aval)
                raise TypeError(
                    f"intermediate_gradients wants a float scalar; {function_name(fun)} returned "
                    f"{kind}. Sum its outputs, weighted by cotangents of your choice"
                )
            return value, (aux, results)

        # The rules in force were applied; who applies them to what is around it leaves it alone.
        marked = under_rules_already(result)
        zeros = [jnp.zeros(tap.aval.shape, tap.aval.dtype) for tap in tapped.taps]
        cotangents, (aux, results) = _jax.grad(marked, has_aux=True)(zeros)
        _assign(program, results)
        by_place: dict[str, list[Any]] = {name: [] for name in place_names(found)}
        for tap, cotangent in zip(tapped.taps, cotangents, strict=True):
            by_place[tap.match].append(cotangent)
        answer = {name: _alone(own) for name, own in by_place.items()}
        return (answer, aux) if has_aux else answer

    return gradients


def _check(fun: object, where: object) -> None:
    if not callable(fun):
        raise TypeError(f"expected a function, got {fun!r}")
    check_selector(where)


def _run(
    program: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], taps: Sequence[Any] = ()
) -> list[Any]:
    flat = jax.tree.leaves(given((args, kwargs))[0])
    values = [variable.value for variable in program.variables]
    return evaluate(program, [*flat, *values, *taps])


def _assign(program: Graph, results: Sequence[Any]) -> None:
    count = len(program.assigned)
    for variable, value in zip(program.assigned, results[len(results) - count :], strict=True):
        variable.assign(value)


def _unflatten(program: Graph, results: Sequence[Any]) -> Any:
    return jax.tree.unflatten(program.out_tree, results[: len(results) - len(program.assigned)])


def _alone(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
