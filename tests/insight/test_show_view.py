"""The view of a graph in a notebook: its script is run, clicked, typed into and read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from test_show_html import HOSTILE, Page

import tracegrad as tg
from tracegrad.insight import show
from tracegrad.insight.gradient_flow import Flow, gradient_flow
from tracegrad.ir import CustomGradient, StopGradient

DOM = (Path(__file__).parent / "dom.js").read_text()


class View:
    """A page with the views of some graphs, in an interpreter of JavaScript."""

    def __init__(self, *shown, color="rgb(31, 35, 40)"):
        import quickjs  # of the wheel quickjs-ng

        self.context = quickjs.Context()
        self.context.eval(DOM)
        self.context.eval(f"color = {json.dumps(color)}")
        for each in shown:
            text = Page(each._repr_html_()).text
            data, script = text["script"]
            self.do("addView", data, "".join(text["pre"]))
            self.context.eval(script)

    def do(self, name, *args):
        given = ", ".join(map(json.dumps, args))
        return self.context.eval(f"{name}({given})")

    def texts(self, selector):
        return json.loads(self.do("texts", selector))

    @property
    def lines(self):
        return json.loads(self.do("lines"))

    def search(self, words):
        self.do("write", words)
        self.do("wait")
        return self.texts(".hit .say")


def view_of(fun, *args, **options):
    return View(show(fun, *args), **options)


@jax.jit
def inner(x):
    return jnp.sin(x) * jnp.floor(x)


def twice(x):
    return inner(inner(x)) + jnp.cos(x)


TWICE = [
    "inner = jit inner(x)",
    ". sin = sin(x)",
    ". floor = floor(x)",
    ". mul = mul(sin, floor)",
    "inner_1 = jit inner(inner)",
    ". sin = sin(x)",
    ". floor = floor(x)",
    ". mul = mul(sin, floor)",
    "cos = cos(x)",
    "add = add(inner_1, cos)",
]


def deep(count):
    """A function of more nodes than are unfolded at once."""

    def f(x):
        for _ in range(count):
            x = jnp.exp(inner(x))
        return x

    return f


# ------------------------------------------------------------------------------------ what is there


def test_a_small_graph_is_unfolded():
    view = view_of(twice, 1.0)
    assert view.lines == TWICE
    assert view.texts(".head")[0].startswith("twice(x: ")
    assert view.texts(".return")[-1] == "return add"


def test_a_large_graph_begins_folded():
    view = view_of(deep(20), 1.0)
    assert len(view.lines) == 40
    assert all(line[0] != "." for line in view.lines)


def test_each_view_of_a_page_is_made_once():
    view = View(show(jnp.sin, 1.0), show(jnp.cos, 1.0))
    assert view.lines == ["sin = sin(x)", "cos = cos(x)"]


def test_a_page_with_light_text_is_a_dark_one():
    light = view_of(jnp.sin, 1.0, color="rgb(31, 35, 40)")
    dark = view_of(jnp.sin, 1.0, color="rgb(230, 237, 243)")
    assert light.do("classes", ".view", "sin") == "view"
    assert dark.do("classes", ".view", "sin") == "view dark"


def test_names_of_the_users_are_text():
    """The document of the tests refuses to read any text as HTML."""

    def f(x):
        with jax.named_scope(HOSTILE.replace("/", "")):
            return jnp.sin(x[HOSTILE])

    f.__name__ = HOSTILE
    view = view_of(f, {HOSTILE: 1.0})
    assert HOSTILE in view.texts(".title")
    assert f"# {HOSTILE.replace('/', '')}" in view.lines[0]


def test_lines_say_what_the_graph_says():
    def f(w, x):
        return jnp.sum(x @ w, axis=0), x[0] < 1

    shown = show(f, jnp.ones((3, 2)), jnp.ones((4, 3)))
    view = View(shown)
    (says, *_) = [line for line in view.lines if "reduce_sum" in line]
    assert says == "reduce_sum = reduce_sum(dot_general) axes=(0,)"
    assert view.texts(".type")[0] == "f32[4,2]"
    assert all(place.startswith("test_show_view.py:") for place in view.texts(".place"))
    assert view.texts(".head") == ["f(w: f32[3,2], x: f32[4,3]) → f32[2], bool[3]"]


def test_what_a_library_function_holds_has_the_line_of_each_call_of_it():
    def f(x):
        y = jnp.round(x)
        return y + jnp.round(2 * x)

    view = view_of(f, 1.0)
    line = f.__code__.co_firstlineno
    by_call = [f"test_show_view.py:{line + 1}", f"test_show_view.py:{line + 2}"]
    rounding = [
        place
        for line, place in zip(view.lines, view.texts(".place"), strict=True)
        if line.startswith(". round")
    ]
    assert rounding == by_call
    view.search("rounding_method")
    assert [text for text in view.texts(".hit .faint") if text] == by_call


def test_many_inputs_and_results_are_shown_when_asked_for():
    view = view_of(lambda *xs: [x + 1 for x in xs], *range(20))
    assert "… 12 more" in view.texts(".head")[0]
    view.do("click", "button", "… 12 more")
    assert view.texts(".head")[0].count(": ") == 20
    view.do("click", "button", "… 12 more")
    assert view.texts(".return")[0].count(",") == 19


def test_neighbours_in_a_scope_stand_under_it():
    def f(x):
        with jax.named_scope("encoder"):
            x = jnp.sin(x)
            with jax.named_scope("block"):
                x = jnp.cos(x)
        return jnp.exp(x)

    view = view_of(f, 1.0)
    assert view.lines == [
        "# encoder",
        ". sin = sin(x)",
        ". # block",
        ". . cos = cos(sin)",
        "exp = exp(cos)",
    ]
    assert view.texts(".badges") == ["2", "1"]


def test_calls_of_functions_stand_for_scopes_where_none_is_named():
    def layer(x):
        return jnp.sin(jnp.cos(x))

    def alone(x):
        return jnp.tanh(x)

    view = view_of(lambda x: alone(layer(layer(x))), 1.0)
    place = rf" \(test_show_view\.py:{layer.__code__.co_firstlineno + 6}\)"
    heads = [line for line in view.lines if line[0] == "ƒ"]
    assert re.fullmatch(f"ƒ layer{place}", heads[0])
    assert re.fullmatch(f"ƒ layer{place} · 2", heads[1])
    assert view.lines[-1] == "tanh = tanh(sin_1)"  # a call of one operation needs no line


# ------------------------------------------------------------------------------------------ folding


def test_a_click_unfolds_and_folds():
    view = view_of(deep(20), 1.0)
    view.do("click", ".row", "inner_1 = ")
    assert view.lines[2:6] == [
        "inner_1 = jit inner(exp)",
        ". sin = sin(x)",
        ". floor = floor(x)",
        ". mul = mul(sin, floor)",
    ]
    assert len(view.lines) == 43
    view.do("click", ".row", "inner_1 = ")
    assert len(view.lines) == 40


def test_all_unfolds_by_one_level_and_folds_at_once():
    def f(x):
        for _ in range(15):
            x = jax.jit(lambda x: inner(inner(x)))(x)
        return x

    view = view_of(f, 1.0)
    sizes = []
    for button in ("unfold", "unfold", "unfold", "fold"):
        view.do("click", ".bar button", button)
        sizes.append(len(view.lines))
    assert sizes == [45, 135, 135, 15]
    view.do("click", ".bar button", "unfold")
    assert len(view.lines) == 45  # what was inside is folded, too


@pytest.fixture(scope="module")
def long():
    """600 operations, one below the other."""

    def f(x):
        for _ in range(599):
            x = jnp.sin(x)
        return jnp.floor(x)

    return show(f, 1.0)


def test_long_lists_are_built_as_far_as_somebody_looks(long):
    view = View(long)
    sizes = [len(view.lines)]
    for _ in range(3):
        view.do("scrollToEnd")
        sizes.append(len(view.lines))
    assert sizes == [250, 500, 600, 600]
    again = View(long)
    assert again.texts(".more") == ["… 350 more"]
    again.do("click", ".more", "350")
    assert (len(again.lines), again.texts(".more")) == (500, ["… 100 more"])


# ----------------------------------------------------------------------------------------- the flow


def everything(x, y):
    @tg.custom_gradient
    def clip(x):
        return x * 1.0, lambda dy: jnp.clip(dy, -1, 1)

    def step(carry, _):
        return clip(inner(carry)), jnp.round(carry)

    carry, rounded = jax.lax.scan(step, x, None, 3)
    carry = jax.checkpoint(lambda c: jnp.tanh(inner(c)))(carry)
    return jnp.sum(carry) + jnp.sum(rounded), tg.stop_gradient(jnp.cos(y)) * 2


def test_the_legend_counts_every_occurrence():
    """As a walk over the graph does that knows nothing of the page."""
    shown = show(everything, jnp.ones(3), jnp.ones(3))
    graph = shown.graph
    flow = gradient_flow(graph)
    found = list(graph.walk())
    kinds = [flow.along(o.path).flows[o.node] for o in found]
    around = {
        (*o.path[:depth], o.path[depth][0])
        for o, kind in zip(found, kinds, strict=True)
        if kind is Flow.CUT
        for depth in range(len(o.path))
    }
    # A call is where a gradient ends only if that is at nothing inside of it.
    leaves = [
        kind
        for o, kind in zip(found, kinds, strict=True)
        if not (kind is Flow.CUT and (*o.path, o.node) in around)
    ]
    want = {
        "gradient flows": leaves.count(Flow.FLOWS),
        "changed by a custom rule": leaves.count(Flow.CHANGED),
        "ends here": leaves.count(Flow.CUT),
        "none arrives": leaves.count(Flow.UNREACHED),
        "recomputed": sum(flow.along(o.path).recomputed for o in found),
        "◆ custom gradient": sum(isinstance(o.node, CustomGradient) for o in found),
        "■ stop gradient": sum(isinstance(o.node, StopGradient) for o in found),
        "↻ recompute": sum(o.node.op in ("remat2", "checkpoint") for o in found),
    }
    view = View(shown)
    chips = [re.fullmatch(r"(.*?)(\d+)", chip) for chip in view.texts(".chip")]
    assert {chip[1]: int(chip[2]) for chip in chips} == {
        words: count for words, count in want.items() if count
    }
    assert f"{len(found)} operations" in view.texts(".bar .faint")


@pytest.mark.parametrize(
    "chip", ["flows", "changed", "ends here", "none", "recomputed", "■ stop", "◆", "↻"]
)
def test_the_legend_finds_what_it_counts(chip):
    view = view_of(everything, jnp.ones(3), jnp.ones(3))
    (counted,) = [int(re.search(r"\d+$", text)[0]) for text in view.texts(".chip") if chip in text]
    view.do("click", ".chip", chip)
    assert len(view.texts(".hit")) == counted
    assert f"{counted} found" in view.texts(".bar .faint")
    view.do("click", ".chip", chip)
    assert view.texts(".hit") == []


def test_lines_have_the_colour_of_what_becomes_of_the_gradient():
    view = view_of(everything, jnp.ones(3), jnp.ones(3))
    for line, kind in [
        ("cos = ", "unreached"),
        ("■ stop_gradient", "cut"),
        ("tanh = ", "flows"),
        ("◆ custom", "changed"),
        ("round", "cut"),
    ]:
        assert f"is-{kind}" in view.do("classes", ".row", line).split()
    assert "again" in view.do("classes", ".row", "tanh = ").split()  # recomputed
    assert "again" not in view.do("classes", ".row", "cos = ").split()


# ---------------------------------------------------------------------------------------- searching


def test_a_search_finds_every_occurrence_and_enter_goes_through_them():
    view = view_of(deep(20), 1.0)
    assert view.search("is:cut") == ["floor = floor(x)"] * 20
    assert view.texts(".hit .way")[0].split(" › ")[0].startswith("inner")
    assert len(view.lines) == 40  # nothing is unfolded for it
    view.do("press", "Enter")
    assert view.texts(".bar .faint")[-1] == "1 of 20"
    assert view.texts(".row.found")[0].startswith("floor = floor(x)")
    assert len(view.lines) == 43
    view.do("press", "Enter")
    assert (view.texts(".bar .faint")[-1], len(view.lines)) == ("2 of 20", 46)
    view.do("press", "Enter", True)
    view.do("press", "Enter", True)
    assert view.texts(".bar .faint")[-1] == "20 of 20"
    assert len(view.texts(".row.found")) == 1
    assert view.do("scrolled") > 0  # where it stands
    view.do("press", "Escape")
    assert view.texts(".hit") == []
    assert len(view.texts(".row.found")) == 1  # what was found stays marked


def test_a_search_is_by_name_type_place_scope_and_flow_together():
    def f(x):
        with jax.named_scope("head"):
            y = jnp.sin(x)
        return (jnp.floor(x) + y).astype(jnp.float16)

    view = view_of(f, jnp.ones(3))
    line = f.__code__.co_firstlineno
    assert view.search("head") == ["sin = sin(x)"]
    assert [hit.split(" = ")[0] for hit in view.search("F16")] == ["convert_element_type"]
    assert view.search(f"test_show_view.py:{line + 2}") == ["sin = sin(x)"]
    assert view.search("is:cut") == ["floor = floor(x)"]
    assert view.search(f"is:flows :{line + 3}") == [
        "add = add(floor, sin)",
        "convert_element_type = convert_element_type(add)",
    ]
    assert view.search("nothing of this") == []
    assert view.texts(".bar .faint")[-1] == "0 found"


def test_a_hit_that_is_clicked_is_shown_though_its_lines_were_not_built(long):
    view = View(long)
    view.search("floor")
    view.do("click", ".hit", "floor")
    assert view.texts(".row.found")[0].startswith("floor = floor(")
    assert view.do("scrolled") > 11000


def test_a_thousand_hits_are_enough():
    def f(x):
        for _ in range(400):
            x = inner(inner(inner(x)))
        return x

    view = view_of(f, 1.0)
    view.search("sin")
    assert view.texts(".bar .faint")[-1].replace(",", "") == "1000+ found"
    assert len(view.texts(".hit")) == 201
    assert view.texts(".hit")[-1] == "Enter goes on to the next one"


def test_what_cuts_inside_of_a_call_is_found_there_and_not_at_the_call():
    view = view_of(lambda x: jax.jit(lambda x: jnp.floor(x) * 2)(x) + x, 1.0)
    assert view.search("is:cut") == ["floor = floor(x)"]


# ------------------------------------------------------------------------------------------ details


def test_pointing_at_a_line_tells_where_it_is_from_and_what_becomes_of_its_gradient():
    view = view_of(everything, jnp.ones(3), jnp.ones(3))
    view.do("point", "■ stop_gradient")
    assert view.texts(".tell") == []  # not at once
    view.do("wait")
    (told,) = view.texts(".tell")
    line = everything.__code__.co_firstlineno + 10
    assert told.startswith(f"test_show_view.py:{line} in everything")
    assert "return jnp.sum(carry) + jnp.sum(rounded), tg.stop_gradient(jnp.cos(y)) * 2" in told
    assert told.endswith("the data go on to an output, no gradient comes back")
    view.do("point", "tanh = ")
    assert view.texts(".tell") == []
    view.do("wait")
    assert "run again in the backward pass" in view.texts(".tell")[0]
    view.do("leave")
    assert view.texts(".tell") == []


def test_what_an_operand_loses_is_told():
    @tg.custom_gradient
    def first_only(x, y):
        return x * y, lambda dy: (dy, None)

    view = view_of(lambda x, y: first_only(x, y), 1.0, 2.0)
    view.do("point", "◆ custom")
    view.do("wait")
    assert view.texts(".tell .cut") == ["but none goes on to y"]


def test_a_value_is_marked_wherever_it_is_used_in_its_graph():
    view = view_of(twice, 1.0)
    view.do("point", "cos = ", "x")
    assert view.texts(".v.same") == ["x", "x", "x"]  # heading, call, cos: not those of inner
    view.do("point", "inner_1 = ", "inner")
    assert view.texts(".v.same") == ["inner", "inner"]
    view.do("leave")
    assert view.texts(".v.same") == []


def test_a_click_on_a_value_goes_to_where_it_is_computed():
    view = view_of(twice, 1.0)
    view.do("clickValue", "inner_1 = ", "inner")
    assert view.texts(".row.found .say") == ["inner = jit inner(x)"]
    assert len(view.lines) == len(TWICE)  # and folds nothing
