"""Makes the page of benchmarks of `benchmarks/README.md`: its tables, and bars for some of them."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# Of which tables, by a heading in them, which column is drawn, and what stands for one bar.
CHARTS = {
    "of nnx.jit's": "of nnx.jit's",
    "of filter_jit's": "of filter_jit's",
    "tracegrad.trace": "ratio",
    "peak growth MiB": "share",
    "with": "share",
    "faster": "faster",
    "as XLA holds it": "as XLA holds it",
}
NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    readme = Path(config.config_file_path).parent / "benchmarks" / "README.md"
    page = with_charts(readme.read_text(encoding="utf-8"))
    files.append(File.generated(config, "benchmarks.md", content=page))
    return files


def with_charts(text: str) -> str:
    """The page with a chart under each table that has a column of `CHARTS`."""
    return re.sub(r"(?:^\|.*\n)+", lambda table: table[0] + _chart(table[0]), text, flags=re.M)


def _chart(table: str) -> str:
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    titles, _, *rows = rows
    column = next((column for title, column in CHARTS.items() if title in titles), None)
    if column is None:
        return ""
    at = titles.index(column)
    bars = [(row[0], row[at]) for row in rows if at < len(row) and NUMBER.search(row[at])]
    return f"\n{_bars(column, bars)}\n"


def _bars(title: str, bars: Sequence[tuple[str, str]]) -> str:
    """Bars of plain HTML, drawn by the page's own style sheet."""
    numbers = [float(NUMBER.search(shown)[0].replace(",", "")) for _, shown in bars]  # type: ignore[index]
    most = max([*numbers, 1e-9])
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th>"
        f"<td><span style='width:{100 * number / most:.1f}%'></span></td>"
        f"<td>{html.escape(shown)}</td></tr>"
        for (name, shown), number in zip(bars, numbers, strict=True)
    )
    return f'<table class="bars"><caption>{html.escape(title)}</caption>{rows}</table>\n'
