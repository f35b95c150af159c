"""Where the norm of the gradient falls or grows: along layers, the steps of a scan and the scopes.

That it does is seen in the norms of what is trained, layer by layer. Where it does is seen in the
stream of the gradient to the first layer: the lines are blamed that change the norm for good.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracegrad import _jax
from tracegrad.insight.explaining.culprits import operand_ranges
from tracegrad.insight.explaining.layers import are_layers, scanned_layers
from tracegrad.insight.explaining.observed import Observed, Place
from tracegrad.insight.explaining.padding import scale_of_normalisation
from tracegrad.insight.explaining.statistics import NORM
from tracegrad.insight.explaining.streams import Link, Streams, total
from tracegrad.insight.explaining.visits import is_called
from tracegrad.insight.explanation import Finding, number_text, scope_of, shared_scope
from tracegrad.ir import Atom, Occurrence, Value, operations
from tracegrad.ir.inlined import outside
from tracegrad.ir.occurrence import Path

_FEWEST_LAYERS = 4
_FEWEST_STEPS = 8
_LAYER_LIMIT = 1e-4
_STEP_LIMIT = 1e-8
# So far a line has to change the norm to be blamed, and so much of that most layers share.
_BLAMED = math.log(100.0)
_MOST = 0.8

# What may stand between a parameter and what is computed with it.
_PREPARING = operations.VIEWS | {"convert_element_type"}
_SATURATING = frozenset({"tanh", "logistic", "erf", "exp", "exp2", "log1p"})
_CURES = {
    "saturated": "where it is flat, normalise what goes in; a residual connection past it, or "
    "another activation",
    "normalisation": "what goes in hardly varies: look at what makes it so, mask such rows, or a "
    "larger epsilon",
    "vanishing": "residual connections, normalisation, another activation or initialisation",
    "exploding": "normalisation, a smaller initialisation, clipping by the global norm",
}


def slopes(
    observed: Observed,
    close: Callable[[], Observed],
    norms: Mapping[str, float],
    sources: Mapping[str, int | None],
) -> Iterator[Finding]:
    """Gradients that vanish or explode.

    Args:
      close: gives what the close form of the pass observes.
      norms: of the sources, by their paths.
      sources: by path which input of the graph a source is.
    """
    found: dict[Any, _Fall] = {}
    streams: Streams | None = None
    near = Streams(observed)
    for slope in _layer_slopes(norms):
        inputs = [i for path in slope.members if (i := sources[path]) is not None]
        values = [observed.graph.inputs[i] for i in inputs]
        slope = slope if slope.cause else _slope_of_stream(slope, near, values)
        if slope.cause and are_layers(observed.graph, inputs):
            streams = streams or Streams(close())
            for fall in _falls(slope, _through_layers(slope, map(streams.to, values))):
                known = found.get(fall.key)
                if known is None or fall.size > known.size:
                    found[fall.key] = fall
    for fall in found.values():
        assert streams is not None
        yield _finding_of_layers(fall, streams, norms, sources)
    names = {i: path for path in norms if (i := sources[path]) is not None}
    for scan, slope in _step_slopes(observed, names):
        if slope.cause:  # in a loop a close look is dear, and many a recurrence forgets
            streams = streams or Streams(observed)
            yield _finding_of_steps(scan, slope, streams)


@dataclass(frozen=True)
class _Slope:
    """How the norm of the gradient changes along a stack of layers, or the steps of a scan."""

    name: str  # ``layers/*/kernel``, or the carry of a scan
    norms: tuple[float, ...]  # from the input's side to the output's
    limit: float  # of the first by the last
    members: tuple[str, ...] = ()  # the paths of the layers' parameters

    @property
    def cause(self) -> str:
        """What a finding calls it; "" where it is no problem."""
        first, last = self.norms[0], self.norms[-1]
        if not (math.isfinite(first) and math.isfinite(last)) or last == 0:
            return ""
        if first / last < self.limit:
            return "vanishing"
        return "exploding" if first / last > 1 / self.limit else ""

    @property
    def sign(self) -> int:
        return -1 if self.cause == "vanishing" else 1

    @property
    def size(self) -> float:
        """The logarithm of the change from end to end."""
        return abs(math.log(self.norms[0] / self.norms[-1])) if self.norms[0] else math.inf

    @property
    def words(self) -> str:
        verb = "shrinks" if self.cause == "vanishing" else "grows"
        first, last = number_text(self.norms[0]), number_text(self.norms[-1])
        return f"along {self.name} the norm {verb} from {last} to {first} over {len(self.norms)}"


def _layer_slopes(norms: Mapping[str, float]) -> list[_Slope]:
    """The norms of leaves whose paths differ in one number, in its order."""
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    for path in norms:
        for match in re.finditer(r"\d+", path):
            pattern = path[: match.start()] + "*" + path[match.end() :]
            groups[pattern][int(match[0])] = path
    found = []
    for pattern, by_number in groups.items():
        if len(by_number) >= _FEWEST_LAYERS:
            members = tuple(path for _, path in sorted(by_number.items()))
            along = tuple(norms[path] for path in members)
            found.append(_Slope(pattern, along, _LAYER_LIMIT, members))
    return found


def _slope_of_stream(slope: _Slope, streams: Streams, values: Sequence[Value]) -> _Slope:
    """How the norm changes of the cotangents of what is computed with the layers' parameters, if
    that explodes: where values and cotangents grow from layer to layer, the gradients of the
    parameters, which are products of the two, may all be alike."""
    along = []
    for value in values:
        path: Path = ()
        while (link := streams.next(path, value)) and link.occurrence.node.op in _PREPARING:
            path, value = link.occurrence.path, link.result
        along.append(link.before if link else 0.0)
    name = f"what is computed with {slope.name}"
    of_stream = dataclasses.replace(slope, name=name, norms=tuple(along))
    return of_stream if of_stream.cause == "exploding" else slope


def _step_slopes(
    observed: Observed, names: Mapping[int, str]
) -> Iterator[tuple[tuple[Occurrence, int], _Slope]]:
    """The norms of the carries of scans (outside of other scans), step by step.

    `names`: of the inputs that have gradients. Where each step has parameters of its own, the steps
    are layers.
    """
    for scan, j, stat in observed.of("carry"):
        if stat.ndim != 2 or len(stat) < _FEWEST_LAYERS:
            continue
        operands = [scan.node.inputs[k] for k in scanned_layers(scan.node)]
        inputs = (_input_of(observed, scan.path, value) for value in operands)
        members = tuple(names[i] for i in inputs if i is not None and i in names)
        if len(stat) >= _FEWEST_STEPS or members:
            norms = stat[:, NORM]
            if scan.node.params["reverse"]:
                norms = norms[::-1]
            name = f"carry {j} of the {scan.node.op}"
            limit = _LAYER_LIMIT if members else _STEP_LIMIT
            yield (scan, j), _Slope(name, tuple(map(float, norms)), limit, members)


def _input_of(observed: Observed, path: Path, value: Atom) -> int | None:
    """The input of the graph that a value is, reshaped or cast."""
    while isinstance(value, Value):
        region = observed.region(path)
        node = region.producers.get(value)
        if node is not None and node.op in _PREPARING:
            value = node.inputs[0]
        elif value not in region.inputs:
            return None
        elif not path:
            return region.inputs.index(value)
        elif is_called(path[-1][0]):
            path, value = outside(path, value)[0]
        else:
            return None
    return None


# ----------------------------------------------------------------------------------- what is blamed


@dataclass(frozen=True)
class _Fall:
    """What one line does to the norm along a slope."""

    slope: _Slope
    links: tuple[Link, ...]  # where it does most of it, from the input's side to the output's
    size: float  # the logarithm of the change

    @property
    def key(self) -> tuple[str, Any]:
        return self.slope.cause, self.links[0].origin


def _falls(slope: _Slope, links: Sequence[Link]) -> Iterator[_Fall]:
    """The lines to blame for a slope.

    Args:
      links: the stream through its layers, from the input's side to the output's.
    """
    changes = _changes_by_line(links, slope.sign)
    sizes = {line: sum(change for change, _ in of_line) for line, of_line in changes.items()}
    # Where several lines share a change that is none's alone, the first of them stands for all.
    least = min(_BLAMED, max(sizes.values())) if sum(sizes.values()) >= _BLAMED else _BLAMED
    for line, of_line in changes.items():
        if (size := sizes[line]) < least:
            continue
        most, known = [], 0.0
        for change, link in sorted(of_line, key=lambda each: -each[0]):
            if known < _MOST * size:
                most.append(link)
                known += change
        ordered = [link for _, link in of_line if link in most]
        yield _Fall(slope, tuple(ordered), size)


def _through_layers(slope: _Slope, ways: Iterable[Sequence[Link]]) -> Sequence[Link]:
    """The stream to the first layer from where the last layer's comes into it to where the second
    layer's does; and on to the parameter itself if most of the change is there: in an attention,
    say, that leads out of the stack.

    Args:
      ways: the streams to the layers, from the input's side to the output's.
    """
    first, *later = ways
    places = {link.occurrence: k for k, link in enumerate(first)}
    entries = [next((places[x.occurrence] for x in w if x.occurrence in places), 0) for w in later]
    start, end = (choose(filter(None, entries), default=0) + 1 for choose in (min, max))
    change = slope.sign * sum(link.change for link in first[start:end])
    return first[start if 2 * change >= slope.size else 1 : end]


def _changes_by_line(links: Sequence[Link], sign: int) -> dict[Any, list[tuple[float, Link]]]:
    """How much each operation of a stream changes the norm for good, by the line."""
    lasting = _lasting([sign * link.change for link in links[::-1]])  # as the gradient goes
    found: dict[Any, list[tuple[float, Link]]] = defaultdict(list)
    for link, change in zip(links, lasting[::-1], strict=True):
        found[link.origin].append((change, link))
    return found


def _lasting(changes: Sequence[float]) -> list[float]:
    """How much each change adds that is not taken back, as a change of units is.

    What is taken back later is below the highest level so far, or above the lowest level that
    follows: of these two the one that adds less is right.
    """
    levels = [0.0, *itertools.accumulate(changes)]
    highest = list(itertools.accumulate(levels, max))
    lowest = list(itertools.accumulate(levels[::-1], min))[::-1]
    lasting = min(highest, lowest, key=lambda each: each[-1] - each[0])
    return [after - before for before, after in itertools.pairwise(lasting)]


def _finding_of_layers(
    fall: _Fall, streams: Streams, norms: Mapping[str, float], sources: Mapping[str, int | None]
) -> Finding:
    cause, links, found = fall.slope.cause, fall.links, fall.links[-1].occurrence
    before, after = number_text(links[-1].before), number_text(links[0].after)
    if 2 * len(links) > len(fall.slope.norms):
        words = f"{fall.slope.words} layers, most of it in {found.node.name}"
    else:
        verb = "falls" if cause == "vanishing" else "grows"
        of = operand_ranges(streams.observed, Place(found))
        words = f"in {found.node.name}{of and f' of {of}'} the norm of the gradient {verb} from "
        words += f"{before} to {after}"
        if len(links) > 1:
            words += f", in {len(links)} of {len(fall.slope.norms)} layers"
    concerned = []
    for path, norm in norms.items():
        i = sources[path]
        way = [] if i is None else streams.to(streams.observed.graph.inputs[i])
        change = sum(x.change for x in way if x.origin == links[0].origin)
        if abs(change) >= min(_BLAMED, fall.size / 2) and (change < 0) == (cause == "vanishing"):
            concerned.append((norm, path))
    concerned.sort(reverse=cause == "exploding")
    scope = shared_scope(scope_of(link.occurrence) for link in links)
    kind = cause
    if cause == "vanishing" and found.node.op in _SATURATING:
        kind = "saturated"
    elif scale_of_normalisation(streams.observed.region(found.path), found.node) is not None:
        kind = "normalisation"
    paths = tuple(path for _, path in concerned)
    return Finding.of(found, cause, words, paths, cure=_CURES[kind], scope=scope)


def _finding_of_steps(carry: tuple[Occurrence, int], slope: _Slope, streams: Streams) -> Finding:
    scan, j = carry
    body, path = scan.node.regions["jaxpr"], scan.into("jaxpr")
    first, _ = _jax.scan_split(scan.node.params)
    links = streams.to(body.inputs[first + j], path)
    found, most = scan, ""
    if links:
        by_line = _changes_by_line(links, slope.sign).values()
        worst = max(by_line, key=lambda changes: sum(change for change, _ in changes))
        found = max(worst, key=lambda each: each[0])[1].occurrence
        most = f", most of it in {found.node.name}"
    words = f"{slope.words} steps{most}"
    concerned = slope.members or (slope.name,)
    return Finding.of(found, slope.cause, words, concerned, cure=_CURES[slope.cause])


# ----------------------------------------------------------------------------------------- scopes


def scope_norms(observed: Observed) -> list[tuple[str, float]]:
    """For every named scope, in the order of execution, the norm of the cotangent of its last
    result; over all steps of a scan."""
    found: dict[str, float] = {}
    for last, _, stat in observed.of("ct"):
        scope = scope_of(last)
        if scope and scope not in found:  # the reverse pass meets the last one first
            found[scope] = total(stat[..., NORM])
    return list(reversed(found.items()))
