"""`Variable`: an array that can be assigned, and the hook by which it says when it is used.

A Variable knows neither tapes nor traces. Whoever wants to know that one is read or assigned (a
tape that watches it, a trace that makes an input and an output of it, a rule that collects those
that a function uses) listens: see `Listener`. Listeners stand around one another, one stack per
thread. The innermost is asked first, and asks the next one out itself, so that it decides what
those outside of it learn.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax

# ------------------------------------------------------------------------------------------- hook


class Listener(Protocol):
    """Who is told that a Variable is read or assigned on its thread, while it listens."""

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """Returns the value that the reader gets.

        `outside()` is the value that the next listener out would give, in the end the stored
        array; not to call it keeps the read from those outside.
        """

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        """Is given the new value, of the Variable's shape and dtype.

        `outside(value)` hands it on, in the end to be stored; not to call it keeps the assignment
        from those outside.
        """


class _Listeners(threading.local):
    stack: tuple[Listener, ...] = ()  # outermost first


_listeners = _Listeners()


def start_listening(listener: Listener) -> None:
    """Makes a listener the innermost one of this thread."""
    _listeners.stack = (*_listeners.stack, listener)


def stop_listening(listener: Listener) -> None:
    """Takes a listener of this thread away, the innermost one or not."""
    stack = _listeners.stack
    if stack and stack[-1] is listener:
        _listeners.stack = stack[:-1]
        return
    place = max((i for i, other in enumerate(stack) if other is listener), default=None)
    if place is None:
        raise RuntimeError("this listener does not listen on this thread")
    _listeners.stack = stack[:place] + stack[place + 1 :]


def innermost_listener() -> Listener | None:
    """Who is asked first on this thread."""
    return _listeners.stack[-1] if _listeners.stack else None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Listens to the Variables that this thread reads and assigns inside the block."""
    start_listening(listener)
    try:
        yield
    finally:
        stop_listening(listener)


def _read(
    variable: Variable, stack: tuple[Listener, ...], stored: Callable[[Variable], Any]
) -> Any:
    if not stack:
        return stored(variable)
    return stack[-1].on_read(variable, lambda: _read(variable, stack[:-1], stored))


def _assign(variable: Variable, value: Any, stack: tuple[Listener, ...]) -> None:
    if not stack:
        variable._store(value)
    else:
        stack[-1].on_assign(variable, value, lambda new: _assign(variable, new, stack[:-1]))


# --------------------------------------------------------------------------------------- variable

FROZEN = (
    "the Variable {name!r} is read inside a function that JAX compiles or stages (jax.jit, "
    "jax.make_jaxpr, or the body of a scan, cond, while_loop or checkpoint), where its value would "
    "be kept as a constant for all later calls. Compile the function with `tracegrad.trace` "
    "instead, which makes an input of the Variable, or pass its `.value` in as an argument."
)


class Variable:
    """An array that can be assigned.

    Works like its value: in arithmetic on either side, in indexing, in the functions of
    `jax.numpy`, as a leaf of the arguments of a jitted function. `jax.lax` wants ``v.value``.
    Flattening a tree with Variables gives their values; unflattening gives arrays, so that the
    state of an optimiser holds no Variables.

    Inside a function traced by `tracegrad.trace` a Variable that is read is an input of the
    program, and one that is assigned an output: each call uses the value of that moment. Given to
    such a function as an argument it stays a Variable; to `jax.jit`, `jax.grad` and other functions
    of JAX it is its value. A tape watches trainable Variables at their first read.

    Compared with ``==`` it is its values, elementwise; it is hashed by identity.

    Arguments:
      initial_value: an array (sharded ones stay so), a number or nested lists of numbers. The
        Variable has an array object of its own: a later donation of its buffer by a traced
        function never touches the given one.
      trainable: whether tapes watch it by themselves.
      name: in printed graphs and in messages; need not be unique. Default: ``"Variable"``.
      dtype: of the value; default: that of `initial_value`.

    Raises:
      TypeError: `initial_value` is a value of a function being traced, which is gone when the
        trace is over, or is no array.

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
        "_given",
        "_is_ours",
        "_keepers",
        "_name",
        "_stand_in",
        "_trainable",
        "_value",
    )

    # NumPy's operators leave the operation to ours.
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
        if isinstance(initial_value, Variable):
            initial_value = initial_value.value
        if isinstance(initial_value, jax.core.Tracer):
            raise TypeError(
                f"the Variable {self._name!r} is created inside a function that is being traced, "
                f"with a value that exists only there ({_jax.type_text(initial_value.aval)}). "
                "Create it outside, or from a NumPy array or a number, or compute its initial "
                "value under `jax.ensure_compile_time_eval()`."
            )
        # Not a part of what may be being traced here.
        with jax.ensure_compile_time_eval():
            value = _own_array(initial_value, dtype)
        self._aval = jax.typeof(value)
        self._value = value
        self._is_ours = False  # whether nobody was handed the array
        self._keepers = 0  # how many listeners keep it, to whom it was shown; see `show`
        # The thread on which a program has the array, see `lend`; its complement, where the program
        # leaves the array as it is, see `hold`.
        self._borrower: int | None = None
        self._stand_in: Any = None  # what it is to the programs that JAX keeps; see `capture`
        self._given: Any = None  # what it is among arguments; see `given`

    # ---------------------------------------------------------------------- reading and assigning

    @property
    def value(self) -> Any:
        """The current value: a `jax.Array`; inside a traced function, the traced value.

        Raises RuntimeError where JAX would keep the value as a constant of a program, for all of
        its later calls: inside `jax.jit`, or a `jax.lax.scan` outside of a traced function.
        """
        return _read(self, _listeners.stack, Variable._stored)

    def read_value(self) -> Any:
        """The current value, as `value`."""
        return self.value

    def assign(self, value: Any) -> Variable:
        """Gives it a new value, of its shape and dtype; returns the Variable.

        Assignment is not differentiated. Python numbers take the dtype of the Variable if it is of
        their kind.

        Raises ValueError for another shape, TypeError for another dtype.
        """
        _assign(self, self._checked(value), _listeners.stack)
        return self

    def assign_add(self, delta: Any) -> Variable:
        """Adds to the value; as `assign` of ``value + delta``."""
        delta = _delta(delta)
        return self._assign_sum(self.value + delta, delta)

    def assign_sub(self, delta: Any) -> Variable:
        """Subtracts from the value; as `assign` of ``value - delta``."""
        delta = _delta(delta)
        return self._assign_sum(self.value - delta, delta)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The current value as a NumPy array."""
        return np.asarray(self.value)

    def _checked(self, value: Any) -> Any:
        """`value` as an array of this Variable's type; raises if it is of another."""
        value = _operand(value)
        own = self._aval
        given: Any = getattr(value, "aval", None)
        if type(given) is type(own) and (
            (given.shape, given.dtype, given.weak_type) == (own.shape, own.dtype, False)
        ):
            return value  # as nearly all are
        loose = not isinstance(value, jax.Array | np.ndarray | np.generic)  # Python's own numbers
        if not isinstance(value, jax.Array):
            with jax.ensure_compile_time_eval():  # not a part of what may be being traced here
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

    def _assign_sum(self, value: Any, delta: Any) -> Variable:
        """Assigns what was computed of its value and of `delta`."""
        # Of what is neither an array nor a number the sum may be anything, and anybody's.
        kind = type(self._value)
        is_new = type(value) is kind and (type(delta) is kind or isinstance(delta, _NUMBERS))
        if _listeners.stack or not is_new or not _jax.is_top_level():
            return self.assign(value)
        # An array that nobody else has: it needs no alias.
        value = self._checked(value)
        with _lock:
            self._value = value
            self._is_ours = False
            self._keepers = 0
        return self

    def _stored(self) -> Any:
        """What is read where nobody listens."""
        if not _jax.is_top_level() and _jax.staging_trace() is not None:
            raise RuntimeError(FROZEN.format(name=self._name))
        return self._handed()

    def _handed(self) -> Any:
        """The array, for somebody who may keep it."""
        value = self._value
        self._is_ours = False
        # `lend` looks at the two in the other order: it sees this, or is seen here.
        if self._borrower is not None or self._value is not value:
            return _awaited(self)
        return value

    def _store(self, value: Any) -> None:
        """What is done by an assignment to which nobody listens."""
        if _jax.is_tracer(value):
            # What is differentiated carries its value, and assignment is not differentiated.
            value = jax.lax.stop_gradient(value)
        if _jax.is_tracer(value):
            raise RuntimeError(
                f"the Variable {self._name!r} is assigned a value that exists only inside a "
                f"function that is being transformed ({value}): the assignment would be lost. "
                "Compile the function with `tracegrad.trace` instead of `jax.jit`; inside "
                "`jax.vmap` and the bodies of loops return the value, and assign it outside."
            )
        value = _jax.fresh_alias(value)
        with _lock:
            self._value = value
            self._is_ours = False
            self._keepers = 0

    # ------------------------------------------------------------------------------- what it is

    @property
    def name(self) -> str:
        return self._name

    @property
    def trainable(self) -> bool:
        return self._trainable

    @property
    def aval(self) -> Any:
        """Its type, as JAX has it."""
        return self._aval

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
        except Exception:  # of a traced value, or one that may not be read here, there is none
            value = "?"
        kind = "" if self._trainable else ", not trainable"
        return f"<Variable {self._name}: {self._type_text()}{kind} = {value}>"

    # ------------------------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        """What a copy (`copy.copy`, `copy.deepcopy`, pickle) has of it: value, name, whether it is
        trainable, and what a subclass put there. What programs have to do with it is its own."""
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
        array = np.asarray(self.value)
        if copy or (dtype is not None and array.dtype != dtype):
            return np.array(array, dtype=dtype)
        return array

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_VALUE:
            return getattr(self.value, name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}; its array, `.value`, may"
        )

    # ------------------------------------------------------------------------------- operators

    def __add__(self, other: Any) -> Any:
        return self.value + _operand(other)

    def __radd__(self, other: Any) -> Any:
        return _operand(other) + self.value

    def __sub__(self, other: Any) -> Any:
        return self.value - _operand(other)

    def __rsub__(self, other: Any) -> Any:
        return _operand(other) - self.value

    def __mul__(self, other: Any) -> Any:
        return self.value * _operand(other)

    def __rmul__(self, other: Any) -> Any:
        return _operand(other) * self.value

    def __truediv__(self, other: Any) -> Any:
        return self.value / _operand(other)

    def __rtruediv__(self, other: Any) -> Any:
        return _operand(other) / self.value

    def __floordiv__(self, other: Any) -> Any:
        return self.value // _operand(other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _operand(other) // self.value

    def __mod__(self, other: Any) -> Any:
        return self.value % _operand(other)

    def __rmod__(self, other: Any) -> Any:
        return _operand(other) % self.value

    def __divmod__(self, other: Any) -> Any:
        return divmod(self.value, _operand(other))

    def __rdivmod__(self, other: Any) -> Any:
        return divmod(_operand(other), self.value)

    def __pow__(self, other: Any) -> Any:
        return self.value ** _operand(other)

    def __rpow__(self, other: Any) -> Any:
        return _operand(other) ** self.value

    def __matmul__(self, other: Any) -> Any:
        return self.value @ _operand(other)

    def __rmatmul__(self, other: Any) -> Any:
        return _operand(other) @ self.value

    def __and__(self, other: Any) -> Any:
        return self.value & _operand(other)

    def __rand__(self, other: Any) -> Any:
        return _operand(other) & self.value

    def __or__(self, other: Any) -> Any:
        return self.value | _operand(other)

    def __ror__(self, other: Any) -> Any:
        return _operand(other) | self.value

    def __xor__(self, other: Any) -> Any:
        return self.value ^ _operand(other)

    def __rxor__(self, other: Any) -> Any:
        return _operand(other) ^ self.value

    def __lshift__(self, other: Any) -> Any:
        return self.value << _operand(other)

    def __rlshift__(self, other: Any) -> Any:
        return _operand(other) << self.value

    def __rshift__(self, other: Any) -> Any:
        return self.value >> _operand(other)

    def __rrshift__(self, other: Any) -> Any:
        return _operand(other) >> self.value

    def __neg__(self) -> Any:
        return -self.value

    def __pos__(self) -> Any:
        return +self.value

    def __abs__(self) -> Any:
        return abs(self.value)

    def __invert__(self) -> Any:
        return ~self.value

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.value, ndigits or 0)

    def __lt__(self, other: Any) -> Any:
        return self.value < _operand(other)

    def __le__(self, other: Any) -> Any:
        return self.value <= _operand(other)

    def __gt__(self, other: Any) -> Any:
        return self.value > _operand(other)

    def __ge__(self, other: Any) -> Any:
        return self.value >= _operand(other)

    def __eq__(self, other: Any) -> Any:
        return self.value == _operand(other)

    def __ne__(self, other: Any) -> Any:
        return self.value != _operand(other)


# ---------------------------------------------------------------------------------------- lending


_lock = threading.Lock()
_returned = threading.Condition(_lock)
_waiting = 0  # how many threads wait for it
_lenders: set[int] = set()  # the threads that ever lent


@jax.jit
def _copies(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) for array in arrays]


def listened() -> bool:
    """Whether somebody listens to Variables on this thread."""
    return bool(_listeners.stack)


def lend(variables: Sequence[Variable]) -> list[Any]:
    """Arrays with the values of Variables, which a program may be given for good.

    They are the Variables' own where no one else can have them: where `settle` stored them, and
    nobody has read them since. Others are copied. Until `settle` or `take_back`, readers wait.
    """
    me = threading.get_ident()
    with _lock:
        for variable in variables:
            if variable._borrower is not None:
                _wait_for(variables, me)
        _lenders.add(me)
        values: list[Any] = []
        foreign = []
        for variable in variables:
            variable._borrower = me
            if variable._keepers or not variable._is_ours:
                foreign.append(len(values))
                variable._is_ours, variable._keepers = False, 0
            values.append(variable._value)
    if foreign:
        try:
            copies = _copies([values[i] for i in foreign])
        except BaseException:
            take_back(variables)
            raise
        for i, copy in zip(foreign, copies, strict=True):
            values[i] = copy
    return values


def hold(variables: Sequence[Variable]) -> list[Any]:
    """The values of Variables for a program that computes their next ones, and leaves the arrays
    as they are: until `take_back`, readers get them, and other programs that assign wait."""
    me = threading.get_ident()
    with _lock:
        _wait_for(variables, me)
        for variable in variables:
            variable._borrower = ~me
            variable._is_ours = False
        return [variable._value for variable in variables]


def settle(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Stores arrays that a program made, and that nobody else has."""
    with _lock:
        for variable, value in zip(variables, values):
            variable._value = value
            variable._is_ours = True
            variable._borrower = None
        if _waiting:
            _returned.notify_all()


def take_back(variables: Sequence[Variable]) -> None:
    """Ends `hold`, and undoes `lend` where the program was not run."""
    with _lock:
        for variable in variables:
            variable._borrower = None
        if _waiting:
            _returned.notify_all()


def peek(variables: Sequence[Variable]) -> list[Any]:
    """The stored values, for a program that only reads them: nobody is handed them.

    Where other threads lend, the array might be written over before the program runs, so there it
    is handed out.
    """
    if _lenders and (len(_lenders) > 1 or threading.get_ident() not in _lenders):
        return [variable._handed() for variable in variables]
    return [v._value if v._borrower is None else _awaited(v) for v in variables]


def show(variables: Sequence[Variable]) -> list[Any]:
    """The values, as this thread's listeners give them, for a program that only reads them.

    They are handed to nobody but the listeners, each of which may keep them until it gives them
    back.
    """
    stack = _listeners.stack
    return [_read(variable, stack, _shown) for variable in variables]


def _shown(variable: Variable) -> Any:
    with _lock:
        if variable._borrower is None:
            # Who never gives it back has it for good: then it is copied once.
            variable._keepers += len(_listeners.stack)
            return variable._value
    return variable._handed()


def is_only_shown(variable: Variable, value: Any) -> bool:
    """Whether a value that a listener has just got is to be given back."""
    return variable._is_ours and variable._value is value


def give_back(shown: Iterable[tuple[Variable, Any]]) -> None:
    """Ends the use that a listener made of values, which it no longer keeps."""
    with _lock:
        for variable, value in shown:
            if variable._value is value and variable._keepers:
                variable._keepers -= 1


def _awaited(variable: Variable) -> Any:
    """The value of a Variable whose array a program has: the next one, or, where that program
    itself is given the value on another way, a copy. Of one that is only held it is the array."""
    me = threading.get_ident()
    with _lock:
        while (borrower := variable._borrower) is not None and borrower >= 0 and borrower != me:
            _sleep()
        variable._is_ours = False
        return jnp.copy(variable._value) if variable._borrower == me else variable._value


def _wait_for(variables: Sequence[Variable], me: int) -> None:
    """Waits, with the lock, until no program of another thread has or holds any of the arrays."""
    while any(variable._borrower not in (None, me, ~me) for variable in variables):
        _sleep()


def _sleep() -> None:
    """Gives the lock away until some arrays have come back."""
    global _waiting
    _waiting += 1
    _returned.wait()
    _waiting -= 1


# What is asked of the Variable and answered by its value.
_OF_THE_VALUE = frozenset(
    """
    T mT at real imag itemsize nbytes sharding is_fully_addressable is_fully_replicated devices
    addressable_shards astype reshape ravel flatten transpose swapaxes squeeze copy conj conjugate
    view sum prod mean std var min max argmin argmax argsort sort all any cumsum cumprod clip dot
    diagonal trace take repeat round nonzero compress choose searchsorted item tolist
    block_until_ready
    """.split()  # noqa: SIM905
)


# What an array is added to, and the sum is a new array.
_NUMBERS = (int, float, complex, np.ndarray, np.generic)


def _operand(other: Any) -> Any:
    return other.value if isinstance(other, Variable) else other


def _delta(value: Any) -> Any:
    """What is added: an array or a number."""
    return jnp.asarray(value) if isinstance(value, list | tuple) else _operand(value)


def _is_of_kind(given: Any, dtype: Any) -> bool:
    """Whether a Python number of the first dtype's kind leaves an array of the second as it is."""
    number = np.zeros((), given).item()
    return bool(jnp.result_type(number, dtype) == dtype)


def _own_array(value: Any, dtype: Any) -> Any:
    """A new array object, of no weak type, that may share the buffer of a given `jax.Array`."""
    if not isinstance(value, jax.Array):
        value = jnp.array(value, dtype=dtype)  # a copy: NumPy arrays can be written to
    elif dtype is not None:
        value = value.astype(dtype)
    if getattr(jax.typeof(value), "weak_type", False):
        value = jax.lax.convert_element_type(value, value.dtype)
    return _jax.fresh_alias(value)


class _Whose:
    """Whose value a leaf is, as a tree knows it. All are equal: trees with Variables in the same
    places have the same structure."""

    __slots__ = ("variable",)

    def __init__(self, variable: Variable):
        self.variable = weakref.ref(variable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Whose)

    def __hash__(self) -> int:
        return hash(_Whose)

    def __repr__(self) -> str:
        return "value"


class _Unflattened(threading.local):
    """The traced values that were put in the places of Variables, in the trace begun last."""

    trace: Any = None  # weakly

    def __init__(self) -> None:
        self.values: dict[int, tuple[Any, _Whose]] = {}  # by identity, weakly


_unflattened = _Unflattened()


# The leaf is handed out, so the next program that assigns copies it, once. That nobody holds it any
# more would not show that the buffer is free: `jax.device_put` gives it to arrays that do not hold
# the leaf, and would die with it, whether the leaf is the array itself or an alias of it.
def _flatten(variable: Variable) -> tuple[tuple[Any], _Whose]:
    return (variable.value,), _Whose(variable)


def _flatten_with_keys(variable: Variable) -> tuple[tuple[tuple[Any, Any]], _Whose]:
    return ((jax.tree_util.GetAttrKey("value"), variable.value),), _Whose(variable)


def _unflatten(origin: _Whose, children: Iterable[Any]) -> Any:
    (value,) = children
    if _jax.is_tracer(value):
        trace = _jax.trace_of(value)
        if isinstance(trace, _jax.StagingTrace):
            known = _unflattened.trace
            if known is None or known() is not trace:
                _unflattened.trace, _unflattened.values = weakref.ref(trace), {}
            _unflattened.values[id(value)] = weakref.ref(value), origin
    return value


def whose(value: object) -> Variable | None:
    """The Variable that was in the place of a value, among the arguments of the function that JAX
    has begun to trace; None if there was none."""
    ref, origin = _unflattened.values.get(id(value), (None, None))
    return origin.variable() if ref is not None and origin is not None and ref() is value else None


jax.tree_util.register_pytree_with_keys(Variable, _flatten_with_keys, _unflatten, _flatten)


# ------------------------------------------------------------------------------ trees of Variables


def is_variable(leaf: object) -> bool:
    """For ``is_leaf=``, where a Variable itself is meant and not its value."""
    return isinstance(leaf, Variable)


def values_of(tree: Any) -> Any:
    """The same tree with the value of each Variable in its place.

    See `assign_values` for an example.
    """
    return jax.tree.map(lambda x: x.value if is_variable(x) else x, tree, is_leaf=is_variable)


def assign_values(tree: Any, values: Any) -> None:
    """Assigns to each Variable of a tree what stands in its place in another tree.

    Other leaves of `tree` stay as they are. Nothing is assigned if one of the values does not fit.

    Raises:
      ValueError: the trees differ, or a shape.
      TypeError: a dtype differs.

    >>> import jax, optax
    >>> weights = {"w": Variable([1.0, 2.0]), "b": Variable(0.5)}
    >>> loss = lambda p, x: p["w"] @ x + p["b"]
    >>> optimiser = optax.sgd(0.25)
    >>> params = values_of(weights)
    >>> state = optimiser.init(params)
    >>> grads = jax.grad(loss)(params, jax.numpy.ones(2))
    >>> updates, state = optimiser.update(grads, state)
    >>> assign_values(weights, optax.apply_updates(params, updates))
    >>> print(weights["w"].value, weights["b"].value)
    [0.75 1.75] 0.25
    """
    pairs: list[tuple[Variable, Any]] = []

    def pair(leaf: Any, value: Any) -> None:
        if isinstance(leaf, Variable):
            pairs.append((leaf, leaf._checked(value)))

    jax.tree.map(pair, tree, values, is_leaf=is_variable)
    for variable, value in pairs:
        variable.assign(value)
