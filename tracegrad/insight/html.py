"""Writes a graph as HTML that folds by region and by scope, without scripts or external files.

A region is written below the first node that enters it. Other nodes that enter the region with the
same flow of the gradient link to it, so the size of the page does not grow with the number of
calls. The search of a browser also finds folded text, and unfolds it.
"""

from __future__ import annotations

import html
import itertools
import zlib
from collections import Counter
from collections.abc import Sequence

from tracegrad.insight.colours import LOOKS, WORDS
from tracegrad.insight.gradient_flow import Flow, RegionFlow
from tracegrad.ir import Graph, Node, Occurrence, has_gradient, scopes
from tracegrad.ir.occurrence import Path
from tracegrad.ir.text import header, operands_text, statement, types_text
from tracegrad.ir.walking import shared_regions
from tracegrad.ir.wording import counted, listed

_OPEN = 40  # a graph with at most so many operations is unfolded
_CHUNK = 200  # rows that a browser lays out at once
_STYLE = """
.tracegrad-graph { font: 12.5px/1.6 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto }
.tracegrad-graph summary { cursor: pointer }
.tracegrad-graph p { margin: 0; padding-left: 1.3em }
.tracegrad-graph p, .tracegrad-graph summary { border-left: 3px solid #8886; white-space: pre }
.tracegrad-graph .in { margin-left: 1em; padding-left: .5em; border-left: 1px solid #8884 }
.tracegrad-graph .again { background: #0969da18 }
.tracegrad-graph .chunk { content-visibility: auto; contain-intrinsic-height: auto 4000px }
.tracegrad-graph i { padding-left: 2em; font-style: normal; opacity: .65 }
.tracegrad-graph :target { outline: 2px solid #d29922 }
""" + "".join(
    f".tracegrad-graph .{kind.value} {{ border-left-color: {look.hue} }}\n"
    for kind, look in LOOKS.items()
    if look.hue
)

Part = tuple[str, ...]  # the scopes around a node, the outermost first
Counts = Counter[Flow | None]  # numbers of operations, by flow; None: all operations


def fragment(flow: RegionFlow) -> str:
    """Returns the HTML that a notebook shows."""
    return f'<div class="tracegrad-graph"><style>{_STYLE}</style>{_Writer(flow).whole()}</div>'


def page(flow: RegionFlow) -> str:
    """Returns a whole HTML page for a browser."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(flow.graph.name)}</title>"
        "<style>:root { color-scheme: light dark }</style>"
        f"</head><body>\n{fragment(flow)}\n</body></html>\n"
    )


class _Writer:
    """Writes the HTML of a graph: each body (the graph or a region) once."""

    def __init__(self, flow: RegionFlow):
        self._flow = flow
        self._shared = shared_regions(flow.graph)
        self._counts: dict[RegionFlow, Counts] = {}
        self._is_open = self._count(flow)[None] <= _OPEN
        self._links: dict[RegionFlow | str, str] = {}  # links to bodies, by flow and by HTML
        self._cuts: dict[str, None] = {}

    def whole(self) -> str:
        """Returns a legend, which counts operations and lists those that cut the gradient, and the
        graph below it."""
        graph, counts = self._flow.graph, self._count(self._flow)
        body, _ = self._body(graph, (), self._flow)
        pairs = zip(graph.inputs, self._flow.reached, strict=True)
        missed = [graph.names[v] for v, reached in pairs if has_gradient(v) and not reached]
        legend = [f"<p>{counted(counts[None], 'operation')}</p>"]
        for kind, words in WORDS.items():
            if counts[kind] and kind is Flow.CUT:
                legend.append(_fold(kind, f"{words}: {counts[kind]}", [*self._cuts]))
            elif counts[kind]:
                legend.append(f'<p class="{kind.value}">{words}: {counts[kind]}</p>')
        if missed:
            words = f"no gradient arrives at {listed(missed, 12)}"
            legend.append(f'<p class="unreached">{html.escape(words)}</p>')
        return f"{''.join(legend)}{body}"

    def _count(self, flow: RegionFlow) -> Counts:
        """Counts the operations of a body and of all regions below it, once for each occurrence."""
        if flow not in self._counts:
            self._counts[flow] = Counter()
            for node in flow.flows:
                self._counts[flow].update(self._count_node(node, flow))
        return self._counts[flow]

    def _count_node(self, node: Node, flow: RegionFlow) -> Counts:
        counts: Counts = Counter({None: 1})
        for region in flow.regions.get(node, {}).values():
            counts.update(self._count(region))
        if not self._ends_inside(node, flow):
            counts[flow.flows[node]] += 1
        return counts

    def _ends_inside(self, node: Node, flow: RegionFlow) -> bool:
        """Whether a call cuts the gradient because an operation inside of it does."""
        regions = flow.regions.get(node, {}).values()
        return flow.flows[node] is Flow.CUT and any(self._count(r)[Flow.CUT] for r in regions)

    def _body(self, graph: Graph, path: Path, flow: RegionFlow) -> tuple[str, bool]:
        """Returns a body, or a link to it if it is on the page already; and whether it is a link.

        Args:
          graph: the graph of the body.
          path: the calls that lead to the body.
          flow: the flow through the body.
        """
        if flow in self._links:
            return self._links[flow], True
        rows = [
            (part, self._row(graph, node, path, flow), self._count_node(node, flow))
            for part, node in zip(_parts_of(graph), graph.nodes, strict=True)
        ]
        heading = "".join(f"<div>{html.escape(line)}</div>" for line in header(graph))
        ends = html.escape(f"return {operands_text(graph, graph.outputs)}".rstrip())
        lines = self._grouped(rows, 0)
        text = f"{heading}{_in_chunks(lines)}<div>{ends}</div>"
        if text in self._links:  # a function that was traced anew for each call
            return self._links[text], True
        place = f"g{zlib.crc32(text.encode()):08x}"
        link = f' <a href="#{place}">{html.escape(graph.name)} (as above)</a>'
        self._links[text] = self._links[flow] = link
        kind = "in again" if flow.recomputed else "in"
        return f'<div class="{kind}" id="{place}">{text}</div>', False

    def _row(self, graph: Graph, node: Node, path: Path, flow: RegionFlow) -> str:
        """Returns the line of a node, and below it the bodies of its regions."""
        origin = Occurrence(path, node).origin
        if path and origin is not None and graph in self._shared:
            call = Occurrence(path[:-1], path[-1][0])
            origin = None if call.origin == origin else origin  # other calls have other lines
        kind = flow.flows[node]
        columns = types_text(node.outputs), origin.place if origin else ""
        line = html.escape(statement(graph, node)) + "".join(
            f"<i>{html.escape(column)}</i>" for column in columns if column
        )
        if kind is Flow.CUT and not self._ends_inside(node, flow):
            self._cuts[f"<p>{line}</p>"] = None
        title = f' title="{html.escape(origin.code)}"' if origin and origin.code else ""
        inside = self._inside(node, path, flow)
        if not inside:
            return f'<p class="{kind.value}"{title}>{line}</p>'
        if all(is_link for _, is_link in inside):
            return f'<p class="{kind.value}"{title}>{line}{"".join(text for text, _ in inside)}</p>'
        return _fold(kind, line, [text for text, _ in inside], self._is_open, title)

    def _inside(self, node: Node, path: Path, flow: RegionFlow) -> list[tuple[str, bool]]:
        """Returns the bodies of a node's regions, each with whether it is a link."""
        found = []
        for name, region in node.regions.items():
            text, is_link = self._body(region, (*path, (node, name)), flow.regions[node][name])
            title = "" if name in ("jaxpr", "call_jaxpr") else f"<div>{html.escape(name)}:</div>"
            found.append((text if is_link else title + text, is_link))
        return found

    def _grouped(self, rows: Sequence[tuple[Part, str, Counts]], depth: int) -> list[str]:
        """Folds neighbouring rows that lie in the same part; returns the lines."""
        found: list[str] = []
        for name, group in itertools.groupby(rows, lambda row: next(iter(row[0][depth:]), None)):
            members = list(group)
            if name is None:
                found += [line for _, line, _ in members]
                continue
            lines = self._grouped(members, depth + 1)
            counts = sum((counts for *_, counts in members), Counter[Flow | None]())
            kind = next((kind for kind in WORDS if counts[kind]), Flow.NONE)
            words = counted(counts[None], "operation")
            words += f", {WORDS[Flow.CUT]}: {counts[Flow.CUT]}" if counts[Flow.CUT] else ""
            title = f"# {html.escape(name)}<i>{words}</i>"
            found.append(_fold(kind, title, lines, self._is_open))
        return found


def _fold(
    kind: Flow, title: str, lines: Sequence[str], is_open: bool = False, more: str = ""
) -> str:
    head = f'<summary class="{kind.value}"{more}>{title}</summary>'
    body = f'<div class="in">{_in_chunks(lines)}</div>'
    return f"<details{' open' if is_open else ''}>{head}{body}</details>"


def _in_chunks(lines: Sequence[str]) -> str:
    """Joins lines. Many lines are split in chunks, so that a browser lays out only visible ones."""
    if len(lines) <= _CHUNK:
        return "".join(lines)
    chunks = (lines[k : k + _CHUNK] for k in range(0, len(lines), _CHUNK))
    return "".join(f'<div class="chunk">{"".join(chunk)}</div>' for chunk in chunks)


def _parts_of(graph: Graph) -> list[Part]:
    """Returns the named scopes around each node. If a graph holds several passes of a derivative,
    the pass is the outermost scope."""
    stacks = [scopes.around(node) for node in graph.nodes]
    passes = [_pass(scopes.transformations(stack)) for stack in stacks]
    if len(set(passes)) == 1:
        passes = [()] * len(passes)
    return [(*outer, *scopes.scopes(stack)) for outer, stack in zip(passes, stacks, strict=True)]


def _pass(transformations: Part) -> Part:
    """Returns the pass of a derivative that an operation belongs to, by its transformations."""
    if "transpose" in transformations:
        return ("transpose(jvp())",)
    return ("jvp()",) if "jvp" in transformations else ()
