"""What would free memory, of what a program holds at its peak, and what that costs."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tracegrad import _jax
from tracegrad.insight.peak import LASTING, Held, Peak
from tracegrad.ir import Graph, Node, Occurrence, Recompute, Value, match
from tracegrad.ir.scopes import is_backward
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import in_units
from tracegrad.planning.costs import is_by_element, nbytes, node_flops
from tracegrad.rewriting.rules import recompute

_MOST = 3
MOST_MEASURED = 6  # where XLA is asked what they free
_LIKELY = 12  # scopes that are tried: those that hold most
_BUDGET = 0.3  # the share that a plan is asked to free
_FEWEST = 6  # residuals that there is a plan for
_LEAST = 0.01  # of what is held: what frees less is not worth to be said


@dataclass(frozen=True)
class Advice:
    """Something that frees memory.

    Attributes:
      what: how it is written.
      frees: bytes: about, or as XLA holds the program with it.
      flops: what it computes again; None if only a plan can tell (`plan_recompute`).
      options: what `tracegrad.trace` takes for it: ``trace(fun, **advice.options)``.
      is_measured: whether `frees` is what XLA says.
    """

    what: str
    frees: int
    flops: int | None
    options: Mapping[str, Any] = field(repr=False, compare=False)
    is_measured: bool = False

    def __str__(self) -> str:
        cost = "at the least FLOPs that a plan needs"
        if self.flops is not None:
            cost = f"for {self.flops:.3g} FLOPs more" if self.flops else "for nothing"
        about = "" if self.is_measured else "about "
        return f"{self.what} frees {about}{in_units(self.frees)} {cost}"


def advice_for(
    peak: Peak,
    *,
    is_donated: bool,
    freed_by: Callable[[Mapping[str, Any]], int | None] | None = None,
) -> list[Advice]:
    """The cheapest things to do, by FLOPs for each byte that they free.

    Args:
      is_donated: whether results are written in the place of arguments already.
      freed_by: compiles the program with some options of `trace`, and tells the bytes that it needs
        less; None if it cannot be. What frees nothing, or cannot be done, is left out then.
    """
    found = [*_recomputes(peak), *(() if is_donated else _donations(peak))]
    least = _LEAST * sum(each.size for each in peak.held)
    found = sorted((each for each in found if each.frees >= least), key=_price)
    if freed_by is not None:
        seen = ((each, freed_by(each.options)) for each in found[:MOST_MEASURED])
        found = [
            replace(each, frees=size, is_measured=True)
            for each, size in seen
            if size is not None and size >= least
        ]
    return sorted(found, key=_price)[:_MOST]


def _recomputes(peak: Peak) -> Iterator[Advice]:
    """Recomputing what lies in scopes of a like name; where none is named, what a line computes."""
    residuals = [each for each in peak.held if each.kind == "residual"]
    held: Counter[str] = Counter()
    selectors: dict[str, Selector] = {}
    for each in residuals:
        if each.source is not None and _is_recomputed(each.source):
            continue
        for text, selector in _selectors(each.source).items():
            selectors[text] = selector
            held[text] += each.size
    known: set[tuple[int, int]] = set()
    for text, _ in held.most_common(_LIKELY):
        instances = [
            [node for node in found.nodes if not is_backward(node)]
            for found in peak.program.find(selectors[text])
        ]
        frees, flops = _freed(peak.program, residuals, instances)
        if frees > 0 and (frees, flops) not in known:  # else a scope in another, with nothing else
            known.add((frees, flops))
            rules = [recompute(selectors[text])]
            yield Advice(f"rules.recompute({text})", frees, flops, {"rules": rules})
    # A plan has to have something to choose from.
    sizes = [each.size for each in residuals]
    if len(sizes) >= _FEWEST and max(sizes) <= _BUDGET * sum(sizes):
        temporary = sum(each.size for each in peak.held if each.kind not in LASTING)
        most = int(_BUDGET * temporary)
        budget = f"{1 - _BUDGET:.0%}"
        what = f'trace(..., memory_budget="{budget}")'
        yield Advice(what, most, None, {"memory_budget": budget})


def _freed(
    program: Graph, residuals: Sequence[Held], instances: Sequence[Sequence[Node]]
) -> tuple[int, int]:
    """Bytes, about, if each of these parts is recomputed by itself, and the FLOPs of that."""
    alive = {each.value for each in residuals} | {
        value for each in residuals if each.source is not None for value in each.source.node.outputs
    }
    known: dict[Graph, int] = {}
    frees = flops = most = 0
    for nodes in instances:
        members = set(nodes)
        held = [each for each in residuals if each.source and each.source.node in members]
        times = max((each.times for each in held), default=0)
        # What comes in is kept, and so is what goes out to where others read it.
        read = {v for node in nodes for v in node.operands}
        come = [
            v
            for v in read - alive
            if v in program.producers and program.producers[v] not in members
        ]
        gone = [each for each in held if _is_read_elsewhere(program, each, members)]
        kept = times * sum(nbytes(v.aval) for v in come) + sum(each.size for each in gone)
        frees += max(0, sum(each.size for each in held) - kept)
        most = max(most, sum(each.size // each.times for each in held))
        flops += times * sum(node_flops(node, known) for node in nodes)
    return frees - most, flops  # one of them is there when it is run again


def _is_read_elsewhere(program: Graph, held: Held, members: set[Node]) -> bool:
    users = () if held.value is None else program.users.get(held.value, ())
    return any(user not in members and not is_backward(user) for user in users)


def _is_recomputed(made: Occurrence) -> bool:
    """Whether it is in a part that the program recomputes already."""
    is_inside = any(isinstance(node, Recompute) for node, _ in made.path)
    return is_inside or not {"checkpoint", "rematted_computation"}.isdisjoint(made.scopes)


def _selectors(made: Occurrence | None) -> dict[str, Selector]:
    """The selectors of what is like an operation, as they are written."""
    if made is None:
        return {}
    names = dict.fromkeys(re.sub(r"[0-9]+", "*", name) for name in made.scopes)
    if names:
        return {f'match.scope("{like}")': match.scope(like) for like in names}
    if made.origin is None:
        return {}
    place = made.origin.place
    return {f'match.source("{place}")': match.source(place)}


def _price(advice: Advice) -> tuple[float, int]:
    flops = math.inf if advice.flops is None else advice.flops
    return flops / max(1, advice.frees), -advice.frees


def _donations(peak: Peak) -> Iterator[Advice]:
    """Arguments in the place of which their successors can be written: results of the same type
    that are computed of them element by element, as parameters in a train step."""
    program = peak.program
    if program.in_tree is None:
        return
    comes_of: dict[Value, tuple[Value, ...]] = {v: (v,) for v in program.inputs}
    for node in program.nodes:
        if is_by_element(node):
            operands = node.operands
            for value in node.outputs:
                like = [v for v in operands if _type(v) == _type(value)]
                comes_of[value] = (*dict.fromkeys(v for w in like for v in comes_of.get(w, ())),)
    replaced: set[Value] = set()
    for output in program.outputs:
        sources = comes_of.get(output, ()) if isinstance(output, Value) else ()
        replaced.update(next(([v] for v in sources if v not in replaced and v is not output), []))
    given = sum(each.size for each in peak.held if each.kind == "argument")
    each_device = given / max(1, sum(nbytes(v.aval) for v in program.inputs))
    inputs = iter(program.inputs)
    found, size = [], 0
    for position, argument in enumerate(program.in_tree.children()[0].children()):
        values = list(itertools.islice(inputs, argument.num_leaves))
        bytes_of = sum(nbytes(v.aval) for v in values if v in replaced)
        if bytes_of > sum(nbytes(v.aval) for v in values) / 2:
            found.append(position)
            size += int(bytes_of * min(1.0, each_device))
    if found:
        what = f"trace(..., donate_argnums={tuple(found)}), if nobody reads these again,"
        yield Advice(what, size, 0, {"donate_argnums": tuple(found)})


def _type(value: Value) -> str:
    return _jax.type_text(value.aval)
