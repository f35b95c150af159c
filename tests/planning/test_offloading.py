"""What waits in the host's memory: on a CPU, which has no other, by what JAX writes for a GPU."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import tracegrad as tg
from tracegrad import _jax
from tracegrad.insight.live_ranges import find_peak
from tracegrad.planning import BudgetTooSmall, load_plan, plan_recompute, recompute_to_fit


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layer(x: jax.Array, w: Any) -> jax.Array:
    return x + jnp.sin(x @ w["up"]) @ w["down"]


def unrolled(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = layer(x, w)
    return jnp.mean(x**2)


def scanned(weights: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2)


LAYERS = 5
PROGRAMS: dict[str, tuple[Any, Any, int]] = {
    "unrolled": (unrolled, ([{"up": f32(4, 8), "down": f32(8, 4)}] * LAYERS, f32(64, 4)), 1),
    "scanned": (
        scanned,
        ({"up": f32(LAYERS, 4, 8), "down": f32(LAYERS, 8, 4)}, f32(64, 4)),
        LAYERS,
    ),
}


def moved(fun: Any, *shapes: Any) -> dict[str, list[int]]:
    """The bytes of each value that its gradient brings to the host, and to the device, on a GPU."""
    traced = jax.jit(jax.grad(fun, (0, 1))).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    placed = r'placement = "(\w+)"\}\} : \(tensor<([\dx]+)xf32>\)'
    found: dict[str, list[int]] = {"pinned_host": [], "device": []}
    for where, shape in re.findall(placed, text):
        found[where].append(4 * math.prod(map(int, shape.split("x"))))
    return found


@pytest.mark.accelerator
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_brings_to_the_host_what_it_says_and_back(name: str, tmp_path: Path):
    fun, shapes, times = PROGRAMS[name]
    with pytest.raises(BudgetTooSmall):
        plan_recompute(fun, "35%", measure=False)(*shapes)
    plan = plan_recompute(fun, "35%", measure=False, offload=0.5)(*shapes)
    assert plan.flops_bound <= plan.flops
    found = moved(plan.apply(), *shapes)
    assert times * sum(found["pinned_host"]) == plan.offloaded > 0
    assert sorted(found["pinned_host"]) == sorted(found["device"])
    assert "on the host" in str(plan)
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json", fun)(*shapes)
    assert (again, again.offloaded) == (plan, plan.offloaded)
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes)
    expected = jax.jit(jax.grad(fun, (0, 1)))(*values)
    for a, b in zip(
        jax.tree.leaves(jax.jit(jax.grad(plan.apply(), (0, 1)))(*values)),
        jax.tree.leaves(expected),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_where_nothing_is_saved_by_what_goes_a_plan_does_without(monkeypatch: pytest.MonkeyPatch):
    # A CPU that says that it could: what goes to the host's memory stays where it is.
    monkeypatch.setattr("tracegrad._jax.has_host_memory", lambda _: True)
    shapes = [{"up": f32(32, 64), "down": f32(64, 32)}] * LAYERS, f32(1024, 32)
    assert plan_recompute(unrolled, "60%", measure=False, offload=0.1)(*shapes).offloaded
    plan = plan_recompute(unrolled, "60%", offload=0.1)(*shapes)
    assert plan.held is not None
    assert plan.held <= plan.budget
    assert plan.offloaded == 0 < plan.flops


def test_where_the_way_to_the_host_is_long_nothing_goes():
    fun, shapes, _ = PROGRAMS["unrolled"]
    alone = plan_recompute(fun, "50%", measure=False)(*shapes)
    short = plan_recompute(fun, "50%", measure=False, offload=0.5)(*shapes)
    assert short.flops < alone.flops
    long = plan_recompute(fun, "50%", measure=False, offload=1e6)(*shapes)
    assert (long.flops, long.offloaded) == (alone.flops, 0)


def test_on_a_mesh_what_goes_stays_split():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    fun, (weights, x), times = PROGRAMS["scanned"]
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    with jax.set_mesh(mesh):
        split = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
        plan = plan_recompute(fun, "30%", measure=False, offload=0.5)(weights, split)
        found = moved(plan.apply(), weights, split)
    assert times * sum(found["pinned_host"]) == 4 * plan.offloaded > 0


def offloading_block(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + checkpoint_name(jnp.sin(checkpoint_name(x, "x") @ w), "h") ** 2  # type: ignore[no-untyped-call]


TO_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["x", "h"],
    offload_src="device",
    offload_dst="pinned_host",
)
TO_KEEP = jax.checkpoint_policies.save_only_these_names("x", "h")


def test_what_a_users_policy_offloads_takes_nothing_of_the_device():
    def loss(block: Any) -> Any:
        return lambda w, x: jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0])

    shapes = (f32(6, 8, 8), f32(32, 8))
    theirs = loss(jax.checkpoint(offloading_block, policy=TO_HOST))
    ours = loss(tg.recompute_grad(offloading_block, policy=TO_HOST))
    expected = moved(theirs, *shapes)
    assert expected["pinned_host"]
    assert moved(ours, *shapes) == expected
    assert moved(tg.graph(ours)(*shapes).to_callable(), *shapes) == expected
    kept = plan_recompute(loss(offloading_block), "100%", measure=False)(*shapes)
    sent = plan_recompute(theirs, "100%", measure=False)(*shapes)
    assert kept.residual - sent.residual >= 6 * sum(expected["pinned_host"])


def test_what_is_offloaded_is_not_held_by_a_device_with_a_memory_of_its_own():
    def loss(policy: Any) -> Any:
        block = jax.checkpoint(offloading_block, policy=policy)

        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return block(x, w), None

        return jax.grad(lambda w, x: jnp.sum(jax.lax.scan(body, x, w)[0]))

    shapes = (f32(6, 8, 8), f32(32, 8))
    kept = find_peak(tg.graph(loss(TO_KEEP))(*shapes), is_host=False)
    sent = find_peak(tg.graph(loss(TO_HOST))(*shapes), is_host=False)
    on_a_cpu = find_peak(tg.graph(loss(TO_HOST))(*shapes))
    names, size = 2, 4 * 6 * 32 * 8
    assert kept.size - sent.size >= names * size * 5 / 6  # one of them is back
    assert on_a_cpu.size - sent.size >= names * size


def test_a_cpu_has_no_memory_but_the_hosts():
    for offload, measure in ((True, True), (True, False), (10.0, True)):
        with pytest.raises(ValueError, match=r"'cpu' has no other.*measure=False"):
            plan_recompute(unrolled, "50%", offload=offload, measure=measure)
    with pytest.raises(ValueError, match="has no other"):
        recompute_to_fit("50%", offload=True)
    with pytest.raises(ValueError, match="above zero, not -1"):
        plan_recompute(unrolled, "50%", offload=-1, measure=False)
    with pytest.raises(TypeError, match="FLOPs for a byte, not '25GB'"):
        plan_recompute(unrolled, "50%", offload="25GB", measure=False)  # type: ignore[arg-type]


@pytest.mark.accelerator
def test_what_a_transfer_costs_is_measured_where_jax_lets_one_ask():
    assert 0 < _jax.transfer_flops(jax.devices()[0], size=64) < math.inf


@pytest.mark.accelerator
def test_where_a_device_has_its_own_memory_a_plan_that_was_measured_keeps_the_budget():
    if not _jax.has_host_memory(jax.devices()[0]):
        pytest.skip("a CPU has no memory but the host's")
    shapes = {"up": f32(8, 256, 512), "down": f32(8, 512, 256)}, f32(4096, 256)
    plan = plan_recompute(scanned, "35%", offload=True)(*shapes)
    assert plan.held is not None
    assert plan.held <= plan.budget
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 16, s.dtype), shapes)
    found, expected = (jax.jit(jax.grad(f, (0, 1)))(*args) for f in (plan.apply(), scanned))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.max(jnp.abs(b))))
