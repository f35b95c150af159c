"""`show` takes every program that people write, and says of its inputs what the derivative says."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from control_flow import CASES, Case
from programs import PROGRAMS, Program

from tracegrad.differentiation.connectivity import connections
from tracegrad.insight import show


def check(view) -> None:
    graph = view.graph
    connected = [any(i in found for found in connections(graph)) for i in range(len(graph.inputs))]
    assert view._flow.reached == connected

    texts: list[str] = []
    parser = HTMLParser()
    parser.handle_data = texts.append  # type: ignore[method-assign]
    parser.feed(view._repr_html_())
    bodies = json.loads(texts[0])["bodies"]
    assert [row[0] for row in bodies[0]["rows"]] == [
        [graph.names[value] for value in node.outputs] for node in graph.nodes
    ]
    ElementTree.fromstring(view.to_svg())


@pytest.mark.parametrize("case", CASES[::8], ids=str)
def test_control_flow_is_shown(case: Case):
    check(show(case.fun, *case.args))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_control_flow_is_shown(case: Case):
    check(show(case.fun, *case.args))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_programs_are_shown(program: Program):
    function, args = program.build()
    check(show(function, *args))
