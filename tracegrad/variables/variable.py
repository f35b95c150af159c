"""`Variable`: an array that can be assigned, and works like its value."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.variables import kept_programs
from tracegrad.variables.cut_gradients import forget_cut
from tracegrad.variables.lending import hold, settle, store, stored_value, take_back
from tracegrad.variables.listening import (
    assign_through_listeners,
    listeners,
    read_through_listeners,
)

T = TypeVar("T")
_Operator = Callable[[Any, Any], Any]


def _both(apply: _Operator) -> tuple[_Operator, _Operator]:
    """Returns two methods for an operator: the Variable as left operand, and as right operand."""

    def reflected(self: Variable, other: Any) -> Any:
        return apply(_operand(other), self.value)

    return _on_left(apply), reflected


def _on_left(apply: _Operator) -> _Operator:
    def method(self: Variable, other: Any) -> Any:
        return apply(self.value, _operand(other))

    return method


def _of_value(ask: Callable[[Any], T]) -> Callable[[Variable], T]:
    def method(self: Variable) -> T:
        return ask(self.value)

    return method


class Variable:
    """An array that can be assigned.

    A Variable works like its value: as an operand on either side, in indexing, in the functions of
    `jax.numpy`, as a leaf of the arguments of a jitted function. Functions of `jax.lax` need
    ``v.value``. Flattening a tree with Variables gives their values; unflattening gives arrays, so
    the state of an optimiser holds no Variables.

    Inside a function traced by `tracegrad.trace`, a Variable that is read is an input of the
    program, and a Variable that is assigned is an output: each call uses the current value. As an
    argument of such a function it stays a Variable; `jax.jit`, `jax.grad` and other functions of
    JAX get its value. A tape watches trainable Variables at their first read.

    ``==`` compares values elementwise; the hash is by identity.

    Arguments:
      initial_value: an array (sharded arrays stay sharded), a number or nested lists of numbers.
        The Variable makes an array object of its own: if a traced function later donates the
        Variable's buffer, the given array is not affected. The two may share a buffer: a function
        of yours that donates the given array deletes the Variable's value too.
      trainable: whether tapes watch the Variable without being told.
      name: the name in printed graphs and in messages; need not be unique. Default: ``"Variable"``.
      dtype: the dtype of the value; default: the dtype of `initial_value`.

    Raises:
      TypeError: `initial_value` is not array-like, or is a tracer, which is gone after its trace.

    >>> import jax.numpy as jnp
    >>> v = Variable([1.0, 2.0], name="v")
    >>> print(v * 2, 1 - v, v[0], jnp.sum(v))
    [2. 4.] [ 0. -1.] 1.0 3.0
    >>> v.assign_add([0.5, 0.5])
    <Variable v: f32[2] = [1.5 2.5]>

    As ``tf.Variable``.
    """

    __slots__ = (
        "__weakref__",
        "_aval",
        "_borrower",
        "_is_handed",
        "_is_ours",
        "_keepers",
        "_name",
        "_node",
        "_trainable",
        "_value",
    )

    # NumPy's operators then defer to the Variable's.
    __array_priority__ = 100

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        name: str | None = None,
        dtype: Any = None,
    ):
        self._name = "Variable" if name is None else str(name)
        self._trainable = bool(trainable)
        kept_programs.note_first_variable()
        if isinstance(initial_value, Variable):
            initial_value = initial_value.value
        if isinstance(initial_value, jax.core.Tracer):
            raise TypeError(
                f"the Variable {self._name!r} is created inside a function that is being traced, "
                f"with a value that exists only there ({_jax.type_text(initial_value.aval)}). "
                "Create it outside, or from a NumPy array or a number, or compute its initial "
                "value under `jax.ensure_compile_time_eval()`."
            )
        # Inside a trace, the initial value is still computed at once.
        with jax.ensure_compile_time_eval():
            value = _own_array(initial_value, dtype)
        self._aval = jax.typeof(value)
        self._value = value
        # For `lending`:
        self._is_ours = False  # whether nobody else has the array or its buffers
        self._is_handed = False  # whether a reader has got this array object
        self._keepers = 0  # how many listeners may still keep the array
        self._borrower: int | None = None  # the id of a thread, ~id, or None
        self._node: Any = None  # see `trees.node_of_variable`

    # ---------------------------------------------------------------------- reading and assigning

    @property
    def value(self) -> Any:
        """The current value: a `jax.Array`; inside a traced function, the traced value.

        Raises RuntimeError if JAX would keep the value as a constant of a program for all later
        calls: inside `jax.jit`, or inside a `jax.lax.scan` outside of a traced function.
        """
        return read_through_listeners(self, stored_value)

    def read_value(self) -> Any:
        """Returns `value`."""
        return self.value

    def assign(self, value: Any) -> Variable:
        """Replaces the value by a value of the same shape and dtype; returns the Variable.

        Assignment is not differentiated. A Python number is converted to the Variable's dtype, if
        JAX's type promotion would keep that dtype.

        Raises ValueError for another shape, TypeError for another dtype.
        """
        value = self._checked(value)
        forget_cut(self)
        assign_through_listeners(self, value, store)
        return self

    def assign_add(self, delta: Any) -> Variable:
        """Assigns ``value + delta``. If several threads add at once, no sum is lost, unless tapes
        record the additions."""
        return self._assign_sum(operator.add, delta)

    def assign_sub(self, delta: Any) -> Variable:
        """Assigns ``value - delta``; see `assign_add`."""
        return self._assign_sum(operator.sub, delta)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the current value as a NumPy array."""
        return np.asarray(self.value)

    def _checked(self, value: Any) -> Any:
        """Returns `value` as an array of this Variable's type; raises for another type."""
        value = _operand(value)
        own = self._aval
        given: Any = getattr(value, "aval", None)
        if type(given) is type(own) and (
            (given.shape, given.dtype, given.weak_type) == (own.shape, own.dtype, False)
        ):
            return value  # the common case
        loose = not isinstance(value, jax.Array | np.ndarray | np.generic)  # Python's own numbers
        if not isinstance(value, jax.Array):
            with jax.ensure_compile_time_eval():  # also inside a trace
                value = jnp.array(value)  # a copy: NumPy arrays can be written to
        given = jax.typeof(value)
        described = f"to the Variable {self._name!r} ({self._type_text()})"
        if given.shape != self._aval.shape:
            raise ValueError(
                f"cannot assign a value of shape {list(given.shape)} {described}: the shapes must "
                "be the same"
            )
        weak = bool(getattr(given, "weak_type", False))
        if given.dtype != self._aval.dtype and not (
            (loose or weak) and _is_of_kind(given.dtype, self.dtype)
        ):
            raise TypeError(
                f"cannot assign a value of dtype {given.dtype} {described}: convert it with "
                f"`.astype({self.dtype})`"
            )
        if weak or given.dtype != self._aval.dtype:
            value = jax.lax.convert_element_type(value, self.dtype)
        return value

    def _assign_sum(self, apply: _Operator, delta: Any) -> Variable:
        delta = jnp.asarray(delta) if isinstance(delta, list | tuple) else _operand(delta)
        # If `delta` is of another class, the result may be an array that somebody else has.
        is_new = type(delta) is type(self._value) or isinstance(delta, _NUMBERS)
        if listeners() or not is_new or not _jax.is_top_level():
            return self.assign(apply(self.value, delta))
        (value,) = hold([self])  # other threads that assign wait until `settle`
        try:
            total = self._checked(apply(value, delta))
        except BaseException:
            take_back([self])
            raise
        settle([self], [total])  # nobody else has this array, so it needs no alias
        return self

    # ------------------------------------------------------------------------------- attributes

    # Tapes ask for these at every read, so the getters are in C.
    name = property(operator.attrgetter("_name"))
    trainable = property(operator.attrgetter("_trainable"))

    @property
    def aval(self) -> Any:
        """The JAX type of the value; on an explicit mesh, with the sharding of the value."""
        return jax.typeof(self._value)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._aval.shape)

    @property
    def dtype(self) -> Any:
        return self._aval.dtype

    @property
    def ndim(self) -> int:
        return len(self._aval.shape)

    @property
    def size(self) -> int:
        return int(self._aval.size)

    def _type_text(self) -> str:
        return _jax.type_text(self._aval)

    __hash__ = object.__hash__  # by identity

    def __repr__(self) -> str:
        try:
            value = np.array2string(self.numpy(), separator=" ", threshold=20)
        except Exception:  # the value is traced, or may not be read here
            value = "?"
        kind = "" if self._trainable else ", not trainable"
        return f"<Variable {self._name}: {self._type_text()}{kind} = {value}>"

    # ------------------------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy (`copy.copy`, `copy.deepcopy`, pickle): value, name,
        trainable, and attributes of subclasses. Lending is not copied."""
        return {
            **getattr(self, "__dict__", {}),
            "_value": self.value,
            "_name": self._name,
            "_trainable": self._trainable,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        value, name, trainable = (state.pop(key) for key in ("_value", "_name", "_trainable"))
        Variable.__init__(self, value, trainable, name)
        for key, attribute in state.items():
            setattr(self, key, attribute)

    # ------------------------------------------------------------------------------ conversions

    def __jax_array__(self) -> Any:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        if copy or (dtype is not None and array.dtype != dtype):
            return np.array(array, dtype=dtype)
        return array

    __float__ = _of_value(float)
    __int__ = _of_value(int)
    __complex__ = _of_value(complex)
    __bool__ = _of_value(bool)
    __index__ = _of_value(operator.index)
    __len__ = _of_value(len)
    __iter__ = _of_value(iter)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_VALUE:
            return getattr(self.value, name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}; its `.value` may have it"
        )

    # ------------------------------------------------------------------------------- operators

    __add__, __radd__ = _both(operator.add)
    __sub__, __rsub__ = _both(operator.sub)
    __mul__, __rmul__ = _both(operator.mul)
    __truediv__, __rtruediv__ = _both(operator.truediv)
    __floordiv__, __rfloordiv__ = _both(operator.floordiv)
    __mod__, __rmod__ = _both(operator.mod)
    __divmod__, __rdivmod__ = _both(divmod)
    __pow__, __rpow__ = _both(operator.pow)
    __matmul__, __rmatmul__ = _both(operator.matmul)
    __and__, __rand__ = _both(operator.and_)
    __or__, __ror__ = _both(operator.or_)
    __xor__, __rxor__ = _both(operator.xor)
    __lshift__, __rlshift__ = _both(operator.lshift)
    __rshift__, __rrshift__ = _both(operator.rshift)
    __lt__ = _on_left(operator.lt)
    __le__ = _on_left(operator.le)
    __gt__ = _on_left(operator.gt)
    __ge__ = _on_left(operator.ge)
    __eq__ = _on_left(operator.eq)
    __ne__ = _on_left(operator.ne)

    __neg__ = _of_value(operator.neg)
    __pos__ = _of_value(operator.pos)
    __abs__ = _of_value(abs)
    __invert__ = _of_value(operator.invert)

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.value, ndigits or 0)


# The attributes that a Variable takes from its value.
_OF_THE_VALUE = frozenset(
    """
    T mT at real imag itemsize nbytes sharding is_fully_addressable is_fully_replicated devices
    addressable_shards astype reshape ravel flatten transpose swapaxes squeeze copy conj conjugate
    view sum prod mean std var min max argmin argmax argsort sort all any cumsum cumprod clip dot
    diagonal trace take repeat round nonzero compress choose searchsorted item tolist
    block_until_ready
    """.split()  # noqa: SIM905
)


# The sum of a `jax.Array` and an object of these types is a new array.
_NUMBERS = (int, float, complex, np.ndarray, np.generic)


def _operand(other: Any) -> Any:
    return other.value if isinstance(other, Variable) else other


def _is_of_kind(given: Any, dtype: Any) -> bool:
    """Whether an array of `dtype` keeps its dtype in arithmetic with a Python number like `given`
    (int, float, ...)."""
    number = np.zeros((), given).item()
    return bool(jnp.result_type(number, dtype) == dtype)


def _own_array(value: Any, dtype: Any) -> Any:
    """A new array object without weak type, which may share the buffer of a `jax.Array`."""
    if not isinstance(value, jax.Array):
        value = jnp.array(value, dtype=dtype)  # a copy: NumPy arrays can be written to
    elif dtype is not None:
        value = value.astype(dtype)
    if getattr(jax.typeof(value), "weak_type", False):
        value = jax.lax.convert_element_type(value, value.dtype)
    return _jax.fresh_alias(value)
