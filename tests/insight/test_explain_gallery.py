"""Each program of the gallery has a seeded bug; `explain` names its cause and its line.

A program marks the line by ``# cause: <class>`` (several by ``|`` where the numbers decide which
it is), or says ``on no line`` where nothing stands that could be blamed.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tracegrad.insight import explain

GALLERY = Path(__file__).parent / "gallery"
BUGS = sorted(GALLERY.glob("*.py"))


def expected(file: Path) -> tuple[list[str], int | None]:
    """The causes that count as right, and the line."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if found := re.search(r"# cause: (.+)$", line):
            causes, on_no_line, _ = found[1].partition(", on no line")
            return [c.strip() for c in causes.split("|")], None if on_no_line else number
    raise AssertionError(f"{file.name} marks no line")


def load(file: Path):
    spec = importlib.util.spec_from_file_location(f"gallery_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Those that take the longest to compile; the others see each cause at least once.
LONG = [
    "angle_of_parallel_vectors",
    "binary_activation",
    "clipped_everywhere",
    "dead_relu",
    "deep_sigmoids",
    "division_that_is_masked_later",
    "equal_eigenvalues",
    "half_precision_overflow",
    "log_of_a_softmax",
    "polar_coordinates_of_the_origin",
    "rule_that_clips",
    "row_masked_as_a_whole",
    "linalg_norm_of_a_zero_vector",
    "spread_of_a_constant_feature",
    "weights_too_large",
    "written_out_softmax",
    "dropout_scale_by_zero",
]


def all_of(names, long):
    return [pytest.param(n, marks=[pytest.mark.slow] * (n in long), id=n) for n in names]


@pytest.mark.parametrize("name", all_of([file.stem for file in BUGS], LONG))
def test_the_cause_and_the_line_of_a_bug_are_named(name):
    file = GALLERY / f"{name}.py"
    bug = load(file)
    explanation = explain(bug.loss, *bug.ARGUMENTS, wrt=getattr(bug, "WRT", 0))
    causes, line = expected(file)
    worst = explanation.findings[0]
    assert worst.cause in causes
    if line is None:
        assert worst.origin is None
    else:
        assert (Path(worst.origin.file).name, worst.origin.line) == (file.name, line)
    assert worst.step == getattr(bug, "STEP", None)
    assert getattr(bug, "CURE", "") in worst.cure


def test_the_gallery_is_large():
    assert len(BUGS) >= 45
