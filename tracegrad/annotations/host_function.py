"""`numpy_function`: a NumPy function as an operation, with its own gradient function.

JAX does not trace the function, but calls it on the host when the program runs. The operands of the
call are constants to differentiation. A gradient function becomes a custom rule around the results,
so that the NumPy function runs once, differentiated or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import BuiltinMethodType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from tracegrad import _jax
from tracegrad.annotations.calls import (
    add_note_on_error,
    is_array_like,
    require_callable,
    take_users_name,
)
from tracegrad.ir.frames import OF_HOST_CALL
from tracegrad.ir.occurrence import calling_line
from tracegrad.ir.wording import brief, described, name_of
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.rewriting.operation import GradientOperation, check_cotangents
from tracegrad.rewriting.traced_gradients import with_traced_gradient
from tracegrad.tape.recorders import unrecorded
from tracegrad.variables.reading import ReadsOutside
from tracegrad.variables.variable import Variable


def numpy_function(
    func: Callable[..., Any],
    inp: Any,
    Tout: Any,
    grad: Callable[..., Any] | None = None,
    *,
    stateful: bool = True,
    name: str | None = None,
) -> Any:
    """Calls a function of NumPy arrays, optionally with a gradient function.

    The function runs on the host each time that the program reaches the call, in the order of the
    program, and never while a function is traced. This holds under jit, in loops and branches,
    differentiated or not, on CPU, GPU and TPU. There are two exceptions: calls that are not
    `stateful`; and a call with the same inputs in each step of a `jax.lax.scan`, which runs once
    under `jax.grad` and `tracegrad.grad` (with tapes and `gradients`, the call runs in each step).

    Arguments:
        func: called with one NumPy array per input, read-only and without axes mapped by
            `jax.vmap`. It returns arrays of the shape and dtype of `Tout`. Python numbers are
            converted to that dtype, and so are float arrays of the dtype of an input (`check_grads`
            passes float64). It must not call JAX: a call may deadlock.
        inp: the inputs: a list or tuple of arrays, numbers or Variables of any shapes; or a single
            input.
        Tout: the type of the result: a dtype, for an array of the shape to which the inputs
            broadcast; a `jax.ShapeDtypeStruct` for another shape; or a list or tuple of these, for
            a list or tuple of arrays (if it has one element, `func` may return the array itself).
        grad: the gradient function ``grad(op, *dys)``. ``op.inputs`` and ``op.outputs`` are tuples
            of arrays, ``op.name`` the name, ``op.params`` the other arguments of this call. There
            is one cotangent ``dy`` per output, of its shape and dtype (zeros for an unused output).
            `grad` returns one gradient, or None, per input, of its shape and dtype. `grad` is
            traced, so write it in `jax.numpy`; it may call `numpy_function` too. For derivatives of
            higher order `grad` is differentiated itself, and the gradient of ``op.outputs`` is
            again `grad`. Results that are all integers or bools need no `grad`: they are constants.
        stateful: whether the order and the number of the calls matter, because `func` draws random
            numbers, counts, or reads a file. False promises that its results depend on its inputs
            alone. Then JAX may drop a call whose result is not used, merge two calls with the same
            inputs, and repeat a call for a derivative. And you may call it under `jax.vmap` (where
            it runs once per element), in a recomputed function, and in a program for several
            devices; these are errors for a stateful function.
        name: the name in messages and graphs. Default: the function's name.

    Returns:
        An array; or a list or tuple of arrays, as `Tout`.

    Raises:
        TypeError: an argument has a wrong type; `Tout` is a dtype that JAX does not support now (64
            bits without ``jax_enable_x64``).
        ValueError: the inputs do not broadcast together and `Tout` is a bare dtype; or, without
            `grad`, a float result is differentiated. (For a `GradientTape` or `gradients()` the
            result is then not connected, so the gradient is None.)
        NotImplementedError: the call is exported; or it is `stateful`, and mapped by `jax.vmap`
            over an input (also in the backward pass of a Jacobian, if `grad` makes the call), or
            differentiated in a recomputed function.
        jax.errors.JaxRuntimeError: while the program runs, `func` raises, or its result does not
            match `Tout`. The message has the function's name, its line and the cause.
        ValueError, TypeError: under differentiation, `grad` returns a wrong number of gradients, or
            a gradient of a wrong shape or dtype.

    The remainder of a division, with the gradient that it has almost everywhere:

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> def np_mod(x, y):
    ...     return (x % y).astype(np.float32)
    >>> def mod_gradient(op, dz):
    ...     x, y = op.inputs
    ...     return dz, dz * -jnp.floor_divide(x, y)
    >>> def mod(x, y):
    ...     return numpy_function(np_mod, [x, y], np.float32, grad=mod_gradient, name="mod")
    >>> x, y = jnp.array([0.3, 0.7, 1.2, 1.7]), jnp.array([0.2, 0.5, 1.0, 2.9])
    >>> print(mod(x, y))
    [0.10000001 0.19999999 0.20000005 1.7       ]
    >>> dx, dy = jax.grad(lambda x, y: jnp.sum(mod(x, y)), argnums=(0, 1))(x, y)
    >>> print(dx, dy)
    [1. 1. 1. 1.] [-1. -1. -1. -0.]

    It corresponds to ``tf.numpy_function`` with a gradient, as ``py_func`` got a gradient from
    ``tf.RegisterGradient``. The call is an ordered `jax.experimental.io_callback`, or a
    `jax.pure_callback` if it is not `stateful`. The gradient is a `jax.custom_vjp`: `jax.jvp`
    raises an error for it, but tracegrad's `jvp`, `hessian` and `ForwardAccumulator` transpose it.
    """
    require_callable(func, "numpy_function")
    if grad is not None:
        require_callable(grad, "numpy_function")
    arrays = _to_arrays(func, inp)
    types = _result_types(func, Tout, arrays)
    host = _Host(func, types, isinstance(Tout, list | tuple))
    with nullcontext() if name is None else jax.named_scope(name):
        are_constants = grad is not None or not any(map(_jax.has_gradient, types))
        results = _run_on_host(host, arrays, stateful, are_constants=are_constants)
        if grad is not None and not _jax.is_top_level():  # else there is no differentiation
            params = {"func": func, "Tout": Tout, "stateful": stateful}
            results = _attach_gradient(grad, arrays, results, name or name_of(func), params)
    if not host.several:
        return results[0]
    return results if isinstance(Tout, list) else tuple(results)


# ---------------------------------------------------------------------------------- the arguments


def _to_arrays(func: Callable[..., Any], inp: Any) -> tuple[Any, ...]:
    given = tuple(inp) if isinstance(inp, list | tuple) else (inp,)
    for i, value in enumerate(given):
        if not isinstance(value, Variable) and not is_array_like(value):
            raise TypeError(
                f"numpy_function takes a list of arrays as the inputs of {described(func)}; "
                f"input {i} is {brief(value)}. Pass other values to the function by "
                "functools.partial"
            )
    return tuple(jnp.asarray(v.value if isinstance(v, Variable) else v) for v in given)


def _result_types(
    func: Callable[..., Any], Tout: Any, arrays: Sequence[Any]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    given = tuple(Tout) if isinstance(Tout, list | tuple) else (Tout,)
    is_bare = tuple(
        not (hasattr(t, "shape") and hasattr(t, "dtype")) or _is_dtype(t) for t in given
    )
    shape: tuple[Any, ...] = ()
    if any(is_bare):
        try:
            shape = jnp.broadcast_shapes(*(array.shape for array in arrays))
        except ValueError:
            shapes = ", ".join(str(list(array.shape)) for array in arrays)
            raise ValueError(
                f"numpy_function was given only a dtype for a result of {described(func)}, which "
                "then has the shape to which the inputs broadcast; but these do not broadcast: "
                f"{shapes}. Give Tout=jax.ShapeDtypeStruct(shape, dtype)"
            ) from None
    return tuple(
        _jax.struct(shape if bare else t.shape, _require_dtype(func, t if bare else t.dtype))
        for t, bare in zip(given, is_bare, strict=True)
    )


def _is_dtype(value: Any) -> bool:
    return isinstance(value, type | np.dtype)  # a NumPy dtype has an attribute `shape` too


def _require_dtype(func: Callable[..., Any], value: Any) -> Any:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if value is None or dtype is None or not is_array_like(np.empty((), dtype)):
        raise TypeError(
            "numpy_function takes as Tout a dtype, a jax.ShapeDtypeStruct, or a list of these, for "
            f"the results of {described(func)}; it was given {brief(value)}"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"numpy_function was given Tout={dtype} for {described(func)}, a dtype that needs "
            "jax.config.update('jax_enable_x64', True). Give and return "
            f"{jax.dtypes.canonicalize_dtype(dtype)}"
        )
    return dtype


# ----------------------------------------------------------------------------- running it


@dataclass(frozen=True, eq=False)
class _Host:
    """The callback for JAX, which calls the function and checks its results.

    Two callbacks are equal for the same function and the same types of results, so that JAX reuses
    programs. Functions are compared by identity, since equal objects (with an `__eq__`) may do
    different things.
    """

    func: Callable[..., Any]
    types: tuple[jax.ShapeDtypeStruct, ...]
    several: bool  # whether it returns a sequence of results

    def _comparison_key(self) -> tuple[Any, ...]:
        func: Any = self.func
        # Each access of a method makes a new object; the objects of the same instance are equal.
        which = func if isinstance(func, MethodType | BuiltinMethodType) else id(func)
        return which, self.types, self.several

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Host) and self._comparison_key() == other._comparison_key()

    def __hash__(self) -> int:
        return hash(self._comparison_key())

    def __call__(self, *arrays: Any) -> list[Any]:
        who = f"{described(self.func)}, called by numpy_function,"
        # JAX's message contains only the last line of this message, so it is a single line.
        try:
            returned = self.func(*map(np.asarray, arrays))
        except Exception as error:
            raise RuntimeError(f"{who} raised {type(error).__name__}: {error}") from error
        results = [returned]
        if self.several and (isinstance(returned, list | tuple) or len(self.types) != 1):
            if not isinstance(returned, list | tuple) or len(returned) != len(self.types):
                got = (
                    f"{len(returned)} results"
                    if isinstance(returned, list | tuple)
                    else brief(returned)
                )
                raise ValueError(
                    f"{who} should return {len(self.types)} results by Tout; it returned {got}"
                )
            results = list(returned)
        given = {array.dtype for array in arrays}
        return [self._check_result(who, i, result, given) for i, result in enumerate(results)]

    def _check_result(self, who: str, i: int, result: Any, given: Collection[Any]) -> Any:
        expected = self.types[i]
        kind = f"result {i}" if self.several else "the result"
        try:
            array = _convert_number(result, expected.dtype)
        except OverflowError as error:
            raise OverflowError(f"{who} returned {result} as {kind}: {error}") from None
        if array is None:
            array = _to_array(result)
        if array is None:
            raise TypeError(
                f"{who} returned {brief(result)} as {kind}, which is not an array, where Tout says "
                f"{_type_text(expected)}"
            )
        # `check_grads` calls the function with inputs of double precision.
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        if array.dtype in given and is_float and jnp.issubdtype(expected.dtype, jnp.floating):
            array = array.astype(expected.dtype)
        if array.shape == expected.shape and array.dtype == expected.dtype:
            return array
        is_shape = array.shape != expected.shape
        cure = "" if is_shape else f" (convert it: .astype('{expected.dtype}'))"
        raise (ValueError if is_shape else TypeError)(
            f"{who} returned {_type_text(array)} as {kind}, where Tout says "
            f"{_type_text(expected)}{cure}"
        )


def _convert_number(result: Any, dtype: Any) -> Any:
    """Converts a Python number to a dtype of its own kind or of a wider kind; returns None for any
    other object. Raises OverflowError if the dtype cannot represent an integer."""
    if type(result) is int and jnp.issubdtype(dtype, np.integer):
        limits_of: Callable[[Any], Any] = jnp.iinfo  # NumPy's does not know integers of 4 bits
        limits = limits_of(dtype)
        if not int(limits.min) <= result <= int(limits.max):
            raise OverflowError(f"{dtype} has integers from {limits.min} to {limits.max} only")
        return np.asarray(result).astype(dtype)
    kinds = {bool: np.generic, int: np.number, float: np.inexact, complex: np.complexfloating}
    if type(result) not in kinds or not jnp.issubdtype(dtype, kinds[type(result)]):
        return None
    return np.asarray(float(result) if type(result) is int else result).astype(dtype)


def _to_array(result: Any) -> Any:
    """Returns None if the result cannot become an array of numbers."""
    try:
        array = np.asarray(result)
    except ValueError:  # lists of different lengths
        return None
    return array if is_array_like(array) else None


def _type_text(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _run_on_host(
    host: _Host, arrays: Sequence[Any], stateful: bool, *, are_constants: bool
) -> list[Any]:
    """Calls the host function. Its operands are constants to differentiation if a gradient function
    or the results' integer dtypes say so; otherwise differentiating them is an error."""
    with unrecorded():  # tapes do not record the call
        if _jax.is_top_level():
            return _call(host, arrays, stateful)
        constants = map(jax.lax.stop_gradient, arrays) if are_constants else arrays
        mark = functools.partial(TO_HOST.bind, function=described(host.func), stateful=stateful)
        results = _call(host, list(map(mark, constants)), stateful)
        return results if arrays else list(map(mark, results))


def _call(host: _Host, arrays: Sequence[Any], stateful: bool) -> list[Any]:
    if stateful:
        return list(io_callback(host, host.types, *arrays, ordered=True))
    return list(jax.pure_callback(host, host.types, *arrays, vmap_method="sequential"))


# ----------------------------------------------------------------------------- its gradient


@OF_HOST_CALL
def _gradient_of_host_call() -> None:
    """Carries the mark `OF_HOST_CALL`, by which graphs recognise the rules of host calls."""


def _attach_gradient(
    grad: Callable[..., Any],
    arrays: tuple[Any, ...],
    results: Sequence[Any],
    name: str,
    params: dict[str, Any],
) -> list[Any]:
    if not any(map(_jax.has_gradient, arrays)) or not any(map(_jax.has_gradient, results)):
        return list(results)
    where = calling_line()
    reads = ReadsOutside()

    def gradient(inputs: Sequence[Any], outputs: Sequence[Any], dys: Sequence[Any]) -> Any:
        op = GradientOperation(tuple(inputs), tuple(outputs), params, name)
        note = f"in the gradient function {described(grad)} of {name} at {where}"
        with add_note_on_error(lambda: note), reads.around():
            answer = grad(op, *dys)
        return check_cotangents(answer, op, where, grad)

    def run(*operands: Any) -> list[Any]:
        return list(operands[len(arrays) :])

    run = take_users_name(grad, run)
    run.__name__ = run.__qualname__ = name
    operands = [*arrays, *results]
    return with_traced_gradient(
        run, gradient, operands, results, _gradient_of_host_call, len(arrays)
    )
