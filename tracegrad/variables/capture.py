"""The Variables that a function reads and assigns while it is traced: found, and made explicit.

While a function is traced a `Capture` listens. What it gives to whoever reads a Variable is a
placeholder, which JAX takes for a value of an outer trace: the program has it as a constant,
wherever in the function, its helpers, its loops or its nested jits the read may be. Afterwards
these constants become inputs of the program, and assigned values outputs.

JAX keeps the programs of inner functions (the bodies of loops, nested jits) by the function's
identity, and does not run the function again when it meets it again, so that nobody hears of the
read. In such places one Variable therefore always has the same placeholder: whatever program JAX
keeps has that as a constant, and means the value at the time of the call. After an assignment the
value is another one, so programs that were kept before must not be used; a context that is a part
of JAX's keys takes care of that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import jax

from tracegrad import _jax
from tracegrad.variables.cut_gradients import assigned_anew, warn_if_cut, without_gradient
from tracegrad.variables.lending import FROZEN
from tracegrad.variables.listening import listeners, listening
from tracegrad.variables.variable import Variable

# What a Variable gives to who reads it as a value of its own, and the Variable's value at the
# function's entry: `read(value, entry)` is the first, and is differentiated as the second. So
# whoever differentiates the function with respect to a Variable, as a tape around it does, gets the
# sum over all the values that were read of it, as outside of traced functions.
READ = _jax.standing_in_primitive("read")

# A part of the key of every program that JAX keeps: programs made under one value are not used
# under another.
_generation = jax.make_user_context(None)  # type: ignore[no-untyped-call]


class _Active(threading.local):
    captures = 0
    telling = False  # that a function which is not run again has read a Variable

    def __init__(self) -> None:
        # Assigned values that functions further inside have read, by identity, and whose they are.
        self.assigned: dict[int, tuple[Any, Variable]] = {}


_active = _Active()


class _Life:
    """Whether the function of a capture is running; outlives it where its placeholders do."""

    runs = False

    def check(self) -> None:
        if not self.runs:
            raise RuntimeError(
                "the value of a Variable, read in a traced function, is used after the function "
                "was traced: it was kept outside of it, or a rule of a jax.custom_vjp or "
                "jax.custom_jvp reads the Variable. Return the value; pass it to the rule as an "
                "argument."
            )


class Capture:
    """What one traced function does with Variables; listens while the function runs.

    `trace_again` is called for a read for which an earlier assignment, or an earlier read, had to
    be prepared: it leaves the function, which is to be traced anew, with another capture.

    `apart`: of which Variables each read in an inner function is a value of its own; this adds to
    it, for the next attempt.

    Attributes:
      assigned: the Variables that are assigned, in the order of their first assignment.
    """

    def __init__(self, trace_again: Callable[[], NoReturn], apart: set[Variable]) -> None:
        self._trace_again = trace_again
        self._apart = apart
        self.assigned: tuple[Variable, ...] = ()
        self._found: dict[Variable, None] = {}
        self._entry: dict[Variable, _jax.Placeholder] = {}
        self._current: dict[Variable, Any] = {}  # what was assigned last
        self._readable: dict[Variable, Any] = {}  # that, as it is read,
        self._readable_inside: dict[Variable, Any] = {}  # and as functions further inside read it
        # Those of which a value was handed out, in the function and in those inside it.
        self._read: WeakKeyDictionary[Any, set[Variable]] = WeakKeyDictionary()
        self._handed: list[int] = []  # the identities of assigned values read further inside
        self._prepared: set[Variable] = set()  # assigned under a generation of programs of its own
        self._trace: Any = None
        self._life = _Life()
        self._generations = ExitStack()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """A block inside the trace of the function's program, in which it is called."""
        self._trace = _jax.current_trace(None)
        self._life.runs = True
        _active.captures += 1
        try:
            # What a function around this one has assigned is to this one the value at its entry.
            with _generation(None), self._generations, listening(self):
                yield
        finally:
            _active.captures -= 1
            self._life.runs = False
            # They know the function, which has this: a circle, that would keep alive what it holds.
            self._trace = None
            self._read.clear()
            self._current, self._readable, self._readable_inside = {}, {}, {}
            for identity in self._handed:
                _active.assigned.pop(identity, None)

    def last_values(self) -> list[Any]:
        """The new value of each Variable that was assigned."""
        self.assigned = tuple(self._current)
        return list(self._current.values())

    # ---------------------------------------------------------------------------------- listening

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        warn_if_cut(variable)
        if _active.telling:
            return self._value_inside(variable)
        here = _jax.current_trace(None)
        where = here if here is self._trace else _jax.staging_trace()
        if where is None:
            raise RuntimeError(
                f"the Variable {variable.name!r} is read inside a traced function, where something "
                "is computed at once and not as a part of its program: there it has no value yet. "
                "Read it outside, or compute that in the program."
            )
        self._read.setdefault(where, set()).add(variable)
        if where is not self._trace:
            value = self._read_inside(variable)
            return apart(value, where) if variable in self._apart else value
        if variable in self._current or variable in self._readable:
            return self._value_now(variable, self._readable)
        return self._value_at_entry(variable)

    def on_renewal(self, variable: Variable) -> bool:
        where = _jax.staging_trace()
        if variable in self._read.get(self._trace, ()):
            self._readable.pop(variable, None)
            self._value_now(variable, self._readable)
        if variable not in self._apart and self._is_read_around(variable, where):
            self._apart.add(variable)
            self._trace_again()
        return True

    def _is_read_around(self, variable: Variable, where: Any) -> bool:
        """Whether an inner function has read a Variable, or one around that inside of this one."""
        if not _jax.has_gradient(variable):
            return False
        inside = _jax.outward(where, self._trace)
        return any(variable in self._read.get(trace, ()) for trace in inside)

    def _value_at_entry(self, variable: Variable) -> _jax.Placeholder:
        if variable not in self._entry:
            self._found[variable] = None
            self._entry[variable] = _jax.Placeholder(
                variable.aval, weakref.ref(variable), self._life.check
            )
        return self._entry[variable]

    def _value_now(self, variable: Variable, readable: dict[Variable, Any]) -> Any:
        """What a Variable was assigned last, or was at the function's entry, for who reads it: one
        object in `readable` until it is assigned again, or renewed."""
        if variable not in readable:
            value = self._current.get(variable, self._entry.get(variable))
            if _jax.has_gradient(variable):
                # Not seen by tapes inside the function, to which it is a value of its own.
                with _jax.set_current_trace(self._trace):
                    value = READ.bind(value, self._value_at_entry(variable))
            readable[variable] = value
        return readable[variable]

    def _read_inside(self, variable: Variable) -> Any:
        """A read in an inner function, whose program JAX may keep."""
        if variable not in self._current:
            self._found[variable] = None
        stand_in(variable)  # that there is one prepares the assignment, in the next run
        for capture in listeners():  # of a function around this one, which may use that program too
            if isinstance(capture, Capture) and capture._is_unprepared(variable):
                capture._trace_again()
        return self._value_inside(variable)

    def _is_unprepared(self, variable: Variable) -> bool:
        return variable in self._current and variable not in self._prepared

    def _value_inside(self, variable: Variable) -> Any:
        """What the programs of inner functions have, and nobody else: one object until the Variable
        is assigned again."""
        if variable not in self._current:
            return stand_in(variable)
        value = self._value_now(variable, self._readable_inside)
        _active.assigned[id(value)] = value, variable
        self._handed.append(id(value))
        return value

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        here = _jax.current_trace(None)
        if here is not self._trace and _jax.staging_trace() is not self._trace:
            raise RuntimeError(
                f"the Variable {variable.name!r} is assigned inside the body of a loop, a branch, "
                "a checkpoint or a nested jit, from where the value cannot get out. Carry the "
                "value: read it before, let the body take and return it, and assign the result, "
                f"as in `w, ys = jax.lax.scan(body, {variable.name}.value, xs); "
                f"{variable.name}.assign(w)`. For a nested function use `tracegrad.trace` in the "
                "place of `jax.jit`."
            )
        if _jax.is_tracer(value):
            # Another object, for tapes; and an assignment is not differentiated: of a value that
            # is being differentiated here, JAX gives the plain value.
            value = without_gradient(variable, value)
            if here is not self._trace and _jax.is_tracer(value):
                self._refuse_inner(variable, value)
        else:
            assigned_anew(variable)
            value = _jax.fresh_alias(value)
        self._current[variable] = value
        self._readable.pop(variable, None)
        self._readable_inside.pop(variable, None)
        if variable._stand_in is not None:
            # Some inner function may have been traced with the old value.
            self._generations.enter_context(_generation(object()))
            self._prepared.add(variable)

    def _refuse_inner(self, variable: Variable, value: Any) -> None:
        """Raises for a value of a transformation inside the function, such as a `jax.vmap`."""
        for trace in _jax.outward(_jax.current_trace(None), self._trace):
            if _jax.trace_of(value) is trace:
                raise RuntimeError(
                    f"the Variable {variable.name!r} is assigned inside {_name(trace)} a value "
                    f"that exists only there ({_jax.type_text(value.aval)} of each). Return the "
                    "value, and assign it outside."
                )

    # ------------------------------------------------------------------------------------ program

    def explicit(self, program: Any) -> tuple[Any, list[Variable]]:
        """The program with one more input, behind the others, for each Variable whose value at the
        function's entry is used; and these, in the order of the reads."""
        owners = [self._owner(constant) for constant in _jax.constants_of(program)]
        self._found.update(dict.fromkeys(owner for owner in owners if owner is not None))
        variables = list(self._found)
        if not variables:
            return program, []
        places = {variable: i for i, variable in enumerate(variables)}
        slots = [None if owner is None else places[owner] for owner in owners]
        return _jax.with_inputs(program, [v.aval for v in variables], slots), variables

    def _owner(self, constant: Any) -> Variable | None:
        """The Variable whose value at the function's entry a constant of the program is."""
        if not isinstance(constant, _jax.Placeholder):
            return None
        variable: Variable | None = constant.stands_for()
        if variable is None:
            raise RuntimeError(
                "an inner function, whose program JAX keeps, reads a Variable that no longer "
                "exists. Make a new function, or pass the value as an argument."
            )
        shared = constant is variable._stand_in
        return variable if shared or constant is self._entry.get(variable) else None


def _name(trace: Any) -> str:
    return "a jax.vmap" if "Batch" in type(trace).__name__ else "a transformation"


def stand_in(variable: Variable) -> Any:
    """What a Variable that is not assigned before is to functions whose programs JAX keeps."""
    if variable._stand_in is None or variable._stand_in.aval != variable.aval:
        name, reference = variable.name, weakref.ref(variable)

        def check() -> None:
            if not _active.captures:
                raise RuntimeError(FROZEN.format(name=name))
            _tell(reference())

        variable._stand_in = _jax.Placeholder(variable.aval, reference, check)
    return variable._stand_in


def apart(value: Any, where: Any) -> Any:
    """The value of a Variable as one of its own in an inner function: what tapes in that follow is
    not what was read before, nor what functions still further inside have as a constant."""
    before, _active.telling = _active.telling, True  # it is heard of already
    try:
        with _jax.set_current_trace(where):
            return READ.bind(value, value)
    finally:
        _active.telling = before


def _tell(variable: Variable | None) -> None:
    """Lets those who listen inside a traced function, as tapes do, hear of the read in a function
    whose program JAX has kept: when the program is called, with the stand-in for an operand."""
    if variable is None or _active.telling or isinstance(listeners()[-1], Capture):
        return
    _active.telling = True
    try:
        variable.read_value()
    finally:
        _active.telling = False


def is_telling() -> bool:
    """Whether listeners hear of the read in a function whose program JAX has kept, and not of one
    here and now: what it gives is what the program was called with."""
    return _active.telling


def variable_of(value: object) -> Variable | None:
    """The Variable whose value, read in a function that is being traced, this is; else None. (Of
    assigned ones those that functions further inside have read.)

    A function whose program JAX has kept is not run again, and its read is not heard. What it
    read is among the operands of its call: this tells.
    """
    if isinstance(value, _jax.Placeholder):
        variable: Variable | None = value.stands_for()
        return variable
    known = _active.assigned.get(id(value))
    return None if known is None else known[1]


def tell_of_assigned(values: Iterable[Any]) -> None:
    """Lets those who listen hear that an operation uses the assigned value of a Variable, which a
    function whose program JAX has kept may have read."""
    if _active.assigned:
        for value in values:
            if id(value) in _active.assigned:
                _tell(_active.assigned[id(value)][1])
