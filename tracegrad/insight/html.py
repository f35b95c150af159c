"""A graph as HTML that folds: one file's worth of text that loads nothing from elsewhere.

Python writes the graph as compact JSON, each region once for each way in which it is entered;
`view.js` builds the lines that somebody unfolds. The names in it are the user's: in the page they
are only ever text.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from tracegrad import _jax
from tracegrad.insight.gradient_flow import Flow, RegionFlow
from tracegrad.insight.parts import parts_of
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence, Value, has_gradient
from tracegrad.ir.occurrence import Origin, Path
from tracegrad.ir.text import label, operand_text, operands_text, parameters, types_text
from tracegrad.ir.walking import shared_regions

_KINDS = {kind: number for number, kind in enumerate(Flow)}
_RULE = len(_KINDS)  # what is no part of the program, but of how it is differentiated
_FALLBACK_LINES = 60
_MOST_RULES = 200  # each is traced for the page


def fragment(graph: Graph, flow: RegionFlow) -> str:
    """What a notebook shows: a ``div`` and the script that fills it."""
    style = _asset("view.css")
    script = _asset("view.js").replace('"@CSS@"', _script_json(style))
    lines = str(graph).splitlines()
    if len(lines) > _FALLBACK_LINES:
        lines = [*lines[:_FALLBACK_LINES], f"... {len(lines) - _FALLBACK_LINES} more lines"]
    # The text is what stays where scripts are not run, as on pages that show notebooks.
    return (
        '<div class="tracegrad-graph">'
        f'<script type="application/json">{_script_json(graph_data(graph, flow))}</script>'
        f"<pre>{html.escape(chr(10).join(lines))}</pre></div>\n<script>{script}</script>"
    )


def page(graph: Graph, flow: RegionFlow) -> str:
    """A page of its own, for a browser."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(graph.name)}</title>"
        "<style>:root { color-scheme: light dark } body { margin: 12px; "
        "color: light-dark(#1f2328, #e6edf3); background: light-dark(#fff, #0d1117) }</style>"
        f"</head><body>\n{fragment(graph, flow)}\n</body></html>\n"
    )


def graph_data(graph: Graph, flow: RegionFlow) -> dict[str, Any]:
    """What the page knows of a graph, ready for JSON.

    ``bodies``: the graph, then its regions: heading, ``calls`` (whether its scopes are functions
    that were called, since few are named), and ``rows``, one for each node: results, label,
    operands, parameters, types, place, scope, flow, operands without gradient, regions (title and
    body; and 1 for part of a custom gradient's rule). ``places`` and ``scopes`` are told by number;
    a place of -1 is the call's.
    """
    writer = _Writer(graph, shared_regions(graph))
    writer.body(flow, ())
    return {
        "name": graph.name,
        "places": [list(place) for place in writer.places],
        "scopes": [list(scope) for scope in writer.scopes],
        "bodies": writer.bodies,
    }


@dataclass
class _Writer:
    graph: Graph
    shared: frozenset[Graph]  # regions that several calls enter
    bodies: list[dict[str, Any]] = field(default_factory=list)
    known: dict[RegionFlow, int] = field(default_factory=dict)
    places: dict[tuple[str, str, str], int] = field(default_factory=dict)
    scopes: dict[tuple[str, ...], int] = field(default_factory=dict)
    lines: dict[Origin, int] = field(default_factory=dict)
    rules: dict[CustomGradient, list[list[Any]]] = field(default_factory=dict)
    rule_texts: dict[str, int] = field(default_factory=dict)

    def body(self, flow: RegionFlow, path: Path) -> int:
        """Writes a body, unless it is written already; returns its number."""
        if flow in self.known:
            return self.known[flow]
        inputs = [
            _reached(value, reached)
            for value, reached in zip(flow.graph.inputs, flow.reached, strict=True)
        ]
        number = self.known[flow] = len(self.bodies)
        self.write(flow.graph, inputs, flow.recomputed, path, flow)
        return number

    def write(
        self, graph: Graph, inputs: list[int], again: bool, path: Path, flow: RegionFlow | None
    ) -> None:
        body: dict[str, Any] = {
            "name": graph.name,
            "inputs": [
                [graph.names[value], _jax.type_text(value.aval), reached]
                for value, reached in zip(graph.inputs, inputs, strict=True)
            ],
            "constants": [[graph.names[v], _jax.type_text(v.aval)] for v in graph.constants],
            "types": [_jax.type_text(aval) for aval in graph.out_avals],
            "out": [operand_text(graph, value) for value in graph.outputs],
            "again": int(again),
        }
        self.bodies.append(body)
        frames, are_named = parts_of(graph, of_rule=flow is None)
        body["calls"] = int(not are_named)
        body["rows"] = [
            self.row(node, frame, flow, path)
            for node, frame in zip(graph.nodes, frames, strict=True)
        ]

    def rule(self, node: CustomGradient, path: Path) -> list[list[Any]]:
        """Writes how a custom gradient is differentiated; returns title, body and 1, or nothing."""
        if node not in self.rules and len(self.rules) < _MOST_RULES:
            self.rules[node] = []
            name = node.face_names[-1]  # the forward says little more than the primal
            try:
                graph = node.face(name)
            except Exception:  # a rule that does not fit its function: told where it is used
                return []
            self.rules[node].append([name, self.rule_body(graph, (*path, (node, name))), 1])
        return self.rules.get(node, [])

    def rule_body(self, graph: Graph, path: Path) -> int:
        """Writes part of a rule; one that was traced anew for each is one thing to a reader."""
        text = str(graph)
        if text not in self.rule_texts:
            self.rule_texts[text] = len(self.bodies)
            self.write(graph, [-1] * len(graph.inputs), False, path, None)
        return self.rule_texts[text]

    def row(
        self, node: Node, frame: tuple[str, ...], flow: RegionFlow | None, path: Path
    ) -> list[Any]:
        if flow is None:
            regions = [
                [_title(name), self.rule_body(region, (*path, (node, name))), 1]
                for name, region in node.regions.items()
            ]
        else:
            regions = [
                [_title(name), self.body(inner, (*path, (node, name)))]
                for name, inner in flow.regions.get(node, {}).items()
            ]
            if isinstance(node, CustomGradient):
                regions += self.rule(node, path)
        graph = path[-1][0].region(path[-1][1]) if path else self.graph
        return [
            [graph.names[value] for value in node.outputs],
            label(node),
            [operand_text(graph, value) for value in node.inputs],
            parameters(node),
            types_text(node.outputs),
            self.place(node, path),
            self.scopes.setdefault(frame, len(self.scopes)),
            _RULE if flow is None else _KINDS[flow.flows[node]],
            "" if flow is None else operands_text(graph, flow.lost.get(node, ())),
            regions,
        ]

    def place(self, node: Node, path: Path) -> int:
        """The number of a node's line; -1 for that of the call, which other calls do not share."""
        origin = Occurrence(path, node).origin
        if origin is None:
            return -1
        if path:
            call, name = path[-1]
            shared = name not in call.regions or call.region(name) in self.shared
            if shared and Occurrence(path[:-1], call).origin == origin:
                return -1
        if origin not in self.lines:
            place = (origin.place, origin.function, origin.code)
            self.lines[origin] = self.places.setdefault(place, len(self.places))
        return self.lines[origin]


def _reached(value: Value, reached: bool) -> int:
    """1: a gradient arrives; 0: none does; -1: there is none for its type."""
    return int(reached) if has_gradient(value) else -1


def _title(name: str) -> str:
    return "" if name in ("jaxpr", "call_jaxpr") else name


def _script_json(value: object) -> str:
    """JSON that can stand inside a ``script``: nothing in it ends the element."""
    text = json.dumps(value, separators=(",", ":"))  # in ASCII, whatever a page is said to be in
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
