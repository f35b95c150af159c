"""Makes a ``jax.custom_vjp`` of a call of a function with a custom gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax
from tracegrad.annotations.calls import add_note_on_error, is_array_like, take_users_name
from tracegrad.annotations.captured import Captured, captured_name, captured_text, explain_captured
from tracegrad.annotations.module_changes import refuse_changes
from tracegrad.annotations.pullback import Pullback, trace_pullback
from tracegrad.annotations.variable_reads import Operands
from tracegrad.annotations.variables import list_variables
from tracegrad.ir.paths import path_name
from tracegrad.ir.wording import brief, described
from tracegrad.rewriting.traced_gradients import OpenedProgram
from tracegrad.tape.recorded_rules import attach_closed_over
from tracegrad.tracing.parted import Parted
from tracegrad.variables.trees import without_variables

# A gradient function is traced together with the gradient functions that it calls, which may
# include itself, up to this depth: each level allows one more order of derivatives.
_LEVELS = 5


class _Pullbacks(threading.local):
    depth = 0  # the number of nested pullbacks that are being traced


_pullbacks = _Pullbacks()


@dataclass(frozen=True)
class AnnotatedCall:
    """A call of a function with a custom gradient."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: Parted  # args, split into the inputs and the rest

    def name_captured(self, value: Any) -> tuple[str, str]:
        """Returns texts for messages: the function, and a value that it captures."""
        name = captured_name(value, self.fun, self.kwargs)
        return described(self.fun), captured_text(name, jax.typeof(value))

    def run(self, *arrays: Any) -> tuple[Any, Callable[..., Any]]:
        """Calls the user's function, checks its result, and returns ``(y, grad_fn)``."""
        with add_note_on_error(lambda: f"in {described(self.fun)}, which has a custom gradient"):
            copies = self.arguments.combine(arrays)
            result = refuse_changes(
                self.fun,
                copies,
                lambda: self.fun(*copies, **self.kwargs),
                "call the module outside, and pass its result to the function",
            )
        pair = isinstance(result, tuple | list) and len(result) == 2
        if not pair or not callable(result[1]):
            got = f"a pair with {brief(result[1])} in second place" if pair else brief(result)
            raise TypeError(
                f"{described(self.fun)} has a custom gradient, so it must return a pair "
                f"(y, grad_fn) with a function grad_fn(*dys); it returned {got}."
            )
        y, grad_fn = without_variables(result[0]), result[1]
        for path, leaf in jax.tree_util.tree_flatten_with_path(y)[0]:
            if not is_array_like(leaf):
                raise TypeError(
                    f"{described(self.fun)} has a custom gradient, so its outputs must be arrays; "
                    f"{path_name(path, 'y')} is {brief(leaf)}."
                )
        return y, grad_fn

    def forward(self, reads: Operands, *arrays: Any) -> tuple[Any, Pullback | Exception, list[Any]]:
        """Returns ``y``, its pullback and the residuals. The pullback is an exception if the
        gradient function raises one, which is raised when the gradient is computed.

        `reads` has the Variables that become inputs."""
        y, grad_fn = self.run(*arrays)
        args = self.args
        grad_fn, operands = list_variables(reads, self.fun, grad_fn, len(args))
        if operands:
            args, arrays = (*args, operands), (*arrays, *operands)
        if _pullbacks.depth == _LEVELS:
            text = (
                f"the gradient function of {described(self.fun)} is called by gradient functions "
                f"that call one another, {_LEVELS} deep: derivatives are defined up to that order"
            )
            return y, RecursionError(text), []
        _pullbacks.depth += 1
        try:
            pullback, values = trace_pullback(self.fun, args, grad_fn, arrays, y)
        except Exception as error:
            return y, error, []
        finally:
            _pullbacks.depth -= 1
        return y, pullback, values


# ------------------------------------------------------------------------------------- the rule


def bind_traced(
    call: AnnotatedCall,
    reads: Operands,
    program: Any,
    out_tree: Any,
    pullback: Pullback | Exception,
) -> Any:
    """Calls a `jax.custom_vjp` of the traced function. The values that the function closes over are
    further arguments.

    Args:
      reads: the Variables that are arguments too.
      program, out_tree: of ``(*inputs) -> (y, residuals)``.
      pullback: of ``y``, or the error of tracing it.
    """
    traced, values = OpenedProgram.of(program)
    # The rule must not reference `call`, whose arguments may belong to a trace that ends earlier.
    count = len(call.arguments.chosen)
    arguments = [*call.arguments.chosen, *reads.values]
    # For each of `values`, the position of the argument (a Variable's value) in its place, if any.
    places = list(map(reads.place, values))
    in_arguments = [None if place is None else count + place for place in places]
    values = [reads.value_of(v) for v, place in zip(values, places) if place is None]
    first = len(arguments)  # the position of the first value

    def evaluate(*inputs: Any) -> Any:
        rest = iter(inputs[first:])
        constants = [next(rest) if place is None else inputs[place] for place in in_arguments]
        return jax.tree.unflatten(out_tree, traced(constants, inputs[:count]))

    def primal(*inputs: Any) -> Any:
        return evaluate(*inputs)[0]

    captured = [
        Captured(
            first + i,
            captured_name(value, call.fun, call.kwargs),
            described(call.fun),
            primal,
        )
        for i, value in enumerate(values)
        if _jax.is_tracer(value)  # except on tapes, only tracers are differentiated
    ]
    on_tapes = tuple(
        (first + i, call.name_captured(value))
        for i, value in enumerate(values)
        if not _jax.is_tracer(value) and isinstance(value, jax.Array) and _jax.has_gradient(value)
    )
    closed_over = len(values)
    types = list(map(jax.typeof, (*arguments, *values)))
    output = _make_output_rule(call.fun, pullback, captured, types, closed_over)

    def forward(*inputs: Any) -> tuple[Any, list[Any]]:
        if isinstance(pullback, Exception):
            raise pullback
        if captured:
            perturbed = [each.perturbed for each in inputs]
            inputs = tuple(each.value for each in inputs)
            if problem := explain_captured(captured, types, perturbed):
                raise ValueError(problem)
        y, residuals = evaluate(*inputs)
        return output(inputs, y, residuals), residuals

    def backward(residuals: list[Any], dy: Any) -> tuple[Any, ...]:
        return (*_compute_gradients(pullback, residuals, dy), *[None] * closed_over)

    attach_closed_over(backward, on_tapes)
    rule = jax.custom_vjp(take_users_name(call.fun, primal))
    # JAX tells a rule which operands are differentiated only with `symbolic_zeros`.
    rule.defvjp(forward, backward, symbolic_zeros=bool(captured))
    return _jax.with_fallback(rule, primal)(*arguments, *values)


def _make_output_rule(
    fun: Callable[..., Any],
    pullback: Pullback | Exception,
    captured: Sequence[Captured],
    types: Sequence[Any],
    closed_over: int,
) -> Callable[[Sequence[Any], Any, list[Any]], Any]:
    """Returns a function that gives the custom gradient to an output of the forward pass, without
    computing the output again.

    If the forward pass is differentiated, for a derivative of higher order, this applies the same
    rule. Values that the gradient function closes over have their ordinary derivatives there.
    """

    def primal(inputs: Sequence[Any], y: Any, residuals: list[Any]) -> Any:
        return y

    def keep(operands: tuple[Any, ...], y: Any) -> list[Any]:
        _, _, residuals = operands
        return residuals  # type: ignore[no-any-return]

    def backward(residuals: list[Any], perturbed: Sequence[bool], dy: Any) -> Any:
        # The problem matters only if a cotangent reaches the output: most often, only the gradient
        # is used.
        used = any(not isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(dy))
        if used and (problem := explain_captured(captured, types, perturbed)):
            raise ValueError(problem)
        return (*_compute_gradients(pullback, residuals, dy), *[None] * closed_over), None, None

    run = take_users_name(fun, primal)
    return _jax.with_backward(run, backward, keep, symbolic_zeros=bool(captured))


def _compute_gradients(
    pullback: Pullback | Exception, residuals: list[Any], dy: Any
) -> tuple[Any, ...]:
    assert isinstance(pullback, Pullback)
    return tuple(pullback(residuals, jax.tree.leaves(dy)))
