"""What `memory` says of programs: the line that makes the peak, and XLA's bytes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tracegrad as tg
from tests.compilation import f32

# ------------------------------------------- programs of which one line, marked, makes the peak


def outer_product(x: jax.Array) -> jax.Array:
    wide = jnp.outer(x, x)  # the peak
    return jnp.linalg.norm(wide @ x)


def distances(x: jax.Array) -> jax.Array:
    pairs = jnp.sort(x[:, None] - x[None], axis=-1)  # the peak
    return pairs.sum()


def one_hot(table: jax.Array, ids: jax.Array) -> jax.Array:
    rows = jax.nn.one_hot(ids, table.shape[0])  # the peak
    return jnp.tanh(rows @ table)


def hidden(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for _ in range(3):
        h = jnp.tanh(x @ w["up"])  # the peak
        x = jnp.sin(h @ w["down"])
    return jnp.sum(x**2)


def scores(w: jax.Array, x: jax.Array) -> jax.Array:
    keys = x @ w
    shares = jax.nn.softmax(keys @ jnp.swapaxes(x, 1, 2))  # the peak
    return jnp.sum((shares @ x) ** 2)


def logits(w: jax.Array, x: jax.Array) -> jax.Array:
    x = jnp.sin(x)
    log = jax.nn.log_softmax(x @ w)  # the peak
    return -jnp.mean(log[:, 0])


def loop(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        h = jnp.sin(x @ w["up"])  # the peak
        return jnp.tanh(h @ w["down"]), None

    return jnp.sum(jax.lax.scan(body, x, None, length=8)[0])


def convolved(kernel: jax.Array, x: jax.Array) -> jax.Array:
    y = jax.nn.softplus(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME"))  # the peak
    return jnp.sum(y.mean((2, 3)) ** 2)


def trained(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        h = jnp.sin(x @ w["up"])  # the peak
        return jnp.mean((h @ w["down"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


def mapped(w: jax.Array, x: jax.Array) -> jax.Array:
    def one(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.linalg.inv(jnp.outer(x, x) + w))  # the peak

    return jax.vmap(one)(x)


WIDE = {"up": f32(8, 64), "down": f32(64, 8)}
SEEDED: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "outer": (outer_product, outer_product, (f32(256),)),
    "distances": (distances, distances, (f32(64, 8),)),
    "one-hot": (one_hot, one_hot, (f32(256, 4), jax.ShapeDtypeStruct((128,), jnp.int32))),
    "hidden": (hidden, jax.grad(hidden), (WIDE, f32(256, 8))),
    "scores": (scores, tg.grad(scores), (f32(8, 8), f32(2, 64, 8))),
    "logits": (logits, jax.value_and_grad(logits), (f32(8, 128), f32(64, 8))),
    "loop": (loop, jax.grad(loop), (WIDE, f32(64, 8))),
    "convolved": (convolved, jax.grad(convolved), (f32(16, 2, 3, 3), f32(2, 2, 16, 16))),
    "trained": (trained, trained, (WIDE, f32(256, 8))),
    "mapped": (mapped, mapped, (f32(8, 8), f32(64, 8))),
}


def the_peak(fun: Callable[..., Any]) -> str:
    lines, first = inspect.getsourcelines(fun)
    (found,) = [first + k for k, line in enumerate(lines) if "# the peak" in line]
    return f"test_memory.py:{found} "


@pytest.mark.accelerator
@pytest.mark.parametrize("name", SEEDED)
def test_the_line_that_makes_the_peak_is_named_first(name: str):
    written, fun, shapes = SEEDED[name]
    report = tg.memory(fun, *shapes)
    assert report.lines[0].line.startswith(the_peak(written))
    sizes = [line.size for line in report.lines if line.line]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(line.size for line in report.lines) == report.listed == max(report.timeline)


def test_what_is_no_function_or_cannot_be_compiled_is_refused():
    (rows,) = jax.export.symbolic_shape("rows")
    with pytest.raises(ValueError, match=r"XLA does not compile <lambda> on its own: .*shapes"):
        tg.memory(lambda x: jnp.tanh(x) @ x.T, f32(rows, 4))
    with pytest.raises(TypeError, match="expected a function"):
        tg.memory(3)  # type: ignore[arg-type]


def test_of_a_function_of_nnx_jit():
    arrays = f32(64, 64), f32(64, 64)
    report = tg.memory(nnx.jit(lambda w, x: jnp.sum(jnp.sin(w @ x))), *arrays)
    assert report.total == tg.memory(lambda w, x: jnp.sum(jnp.sin(w @ x)), *arrays).total


@pytest.mark.parametrize("compiled", [jax.jit, tg.trace])
def test_static_arguments_are_no_arrays(compiled):
    def step(n, w, x, mode="a"):
        for _ in range(n):
            w = w - 0.1 * jnp.sin(w @ x)
        return w if mode == "a" else w[0] * 2

    arrays, static = (f32(64, 64), f32(64, 64)), compiled(step, static_argnums=(0, 3))
    for mode in ((), ("b",)):
        plain = tg.memory(lambda w, x, mode=mode: step(3, w, x, *mode), *arrays)
        assert tg.memory(static, 3, *arrays, *mode).total == plain.total


@pytest.mark.parametrize("compiled", [tg.trace, functools.partial(jax.jit, static_argnums=0)])
def test_of_a_compiled_method(compiled):
    class Layer:
        @compiled
        def sum(self, w, x):
            return jnp.sum(jnp.sin(w @ x))

    arrays = f32(64, 64), f32(64, 64)
    plain = tg.memory(lambda w, x: jnp.sum(jnp.sin(w @ x)), *arrays)
    assert tg.memory(Layer().sum, *arrays).total == plain.total > 0


def test_values_are_told_by_what_they_are_kept_for():
    _, fun, shapes = SEEDED["trained"]
    lines = tg.memory(fun, *shapes).lines
    residual = next(line for line in lines if line.kind == "residual")
    assert residual.values.endswith("f32[256,64]")
    assert residual.kept_for.startswith("the backward pass of ")
    assert [line.kind for line in lines if not line.line] == ["argument"]


@pytest.mark.parametrize("compiled", [jax.jit, tg.trace])
def test_lines_are_those_inside_of_functions_that_are_compiled_by_themselves(compiled):
    @compiled
    def layer(x):
        with jax.named_scope("layer"):
            return jnp.tanh(x) * x

    def loss(x):
        return jnp.sum(layer(x) @ x)

    report = tg.memory(jax.grad(loss), f32(64, 64))
    at = layer.__wrapped__.__code__.co_firstlineno + 3
    assert any(line.line.startswith(f"test_memory.py:{at} ") for line in report.lines)
    assert any(line.scope == "layer" for line in report.lines)


def blocks(ws: Any, x: jax.Array) -> jax.Array:
    for i, w in enumerate(ws):
        with jax.named_scope("tower"), jax.named_scope(f"block_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ w["up"])) @ w["down"]
    return jnp.mean(x**2)


@pytest.mark.both_jax
def test_rules_of_a_traced_function_are_seen_with_the_scopes_of_the_program():
    shapes = ([WIDE] * 4, f32(512, 8))
    rule = tg.rules.recompute(tg.match.scope("block_*"))
    plain = tg.memory(tg.trace(tg.grad(blocks)), *shapes)
    ruled = tg.memory(tg.trace(tg.grad(blocks), rules=[rule]), *shapes)
    assert ruled.listed < 0.7 * plain.listed
    assert ruled.temporary < 0.7 * plain.temporary
    for report in (plain, ruled):
        assert {line.scope for line in report.lines if line.line} >= {
            f"tower/block_{i}" for i in range(3)
        }
    text = str(plain)
    assert text.startswith("memory of blocks: ")
    assert "block_0" in text


def test_a_program_that_computes_nothing_holds_its_argument_and_a_copy():
    report = tg.memory(lambda x: x, f32(8))
    assert [(line.kind, line.size) for line in report.lines] == [("result", 32), ("argument", 32)]
    assert report.lines[0].line == "copy of x"


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", [{"rows", "columns"}, {"rows"}], ids=["all axes", "some axes"])
def test_on_a_mesh_bytes_are_those_of_one_device(kind, axes):
    axis_types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=axis_types)
    spec = jax.P("rows")

    def sines(x):
        return jnp.sort(jnp.sin(x))

    mapped = jax.shard_map(sines, in_specs=spec, out_specs=spec, axis_names=axes)
    functions = [sines, mapped] if kind == "Explicit" else [mapped]
    x = jax.device_put(jnp.ones((256, 64)), jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        reports = [tg.memory(jax.jit(fun), x) for fun in functions]
    for report in reports:
        assert report.measured_on.endswith("on each of 4 devices")
        assert 256 // 2 * 64 * 4 in {line.size for line in report.lines}
