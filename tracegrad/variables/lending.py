"""Whose the array of a Variable is: handed out to readers, lent to programs that write it over.

An array that a program made, and that nobody was handed, is the Variable's own: the next program
that assigns the Variable may write the new value over it. Everything else is copied first. While a
program has the array, or computes the next value without writing over it, the thread that runs it
is the Variable's borrower; others wait for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.variables.cut_gradients import warn_if_cut, without_gradient
from tracegrad.variables.listening import heard_read, listeners

if TYPE_CHECKING:
    from tracegrad.variables.variable import Variable

FROZEN = (
    "the Variable {name!r} is read inside a function that JAX compiles or stages (jax.jit, "
    "jax.make_jaxpr, or the body of a scan, cond, while_loop or checkpoint), where its value would "
    "be kept as a constant for all later calls. Compile the function with `tracegrad.trace` "
    "instead, which makes an input of the Variable, or pass its `.value` in as an argument."
)

# Held from the read of Variables to the dispatch of the program that is given their arrays: without
# it another thread could lend one in between, and its program write it over. A program may call
# another while JAX traces it.
dispatching = threading.RLock()
_lock = threading.Lock()
_returned = threading.Condition(_lock)
_waiting = 0  # how many threads wait for it
_lenders: set[int] = set()  # the threads that ever lent


def stored(variable: Variable) -> Any:
    """What is read where nobody listens."""
    warn_if_cut(variable)
    if _jax.staging_trace() is not None and not _jax.is_tracer(variable._value):
        raise RuntimeError(FROZEN.format(name=variable.name))
    return handed(variable)


def store(variable: Variable, value: Any) -> None:
    """What is done by an assignment to which nobody listens."""
    if _jax.is_tracer(value):
        # What is differentiated carries its value, and assignment is not differentiated.
        value = without_gradient(variable, value)
    if _jax.is_tracer(value):
        raise RuntimeError(
            f"the Variable {variable.name!r} is assigned a value that exists only inside a "
            f"function that is being transformed ({value}): the assignment would be lost. "
            "Compile the function with `tracegrad.trace` instead of `jax.jit`; inside "
            "`jax.vmap` and the bodies of loops return the value, and assign it outside."
        )
    keep(variable, _jax.fresh_alias(value))


@jax.jit
def _copies(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) for array in arrays]


def handed(variable: Variable) -> Any:
    """The array, for somebody who may keep it."""
    value = variable._value
    variable._is_ours, variable._is_handed = False, True
    # `lend` looks at the two in the other order: it sees this, or is seen here.
    if variable._borrower is not None or variable._value is not value:
        return _awaited(variable)
    return value


def keep(variable: Variable, value: Any) -> None:
    """Stores an array that somebody may have, as soon as no program is to assign the Variable."""
    with _lock:
        if variable._borrower is not None:
            _wait_for([variable], threading.get_ident())
        _put(variable, value)


def _put(variable: Variable, value: Any) -> None:
    """Stores an array that nobody was handed, and of which somebody may have the buffers."""
    variable._value = value
    variable._is_ours = variable._is_handed = False
    variable._keepers = 0


def renew(variable: Variable) -> None:
    """Has the next read give another array object than those that somebody has, for a tape to
    follow."""
    if not variable._is_handed or _references(variable) == _ALONE:
        return
    with _lock:
        if variable._borrower is None:
            _put(variable, _jax.fresh_alias(variable._value))


def _references(variable: Any) -> int:
    """How many there are to the array object, with those that asking for them makes."""
    return sys.getrefcount(variable._value)


class _Holder:
    """Holds an object as a Variable does, and nobody else has it."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = object()


# As many where nobody but the Variable has it any more. (If each tape got an alias all the same, a
# step over ten Variables that nothing assigns would take a third longer.)
_ALONE = _references(_Holder())


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
        if variables:
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
            with _jax.at_top_level():  # not recorded by a tape
                copies = _copies([values[i] for i in foreign])
        except BaseException:
            take_back(variables)
            raise
        for i, copy in zip(foreign, copies, strict=True):
            values[i] = copy
    return values


def hold(variables: Sequence[Variable]) -> list[Any]:
    """The values of Variables for a program that computes their next ones, and leaves the arrays
    as they are: until `settle` or `take_back`, readers get them, and who else assigns waits."""
    me = threading.get_ident()
    with _lock:
        _wait_for(variables, me)
        for variable in variables:
            variable._borrower = ~me
            variable._is_ours = False
        return [variable._value for variable in variables]


def free(variables: Sequence[Variable]) -> None:
    """Waits until no program of another thread is to assign any of the Variables."""
    if any(variable._borrower is not None for variable in variables):
        with _lock:
            _wait_for(variables, threading.get_ident())


def settle(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Ends `lend` or `hold`: stores arrays that the program made, and that nobody else has."""
    with _lock:
        for variable, value in zip(variables, values):
            variable._value = value
            variable._is_ours, variable._is_handed = True, False
            variable._borrower = None
        if _waiting:
            _returned.notify_all()


def take_back(variables: Sequence[Variable]) -> None:
    """Undoes `lend` or `hold`, where the program was not run or has failed."""
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
        return [handed(variable) for variable in variables]
    return [v._value if v._borrower is None else _awaited(v) for v in variables]


def show(variables: Sequence[Variable]) -> list[Any]:
    """The values, as this thread's listeners give them, for a program that only reads them.

    They are handed to nobody but the listeners, each of which may keep them until it gives them
    back.
    """
    stack = listeners()
    keepers = len(stack)

    def shown(variable: Variable) -> Any:
        with _lock:
            if variable._borrower is None:
                # Who never gives it back has it for good: then it is copied once.
                variable._keepers += keepers
                return variable._value
        return handed(variable)

    return [heard_read(variable, shown, stack) for variable in variables]


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
        variable._is_ours, variable._is_handed = False, True
        if variable._borrower != me:
            return variable._value
        with _jax.at_top_level():  # not recorded by a tape
            return jnp.copy(variable._value)


def _wait_for(variables: Sequence[Variable], me: int) -> None:
    """Waits, with the lock, until no program of another thread has or holds any of the arrays.

    What is assigned by code that a program calls cannot wait for that program: it is refused.
    """
    while busy := [variable for variable in variables if variable._borrower not in (None, me)]:
        for variable in busy:
            if variable._borrower == ~me or ((variable._borrower or 0) < 0 and _is_of_no_python()):
                raise RuntimeError(
                    f"the Variable {variable.name!r} is assigned by a traced function, and by code "
                    "on the host that the function calls: one of the two values would be lost. "
                    "Return the value from the host and assign it in the traced function, or "
                    "assign it in one of the two only."
                )
        _sleep()


def _is_of_no_python() -> bool:
    """Whether this thread was not started in Python: what runs here is called by a program."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _sleep() -> None:
    """Gives the lock away until some arrays have come back."""
    global _waiting
    _waiting += 1
    _returned.wait()
    _waiting -= 1
