"""The current JAX trace, the traces around it, and placeholder tracers."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.extend.core as jex

T = TypeVar("T")

# `current_trace(None)` returns the current trace, which processes the primitives bound now.
current_trace: Callable[[None], Any] = jex.find_top_trace

# JAX's errors for code that needs the concrete value of a tracer (``if x > 0``).
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

# A context manager: the trace processes the primitives that are bound inside.
set_current_trace: Callable[[Any], AbstractContextManager[None]] = jex.set_current_trace


def in_a_new_thread(fun: Callable[[], T]) -> T:
    """Calls `fun` without the JAX traces and the mesh of the caller."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(fun).result()


def _kinds_of_traces() -> tuple[Any, type, type]:
    found: list[Any] = [current_trace(None)]

    def note(x: Any) -> Any:
        found.append(current_trace(None))
        return x

    jax.make_jaxpr(note)(1.0)
    jax.vjp(note, 1.0)
    return found[0], type(found[1]), type(found[2])


# The current trace outside all transformations, and the classes of the traces that build jaxprs
# (`jax.make_jaxpr`, the body of a scan) and that differentiate in reverse mode.
_TOP_LEVEL, StagingTrace, ReverseTrace = in_a_new_thread(_kinds_of_traces)
TopLevelTrace = type(_TOP_LEVEL)


def at_top_level() -> AbstractContextManager[None]:
    """A block whose operations run immediately, outside of all transformations and tapes.
    (`jax.ensure_compile_time_eval` keeps operations out of jaxprs, but not off tapes.)"""
    return set_current_trace(_TOP_LEVEL)


def is_top_level() -> bool:
    """Whether primitives that are bound now run immediately: no transformation is active."""
    return isinstance(current_trace(None), TopLevelTrace)


def under_jit() -> bool:
    """Whether primitives that are bound now become part of a program that an outer jit compiles."""
    under: Callable[[], bool] = getattr(jex, "unsafe_am_i_under_a_jit_DO_NOT_USE")  # noqa: B009
    return under()


def staging_trace() -> Any:
    """The innermost active trace that builds a jaxpr; None if there is none."""
    trace = current_trace(None)
    while trace is not None and not isinstance(trace, StagingTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace


def outward(trace: Any, until: Any = None) -> list[Any]:
    """`trace` and the traces around it, from the inside out; stops before `until`."""
    found = []
    while trace is not None and trace is not until:
        found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def is_of_a_custom_rule(trace: Any) -> bool:
    """The trace traces a function of a `jax.custom_jvp` or `jax.custom_vjp`."""
    debug_info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return str(getattr(debug_info, "traced_for", "")).startswith(("custom_jvp", "custom_vjp"))


def current_trace_outside_of(kind: type) -> Any:
    """The innermost active trace that is not a `kind`; None if there is none."""
    return next((t for t in outward(current_trace(None)) if not isinstance(t, kind)), None)


def examples_at_once() -> int:
    """The number of examples that the enclosing `jax.vmap`s compute together."""
    traces = outward(current_trace(None))
    return math.prod(trace.axis_data.size for trace in traces if hasattr(trace, "axis_data"))


def trace_of(tracer: Any) -> Any:
    return tracer._trace


def primal_of(tracer: Any) -> Any:
    """The primal value of a tracer of a derivative; None for any other value."""
    return getattr(tracer, "primal", None)


def mapped_of(tracer: Any) -> Any:
    """The array along which `jax.vmap` maps, for its tracer; None for any other value."""
    return tracer.val if hasattr(tracer, "batch_dim") else None


class PlaceholderTrace(jax.core.Trace):
    """The trace of `Placeholder`s: it raises TypeError for every primitive.

    Attributes:
      is_over: None, or the message of the RuntimeError for each later use of a placeholder: when a
        primitive is bound to it, and when JAX describes it in an error about a leaked tracer.
    """

    is_over: str | None = None

    def is_valid(self) -> bool:  # JAX calls this for each operand of each primitive bound
        if self.is_over is not None:
            raise RuntimeError(self.is_over)
        return True

    def process_primitive(self, primitive: Any, *_: Any, **__: Any) -> Any:
        raise TypeError(f"cannot compute {primitive} of a placeholder, which has no value")


class Placeholder(jax.core.Tracer):  # type: ignore[type-arg]
    """A tracer with a type but no value. A program that uses the tracer has it as a constant.

    `stands_for` is the object that the placeholder represents.
    """

    __slots__ = ("stands_for",)

    def __init__(self, trace: PlaceholderTrace, aval: Any, stands_for: Any):
        super().__init__(trace, aval)
        self.stands_for = stands_for

    @property
    def _debug_info(self) -> None:  # JAX reads this for its error about a leaked tracer
        trace_of(self).is_valid()
