"""What a user's policy keeps in the host's memory: on a CPU, which has no other, by what JAX writes
for a GPU."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import tracegrad as tg
from tests.compilation import f32


def moved(fun: Any, *shapes: Any) -> dict[str, list[int]]:
    """The bytes of each value that its gradient brings to the host, and to the device, on a GPU."""
    traced = jax.jit(jax.grad(fun, (0, 1))).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    placed = r'placement = "(\w+)"\}\} : \(tensor<([\dx]+)xf32>\)'
    found: dict[str, list[int]] = {"pinned_host": [], "device": []}
    for where, shape in re.findall(placed, text):
        found[where].append(4 * math.prod(map(int, shape.split("x"))))
    return found


def offloading_block(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + checkpoint_name(jnp.sin(checkpoint_name(x, "x") @ w), "h") ** 2  # type: ignore[no-untyped-call]


TO_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["x", "h"],
    offload_src="device",
    offload_dst="pinned_host",
)


def test_what_a_users_policy_offloads_is_moved_as_by_jax():
    def loss(block: Any) -> Any:
        return lambda w, x: jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0])

    shapes = (f32(6, 8, 8), f32(32, 8))
    theirs = loss(jax.checkpoint(offloading_block, policy=TO_HOST))
    ours = loss(tg.recompute_grad(offloading_block, policy=TO_HOST))
    expected = moved(theirs, *shapes)
    assert expected["pinned_host"]
    assert moved(ours, *shapes) == expected
    assert moved(tg.graph(ours, *shapes).to_callable(), *shapes) == expected
