"""Finds where the norm of the gradient vanishes or explodes along layers.

A *slope* (a change of the norm) shows in the gradients of the parameters, layer by layer. The lines
along the *stream* of the gradient (`streams`) to the first layer are blamed for it, if no later
line undoes their change.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracegrad.insight.explaining.culprits import operand_ranges
from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.layers import are_layers
from tracegrad.insight.explaining.observed import Observed, Place
from tracegrad.insight.explaining.streams import Link, Streams
from tracegrad.insight.explanation import Finding, number_text, scope_of, shared_scope

_FEWEST_LAYERS = 4
_LAYER_LIMIT = 1e-4
# A line is blamed if it changes the norm by a factor of 100. The finding counts the fewest layers
# that make up the share `_MOST` of the change.
_BLAMED = math.log(100.0)
_MOST = 0.8

_SATURATING = frozenset({"tanh", "logistic", "erf", "exp", "exp2", "log1p"})
CURES = {
    "saturated": "where it is flat, normalise what goes in; a residual connection past it, or "
    "another activation",
    "vanishing": "residual connections, normalisation, another activation or initialisation",
    "exploding": "normalisation, a smaller initialisation, clipping by the global norm",
}


def slopes(
    look: Callable[[Detail], Observed],
    norms: Mapping[str, float],
    sources: Mapping[str, int | None],
) -> Iterator[Finding]:
    """Yields findings on gradients that vanish or explode along layers.

    Args:
      look: observes the program at a given detail.
      norms: the norms of the gradients of the sources, by their paths.
      sources: maps the path of a source to the index of its input.
    """
    found: dict[Any, _Fall] = {}
    streams: Streams | None = None
    observed = look(Detail.FEW)
    for slope in _layer_slopes(norms):
        inputs = [i for path in slope.members if (i := sources[path]) is not None]
        values = [observed.graph.inputs[i] for i in inputs]
        if slope.cause and are_layers(observed.graph, inputs):
            streams = streams or Streams(look(Detail.ALL))
            ways = map(streams.to, values, slope.norms)
            for fall in _falls(slope, _through_layers(slope, ways)):
                known = found.get(fall.key)
                if known is None or fall.size > known.size:
                    found[fall.key] = fall
    for fall in found.values():
        assert streams is not None
        yield _finding_of_layers(fall, streams, norms, sources)


@dataclass(frozen=True)
class Slope:
    """How the norm of the gradient changes along a stack of layers, or the steps of a scan."""

    name: str  # ``layers/*/kernel``, or the carry of a scan
    norms: tuple[float, ...]  # from the input's side to the output's
    limit: float  # below it, first / last is vanishing; above 1 / limit, exploding
    members: tuple[str, ...] = ()  # the paths of the layers' parameters

    @property
    def cause(self) -> str:
        """The cause of the finding; "" if the slope is no problem."""
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


def _layer_slopes(norms: Mapping[str, float]) -> list[Slope]:
    """Returns the slopes along leaves whose paths differ in one number, in the order of the
    numbers."""
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
            found.append(Slope(pattern, along, _LAYER_LIMIT, members))
    return found


# ----------------------------------------------------------------------------------- blaming lines


@dataclass(frozen=True)
class _Fall:
    """How one line changes the norm along a slope."""

    slope: Slope
    links: tuple[Link, ...]  # the links with most of the change, from the input to the output
    size: float  # the logarithm of the change

    @property
    def key(self) -> tuple[str, Any]:
        return self.slope.cause, self.links[0].origin


def _falls(slope: Slope, links: Sequence[Link]) -> Iterator[_Fall]:
    """Returns the lines to blame for a slope.

    Args:
      links: the stream through its layers, from the input's side to the output's.
    """
    changes = changes_by_line(links, slope.sign)
    sizes = {line: sum(change for change, _ in of_line) for line, of_line in changes.items()}
    # If only several lines together reach the limit, the lines with the largest change are blamed.
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


def _through_layers(slope: Slope, ways: Iterable[Sequence[Link]]) -> Sequence[Link]:
    """Returns the part of the stream to the first layer that lies between the last layer and the
    second one. If less than half of the change lies in this part, it extends to the first layer's
    parameter: in an attention, say, whose gradient leaves the stack.

    Args:
      ways: the streams to the layers, from the input's side to the output's.
    """
    first, *later = ways
    places = {link.occurrence: k for k, link in enumerate(first)}
    entries = [next((places[x.occurrence] for x in w if x.occurrence in places), 0) for w in later]
    start, end = (choose(filter(None, entries), default=0) + 1 for choose in (min, max))
    change = slope.sign * sum(link.change for link in first[start:end])
    return first[start if 2 * change >= slope.size else 1 : end]


def changes_by_line(links: Sequence[Link], sign: int) -> dict[Any, list[tuple[float, Link]]]:
    """Returns how much each operation of a stream changes the norm for good, by its line."""
    lasting = _lasting([sign * link.change for link in links[::-1]])  # from output to input
    found: dict[Any, list[tuple[float, Link]]] = defaultdict(list)
    for link, change in zip(links, lasting[::-1], strict=True):
        found[link.origin].append((change, link))
    return found


def _lasting(changes: Sequence[float]) -> list[float]:
    """Returns the part of each change that later changes do not undo.

    (A change of units, for example, is undone.) The level is the sum of the changes so far. One
    count takes how much a change raises the highest level until then, the other how much it raises
    the lowest level from then on. The function returns the count with the smaller total.
    """
    levels = [0.0, *itertools.accumulate(changes)]
    highest = list(itertools.accumulate(levels, max))
    lowest = list(itertools.accumulate(levels[::-1], min))[::-1]
    lasting = min(highest, lowest, key=lambda each: each[-1] - each[0])
    return [after - before for before, after in itertools.pairwise(lasting)]


def _finding_of_layers(
    fall: _Fall, streams: Streams, norms: Mapping[str, float], sources: Mapping[str, int | None]
) -> Finding:
    """Returns the finding on a line that changes the norm along layers."""
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
        way = [] if i is None else streams.to(streams.observed.graph.inputs[i], norm)
        change = sum(x.change for x in way if x.origin == links[0].origin)
        if abs(change) >= min(_BLAMED, fall.size / 2) and (change < 0) == (cause == "vanishing"):
            concerned.append((norm, path))
    concerned.sort(reverse=cause == "exploding")
    scope = shared_scope(scope_of(link.occurrence) for link in links)
    is_flat = cause == "vanishing" and found.node.op in _SATURATING
    paths = tuple(path for _, path in concerned)
    return Finding.of(
        found, cause, words, paths, cure=CURES["saturated" if is_flat else cause], scope=scope
    )
