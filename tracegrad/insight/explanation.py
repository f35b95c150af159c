"""What `explain` answers: findings with a cause, a line and a cure, and one row for each source."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from dataclasses import dataclass
from typing import Any

from tracegrad._jax.packages import require
from tracegrad.insight.colours import has_colours, painted
from tracegrad.ir import Origin, folding
from tracegrad.ir.occurrence import at
from tracegrad.ir.wording import counted, notebook_cell, some, table
from tracegrad.tracing.graphs import Rule

# The worst first.
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
_NAMES = 4
_COLUMNS = ("source", "type", "gradient", "zeros", "")


@dataclass(frozen=True)
class ByRule:
    """A rule that cures a finding, and which finite gradients it changes; ""; none."""

    rule: Rule | None = None
    changes: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing about a gradient that its user should know.

    `cause` is its class (``"stop_gradient"``, ``"NaN in the reverse pass"``, ...), `what` says it
    in words, `sources` are the paths of the leaves that it concerns, `origin` is the user's line,
    `whose` who wrote what is there (``"yours"`` or a library), `step` that of a scan, `operation`
    what stands there, `operands` what it was given where a NaN or Inf stands first, `cure` what is
    known to help, as an edit. `problem` is False for what may well be meant.

    `rule` does it without an edit, at just that place, if a rule of `tracegrad.rules` can; None if
    none can. `changes` says which finite gradients the rule changes; "" if it changes none.
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
    by_rule: ByRule = dataclasses.field(default=ByRule(), repr=False, compare=False)

    @property
    def rule(self) -> Rule | None:
        return self.by_rule.rule

    @property
    def changes(self) -> str:
        return self.by_rule.changes

    @property
    def rank(self) -> tuple[bool, int]:
        """Sorts the worst first."""
        known = _ORDER.index(self.cause) if self.cause in _ORDER else len(_ORDER)
        return not self.problem, known

    @property
    def short(self) -> str:
        """The cause and the place: ``rounding at model.py:12``."""
        return self.cause + at(self.origin and self.origin.place)

    def __str__(self) -> str:
        step = f", in step {self.step} of the scan" if self.step is not None else ""
        whom = f" [{some(self.sources, _NAMES)}]" if self.sources else ""
        return f"{self.cause}{at(self.origin)}{step}{whom}: {self.what}"


@dataclass(frozen=True)
class SourceReport:
    """One source and its gradient.

    `norm` is the 2-norm, `zeros` the share of elements that are zero, `nans` and `infs` their
    numbers, `size` that of all elements; `reason` says in short why an unconnected one is that.
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
        """In a word: ``None``, ``NaN``, ``0``, or the norm."""
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
        """Sorts the worst first, and what is not trained last."""
        is_state = self.reason == "state"
        return is_state, self.is_finite, self.connected, self.zeros < 1, -self.zeros


@dataclass(frozen=True)
class Explanation:
    """Why gradients are what they are. `print` it, or leave it as the last line of a notebook's
    cell; `plot` draws the norms.

    `findings` come with the worst first; `scopes` are named scopes in the order of execution with
    the norm of the gradient at their end, `sources` the leaves in the order of the arguments.
    """

    function: str
    sources: tuple[SourceReport, ...]
    findings: tuple[Finding, ...]
    scopes: tuple[tuple[str, float], ...] = ()
    value: str = ""

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that want repair."""
        return tuple(f for f in self.findings if f.problem)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that may well be meant."""
        return tuple(f for f in self.findings if not f.problem)

    def cures(self, *, changing: bool = False) -> tuple[Rule, ...]:
        """The rules that cure the problems which were found, for `tracegrad.rewrite`.

        Args:
          changing: whether those are wanted too that change gradients which are finite: each says
            what it changes (`Finding.changes`). Else only NaN, Inf and refusals are mended.

        Returns:
          The rules, each once. What is not among them takes an edit (`Finding.cure`). A problem may
          hide another one: explain what comes out again.

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
        """The report on one source, by its path. Raises KeyError for another."""
        for report in self.sources:
            if report.path == path:
                return report
        raise KeyError(f"{path!r} is no source; they are {[r.path for r in self.sources]}")

    # ----------------------------------------------------------------------------------- text

    def __str__(self) -> str:
        return self.text(colour=has_colours())

    def __repr__(self) -> str:
        return self.text(colour=False)

    def text(self, colour: bool = False) -> str:
        """The findings and a table of the sources, the worst first."""
        bold, red, yellow, green = ("1", "31", "33", "32") if colour else ("",) * 4
        lines = [painted(bold, self._headline())]
        for finding in self.findings:
            mark, hue = ("✗", red) if finding.problem else ("·", yellow)
            lines.append(f"{painted(hue, mark)} {painted(hue, finding.short)}")
            lines.append(f"    {finding.what}" + _in_step(finding))
            if finding.sources:
                lines.append(f"    concerns {some(finding.sources, _NAMES)}")
            if finding.cure:
                lines.append(f"    {painted(green, 'cure:')} {finding.cure}")
            if finding.problem:
                lines.append(f"    {painted(green, 'rule:')} {_rule_text(finding)}")
        return "\n".join([*lines, "", *self._table(red)])

    def _headline(self) -> str:
        value = f" (value {self.value})" if self.value else ""
        state = counted(len(self.problems), "problem") if self.problems else "nothing found"
        return f"gradients of {self.function}{value}: {state}"

    def _table(self, style_of_bad: str) -> list[str]:
        ordered = sorted(self.sources, key=lambda r: r.rank)
        shown = ordered if len(ordered) == _ROWS + 1 else ordered[:_ROWS]
        head, *rows = table([_COLUMNS, *map(_cells, shown)])
        lines = [head]
        for report, line in zip(shown, rows, strict=True):
            is_good = report.is_finite and report.connected
            lines.append(line if is_good else painted(style_of_bad, line))
        if len(ordered) > len(shown):
            lines.append(f"... and {len(ordered) - len(shown)} more")
        return lines

    # -------------------------------------------------------------------------------- notebook

    def _repr_html_(self) -> str:
        """One foldable section for each finding, and one with the table."""
        sections = [_section(f, is_open=f is self.findings[0]) for f in self.findings]
        ordered = sorted(self.sources, key=lambda r: r.rank)
        rows = folding.table([_COLUMNS, *map(_cells, ordered)])
        sections.append(folding.section(counted(len(self.sources), "source"), rows))
        return folding.report(self._headline(), *sections)

    # ------------------------------------------------------------------------------------ plot

    def plot(self, ax: Any = None) -> Any:
        """Draws the norms of the gradient along the named scopes (where there are none: of the
        sources), on a logarithmic axis.

        Args:
          ax: a matplotlib ``Axes``; default: a new one.

        Returns the ``Axes``. Raises ImportError without matplotlib.
        """
        missing = "plotting needs matplotlib: pip install matplotlib"
        require("matplotlib", missing)
        points = list(self.scopes) or [(r.path, r.norm) for r in self.sources if r.connected]
        if ax is None:
            pyplot = require("matplotlib.pyplot", missing)
            size = 8, max(2.0, 0.25 * len(points) + 1)
            _, ax = pyplot.subplots(figsize=size, layout="constrained")  # with room for the names
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
    """A row of the table."""
    zeros = f"{report.zeros:.0%}" if report.connected else ""
    return report.path, report.type, report.gradient, zeros, report.reason


def _section(finding: Finding, is_open: bool) -> str:
    """A finding that folds."""
    hue, sign = ("#d1493e", "✗") if finding.problem else ("#b7791f", "·")
    body = [html.escape(finding.what + _in_step(finding))]
    if finding.origin and not notebook_cell(finding.origin.file):  # whose files say nothing
        place = f"{finding.origin.file}:{finding.origin.line}"
        body.append(f"<code>{html.escape(place)}</code>")
    if finding.sources:
        body.append(f"concerns {html.escape(some(finding.sources, _NAMES))}")
    if finding.cure:
        cure = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(finding.cure))
        body.append(f"<b>cure:</b> {cure}")
    if finding.problem:
        body.append(f"<b>rule:</b> <code>{html.escape(_rule_text(finding))}</code>")
    title = f'<b style="color:{hue}">{sign}</b> {html.escape(finding.short)}'
    return folding.section(title, "<br>".join(body), is_open=is_open)


def _rule_text(finding: Finding) -> str:
    if finding.rule is None:
        return "none; it takes an edit"
    changes = f" ({finding.changes})" if finding.changes else ""
    return f"{finding.rule!r}{changes}"


def _in_step(finding: Finding) -> str:
    return "" if finding.step is None else f" (first in step {finding.step} of the scan)"


def number_text(x: float) -> str:
    """A number as findings write it."""
    return f"{x:.4g}"
