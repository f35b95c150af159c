"""What the measured numbers mean: where a gradient is cut, dies, turns NaN, shrinks or was changed.

Each question has a function here that looks at a graph and at what `explain_pass` measured in it,
and answers with a node, an operand and, in a scan, a step.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Cut
from tracegrad.insight.explain_pass import Key, Steps, is_entered, occurrence
from tracegrad.insight.explain_statistics import OPERANDS
from tracegrad.ir import CustomGradient, Graph, Literal, Node, Occurrence, StopGradient, Value
from tracegrad.ir.occurrence import is_own_file, is_user_file

NAN, INF = 2, 3  # where an exact statistic has the numbers of NaNs and Infs

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "is_finite"})
_CHOICES = frozenset({"argmax", "argmin", "sort", "top_k", "approx_top_k"})
_ROUNDINGS = frozenset({"floor", "ceil", "round", "sign", "nextafter"})
_HOST = frozenset({"pure_callback", "io_callback", "debug_callback"})


@dataclass(frozen=True)
class Observed:
    """A graph and what was measured in it, by the number of its nodes."""

    graph: Graph
    stats: Mapping[Key, np.ndarray[Any, Any]]

    def get(self, kind: str, spot: Spot, k: int = 0) -> np.ndarray[Any, Any] | None:
        """A statistic at a place and, in a scan, at its step (all steps if it has none)."""
        stat = self.stats.get((kind, spot.at, spot.number, k))
        return None if stat is None else stat[spot.steps]

    def node(self, spot: Spot) -> Node:
        return occurrence(self.graph, spot.at, spot.number).node

    def occurrence(self, spot: Spot) -> Occurrence:
        return occurrence(self.graph, spot.at, spot.number)

    def region(self, at: Steps) -> Graph:
        graph = self.graph
        for number, name in at:
            graph = graph.nodes[number].region(name)
        return graph


@dataclass(frozen=True)
class Spot:
    """A node by numbers: the way to its graph, its place there, and the steps of the scans."""

    at: Steps
    number: int
    steps: tuple[int, ...] = ()


# --------------------------------------------------------------------------------------- cut off


def cause_of_cut(cut: Cut) -> str:
    """The class of what cuts: one word or two."""
    node = cut.occurrence.node
    if isinstance(node, StopGradient):
        return "stop_gradient"
    if isinstance(node, CustomGradient):
        return "custom rule"
    if node.op in _HOST:
        return "host conversion"
    if node.op in ("convert_element_type", "bitcast_convert_type") or _called(node, "astype"):
        return "cast"
    if node.op in _CHOICES:
        return "argmax"
    if node.op in _COMPARISONS:
        return "comparison"
    if node.op in _ROUNDINGS:
        return "rounding"
    return "zero derivative"


def whose(occurrence: Occurrence) -> str:
    """Who wrote an annotation: ``"yours"``, or the library's name.

    The function of the annotation itself is not asked, but the one that called it.
    """
    node = occurrence.node
    stack = () if node.source is None else _jax.frames(node.source.info)
    if isinstance(node, StopGradient):
        stack = _above_stop_gradient(stack)
        if stack and is_own_file(stack[0].file_name):
            return "jax"
    for frame in stack:
        if is_user_file(frame.file_name):
            return "yours"
        if not is_own_file(frame.file_name):
            return _package(frame.file_name)
    return "yours"


def _above_stop_gradient(stack: Sequence[Any]) -> Sequence[Any]:
    """The frames around the call of `stop_gradient`, and of a `tree_map` of it."""
    names = [str(f.function_name) if is_own_file(f.file_name) else "" for f in stack]
    is_its = ["stop_gradient" in name for name in names]
    if True not in is_its:
        return stack
    end = is_its.index(True)
    while end < len(stack) and (is_its[end] or re.match(r"tree_map|map$", names[end])):
        end += 1
    return stack[end:]


def _called(node: Node, function: str) -> bool:
    if node.source is None:
        return False
    for frame in _jax.frames(node.source.info):
        if not is_own_file(frame.file_name):
            return False
        if frame.function_name.rsplit(".", 1)[-1] in (function, f"_{function}"):
            return True
    return False


def _package(file: str) -> str:
    match = re.search(r"(?:site|dist)-packages[\\/]([^\\/]+)", file)
    return match[1].removesuffix(".py") if match else "a library"


# ------------------------------------------------------------------------------------- all zeros


@dataclass(frozen=True)
class Killer:
    """A node that turns a cotangent that is there into zeros."""

    spot: Spot
    cause: str


def killers(observed: Observed, source: int) -> list[Killer]:
    """The nodes at which the gradient of a source, connected but zero, becomes zero."""
    found: dict[Killer, None] = {}
    pending: list[tuple[Steps, Value]] = [((), observed.graph.inputs[source])]
    seen = set()
    while pending:
        at, value = pending.pop()
        if (at, value) in seen:
            continue
        seen.add((at, value))
        for node in value.users:
            spot = Spot(at, value.graph.nodes.index(node))
            given = [observed.get("ct", spot, k) for k in range(len(node.outputs))]
            if all(ct is None for ct in given):
                continue
            if not any(ct is not None and not _is_zero(ct) for ct in given):
                pending += [(at, out) for out in node.outputs]
            elif not is_entered(node):
                found[Killer(spot, _why_zero(observed, spot, value))] = None
            else:
                inside = list(_inside(observed, spot, node, value))
                pending += [(*entry,) for entry in inside if entry is not None]
                if None in inside:
                    found[Killer(spot, "untaken branch")] = None
        pending += _outside(observed, at, value)
    return list(found)


def _is_zero(stat: np.ndarray[Any, Any]) -> bool:
    """Whether a cotangent was zero wherever it was computed. (Its square may underflow.)"""
    norms = stat[..., 0]
    return bool(np.all((norms == 0) | np.isnan(norms)))


def _inside(
    observed: Observed, spot: Spot, node: Node, value: Value
) -> Iterator[tuple[Steps, Value] | None]:
    """Where a value stands inside of a node's regions; None in a branch that was not taken."""
    shift = 0
    taken: set[int] | None = None
    if node.primitive is _jax.COND:
        shift = 1
        index = observed.get("branch", spot)
        assert index is not None
        taken = {int(np.clip(i, 0, len(node.regions) - 1)) for i in index.ravel()}
    for k, (name, region) in enumerate(node.regions.items()):
        for i, operand in enumerate(node.inputs[shift:]):
            if operand is value:
                inner = region.inputs[i]
                if taken is None or k in taken:
                    yield (*spot.at, (spot.number, name)), inner
                elif inner.users or inner in region.outputs:
                    yield None


def _outside(observed: Observed, at: Steps, value: Value) -> Iterator[tuple[Steps, Value]]:
    """The results of the enclosing node that a value is, whose cotangents are zero; in a scan
    also what it is in the next step."""
    if not at:
        return
    *outer, (number, name) = at
    node = observed.region(tuple(outer)).nodes[number]
    for k, out in enumerate(value.graph.outputs):
        if out is value and k < len(node.outputs):
            ct = observed.get("ct", Spot(tuple(outer), number), k)
            if ct is None or _is_zero(ct):
                yield tuple(outer), node.outputs[k]
            if node.primitive is _jax.SCAN:
                first, count = _jax.scan_split(node.params)
                if k < count:
                    yield at, node.regions[name].inputs[first + k]


def _why_zero(observed: Observed, spot: Spot, value: Value) -> str:
    node = observed.node(spot)
    if node.op == "select_n":
        return "untaken branch"
    if isinstance(node, CustomGradient):
        return "dead units" if node.name == "relu" else "custom rule"
    if node.op in ("max", "min", "clamp"):
        units = observed.get("units", spot)
        return "dead units" if units is not None and units[..., 1].max() > 0 else "clipped"
    if node.op in ("mul", "dot_general", "conv_general_dilated", "div"):
        return "multiplied by zero"
    if node.op in ("gather", "scatter", "scatter-add", "dynamic_slice", "scatter_add"):
        return "index out of bounds"
    if node.op in ("tanh", "logistic", "exp", "erf", "exp2"):
        return "saturated"
    return "zero derivative"


# ------------------------------------------------------------------------------------ not finite


@dataclass(frozen=True)
class Culprit:
    """The node at which something finite became NaN or Inf."""

    spot: Spot
    kind: str  # "NaN" or "Inf"
    operands: tuple[float, ...] = ()  # there, where the first one stands; NaN: not known
    given: float = math.nan  # the cotangent there
    count: int = 0


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
        if edge is not None and edge[0] + edge[1] > 0:
            kind = "NaN" if edge[0] else "Inf"
            operands = tuple(float(x) for x in edge[5 : 5 + min(len(node.inputs), OPERANDS)])
            operands = tuple(
                float(np.asarray(v.value))
                if isinstance(v, Literal) and np.ndim(v.value) == 0
                else x
                for v, x in zip(node.inputs, operands, strict=False)
            )
            return Culprit(spot, kind, operands, float(edge[4]), int(edge[0] + edge[1]))
    return None


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
            for k, out in enumerate(region.outputs):
                found = forward_culprit(observed, at, spot.steps, out, which) if k >= 0 else None
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
            here = (here[..., 0] + here[..., 1]) > 0
            here = here.reshape(here.shape[0], -1).any(axis=1)
            bad = here if bad is None else bad | here
    if bad is None or not bad.any():
        return None
    where = np.flatnonzero(bad)
    return int(where[-1] if last_first else where[0])


def _is_finite(stat: np.ndarray[Any, Any]) -> bool:
    return bool(np.all(stat[..., NAN] + stat[..., INF] == 0)) or bool(np.isnan(stat).all())


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
            return Culprit(
                place.spot,
                "NaN" if which == NAN else "Inf",
                count=int(place.stat(observed)[which]),
            )
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
            *outer, (number, name) = at
            enclosing = observed.region(tuple(outer)).nodes[number]
            if enclosing.primitive is _jax.SCAN:
                first, count = _jax.scan_split(enclosing.params)
                previous = steps[-1] + (1 if enclosing.params["reverse"] else -1)
                if first <= index < first + count and 0 <= previous < enclosing.params["length"]:
                    value, steps = (
                        enclosing.regions[name].outputs[index - first],
                        (
                            *steps[:-1],
                            previous,
                        ),
                    )
                    continue
                steps = steps[:-1]
            shift = 1 if enclosing.primitive is _jax.COND else 0
            at, value = tuple(outer), enclosing.inputs[index + shift]
            continue
        spot = Spot(at, value.graph.nodes.index(node), steps)
        k = node.outputs.index(value)
        if not is_entered(node):
            return _Made(spot, k)
        name = next(iter(node.regions))
        if node.primitive is _jax.COND:
            index = int(np.ravel(observed.stats["branch", at, spot.number, 0][steps])[0])
            name = list(node.regions)[min(max(index, 0), len(node.regions) - 1)]
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
                number = value.graph.nodes.index(node)
                values += list(_inside_any(at, number, node, value))
            elif len(node.outputs) == 1:
                values.append((at, node.outputs[0]))
        if at and value in value.graph.outputs:
            *outer, (number, _) = at
            enclosing = observed.region(tuple(outer)).nodes[number]
            k = value.graph.outputs.index(value)
            if k < len(enclosing.outputs):
                values.append((tuple(outer), enclosing.outputs[k]))
    return [name for name in names if name not in ("broadcast_in_dim", "reshape", "jit")]


def _inside_any(at: Steps, number: int, node: Node, value: Value) -> Iterator[tuple[Steps, Value]]:
    shift = 1 if node.primitive is _jax.COND else 0
    for name, region in node.regions.items():
        for i, operand in enumerate(node.inputs[shift:]):
            if operand is value:
                yield (*at, (number, name)), region.inputs[i]


# -------------------------------------------------------------------------------- along the depth


@dataclass(frozen=True)
class Slope:
    """How the norm of the gradient changes along a stack of layers, or the steps of a scan."""

    name: str  # ``layers/*/kernel``, or the scan
    norms: tuple[float, ...]  # from the input's side to the output's
    spot: Spot | None = None  # of the scan

    @property
    def ratio(self) -> float:
        """The norm on the input's side by that on the output's."""
        return self.norms[0] / self.norms[-1] if self.norms[-1] else math.inf


FEWEST_LAYERS = 4
FEWEST_STEPS = 8
LAYER_LIMIT = 1e-4
STEP_LIMIT = 1e-8


def layer_slopes(norms: Mapping[str, float]) -> list[Slope]:
    """The norms of leaves whose paths differ in one number, in its order."""
    groups: dict[str, dict[int, float]] = defaultdict(dict)
    for path, norm in norms.items():
        for match in re.finditer(r"\d+", path):
            pattern = path[: match.start()] + "*" + path[match.end() :]
            groups[pattern][int(match[0])] = norm
    return [
        Slope(pattern, tuple(norm for _, norm in sorted(members.items())))
        for pattern, members in groups.items()
        if len(members) >= FEWEST_LAYERS
    ]


def step_slopes(observed: Observed) -> list[Slope]:
    """The norms of the carries of scans (outside of other scans), step by step."""
    found = []
    for (kind, at, number, j), stat in observed.stats.items():
        if kind == "carry" and stat.ndim == 2 and len(stat) >= FEWEST_STEPS:
            node = observed.region(at).nodes[number]
            norms = np.sqrt(stat[:, 0])
            if node.params["reverse"]:
                norms = norms[::-1]
            name = f"carry {j} of the {node.op}"
            found.append(Slope(name, tuple(map(float, norms)), Spot(at, number)))
    return found


def steepest(observed: Observed, shrinking: bool) -> Spot | None:
    """A node on the line that shrinks (or grows) cotangents the most, all its runs together."""
    totals: dict[str, float] = defaultdict(float)
    example: dict[str, Spot] = {}
    for (kind, at, number, k), stat in observed.stats.items():
        if kind != "ct" or k:
            continue
        spot = Spot(at, number)
        node = observed.node(spot)
        if is_entered(node):
            continue
        change = [
            c for value in node.inputs if (c := _change(observed, at, value, stat)) is not None
        ]
        origin = observed.occurrence(spot).origin
        if change and origin is not None:
            totals[origin.place] += max(change, key=abs)
            example.setdefault(origin.place, spot)
    if not totals:
        return None
    place = (min if shrinking else max)(totals, key=lambda p: totals[p])
    return example[place]


def _change(
    observed: Observed, at: Steps, value: Value | Literal, stat: np.ndarray[Any, Any]
) -> float | None:
    """The logarithm of the change of the cotangent's norm from a node's result to its operand."""
    while isinstance(value, Value) and value.producer is None and at:
        *outer, (number, _) = at
        enclosing = observed.region(tuple(outer)).nodes[number]
        if enclosing.primitive is _jax.SCAN or len(value.users) > 1:
            return None
        shift = 1 if enclosing.primitive is _jax.COND else 0
        if value not in value.graph.inputs:
            return None
        value = enclosing.inputs[value.graph.inputs.index(value) + shift]
        at = tuple(outer)
    if not isinstance(value, Value) or value.producer is None or len(value.users) > 1:
        return None
    producer = value.producer
    number = value.graph.nodes.index(producer)
    before = observed.get("ct", Spot(at, number), producer.outputs.index(value))
    if before is None:
        return None
    given, result = np.nansum(stat[..., 0]), np.nansum(before[..., 0])
    if not (given > 0 and result > 0 and np.isfinite(given) and np.isfinite(result)):
        return None
    return 0.5 * float(np.log(result) - np.log(given))


def scope_norms(observed: Observed) -> list[tuple[str, float]]:
    """For every named scope, in the order of execution, the norm of the cotangent of its last
    result; over all steps of a scan."""
    found: dict[str, float] = {}
    order: dict[str, tuple[int, ...]] = {}
    for (kind, at, number, _), stat in observed.stats.items():
        if kind != "ct":
            continue
        scope = _plain(observed.occurrence(Spot(at, number)).scope)
        if scope and scope not in found:  # the reverse pass meets the last one first
            found[scope] = float(np.sqrt(np.nansum(stat[..., 0])))
            order[scope] = (*(n for n, _ in at), number)
    return [(scope, found[scope]) for scope in sorted(found, key=lambda s: order[s])]


def _plain(scope: str) -> str:
    return "/".join(part for part in scope.split("/") if "(" not in part and part)


def changed_rules(observed: Observed) -> Iterator[tuple[Spot, int, float, float, float]]:
    """The user's rules that give something else than the derivative of their function: where, for
    which operand, and the norms of what they give, of the derivative and of the difference."""
    for (kind, at, number, i), stat in observed.stats.items():
        if kind == "rule":
            sums = stat.reshape(-1, 4)
            sums = sums[~np.isnan(sums).any(axis=1)].sum(axis=0)
            numbers = map(float, sums)
            given, own, difference, incoming = (math.sqrt(x) if x >= 0 else x for x in numbers)
            # What cancels leaves rounding errors, in proportion to what came in.
            limit = 1e-3 * max(given, own) + 1e-5 * incoming
            if all(map(math.isfinite, (given, own, difference))) and difference > limit:
                yield Spot(at, number), i, given, own, difference


def dead_units(observed: Observed) -> Iterator[tuple[Spot, int, int]]:
    """Rectifiers with units that were never active: where, how many, of how many."""
    for (kind, at, number, _), stat in observed.stats.items():
        if kind == "units":
            runs = stat.reshape(-1, 2)
            runs = runs[~np.isnan(runs).any(axis=1)]
            if len(runs) and runs[0, 1] > 0:
                yield Spot(at, number), int(runs[:, 0].min()), int(runs[0, 1])
