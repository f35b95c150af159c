"""A recomputed function is computed twice, and what is inside it is not kept in between.

XLA's own account of programs that are compiled and never run: the bytes of temporary buffers and
the matrix products in the optimised HLO.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegrad

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("compiled_fully")]

LAYERS, BATCH, WIDTH = 24, 2048, 512
MIB = 2**20


def layer(weights: Any, x: jax.Array) -> jax.Array:
    """f32[batch, width] → the same: x, two products and the parts of gelu are 16 MiB to keep."""
    up, down = weights
    return x + jax.nn.gelu(x @ up) @ down


def stack(weights: Any, x: jax.Array) -> jax.Array:
    return functools.reduce(lambda x, w: layer(w, x), weights, x)


def loss_in_groups(size: int, group: Any = stack) -> Any:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for start in range(0, LAYERS, size):
            x = group(weights[start : start + size], x)
        return jnp.mean(x**2)

    return loss


WEIGHT = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
SHAPES = ([(WEIGHT, WEIGHT)] * LAYERS, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


def cost(jitted: Any) -> tuple[float, int]:
    """MiB of temporary buffers, and matrix products, of a compiled ``f(*SHAPES)``."""
    compiled = jitted.lower(*SHAPES).compile()
    products = len(re.findall(r" = \S+ dot\(", compiled.as_text()))
    return compiled.memory_analysis().temp_size_in_bytes / MIB, products


@functools.cache
def cost_without() -> tuple[float, int]:
    return cost(tracegrad.trace(jax.value_and_grad(loss_in_groups(1))))


def test_without_recompute_everything_is_kept() -> None:
    mib, products = cost_without()
    assert mib >= 380
    assert products == 6 * LAYERS - 1  # the batch itself has no gradient


RECOMPUTED = {
    "tracegrad.recompute_grad": tracegrad.recompute_grad,
    "jax.checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("order", ["trace of gradient", "trace of gradient of trace"])
def test_groups_of_layers_are_recomputed(recompute: str, order: str) -> None:
    loss = loss_in_groups(4, RECOMPUTED[recompute](stack))
    if order == "trace of gradient of trace":
        loss = tracegrad.trace(loss)
    mib, products = cost(tracegrad.trace(jax.value_and_grad(loss)))
    assert mib <= 90
    # Forward once more. The last product of a group is not needed for a gradient.
    assert products == cost_without()[1] + 2 * LAYERS - LAYERS // 4


def test_products_that_a_policy_saves_are_not_computed_again() -> None:
    group = tracegrad.recompute_grad(stack, policy=jax.checkpoint_policies.dots_saveable)
    mib, products = cost(tracegrad.trace(jax.value_and_grad(loss_in_groups(4, group))))
    assert mib <= 240
    assert products == cost_without()[1]


def test_other_compiler_options_are_kept() -> None:
    loss = loss_in_groups(4, tracegrad.recompute_grad(stack))
    options = {"xla_disable_hlo_passes": "all-reduce-combiner"}
    mib, _ = cost(tracegrad.trace(jax.value_and_grad(loss), compiler_options=options))
    assert mib <= 90


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("body", "least", "most"),
    # Recomputed: the carries, 4 MiB a layer, and the insides of one layer.
    [(layer, 380, 1000), (tracegrad.recompute_grad(layer), 96, 150)],
    ids=["kept", "recomputed"],
)
def test_body_of_a_scan_is_recomputed(body: Any, least: float, most: float) -> None:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (body(w, x), None), x, weights)
        return jnp.mean(x**2)

    stacked = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    shapes = ((stacked, stacked), SHAPES[1])
    compiled = tracegrad.trace(jax.value_and_grad(loss)).lower(*shapes).compile()
    assert least <= compiled.memory_analysis().temp_size_in_bytes / MIB <= most


@pytest.mark.accelerator
def test_small_loop_is_recomputed_too() -> None:
    """XLA turns loops below a kilobyte into one kernel, which must not meet a barrier in them: on
    JAX 0.10 that ended the process."""

    def step(c: jax.Array) -> jax.Array:
        return jnp.sin(jnp.cos(c))

    def loss(x: jax.Array, step: Any) -> jax.Array:
        return jax.lax.scan(lambda c, _: (step(c), c.sum()), x, None, length=3)[0].sum()

    x = jnp.arange(4.0)
    recomputed = tracegrad.recompute_grad(step)
    got = tracegrad.trace(jax.grad(lambda x: loss(x, recomputed)))(x)
    expected = jax.jit(jax.grad(lambda x: loss(x, step)))(x)
    assert jnp.allclose(got, expected, rtol=1e-6)
