"""`show` takes every program that people write, and says of its inputs what the derivative says."""

from __future__ import annotations

import html
from xml.etree import ElementTree

import pytest
from control_flow import CASES, Case
from programs import PROGRAMS, Program

from tracegrad.differentiation.connectivity import connections
from tracegrad.insight import show
from tracegrad.ir.text import statement


def check(view) -> None:
    graph = view.graph
    connected = [any(i in found for found in connections(graph)) for i in range(len(graph.inputs))]
    assert view._flow.reached == connected

    page = view.to_html()
    for node in graph.nodes:
        assert html.escape(statement(graph, node)) in page
    ElementTree.fromstring(view.to_svg())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * bool(k % 8)) for k, case in enumerate(CASES)],
    ids=str,
)
def test_control_flow_is_shown(case: Case):
    check(show(case.fun, *case.args))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_programs_are_shown(program: Program):
    function, args = program.build()
    check(show(function, *args))
