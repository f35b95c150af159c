"""The pages of the documentation: their programs run, and print what stands below them.

A block of ```python is run, in the order of its page and with the names of those before it; what
it prints is the block of ```text right below. What is another system's is ```py with that
system's name as title. `docs/migration.md` and `docs/frameworks.md` are in `test_migration.py`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
ELSEWHERE = [ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]  # which become pages too
OF_THEIR_OWN = {DOCS / "migration.md", DOCS / "frameworks.md"}

FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.M | re.S)
MARK = re.compile(r"^[ \t>]*(?:```|~~~)", re.M)  # wherever Markdown would see one
PROGRAM = re.compile(r"^```python[^\n]*\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
OTHER_SYSTEMS = {"TensorFlow", "TensorFlow 1", "PyTorch", "JAX", "Equinox", "flax"}
TITLES = {"", ' title="tracegrad"', ' title="JAX"'}  # of what is run
COMMANDS = ("pip install ", "python -m tracegrad ", "python -m venv ")
OF_BENCHMARKS = ("python benchmarks/", "python3.11 -m venv ")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in OF_THEIR_OWN and "```python" in page.read_text("utf-8")],
    ids=name_of,
)
def test_the_programs_of_a_page_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    for found in PROGRAM.finditer(text):
        program, printed = found.groups()
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                exec(compile(program, "example.py", "exec"), names)
        except Exception as error:
            line = text[: found.start()].count("\n") + 1
            error.add_note(f"in the block at line {line} of {page}")
            raise
        assert output.getvalue() == (printed or "")


@pytest.mark.parametrize("page", [*PAGES, *ELSEWHERE], ids=name_of)
def test_every_block_is_run_or_says_whose_it_is(page):
    text = page.read_text(encoding="utf-8")
    blocks = FENCE.findall(text)
    # No other block: none that is indented, in a list say, or has other marks.
    assert len(MARK.findall(text)) == 2 * len(blocks)
    assert text.endswith("\n")
    assert re.search(r"^```text\n(?:(?!```).*\n)*```\n+```text", text, re.M) is None  # one output
    if page not in OF_THEIR_OWN:
        assert len(PROGRAM.findall(text)) == [language for language, *_ in blocks].count("python")
    for language, rest, block in blocks:
        if language == "py":
            title = re.fullmatch(r' title="(.*?)"', rest)
            assert title is not None, block
            assert title[1] in OTHER_SYSTEMS, block
        elif language == "sh":
            commands = OF_BENCHMARKS if page in ELSEWHERE else COMMANDS
            assert all(line.startswith(commands) for line in block.splitlines()), block
        elif language == "python":
            assert page not in ELSEWHERE, block
            assert rest in TITLES, block
        else:
            assert language == "text", block


def test_links_lead_to_files_of_the_repository():
    for page in (ROOT / "README.md", *PAGES):
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for link in re.findall(r"\]\((?!http)([^)#\s]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_list_of_tasks_has_every_task():
    index = (DOCS / "how-to" / "index.md").read_text(encoding="utf-8")
    pages = [page for page in PAGES if page.parent.name == "how-to" and page.name != "index.md"]
    tasks = {
        f"[{task}]({page.name}#"
        for page in pages
        for task in re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.M)
    }
    assert len(tasks) > 40
    assert [task for task in tasks if task not in index] == []


def texts_of_the_package() -> list[str]:
    """Its strings, with an ellipsis where a value is put in, and format fields like those."""
    texts = []
    for path in (ROOT / "tracegrad").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"\{\w+(?:!r)?\}", "…", node.value))
    return texts


def test_every_error_that_is_quoted_is_one_of_the_package():
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.*)`$", page, re.M)
    assert len(quoted) > 50
    texts = "\n".join(texts_of_the_package())
    missing = []
    for error in quoted:
        pattern = ".*?".join(map(re.escape, error.split("…")))
        if not re.search(pattern, texts):
            missing.append(error)
    assert missing == []
