"""Each program of the gallery has a seeded bug; `explain` names its cause and its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from gallery import BUGS

from tracegrad.insight import explain

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize("name", BUGS)
def test_the_cause_and_the_line_of_a_bug_are_named(name):
    seeded = BUGS[name]
    bug = seeded.build()
    explanation = explain(bug.loss, *bug.arguments, wrt=bug.wrt)
    worst = explanation.findings[0]
    assert worst.cause in seeded.causes
    if seeded.line is None:
        assert worst.origin is None
    else:
        place = Path(worst.origin.file).name, worst.origin.line
        assert place == (seeded.file.name, seeded.line)
    assert worst.step == bug.step
    assert bug.cure in worst.cure
