"""The transformation that what is bound now goes to, those around it, and placeholders in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.extend.core as jex

T = TypeVar("T")

# `current_trace(None)`: the transformation, if any, that what is bound now goes to.
current_trace: Callable[[None], Any] = jex.find_top_trace

# What JAX raises where the value of what is traced is asked for (``if x > 0``).
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

# What is bound inside it goes to the given trace.
set_current_trace: Callable[[Any], AbstractContextManager[None]] = jex.set_current_trace


def in_a_new_thread(fun: Callable[[], T]) -> T:
    """Calls a function where nothing is being transformed and there is no mesh, whoever asks."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(fun).result()


def _top_level_and_staging() -> tuple[Any, type]:
    found: list[Any] = [current_trace(None)]
    jax.make_jaxpr(lambda: found.append(current_trace(None)))()
    return found[0], type(found[1])


# `current_trace(None)` where nothing is being transformed; and the class of the transformations
# that make programs (`jax.make_jaxpr`, the body of a scan).
_TOP_LEVEL, StagingTrace = in_a_new_thread(_top_level_and_staging)
TopLevelTrace = type(_TOP_LEVEL)


def at_top_level() -> AbstractContextManager[None]:
    """What is computed inside it with arrays runs at once, whatever is being transformed or
    recorded around it. (`jax.ensure_compile_time_eval` keeps it from programs, not from tapes.)"""
    return set_current_trace(_TOP_LEVEL)


def is_top_level() -> bool:
    """Whether nothing is being transformed: what is bound now runs at once."""
    return isinstance(current_trace(None), TopLevelTrace)


def under_jit() -> bool:
    """Whether what is bound now becomes part of a program that something around it compiles."""
    under: Callable[[], bool] = getattr(jex, "unsafe_am_i_under_a_jit_DO_NOT_USE")  # noqa: B009
    return under()


def staging_trace() -> Any:
    """The innermost program that what is bound now becomes a part of; None where there is none."""
    trace = current_trace(None)
    while trace is not None and not isinstance(trace, StagingTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace


def is_part_of_a_program() -> bool:
    """Whether the program that is being traced now becomes a part of another one."""
    return sum(isinstance(trace, StagingTrace) for trace in outward(current_trace(None))) > 1


def outward(trace: Any, until: Any = None) -> list[Any]:
    """A transformation and those around it, from the inside out, up to one of them."""
    found = []
    while trace is not None and trace is not until:
        found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def is_of_a_custom_rule(trace: Any) -> bool:
    """Whether a trace is that of a function with a `jax.custom_jvp` or a `jax.custom_vjp`."""
    about = getattr(getattr(trace, "frame", None), "debug_info", None)
    return str(getattr(about, "traced_for", "")).startswith(("custom_jvp", "custom_vjp"))


def current_trace_outside_of(kind: type) -> Any:
    """The innermost transformation whose class is not `kind`."""
    return next((t for t in outward(current_trace(None)) if not isinstance(t, kind)), None)


def examples_at_once() -> int:
    """For how many examples what is computed here runs at once, in the `jax.vmap`s around it."""
    here = outward(current_trace(None))
    return math.prod(trace.axis_data.size for trace in here if hasattr(trace, "axis_data"))


def trace_of(tracer: Any) -> Any:
    """The transformation to which a tracer belongs."""
    return tracer._trace


def primal_of(tracer: Any) -> Any:
    """The value that a tracer of a derivative stands for outside of that; None for other values."""
    return getattr(tracer, "primal", None)


class _Nowhere(jax.core.Trace):
    """The transformation to which a `Placeholder` belongs: nothing is computed in it."""

    __slots__ = ("_check",)

    def __init__(self, check: Callable[[], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def is_valid(self) -> bool:  # asked by JAX for every operand of everything that is bound
        self._check()
        return True

    def process_primitive(self, primitive: Any, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{primitive} is computed where a placeholder has no value")


class Placeholder(jax.core.Tracer):  # type: ignore[type-arg]
    """A traced value of a type, and no more: what a program computes with it has it as a constant.

    `check` is called whenever something is computed with it, and may raise.
    """

    __slots__ = ("_check", "stands_for")

    def __init__(self, aval: Any, stands_for: Any, check: Callable[[], None]):
        super().__init__(_Nowhere(check), aval)
        self.stands_for = stands_for
        self._check = check

    @property
    def _debug_info(self) -> None:  # asked by JAX for the message that a tracer has escaped
        self._check()
