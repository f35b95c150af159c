"""Finds the operation that made a NaN or Inf of finite numbers, in the reverse or forward pass."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining import by_rule
from tracegrad.insight.explaining.detail import PREPARING
from tracegrad.insight.explaining.observed import Observed, Place
from tracegrad.insight.explaining.statistics import (
    EDGE_GIVEN,
    EDGE_INF,
    EDGE_NAN,
    EDGE_OPERANDS,
    GREATEST,
    INF,
    LEAST,
    NAN,
    exact,
)
from tracegrad.insight.explaining.visits import is_entered
from tracegrad.insight.explanation import number_text
from tracegrad.ir import Atom, CustomGradient, Literal, Occurrence, Value, operations
from tracegrad.ir.inlined import inside, inside_result, onward, outside
from tracegrad.ir.occurrence import Path

# Operations that sum nothing: an element of the result depends on one element of each operand.
_ONE_FOR_ONE = (operations.BY_ELEMENT | operations.VIEWS) - operations.ADDITIVE.keys()


@dataclass(frozen=True)
class Culprit:
    """The node at which something finite became NaN or Inf."""

    place: Place
    kind: str  # "NaN" or "Inf"
    operands: tuple[float, ...] = ()  # their values at the first NaN or Inf; NaN: not known
    given: float = math.nan  # the cotangent that came in there; NaN: not known


# --------------------------------------------------------------------------------- the reverse pass


def backward_culprit(
    observed: Observed, path: Path = (), steps: tuple[int, ...] = ()
) -> Culprit | None:
    """Finds the first VJP of the reverse pass that makes NaN or Inf of finite cotangents, in the
    region at a path, at some steps of the scans around the region."""
    for node in reversed(observed.region(path).nodes):
        place = Place(Occurrence(path, node), steps)
        if is_entered(node):
            for name in node.regions:
                inner = place.occurrence.into(name)
                more = steps
                if node.primitive is _jax.SCAN:
                    step = _first_bad_step(observed, inner, steps, not node.params["reverse"])
                    if step is None:
                        continue
                    more = (*steps, step)
                if (found := backward_culprit(observed, inner, more)) is not None:
                    return found
        elif (found := _bad_edge(observed, place)) is not None:
            return _inside_of_rule(observed, place) or found
    return None


def _bad_edge(observed: Observed, place: Place) -> Culprit | None:
    """Returns a culprit if the VJP of a node makes NaN or Inf of finite cotangents."""
    node = place.node
    for i in range(len(node.inputs)):
        edge = observed.get("edge", place, i)
        if edge is not None and edge[EDGE_NAN] + edge[EDGE_INF] > 0:
            given = observed.of_results("ct", place)
            if any(ct is not None and not _is_finite(ct) for ct in given):
                return None
            kind = "NaN" if edge[EDGE_NAN] else "Inf"
            if node.op in operations.CONTRACTIONS:  # an element is a sum: no operand to show
                return Culprit(place, kind)
            operands = tuple(map(float, edge[EDGE_OPERANDS:][: len(node.inputs)]))
            return Culprit(place, kind, operands, float(edge[EDGE_GIVEN]))
    return None


def _inside_of_rule(observed: Observed, place: Place) -> Culprit | None:
    """Finds the culprit inside of a custom rule that returned NaN or Inf; None if not known."""
    node = place.node
    if not isinstance(node, CustomGradient):
        return None
    for name in node.face_names:
        path = place.occurrence.into(name)
        if not any(o is not None and _lies_in(o, path) for _, o, _ in observed.stats):
            continue
        if name == "jvp":
            return backward_culprit(observed, path, place.steps)
        within = Place(Occurrence(path, node), place.steps)
        return first_culprit(observed, within, observed.region(path).outputs, (NAN, INF))
    return None


def is_all_of_its_rule(observed: Observed, place: Place) -> bool:
    """Whether the backward of a rule adds nothing finite to the NaNs and Infs that it makes.

    A backward that recomputes its function sums the contributions of several uses of a value. A
    result that is not finite then has finite terms, which a cure of the whole rule would discard.
    """
    rule = by_rule.outermost_rule(place.occurrence)
    path = rule.into("backward")
    if rule is place.occurrence or not _lies_in(place.occurrence, path):
        return False
    outs = observed.region(path).outputs
    for which in (NAN, INF):
        pending = [_maker(observed, path, place.steps, out, which) for out in outs]
        while pending:
            maker = pending.pop()
            if not isinstance(maker, _Made) or not _is_bad(observed, maker, which):
                continue
            bad = _bad_makers(observed, maker.place, which)
            through = maker.place.node.op in _ONE_FOR_ONE
            if bad and not (through and len(maker.place.steps) == len(place.steps)):
                return False
            pending += bad
    return True


def _lies_in(occurrence: Occurrence, path: Path) -> bool:
    return occurrence.path[: len(path)] == path


def _first_bad_step(
    observed: Observed, path: Path, steps: tuple[int, ...], last_first: bool
) -> int | None:
    """Returns the first step of the reverse pass over a scan at which a VJP returns NaN or Inf."""
    bad: Any = None
    for occurrence, _, stat in observed.of("edge"):
        if _lies_in(occurrence, path):
            here = stat[steps]
            here = (here[..., EDGE_NAN] + here[..., EDGE_INF]) > 0
            here = here.any(axis=tuple(range(1, here.ndim)))
            bad = here if bad is None else bad | here
    if bad is None or not bad.any():
        return None
    where = np.flatnonzero(bad)
    return int(where[-1] if last_first else where[0])


def _is_finite(stat: np.ndarray[Any, Any]) -> bool:
    return bool(np.all(stat[..., NAN] + stat[..., INF] == 0)) or bool(np.isnan(stat).all())


# --------------------------------------------------------------------------------- the forward pass


@dataclass(frozen=True)
class FromOutside:
    """A NaN or Inf that no operation made: it is in an input of the graph, or in a constant."""

    index: int | None  # the index of the input
    constant: Any = None  # an array or a number of the program
    user: Occurrence | None = None  # an operation that uses it


def forward_culprit(
    observed: Observed, path: Path, steps: tuple[int, ...], value: Atom, which: int
) -> Culprit | FromOutside | None:
    """Follows a NaN (or Inf) from a value back to the node that made it.

    Returns None if the value has no NaN (or Inf). `which`: `NAN` or `INF`.
    """
    maker, user, choice = _maker(observed, path, steps, value, which), None, None
    if not _is_bad(observed, maker, which):
        return None
    while isinstance(maker, _Made):
        place = maker.place
        bad = _bad_makers(observed, place, which)
        if not bad:
            return Culprit(place, "NaN" if which == NAN else "Inf")
        if place.node.op == "select_n":
            choice = place
        computed = (each for each in bad if which == INF and not _is_constant(observed, each))
        user, maker = place.occurrence, next(computed, bad[0])  # a constant may not be chosen
    decided = _nan_that_decides(observed, choice) if choice and maker.index is None else None
    return decided or dataclasses.replace(maker, user=user)


def _is_constant(observed: Observed, maker: _Made | FromOutside) -> bool:
    while isinstance(maker, _Made) and maker.place.node.op in PREPARING:
        maker = _makers(observed, maker.place)[0]
    return isinstance(maker, FromOutside)


def _nan_that_decides(observed: Observed, choice: Place) -> Culprit | None:
    """Returns the node that made a NaN for which a `where` chooses a constant, as -inf."""
    pending, seen = _makers(observed, choice)[:1], set[_Made]()
    while pending:
        maker = pending.pop()
        if isinstance(maker, _Made) and maker not in seen:
            seen.add(maker)
            place = maker.place
            if not _jax.has_gradient(place.node.outputs[maker.k].aval):
                if found := first_culprit(observed, place, place.node.inputs, (NAN,)):
                    return found
                pending += _makers(observed, place)
    return None


def first_culprit(
    observed: Observed, place: Place, values: Iterable[Atom], kinds: Sequence[int]
) -> Culprit | None:
    """Returns the node that made a NaN or Inf in one of some values of the region of a place; None
    if no node made one.

    `kinds`: `NAN` and `INF`, in the order in which they are looked for."""
    for which, value in itertools.product(kinds, values):
        found = forward_culprit(observed, place.path, place.steps, value, which)
        if isinstance(found, Culprit):
            return found
    return None


@dataclass(frozen=True)
class _Made:
    """The result number `k` of a node."""

    place: Place
    k: int


def _is_bad(observed: Observed, maker: _Made | FromOutside, which: int) -> bool:
    """Whether a value has a NaN (or Inf)."""
    stat = _statistic(observed, maker)
    return stat is not None and bool(stat.reshape(-1, stat.shape[-1])[0, which] > 0)


def _statistic(observed: Observed, maker: _Made | FromOutside) -> np.ndarray[Any, Any] | None:
    """Returns the `exact` statistic of a value; None if it was not measured."""
    if isinstance(maker, _Made):
        return observed.get("value", maker.place, maker.k)
    if maker.index is not None:
        return observed.stats.get(("input", None, maker.index))
    is_number = np.ndim(maker.constant) == 0 or _jax.has_gradient(maker.constant)
    return np.asarray(exact(maker.constant)) if maker.constant is not None and is_number else None


def _makers(observed: Observed, place: Place, which: int = NAN) -> list[_Made | FromOutside]:
    """Returns the origin of each operand of a node."""
    return [_maker(observed, place.path, place.steps, v, which) for v in place.node.inputs]


def _bad_makers(observed: Observed, place: Place, which: int) -> list[_Made | FromOutside]:
    """Returns the origins of the operands of a node that have a NaN (or Inf)."""
    return [each for each in _makers(observed, place, which) if _is_bad(observed, each, which)]


def _maker(
    observed: Observed, path: Path, steps: tuple[int, ...], value: Atom, which: int
) -> _Made | FromOutside:
    """Returns the operation that computed a value (followed into and out of regions), or the input
    or constant that the value is.

    `steps`: the steps of the scans around the value, from the outermost scan on. If the step of an
    inner scan is left out, the returned place leaves it out as well.
    """
    gone_round: set[Path] = set()
    while True:
        region = observed.region(path)
        if isinstance(value, Literal):
            return FromOutside(None, value.val)
        if value in region.constants:
            return FromOutside(None, region.constants[value])
        knows_each_step = len(steps) == sum(node.primitive is _jax.SCAN for node, _ in path)
        node = region.producers.get(value)
        if node is not None:
            place = Place(Occurrence(path, node), steps)
            is_scan = node.primitive is _jax.SCAN
            k = node.outputs.index(value)
            if not is_entered(node):
                return _Made(place, k)
            if is_scan and node.params["length"] == 0:
                first, count = _jax.scan_split(node.params)
                if k >= count:  # a stacked result is empty
                    return _Made(place, k)
                value = node.inputs[first + k]
                continue
            ran = observed.branches(place) if node.primitive is _jax.COND else []
            path, value = inside_result(place.occurrence, value, next(iter([*ran, *node.regions])))
            if is_scan and knows_each_step:
                steps = (*steps, _bad_value_step(observed, path, steps, value, which))
            continue
        around = outside(path, value) if path else []
        if not around:
            return FromOutside(None if path else region.inputs.index(value))
        outer, *before = around
        call = path[-1][0]
        if call.primitive is _jax.SCAN and not knows_each_step:
            path, value = outer if path in gone_round else around[-1]
            gone_round.add(path)
            continue
        if call.primitive is _jax.SCAN:
            previous = steps[-1] + (1 if call.params["reverse"] else -1)
            steps = steps[:-1]
            if before and 0 <= previous < call.params["length"]:
                value, steps = before[0][1], (*steps, previous)
                continue
        path, value = outer


def _bad_value_step(
    observed: Observed, path: Path, steps: tuple[int, ...], value: Atom, which: int
) -> int:
    """Returns the first step of a scan at which a value of its body has a NaN (or Inf); the last
    step if there is none."""
    scan = path[-1][0]
    order = list(range(int(scan.params["length"])))
    if scan.params["reverse"]:
        order.reverse()
    for step in order:
        if isinstance(value, Value) and value in observed.region(path).producers:
            inner = _maker(observed, path, (*steps, step), value, which)
            if _is_bad(observed, inner, which):
                return step
    return order[-1] if order else 0


# ----------------------------------------------------------------------------------- the neighbours


def operand_ranges(observed: Observed, place: Place) -> str:
    """Returns the range of each operand of a node as text: ``-2 to 3 and 0``."""
    ranges = []
    for value in place.node.inputs:
        stat = operand_statistic(observed, place, value)
        if stat is not None and stat.ndim == 1:  # a statistic of one run
            low, high = (number_text(float(stat[k])) for k in (LEAST, GREATEST))
            ranges.append(low if stat[LEAST] == stat[GREATEST] else f"{low} to {high}")
    return " and ".join(ranges)


def operand_statistic(
    observed: Observed, place: Place, operand: Atom
) -> np.ndarray[Any, Any] | None:
    """Returns the `exact` statistic of an operand of a node; None if it was not measured."""
    region = observed.region(place.path)
    if isinstance(operand, Value) and (node := region.producers.get(operand)) is not None:
        # If the node is entered, it may have been measured without its regions.
        made = Place(Occurrence(place.path, node), place.steps)
        whole = observed.get("value", made, node.outputs.index(operand))
        if whole is not None:
            return whole
    return _statistic(observed, _maker(observed, place.path, place.steps, operand, NAN))


def largest_in(stat: np.ndarray[Any, Any] | None) -> float:
    """Returns the largest absolute value in the arrays with an `exact` statistic; NaN for None."""
    if stat is None:
        return math.nan
    return max(-float(np.min(stat[..., LEAST])), float(np.max(stat[..., GREATEST])))


def has_inf(observed: Observed, place: Place) -> bool:
    """Whether a result of a node has an Inf."""
    values = observed.of_results("value", place)
    return any(value is not None and bool(np.any(value[..., INF] > 0)) for value in values)


def makers(observed: Observed, place: Place) -> list[str]:
    """Returns the names of the operations that made the operands of a node ("": none did)."""
    found = _makers(observed, place)
    return [maker.place.node.op if isinstance(maker, _Made) else "" for maker in found]


def users(observed: Observed, place: Place, *, of_inf: bool = False) -> list[str]:
    """Returns the names of operations that use the results of a node, the nearest first. `of_inf`:
    only operations with a derivative that make finite numbers of what was Inf on the way."""
    names: list[str] = []
    values = [(place.path, v) for v in place.node.outputs]
    for _ in range(8):
        if not values:
            break
        path, value = values.pop(0)
        region = observed.region(path)
        for node in region.users.get(value, ()):
            user = Occurrence(path, node)
            goes_on = not of_inf or has_inf(observed, Place(user, place.steps))
            if not of_inf or not (goes_on or node.op in operations.COMPARISONS):
                names.append(node.op)
            if is_entered(node):
                values += inside(user, value)
            elif len(node.outputs) == 1 and goes_on:
                values.append((path, node.outputs[0]))
        if path:
            values += onward(path, value)
    return [name for name in names if name not in ("broadcast_in_dim", "reshape", "jit")]
