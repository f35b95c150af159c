"""A graph in the JSON that Model Explorer opens: a list of graphs, each a list of nodes.

The format is that of its ``graph_builder`` classes. Frames are namespaces, ``block/attention``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tracegrad.insight.dot import COLOURS
from tracegrad.insight.drawing import Arrow, Box, draw
from tracegrad.insight.gradient_flow import RegionFlow
from tracegrad.ir.text import parameters


def to_graphs(flow: RegionFlow) -> list[dict[str, Any]]:
    """One graph, in which every region is drawn wherever it is entered."""
    drawing = draw(flow, repeat=True)
    arrows: dict[str, list[Arrow]] = defaultdict(list)
    for arrow in drawing.arrows:
        arrows[arrow.target].append(arrow)
    nodes = [_node(box, arrows[box.name]) for box in drawing.boxes]
    return [{"id": flow.graph.name, "nodes": nodes}]


def _node(box: Box, arrows: list[Arrow]) -> dict[str, Any]:
    node: dict[str, Any] = {
        "id": box.name,
        "label": box.text,
        # A slash of a name's own would open another level.
        "namespace": "/".join(name.replace("/", "∕") for name in box.frame),
        "incomingEdges": [
            {
                "sourceNodeId": arrow.source,
                "sourceNodeOutputId": str(arrow.output),
                "targetNodeInputId": str(arrow.input),
            }
            for arrow in arrows
        ],
        "outputsMetadata": [
            {
                "id": str(number),
                "attrs": _attributes({"__tensor_tag": name, "tensor_shape": type_text}),
            }
            for number, (name, type_text) in enumerate(box.outputs)
        ],
    }
    if box.flow is not None:
        node["style"] = {"backgroundColor": COLOURS[box.flow]}
        told = {"gradient": box.flow.value}
        if box.occurrence is not None:
            told["operation"] = box.occurrence.node.op
            told["parameters"] = parameters(box.occurrence.node).strip()
            if (origin := box.occurrence.origin) is not None:
                told["source"] = str(origin)
                told["code"] = origin.code
        node["attrs"] = _attributes({key: text for key, text in told.items() if text})
    return node


def _attributes(told: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in told.items()]
