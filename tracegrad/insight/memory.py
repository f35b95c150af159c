"""`memory`: what a program holds at its peak, by line and by scope, and what would free some."""

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
from tracegrad._jax.progress import progress
from tracegrad.insight import folding
from tracegrad.insight.buffers import peak_of_buffers
from tracegrad.insight.live_ranges import find_peak
from tracegrad.insight.memory_advice import MOST_MEASURED, Advice, advice_for
from tracegrad.insight.peak import LASTING, Held, Peak
from tracegrad.ir.wording import in_units, name_of, some, table
from tracegrad.planning.buffers import Account, account_of_buffers
from tracegrad.planning.compiled import NotMeasuredError, account_of, saying_why_not
from tracegrad.planning.hlo import lines_kept, module_of
from tracegrad.tracing import TracedFunction, trace
from tracegrad.tracing.graphs import graph as trace_graph
from tracegrad.tracing.graphs import require_function

_FEW = 0.01  # of what is held: constants that are not worth a word
_ROWS = 12  # of the table in a terminal
_COLUMNS = ("bytes", "share", "line", "scope", "what", "values", "kept for", "alive")
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60


@dataclass(frozen=True)
class Line:
    """What one line of the user's, in one scope, holds at the peak.

    Attributes:
      size: bytes.
      line: ``model.py:12 (Block.__call__)``; "" for arguments and constants.
      scope: the named scopes around it, ``encoder/block_0``.
      kind: ``argument``, ``constant``, ``result``, ``residual``, ``gradient`` or ``activation``.
      values: their types, ``6 × f32[512,64]``.
      kept_for: what reads the largest next.
      alive: from when to when, as shares of the program.
    """

    size: int
    line: str
    scope: str
    kind: str
    values: str
    kept_for: str
    alive: tuple[float, float]


@dataclass(frozen=True)
class MemoryReport:
    """What a program holds at its peak; from `memory`. Prints as a table, folds in a notebook.

    Lines are of XLA's own buffers where it says which there are, as it does for CPUs. Elsewhere
    they are of what the compiled program writes, in the order in which it does, and which of it
    shares a buffer is found out, mostly to a few percent. Where nothing can be compiled they are of
    the values as the program computes them: XLA may compute some of them in another order, or
    inside of others.

    Attributes:
      function: the name of the function.
      total: bytes that the program needs at once: temporary ones, arguments and results.
      temporary: of these the ones beside arguments and results.
      measured_on: the backend and the JAX whose XLA says so, and how many devices there are, of
        each of which bytes are; "" where the two are the model's.
      why_not_measured: why they are, in JAX's or XLA's words; "" where XLA says them.
      lines: what is alive at the peak, what holds most first; what has no line, as arguments, last.
      listed: bytes that they add up to.
      constants: bytes of arrays that are written into the program, as those that a function closes
        over, beside `total`; where XLA says so.
      listed_by: ``XLA``, ``the compiled program`` or ``the model``.
      at: the operation at which the peak is.
      advice: the cheapest things to do, by FLOPs for each byte that they free.
      timeline: bytes alive at each operation.
    """

    function: str
    total: int
    temporary: int
    measured_on: str
    why_not_measured: str
    lines: tuple[Line, ...]
    listed: int
    constants: int
    listed_by: str
    at: str
    advice: tuple[Advice, ...]
    timeline: tuple[int, ...] = field(repr=False)

    @property
    def scopes(self) -> dict[str, int]:
        """Bytes by scope, what holds most first."""
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
                f"over the program: {_sparkline(self.timeline)}",
                f"{self._where()}:",
                *(f"  {line}" for line in table(rows)),
                *([f"  ... and {more} more"] if more > 0 else []),
                *(f"  {text}" for text in self._beside()),
                *(["the cheapest things to do:"] if self.advice else []),
                *(f"  {k}. {advice}" for k, advice in enumerate(self.advice, 1)),
            ]
        )

    __repr__ = __str__

    def _headline(self) -> str:
        by = f"XLA: {self.measured_on}"
        if self.why_not_measured:
            by = f"by the model, not by XLA: {self.why_not_measured}"
        return (
            f"memory of {self.function}: {in_units(self.total)} at once, "
            f"{in_units(self.temporary)} beside arguments and results ({by})"
        )

    def _where(self) -> str:
        return ", ".join(filter(None, ("at the peak", self.at)))

    def _beside(self) -> list[str]:
        """What the lines do not tell."""
        found = []
        less, more = self.listed - self.total, self.total - self.listed
        if self.measured_on and less > 0:
            found.append(f"XLA holds {in_units(less)} less than these: more of them share a buffer")
        elif self.measured_on:
            found.append(f"XLA holds {in_units(more)} beside these, as in gaps between buffers")
        if self.constants > _FEW * self.total:
            found.append(f"arrays of {in_units(self.constants)} are in the program, beside these")
        return found

    def _cells(self, line: Line) -> tuple[str, ...]:
        share = f"{line.size / max(1, self.listed):.0%}"
        alive = _range(line.alive)
        size = in_units(line.size)
        return size, share, line.line, line.scope, line.kind, line.values, line.kept_for, alive

    def _repr_html_(self) -> str:
        """A bar for each scope, which folds its lines."""
        sections = []
        for scope, size in self.scopes.items():
            rows = [_COLUMNS, *(self._cells(line) for line in self.lines if line.scope == scope)]
            share = size / max(1, self.listed)
            title = html.escape(f"{scope or 'outside of scopes'}: {in_units(size)}, {share:.0%}")
            bar = f'<span style="background:#4c78a8;width:{share * 20:.2f}em;{_BAR}"></span>'
            sections.append(folding.section(f"{bar} {title}", folding.table(rows)))
        below = [*self._beside(), *map(str, self.advice)]
        return folding.report(
            self._headline(),
            f"<pre>{_sparkline(self.timeline)}</pre>{html.escape(self._where())}:",
            *sections,
            f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in below)}</ul>",
        )


_BAR = "display:inline-block;height:.7em"


def memory(fun: Callable[..., Any], *, measure_advice: bool = False) -> Callable[..., MemoryReport]:
    """Tells what holds memory: what is alive at the peak of a program, by line and by scope.

    Args:
      fun: any function of arrays and pytrees of arrays, with a gradient inside or without. One of
        `tracegrad.trace` is seen with its rules.
      measure_advice: whether the program is compiled with each thing that it may advise, up to six,
        to tell what that frees in XLA's bytes, and not about; what frees nothing, or cannot be
        done (a rule, where `jax.grad` was called before), is left out then.

    Returns:
      A function that takes the arguments of ``fun`` (arrays or `jax.ShapeDtypeStruct`s) and returns
      a `MemoryReport`. The program is compiled, for XLA's own account of its bytes, and not run:
      for the devices that its arguments lie on, which may be of `jax.experimental.topologies` and
      not here. A program that cannot be compiled by itself has that of the planner's model.

    Raises:
      TypeError: `fun` is not callable, or an argument is neither an array nor static.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(w, x):
    ...     for _ in range(3):
    ...         x = jnp.sin(x @ w)
    ...     return jnp.sum(x**2)
    >>> w, x = jnp.ones((64, 64)), jnp.ones((1024, 64))
    >>> report = tg.memory(jax.grad(loss))(w, x)
    >>> report.lines[0].kind, report.lines[0].kept_for.startswith("the backward pass of")
    ('residual', True)
    >>> stats = jax.jit(jax.grad(loss)).lower(w, x).compile().memory_analysis()
    >>> report.temporary == stats.temp_size_in_bytes
    True
    """
    require_function(fun)

    def report(*args: Any, **kwargs: Any) -> MemoryReport:
        make_graph = fun.graph if isinstance(fun, TracedFunction) else trace_graph(fun)
        program = make_graph(*args, **kwargs)
        shardings = list(map(_jax.sharding_of, jax.tree.leaves((args, kwargs))))
        device, devices = _jax.device_of(shardings), _jax.device_count(shardings)
        account, stats, why_not = None, None, ""
        try:
            with saying_why_not(), lines_kept():
                lowering = fun if hasattr(fun, "lower") else trace(fun)
                compiled = lowering.lower(*args, **kwargs).compile()
                compiled = getattr(compiled, "compiled", compiled)  # of equinox.filter_jit
                module = module_of(compiled)
                stats = account_of(compiled, device)
                given = jax.tree.leaves(getattr(compiled, "input_shardings", ()))
                devices = max(devices, _jax.device_count(given))
        except NotMeasuredError as error:  # the model's, and it says so
            why_not = str(error)
        else:
            account = account_of_buffers(module, stats)
        if account is not None:
            peak = peak_of_buffers(program, account)
        else:
            peak = find_peak(program, is_host=not _jax.has_host_memory(device))
        lines = _lines(peak)
        listed = sum(line.size for line in lines)
        temporary = sum(line.size for line in lines if line.kind not in LASTING)
        total, aliased = listed, 0
        if stats is not None:
            temporary, aliased = stats.temp_size_in_bytes, stats.alias_size_in_bytes
            total = _total(stats)

        with progress("memory", MOST_MEASURED) as begin:

            def freed_by(options: Mapping[str, Any]) -> int | None:
                begin(f"compiling with {', '.join(options)}=")
                held = _total_with(options, fun, args, kwargs, device)
                return None if held is None else total - held

            asked = freed_by if measure_advice and stats is not None else None
            advice = advice_for(peak, is_donated=aliased > 0, freed_by=asked)
        return MemoryReport(
            function=name_of(fun),
            total=total,
            temporary=temporary,
            measured_on=_jax.compiled_by(device, devices) if stats else "",
            why_not_measured=why_not,
            listed=listed,
            constants=0 if account is None else account.constants,
            listed_by=_listed_by(account),
            at=peak.at,
            lines=tuple(lines),
            advice=tuple(advice),
            timeline=peak.timeline,
        )

    return report


def _total(stats: Any) -> int:
    """Bytes that a program needs at once, as XLA says."""
    ends = stats.argument_size_in_bytes + stats.output_size_in_bytes
    return int(stats.temp_size_in_bytes + ends - stats.alias_size_in_bytes)


def _total_with(
    options: Mapping[str, Any], fun: Any, args: Any, kwargs: Any, device: Any
) -> int | None:
    """The same of a program with some options of `trace`; None if it cannot be compiled so."""
    try:
        with saying_why_not(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what could not be donated
            compiled = trace(fun, **options).lower(*args, **kwargs).compile()
            return _total(account_of(compiled, device))
    except NotMeasuredError:
        return None


def _listed_by(account: Account | None) -> str:
    if account is None:
        return "the model"
    return "XLA" if account.is_told else "the compiled program"


# ------------------------------------------------------------------------------------------ lines


def _lines(peak: Peak) -> list[Line]:
    groups: dict[tuple[str, str, str], list[Held]] = {}
    for each in peak.held:
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
            alive=(min(each.alive[0] for each in held), max(each.alive[1] for each in held)),
        )
        for (line, scope, kind), held in groups.items()
    ]
    return sorted(lines, key=lambda line: (not line.line, -line.size))


def _types(held: Sequence[Held]) -> str:
    counts = Counter(each.type for each in held)
    texts = [f"{n} × {text}" if n > 1 else text for text, n in counts.most_common()]
    return some(texts, 3)


# --------------------------------------------------------------------------------------- pictures


def _sparkline(sizes: Sequence[int]) -> str:
    highest = max(sizes, default=0)
    count = min(_WIDTH, len(sizes))
    edges = [k * len(sizes) // max(1, count) for k in range(count + 1)]
    peaks = [max(sizes[a:b]) for a, b in itertools.pairwise(edges)]
    return "".join(_BARS[-(-8 * peak // max(1, highest))] for peak in peaks)


def _range(alive: tuple[float, float]) -> str:
    first, last = (round(20 * share) for share in alive)
    return "·" * first + "━" * max(1, last - first) + "·" * (20 - max(first + 1, last))
