"""Which programs of inner functions JAX may use again: none that was made before what it now reads.

JAX keeps the programs of inner functions (the bodies of loops, nested jits) by the function, and
does not run the function again. What such a function read of a Variable is a constant of its
program. So each trace of a function has a key of its own, a part of the key by which JAX keeps
programs, and so have the rest of it after an assignment, and the block of a tape or of whoever else
has to hear of reads: there inner functions are run again.

A process without Variables shares what JAX keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from tracegrad import _jax

_values = _jax.user_context()  # what Variables are to inner functions
_listeners = _jax.user_context()  # who hears of their reads


class _Process:
    has_variables = False


class _Tracing(threading.local):
    depth = 0  # how many functions are being traced, one inside the other


_tracing = _Tracing()


def begin() -> None:
    """Is called for each Variable that is made."""
    _Process.has_variables = True


@contextmanager
def of_a_trace() -> Iterator[ExitStack]:
    """A block in which a function is traced. In the stack `after_assignment` is put."""
    _tracing.depth += 1
    try:
        with _new(_values), ExitStack() as assignments:
            yield assignments
    finally:
        _tracing.depth -= 1


def after_assignment() -> AbstractContextManager[object]:
    """What follows an assignment in the function that is being traced."""
    return _new(_values)


def of_a_listener() -> AbstractContextManager[object]:
    """A block in which somebody hears of the reads of inner functions. Outside of traced functions
    inner functions read no Variables."""
    return _new(_listeners) if _tracing.depth else nullcontext()


@contextmanager
def of_a_program() -> Iterator[None]:
    """A call of a program that takes its Variables as arguments, whatever they are now."""
    with _values(()), _listeners(()):
        yield


def is_traced() -> bool:
    """Whether a function is being traced, so that Variables may be read in inner functions."""
    return _tracing.depth > 0


def _new(key: object) -> AbstractContextManager[object]:
    return key(object()) if _Process.has_variables else nullcontext()  # type: ignore[operator]
