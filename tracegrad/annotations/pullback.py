"""Traces and checks the gradient function of a custom gradient: the result is a *pullback*.

The gradient function is traced in the forward pass, for the types of the cotangents, and raises its
errors there. The constants of its program are the values of the forward pass that the gradient
function closes over: the residuals.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax
from tracegrad.annotations.calls import add_note_on_error, input_names, is_input
from tracegrad.differentiation.indexed_slices import IndexedSlices, is_slices
from tracegrad.ir.dependence import dependence
from tracegrad.ir.importer import graph_of
from tracegrad.ir.paths import is_named_alike, path_name
from tracegrad.ir.wording import counted, described, listed
from tracegrad.rewriting.operation import check_cotangent
from tracegrad.rewriting.traced_gradients import OpenedProgram
from tracegrad.tracing.leaves import leaves_with_paths


@dataclass(frozen=True)
class Pullback:
    """A traced gradient function: from cotangents of the outputs to gradients of the inputs."""

    program: OpenedProgram
    differentiable: Sequence[bool]  # for each output, whether the program takes its cotangent
    structure: Any  # of the gradients: a list with None for each input without one

    def __call__(self, residuals: Sequence[Any], dys: Sequence[Any]) -> list[Any]:
        cotangents = [
            zero_cotangent(dy.aval) if isinstance(dy, SymbolicZero) else dy
            for dy, is_differentiable in zip(dys, self.differentiable)
            if is_differentiable
        ]
        found = self.program(residuals, cotangents)
        return list(jax.tree.unflatten(self.structure, found))


def trace_pullback(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    grad_fn: Callable[..., Any],
    arrays: Sequence[Any],
    y: Any,
) -> tuple[Pullback, list[Any]]:
    """Returns the pullback of ``y, grad_fn = fun(*args, ...)``, and its residuals. `arrays` are the
    inputs (the array leaves of ``args``) of that call."""
    outputs = [jax.typeof(leaf) for leaf in jax.tree.leaves(y)]
    differentiable = [_jax.has_gradient(aval) for aval in outputs]
    has_gradient = any(differentiable)
    # If no output is a float, `gradients` takes all cotangents. These are zeros, so a gradient that
    # depends on one is an error.
    taken = differentiable if has_gradient else [_is_number(aval) for aval in outputs]

    def gradients(*cotangents: Any) -> list[Any]:
        flowing = iter(cotangents)
        dys = [
            next(flowing) if takes else zero_cotangent(aval) for aval, takes in zip(outputs, taken)
        ]
        try:
            return compute_input_gradients(fun, args, grad_fn, arrays, dys)
        except TypeError as error:
            if has_gradient:
                raise
            raise TypeError(_no_cotangent_message(fun, grad_fn, outputs)) from error

    avals = [aval.update(weak_type=False) for aval, takes in zip(outputs, taken) if takes]
    traced, shapes = jax.make_jaxpr(gradients, return_shape=True)(*avals)
    if not has_gradient and avals:
        if any(dependence(graph_of(traced))):
            raise TypeError(_no_cotangent_message(fun, grad_fn, outputs))
        zeros = list(map(zero_cotangent, avals))
        run_with_zeros = functools.partial(_jax.eval_program, traced, zeros)
        traced = jax.make_jaxpr(run_with_zeros)()
    program, residuals = OpenedProgram.of(traced)
    return Pullback(program, differentiable, jax.tree.structure(shapes)), residuals


def _no_cotangent_message(
    fun: Callable[..., Any], grad_fn: Callable[..., Any], outputs: Sequence[Any]
) -> str:
    types = listed([_jax.type_text(aval) for aval in outputs], 3)
    return (
        f"The result of {described(fun)} is {types}, and only floats have a gradient: the gradient "
        f"function {described(grad_fn)} would be given zeros. Return floats, for example "
        "jnp.round(x), not jnp.round(x).astype('int8'), or convert back to floats inside of the "
        "function with the custom gradient."
    )


def _is_number(aval: Any) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def zero_cotangent(aval: Any) -> Any:
    """Returns the cotangent of an output that no cotangent reaches: zeros, except for a key."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):  # a random key has no zero
        return _jax.no_cotangent(aval)
    return _jax.zeros_of(aval)


def compute_input_gradients(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    grad_fn: Callable[..., Any],
    arrays: Sequence[Any],
    dys: Sequence[Any],
    sparse: Sequence[bool] = (),
) -> list[Any]:
    """Calls a gradient function; returns one checked gradient or None per input. `sparse` says of
    each input whether IndexedSlices stay slices, or become dense arrays."""
    with add_note_on_error(lambda: f"in the gradient function {described(grad_fn)}"):
        returned = grad_fn(*dys)
    found = _match_to_arguments(args, returned)
    if found is None:
        flat = leaves_with_paths(returned, NoneType, IndexedSlices)
        leaves = leaves_with_paths(args, NoneType)
        are_inputs = [is_input(leaf) for _, leaf in leaves]
        found = [gradient for _, gradient in flat]
        if len(flat) == len(arrays):
            leaves = list(itertools.compress(leaves, are_inputs))
        elif len(flat) == len(are_inputs):
            found = list(itertools.compress(found, are_inputs))
        else:
            by_name = " Keyword arguments are not inputs." if len(flat) > len(arrays) else ""
            raise ValueError(
                f"The gradient function {described(grad_fn)} of {described(fun)} returned "
                f"{counted(len(flat), 'gradient')} for {counted(len(arrays), 'input')} "
                f"({', '.join(input_names(fun, args)) or 'no arrays'}). "
                f"Return one per input, or None for an input that has no gradient.{by_name}"
            )
        if not is_named_alike(flat, leaves):
            names = [path_name(path) for path, _ in flat]
            raise ValueError(
                f"The gradient function {described(grad_fn)} of {described(fun)} returned "
                f"gradients named {listed(names, 5)} for the inputs "
                f"{listed(input_names(fun, args), 5)}. Return them nested as the arguments are, "
                "with the same keys in the same order, or flat, in a tuple."
            )

    def function() -> str:
        return f" {described(grad_fn)} of {described(fun)}"

    def check(i: int, gradient: Any, is_sparse: bool) -> Any:
        aval = jax.typeof(arrays[i])

        def name() -> str:
            return f"input {input_names(fun, args)[i]}"

        if is_sparse and is_slices(gradient):
            jax.eval_shape(lambda slices: check_cotangent(slices, aval, function, name), gradient)
            return gradient.shaped_as(aval)
        return check_cotangent(gradient, aval, function, name)

    flags = sparse or [False] * len(arrays)
    return [check(i, *each) for i, each in enumerate(zip(found, flags, strict=True))]


def _match_to_arguments(args: tuple[Any, ...], returned: Any) -> list[Any] | None:
    """Returns one gradient per input if `returned` is nested as the arguments are, with None for an
    input or a whole argument; None if `returned` is nested otherwise."""
    if not isinstance(returned, tuple | list) or len(returned) != len(args):
        return None
    found: list[Any] = []
    for argument, gradient in zip(args, returned):
        structure: Any
        leaves, structure = jax.tree.flatten(argument)
        try:
            each = [None] * len(leaves) if gradient is None else structure.flatten_up_to(gradient)
        except ValueError:
            return None
        if not jax.tree_util.all_leaves(each, lambda leaf: leaf is None or is_slices(leaf)):
            return None  # nested more deeply than the argument
        found += itertools.compress(each, map(is_input, leaves))
    return found
