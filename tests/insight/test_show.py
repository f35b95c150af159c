"""`show`: what a terminal prints, what the exports hold, and what is refused."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg
from tracegrad.insight import show

SHAPE = jax.ShapeDtypeStruct((4, 4), "float32")
HOSTILE = 'a"b\\</script><img src=x>/c'


@tg.custom_gradient
def quantise(w):
    return jnp.round(8 * w) / 8, lambda dy: dy


def model(w, x, count):
    inner = jax.jit(lambda v: jnp.tanh(v @ w))
    with jax.named_scope("encoder"), jax.named_scope("block"):
        h = inner(x) + inner(x)
    h = jax.checkpoint(lambda v: jnp.sin(quantise(v)))(h)
    h = jax.lax.cond(count > 0, jnp.cos, lambda v: v * jnp.floor(v), h)
    return jnp.sum(h * tg.stop_gradient(x))


def model_view():
    return show(model, SHAPE, SHAPE, jax.ShapeDtypeStruct((), "int32"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed_in_a_terminal(view):
    output = Terminal()
    with contextlib.redirect_stdout(output):
        print(view)
    return output.getvalue()


# ---------------------------------------------------------------------------------------- terminal


def test_without_a_terminal_it_is_the_text_of_the_graph():
    view = model_view()
    assert str(view) == repr(view) == str(view.graph)


def test_a_terminal_gets_the_same_text_in_colours_and_a_legend(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    view = model_view()
    coloured = printed_in_a_terminal(view)
    *lines, legend = re.sub(r"\033\[[\d;]*m", "", coloured).splitlines()
    assert [line.rstrip() for line in lines] == str(view.graph).splitlines()
    assert legend.startswith("  gradient: flows · changed by a custom rule")
    green, magenta, red, blue = "\033[32m", "\033[35m", "\033[31m", "\033[34m"
    text = coloured.splitlines()
    assert any(line.startswith(f"  {green}reduce_sum = ") for line in text)
    assert any(f"{magenta}quantise = " in line for line in text)
    assert any(f"{red}floor = " in line for line in text)
    assert any(f"{blue}sin = " in line for line in text)  # recomputed


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_the_environment_can_ask_for_plain_text(monkeypatch, variable, value):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, value)
    assert "\033" not in printed_in_a_terminal(model_view())


# --------------------------------------------------------------------------------------- arguments


def test_a_traced_function_is_shown_after_its_rules():
    without_result = tg.edit(tg.match.op("sin"), lambda op, x: op(x) * 0.0)
    traced = tg.trace(lambda x: jnp.sin(x), rules=[without_result])
    assert "mul" in str(show(traced, 1.0))
    assert "mul" not in str(show(traced.__wrapped__, 1.0))


def test_a_method_and_keyword_arguments_are_taken():
    class Model:
        @tg.trace
        def scale(self, x, *, factor):
            return x * factor

    jax.tree_util.register_static(Model)
    assert "mul(x, factor)" in str(show(Model().scale, 1.0, factor=2.0))


def test_a_graph_is_shown_as_it_is_and_takes_no_arguments():
    graph = tg.graph(jnp.sin)(1.0)
    assert show(graph).graph is graph
    with pytest.raises(TypeError, match=r"the graph sin and arguments.*show\(fun, \*args\)"):
        show(graph, 1.0)


def test_what_is_neither_function_nor_graph_is_refused():
    with pytest.raises(TypeError, match="a function or a Graph to show, got float"):
        show(3.0)


# -------------------------------------------------------------------------------------------- dot


def dot_tokens(text):
    """The tokens of Graphviz's language that `to_dot` uses; fails on anything else."""
    token = re.compile(r'\s+|("(?:[^"\\]|\\.)*"|->|[{}\[\]=]|[\w.]+)')
    position, found = 0, []
    while position < len(text):
        match = token.match(text, position)
        assert match is not None, text[position : position + 40]
        found += [match[1]] if match[1] else []
        position = match.end()
    return found


def test_the_dot_text_is_balanced_and_every_arrow_joins_boxes_that_exist():
    tokens = dot_tokens(model_view().to_dot())
    assert tokens[:3] == ["digraph", '"model"', "{"]
    assert tokens.count("{") == tokens.count("}")
    assert tokens.count("[") == tokens.count("]")
    boxes = {a for a, b in itertools.pairwise(tokens) if re.match(r"n\d+$", a) and b == "["}
    ends = [(tokens[i - 1], tokens[i + 1]) for i, t in enumerate(tokens) if t == "->"]
    assert len(ends) > 20
    assert {end for pair in ends for end in pair} <= boxes
    clusters = [tokens[i + 1] for i, t in enumerate(tokens) if t == "subgraph"]
    assert len(set(clusters)) == len(clusters)
    labels = {tokens[i + 2] for i, t in enumerate(tokens) if t == "label"}
    assert {'"encoder"', '"block"', '"◆ custom_gradient[vjp] quantise"'} <= labels


def test_names_in_dot_are_quoted():
    def f(x):
        with jax.named_scope(HOSTILE):
            return jnp.sin(x)

    tokens = dot_tokens(show(f, 1.0).to_dot())
    assert '"a\\"b\\\\<"' in tokens  # the scope ends at its slash


def test_a_region_that_is_entered_twice_is_drawn_once_in_dot():
    text = model_view().to_dot()
    assert text.count('label="tanh"') == 1
    assert text.count("(as above)") == 1


# ---------------------------------------------------------------------------------- Model Explorer

# The classes of google-ai-edge/model-explorer's graph_builder: field -> type; "?": may be left out.
GRAPH = {"id": str, "nodes": list}
NODE = {
    "id": str,
    "label": str,
    "namespace": str,
    "attrs?": list,
    "incomingEdges": list,
    "outputsMetadata": list,
    "style?": dict,
}
EDGE = {"sourceNodeId": str, "sourceNodeOutputId": str, "targetNodeInputId": str}
METADATA = {"id": str, "attrs": list}
KEY_VALUE = {"key": str, "value": str}
STYLE = {"backgroundColor": str}


def check_fields(value, schema):
    needed = {name for name in schema if not name.endswith("?")}
    assert needed <= set(value) <= {name.rstrip("?") for name in schema}
    for name, kind in schema.items():
        if name.rstrip("?") in value:
            assert isinstance(value[name.rstrip("?")], kind)


def check_model_explorer(graphs):
    for graph in graphs:
        check_fields(graph, GRAPH)
        outputs = {}
        for node in graph["nodes"]:
            check_fields(node, NODE)
            check_fields(node.get("style", {"backgroundColor": ""}), STYLE)
            assert node["id"] not in outputs
            outputs[node["id"]] = {item["id"] for item in node["outputsMetadata"]}
            for item in node["outputsMetadata"]:
                check_fields(item, METADATA)
            for pair in (
                *node.get("attrs", ()),
                *(a for i in node["outputsMetadata"] for a in i["attrs"]),
            ):
                check_fields(pair, KEY_VALUE)
        for node in graph["nodes"]:
            for edge in node["incomingEdges"]:
                check_fields(edge, EDGE)
                assert edge["sourceNodeOutputId"] in outputs[edge["sourceNodeId"]]


def written_for_model_explorer(view, folder):
    view.to_model_explorer(folder / "view.json")
    return json.loads((folder / "view.json").read_text(encoding="utf-8"))


def test_model_explorer_gets_a_list_of_graphs_in_its_format(tmp_path):
    view = model_view()
    graphs = written_for_model_explorer(view, tmp_path)
    check_model_explorer(graphs)
    (graph,) = graphs
    nodes = graph["nodes"]
    operations = [n for n in nodes if any(a["key"] == "operation" for a in n.get("attrs", ()))]
    assert len(operations) == len(list(view.graph.walk()))  # each occurrence
    tanh = [n for n in nodes if n["label"] == "tanh"]
    assert [n["namespace"] for n in tanh] == [
        "encoder/block/<lambda>",
        "encoder/block/<lambda> (2)",
    ]
    attributes = {a["key"]: a["value"] for a in tanh[0]["attrs"]}
    assert attributes["gradient"] == "flows"
    assert attributes["source"].startswith("test_show.py:")
    assert "jnp.tanh(v @ w)" in attributes["code"]


def test_data_flow_in_model_explorer_is_that_of_the_program(tmp_path):
    """From the result back to the inputs along the edges, through both ends of a call."""
    (graph,) = written_for_model_explorer(show(model, SHAPE, SHAPE, 1), tmp_path)
    nodes = {node["id"]: node for node in graph["nodes"]}
    (result,) = [node for node in nodes.values() if node["label"] == "return"]
    seen, waiting = set(), [result["id"]]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [edge["sourceNodeId"] for edge in nodes[name]["incomingEdges"]]
    assert {nodes[name]["label"] for name in seen} >= {"w", "x", "count", "tanh", "floor", "cos"}


def test_a_slash_in_a_name_opens_no_level(tmp_path):
    def a(x):
        return jnp.sin(x)

    a.__name__ = "one/two"
    (graph,) = written_for_model_explorer(show(lambda x: jax.jit(a)(x), 1.0), tmp_path)
    assert {node["namespace"] for node in graph["nodes"]} == {"", "one∕two"}


def test_a_file_that_model_explorer_would_not_know_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"files that end in .json, not 'view.txt'"):
        model_view().to_model_explorer(tmp_path / "view.txt")
