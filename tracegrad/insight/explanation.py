"""The answer of `explain`: findings with a cause, a line and a cure, and a row for each source."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tracegrad.ir import Occurrence, Origin, folding
from tracegrad.ir.occurrence import at
from tracegrad.ir.wording import counted, some, table
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
_NAMES = 4
_COLUMNS = ("source", "type", "gradient's norm", "zeros", "")


@dataclass(frozen=True)
class Finding:
    """One thing about a gradient that its user should know.

    `cause` is the class of the finding (``"stop_gradient"``, ``"NaN in the reverse pass"``, ...),
    `what` describes it in words, and `sources` are the paths of the leaves that it concerns.
    `operation` is the name of the operation, `origin` its line, `scope` the named scopes around it,
    and `step` the step of the outermost scan around it. `operands` are the values of its operands
    at the first NaN or Inf. `cure` is an edit that is known to help. `problem` is False if the
    finding may be intended.

    `rule` is a rule of `tracegrad.rules` that cures the finding without an edit, at just that
    place; None if there is none. `changes` says which finite gradients the rule changes; "" if it
    changes none.
    """

    cause: str
    what: str
    sources: tuple[str, ...]
    origin: Origin | None = None
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
        """Returns a finding about an operation, with the operation's line, scope and name."""
        known = {"origin": found.origin, "operation": found.node.name}
        return cls(cause, what, sources, **{**known, "scope": scope_of(found), **more})

    @property
    def rank(self) -> tuple[bool, int, bool, int]:
        """The sort key: the worst finding first; if equally bad, the one with more sources."""
        known = _ORDER.index(self.cause) if self.cause in _ORDER else len(_ORDER)
        is_effect = self.cause == "multiplied by zero"  # often of another finding
        return not self.problem, known, is_effect, -len(self.sources)

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
        """The sort key: the worst source first, then by the norm; state of the model, and types
        without a gradient, last."""
        is_last = self.reason in ("state", "no gradient")
        return is_last, self.is_finite, self.connected, self.zeros < 1, self.norm


@dataclass(frozen=True)
class Explanation:
    """Why gradients are what they are. `print` it, or leave it as the last line of a notebook's
    cell.

    `function` is the function's name and `value` its result as text (if known and a single number).
    `findings` start with the worst. `sources` are the reports on the leaves, in the order of the
    arguments.
    """

    function: str
    sources: tuple[SourceReport, ...]
    findings: tuple[Finding, ...]
    value: str = ""

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

    def __str__(self) -> str:
        """Returns the findings and a table of the sources, the worst first, then by the norm."""
        lines = [self._headline()]
        for finding in self.findings:
            lines.append(f"{'✗' if finding.problem else '·'} {finding.heading}")
            for label, words in _parts(finding):
                lines.append(f"    {label}: {words}" if label else f"    {words}")
        return "\n".join([*lines, "", *self._table()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return folding.of_text(str(self))

    def _headline(self) -> str:
        value = f" (value {self.value})" if self.value else ""
        state = counted(len(self.problems), "problem") if self.problems else "nothing found"
        return f"gradients of {self.function}{value}: {state}"

    def _table(self) -> list[str]:
        head, *lines = table([_COLUMNS, *map(_cells, sorted(self.sources, key=lambda r: r.rank))])
        if len(lines) > _ROWS + 1:  # show the smallest and the largest norms
            half = _ROWS // 2
            left_out = counted(len(lines) - _ROWS, "source")
            lines[half:-half] = [f"... {left_out} with norms between these ..."]
        return [head, *lines]


def _cells(report: SourceReport) -> tuple[str, ...]:
    """Returns one source's row of the table."""
    zeros = f"{report.zeros:.0%}" if report.connected else ""
    return report.path, report.type, report.gradient, zeros, report.reason


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
    """Returns the named scopes around an operation."""
    return "/".join(found.scopes)


def shared_scope(scopes: Iterable[str]) -> str:
    """Returns the scopes that several places share: ``model`` for ``model/a`` and ``model/b``."""
    split = [scope.split("/") for scope in scopes]
    together = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*split, strict=False))
    return "/".join(name for name, *_ in together)


def number_text(x: float) -> str:
    """Formats a number for a finding."""
    return f"{x:.4g}"
