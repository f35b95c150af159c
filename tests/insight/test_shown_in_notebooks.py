"""What notebooks show of a graph, a plan and a check: what it prints, as HTML that folds."""

from __future__ import annotations

import html
import re

import jax.numpy as jnp
import pytest

import tracegrad as tg


def loss(w):
    return jnp.sum(jnp.sin(jnp.where(w < 1, w, 2 * w)) ** 2)


W = jnp.ones((8, 8))


SHOWN = {
    "graph": lambda: tg.graph(loss, W),
    "plan": lambda: tg.plan_recompute(loss, W, memory_budget="100%", measure=False),
    "check": lambda: tg.check_grads(loss, (jnp.full(3, 0.3),), order=1, modes=["rev"]),
    "explanation": lambda: tg.explain(loss, W),
    "memory": lambda: tg.memory(loss, W),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_all_are_in_one_style_and_fold(kind):
    shown = SHOWN[kind]()
    page, headline = shown._repr_html_(), html.escape(str(shown).splitlines()[0].strip())
    assert page.startswith('<div style="line-height:1.5"><b>')
    assert headline in page.partition("</b>")[0]
    assert "<details" in page
    assert "<script" not in page


@pytest.mark.parametrize("kind", SHOWN)
def test_no_word_of_the_text_is_lost(kind):
    shown = SHOWN[kind]()
    page = shown._repr_html_()
    (lines,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.S)
    assert html.unescape(lines).splitlines() == str(shown).splitlines()[1:]
    assert "<details open" in page


def test_a_long_graph_is_folded_at_first():
    def long(x):
        for _ in range(50):
            x = jnp.sin(x)
        return x

    page = tg.graph(long, 1.0)._repr_html_()
    assert "<details open" not in page
    assert "51 lines" in page


def test_names_of_the_user_are_text():
    page = tg.graph(lambda x: jnp.sin(x), 1.0)._repr_html_()
    assert "<lambda>" not in page
    assert "&lt;lambda&gt;" in page
