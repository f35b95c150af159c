"""What frees memory, and what that costs: each thing is compiled, and XLA says it."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from tracegrad import _jax
from tracegrad._jax.progress import progress
from tracegrad.insight.xla_buffers import Buffer
from tracegrad.ir import Graph, Value, match
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import in_units
from tracegrad.planning.compiled import account_of
from tracegrad.planning.costs import node_flops
from tracegrad.rewriting.rules import recompute

_MOST = 3
_MOST_RULES = 4  # that are compiled: of the scopes or lines that hold most
_BUDGETS = ("70%", "30%")
_LEAST = 0.01  # of what is held: what frees less is not worth to be said


@dataclass(frozen=True)
class Advice:
    """Something that frees memory.

    Attributes:
      what: how it is written.
      frees: bytes that XLA holds less with it.
      flops: FLOPs that the program computes more with it.
      options: what `tracegrad.trace` takes for it: ``trace(fun, **advice.options)``.
    """

    what: str
    frees: int
    flops: int
    options: Mapping[str, Any] = field(repr=False, compare=False)

    def __str__(self) -> str:
        cost = f"for {self.flops:.3g} FLOPs more" if self.flops > 0 else "for nothing"
        return f"{self.what} frees {in_units(self.frees)} {cost}"


class Cost(NamedTuple):
    """What a compiled program holds at once, in bytes; what its graph computes, in FLOPs (XLA would
    count the body of a loop once); and whether results are written in the place of arguments."""

    total: int
    flops: int
    is_donated: bool


def cost_of(compiled: Any, device: Any, program: Graph) -> Cost:
    """What XLA says of what was compiled of a graph. Raises NotMeasuredError where it does not."""
    stats = account_of(compiled, device)
    ends = stats.argument_size_in_bytes + stats.output_size_in_bytes
    total = stats.temp_size_in_bytes + ends - stats.alias_size_in_bytes
    known: dict[Graph, int] = {}
    flops = sum(node_flops(node, known) for node in program.nodes)
    return Cost(int(total), flops, stats.alias_size_in_bytes > 0)


def advice_for(
    buffers: Sequence[Buffer],
    program: Graph,
    args: tuple[Any, ...],
    now: Cost,
    compiled_with: Any,
) -> list[Advice]:
    """The cheapest things to do, by FLOPs for each byte that they free.

    Args:
      buffers: what is in use at the peak.
      program: the graph that was compiled.
      args: the positional arguments; None for what is no array.
      now: of the program as it is.
      compiled_with: compiles the program with some options of `trace`: the cost, or None if that
        cannot be done.
    """
    residuals = [each for each in buffers if each.kind == "residual"]
    candidates = [*_recomputes(residuals), *(_budgets() if residuals else [])]
    candidates += [] if now.is_donated else _donations(program, args)
    found = []
    with progress("memory", len(candidates)) as begin:
        for what, options in candidates:
            begin(f"compiling with {', '.join(options)}=")
            cost = compiled_with(options)
            if cost is not None and now.total - cost.total > _LEAST * now.total:
                freed, more = now.total - cost.total, max(0, cost.flops - now.flops)
                found.append(Advice(what, freed, more, options))
    known = {
        (each.frees, *each.options): each for each in reversed(found)
    }  # one rule for one effect
    return sorted(known.values(), key=lambda a: (a.flops / a.frees, -a.frees))[:_MOST]


_Candidate = tuple[str, Mapping[str, Any]]


def _recomputes(residuals: Sequence[Buffer]) -> Iterator[_Candidate]:
    """Recomputing what lies in scopes of a like name; where none is named, what a line computes."""
    held: Counter[str] = Counter()
    selectors: dict[str, Selector] = {}
    for each in residuals:
        if not each.is_recomputed:
            for text, selector in _selectors(each).items():
                selectors[text] = selector
                held[text] += each.size
    for text, _ in held.most_common(_MOST_RULES):
        yield f"rules.recompute({text})", {"rules": [recompute(selectors[text])]}


def _budgets() -> Iterator[_Candidate]:
    for budget in _BUDGETS:
        yield f'trace(..., memory_budget="{budget}")', {"memory_budget": budget}


def _selectors(held: Buffer) -> dict[str, Selector]:
    """The selectors of what is like the operation that makes a buffer, as they are written."""
    names = dict.fromkeys(re.sub(r"[0-9]+", "*", name) for name in held.scopes)
    if names:
        return {f'match.scope("{like}")': match.scope(like) for like in names}
    if held.origin is None:
        return {}
    place = held.origin.place
    return {f'match.source("{place}")': match.source(place)}


def _donations(program: Graph, args: tuple[Any, ...]) -> list[_Candidate]:
    """Arguments in the place of which their successors may be written: most of their leaves have
    the type of a result that depends on them, as parameters in a train step."""
    leaves = [jax.tree.leaves(arg) for arg in args]
    counts = [len(of_one) for of_one in leaves]
    if sum(counts) > len(program.inputs):
        return []
    results = Counter(_type(out) for out in program.outputs if isinstance(out, Value))
    inputs, found = iter(program.inputs), []
    for position, count in enumerate(counts):
        values = list(itertools.islice(inputs, count))
        sizes = [math.prod(getattr(v.aval, "shape", ())) for v in values]
        fits = 0
        for value, size in zip(values, sizes, strict=True):
            if results[_type(value)] > 0 and value not in program.outputs:
                results[_type(value)] -= 1
                fits += size
        if 2 * fits > sum(sizes):
            found.append(position)
    what = f"trace(..., donate_argnums={tuple(found)}), if nobody reads these again,"
    return [(what, {"donate_argnums": tuple(found)})] if found else []


def _type(value: Value) -> str:
    return _jax.type_text(value.aval)
