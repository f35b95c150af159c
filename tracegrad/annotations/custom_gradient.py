"""`custom_gradient`: a function with its own gradient, in the form of ``tf.custom_gradient``.

Outside of transformations the function runs on values, and a tape, if any, calls the gradient
function with a cotangent. Otherwise each call becomes one ``jax.custom_vjp``, which works in plain
JAX, and is the same node of a Graph as every other custom rule.

Under a transformation, the function and its gradient function are first traced together, once. This
shows which tracers of an enclosing trace the two functions close over. These tracers become
arguments of the rule: a rule of JAX may not close over tracers, because the rule may run after
their trace has ended (``jax.grad`` of a jitted function), or inside another trace (``jax.vmap`` of
``jax.grad``). As arguments, these tracers also show whether they are differentiated. If so, an
error is raised, because the gradient function cannot return a gradient for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.annotations.calls import AnnotatedFunction, inputs_in, require_callable
from tracegrad.annotations.custom_rule import AnnotatedCall, bind_traced
from tracegrad.annotations.pullback import (
    Pullback,
    compute_input_gradients,
    zero_cotangent,
)
from tracegrad.annotations.variable_reads import Operands, Reads, Substitute
from tracegrad.annotations.variables import (
    flatten_with_variables,
    require_variables_parameter,
    substitute_variables,
)
from tracegrad.tape.recorded_rules import RecordedRule
from tracegrad.tape.recorder import Recorder
from tracegrad.variables.trees import without_variables

P = ParamSpec("P")
R = TypeVar("R")


@overload
def custom_gradient(
    f: Callable[P, tuple[R, Callable[..., Any]]],
) -> AnnotatedFunction[P, R]: ...
@overload
def custom_gradient(
    f: None = None,
) -> Callable[[Callable[P, tuple[R, Callable[..., Any]]]], AnnotatedFunction[P, R]]: ...
def custom_gradient(f: Any = None) -> Any:
    """Decorates a function that returns its result and its gradient function.

    Use it bare (``@custom_gradient``) or with parentheses, on functions and on methods. A call
    returns ``y``; when it is differentiated, ``grad_fn`` computes its gradient.

    The *inputs* are the array leaves of the positional arguments: arrays of any shape and Python
    floats. Each input has one gradient. Python ints, bools, strings, None, functions and other
    objects among the arguments stay Python values, and have no gradient. Keyword arguments are
    passed to ``f``, and have no gradient either.

    Trainable Variables that ``f`` reads, and that are not its arguments, are inputs too. Then
    ``grad_fn`` is called with ``variables=``, a list of these Variables sorted by name, and returns
    a pair: the gradients of the inputs, and a list with one gradient (or None) for each Variable.

    Arguments:
        f: a function ``f(*args, **kwargs) -> (y, grad_fn)``. ``y`` is an array or a tree of arrays.
            ``grad_fn(*dys)`` takes one cotangent per leaf of ``y``, of the leaf's shape and dtype
            (zeros for an output that is not used, or is an integer). ``grad_fn`` returns one
            gradient per input, of the input's shape and dtype: an array for a single input,
            otherwise a sequence of arrays, flat or nested as the arguments are. ``None`` means that
            an input, or all inputs of an argument, have no gradient; an array of zeros is a
            gradient. ``grad_fn`` is differentiated for derivatives of higher order, also with
            respect to the values of ``f`` that it closes over. ``custom_gradient`` on ``grad_fn``
            itself defines the derivative with respect to ``dy``.

    Returns:
        A function ``(*args, **kwargs) -> y``; its ``__wrapped__`` is ``f``.

    Raises:
        TypeError: ``f`` is not callable or does not return ``(y, grad_fn)``; under
            differentiation, a gradient has another dtype than its input, or is not an array.
        ValueError: under differentiation, ``grad_fn`` returns a wrong number of gradients, or a
            gradient of a wrong shape, or under another key than its input; or ``y`` depends on a
            differentiated value that ``f`` closes over or gets by keyword: that value would
            silently get no gradient. Pass the value as a positional argument, or through
            ``stop_gradient``.
        RecursionError: a derivative of sixth or higher order is taken, and ``grad_fn`` calls the
            function itself, or another function whose gradient calls it.

    The logarithm of 1 + eˣ, whose automatic derivative at 100 is inf/inf:

    >>> import jax, jax.numpy as jnp
    >>> @custom_gradient
    ... def log1pexp(x):
    ...     e = jnp.exp(x)
    ...     def grad(dy):
    ...         return dy * (1 - 1 / (1 + e))
    ...     return jnp.log(1 + e), grad
    >>> print(jax.grad(log1pexp)(100.0), jax.grad(jax.grad(log1pexp))(0.0))
    1.0 0.25

    A function that returns its input, and limits the gradient that passes through it:

    >>> @custom_gradient
    ... def clip_gradients(x):
    ...     return x, lambda dy: jnp.clip(dy, -0.5, 0.5)
    >>> print(jax.grad(lambda v: clip_gradients(v * v))(2.0))
    2.0

    The idea and the form come from TensorFlow's ``tf.custom_gradient``. To JAX each call is a
    ``jax.custom_vjp``: ``jax.jvp`` and ``jax.hessian`` raise an error for it; tracegrad's ``jvp``,
    ``hessian`` and ``hvp`` transpose ``grad_fn``. Under a transformation, ``f`` and ``grad_fn`` run
    once per call, on tracers.

    Under a `GradientTape` both run on values: ``f`` once when it is called, ``grad_fn`` once for
    each gradient that reaches it. Their arrays can be printed, branched on and passed to NumPy.
    Tapes around the gradient record these operations, for derivatives of higher order. Values that
    ``f`` closes over have no gradient on a tape: the gradient is None, and the call of ``f`` issues
    a ``UserWarning`` if ``y`` depends on such a value that is watched. In a Jacobian, ``grad_fn``
    runs once, mapped over the rows by `jax.vmap`, and may not branch on its cotangents. Both
    functions are traced in compiled functions, in loops, under `jax.vmap`, and in the block of a
    `ForwardAccumulator`, which transposes ``grad_fn``.

    >>> import tracegrad as tg
    >>> @custom_gradient
    ... def clipped(x):
    ...     def grad(dy):
    ...         print("a cotangent of", dy)
    ...         return dy if abs(dy) < 1 else dy / abs(dy)
    ...     return x, grad
    >>> x = jnp.float32(3.0)
    >>> with tg.GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = clipped(x) ** 2
    >>> print(tape.gradient(y, x))
    a cotangent of 6.0
    1.0
    """
    if f is None:
        return custom_gradient
    require_callable(f, "custom_gradient")
    return AnnotatedFunction(f, _call)


def _call(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args_with_variables, args = args, without_variables(args)
    trace = _jax.current_trace(None)
    recorder = trace if isinstance(trace, Recorder) and trace.runs_rules_on_values else None
    if recorder is not None or isinstance(trace, _jax.TopLevelTrace):
        return _call_on_values(fun, args_with_variables, args, kwargs, recorder)
    return _call_traced(fun, args_with_variables, args, kwargs)


def _call_on_values(
    fun: Callable[..., Any],
    args_with_variables: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recorder: Recorder | None,
) -> Any:
    """Runs the function on values; `recorder`, if any, records the call for the active tapes."""
    reads = Reads(fun, args_with_variables)
    call = AnnotatedCall(fun, args, kwargs, inputs_in(args))
    arrays = [  # copies NumPy arrays: the user may change them before the gradient is computed
        jnp.array(each) if isinstance(each, np.ndarray) else jnp.asarray(each)
        for each in call.arguments.chosen
    ]
    begun = {} if recorder is None else recorder.count_entries()
    with reads.around():
        y, grad_fn = call.run(*arrays)
    variables = reads.trainable
    if variables:
        require_variables_parameter(fun, grad_fn, variables)
    y = jax.tree.map(lambda leaf: _jax.as_another_object(jnp.asarray(leaf), arrays), y)
    if recorder is None:
        return y
    gradient, count = grad_fn, len(arrays)
    if variables:
        values = [variable.value for variable in variables]
        flat = flatten_with_variables(fun, grad_fn, variables, len(args))
        gradient = substitute_variables(fun, flat, variables, values)
        arrays, args = [*arrays, *values], (*args, values)
    results, tree = jax.tree.flatten(y)

    def pull_back(cotangents: Sequence[Any], sparse: Sequence[bool]) -> list[Any]:
        dys = [
            zero_cotangent(jax.typeof(result)) if ct is None else ct
            for ct, result in zip(cotangents, results)
        ]
        return compute_input_gradients(fun, args, gradient, arrays, dys, sparse)

    def call_traced(*arrays: Any) -> list[Any]:
        values = dict(zip(variables, arrays[count:], strict=True))
        with Substitute(values, fun).around():
            inputs = call.arguments.combine(arrays[:count])
            y = _call_traced(fun, args_with_variables, inputs, kwargs)
        return jax.tree.leaves(y)

    rule = RecordedRule(call_traced, pull_back)
    recorded = recorder.record_rule(rule, arrays, results, begun, call.name_captured)
    return jax.tree.unflatten(tree, recorded)


def _call_traced(
    fun: Callable[..., Any],
    args_with_variables: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Traces the function, and binds its program with a custom rule."""
    reads = Operands(fun, args_with_variables)
    call = AnnotatedCall(fun, args, kwargs, inputs_in(args))
    pullbacks: list[Pullback | Exception] = []

    def run(*arrays: Any) -> tuple[Any, list[Any]]:
        with reads.around():
            y, pullback, residuals = call.forward(reads, *arrays)
        pullbacks[:] = [pullback]
        return y, residuals

    types = map(jax.typeof, call.arguments.chosen)
    program, shapes = jax.make_jaxpr(run, return_shape=True)(*types)
    return bind_traced(call, reads, program, jax.tree.structure(shapes), *pullbacks)
