"""Each program of the gallery has a seeded bug; `explain` names its cause, its line and a cure."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from gallery import BUGS

from tracegrad.insight import explain


@pytest.mark.accelerator
@pytest.mark.parametrize("name", BUGS)
def test_the_cause_the_line_and_the_cure_of_a_bug_are_named(name):
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
    assert worst.cure
    # Unasked nothing is offered that changes a gradient which is finite.
    mends = worst.cause.startswith(("NaN", "Inf")) or worst.cause == "not differentiable"
    assert (worst.rule in explanation.cures()) == (mends and bug.repaired is not None)
    if bug.repaired is not None:
        assert bool(worst.changes) != mends
        assert not worst.problem or worst.rule in explanation.cures(changing=True)
        for cured, right in zip(*map(jax.tree.leaves, bug.gradients(worst.rule)), strict=True):
            np.testing.assert_allclose(cured, right, rtol=1e-5, atol=1e-30)
