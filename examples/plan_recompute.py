"""A model that must fit less memory: what to keep and what to compute again is planned.

An MLP-mixer of four blocks, written with equinox. Its loss is planned for two fifths of the memory
that its gradient takes; the plan says what that costs in FLOPs and how few any plan could do with.
XLA is asked what it really needs, and one gradient of both is compared. The plan is drawn and saved
beside the picture, as JSON, where a review finds it.

    python examples/plan_recompute.py --budget 30%
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import tracegrad as tg
from tracegrad.rewriting.planning import BudgetTooSmall, plan_recompute

BLOCKS, PATCHES, WIDTH, BATCH = 4, 64, 64, 32


class Block(eqx.Module):
    """f32[patches, width] → the same: patches are mixed, then channels."""

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    patches: eqx.nn.MLP
    channels: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.norms = (eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH))
        self.patches = eqx.nn.MLP(PATCHES, PATCHES, 2 * PATCHES, 1, jax.nn.gelu, key=first)
        self.channels = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + jax.vmap(self.patches, 1, 1)(jax.vmap(self.norms[0])(x))
        return x + jax.vmap(self.channels)(jax.vmap(self.norms[1])(x))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget", default="40%", help='a share ("40%%") or bytes ("20MiB")')
    parser.add_argument("--out", default="recompute_plan.png", help="where the picture goes")
    options = parser.parse_args()

    blocks = [Block(key) for key in jax.random.split(jax.random.key(0), BLOCKS)]
    arrays, rest = eqx.partition(blocks, eqx.is_array)
    images = jax.random.normal(jax.random.key(1), (BATCH, PATCHES, WIDTH))

    def loss(arrays: Any, images: jax.Array) -> jax.Array:
        x = images
        for block in eqx.combine(arrays, rest):
            x = jax.vmap(block)(x)
        return jnp.mean(x**2)

    try:
        plan = plan_recompute(loss, options.budget)(arrays, images)
    except BudgetTooSmall as error:
        print(error)
        return 1
    print(plan, end="\n\n")

    results = {}
    for name, fun in {"everything kept": loss, "planned": plan.apply()}.items():
        step = tg.trace(jax.grad(fun))
        memory = step.lower(arrays, images).compile().memory_analysis()
        results[name] = (memory.temp_size_in_bytes, step(arrays, images))
        print(f"XLA's temporary buffers, {name}: {results[name][0] / 2**20:.1f} MiB")
    (_, expected), (_, found) = results.values()
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    difference = max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs)
    print(f"Largest relative difference of a gradient: {difference:.1e}")

    picture = Path(options.out)
    plan.plot().savefig(picture)
    plan.save(picture.with_suffix(".json"))
    print(f"Saved {picture} and {picture.with_suffix('.json')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
