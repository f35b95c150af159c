"""The report of `check_grads`: one `Checked` for each comparison."""

from __future__ import annotations

from dataclasses import dataclass

from tracegrad.ir import Origin, folding
from tracegrad.ir.occurrence import at

_REASONS = {
    "not smooth": ": a kink, a jump or NaN is near",
    "not judged": ": rounding leaves too few digits",
}


@dataclass(frozen=True)
class Checked:
    """One comparison: a derivative along a direction, and the same number by finite differences.

    Attributes:
      what: the leaf (``params.w``), or the rule and its input (``clip, input 0``).
      order, mode: which derivative: ``"rev"``, ``"fwd"``, ``"fwd of rev"``.
      expected: the derivative of the randomly weighted results, by finite differences.
      got: the same derivative, as JAX or the rule computes it; NaN if there is none.
      status: ``"right"``, ``"wrong"``, ``"not smooth"``, ``"not judged"`` (both say why in the
        report), ``"none"`` (the derivative does not exist) or ``"deliberate"``.
      origin: the user's line that calls the rule.
      defined: the place where the rule is defined.
      note: why there is no derivative, or no verdict.
    """

    what: str
    order: int
    mode: str
    expected: float
    got: float
    status: str
    origin: Origin | None = None
    defined: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """The name of the leaf, or of the rule."""
        return self.what.split(",")[0]

    def __str__(self) -> str:
        defined = f" (defined at {self.defined})" if self.defined else ""
        said = self.note or f"expected {self.expected:.6g}, got {self.got:.6g}"
        which = f"order {self.order}, {self.mode}"
        return f"{self.what}{at(self.origin)}{defined}, {which}: {said}"


@dataclass(frozen=True, repr=False)
class GradCheck:
    """The report of `check_grads`: the comparisons of the custom `rules`, each on its own, then
    those of the whole function, by `leaves`. `note` says why the function was not traced in double
    precision."""

    function: str
    rules: tuple[Checked, ...]
    leaves: tuple[Checked, ...]
    note: str = ""

    @property
    def wrong(self) -> tuple[Checked, ...]:
        """The failed comparisons. Rules come first, as a wrong rule makes leaves wrong."""
        return tuple(c for c in (*self.rules, *self.leaves) if c.status == "wrong")

    @property
    def deliberate(self) -> tuple[Checked, ...]:
        """The rules that differ from the derivative and were declared as deliberate."""
        return tuple(c for c in self.rules if c.status == "deliberate")

    @property
    def _verdict(self) -> str:
        statuses = [c.status for c in (*self.rules, *self.leaves)]
        unjudged = sum(status in ("not smooth", "not judged", "none") for status in statuses)
        if self.wrong:
            return f"{len(self.wrong)} wrong"
        if "right" not in statuses:
            return "not judged"
        return f"right, but {unjudged} not judged" if unjudged else "right"

    def __str__(self) -> str:
        said = f" ({self.note})" if self.note else ""
        lines = [f"derivatives of {self.function}: {self._verdict}{said}"]
        marks = {"right": "✓", "wrong": "✗", "deliberate": "·", "none": "–"}
        for check in (*self.rules, *self.leaves):
            why = "" if check.note else _REASONS.get(check.status, "")
            name = "" if check.status in ("right", "wrong") else f" [{check.status}{why}]"
            lines.append(f"{marks.get(check.status, '?')} {check}{name}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return folding.of_text(str(self))
