"""Plans which values a model keeps and which it recomputes, to fit its gradient into less memory.

The model is one of the five in `recompute_models.py`, written with flax and equinox. The plan
budgets two fifths of the memory of the model's gradient, and says how many FLOPs this costs. The
example compares XLA's memory and the gradient, planned and with everything kept, and draws the
plan.

    python examples/plan_recompute.py --model transformer --budget 30%
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
from recompute_models import MODELS

import tracegrad as tg


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="mixer", choices=MODELS)
    parser.add_argument("--budget", default="40%", help='a share ("40%%") or bytes ("20MiB")')
    parser.add_argument("--out", default="recompute_plan.png", help="where the picture goes")
    options = parser.parse_args()

    loss, params, batch, has_aux = MODELS[options.model]()
    try:
        plan = tg.plan_recompute(loss, params, *batch, memory_budget=options.budget, wrt=0)
    except ValueError as error:
        print(error)
        return 1
    print(plan, end="\n\n")

    found = {}
    for name, fun in {"everything kept": loss, "planned": plan.apply()}.items():
        step = tg.trace(jax.grad(fun, has_aux=has_aux)).lower(params, *batch).compile()
        memory = step.memory_analysis().temp_size_in_bytes
        gradient = step(params, *batch)
        found[name] = memory, jax.tree.leaves(gradient[0] if has_aux else gradient)
        print(f"XLA's temporary buffers, {name}: {memory / 2**20:.1f} MiB")
    (kept, expected), (planned, gradient) = found.values()
    print(f"XLA needs {planned / kept:.1%}, the plan said {plan.held / plan.held_without:.1%}")
    pairs = zip(expected, gradient)
    difference = max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs)
    print(f"Largest relative difference of a gradient: {difference:.1e}")

    picture = Path(options.out)
    plan.plot().savefig(picture)
    print(f"Saved {picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
