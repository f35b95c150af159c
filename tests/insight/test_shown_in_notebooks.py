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


def long(x):
    for _ in range(50):
        x = jnp.sin(x)
    return x


SHOWN = {
    "graph": lambda: tg.graph(lambda w: loss(w), W),
    "long graph": lambda: tg.graph(long, 1.0),
    "plan": lambda: tg.plan_recompute(loss, W, memory_budget="100%", measure=False),
    "check": lambda: tg.check_grads(loss, (jnp.full(3, 0.3),), order=1, modes=["rev"]),
    "explanation": lambda: tg.explain(loss, W),
    "memory": lambda: tg.memory(loss, W),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_all_are_in_one_style_fold_if_they_are_long_and_lose_no_word_of_the_text(kind):
    shown = SHOWN[kind]()
    page, (headline, *rest) = shown._repr_html_(), str(shown).splitlines()
    assert page.startswith('<div style="line-height:1.5"><b>')
    assert html.escape(headline.strip()) in page.partition("</b>")[0]
    assert "<script" not in page
    (lines,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.S)
    assert html.unescape(lines).splitlines() == rest
    assert "<details" in page
    assert ("<details open" in page) == (kind != "long graph")
