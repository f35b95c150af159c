"""`memory`: reports what a program holds at its peak, by line and scope."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.insight.program_lines import ProgramLines
from tracegrad.insight.xla_buffers import Line, account_of_buffers
from tracegrad.ir import folding
from tracegrad.ir.importer import graph_of
from tracegrad.ir.wording import in_units, name_of, some, table
from tracegrad.planning.compiled import NotMeasuredError, account_of, saying_why_not
from tracegrad.planning.hlo import lines_kept, module_of
from tracegrad.tracing import trace
from tracegrad.tracing.graphs import graph_of_call, require_function
from tracegrad.tracing.tools import tool
from tracegrad.tracing.traced import find_traced

_FEW = 0.01  # constants below this share of the total are not reported
_ROWS = 12  # rows of the table in a terminal
_COLUMNS = ("bytes", "share", "line", "scope", "what", "values", "kept for")


@dataclass(frozen=True)
class MemoryReport:
    """The memory that a program holds at its peak, as `memory` returns it. The report prints as a
    table, and folds in a notebook.

    The lines add up XLA's own buffers. XLA lists its buffers for CPUs and for the GPUs of this
    machine; for other devices the report has the totals, but no lines.

    Attributes:
      function: the name of the function.
      total: bytes that the program needs at once: arguments, results and temporary buffers.
      temporary: bytes of the temporary buffers alone.
      measured_on: the backend, the version of JAX, and the number of devices. All bytes are bytes
        for each device.
      lines: the values that are alive at the peak, by line of code, the largest first; arguments
        and constants, which have no line, come last.
      listed: the sum of the bytes of `lines`.
      constants: bytes of arrays that are part of the program (arrays that a function closes over),
        if XLA reports them. They are not in `total`.
      at: the operation that runs at the peak.
      timeline: bytes alive at each operation.
    """

    function: str
    total: int
    temporary: int
    measured_on: str
    lines: tuple[Line, ...]
    listed: int
    constants: int
    at: str
    timeline: tuple[int, ...] = field(repr=False)

    def __str__(self) -> str:
        rows = [_COLUMNS, *map(self._cells, self.lines[:_ROWS])]
        more = len(self.lines) - _ROWS
        return "\n".join(
            [
                self._headline(),
                f"{', '.join(filter(None, ('at the peak', self.at)))}:",
                *(f"  {line}" for line in table(rows)),
                *([f"  ... and {more} more"] if more > 0 else []),
                *(f"  {text}" for text in self._remarks()),
            ]
        )

    __repr__ = __str__

    def _headline(self) -> str:
        return (
            f"memory of {self.function}: {in_units(self.total)} at once, "
            f"{in_units(self.temporary)} beside arguments and results (XLA: {self.measured_on})"
        )

    def _remarks(self) -> list[str]:
        """Returns sentences on the bytes that the lines do not list."""
        found = []
        if not self.lines:
            found.append("XLA does not list its buffers for this device")
        elif self.total > self.listed:
            beside = in_units(self.total - self.listed)
            found.append(f"XLA holds {beside} more, for example in gaps between buffers")
        if self.constants > _FEW * self.total:
            found.append(f"constant arrays in the program hold {in_units(self.constants)} more")
        return found

    def _cells(self, line: Line) -> tuple[str, ...]:
        share = f"{line.size / max(1, self.listed):.0%}"
        size = in_units(line.size)
        return size, share, line.line, line.scope, line.kind, line.values, line.kept_for

    def _repr_html_(self) -> str:
        return folding.of_text(str(self))


@tool
def memory(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> MemoryReport:
    """Reports which lines and scopes hold the memory of a program at its peak.

    `memory` compiles the program, as XLA itself counts the bytes, but does not run it. The program
    is compiled for the devices of its arguments; these may be devices of
    `jax.experimental.topologies`, which this machine does not have.

    Args:
      fun: any function of arrays and pytrees of arrays, with or without a gradient inside. For a
        function of `tracegrad.trace`, its rules are applied. A function of `tracegrad.trace` or
        `jax.jit` may have static arguments.
      *args, **kwargs: the arguments of `fun`: arrays, or `jax.ShapeDtypeStruct`s instead of them.

    Returns:
      A `MemoryReport`: print it.

    Raises:
      TypeError: `fun` is not callable, or an argument is neither an array nor static.
      ValueError: XLA cannot compile the program on its own (its shapes are symbolic, or it names
        an axis of an enclosing `vmap`), or XLA does not report its memory.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(w, x):
    ...     for _ in range(3):
    ...         x = jnp.sin(x @ w)
    ...     return jnp.sum(x**2)
    >>> w, x = jnp.ones((64, 64)), jnp.ones((1024, 64))
    >>> report = tg.memory(jax.grad(loss), w, x)
    >>> report.lines[0].kind, report.lines[0].kept_for.startswith("the backward pass of")
    ('residual', True)
    >>> stats = jax.jit(jax.grad(loss)).lower(w, x).compile().memory_analysis()
    >>> report.temporary == stats.temp_size_in_bytes
    True
    """
    require_function(fun)
    traced, of_object = find_traced(fun)
    if traced is not None:
        fun, args = traced, (*of_object, *args)
        program = traced.graph(*args, **kwargs)
    elif isinstance(fun, type(jax.jit(lambda: None))):  # it knows the static arguments
        program = graph_of(fun.trace(*args, **kwargs).jaxpr)
    else:
        program = graph_of_call(fun, args, kwargs)
    shardings = list(map(_jax.sharding_of, jax.tree.leaves((args, kwargs))))
    device, devices = _jax.device_of(shardings), _jax.device_count(shardings)
    has_lower = hasattr(fun, "lower") and not inspect.ismethod(fun)  # a method's is the function's
    lowering: Any = fun if has_lower else trace(fun)
    try:
        with lines_kept(), saying_why_not():
            compiled = lowering.lower(*args, **kwargs).compile()
            compiled = getattr(compiled, "compiled", compiled)  # equinox.filter_jit wraps it
            module = module_of(compiled)
            stats = account_of(compiled, device)
    except NotMeasuredError as error:
        raise ValueError(
            f"memory reports what XLA holds, but XLA does not compile {name_of(fun)} on its own: "
            f"{error}. Pass the function that is compiled, with shapes that are numbers"
        ) from error
    given = jax.tree.leaves(getattr(compiled, "input_shardings", ()))
    # Unflattening a user's pytree may have replaced shardings by other objects.
    given = [each for each in given if hasattr(each, "device_set")]
    account = account_of_buffers(module, stats, ProgramLines(program))
    lines = _lines(account.buffers)
    ends = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return MemoryReport(
        function=name_of(fun),
        total=int(stats.temp_size_in_bytes + ends),
        temporary=stats.temp_size_in_bytes,
        measured_on=_jax.compiled_by(device, max(devices, _jax.device_count(given))),
        listed=sum(line.size for line in lines),
        constants=account.constants,
        at=account.at,
        lines=tuple(lines),
        timeline=account.timeline,
    )


# ------------------------------------------------------------------------------------------ lines


def _lines(buffers: Sequence[Line]) -> list[Line]:
    """Groups buffers by line, scope and kind: the largest first, lines without a place last."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for each in buffers:
        if each.size:
            groups.setdefault((each.line, each.scope, each.kind), []).append(each)
    lines = [
        replace(
            max(held, key=lambda each: each.size),
            size=sum(each.size for each in held),
            values=_types(held),
        )
        for held in groups.values()
    ]
    return sorted(lines, key=lambda line: (not line.line, -line.size))


def _types(held: Sequence[Line]) -> str:
    counts = Counter(each.values for each in held)
    texts = [f"{n} × {text}" if n > 1 else text for text, n in counts.most_common()]
    return some(texts, 3)
