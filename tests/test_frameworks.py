"""The page on frameworks: its programs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.both_jax

PAGE = (Path(__file__).parents[1] / "docs" / "frameworks.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python.*\n((?:.*\n)*?)```$", re.M)


def blocks(start, end):
    """The programs in a part of the page, and the lines at which they are."""
    return [(PAGE[: m.start()].count("\n") + 2, m[1]) for m in BLOCK.finditer(PAGE, start, end)]


TITLES = list(re.finditer(r"^## (.*)$", PAGE, re.M))
ENDS = [*(title.start() for title in TITLES[1:]), len(PAGE)]
(SHARED,) = blocks(0, TITLES[0].start())
SECTIONS = {title[1]: blocks(title.end(), end) for title, end in zip(TITLES, ENDS, strict=True)}


def run(block, namespace):
    line, source = block
    exec(compile("\n" * (line - 1) + source, "frameworks.md", "exec"), namespace)


@pytest.fixture(scope="module")
def namespace():
    names: dict[str, object] = {"__name__": "__main__"}
    run(SHARED, names)
    return names


@pytest.mark.parametrize("section", SECTIONS)
def test_the_program_of_a_section_runs_and_asserts_what_it_says(namespace, section):
    if section == "haiku":
        pytest.importorskip("haiku", reason="dm-haiku is in the extra `test`")
    names = dict(namespace)
    assert SECTIONS[section]
    for block in SECTIONS[section]:
        run(block, names)


def test_every_framework_of_the_table_has_a_section():
    names = re.findall(r"^\| \[(.*?)\]\(#.*?\)", PAGE, re.M)
    assert names == [section[0].lower() + section[1:] for section in SECTIONS]
