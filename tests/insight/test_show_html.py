"""The page that `show` makes: whole, safe, small, and holding what the graph holds."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from html.parser import HTMLParser

import jax
import jax.numpy as jnp

import tracegrad as tg
from tracegrad.insight import show
from tracegrad.insight.gradient_flow import Flow, gradient_flow

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"
VOID = {"meta"}


class Page(HTMLParser):
    """The elements of a page, and its lines: depth, class and text of each operation or scope.

    `folded`: how many folds are closed around each line.
    """

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.lines, self.words = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag in ("p", "summary"):
            depth = sum(which == "details" for which, _ in self.open) - (tag == "summary")
            self.lines.append([depth, attributes.get("class"), ""])
        if tag not in VOID:
            self.open.append((tag, attributes))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        if "style" not in tags and "title" not in tags:
            self.words += f"{data}\n"
            if tags[-1:] == ["i"]:
                self.lines[-1][2] += "  "
            if "p" in tags or "summary" in tags:
                self.lines[-1][2] += data

    @property
    def program(self):
        """The lines below the legend, in columns."""
        texts = [text for _, _, text in self.lines]
        last = max(k for k, text in enumerate(texts) if re.match(LEGEND, text))
        return [
            f"{'. ' * depth}{text.split('  ')[0]}"
            for depth, kind, text in self.lines[last + 1 :]
            if kind is not None
        ]

    def kind(self, statement):
        """The class of the lines that begin with something."""
        found = {kind for _, kind, text in self.lines if kind and text.startswith(statement)}
        assert len(found) == 1, (statement, found)
        return found.pop()


LEGEND = r"the gradient flows: |a custom|it ends here: |none arrives: |nothing to|no gradient"


def page_of(fun, *args):
    return Page(show(fun, *args)._repr_html_())


@jax.jit
def inner(x):
    return jnp.sin(x) * jnp.floor(x)


# --------------------------------------------------------------------------------- whole and safe


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs():
    text = show(jnp.sin, 1.0).to_html()
    tags = {tag for tag, _ in Page(text).elements}
    assert "script" not in tags
    attributes = [name for _, attrs in Page(text).elements for name in attrs]
    assert not [name for name in attributes if name in ("src", "action") or name.startswith("on")]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)


def test_names_are_never_read_as_html():
    def f(x):
        with jax.named_scope(HOSTILE.replace("/", "")):
            return {"a": jax.jit(named)(x[HOSTILE])}

    def named(v):
        return jnp.sin(v)

    named.__name__ = f.__name__ = HOSTILE
    for text in (show(f, {HOSTILE: 1.0})._repr_html_(), show(f, {HOSTILE: 1.0}).to_html()):
        page = Page(text)
        assert "img" not in {tag for tag, _ in page.elements}
        assert HOSTILE in page.words
        assert f"# {HOSTILE.replace('/', '')}" in page.words
        assert "<img" not in text.replace("&lt;img", "")


# ------------------------------------------------------------------------------- what stands there


def test_every_operation_is_a_line_with_its_type_and_place_and_code():
    def f(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.tanh(x @ w), axis=0), x[0] < 1

    page = page_of(f, jnp.ones((3, 2)), jnp.ones((4, 3)))
    line = f.__code__.co_firstlineno + 2
    assert "f(w: f32[3,2], x: f32[4,3]) -> f32[2], bool[3]" in page.words
    texts = [text for *_, text in page.lines]
    place = f"test_show_html.py:{line}"
    assert f"tanh = tanh(dot_general)  f32[4,2]  {place}" in texts
    assert f"reduce_sum = reduce_sum(tanh) axes=(0,)  f32[2]  {place}" in texts
    assert "return reduce_sum, lt" in page.words
    code = {attrs.get("title") for tag, attrs in page.elements if tag == "p"}
    assert "return jnp.sum(jnp.tanh(x @ w), axis=0), x[0] < 1" in code


def test_a_region_stands_below_the_first_call_and_others_link_to_it():
    page = page_of(lambda x: inner(inner(x)) + jnp.cos(x), 1.0)
    assert page.program == [
        "inner = jit inner(x)",
        ". sin = sin(x)",
        ". floor = floor(x)",
        ". mul = mul(sin, floor)",
        "inner_1 = jit inner(inner)",
        "cos = cos(x)",
        "add = add(inner_1, cos)",
    ]
    (link,) = [attrs["href"] for tag, attrs in page.elements if tag == "a"]
    assert link[1:] in [attrs.get("id") for _, attrs in page.elements]
    assert "inner (as above)" in page.words


def test_the_same_region_entered_in_two_ways_is_written_for_each():
    once = jax.jit(lambda x: jnp.sin(x))
    page = page_of(lambda x: once(x) + once(tg.stop_gradient(x)), 1.0)
    assert [kind for _, kind, text in page.lines if text.startswith("sin =")] == ["flows", "none"]


def test_what_a_library_function_holds_has_no_line_of_one_of_its_calls():
    page = page_of(lambda x: jnp.round(x) + jnp.round(2 * x), 1.0)
    (rounding,) = [
        text for _, _, text in page.lines if "rounding_method" in text and "jit" not in text
    ][-1:]
    assert "test_show_html" not in rounding
    calls = [text for _, _, text in page.lines if text.startswith("round") and "jit round" in text]
    assert all("test_show_html.py:" in text for text in calls)


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


def test_lines_have_the_colour_of_what_becomes_of_the_gradient():
    page = page_of(everything, jnp.ones(3), jnp.ones(3))
    for line, kind in [
        ("cos = ", "unreached"),
        ("stop_gradient = ", "cut"),
        ("tanh = ", "flows"),
        ("clip = ◆ custom", "changed"),
        ("round_ = ", "cut"),
    ]:
        assert page.kind(line) == kind
    assert page.words.count("no gradient arrives at y") == 1
    again = [attrs for _, attrs in page.elements if attrs.get("class") == "in again"]
    assert again  # what is recomputed


def test_the_legend_counts_every_occurrence_and_lists_where_gradients_end():
    """As a walk over the graph does that knows nothing of the page."""
    shown = show(everything, jnp.ones(3), jnp.ones(3))
    flow, found = gradient_flow(shown.graph), list(shown.graph.walk())
    kinds = [flow.along(o.path).flows[o.node] for o in found]
    around = {
        (*o.path[:depth], o.path[depth][0])
        for o, kind in zip(found, kinds, strict=True)
        if kind is Flow.CUT
        for depth in range(len(o.path))
    }
    # A call is where a gradient ends only if that is at nothing inside of it.
    want = Counter(
        kind
        for o, kind in zip(found, kinds, strict=True)
        if not (kind is Flow.CUT and (*o.path, o.node) in around)
    )
    page = Page(shown._repr_html_())
    told = dict(
        text.split(": ") for *_, text in page.lines if re.match(LEGEND, text) and ": " in text
    )
    assert {words: int(count) for words, count in told.items()} == {
        "the gradient flows": want[Flow.FLOWS],
        "a custom rule changes it": want[Flow.CHANGED],
        "it ends here": want[Flow.CUT],
        "none arrives": want[Flow.UNREACHED],
        "nothing to differentiate": want[Flow.NONE],
    }
    assert f"{len(found)} operations" in page.words
    texts = [text for *_, text in page.lines]
    listed = texts[texts.index(f"it ends here: {want[Flow.CUT]}") + 1 :]
    ends = itertools.takewhile(lambda text: " = " in text, listed)
    assert [text.split("  ")[0] for text in ends] == [
        "floor = floor(x)",
        "round_ = round(a) rounding_method=1",
        "stop_gradient = ■ stop_gradient(cos)",
    ]


# ------------------------------------------------------------------------------------------ folding


def test_a_small_graph_is_unfolded_and_a_large_one_is_not():
    for count, is_open in ((10, True), (20, False)):

        def f(x, count=count):
            for _ in range(count):
                x = jnp.exp(inner(x))
            return x

        folds = [attrs for tag, attrs in page_of(f, 1.0).elements if tag == "details"]
        assert all(("open" in attrs) == is_open for attrs in folds[2:])  # above: what cuts


def in_scopes(x):
    with jax.named_scope("encoder"):
        x = jnp.sin(x)
        with jax.named_scope("block"):
            x = jnp.floor(x)
    return jnp.exp(x)


def outline(fun):
    """The folds and operations of a page, without numbers."""
    lines = (re.sub(r" = .*", "", line) for line in page_of(fun, 1.0).program)
    return [re.sub(r"^([. ]*\w+?)_\d+$", r"\1", line) for line in lines]


def test_neighbours_fold_by_named_scopes():
    assert outline(in_scopes) == ["# encoder", ". sin", ". # block", ". . floor", "exp"]


def test_the_passes_of_a_derivative_are_the_outermost_folds():
    def scaled(x):
        with jax.named_scope("scaled"):
            return 2 * jnp.sin(x)

    found = outline(lambda x: jax.grad(lambda x: scaled(x) ** 2)(x) + 1)
    assert found[:3] == ["# jvp()", ". # scaled", ". . sin"]
    assert "# transpose(jvp())" in found[3:]
    assert found[-1] == "add"


def test_a_browser_lays_out_the_lines_of_a_long_graph_in_parts():
    def long(x):
        for _ in range(600):
            x = jnp.sin(x)
        return x

    page = page_of(long, 1.0)
    assert sum(attrs.get("class") == "chunk" for _, attrs in page.elements) == 3
    assert len(page.program) == 600


def test_seven_thousand_nodes_stay_small():
    """What a browser has to read grows with what differs, not with the number of calls."""

    @jax.jit
    def block(x):
        return jnp.tanh(x) * jnp.sin(x) + jnp.exp(-x) / (1 + x * x) - jnp.cos(x)

    def f(x):
        for _ in range(700):
            x = block(x)
        return x

    view = show(f, 1.0)
    assert len(list(view.graph.walk())) > 7000
    assert len(view._repr_html_()) < 120_000  # characters
