"""The answer of `explain`: findings with a cause, a line and a cure, and a row for each source."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad._jax.packages import require
from tracegrad.insight.colours import has_colours, painted
from tracegrad.ir import Occurrence, Origin, folding
from tracegrad.ir.authors import author_of
from tracegrad.ir.occurrence import at
from tracegrad.ir.wording import counted, notebook_cell, some, table
from tracegrad.tracing.graphs import Rule

# Causes from the worst on; all others come after these.
_ORDER = (
    "NaN in an input",
    "Inf in an input",
    "NaN in the forward pass",
    "Inf in the forward pass",
    "NaN in the reverse pass",
    "Inf in the reverse pass",
    "not finite",
    "not differentiable",
)
_ROWS = 20
_NUMBER = re.compile(r"\d+")
_NAMES = 4
_COLUMNS = ("source", "type", "gradient's norm", "zeros", "")


@dataclass(frozen=True)
class Finding:
    """One thing about a gradient that its user should know.

    `cause` is the class of the finding (``"stop_gradient"``, ``"NaN in the reverse pass"``, ...),
    `what` describes it in words, and `sources` are the paths of the leaves that it concerns.
    `operation` is the name of the operation, `origin` its line, `whose` the author of that line
    (``"yours"`` or a library), `scope` the named scopes around it, and `step` the step of the
    outermost scan around it. `operands` are the values of its operands at the first NaN or Inf.
    `cure` is an edit that is known to help. `problem` is False if the finding may be intended.

    `rule` is a rule of `tracegrad.rules` that cures the finding without an edit, at just that
    place; None if there is none. `changes` says which finite gradients the rule changes; "" if it
    changes none.
    """

    cause: str
    what: str
    sources: tuple[str, ...]
    origin: Origin | None = None
    whose: str = "yours"
    cure: str = ""
    step: int | None = None
    operation: str = ""
    operands: tuple[float, ...] = ()
    problem: bool = True
    scope: str = ""
    rule: Rule | None = field(default=None, repr=False, compare=False)
    changes: str = field(default="", repr=False, compare=False)

    @classmethod
    def of(
        cls, found: Occurrence, cause: str, what: str, sources: tuple[str, ...] = (), **more: Any
    ) -> Finding:
        """Returns a finding about an operation, with the operation's line, author, scope, name."""
        known = {"origin": found.origin, "whose": author_of(found), "operation": found.node.name}
        return cls(cause, what, sources, **{**known, "scope": scope_of(found), **more})

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The sort key: the worst finding first; if equally bad, the one with more sources."""
        known = _ORDER.index(self.cause) if self.cause in _ORDER else len(_ORDER)
        return not self.problem, known, -len(self.sources)

    @property
    def short(self) -> str:
        """The cause and the place: ``rounding at model.py:12``."""
        return self.cause + at(self.origin and self.origin.place)

    @property
    def heading(self) -> str:
        """The cause, the place and the named scopes around the place."""
        return self.short + (f", in {self.scope}" if self.scope else "")

    def __str__(self) -> str:
        step = f", in step {self.step} of the scan" if self.step is not None else ""
        whom = f" [{some(self.sources, _NAMES)}]" if self.sources else ""
        return f"{self.cause}{at(self.origin)}{step}{whom}: {self.what}"


@dataclass(frozen=True)
class SourceReport:
    """One source and its gradient.

    `norm` is the 2-norm of the gradient, `zeros` the share of its elements that are zero, `nans`
    and `infs` the numbers of NaNs and Infs, `size` the number of elements. If the source is not
    connected with the result, `reason` says in short why.
    """

    path: str
    type: str
    connected: bool
    norm: float = 0.0
    zeros: float = 0.0
    nans: int = 0
    infs: int = 0
    size: int = 0
    reason: str = ""

    @property
    def is_finite(self) -> bool:
        return not (self.nans or self.infs)

    @property
    def gradient(self) -> str:
        """The gradient in a word: ``None``, ``NaN``, ``Inf``, ``0``, or the norm."""
        if not self.connected:
            return "None"
        if self.nans:
            return f"NaN ({self.nans} of {self.size})"
        if self.infs:
            return f"Inf ({self.infs} of {self.size})"
        if self.zeros >= 1 and self.size:
            return "0"
        return f"{self.norm:.3g}" if math.isfinite(self.norm) else "> 1e19"

    @property
    def rank(self) -> tuple[bool, bool, bool, bool, float]:
        """The sort key: the worst source first, then by the norm; state of the model last."""
        is_state = self.reason == "state"
        return is_state, self.is_finite, self.connected, self.zeros < 1, self.norm


@dataclass(frozen=True)
class Explanation:
    """Why gradients are what they are. `print` it, or leave it as the last line of a notebook's
    cell; `plot` draws the norms.

    `function` is the function's name and `value` its result as text (if known and a single number).
    `findings` start with the worst. `sources` are the reports on the leaves, in the order of the
    arguments. `scopes` are the named scopes in the order of execution, each with the norm of the
    cotangent of its last result. `wrt` is in words with respect to what the gradients were taken,
    if that was not said and may not be all that was meant.
    """

    function: str
    sources: tuple[SourceReport, ...]
    findings: tuple[Finding, ...]
    scopes: tuple[tuple[str, float], ...] = ()
    value: str = ""
    wrt: str = ""

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that need repair."""
        return tuple(f for f in self.findings if f.problem)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that may be intended."""
        return tuple(f for f in self.findings if not f.problem)

    def cures(self, *, changing: bool = False) -> tuple[Rule, ...]:
        """Returns the rules that cure the problems found, for `tracegrad.rewrite`.

        Args:
          changing: whether to include rules that change finite gradients; `Finding.changes` says
            what each one changes. Without them only NaN, Inf and refusals are cured.

        Returns:
          The rules, each once. A problem without a rule needs an edit (`Finding.cure`). One problem
          may hide another: explain the rewritten function again.

        >>> import jax, jax.numpy as jnp, tracegrad as tg
        >>> def loss(x):
        ...     return jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0))
        >>> x = jnp.array([0.0, 2.0])
        >>> cured = tg.rewrite(loss, tg.explain(loss, x).cures())
        >>> print(jax.grad(loss)(x), jax.grad(cured)(x))
        [nan 0.5] [0.  0.5]
        >>> tg.explain(cured, x).problems
        ()
        """
        found = {
            repr(f.rule): f.rule
            for f in self.problems
            if f.rule is not None and (changing or not f.changes)
        }
        return tuple(found.values())

    def __getitem__(self, path: str) -> SourceReport:
        """Returns the report on the source with a path. Raises KeyError if no source has it."""
        for report in self.sources:
            if report.path == path:
                return report
        paths = [r.path for r in self.sources]
        raise KeyError(f"{path!r} is no source; the sources are {paths}")

    # ----------------------------------------------------------------------------------- text

    def __str__(self) -> str:
        return self.text(colour=has_colours())

    def __repr__(self) -> str:
        return self.text(colour=False)

    def text(self, colour: bool = False) -> str:
        """Returns the findings and a table of the sources, the worst first, then by the norm. If
        there are many sources, those whose paths differ only in numbers share a row."""
        bold, red, yellow, green = ("1", "31", "33", "32") if colour else ("",) * 4
        lines = [painted(bold, self._headline())]
        for finding in self.findings:
            mark, hue = ("✗", red) if finding.problem else ("·", yellow)
            lines.append(f"{painted(hue, mark)} {painted(hue, finding.heading)}")
            for label, words in _parts(finding):
                shown = f"{painted(green, f'{label}:')} " if label else ""
                lines.append(f"    {shown}{words}")
        return "\n".join([*lines, "", *self._table(red)])

    def _headline(self) -> str:
        value = f" (value {self.value})" if self.value else ""
        nothing = f"nothing found {self.wrt}".rstrip()
        state = counted(len(self.problems), "problem") if self.problems else nothing
        return f"gradients of {self.function}{value}: {state}"

    def _table(self, style_of_bad: str) -> list[str]:
        ordered = sorted(self.sources, key=lambda r: r.rank)
        groups = [[report] for report in ordered]
        if len(groups) > _ROWS + 1:
            groups = _alike(ordered)
        head, *rows = table([_COLUMNS, *map(_cells_of, groups)])
        lines = [
            line if group[0].is_finite and group[0].connected else painted(style_of_bad, line)
            for group, line in zip(groups, rows, strict=True)
        ]
        if len(lines) > _ROWS + 1:  # show the smallest and the largest norms
            half = _ROWS // 2
            left_out = sum(map(len, groups[half:-half]))
            lines[half:-half] = [f"... {counted(left_out, 'source')} with norms between these ..."]
        return [head, *lines]

    # -------------------------------------------------------------------------------- notebook

    def _repr_html_(self) -> str:
        """Returns HTML: a foldable section for each finding, and one with the table."""
        sections = [_section(f, is_open=f is self.findings[0]) for f in self.findings]
        ordered = sorted(self.sources, key=lambda r: r.rank)
        rows = folding.table([_COLUMNS, *map(_cells, ordered)])
        sections.append(folding.section(counted(len(self.sources), "source"), rows))
        return folding.report(self._headline(), *sections)

    # ------------------------------------------------------------------------------------ plot

    def plot(self, ax: Any = None) -> Any:
        """Draws the norms of the gradient along the named scopes, on a logarithmic axis; if there
        are no scopes, the norms of the sources.

        Args:
          ax: a matplotlib ``Axes``; default: a new one.

        Returns the ``Axes``. Raises ImportError if matplotlib is not installed.
        """
        missing = "plotting needs matplotlib: pip install matplotlib"
        require("matplotlib", missing)
        points = list(self.scopes) or [(r.path, r.norm) for r in self.sources if r.connected]
        if ax is None:
            pyplot = require("matplotlib.pyplot", missing)
            size = 8, max(2.0, 0.25 * len(points) + 1)
            _, ax = pyplot.subplots(figsize=size, layout="constrained")  # shows long names whole
        norms = [norm if norm > 0 and math.isfinite(norm) else math.nan for _, norm in points]
        ax.plot(norms, range(len(points)), "o-")
        ax.set_yticks(range(len(points)), [name for name, _ in points])
        ax.invert_yaxis()
        if any(not math.isnan(norm) for norm in norms):
            ax.set_xscale("log")
        ax.set_xlabel("norm of the gradient")
        ax.set_title(f"gradients of {self.function}")
        return ax


def _cells(report: SourceReport) -> tuple[str, ...]:
    """Returns one source's row of the table."""
    zeros = f"{report.zeros:.0%}" if report.connected else ""
    return report.path, report.type, report.gradient, zeros, report.reason


def _alike(ordered: Sequence[SourceReport]) -> list[list[SourceReport]]:
    """Groups sources that have the same state and paths that differ only in numbers."""
    groups: dict[Any, list[SourceReport]] = {}
    for report in ordered:
        has_norm = report.connected and report.is_finite and report.zeros < 1
        state = has_norm or (report.gradient, report.reason)
        groups.setdefault((_NUMBER.sub("*", report.path), report.type, state), []).append(report)
    return list(groups.values())


def _cells_of(group: Sequence[SourceReport]) -> tuple[str, ...]:
    """Returns a group's row of the table; for several sources it shows the range of numbers, and at
    a wide range the sources at both ends."""
    first, last = _cells(group[0]), _cells(group[-1])
    if len(group) == 1:
        return first
    numbers = list(zip(*(_NUMBER.findall(r.path) for r in group), strict=False))
    shown = iter("*" if len(set(each)) > 1 else each[0] for each in numbers)
    ends = [first[2], last[2]]
    if group[-1].norm > 1e3 * group[0].norm > 0:
        for k in (0, -1):
            of = ", ".join(each[k] for each in numbers if len(set(each)) > 1)
            ends[k] += f" (* = {of})"
    zeros = [f"{share:.0%}" for share in (f(r.zeros for r in group) for f in (min, max))]
    return (
        f"{_NUMBER.sub(lambda _: next(shown), group[0].path)} ({len(group)})",
        group[0].type,
        " to ".join(dict.fromkeys(ends)),
        " to ".join(dict.fromkeys(zeros)) if first[3] else "",
        first[4],
    )


def _section(finding: Finding, is_open: bool) -> str:
    """Returns a finding as a foldable section of HTML."""
    hue, sign = ("#d1493e", "✗") if finding.problem else ("#b7791f", "·")
    body = []
    for label, words in _parts(finding):
        shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words))
        shown = f"<code>{shown}</code>" if label == "rule" else shown
        body.append(f"<b>{label}:</b> {shown}" if label else shown)
    if finding.origin and not notebook_cell(finding.origin.file):  # a cell's file name is no help
        place = f"{finding.origin.file}:{finding.origin.line}"
        body.insert(1, f"<code>{html.escape(place)}</code>")
    title = f'<b style="color:{hue}">{sign}</b> {html.escape(finding.heading)}'
    return folding.section(title, "<br>".join(body), is_open=is_open)


def _parts(finding: Finding) -> Iterator[tuple[str, str]]:
    """Yields the parts of the text on a finding, each with its label or ""."""
    step = "" if finding.step is None else f" (first in step {finding.step} of the scan)"
    yield "", finding.what + step
    if finding.sources:
        yield "", f"concerns {some(finding.sources, _NAMES)}"
    if finding.cure:
        yield "cure", finding.cure
    if finding.problem:
        rule = "; ".join(filter(None, (repr(finding.rule), finding.changes)))
        yield "rule", "none; it takes an edit" if finding.rule is None else rule


def scope_of(found: Occurrence) -> str:
    """Returns the named scopes around an operation, without the scopes that `jnp.einsum` names by
    its formula."""
    return "/".join(name for name in found.scopes if "->" not in name)


def shared_scope(scopes: Iterable[str]) -> str:
    """Returns the scopes that several places share: ``model`` for ``model/a`` and ``model/b``."""
    split = [scope.split("/") for scope in scopes]
    together = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*split, strict=False))
    return "/".join(name for name, *_ in together)


def number_text(x: float) -> str:
    """Formats a number for a finding."""
    return f"{x:.4g}"
