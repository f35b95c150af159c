"""What `check_grads` answers: one line for each comparison."""

from __future__ import annotations

from dataclasses import dataclass

from tracegrad.ir import Origin, folding
from tracegrad.ir.occurrence import at


@dataclass(frozen=True)
class Checked:
    """One comparison: a derivative along a direction, and what finite differences give for it.

    `what` names the leaf (``params.w``) or the rule and its input (``clip, input 0``), `order` and
    `mode` the derivative (``"rev"``, ``"fwd"``, ``"fwd of rev"``), `expected` is the number by
    finite differences and `got` the derivative's; both are of the results, weighed by random
    numbers. `status` is ``"right"``, ``"wrong"``, ``"not smooth"`` (a kink or a jump is so near
    that differences say nothing, or a loop does not end beside the arguments), ``"not judged"``
    (rounding leaves too little of one of the numbers, as where something cancels), ``"none"``
    (there is no such derivative, or none that differences give; `got` is NaN) or
    ``"deliberate"``; `note` says why there is none. Of a `stop_gradient` that was declared nothing
    is compared, and `mode` is empty. `origin` is the user's line of a rule's call, `defined` where
    the rule is.
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

    def __str__(self) -> str:
        defined = f" (defined at {self.defined})" if self.defined else ""
        said = self.note or f"expected {self.expected:.6g}, got {self.got:.6g}"
        which = f", order {self.order}, {self.mode}" if self.mode else ""
        return f"{self.what}{at(self.origin)}{defined}{which}: {said}"


@dataclass(frozen=True, repr=False)
class GradCheck:
    """What `check_grads` compared: `rules` each on its own, then the whole function's `leaves`;
    `note` says why it was not traced in double precision."""

    function: str
    rules: tuple[Checked, ...]
    leaves: tuple[Checked, ...]
    note: str = ""

    @property
    def wrong(self) -> tuple[Checked, ...]:
        """What failed, rules first: a wrong rule is why a leaf is wrong."""
        return tuple(c for c in (*self.rules, *self.leaves) if c.status == "wrong")

    @property
    def deliberate(self) -> tuple[Checked, ...]:
        """The rules that differ from the derivative and were declared to."""
        return tuple(c for c in self.rules if c.status == "deliberate")

    @property
    def _verdict(self) -> str:
        statuses = [c.status for c in (*self.rules, *self.leaves)]
        unjudged = sum(status in ("not smooth", "not judged") for status in statuses)
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
            name = "" if check.status in ("right", "wrong") else f" [{check.status}]"
            lines.append(f"{marks.get(check.status, '?')} {check}{name}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return folding.of_text(str(self))
