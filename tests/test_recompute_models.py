"""The models of the examples, planned: the same gradients, and less memory for XLA.

(The GRU is the one that `test_examples.py` plans, with the script itself.)
"""

from __future__ import annotations

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

import tracegrad as tg

EXAMPLES = Path(__file__).parents[1] / "examples"

SIZES = {
    "mixer": {"layers": 2, "size": 8, "patch": 2, "width": 16, "batch": 16},
    "transformer": {"layers": 2, "width": 32, "heads": 2, "length": 32, "vocabulary": 32},
    "resnet": {"width": 4, "blocks": 1, "size": 16},
    "unet": {"width": 8, "depth": 1, "size": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_planned_model_has_the_same_gradient_in_less_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(EXAMPLES)  # they are modules of no package
    build = importlib.import_module("recompute_models").MODELS[name]
    loss, params, batch, has_aux = build(**SIZES[name])
    plan = tg.plan_recompute(loss, params, *batch, memory_budget="60%")
    assert plan.held <= plan.budget

    kept = jax.jit(jax.value_and_grad(loss, has_aux=has_aux)).lower(params, *batch).compile()
    step = tg.trace(jax.value_and_grad(plan.apply(), has_aux=has_aux))
    planned = step.lower(params, *batch).compile()
    before, after = (c.memory_analysis().temp_size_in_bytes for c in (kept, planned))
    assert after < 0.8 * before

    expected, found = kept(params, *batch), planned(params, *batch)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.max(np.abs(b)))
