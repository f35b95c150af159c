"""The page on frameworks: its programs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_jax

PAGE = (Path(__file__).parents[1] / "docs" / "frameworks.md").read_text(encoding="utf-8")
BLOCKS = [
    (PAGE[: match.start()].count("\n") + 2, match[1])
    for match in re.finditer(r"^```python\n((?:.*\n)*?)```$", PAGE, re.M)
]
SHARED, *OTHERS = BLOCKS
SECTIONS = dict(zip(re.findall(r"^## (.*)$", PAGE, re.M), OTHERS, strict=True))


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
    run(SECTIONS[section], dict(namespace))


def test_every_framework_of_the_table_has_a_section():
    names = re.findall(r"^\| \[(.*?)\]\(#.*?\)", PAGE, re.M)
    assert names == [section[0].lower() + section[1:] for section in SECTIONS]
