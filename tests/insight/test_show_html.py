"""The page that `show` makes: whole, safe, small, and holding what the graph holds."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg
from tracegrad.insight import show

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"
VOID = {"meta"}


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text inside each kind."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.open = [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    @property
    def data(self):
        return json.loads(self.text["script"][0])


def data_of(fun, *args):
    return Page(show(fun, *args)._repr_html_()).data


def named(rows):
    """The fields of the rows that the tests look at: results, label, flow, regions."""
    kinds = ["flows", "changed", "cut", "unreached", "none", "replaced", "unknown", "rule"]
    return [(row[0], row[1], kinds[row[7]], row[9]) for row in rows]


def test_a_notebook_gets_one_element_its_data_and_one_script():
    page = Page(show(jnp.sin, 1.0)._repr_html_())
    assert [tag for tag, _ in page.elements] == ["div", "script", "pre", "script"]
    assert page.elements[0][1] == {"class": "tracegrad-graph"}
    assert page.elements[1][1] == {"type": "application/json"}


def test_nothing_is_loaded_from_elsewhere():
    text = show(jnp.sin, 1.0).to_html()
    page = Page(text)
    assert not [attrs for _, attrs in page.elements if {"src", "href", "action"} & set(attrs)]
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|import\(|XMLHttpRequest", text)


def test_where_scripts_are_not_run_the_text_stays():
    view = show(lambda x: jnp.sin(x) < 1, 1.0)
    assert "".join(Page(view._repr_html_()).text["pre"]) == str(view.graph)


def test_the_text_for_where_scripts_are_not_run_is_short():
    def long(x):
        for _ in range(100):
            x = jnp.sin(x)
        return x

    text = "".join(Page(show(long, 1.0)._repr_html_()).text["pre"])
    assert len(text.splitlines()) == 61
    assert text.endswith("... 42 more lines")


def test_names_are_never_read_as_html():
    def f(x):
        with jax.named_scope(HOSTILE.replace("/", "")):
            return {"a": jax.jit(inner)(x[HOSTILE])}

    def inner(v):
        return jnp.sin(v)

    inner.__name__ = f.__name__ = HOSTILE
    for text in (show(f, {HOSTILE: 1.0})._repr_html_(), show(f, {HOSTILE: 1.0}).to_html()):
        page = Page(text)
        assert "img" not in {tag for tag, _ in page.elements}
        assert page.data["name"] == HOSTILE
        # JAX keeps of a function's name what stands before a space.
        assert page.data["bodies"][1]["name"] == HOSTILE.split()[0]
        assert "<img" not in text.replace("&lt;img", "")
    (scope,) = [scope for scope in page.data["scopes"] if scope]
    assert scope == [HOSTILE.replace("/", "")]


def test_every_node_is_a_row_with_its_type_line_and_code():
    def f(w, x):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    data = data_of(f, jnp.ones((3, 2)), jnp.ones((4, 3)))
    (body,) = data["bodies"]
    assert body["name"] == "f"
    assert body["inputs"] == [["w", "f32[3,2]", 1], ["x", "f32[4,3]", 1]]
    assert (body["types"], body["out"]) == (["f32[4,2]"], ["tanh"])
    product, tanh = body["rows"]
    assert product[:5] == [["dot_general"], "dot_general", ["x", "w"], "", "f32[4,2]"]
    assert data["scopes"][tanh[6]] == ["layer"]
    place, function, code = data["places"][tanh[5]]
    assert place.startswith("test_show_html.py:")
    assert function.endswith("f")
    assert code == "return jnp.tanh(x @ w)"


def test_annotations_and_flow_are_told():
    @tg.custom_gradient
    def clip(x):
        return x * 1.0, lambda dy: jnp.clip(dy, -1, 1)

    @tg.custom_gradient
    def first_only(x, y):
        return x * y, lambda dy: (dy, None)

    def f(x, y):
        kept = first_only(clip(x), y)
        return jnp.sum(jax.checkpoint(jnp.sin)(kept) * tg.stop_gradient(x)), jnp.cos(y) > 0

    bodies = data_of(f, jnp.ones(3), jnp.ones(3))["bodies"]
    assert bodies[0]["inputs"] == [["x", "f32[3]", 1], ["y", "f32[3]", 0]]
    rows = {row[0][0]: row for row in bodies[0]["rows"]}
    told = {name: (label, kind) for (name, *_), label, kind, _ in named(bodies[0]["rows"])}
    assert told["clip"] == ("◆ custom_gradient[vjp] clip", "changed")
    assert told["first_only"] == ("◆ custom_gradient[vjp] first_only", "changed")
    assert rows["first_only"][8] == "y"  # no gradient goes on to it
    assert told["sin"] == ("↻ recompute sin", "flows")
    assert told["stop_gradient"] == ("■ stop_gradient", "cut")
    assert told["cos"][1] == "unreached"
    again = {body["name"]: body["again"] for body in bodies}
    assert (again["sin"], again["f"]) == (1, 0)
    (replaced,) = {kind for _, _, kind, _ in named(bodies[rows["clip"][9][0][1]]["rows"])}
    assert replaced == "replaced"


def test_a_region_entered_often_is_written_once_and_lines_of_its_own_are_kept():
    @jax.jit
    def inner(x):
        return jnp.sin(x)

    def f(x):
        for _ in range(50):
            x = inner(x)
        return jnp.round(x) + jnp.round(2 * x)

    data = data_of(f, 1.0)
    assert [body["name"] for body in data["bodies"]] == ["f", "inner", "round"]
    (sin,) = data["bodies"][1]["rows"]
    assert data["places"][sin[5]][2] == "return jnp.sin(x)"
    # What JAX's own `round` holds has no line of the user's: it takes that of each call.
    (rounding,) = data["bodies"][2]["rows"]
    assert rounding[5] == -1


def test_the_same_region_entered_in_two_ways_is_written_for_each():
    inner = jax.jit(lambda x: jnp.sin(x))
    data = data_of(lambda x: inner(x) + inner(tg.stop_gradient(x)), 1.0)
    flows = [kind for body in data["bodies"][1:] for _, _, kind, _ in named(body["rows"])]
    assert flows == ["flows", "none"]


def test_branches_and_loop_parts_have_titles():
    def f(x):
        y = jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)
        return jax.lax.while_loop(lambda v: v < 3, lambda v: v + 1, y)

    rows = data_of(f, 1.0)["bodies"][0]["rows"]
    titles = [[title for title, _ in row[9]] for row in rows if row[9]]
    assert titles == [["branches[0]", "branches[1]"], ["cond_jaxpr", "body_jaxpr"]]


def test_the_rule_of_a_custom_gradient_can_be_read():
    @tg.custom_gradient
    def clip(x):
        return x * 1.0, lambda dy: jnp.clip(dy, -1, 1)

    bodies = data_of(lambda x: clip(clip(x)), jnp.ones(3))["bodies"]
    first, second = (row[9] for row in bodies[0]["rows"])
    assert [[title, *is_rule] for title, _, *is_rule in first] == [[""], ["backward", 1]]
    assert first[1:] == second[1:]  # written once
    backward = bodies[first[1][1]]["rows"]
    assert {kind for _, _, kind, _ in named(backward)} == {"rule"}
    assert "clip" in " ".join(label for _, label, _, _ in named(backward))


def test_a_scope_in_a_rule_may_be_called_as_jax_writes_a_transformation():
    @jax.jit
    def clipped(dy):
        with jax.named_scope("jvp()"):
            return jnp.clip(dy, -1, 1)

    @tg.custom_gradient
    def clip(x):
        return x * 1.0, clipped

    data = data_of(clip, jnp.ones(3))
    ((_, number, _),) = (part for part in data["bodies"][0]["rows"][0][9] if len(part) == 3)
    (call,) = data["bodies"][number]["rows"]
    ((_, number, _),) = call[9]
    found = {tuple(data["scopes"][row[6]]) for row in data["bodies"][number]["rows"]}
    assert found == {("jvp()",)}


def test_a_rule_that_does_not_fit_leaves_the_rest_to_be_shown():
    @tg.custom_gradient
    def wrong(x):
        return x * 1.0, lambda dy: (dy, dy)

    (row,) = data_of(lambda x: wrong(x) > 0, jnp.ones(3))["bodies"][0]["rows"][:1]
    assert [title for title, *_ in row[9]] == [""]


@pytest.mark.parametrize("repetitions", [700])
def test_seven_thousand_nodes_stay_small(repetitions):
    """What a browser has to read grows with what differs, not with the number of calls."""

    @jax.jit
    def block(x):
        return jnp.tanh(x) * jnp.sin(x) + jnp.exp(-x) / (1 + x * x) - jnp.cos(x)

    def f(x):
        for _ in range(repetitions):
            x = block(x)
        return x

    view = show(f, 1.0)
    assert len(list(view.graph.walk())) > 7000
    assert len(view._repr_html_()) < 120_000  # characters
