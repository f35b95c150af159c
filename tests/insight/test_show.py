"""`show`: what a terminal prints, what the picture holds, and what is refused."""

from __future__ import annotations

from xml.etree import ElementTree

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


# ---------------------------------------------------------------------------------------- terminal


def test_a_terminal_gets_the_text_of_the_graph():
    view = model_view()
    assert str(view) == repr(view) == str(view.graph)


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


def test_a_graph_is_shown_as_it_is_and_takes_no_arguments_and_a_number_is_refused():
    graph = tg.graph(jnp.sin, 1.0)
    assert show(graph).graph is graph
    with pytest.raises(TypeError, match=r"the graph sin and arguments.*show\(fun, \*args\)"):
        show(graph, 1.0)
    with pytest.raises(TypeError, match="a function or a Graph to show, got float"):
        show(3.0)


# ------------------------------------------------------------------------------------------ picture


def test_the_picture_holds_every_line_of_the_text_and_a_colour_for_each_operation():
    view = model_view()
    root = ElementTree.fromstring(view.to_svg())
    name = "{http://www.w3.org/2000/svg}"
    texts = [each.text or "" for each in root.iter(f"{name}text")]
    lines = str(view.graph).splitlines()
    written = [text.split() for text in texts[: len(lines)]]
    assert written == [line.split() for line in lines]  # columns may be set apart otherwise
    legend = texts[len(lines) + 1 :]
    assert "  it ends here" in legend
    colour = {each.get("y"): each.get("fill") for each in root.iter(f"{name}rect")}
    places = {text.split(" = ")[0].strip(" │"): 18 * k + 4 for k, text in enumerate(texts)}
    red = colour[str(places["  it ends here".strip()])]
    assert colour[str(places["floor"])] == red
    assert colour[str(places["reduce_sum"])] != red


def test_names_in_the_picture_are_text():
    def f(x):
        return jnp.sin(x)

    f.__name__ = HOSTILE
    text = show(f, 1.0).to_svg()
    assert "<img" not in text
    title = ElementTree.fromstring(text)[0]
    assert title.text == HOSTILE
