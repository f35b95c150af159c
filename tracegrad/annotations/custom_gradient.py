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
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax
from tracegrad.annotations.calls import (
    NEEDS_VALUES,
    AnnotatedFunction,
    Arguments,
    is_array_like,
    named_after,
    noted,
    require_callable,
)
from tracegrad.annotations.captured import Captured, captured_name, unwrapped
from tracegrad.annotations.pullback import (
    Program,
    Pullback,
    Residuals,
    gradients_of_inputs,
    trace_pullback,
    zero_cotangent,
)
from tracegrad.annotations.variables import (
    Operands,
    Reads,
    flat_with_variables,
    require_variables_parameter,
    with_variables,
)
from tracegrad.ir.wording import brief, described, name_of
from tracegrad.tape.keys import MadeOf, tell_made_of
from tracegrad.tape.record import Rule
from tracegrad.tape.recorder import Recorder
from tracegrad.variables.capture import variable_of
from tracegrad.variables.reading import ReadsOutside
from tracegrad.variables.trees import without_variables
from tracegrad.variables.variable import Variable

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
    ``f`` closes over has no gradient there, and None is the answer for it. In a Jacobian
    ``grad_fn`` runs once, mapped over the rows by `jax.vmap`, and may not branch on its cotangents;
    in the block of a `ForwardAccumulator`, which needs its transpose, both are traced, and so they
    are in compiled functions, loops and under `jax.vmap`. (On tapes in one another the gradient of
    a `jax.vmap` of it may be compiled anew at each step, if it and the gradients of its gradient
    call a dozen functions with rules: that is then not looked through. That of
    ``jax.jit(jax.vmap(f))`` is not.)

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


# Gradient functions are traced with those that they call in their turn, which may be themselves:
# as deep as this, each level for one more derivative.
_DEEPEST = 5


class _Within(threading.local):
    pullbacks = 0  # being traced around one another


_within = _Within()


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
    call = _Call(fun, args, kwargs, Arguments.of(args))
    arrays = [  # its owner may change a NumPy array before the gradient is asked for
        jnp.array(each) if isinstance(each, np.ndarray) else jnp.asarray(each)
        for each in call.arguments.arrays
    ]
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
        gradient = flat_with_variables(fun, grad_fn, variables, values, len(args))
        arrays, args = [*arrays, *values], (*args, values)
        function = with_variables(fun, variables)
    results, tree = jax.tree.flatten(y)
    inputs = Arguments.of(args)

    def pull_back(cotangents: Sequence[Any], sparse: Sequence[bool]) -> list[Any]:
        dys = [
            zero_cotangent(result) if ct is None else ct for ct, result in zip(cotangents, results)
        ]
        return gradients_of_inputs(fun, args, gradient, arrays, dys, sparse)

    def traced(*arrays: Any) -> list[Any]:
        y = _call_traced(None, function, inputs.with_arrays(arrays), kwargs, variables)
        return jax.tree.leaves(y)

    rule = Rule(name_of(fun), traced, pull_back)
    return jax.tree.unflatten(tree, recorder.with_rule(rule, arrays, results))


def _call_traced(
    reads: Operands | None,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    variables: tuple[Variable, ...] = (),
) -> Any:
    """The call as one of a rule around what the function is traced to.

    Args:
      reads: hears which Variables the function reads; None where that is known.
      variables: then those of which the values are the last arguments.
    """
    call = _Call(fun, args, kwargs, Arguments.of(args), reads)
    listener = reads or ReadsOutside()

    def heard(*arrays: Any) -> tuple[Any, Residuals]:
        with listener.around():
            return call.forward_or_later(*arrays)

    program = None
    with contextlib.suppress(*NEEDS_VALUES):
        program, shapes = jax.make_jaxpr(heard, return_shape=True)(
            *map(jax.typeof, call.arguments.arrays)
        )
    if reads is not None and not reads.are_all_in(program):
        # Once more, with the values of all Variables among the inputs.
        values = [variable.value for variable in reads.trainable]
        as_inputs = with_variables(fun, reads.trainable)
        return _call_traced(None, as_inputs, (*args, values), kwargs, reads.trainable)
    if program is None:
        # Outside jit there are values, and JAX's rule gives them to the function; under jit it
        # raises the same error once more.
        return _bind_with_values(call)
    return _bind_traced(call, program, jax.tree.structure(shapes), variables)


@dataclass(frozen=True)
class _Call:
    """A function with a custom gradient and what it is called with."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: Arguments  # the leaves of args
    reads: Operands | None = None  # the Variables that become inputs
    # Of each run of the forward pass, or why it has none. Filled in as the runs are traced.
    pullbacks: list[Pullback | Exception] = field(default_factory=list)

    def run(self, *arrays: Any) -> tuple[Any, Callable[..., Any]]:
        """Calls the user's function."""
        with noted(lambda: f"in {described(self.fun)}, which has a custom gradient"):
            result = self.fun(*self.arguments.with_arrays(arrays), **self.kwargs)
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
                    f"y{jax.tree_util.keystr(path)} is {brief(leaf)}."
                )
        return y, grad_fn

    def forward(self, *arrays: Any) -> tuple[Any, Residuals]:
        """The output, and what its pullback needs."""
        y, grad_fn = self.run(*arrays)
        pullback, values = trace_pullback(self.fun, self.args, grad_fn, arrays, y)
        self.pullbacks.append(pullback)
        return y, Residuals(values, len(self.pullbacks) - 1)

    def forward_or_later(self, *arrays: Any) -> tuple[Any, Residuals]:
        """The same; an error in the gradient function waits until the gradient is asked for."""
        y, grad_fn = self.run(*arrays)
        args = self.args
        if self.reads is not None:
            grad_fn, operands = self.reads.list_for(grad_fn, len(args))
            if operands:
                args, arrays = (*args, operands), (*arrays, *operands)
        pullback: Pullback | Exception
        values: list[Any] = []
        if _within.pullbacks == _DEEPEST:
            pullback = RecursionError(
                f"the gradient function of {described(self.fun)} is called by gradient functions "
                f"that call one another, {_DEEPEST} deep: derivatives are defined up to that order"
            )
            self.pullbacks[:] = [pullback]
            return y, Residuals(values, 0)
        _within.pullbacks += 1
        try:
            pullback, values = trace_pullback(self.fun, args, grad_fn, arrays, y)
        except NEEDS_VALUES:
            raise
        except Exception as error:
            pullback = error
        finally:
            _within.pullbacks -= 1
        self.pullbacks[:] = [pullback]
        return y, Residuals(values, 0)


# ------------------------------------------------------------------------------------- the rule


def _bind_with_values(call: _Call) -> Any:
    """JAX's rule around the function itself, which sees values where there are any."""
    output = _output_rule(call.fun, call.pullbacks)

    def forward(*arrays: Any) -> tuple[Any, Residuals]:
        y, residuals = call.forward(*arrays)
        return output(arrays, y, residuals), residuals

    def backward(residuals: Residuals, dy: Any) -> tuple[Any, ...]:
        return _gradients(call.pullbacks, residuals, dy)

    rule = jax.custom_vjp(named_after(call.fun, lambda *arrays: call.run(*arrays)[0]))
    rule.defvjp(forward, backward)
    try:
        return rule(*call.arguments.arrays)
    except jax.errors.UnexpectedTracerError as error:
        error.add_note(
            f"{described(call.fun)} asks for the value of an array, as `if` does, so that it "
            "cannot be traced by itself. Then it may not close over values that are being "
            "differentiated or mapped: make them positional arguments, or use jax.lax.cond."
        )
        raise


def _bind_traced(
    call: _Call, program: Any, out_tree: Any, variables: Sequence[Variable] = ()
) -> Any:
    """JAX's rule around the traced function, with what it closes over as further arguments."""
    traced, values = Program.of(program)
    # Not the call itself: its arguments may belong to a trace that the rule outlives.
    pullbacks, own = call.pullbacks, len(call.arguments.arrays)
    inputs_given = [*call.arguments.arrays]
    reads = call.reads
    if reads is not None:
        variables = reads.listed
        inputs_given += reads.values()
    given = len(inputs_given)
    # What was read of a Variable is the input that stands for it.
    places: dict[Variable | None, int] = {
        variable: given - len(variables) + i for i, variable in enumerate(variables)
    }
    inputs_read = [places.get(variable_of(value)) for value in values]
    values = [value for value, place in zip(values, inputs_read) if place is None]
    if reads is not None:
        values = [reads.value_of(value) for value in values]

    def evaluate(*inputs: Any) -> Any:
        rest = iter(inputs[given:])
        closed_over = [next(rest) if place is None else inputs[place] for place in inputs_read]
        return jax.tree.unflatten(out_tree, traced(closed_over, inputs[:own]))

    def primal(*inputs: Any) -> Any:
        return evaluate(*inputs)[0]

    captured = [
        Captured(
            given + i,
            captured_name(value, call.fun, call.kwargs),
            described(call.fun),
            primal,
        )
        for i, value in enumerate(values)
        if _jax.is_tracer(value)  # nothing else is ever differentiated, but on a tape
    ]
    made_of = _made_of(traced, given, inputs_read, captured, pullbacks[0])
    closed_over = len(values)
    output = _output_rule(call.fun, pullbacks, captured, closed_over, made_of)

    def forward(*inputs: Any) -> tuple[Any, Residuals]:
        if isinstance(pullbacks[0], Exception):
            raise pullbacks[0]
        inputs, problem = unwrapped(captured, inputs)
        if problem is not None:
            raise ValueError(problem)
        y, residuals = evaluate(*inputs)
        return output(inputs, y, residuals), residuals

    def backward(residuals: Residuals, dy: Any) -> tuple[Any, ...]:
        return (*_gradients(pullbacks, residuals, dy), *[None] * closed_over)

    tell_made_of(backward, made_of)
    rule = jax.custom_vjp(named_after(call.fun, primal))
    # Only a rule that is told about symbolic zeros learns what is being differentiated.
    rule.defvjp(forward, backward, symbolic_zeros=bool(captured))
    return _bound(rule, primal, (*inputs_given, *values))


def _made_of(
    traced: Program,
    given: int,
    inputs_read: Sequence[int | None],
    captured: Sequence[Captured],
    pullback: Pullback | Exception,
) -> MadeOf:
    """What a rule around a traced function is made of."""
    refused = tuple(each.position for each in captured)
    own = traced.captured, given, tuple(inputs_read), refused
    if isinstance(pullback, Exception):  # which the rule raises
        return MadeOf((traced.program,), (own, type(pullback), str(pullback)))
    its = pullback.program.captured, tuple(pullback.differentiable), tuple(pullback.given)
    return MadeOf((traced.program, pullback.program.program), (own, its))


def _output_rule(
    fun: Callable[..., Any],
    pullbacks: Sequence[Pullback | Exception],
    captured: Sequence[Captured] = (),
    closed_over: int = 0,
    made_of: MadeOf | None = None,
) -> Callable[[Sequence[Any], Any, Residuals], Any]:
    """Gives an output computed in the forward pass the custom gradient, without computing it again.

    Whoever differentiates the forward pass, for a derivative of higher order, then meets the same
    rule. What the gradient function closes over has its ordinary derivatives there.
    """

    def primal(inputs: Sequence[Any], y: Any, residuals: Residuals) -> Any:
        return y

    rule = jax.custom_vjp(named_after(fun, primal))

    def forward(inputs: Sequence[Any], y: Any, residuals: Residuals) -> Any:
        inputs, problem = unwrapped(captured, inputs)
        if captured:
            y, residuals = jax.tree.map(lambda leaf: leaf.value, (y, residuals))
        return _bound(rule, primal, (inputs, y, residuals)), replace(residuals, problem=problem)

    def backward(residuals: Residuals, dy: Any) -> Any:
        # Only a derivative that really goes through the output is a problem: most often just the
        # gradient is used.
        used = any(not isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(dy))
        if residuals.problem is not None and used:
            raise ValueError(residuals.problem)
        return (*_gradients(pullbacks, residuals, dy), *[None] * closed_over), None, None

    if made_of is not None:
        tell_made_of(backward, made_of._replace(settings=("output", *made_of.settings)))
    rule.defvjp(forward, backward, symbolic_zeros=bool(captured))
    return lambda *inputs: _bound(rule, primal, inputs)


def _bound(rule: Callable[..., Any], primal: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """The rule applied, or just its function where JAX cannot and nothing is differentiated.

    That is in the body of a shard_map outside jit, for rules that are told about symbolic zeros.
    What differentiates it does so inside the body, and is done when the rule gets there.
    """
    try:
        return rule(*inputs)
    except NotImplementedError as error:
        if "symbolic_zeros support with shard_map" not in str(error):
            raise
    return primal(*inputs)


def _gradients(
    pullbacks: Sequence[Pullback | Exception], residuals: Residuals, dy: Any
) -> tuple[Any, ...]:
    """One gradient per input, or None, for the cotangents of the outputs."""
    pullback = pullbacks[residuals.pullback]
    assert isinstance(pullback, Pullback)
    return tuple(pullback(residuals.values, jax.tree.leaves(dy)))
