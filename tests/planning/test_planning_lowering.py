"""A planned function computes what the original does, and XLA needs the memory that was planned."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad
from tests.compilation import f32, temporary_bytes
from tracegrad.ir import Graph, Recompute
from tracegrad.planning import (
    BudgetTooSmall,
    RecomputePlan,
    plan_recompute,
    recompute_to_fit,
)

pytestmark = pytest.mark.usefixtures("compiled_fully")


def values(shapes: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 4, s.dtype), shapes)


def close(found: jax.Array, expected: jax.Array) -> bool:
    return np.allclose(
        found, expected, rtol=1e-4, atol=1e-5 * (1 + float(jnp.max(jnp.abs(expected))))
    )


def assert_gradients_stay(planned: Any, fun: Any, args: Any) -> None:
    found, expected = (tracegrad.trace(jax.grad(f))(*args) for f in (planned, fun))
    assert jax.tree.all(jax.tree.map(close, found, expected))


# ------------------------------------------------------------------------------------- programs


@jax.jit
def block(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def mlp(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = block(w, x)
    return jnp.mean(x**2)


def mlp_shapes(layers: int, batch: int, width: int) -> Any:
    layer = {"up": f32(width, width), "down": f32(width, width)}
    return [layer] * layers, f32(batch, width)


def convolutions(kernels: Any, scale: jax.Array, x: jax.Array) -> jax.Array:
    """With a custom rule (relu), an annotation of the user's and values that skip ahead."""
    skipped = []
    for k in kernels:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"))
        x = tracegrad.grad_pass_through(lambda v: jnp.round(v * 8) / 8)(x) * scale
        skipped.append(x)
    for k, s in zip(kernels, reversed(skipped), strict=True):
        x = jnp.tanh(jax.lax.conv_general_dilated(x + s, k, (1, 1), "SAME"))
    return jnp.sum(x**2)


def loop(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A scan with a carry, slices and stacked results."""

    def body(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        x = x + jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["down"])
        return x, jnp.sum(jnp.sin(x), axis=1)

    x, sums = jax.lax.scan(body, x, weights, reverse=True)
    return jnp.mean(x**2) + jnp.mean(sums**2), sums


def stacked_shapes(layers: int, batch: int, width: int) -> Any:
    weight = f32(layers, width, width)
    return {"up": weight, "down": weight}, f32(batch, width)


def first(result: Any) -> jax.Array:
    return result[0] if isinstance(result, tuple) else result


def recurrent(weights: dict[str, jax.Array], xs: jax.Array, h: jax.Array) -> jax.Array:
    """A GRU (Cho et al. 2014): several of its steps are best run again together, one at a time."""
    for x in xs:
        z, r, c = jnp.split(x @ weights["inputs"] + weights["bias"], 3, axis=-1)
        zh, rh = jnp.split(h @ weights["gates"], 2, axis=-1)
        z, r = jax.nn.sigmoid(z + zh), jax.nn.sigmoid(r + rh)
        h = (1 - z) * h + z * jnp.tanh(c + (r * h) @ weights["state"])
    return jnp.mean(h**2)


def recurrent_shapes(steps: int, batch: int, width: int) -> Any:
    shapes = {"inputs": (16, 3 * width), "bias": (3 * width,)}
    shapes |= {"gates": (width, 2 * width), "state": (width, width)}
    weights = {name: f32(*shape) for name, shape in shapes.items()}
    return weights, f32(steps, batch, 16), f32(batch, width)


RECURRENT = recurrent_shapes(12, 256, 16)

PROGRAMS: dict[str, tuple[Any, Any, str]] = {
    "recurrent": (recurrent, RECURRENT, "52%"),
    "mlp": (mlp, mlp_shapes(8, 64, 16), "40%"),
    "convolutions": (
        convolutions,
        ([f32(4, 4, 3, 3)] * 4, f32(), f32(2, 4, 16, 16)),
        "60%",
    ),
    "loop": (loop, stacked_shapes(12, 32, 16), "25%"),
}


@functools.cache
def planned(name: str) -> RecomputePlan:
    fun, shapes, budget = PROGRAMS[name]
    return plan_recompute(fun, *shapes, memory_budget=budget, measure=False)


# For numbers and not for bytes.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.mark.parametrize(
    "name",
    ["mlp", "convolutions", "loop", pytest.param("recurrent", marks=pytest.mark.slow)],
)
def test_gradients_are_those_of_the_original(name: str):
    fun, shapes, _ = PROGRAMS[name]
    args, plan = values(shapes), planned(name)
    assert plan.is_needed
    assert plan.peak <= plan.budget
    plan.rewritten().verify()
    argnums = tuple(range(len(args)))

    def step(fun: Any) -> Any:
        return jax.value_and_grad(lambda *a: first(fun(*a)), argnums)

    found = tracegrad.trace(step(plan.apply()), compiler_options=QUICKLY)(*args)
    expected = jax.jit(step(fun), compiler_options=QUICKLY)(*args)
    assert jax.tree.all(jax.tree.map(close, found, expected))


# --------------------------------------------------------------------------------------- memory


def cost(fun: Any, shapes: Any) -> tuple[int, int]:
    """XLA's own account of a program that is compiled and never run: the bytes of temporary
    buffers, and how many matrix products it has."""
    compiled = tracegrad.trace(jax.grad(lambda *a: first(fun(*a)))).lower(*shapes).compile()
    products = len(re.findall(r" = \S+ dot\(", compiled.as_text()))
    return int(compiled.memory_analysis().temp_size_in_bytes), products


@pytest.mark.parametrize("budget", ["70%", "35%"])
def test_memory_falls_and_products_are_done_again_as_planned(budget: str):
    shapes = mlp_shapes(8, 2048, 128)
    whole, products = cost(mlp, shapes)
    plan = plan_recompute(mlp, *shapes, memory_budget=budget)
    temporary, more = cost(plan.apply(), shapes)
    assert temporary / whole == pytest.approx(plan.peak / plan.peak_without, rel=0.15)
    product = 2 * 2048 * 128 * 128
    # Element-wise operations are the rest.
    assert (more - products) * product == pytest.approx(plan.flops, abs=2 * product)


def test_terms_of_a_weights_gradient_that_wait_for_each_other_leave_room_for_a_plan():
    shapes = recurrent_shapes(4, 32, 64)  # the weights are wide beside the batch
    plan = plan_recompute(recurrent, *shapes, memory_budget="90%")
    assert plan.held is not None
    assert plan.held <= plan.budget
    assert 0 < plan.flops < 0.05 * plan.forward_flops


def scaled_layers(weights: Any, x: jax.Array) -> jax.Array:
    """A batch norm of the means of x and of its square, with scale and bias, and a residual sum:
    all of it is computed inside what reads it, but for what the products read."""
    for w in weights:
        y = x @ w["kernel"]
        mean = y.mean(0)
        scale = jax.lax.rsqrt(jnp.mean(y**2, 0) - mean**2 + 1e-5) * w["scale"]
        x = jax.nn.relu(x + (y - mean) * scale + w["bias"])
    return jnp.mean(x**2)


def attention(weights: Any, x: jax.Array) -> jax.Array:
    """The sum of a softmax is written as large as what it divides."""
    for w in weights:
        queries, keys, values = (x @ w, x @ w.T, x @ (w * w))
        x = x + jax.nn.softmax(queries @ jnp.swapaxes(keys, 1, 2)) @ values
    return jnp.mean(x**2)


def scaled_rows(weights: Any, x: jax.Array) -> jax.Array:
    """The product of two broadcasts is kept."""
    for w in weights:
        scale = jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * w["scale"]
        x = x + jnp.tanh((x * scale + w["bias"]) @ w["kernel"])
    return jnp.mean(x**2)


SCALED = {"kernel": f32(64, 64), "scale": f32(64), "bias": f32(64)}


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (scaled_layers, ([SCALED] * 6, f32(1024, 64))),
        (scaled_rows, ([SCALED] * 10, f32(1024, 64))),
        (attention, ([f32(64, 64)] * 6, f32(16, 256, 64))),
    ],
)
def test_what_is_kept_is_what_xla_keeps(fun: Any, shapes: Any):
    kept = plan_recompute(fun, *shapes, memory_budget=1.0).peak_without
    assert kept == pytest.approx(cost(fun, shapes)[0], rel=0.1)


def test_memory_of_a_loop_falls_as_planned():
    shapes = stacked_shapes(16, 2048, 64)
    plan = plan_recompute(loop, *shapes, memory_budget="20%", measure=False)
    assert plan.scans
    share = cost(plan.apply(), shapes)[0] / cost(loop, shapes)[0]
    assert share == pytest.approx(plan.peak / plan.peak_without, rel=0.15)


def test_a_rule_makes_a_traced_function_fit_and_leaves_one_that_fits_as_it_is():
    shapes = mlp_shapes(6, 64, 16)
    graph = tracegrad.graph(mlp, *shapes)
    assert recompute_to_fit("1GiB", measure=False)(graph) is graph
    plan = plan_recompute(mlp, *shapes, memory_budget="1GiB", measure=False)
    assert not plan.is_needed
    assert plan.flops == 0
    fits = tracegrad.trace(mlp, rules=[recompute_to_fit("60%", measure=False)])
    assert fits.graph(*shapes).find(lambda o: isinstance(o.node, Recompute))
    args = values(shapes)
    assert_gradients_stay(fits, mlp, args)


# ------------------------------------------------------------------------- what a plan respects


def penalty(weights: Any, x: jax.Array) -> jax.Array:
    """A loss that takes a gradient itself."""

    def model(x: jax.Array) -> jax.Array:
        for w in weights:
            x = x + jnp.tanh(x @ w["up"]) * jax.nn.sigmoid(x)
        return jnp.sum(x)

    return jnp.mean((jnp.sum(jax.grad(model)(x) ** 2, axis=-1) - 1) ** 2)


@pytest.mark.slow
def test_of_gradients_inside_of_others_a_budget_is_that_of_the_outermost():
    """What is planned is the gradient of the penalty, in which that of the loss is a part: that one
    alone holds a quarter of what both do."""
    weights, x = values(mlp_shapes(6, 512, 16))

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.grad(penalty)(weights, x)

    without = temporary_bytes(jax.jit(step), weights, x)
    fitted = tracegrad.trace(step, memory_budget="90%")
    assert temporary_bytes(fitted, weights, x) <= 0.9 * without
    assert all(jax.tree.leaves(jax.tree.map(close, fitted(weights, x), step(weights, x))))
    with pytest.raises(BudgetTooSmall):
        tracegrad.trace(step, memory_budget=without // 10)(weights, x)


def test_a_gradient_that_jax_has_traced_inside_of_another_is_planned_outside_of_it():
    """JAX traces a jitted function once where its rules are the same ones."""
    weights, x = values(mlp_shapes(2, 8, 4))
    gradient = jax.jit(lambda *args: jax.grad(mlp)(*args))
    planned: list[str] = []

    def plan(graph: Graph) -> Graph:
        planned.append(graph.name)
        return graph

    plan.for_the_outermost = True

    def outer(weights: Any, x: jax.Array) -> jax.Array:
        return sum(map(jnp.sum, jax.tree.leaves(gradient(weights, x))))

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.grad(outer)(weights, x), gradient(weights, x), jax.grad(outer)(weights, x)

    tracegrad.trace(step, rules=[plan])(weights, x)
    assert planned == ["outer", "mlp", "outer", "step"]


def fourier_layers(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = x + jax.nn.gelu(jnp.fft.irfft(jnp.fft.rfft(x) * w, n=x.shape[-1]))
    return jnp.mean(x**2)


def complex_layers(weights: Any, z: jax.Array) -> jax.Array:
    for w in weights:
        z = z + jnp.tanh(z @ w)
    return jnp.mean(jnp.abs(z) ** 2)


@pytest.mark.parametrize(("fun", "dtype"), [(fourier_layers, "f4"), (complex_layers, "c8")])
def test_complex_values_are_saved(fun: Any, dtype: str):
    """JAX cannot save any: it rounds what it saves, which it has not for complex numbers."""
    rng = np.random.default_rng(0)
    shape = (17,) if dtype == "f4" else (16, 16)
    w = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    weights = [jnp.asarray(w / 8, "c8")] * 6
    x = jnp.asarray(rng.normal(size=(256, 32 if dtype == "f4" else 16)), dtype)
    expected = jax.jit(jax.grad(fun))(weights, x)
    saved = 0
    for share in (0.8, 0.6):
        plan = plan_recompute(fun, weights, x, memory_budget=share, wrt=0, measure=False)
        saved += sum(len(segment.saved) for segment in plan.segments)
        found = tracegrad.trace(jax.grad(plan.apply()))(weights, x)
        assert all(jax.tree.leaves(jax.tree.map(close, found, expected)))
    assert saved


def test_effects_happen_once():
    seen: list[float] = []

    def fun(weights: Any, x: jax.Array) -> jax.Array:
        for i, w in enumerate(weights):
            x = block(w, x)
            if i % 2:
                jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0])
        return jnp.mean(x**2)

    args = values(mlp_shapes(6, 64, 16))
    plan = plan_recompute(fun, *args, memory_budget="70%", measure=False)
    assert plan.flops > 0
    jax.block_until_ready(jax.jit(jax.grad(plan.apply()))(*args))
    jax.effects_barrier()
    assert len(seen) == 3


def test_what_the_user_recomputes_stays_recomputed_with_its_policy():
    policy = jax.checkpoint_policies.dots_saveable
    mine = jax.checkpoint(lambda w, x: block(w, block(w, x)), policy=policy)

    def fun(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = block(w, mine(w, x))
        return jnp.mean(x**2)

    args = values(mlp_shapes(4, 64, 16))
    plan = plan_recompute(fun, *args, memory_budget="70%", measure=False)
    assert plan.flops > 0
    inside = plan.rewritten().find(lambda o: isinstance(o.node, Recompute))
    kept = [o.node for o in inside if o.node.policy is policy]
    assert len(kept) == 4
    assert_gradients_stay(plan.apply(), fun, args)


def test_values_that_the_function_closes_over_get_their_gradient():
    args = values(mlp_shapes(6, 32, 8))

    def outer(weights: Any) -> jax.Array:
        def inner(x: jax.Array) -> jax.Array:
            return mlp(weights, x)

        plan = plan_recompute(inner, args[1], memory_budget="70%")
        assert plan.is_needed
        return plan.apply()(args[1])

    found, expected = jax.jit(jax.grad(outer))(args[0]), jax.jit(jax.grad(mlp))(*args)
    assert jax.tree.all(jax.tree.map(close, found, expected))


# ------------------------------------------------------------------------------ the plan as data


def test_a_program_that_writes_nothing_has_an_empty_plan():
    plan = plan_recompute(lambda x: x.T, f32(2, 3), memory_budget="50%", measure=False)
    assert plan.segments == ()
    assert plan.peak == plan.flops == 0
    assert tracegrad.trace(lambda x: x.T, memory_budget="1 B")(jnp.ones((2, 3))).shape == (3, 2)


def test_a_plan_prints_as_a_table_and_draws_itself():
    plan = plan_recompute(mlp, *mlp_shapes(8, 64, 16), memory_budget="40%", measure=False)
    text = str(plan)
    assert re.search(r"peak +\S+ KiB of \S+ KiB \((3[89]|40)\.\d%\) in the model", text)
    assert len([line for line in text.splitlines() if " recompute " in line]) == sum(
        segment.recompute for segment in plan.segments
    )
    before, after = plan.timeline()
    assert (max(before), max(after)) == (plan.peak_without, plan.peak)
    (memory,) = plan.plot().axes
    assert max(memory.lines[1].get_ydata()) * 2**20 == pytest.approx(plan.peak)


def test_a_program_of_scans_can_be_planned_for_many_budgets():
    # One that keeps some of what its body computes lies between everything and nothing.
    shapes, shares = stacked_shapes(12, 32, 16), (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
    plans = [plan_recompute(loop, *shapes, memory_budget=share, measure=False) for share in shares]
    assert len({plan.flops for plan in plans}) > 2
