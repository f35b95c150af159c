"""What XLA does with the results of a program, looked up in what it compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg
from tests.compilation import compiled_to, f32, kept_on_disk
from tracegrad.ir import Graph
from tracegrad.planning import plan_recompute
from tracegrad.planning.flatten import flatten
from tracegrad.planning.fusion import Fusion, read_fates, without_compiling
from tracegrad.planning.measuring import MeasuredGradient

pytestmark = pytest.mark.both_jax


def ops(graph: Graph, fusion: Fusion, what: str) -> list[str]:
    """The operations of which something is so."""
    pairs = zip(graph.nodes, fusion, strict=True)
    return [node.op for node, fate in pairs if getattr(fate, what)]


def program(*nodes: Any) -> Graph:
    def run(x: jax.Array) -> jax.Array:
        for node in nodes:
            x = node(x)
        return x

    return tg.graph(run, f32(8, 8))


def of_gradient(graph: Graph) -> Fusion:
    return MeasuredGradient(graph).held_and_fusion(graph)[1]


# What is turned is made of an argument, before anything else; the first cotangent is read twice,
# the second time where the steps of two nodes run as one.
STEPS = """HloModule jit_f, is_scheduled=true

%both (p: f32[8,8], p1: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %p1 = f32[8,8] parameter(1)
  %m = f32[8,8] multiply(%p, %p1), metadata={op_name="transpose(jvp(tracegrad.node.2))/mul"}
  ROOT %n = f32[8,8] multiply(%m, %p1), metadata={op_name="transpose(jvp(tracegrad.node.1))/mul"}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %turned = f32[8,8] transpose(%x), dimensions={1,0}, metadata={op_name="transpose(jvp(tracegrad.node.0))/transpose"}
  %sin = f32[8,8] sine(%x), metadata={op_name="jvp(tracegrad.node.0)/sin"}
  %sinh = f32[8,8] sine(%sin), metadata={op_name="jvp(tracegrad.node.1)/sinh"}
  %exp = f32[8,8] exponential(%sinh), metadata={op_name="jvp(tracegrad.node.2)/exp"}
  %tanh = f32[8,8] tanh(%exp), metadata={op_name="jvp(tracegrad.node.3)/tanh"}
  %first = f32[8,8] multiply(%tanh, %tanh), metadata={op_name="transpose(jvp(tracegrad.node.3))/mul"}
  %wide = f32[16,8] concatenate(%first, %first), dimensions={0}, metadata={op_name="transpose(jvp(tracegrad.node.3))/concatenate"}
  %second = f32[8,8] fusion(%first, %exp), kind=kLoop, calls=%both
  ROOT %gradient = f32[8,8] dot(%second, %turned), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="transpose(jvp(tracegrad.node.0))/dot_general"}
}
"""  # noqa: E501


def test_what_the_backward_pass_has_made_is_counted_for_the_step_in_which_it_is_there():
    graph = program(jnp.sin, jnp.sinh, jnp.exp, jnp.tanh)
    found = read_fates(graph, compiled_to(STEPS))
    size = 4 * 64
    # The last two steps run as one, in which the first cotangent is read, and that of `sin` made.
    assert [fate.cotangents for fate in found] == [2 * size, 2 * size, 2 * size, 3 * size]
    on_two = read_fates(graph, compiled_to(STEPS), devices=2)
    assert [fate.cotangents for fate in on_two] == [None] * 4


# As for a TPU: layouts in tiles, memories by number, and what runs as one with others inside.
COMPILED_FOR_TPU = """HloModule jit_f, is_scheduled=true

%nested (p0: f32[8,8]) -> f32[8,8] {
  %p0 = f32[8,8]{1,0:T(8,128)} parameter(0)
  %e = f32[8,8]{1,0:T(8,128)} exponential(%p0), metadata={op_name="jvp(tracegrad.node.1)/exp"}
  ROOT %t = f32[8,8]{1,0:T(8,128)} multiply(%e, %p0), metadata={op_name="transpose(jvp(tracegrad.node.1))/mul"}
}

%back (p: f32[8,8], p1: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0:T(8,128)} parameter(0)
  %p1 = f32[8,8]{1,0:T(8,128)} parameter(1)
  %both = f32[8,8]{1,0:T(8,128)} fusion(%p), kind=kLoop, calls=%nested, metadata={op_name="transpose(jvp(tracegrad.node.1))/mul"}
  ROOT %d = f32[8,8]{1,0:T(8,128)} convolution(%both, %p1), dim_labels=bf_io->bf, metadata={op_name="transpose(jvp(tracegrad.node.0))/dot_general"}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0:T(8,128)} parameter(0)
  %copy-start = (f32[8,8]{1,0:T(8,128)S(1)}, f32[8,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = f32[8,8]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %sine = f32[8,8]{1,0:T(8,128)S(1)} sine(%copy-done), metadata={op_name="jvp(tracegrad.node.0)/sin"}
  ROOT %gradient = f32[8,8]{1,0:T(8,128)} fusion(%sine, %x), kind=kOutput, calls=%back, metadata={op_name="transpose(jvp(tracegrad.node.0))/dot_general"}
}
"""  # noqa: E501


def test_what_runs_inside_of_what_runs_as_one_is_seen():
    graph = program(jnp.sin, jnp.exp, lambda x: 2 * x)
    found = read_fates(graph, compiled_to(COMPILED_FOR_TPU))
    assert ops(graph, found, "inlined") == ["exp"]


OF_NOTHING = """HloModule jit_f

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  ROOT %x = f32[8,8] parameter(0)
}
"""


def test_of_what_nothing_is_seen_all_but_views_is_taken_to_be_written():
    graph = program(jnp.sin, jnp.transpose, jnp.exp)
    assert ops(graph, without_compiling(graph), "inlined") == ["transpose"]
    assert read_fates(graph, compiled_to(OF_NOTHING)) == without_compiling(graph)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_computed_in_another_precision_is_seen(dtype: Any):
    shapes = [jax.ShapeDtypeStruct((64, 64), dtype)] * 4, jax.ShapeDtypeStruct((512, 64), dtype)
    graph = flatten(tg.graph(layers, *shapes))
    fusion = of_gradient(graph)
    written = [node.op for node, fate in zip(graph.nodes, fusion, strict=True) if not fate.inlined]
    assert written.count("tanh") >= 3
    plan = plan_recompute(layers, *shapes, memory_budget="60%")
    assert plan.held is not None
    assert plan.held <= plan.budget


def test_a_plan_is_the_same_of_a_gradient_that_jax_has_kept_on_disk(tmp_path: Path):
    with kept_on_disk(tmp_path):
        jax.clear_caches()
        plans = []
        for _ in range(2):
            tg.clear_caches()
            plans.append(
                plan_recompute(layers, [f32(64, 64)] * 4, f32(512, 64), memory_budget="50%")
            )
            kept = len([*tmp_path.iterdir()])
            jax.clear_caches()
        assert kept > 0
        assert plans[0] == plans[1]
        assert plans[0].is_needed


def layers(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def test_programs_that_lower_to_one_text_are_seen_each_by_itself():
    def sin_before(w: jax.Array, x: jax.Array) -> jax.Array:
        jnp.sin(x)  # for nothing
        return jnp.sum(jnp.exp(jnp.tanh(x @ w) @ w) ** 2)

    def cos_behind(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.exp(jnp.tanh(x @ w) @ w)
        jnp.cos(x)
        return jnp.sum(y**2)

    for loss in (sin_before, cos_behind):
        loss.__name__ = "loss"
        graph = flatten(tg.graph(loss, f32(64, 64), f32(512, 64)))
        assert {"sin", "cos"}.isdisjoint(ops(graph, of_gradient(graph), "inlined"))
