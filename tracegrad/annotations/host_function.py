"""A NumPy function as an operation, with a gradient function of its own.

What it computes is not seen by JAX, which calls it on the host whenever the program runs there. Its
results come from values that are constants to differentiation; a gradient, where there is one, is
put on the results by a rule around them, so that the function runs once, differentiated or not.
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
    is_array_like,
    noted,
    require_callable,
    with_users_name,
)
from tracegrad.ir.frames import OF_HOST_CALL
from tracegrad.ir.occurrence import calling_line
from tracegrad.ir.wording import brief, described, name_of
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.rewriting.operation import GradientOperation, checked_cotangents
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
    """Calls a function of NumPy arrays, with a gradient if it is given one.

    It runs on the host, once for each time that the program gets there, in the order of the
    program, and never while a function is traced: under jit, in loops and branches, differentiated
    or not, on CPU, GPU and TPU.

    Arguments:
        func: called with one NumPy array per input, read-only and without an axis that is being
            mapped; returns what `Tout` says, in exactly that shape and dtype (Python numbers take
            the dtype, and so do floats of the dtype of an input, such as the float64 ones that
            `check_grads` gives). It must not call JAX, which may wait for it.
        inp: the inputs, a list or tuple of arrays, numbers or Variables of any shapes; or just one.
        Tout: what `func` returns: a dtype, for an array of the shape to which the inputs broadcast;
            a `jax.ShapeDtypeStruct` for one of another shape; or a list or tuple of these, for a
            list or tuple of arrays (where it holds one, `func` may return the array itself).
        grad: the gradient function ``grad(op, *dys)``. ``op.inputs`` and ``op.outputs`` are tuples
            of arrays, ``op.name`` the name, ``op.params`` the other arguments of this call;
            there is one cotangent ``dy`` per output, of its shape and dtype (zeros where it is not
            used). Returns one gradient per input, of its shape and dtype, or None. It is traced:
            written in `jax.numpy`, or calls `numpy_function` in its turn. It may itself be
            differentiated, so derivatives of any order are defined; ``op.outputs`` have this
            gradient there.
        stateful: whether the order and the number of its calls matter: it draws random numbers,
            counts, reads a file. False is a promise that its results depend on its inputs alone.
            Then a call whose result is not used may be dropped, two with the same inputs joined,
            and one repeated for a derivative; and it may stand where a stateful one cannot: under
            `jax.vmap` (called for each element), in a recomputed function, in a program for
            several devices.
        name: what messages and graphs call it. Default: the function's name.

    Returns:
        An array, or a list or tuple of arrays as `Tout` is one.

    Raises:
        TypeError: an argument is not what is said above; `Tout` is a dtype that JAX does not have
            here (64 bits without ``jax_enable_x64``).
        ValueError: the inputs do not broadcast together and `Tout` is a bare dtype; or, without
            `grad`, the result is differentiated. (To a `GradientTape` or `gradients()` it is then
            not connected: None.)
        NotImplementedError: it is exported; or, if it is `stateful`, mapped by `jax.vmap` over what
            it is given (in the backward pass of a Jacobian too, if `grad` calls it there), or
            differentiated in a recomputed function.
        jax.errors.JaxRuntimeError: while the program runs, if `func` raises, or returns anything
            but what `Tout` says. The message has its name, its line and what was wrong.
        ValueError, TypeError: under differentiation, if `grad` returns a wrong number of gradients,
            a wrong shape or dtype.

    The remainder of a division, with its gradient almost everywhere:

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

    As ``tf.numpy_function``, with the gradient of its own that ``py_func`` got from
    ``tf.RegisterGradient``. It is an ordered `jax.experimental.io_callback`, or a
    `jax.pure_callback` where it is not `stateful`; the gradient is that of a `jax.custom_vjp`,
    which `jax.jvp` refuses, where tracegrad's `jvp`, `hessian` and `ForwardAccumulator` transpose
    it. In one thing `jax.grad` (and with it `tracegrad.grad`) does not keep count: what is the
    same at each step of a `jax.lax.scan` it computes once, host calls too. Tapes and `gradients`
    do not.
    """
    require_callable(func, "numpy_function")
    if grad is not None:
        require_callable(grad, "numpy_function")
    arrays = _arrays(func, inp)
    types, has_bare = _result_types(func, Tout, arrays)
    host = _Host(func, types, isinstance(Tout, list | tuple), has_bare)
    with nullcontext() if name is None else jax.named_scope(name):
        results = _run(host, arrays, stateful, has_gradient=grad is not None)
        if grad is not None and not _jax.is_top_level():  # something could ask for it
            params = {"func": func, "Tout": Tout, "stateful": stateful}
            results = _with_gradient(grad, arrays, results, name or name_of(func), params)
    if not host.several:
        return results[0]
    return results if isinstance(Tout, list) else tuple(results)


# ----------------------------------------------------------------------------- what it was given


def _arrays(func: Callable[..., Any], inp: Any) -> tuple[Any, ...]:
    given = tuple(inp) if isinstance(inp, list | tuple) else (inp,)
    for i, value in enumerate(given):
        if not isinstance(value, Variable) and not is_array_like(value):
            raise TypeError(
                f"numpy_function takes a list of arrays as the inputs of {described(func)}; "
                f"input {i} is {brief(value)}. Give what is no array to the function itself, by "
                "functools.partial"
            )
    return tuple(jnp.asarray(v.value if isinstance(v, Variable) else v) for v in given)


def _result_types(
    func: Callable[..., Any], Tout: Any, arrays: Sequence[Any]
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[bool, ...]]:
    """The types of the results, and for which of them `Tout` says the dtype alone."""
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
                f"numpy_function was given a dtype alone for what {described(func)} returns, which "
                f"then has the shape to which its inputs broadcast; these do not: {shapes}. Give "
                "Tout=jax.ShapeDtypeStruct(shape, dtype)"
            ) from None
    types = tuple(
        _jax.struct(shape if bare else t.shape, _dtype(func, t if bare else t.dtype))
        for t, bare in zip(given, is_bare, strict=True)
    )
    return types, is_bare


def _is_dtype(value: Any) -> bool:
    return isinstance(value, type | np.dtype)  # NumPy's have an attribute `shape` all the same


def _dtype(func: Callable[..., Any], value: Any) -> Any:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if value is None or dtype is None or not is_array_like(np.empty((), dtype)):
        raise TypeError(
            "numpy_function takes as Tout a dtype, a jax.ShapeDtypeStruct, or a list of such for "
            f"the results of {described(func)}; it was given {brief(value)}"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"numpy_function was given Tout={dtype} for {described(func)}, which JAX has only "
            "with jax.config.update('jax_enable_x64', True). Ask for "
            f"{jax.dtypes.canonicalize_dtype(dtype)}, and return that"
        )
    return dtype


# ----------------------------------------------------------------------------- running it


@dataclass(frozen=True, eq=False)
class _Host:
    """What JAX calls on the host: the function, and the check of what it returns.

    Equal for calls of one function for results of the same types, so that programs are too. One
    function, and not one that is equal: objects with an `__eq__` may do different things.
    """

    func: Callable[..., Any]
    types: tuple[jax.ShapeDtypeStruct, ...]
    several: bool  # whether it returns a sequence of results
    is_bare: tuple[bool, ...]  # for which results the user said the dtype alone

    def _key(self) -> tuple[Any, ...]:
        func: Any = self.func
        # Of a method there is a new object each time; those of one object are equal.
        which = func if isinstance(func, MethodType | BuiltinMethodType) else id(func)
        return which, self.types, self.several, self.is_bare

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Host) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __call__(self, *arrays: Any) -> list[Any]:
        who = f"{described(self.func)}, called by numpy_function,"
        # JAX puts into its own message the last line only, so it must say everything.
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
                    f"{who} is to return {len(self.types)} results by Tout; it returned {got}"
                )
            results = list(returned)
        given = {array.dtype for array in arrays}
        return [self._checked(who, i, result, given) for i, result in enumerate(results)]

    def _checked(self, who: str, i: int, result: Any, given: Collection[Any]) -> Any:
        expected = self.types[i]
        kind = f"result {i}" if self.several else "the result"
        try:
            array = _number_as(result, expected.dtype)
        except OverflowError as error:
            raise OverflowError(f"{who} returned {result} as {kind}: {error}") from None
        if array is None:
            array = _array_of(result)
        if array is None:
            raise TypeError(
                f"{who} returned {brief(result)} as {kind}, which is no array, where Tout says "
                f"{_text(expected)}"
            )
        # Inputs of another precision than usual: double, where derivatives are checked.
        if array.dtype in given and array.dtype.kind == expected.dtype.kind == "f":
            array = array.astype(expected.dtype)
        if array.shape == expected.shape and array.dtype == expected.dtype:
            return array
        is_shape = array.shape != expected.shape
        hint = ""
        if is_shape and self.is_bare[i]:
            hint = (
                " (that to which the inputs broadcast: for another one Tout is a "
                "jax.ShapeDtypeStruct)"
            )
        elif not is_shape:
            hint = f" (convert it: .astype('{expected.dtype}'))"
        raise (ValueError if is_shape else TypeError)(
            f"{who} returned {_text(array)} as {kind}, where Tout says {_text(expected)}{hint}"
        )


def _number_as(result: Any, dtype: Any) -> Any:
    """A Python number, which has no dtype of its own, as an array of a dtype of its kind or of a
    wider kind; None for all else. Raises OverflowError for an integer that the dtype has not."""
    if type(result) is int and jnp.issubdtype(dtype, np.integer):
        limits_of: Callable[[Any], Any] = jnp.iinfo  # NumPy's does not know integers of 4 bits
        limits = limits_of(dtype)
        if not int(limits.min) <= result <= int(limits.max):
            raise OverflowError(f"{dtype} has the integers from {limits.min} to {limits.max}")
        return np.asarray(result).astype(dtype)
    kinds = {bool: "?", int: "i1", float: "f2", complex: "c8"}
    kind = kinds.get(type(result))
    if kind is None or not np.can_cast(kind, dtype, "safe" if kind == "?" else "same_kind"):
        return None
    return np.asarray(float(result) if type(result) is int else result).astype(dtype)


def _array_of(result: Any) -> Any:
    """What a function returned as an array of numbers; None if it is none."""
    try:
        array = np.asarray(result)
    except ValueError:  # lists of different lengths
        return None
    return array if is_array_like(array) else None


def _text(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _run(host: _Host, arrays: Sequence[Any], stateful: bool, *, has_gradient: bool) -> list[Any]:
    """Calls the host function with operands that are constants to differentiation. Without a
    gradient function, differentiating the operands is an error."""
    with unrecorded():  # the results are not connected to what a tape sees
        if _jax.is_top_level():
            return _call(host, arrays, stateful)
        constants = map(jax.lax.stop_gradient, arrays) if has_gradient else arrays
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
    """By the mark of this function the rules are known."""


def _with_gradient(
    grad: Callable[..., Any],
    arrays: tuple[Any, ...],
    results: Sequence[Any],
    name: str,
    params: dict[str, Any],
) -> list[Any]:
    """The results, with the gradient function's gradient by the inputs."""
    if not any(map(_jax.has_gradient, arrays)) or not any(map(_jax.has_gradient, results)):
        return list(results)
    where = calling_line()
    reads = ReadsOutside()

    def gradient(inputs: Sequence[Any], outputs: Sequence[Any], dys: Sequence[Any]) -> Any:
        op = GradientOperation(tuple(inputs), tuple(outputs), params, name)
        note = f"in the gradient function {described(grad)} of {name} at {where}"
        with noted(lambda: note), reads.around():
            answer = grad(op, *dys)
        return checked_cotangents(answer, op, where, grad)

    def run(*operands: Any) -> list[Any]:
        return list(operands[len(arrays) :])

    run = with_users_name(grad, run)
    run.__name__ = run.__qualname__ = name
    operands = [*arrays, *results]
    return with_traced_gradient(
        run, gradient, operands, results, _gradient_of_host_call, len(arrays)
    )
