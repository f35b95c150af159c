"""`memory`: reports what a program holds at its peak, by line and scope, and what frees memory."""

from __future__ import annotations

import html
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.insight.memory_advice import Advice, Cost, advice_for, cost_of
from tracegrad.insight.program_lines import ProgramLines
from tracegrad.insight.xla_buffers import Buffer, Kind, account_of_buffers
from tracegrad.ir import folding
from tracegrad.ir.wording import in_units, name_of, some, table
from tracegrad.planning.compiled import NotMeasuredError, account_of, saying_why_not
from tracegrad.planning.hlo import lines_kept, module_of
from tracegrad.tracing import TracedFunction, trace
from tracegrad.tracing.graphs import graph_of_call, require_function
from tracegrad.tracing.tools import tool

_FEW = 0.01  # constants below this share of the total are not reported
_ROWS = 12  # rows of the table in a terminal
_COLUMNS = ("bytes", "share", "line", "scope", "what", "values", "kept for")
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60


@dataclass(frozen=True)
class Line:
    """The bytes that one line of the user's code, in one scope, holds at the peak.

    Attributes:
      size: bytes.
      line: ``model.py:12 (Block.__call__)``; "" for arguments and constants.
      scope: the named scopes around the line, ``encoder/block_0``.
      kind: ``argument``, ``result``, ``residual``, ``gradient`` or ``activation``.
      values: the types of the values, ``6 × f32[512,64]``.
      kept_for: the operation that reads the largest value next.
    """

    size: int
    line: str
    scope: str
    kind: Kind
    values: str
    kept_for: str


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
      advice: the cheapest ways to free memory, by FLOPs per freed byte; empty without
        ``measure_advice=True``.
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
    advice: tuple[Advice, ...]
    timeline: tuple[int, ...] = field(repr=False)

    @property
    def scopes(self) -> dict[str, int]:
        """Bytes by scope, the largest first."""
        found: Counter[str] = Counter()
        for line in self.lines:
            found[line.scope] += line.size
        return dict(found.most_common())

    def __str__(self) -> str:
        rows = [_COLUMNS, *map(self._cells, self.lines[:_ROWS])]
        more = len(self.lines) - _ROWS
        return "\n".join(
            [
                self._headline(),
                *(f"over the program: {_sparkline(self.timeline)}" for _ in self.timeline[:1]),
                f"{self._where()}:",
                *(f"  {line}" for line in table(rows)),
                *([f"  ... and {more} more"] if more > 0 else []),
                *(f"  {text}" for text in self._remarks()),
                *(["the cheapest things to do:"] if self.advice else []),
                *(f"  {k}. {advice}" for k, advice in enumerate(self.advice, 1)),
            ]
        )

    __repr__ = __str__

    def _headline(self) -> str:
        return (
            f"memory of {self.function}: {in_units(self.total)} at once, "
            f"{in_units(self.temporary)} beside arguments and results (XLA: {self.measured_on})"
        )

    def _where(self) -> str:
        return ", ".join(filter(None, ("at the peak", self.at)))

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
        """Returns HTML with a bar for each scope, which unfolds to the lines of the scope."""
        sections = []
        for scope, size in self.scopes.items():
            rows = [_COLUMNS, *(self._cells(line) for line in self.lines if line.scope == scope)]
            share = size / max(1, self.listed)
            title = html.escape(f"{scope or 'outside of scopes'}: {in_units(size)}, {share:.0%}")
            bar = f'<span style="background:#4c78a8;width:{share * 20:.2f}em;{_BAR}"></span>'
            sections.append(folding.section(f"{bar} {title}", folding.table(rows)))
        below = [*self._remarks(), *map(str, self.advice)]
        return folding.report(
            self._headline(),
            f"<pre>{_sparkline(self.timeline)}</pre>{html.escape(self._where())}:",
            *sections,
            f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in below)}</ul>",
        )


_BAR = "display:inline-block;height:.7em"


@tool
def memory(
    fun: Callable[..., Any], /, *args: Any, measure_advice: bool = False, **kwargs: Any
) -> MemoryReport:
    """Reports which lines and scopes hold the memory of a program at its peak.

    `memory` compiles the program, as XLA itself counts the bytes, but does not run it. The program
    is compiled for the devices of its arguments; these may be devices of
    `jax.experimental.topologies`, which this machine does not have.

    Args:
      fun: any function of arrays and pytrees of arrays, with or without a gradient inside. For a
        function of `tracegrad.trace`, its rules are applied. A function of `tracegrad.trace` or
        `jax.jit` may have static arguments.
      *args, **kwargs: the arguments of `fun`: arrays, or `jax.ShapeDtypeStruct`s instead of them.
      measure_advice: whether to look for ways to free memory. The program is compiled once for
        each candidate: donated arguments, budgets, and parts to recompute, seven at most. The
        advice lists the cheapest candidates that free memory, with the bytes that XLA counts.

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
    of_arrays, arrays, named = _without_statics(fun, args, kwargs)
    if isinstance(fun, TracedFunction):
        program = fun.graph(*args, **kwargs)
    else:
        program = graph_of_call(of_arrays, arrays, named)
    shardings = list(map(_jax.sharding_of, jax.tree.leaves((args, kwargs))))
    device, devices = _jax.device_of(shardings), _jax.device_count(shardings)

    def compiled_by_xla(lower: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with saying_why_not():
            compiled = lower(*args, **kwargs).compile()
            return getattr(compiled, "compiled", compiled)  # equinox.filter_jit wraps it

    def compiled_with(options: Mapping[str, Any]) -> Cost | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings on arguments that cannot be donated
                other = trace(of_arrays, **options)
                compiled = compiled_by_xla(other.lower, *arrays, **named)
                return cost_of(compiled, device, other.graph(*arrays, **named))
        except NotMeasuredError:
            return None

    try:
        with lines_kept():
            lowering: Any = fun if hasattr(fun, "lower") else trace(fun)
            compiled = compiled_by_xla(lowering.lower, *args, **kwargs)
            with saying_why_not():
                module = module_of(compiled)
                now = cost_of(compiled, device, program)
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
    advice = []
    if measure_advice:
        advice = advice_for(account.buffers, program, arrays, now, compiled_with)
    return MemoryReport(
        function=name_of(fun),
        total=now.total,
        temporary=stats.temp_size_in_bytes,
        measured_on=_jax.compiled_by(device, max(devices, _jax.device_count(given))),
        listed=sum(line.size for line in lines),
        constants=account.constants,
        at=account.at,
        lines=tuple(lines),
        advice=tuple(advice),
        timeline=account.timeline,
    )


def _without_statics(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns a function of arrays alone, and its arguments. For a function of `jax.jit` or
    `trace`, all leaves that are not arrays become part of the function, with None in their place in
    the arguments, as they may be static."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [leaf if hasattr(leaf, "dtype") else None for leaf in leaves]
    is_jit = isinstance(fun, TracedFunction | type(jax.jit(lambda: None)))
    if not is_jit or all(array is not None for array in arrays):
        return fun, args, kwargs

    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        given = iter(jax.tree.leaves((args, kwargs)))
        filled = [
            leaf if array is None else next(given)
            for leaf, array in zip(leaves, arrays, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return fun(*args, **kwargs)

    args, kwargs = jax.tree.unflatten(tree, arrays)
    return of_arrays, args, kwargs


# ------------------------------------------------------------------------------------------ lines


def _lines(buffers: Sequence[Buffer]) -> list[Line]:
    """Groups buffers by line, scope and kind: the largest first, lines without a place last."""
    groups: dict[tuple[str, str, Kind], list[Buffer]] = {}
    for each in buffers:
        if each.size:
            groups.setdefault((each.line, each.scope, each.kind), []).append(each)
    lines = [
        Line(
            size=sum(each.size for each in held),
            line=line,
            scope=scope,
            kind=kind,
            values=_types(held),
            kept_for=max(held, key=lambda each: each.size).kept_for,
        )
        for (line, scope, kind), held in groups.items()
    ]
    return sorted(lines, key=lambda line: (not line.line, -line.size))


def _types(held: Sequence[Buffer]) -> str:
    counts = Counter(each.type for each in held)
    texts = [f"{n} × {text}" if n > 1 else text for text, n in counts.most_common()]
    return some(texts, 3)


# --------------------------------------------------------------------------------------- pictures


def _sparkline(sizes: Sequence[int]) -> str:
    """Draws the bytes over the program as a row of bars."""
    highest = max(sizes, default=0)
    count = min(_WIDTH, len(sizes))
    edges = [k * len(sizes) // max(1, count) for k in range(count + 1)]
    peaks = [max(sizes[a:b]) for a, b in itertools.pairwise(edges)]
    return "".join(_BARS[-(-8 * peak // max(1, highest))] for peak in peaks)
