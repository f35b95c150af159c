"""What is said of a NaN or Inf: where it began, of what numbers, and the known cure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tracegrad.insight.explaining.culprits import (
    Culprit,
    Given,
    backward_culprit,
    forward_culprit,
    makers,
    users,
    value_statistic,
)
from tracegrad.insight.explaining.cures import backward_cure, forward_cure
from tracegrad.insight.explaining.measuring import Measured
from tracegrad.insight.explaining.observed import Observed, Spot
from tracegrad.insight.explaining.statistics import GREATEST, INF, LEAST, NAN
from tracegrad.insight.explanation import Finding, number_text
from tracegrad.ir import Graph, Literal, Occurrence, Value


def not_finite(
    observed: Observed,
    measured: Measured,
    program: Graph,
    sources: dict[str, int | None],
    targets: Sequence[int],
    others: Mapping[int, str],
) -> list[Finding]:
    stats = observed.stats
    names = {i: path for path, i in sources.items() if i is not None}
    touched = tuple(
        path
        for path, i in sources.items()
        if i is not None
        and (stat := stats.get(("source", (), 0, i))) is not None
        and stat[NAN] + stat[INF] > 0
    )
    found: list[Finding] = []
    for target in targets:
        out = stats.get(("output", (), 0, target))
        if out is not None and out[NAN] + out[INF] > 0:
            which = NAN if out[NAN] else INF
            culprit = forward_culprit(observed, (), (), program.outputs[target], which)
            found += _forward_findings(observed, culprit, which, names, others, touched)
    is_explained = bool(found)
    found += [
        _in_an_input("NaN", path, int(stat[NAN]), (path,))
        for i, path in names.items()
        if (stat := stats.get(("input", (), 0, i))) is not None and stat[NAN] > 0
    ]
    if not is_explained:  # nothing is wrong with the result: a NaN in an input is masked
        culprit_back = backward_culprit(observed)
        if culprit_back is not None:
            found.append(_backward_finding(observed, measured, culprit_back, touched))
        elif touched and not found:
            found.append(Finding("not finite", "it came in with the cotangent", touched))
    return found


def _forward_findings(
    observed: Observed,
    culprit: Culprit | Given | None,
    which: int,
    names: dict[int, str],
    others: Mapping[int, str],
    touched: tuple[str, ...],
) -> Iterator[Finding]:
    kind = "NaN" if which == NAN else "Inf"
    if isinstance(culprit, Given):
        if culprit.index is None:
            nodes = culprit.value.users if isinstance(culprit.value, Value) else ()
            origin = Occurrence((), nodes[0]).origin if nodes else None
            yield Finding(
                f"{kind} in an input", f"the function closes over a {kind}", (), origin=origin
            )
            return
        path = names.get(culprit.index) or others.get(culprit.index, "that is not a source")
        count = int(observed.stats["input", (), 0, culprit.index][which])
        yield _in_an_input(kind, path, count, (path,) if culprit.index in names else touched)
        return
    if culprit is None:
        return
    spot = culprit.spot
    found = observed.occurrence(spot)
    node = found.node
    origin_of_inf = None
    if which == NAN:  # of an Inf, perhaps, that was made before
        for value in node.inputs:
            made = forward_culprit(observed, spot.at, spot.steps, value, INF)
            if isinstance(made, Culprit):
                origin_of_inf = made
                break
    words = f"{node.name} makes {kind} in the forward pass"
    operands = _operand_ranges(observed, spot)
    if operands:
        words += f" of {operands}"
    cure = forward_cure(node.op, makers(observed, spot), users(observed, spot))
    if origin_of_inf is not None:
        first = observed.occurrence(origin_of_inf.spot)
        ranges = _operand_ranges(observed, origin_of_inf.spot)
        place = f" at {first.origin.place}" if first.origin else ""
        yield Finding(
            "Inf in the forward pass",
            f"{first.node.name} makes Inf of {ranges}, and {node.name}"
            f"{f' at {found.origin.place}' if found.origin else place} makes NaN of that",
            touched,
            origin=first.origin,
            cure=forward_cure(
                first.node.op,
                makers(observed, origin_of_inf.spot),
                users(observed, origin_of_inf.spot),
            ),
            operation=first.node.op,
            step=origin_of_inf.spot.steps[0] if origin_of_inf.spot.steps else None,
            occurrence=first,
        )
        return
    yield Finding(
        f"{kind} in the forward pass",
        words,
        touched,
        origin=found.origin,
        cure=cure,
        operation=node.op,
        step=spot.steps[0] if spot.steps else None,
        occurrence=found,
    )


def _in_an_input(kind: str, path: str, count: int, sources: tuple[str, ...]) -> Finding:
    words = f"the argument {path} has {count} {kind}{'s' * (count != 1)} already"
    return Finding(f"{kind} in an input", words, sources)


def _backward_finding(
    observed: Observed, measured: Measured, culprit: Culprit, touched: tuple[str, ...]
) -> Finding:
    found = observed.occurrence(culprit.spot)
    node = found.node
    made_by, used_by = makers(observed, culprit.spot), users(observed, culprit.spot)
    known = [x for x in culprit.operands if not math.isnan(x)]
    at = f" at {', '.join(number_text(x) for x in known)}" if known else ""
    faces = [k for k, (_, name) in enumerate(culprit.spot.at) if name in ("backward", "jvp")]
    inside, origin = "", found.origin
    if faces:
        outer, (number, _) = culprit.spot.at[: faces[0]], culprit.spot.at[faces[0]]
        inside = f"in the rule of {found.path[faces[0]][0].name} "
        origin = measured.measured.lines.get((outer, number), origin)
    if math.isnan(culprit.given) or inside:
        through = ""
    elif culprit.given == 0:
        through = ", where the cotangent that comes in is 0: something masks it, and 0 * inf is NaN"
    else:
        through = f", of a cotangent {number_text(culprit.given)}"
    return Finding(
        f"{culprit.kind} in the reverse pass",
        f"{inside}{'' if inside else 'the derivative of '}{node.name}{at} is not finite{through}"
        + _made_before(observed, culprit),
        touched,
        origin=origin,
        cure=backward_cure(node.op, culprit.operands, culprit.given, made_by, used_by),
        operation=node.op,
        operands=culprit.operands,
        step=culprit.spot.steps[0] if culprit.spot.steps else None,
        occurrence=found,
    )


def _made_before(observed: Observed, culprit: Culprit) -> str:
    """Which operation of the forward pass made the Inf that an operand is."""
    spot = culprit.spot
    for value, x in zip(observed.node(spot).inputs, culprit.operands, strict=False):
        if math.isinf(x):  # a NaN stands for what is not known
            made = forward_culprit(observed, spot.at, spot.steps, value, INF)
            if isinstance(made, Culprit):
                found = observed.occurrence(made.spot)
                place = f" at {found.origin.place}" if found.origin else ""
                return f"; {found.node.name}{place} made the Inf"
    return ""


def _operand_ranges(observed: Observed, spot: Spot) -> str:
    from_values = []
    for value in observed.node(spot).inputs:
        if isinstance(value, Literal):
            from_values.append(number_text(float(np.asarray(value.value).ravel()[0].real)))
            continue
        stat = value_statistic(observed, spot, value)
        if stat is not None:
            low, high = float(stat[LEAST]), float(stat[GREATEST])
            from_values.append(
                number_text(low) if low == high else f"{number_text(low)} to {number_text(high)}"
            )
    return " and ".join(from_values)
