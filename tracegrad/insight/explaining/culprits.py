"""Which operation made a NaN or Inf of finite numbers, in the reverse or in the forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining.measuring import Steps, is_entered
from tracegrad.insight.explaining.observed import Observed, Spot, call_of, handed_on, inside
from tracegrad.insight.explaining.statistics import (
    EDGE_GIVEN,
    EDGE_INF,
    EDGE_NAN,
    EDGE_OPERANDS,
    INF,
    NAN,
)
from tracegrad.ir import CustomGradient, Graph, Literal, Node, Value


@dataclass(frozen=True)
class Culprit:
    """The node at which something finite became NaN or Inf."""

    spot: Spot
    kind: str  # "NaN" or "Inf"
    operands: tuple[float, ...] = ()  # there, where the first one stands; NaN: not known
    given: float = math.nan  # the cotangent there


# --------------------------------------------------------------------------------- the reverse pass


def backward_culprit(observed: Observed) -> Culprit | None:
    """The first VJP of the reverse pass that makes NaN or Inf of finite cotangents."""
    return _search(observed, observed.graph, (), ())


def _search(observed: Observed, graph: Graph, at: Steps, steps: tuple[int, ...]) -> Culprit | None:
    for number in range(len(graph.nodes) - 1, -1, -1):
        node, spot = graph.nodes[number], Spot(at, number, steps)
        if is_entered(node):
            for name, region in node.regions.items():
                inside = (*at, (number, name))
                more = steps
                if node.primitive is _jax.SCAN:
                    step = _first_bad_step(observed, inside, steps, not node.params["reverse"])
                    if step is None:
                        continue
                    more = (*steps, step)
                if (found := _search(observed, region, inside, more)) is not None:
                    return found
        elif (found := _bad_edge(observed, spot, node)) is not None:
            return _inside_of_rule(observed, spot, node) or found
    return None


def _bad_edge(observed: Observed, spot: Spot, node: Node) -> Culprit | None:
    given = [observed.get("ct", spot, k) for k in range(len(node.outputs))]
    if any(ct is not None and not _is_finite(ct) for ct in given):
        return None
    for i in range(len(node.inputs)):
        edge = observed.get("edge", spot, i)
        if edge is not None and edge[EDGE_NAN] + edge[EDGE_INF] > 0:
            kind = "NaN" if edge[EDGE_NAN] else "Inf"
            there = zip(node.inputs, edge[EDGE_OPERANDS:], strict=False)
            operands = tuple(_literal_or(value, float(x)) for value, x in there)
            return Culprit(spot, kind, operands, float(edge[EDGE_GIVEN]))
    return None


def _literal_or(value: Value | Literal, x: float) -> float:
    if isinstance(value, Literal) and np.ndim(value.value) == 0:
        return float(np.asarray(value.value))
    return x


def _inside_of_rule(observed: Observed, spot: Spot, node: Node) -> Culprit | None:
    if not isinstance(node, CustomGradient):
        return None
    inside = ((*spot.at, (spot.number, name)) for name in node.face_names)
    for at in inside:
        if not any(key[1][: len(at)] == at for key in observed.stats):
            continue
        region = observed.region(at)
        if at[-1][1] == "jvp":
            return _search(observed, region, at, spot.steps)
        for which in (NAN, INF):
            for out in region.outputs:
                found = forward_culprit(observed, at, spot.steps, out, which)
                if isinstance(found, Culprit):
                    return found
    return None


def _first_bad_step(
    observed: Observed, inside: Steps, steps: tuple[int, ...], last_first: bool
) -> int | None:
    bad: Any = None
    for (kind, at, _, _), stat in observed.stats.items():
        if kind == "edge" and at[: len(inside)] == inside:
            here = stat[steps]
            here = (here[..., EDGE_NAN] + here[..., EDGE_INF]) > 0
            here = here.reshape(here.shape[0], -1).any(axis=1)
            bad = here if bad is None else bad | here
    if bad is None or not bad.any():
        return None
    where = np.flatnonzero(bad)
    return int(where[-1] if last_first else where[0])


def _is_finite(stat: np.ndarray[Any, Any]) -> bool:
    return bool(np.all(stat[..., NAN] + stat[..., INF] == 0)) or bool(np.isnan(stat).all())


# --------------------------------------------------------------------------------- the forward pass


@dataclass(frozen=True)
class Given:
    """Where a NaN or Inf was from the start: an input of the graph, or what it closes over."""

    index: int | None  # of the input
    value: Value | Literal


def forward_culprit(
    observed: Observed, at: Steps, steps: tuple[int, ...], value: Value | Literal, which: int
) -> Culprit | Given | None:
    """Follows a NaN (or Inf) from a value back to the node that made it.

    None if the value has none.
    """
    place = _resolve(observed, at, steps, value, which)
    if not _is_bad(observed, place, which):
        return None
    while isinstance(place, _Made):
        node = observed.node(place.spot)
        causes = [
            _resolve(observed, place.spot.at, place.spot.steps, v, which) for v in node.inputs
        ]
        bad = [cause for cause in causes if _is_bad(observed, cause, which)]
        if not bad:
            return Culprit(place.spot, "NaN" if which == NAN else "Inf")
        place = bad[0]
    return place


@dataclass(frozen=True)
class _Made:
    spot: Spot
    k: int

    def stat(self, observed: Observed) -> np.ndarray[Any, Any]:
        found = observed.get("value", self.spot, self.k)
        return np.zeros(6) if found is None else found.reshape(-1, found.shape[-1])[0]


def _is_bad(observed: Observed, place: _Made | Given, which: int) -> bool:
    if isinstance(place, _Made):
        return bool(place.stat(observed)[which] > 0)
    if place.index is not None:
        stat = observed.stats.get(("input", (), 0, place.index))
        return stat is not None and bool(stat[which] > 0)
    array = (
        place.value.value
        if isinstance(place.value, Literal)
        else place.value.graph.constants.get(place.value)
    )
    if array is None or (not _jax.has_gradient(array) and not isinstance(array, float)):
        return False
    test = np.isnan if which == NAN else np.isinf
    return bool(np.any(test(np.asarray(array, np.complex128))))


def _resolve(
    observed: Observed, at: Steps, steps: tuple[int, ...], value: Value | Literal, which: int
) -> _Made | Given:
    """The operation that made a value, through the boundaries of regions."""
    while True:
        if isinstance(value, Literal) or value in value.graph.constants:
            return Given(None, value)
        node = value.producer
        if node is None:
            index = value.graph.inputs.index(value)
            if not at or at[-1][1] in ("backward", "forward", "jvp"):
                return Given(None if at else index, value)
            call = call_of(at)
            enclosing = observed.node(call)
            if enclosing.primitive is _jax.SCAN:
                first, count = _jax.scan_split(enclosing.params)
                previous = steps[-1] + (1 if enclosing.params["reverse"] else -1)
                if first <= index < first + count and 0 <= previous < enclosing.params["length"]:
                    value, steps = value.graph.outputs[index - first], (*steps[:-1], previous)
                    continue
                steps = steps[:-1]
            at, value = call.at, handed_on(enclosing)[index]
            continue
        spot = Spot(at, value.graph.nodes.index(node), steps)
        k = node.outputs.index(value)
        if not is_entered(node):
            return _Made(spot, k)
        name = next(iter(node.regions))
        if node.primitive is _jax.COND:
            name = next(iter(observed.branches(spot)), name)
        at = (*at, (spot.number, name))
        value = node.regions[name].outputs[k]
        if node.primitive is _jax.SCAN:
            steps = (*steps, _bad_value_step(observed, node, at, steps, value, which))


def _bad_value_step(
    observed: Observed,
    node: Node,
    at: Steps,
    steps: tuple[int, ...],
    value: Value | Literal,
    which: int,
) -> int:
    """The first step of a scan at which a value of its body is bad; the last one if none is."""
    length = int(node.params["length"])
    order = list(range(length))
    if node.params["reverse"]:
        order.reverse()
    for step in order:
        if isinstance(value, Value) and value.producer is not None:
            inner = _resolve(observed, at, (*steps, step), value, which)
            if _is_bad(observed, inner, which):
                return step
    return order[-1] if order else 0


# ---------------------------------------------------------------------------------------- beside it


def value_statistic(observed: Observed, spot: Spot, value: Value) -> np.ndarray[Any, Any] | None:
    """The exact statistic of an operand of a node."""
    place = _resolve(observed, spot.at, spot.steps, value, NAN)
    if isinstance(place, _Made):
        found = observed.get("value", place.spot, place.k)
        return None if found is None or found.ndim != 1 else found
    return None if place.index is None else observed.stats.get(("input", (), 0, place.index))


def makers(observed: Observed, spot: Spot) -> list[str]:
    """The operations that made the operands of a node."""
    names = []
    for value in observed.node(spot).inputs:
        place = _resolve(observed, spot.at, spot.steps, value, NAN)
        names.append(observed.node(place.spot).op if isinstance(place, _Made) else "")
    return names


def users(observed: Observed, spot: Spot) -> list[str]:
    """The operations that use the results of a node, near first."""
    names: list[str] = []
    values = [(spot.at, v) for v in observed.node(spot).outputs]
    for _ in range(8):
        if not values:
            break
        at, value = values.pop(0)
        for node in value.users:
            names.append(node.op)
            if is_entered(node):
                values += inside(Spot(at, value.graph.nodes.index(node)), node, value)
            elif len(node.outputs) == 1:
                values.append((at, node.outputs[0]))
        if at and value in value.graph.outputs:
            call = call_of(at)
            results = observed.node(call).outputs
            k = value.graph.outputs.index(value)
            if k < len(results):
                values.append((call.at, results[k]))
    return [name for name in names if name not in ("broadcast_in_dim", "reshape", "jit")]
