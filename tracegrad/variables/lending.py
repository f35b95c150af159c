"""Who may use the array of a Variable, and when a program may overwrite the array.

A Variable *owns* its array (`_is_ours`) if a program made the array and no reader has it. A program
that assigns the Variable overwrites an owned array, and a copy of any other array. The protocol:

    function       the array goes to                until       meanwhile
    -------------  -------------------------------  ----------  -----------------------------------
    `hand_array`   a reader, who may keep it        -           nobody overwrites the array
    `show_values`  listeners, for a reading         give_back   `lend` copies the array
                   program
    `peek`         a program that only reads        -           -
    `lend`         a program that overwrites        settle or   readers and assignments of other
                   the array                        take_back   threads wait; this thread reads a
                                                                copy
    `hold`         a program that computes the      settle or   readers get the array; assignments
                   next value beside the array      take_back   wait

`settle` stores the value that the program has computed, `take_back` keeps the old value. Meanwhile
the Variable has a `_borrower`: the id of the thread that has lent the array; ``~id``, a negative
number, if the thread holds it; None after the end.

A call of a program lends all its Variables at once, under one lock, until JAX has dispatched the
program. It has the Variables that it assigns alone, and shares the Variables that it only reads
with other readers. So calls of programs that share an assigned Variable act one after the other.
A call holds no lock while JAX traces and compiles, and calls without a common Variable do not wait
for each other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.variables.cut_gradients import cut_gradient, warn_if_cut
from tracegrad.variables.listening import listeners, read_through_listeners

if TYPE_CHECKING:
    from tracegrad.variables.variable import Variable

FROZEN = (
    "the Variable {name!r} is read inside a function that JAX compiles or stages (jax.jit, "
    "jax.make_jaxpr, or the body of a scan, cond, while_loop or checkpoint), where its value would "
    "be kept as a constant for all later calls. Compile the function with `tracegrad.trace` "
    "instead, which makes an input of the Variable, or pass its `.value` in as an argument."
)

_lock = threading.Lock()
_returned = threading.Condition(_lock)  # notified when borrowed arrays have come back
# By thread: for each program that the thread dispatches (while JAX traces a program, it may call
# another one), the Variables that the program only reads. No other thread may lend these Variables.
_readings: dict[int, list[Sequence[Variable]]] = {}
_NONE = frozenset[int]()
_waiting = 0  # how many threads wait for `_returned`
_lenders: set[int] = set()  # the ids of the threads that have ever lent


def stored_value(variable: Variable) -> Any:
    """The value for a read without listeners."""
    warn_if_cut(variable)
    if _jax.staging_trace() is not None and not _jax.is_tracer(variable._value):
        raise RuntimeError(FROZEN.format(name=variable.name))
    return hand_array(variable)


def store(variable: Variable, value: Any) -> None:
    """Stores an assigned value, after all listeners have passed it on."""
    if _jax.is_tracer(value):
        # Assignment is not differentiated: store the primal.
        value = cut_gradient(variable, value)
    if _jax.is_tracer(value):
        raise RuntimeError(
            f"the Variable {variable.name!r} is assigned a value that exists only inside a "
            f"function that is being transformed ({value}): the assignment would be lost. "
            "Compile the function with `tracegrad.trace` instead of `jax.jit`; inside "
            "`jax.vmap` and the bodies of loops return the value, and assign it outside."
        )
    store_when_free(variable, _jax.fresh_alias(value))


@jax.jit
def _copies(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) for array in arrays]


def hand_array(variable: Variable) -> Any:
    """Returns the array to a reader, who may keep it."""
    value = variable._value
    variable._is_ours, variable._is_handed = False, True
    # `lend` sets `_borrower` and then reads `_is_ours`. So either `lend` sees this reader, or this
    # reader sees `lend`.
    if variable._borrower is not None or variable._value is not value:
        return _wait_for_value(variable)
    return value


def store_when_free(variable: Variable, value: Any) -> None:
    """Waits until no running program assigns the Variable; stores an array that others may have."""
    with _lock:
        if variable._borrower is not None:
            _wait_for([variable], threading.get_ident())
        _store_new_object(variable, value)


def _store_new_object(variable: Variable, value: Any) -> None:
    """Stores an array object that no reader has. Others may have its buffers."""
    variable._value = value
    variable._is_ours = variable._is_handed = False
    variable._keepers = 0


def renew_array(variable: Variable) -> None:
    """Makes the next read return a new array object for a tape to follow, unless the Variable alone
    has the present one."""
    if not variable._is_handed or _references(variable) == _ALONE:
        return
    with _lock:
        if variable._borrower is None:
            _store_new_object(variable, _jax.fresh_alias(variable._value))


def _references(variable: Any) -> int:
    """Includes temporary references."""
    return sys.getrefcount(variable._value)


class _Slot:
    """Holds an object as a Variable does, to measure `_ALONE`."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = object()


# The reference count if only the Variable has the array object. (If each tape got an alias even
# then, a step over ten Variables that nothing assigns would take a third longer.)
_ALONE = _references(_Slot())


def lend(
    updated: Sequence[Variable], written: Sequence[Variable] = (), read: Sequence[Variable] = ()
) -> list[Any]:
    """Returns the values of `updated` and `read`, for a program that is dispatched now, at JAX's
    top level.

    The program reads and assigns `updated`, whose arrays it may overwrite, only assigns `written`,
    and only reads `read`. Arrays of `updated` that the Variables do not own are copied. Until
    `settle` or `take_back`, readers of `updated` and `written` wait, and no other thread lends the
    arrays of `read`.
    """
    me = threading.get_ident()
    assigned = (*updated, *written)
    with _lock:
        lent = taken = _NONE  # ids: what outer programs have, which this thread dispatches
        if _readings or [v for v in (*assigned, *read) if v._borrower is not None]:
            _wait_for(assigned, me, read)
            lent = frozenset(id(v) for v in (*updated, *read) if v._borrower == me)
            taken = lent | _ids_read_by([me])
        if assigned:
            _lenders.add(me)
        if read:
            _readings.setdefault(me, []).append(read)
        foreign = [i for i, v in enumerate(read, len(updated)) if id(v) in lent] if lent else []
        for place, variable in enumerate(updated):
            variable._borrower = me  # before `_is_ours` is read; see `hand_array`
            if variable._keepers or not variable._is_ours or id(variable) in taken:
                foreign.append(place)
                variable._is_ours, variable._keepers = False, 0
        for variable in written:
            variable._borrower = me
        values = [variable._value for variable in (*updated, *read)]
    if foreign:
        try:
            copies = _copies([values[i] for i in foreign])
        except BaseException:
            take_back(assigned, read)
            raise
        for i, copy in zip(foreign, copies, strict=True):
            values[i] = copy
    return values


def _ids_read_by(threads: Iterable[int]) -> set[int]:
    """The ids of the Variables that programs of these threads only read."""
    return {id(v) for thread in threads for read in _readings.get(thread, ()) for v in read}


def hold(variables: Sequence[Variable]) -> list[Any]:
    """Returns the arrays for a program that computes the next values without overwriting the
    arrays. Until `settle` or `take_back`, readers get the arrays, and other assignments wait."""
    me = threading.get_ident()
    with _lock:
        _wait_for(variables, me)
        for variable in variables:
            variable._borrower = ~me
            variable._is_ours = False
        return [variable._value for variable in variables]


def settle(
    variables: Sequence[Variable], values: Sequence[Any], read: Sequence[Variable] = ()
) -> None:
    """Ends `lend` or `hold`; stores the arrays that the program has made, so that nobody else has
    them."""
    with _lock:
        for variable, value in zip(variables, values):
            variable._value = value
            variable._is_ours, variable._is_handed = True, False
            variable._borrower = None
        _end_reading(read)


def take_back(variables: Sequence[Variable], read: Sequence[Variable] = ()) -> None:
    """Ends `lend` or `hold` if the program was not run or has failed."""
    with _lock:
        for variable in variables:
            variable._borrower = None
        _end_reading(read)


def _end_reading(read: Sequence[Variable]) -> None:
    if read:
        me = threading.get_ident()
        _readings[me].pop()
        if not _readings[me]:
            del _readings[me]
    if _waiting:
        _returned.notify_all()


def peek(variables: Sequence[Variable]) -> list[Any]:
    """Returns the arrays for a program that only reads them.

    If other threads lend, a program might overwrite an array before this program runs: then the
    arrays are handed out.
    """
    if _lenders and (len(_lenders) > 1 or threading.get_ident() not in _lenders):
        return [hand_array(variable) for variable in variables]
    return [v._value if v._borrower is None else _wait_for_value(v) for v in variables]


def show_values(variables: Sequence[Variable]) -> list[Any]:
    """Returns the values that this thread's listeners give, for a program that only reads them.

    Only the listeners get the arrays. Each listener may keep an array until `give_back`.
    """
    stack = listeners()
    keepers = len(stack)

    def shown(variable: Variable) -> Any:
        with _lock:
            if variable._borrower is None:
                # If a listener never gives the array back, the next `lend` copies it, once.
                variable._keepers += keepers
                return variable._value
        return hand_array(variable)

    return [read_through_listeners(variable, shown, stack) for variable in variables]


def is_only_shown(variable: Variable, value: Any) -> bool:
    """Whether a listener that has just got a value must call `give_back`."""
    return variable._is_ours and variable._value is value


def give_back(shown: Iterable[tuple[Variable, Any]]) -> None:
    """A listener no longer keeps these values, from `show_values`."""
    with _lock:
        for variable, value in shown:
            if variable._value is value and variable._keepers:
                variable._keepers -= 1


def _wait_for_value(variable: Variable) -> Any:
    """Returns the value of a Variable with a borrower: the array if it is only held; a copy if a
    program of this thread has the array; the next value, after a wait, if another thread's
    program has the array."""
    me = threading.get_ident()
    with _lock:
        while (borrower := variable._borrower) is not None and borrower >= 0 and borrower != me:
            _sleep()
        variable._is_ours, variable._is_handed = False, True
        if variable._borrower != me:
            return variable._value
        with _jax.at_top_level():  # not recorded by a tape
            return jnp.copy(variable._value)


def _wait_for(
    assigned: Sequence[Variable], me: int, read: Sequence[Variable] | None = None
) -> None:
    """Waits, under the lock, until no other thread has borrowed a Variable of `assigned`; for
    `lend`, which passes `read`, also until the Variables do not collide with another program's.

    Raises RuntimeError for an assignment by host code that a program calls: the assignment cannot
    wait for that program.
    """
    while True:
        busy = [variable for variable in assigned if variable._borrower not in (None, me)]
        for variable in busy:
            if variable._borrower == ~me or ((variable._borrower or 0) < 0 and _is_thread_of_xla()):
                raise RuntimeError(
                    f"the Variable {variable.name!r} is assigned by a traced function, and by code "
                    "on the host that the function calls: one of the two values would be lost. "
                    "Return the value from the host and assign it in the traced function, or "
                    "assign it in one of the two only."
                )
        if not busy and (read is None or not _collides(assigned, read, me)):
            return
        _sleep()


def _collides(assigned: Sequence[Variable], read: Sequence[Variable], me: int) -> bool:
    """Whether a program of another thread has an array of `read`, or reads one of `assigned`."""
    for variable in read:
        borrower = variable._borrower
        if borrower is not None and borrower >= 0 and borrower != me:
            return True
    others = [thread for thread in _readings if thread != me] if _readings else ()
    return bool(others) and not _ids_read_by(others).isdisjoint(map(id, assigned))


def _is_thread_of_xla() -> bool:
    """Python did not start this thread: XLA runs host code of a program here."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _sleep() -> None:
    """Releases the lock until some arrays have come back."""
    global _waiting
    _waiting += 1
    _returned.wait()
    _waiting -= 1
