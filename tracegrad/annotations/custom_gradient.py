"""A function with a gradient of its own, as TensorFlow's ``tf.custom_gradient`` writes it.

Where there are values it runs on them, and a tape around it calls the gradient function when a
gradient gets there. Elsewhere each call becomes one ``jax.custom_vjp``, so that it works in plain
JAX, and arrives in a Graph in the same node as every other custom rule.

Under a transformation the function is first traced by itself, once, together with its gradient
function. That shows which values of an enclosing trace the two close over. They become arguments
of the rule: JAX's own rules may not close over them, since the rule runs when the trace that they
belong to is over (``jax.grad`` of a jitted function), or inside another one (``jax.vmap`` of
``jax.grad``). Being arguments, they are also seen when they are differentiated, which is an
error, because the gradient function has no way to give their gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.annotations.calls import (
    AnnotatedFunction,
    inputs_in,
    require_callable,
)
from tracegrad.annotations.custom_rule import AnnotatedCall, bind_traced, bind_with_values
from tracegrad.annotations.pullback import (
    RunResiduals,
    gradients_of_inputs,
    zero_cotangent,
)
from tracegrad.annotations.variables import (
    flat_with_variables,
    given_variables,
    require_variables_parameter,
    with_variables_as_inputs,
)
from tracegrad.ir.wording import name_of
from tracegrad.tape.recorder import Recorder
from tracegrad.tape.rules import Rule
from tracegrad.variables.reading import Operands, Reads, ReadsOutside
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
    """Gives a function a gradient of its own.

    Usable bare (``@custom_gradient``) or with parentheses, on functions and on methods. A call
    returns ``y``; under differentiation its gradient is what ``grad_fn`` says.

    The *inputs* are the array leaves of the positional arguments: arrays of any shape and Python
    floats. Each has one gradient. Python ints, bools, strings, None, functions and other objects
    among them stay the Python values that they are, and have none. Keyword arguments are passed
    on, and have none either.

    Trainable Variables that ``f`` reads, and was not given as arguments, are inputs too. Then
    ``grad_fn`` is called with ``variables=``, the list of them sorted by name, and returns a pair:
    the gradients of the inputs, and a list with one (or None) for each variable.

    Arguments:
        f: a function ``f(*args, **kwargs) -> (y, grad_fn)``. ``y`` is an array or a tree of
            arrays. ``grad_fn(*dys)`` is given one cotangent per leaf of ``y``, each of that leaf's
            shape and dtype (zeros for an output that is not used, or is an integer), and returns
            one gradient per input, of that input's shape and dtype: an array if there is one
            input, otherwise a sequence of them, flat or nested as the arguments are. ``None``
            stands for "no gradient" of an input, or of a whole argument; all else is a gradient,
            also zeros, and ones for an input that is a loss to be added. ``grad_fn`` is
            differentiated in its turn, through the values of ``f`` that it closes over too, so
            derivatives of any order are defined. Put on ``grad_fn`` itself, ``custom_gradient``
            defines the derivative with respect to ``dy``.

    Returns:
        A function ``(*args, **kwargs) -> y``; its ``__wrapped__`` is ``f``.

    Raises:
        TypeError: ``f`` is not callable or does not return ``(y, grad_fn)``; under
            differentiation, a gradient of another dtype than its input, or no array.
        ValueError: under differentiation, if ``grad_fn`` returns a wrong number of gradients or
            one of a wrong shape; or if ``y`` depends on a value that ``f`` closes over, or is
            given by keyword, and that is being differentiated: it would silently get no gradient.
            Pass it as a positional argument, or through ``stop_gradient``.
        RecursionError: a derivative of sixth or higher order, if ``grad_fn`` calls the function
            itself, or one that calls it in its gradient.

    The logarithm of 1 + eˣ, whose derivative at 100, left to itself, is inf/inf:

    >>> import jax, jax.numpy as jnp
    >>> @custom_gradient
    ... def log1pexp(x):
    ...     e = jnp.exp(x)
    ...     def grad(dy):
    ...         return dy * (1 - 1 / (1 + e))
    ...     return jnp.log(1 + e), grad
    >>> print(jax.grad(log1pexp)(100.0), jax.grad(jax.grad(log1pexp))(0.0))
    1.0 0.25

    A function that changes nothing but the gradient that passes through it:

    >>> @custom_gradient
    ... def clip_gradients(x):
    ...     return x, lambda dy: jnp.clip(dy, -0.5, 0.5)
    >>> print(jax.grad(lambda v: clip_gradients(v * v))(2.0))
    2.0

    The idea and the form are those of TensorFlow's ``tf.custom_gradient``. To JAX each call is a
    ``jax.custom_vjp``: as with any, ``jax.jvp`` and with it ``jax.hessian`` refuse it, where
    tracegrad's ``jvp``, ``hessian`` and ``hvp`` transpose its gradient. Under a transformation
    ``f`` and ``grad_fn`` run once per call, on tracers; where ``f`` branches on a value, as it may
    outside jit, they run on values.

    Under a `GradientTape` both run on values: ``f`` once when it is called, ``grad_fn`` once for
    each gradient that reaches it, with arrays that can be printed, branched on and given to NumPy.
    What they do is recorded by the tapes around, so that derivatives of higher order follow. What
    ``f`` closes over has no gradient there, and None is the answer for it; a ``UserWarning`` says
    so where a part of the gradient that is asked for is missing. In a Jacobian ``grad_fn`` runs
    once, mapped over the rows by `jax.vmap`, and may not branch on its cotangents;
    in the block of a `ForwardAccumulator`, which needs its transpose, both are traced, and so they
    are in compiled functions, loops and under `jax.vmap`. A tape around another one differentiates
    what the inner gradient has computed, in which ``grad_fn`` acts once more.

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
    """One call of a function with a custom gradient."""
    given, args = args, without_variables(args)
    trace = _jax.current_trace(None)
    recorder = trace if isinstance(trace, Recorder) and trace.takes_rules else None
    if recorder is not None or isinstance(trace, _jax.TopLevelTrace):
        return _call_on_values(Reads(fun, given), fun, args, kwargs, recorder)
    return _call_traced(Operands(fun, given), fun, args, kwargs)


def _call_on_values(
    reads: Reads,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recorder: Recorder | None,
) -> Any:
    """The call where there are values; `recorder` tells the tapes that follow them, if any."""
    call = AnnotatedCall(fun, args, kwargs, inputs_in(args))
    arrays = [  # its owner may change a NumPy array before the gradient is asked for
        jnp.array(each) if isinstance(each, np.ndarray) else jnp.asarray(each)
        for each in call.arguments.chosen
    ]
    begun = {} if recorder is None else recorder.before_rule()
    with reads.around():
        y, grad_fn = call.run(*arrays)
    variables = reads.trainable
    if variables:
        require_variables_parameter(fun, grad_fn, variables)
    y = jax.tree.map(jnp.asarray, y)
    if recorder is None:
        return y
    gradient, function = grad_fn, fun
    if variables:
        values = [variable.value for variable in variables]
        flat = flat_with_variables(fun, grad_fn, variables, len(args))
        gradient = given_variables(fun, flat, variables, values)
        arrays, args = [*arrays, *values], (*args, values)
        function = with_variables_as_inputs(fun, variables)
    results, tree = jax.tree.flatten(y)
    inputs = inputs_in(args)

    def pull_back(cotangents: Sequence[Any], sparse: Sequence[bool]) -> list[Any]:
        dys = [
            zero_cotangent(result) if ct is None else ct for ct, result in zip(cotangents, results)
        ]
        return gradients_of_inputs(fun, args, gradient, arrays, dys, sparse)

    def traced(*arrays: Any) -> list[Any]:
        y = _call_traced(None, function, inputs.combine(arrays), kwargs)
        return jax.tree.leaves(y)

    rule = Rule(name_of(fun), traced, pull_back, "custom_gradient", call.name_captured)
    return jax.tree.unflatten(tree, recorder.with_rule(rule, arrays, results, begun))


def _call_traced(
    reads: Operands | None,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The call as one of a rule around what the function is traced to.

    Args:
      reads: hears which Variables the function reads; None where their values are arguments.
    """
    call = AnnotatedCall(fun, args, kwargs, inputs_in(args), reads)
    listener = reads or ReadsOutside()

    def heard(*arrays: Any) -> tuple[Any, RunResiduals]:
        with listener.around():
            return call.forward_or_later(*arrays)

    program = None
    with contextlib.suppress(*_jax.NEEDS_VALUES):
        program, shapes = jax.make_jaxpr(heard, return_shape=True)(
            *map(jax.typeof, call.arguments.chosen)
        )
    if program is None:
        if reads is not None and reads.trainable:
            values = [variable.value for variable in reads.trainable]
            as_inputs = with_variables_as_inputs(fun, reads.trainable)
            return _call_traced(None, as_inputs, (*args, values), kwargs)
        # Outside jit there are values, and JAX's rule gives them to the function; under jit it
        # raises the same error once more.
        return bind_with_values(call)
    return bind_traced(call, program, jax.tree.structure(shapes))
