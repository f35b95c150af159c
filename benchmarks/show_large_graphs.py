"""What it takes to show a large graph: the page that `show` makes, and a browser that opens it.

Three shapes of seven thousand operations and more: all in a row, in nested scopes, and in a jitted
block that is called again and again. In Python: CPU seconds, and the size of the page beside that
of the text. In the browser: milliseconds until the page is on the screen.

    python benchmarks/show_large_graphs.py
    python benchmarks/show_large_graphs.py --browser /usr/bin/chromium    # pip install playwright
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from report import print_table

import tracegrad
from tracegrad.insight import GraphView, show

ROUNDS = 5


def in_a_row(x):
    for _ in range(3500):
        x = jnp.sin(x) * 0.5
    return x


def in_scopes(x):
    for i in range(1000):
        with jax.named_scope(f"layer_{i // 50}"), jax.named_scope(f"part_{i % 50 // 10}"):
            x = x + jnp.sin(x) * jnp.round(x) - jnp.exp(-x)
    return x.sum()


@jax.jit
def block(x):
    return jax.nn.gelu(jnp.tanh(x) @ x) + jax.nn.softmax(x)


def in_calls(x):
    for _ in range(400):
        x = block(x)
    return x.sum()


GRAPHS: dict[str, tuple[Callable[..., jax.Array], jax.Array]] = {
    "in a row": (in_a_row, jnp.ones(())),
    "in scopes": (in_scopes, jnp.ones((4,))),
    "in calls": (in_calls, jnp.ones((4, 4))),
}

# Milliseconds until the frame after the page is on the screen.
OPENED = """() => new Promise((done) =>
  requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)))"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", help="a Chromium to open the pages with")
    browser = parser.parse_args().browser
    rows: list[list[str]] = []
    pages: dict[str, str] = {}
    for name, (fun, x) in GRAPHS.items():
        graph = tracegrad.graph(fun, x)
        start = time.process_time()
        pages[name] = GraphView(graph).to_html()
        first = time.process_time() - start
        again = []
        for _ in range(ROUNDS):
            start = time.process_time()
            show(graph).to_html()
            again.append(time.process_time() - start)
        text = len(str(graph)) / 1000
        count = sum(1 for _ in graph.walk())
        rows.append(
            [
                name,
                f"{count:,}",
                f"{first:.2f}",
                f"{statistics.median(again):.2f}",
                f"{len(pages[name]) / 1000:.0f}",
                f"{text:.0f}",
            ]
        )
    header = ["graph", "operations", "first", "again", "page, kB", "text, kB"]
    print_table("The page in Python: CPU seconds, and its size", header, rows)
    if browser is not None:
        times = [[name, opened(browser, page)] for name, page in pages.items()]
        print_table("\nThe page in a browser: ms", ["graph", "open"], times)


def opened(browser: str, page: str) -> str:
    """Milliseconds, the median of five pages."""
    from playwright.sync_api import sync_playwright

    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for _ in range(ROUNDS):
            tab = chromium.new_page(viewport={"width": 1200, "height": 900})
            tab.goto(file.as_uri())
            times.append(tab.evaluate(OPENED))
            tab.close()
        chromium.close()
    return f"{statistics.median(times):.0f}"


if __name__ == "__main__":
    main()
