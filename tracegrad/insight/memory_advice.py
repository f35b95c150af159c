"""Finds what frees memory, and its cost: compiles each candidate, and compares XLA's bytes."""

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

_MOST = 3  # pieces of advice
_MOST_RULES = 4  # compiled rules that recompute: of the scopes or lines that hold most
_BUDGETS = ("70%", "30%")
_LEAST = 0.01  # advice that frees less than this share of the total is left out


@dataclass(frozen=True)
class Advice:
    """A way to free memory.

    Attributes:
      what: the advice as code.
      frees: how many bytes less XLA holds.
      flops: how many FLOPs more the program computes.
      options: the options of `tracegrad.trace` that apply the advice:
        ``trace(fun, **advice.options)``.
    """

    what: str
    frees: int
    flops: int
    options: Mapping[str, Any] = field(repr=False, compare=False)

    def __str__(self) -> str:
        cost = f"for {self.flops:.3g} FLOPs more" if self.flops > 0 else "for nothing"
        condition = ", if nobody reads these again" if "donate_argnums" in self.options else ""
        return f"{self.what} frees {in_units(self.frees)} {cost}{condition}"


class Cost(NamedTuple):
    """The bytes that a compiled program holds at once; the FLOPs of its graph (XLA would count the
    body of a loop only once); and whether results share the buffers of arguments."""

    total: int
    flops: int
    is_donated: bool


def cost_of(compiled: Any, device: Any, program: Graph) -> Cost:
    """Returns the cost of a compiled program. Raises NotMeasuredError if XLA does not report it."""
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
    """Returns the cheapest advice, by FLOPs per freed byte.

    Args:
      buffers: what is in use at the peak.
      program: the graph that was compiled.
      args: the positional arguments, with None in the place of leaves that are not arrays.
      now: the cost of the program as it is.
      compiled_with: compiles the program with options of `trace`, and returns the cost, or None if
        the program cannot be compiled with these options.
    """
    residuals = [each for each in buffers if each.kind == "residual"]
    candidates = list(_recomputes(residuals))
    for budget in _BUDGETS if residuals else ():
        candidates.append((f'trace(..., memory_budget="{budget}")', {"memory_budget": budget}))
    candidates += [] if now.is_donated else _donations(program, args)
    found = []
    with progress("memory", len(candidates)) as begin:
        for what, options in candidates:
            begin(f"compiling with {', '.join(options)}=")
            cost = compiled_with(options)
            if cost is not None and now.total - cost.total > _LEAST * now.total:
                freed, more = now.total - cost.total, max(0, cost.flops - now.flops)
                found.append(Advice(what, freed, more, options))
    # Of candidates with the same option and the same bytes, only the first.
    known = {(each.frees, *each.options): each for each in reversed(found)}
    return sorted(known.values(), key=lambda a: (a.flops / a.frees, -a.frees))[:_MOST]


_Candidate = tuple[str, Mapping[str, Any]]


def _recomputes(residuals: Sequence[Buffer]) -> Iterator[_Candidate]:
    """Yields rules that recompute all scopes with a similar name, or a line that has no scope."""
    held: Counter[str] = Counter()
    selectors: dict[str, Selector] = {}
    for each in residuals:
        if not each.is_recomputed:
            for text, selector in _selectors(each).items():
                selectors[text] = selector
                held[text] += each.size
    for text, _ in held.most_common(_MOST_RULES):
        yield f"rules.recompute({text})", {"rules": [recompute(selectors[text])]}


def _selectors(held: Buffer) -> dict[str, Selector]:
    """Returns selectors of the operations in similar scopes (or in the same line) as the operation
    that computes a buffer, by their text as code."""
    names = dict.fromkeys(re.sub(r"[0-9]+", "*", name) for name in held.scopes)
    if names:
        return {f'match.scope("{like}")': match.scope(like) for like in names}
    if held.origin is None:
        return {}
    place = held.origin.place
    return {f'match.source("{place}")': match.source(place)}


def _donations(program: Graph, args: tuple[Any, ...]) -> list[_Candidate]:
    """Returns the arguments that could be donated: results have the types of most of their bytes,
    as with the parameters of a train step."""
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
    what = f"trace(..., donate_argnums={tuple(found)})"
    return [(what, {"donate_argnums": tuple(found)})] if found else []


def _type(value: Value) -> str:
    return _jax.type_text(value.aval)
