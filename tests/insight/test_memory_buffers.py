"""What `memory` tells of XLA's own buffers: what they add up to, and whose they are."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.compilation import compiled_to, f32, kept_on_disk
from tracegrad.insight.value_flow import ValueFlow
from tracegrad.insight.xla_buffers import account_of_buffers
from tracegrad.planning import hlo

pytestmark = pytest.mark.both_jax


def line_of(fun: Callable[..., Any], comment: str) -> str:
    """The place of the line of a function that has a comment."""
    lines, first = inspect.getsourcelines(fun)
    (found,) = [first + k for k, line in enumerate(lines) if f"# {comment}" in line]
    return f"test_memory_buffers.py:{found}"


def two_loops(w: jax.Array, x: jax.Array) -> jax.Array:
    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(x @ w), None

    def outer(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        x, _ = jax.lax.scan(inner, x, None, length=3)
        return x, jnp.sum(x)

    x, sums = jax.lax.scan(outer, x, None, length=4)
    return jnp.sum(x**2) + jnp.prod(sums)


def branches(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ w), lambda x: jnp.cos(x) @ w, x)
    return jnp.sum(x**2)


def while_loop(w: jax.Array, x: jax.Array) -> jax.Array:
    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, x = state
        return i + 1, jnp.sort(x @ w)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (jnp.int32(0), x))[1]


def in_half_precision(w: jax.Array, x: jax.Array) -> jax.Array:
    w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w).astype(jnp.float32))


def of_each(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.vmap(lambda row: jnp.sin(jnp.outer(row, row) @ w).sum())(x))


def updated(w: jax.Array, x: jax.Array) -> jax.Array:
    rows = jnp.zeros((256, 64)).at[jnp.arange(64)].set(jnp.sort(w))
    return jnp.sum(jnp.sin(x @ w) @ rows.T)


def of_many_types(w: jax.Array, x: jax.Array) -> list[jax.Array]:
    types = ("bool", "int8", "uint16", "float16", "complex64")
    return [jnp.sort(x).astype(dtype) for dtype in types]


SHAPES = f32(64, 64), f32(256, 64)
PROGRAMS: dict[str, Callable[..., Any]] = {
    "two loops": jax.grad(two_loops),
    "branches": jax.grad(branches),
    "while": while_loop,
    "half precision": jax.grad(in_half_precision),
    "many types": of_many_types,
    "vmap": jax.grad(of_each),
    "updated": jax.value_and_grad(updated, argnums=(0, 1)),
    "donated": tg.trace(lambda w, x: (w - tg.grad(two_loops)(w, x), jnp.sin(x)), donate_argnums=0),
    "second order": jax.hessian(lambda w, x: jnp.sum(jnp.sin(x[:8, :8] @ w[:8, :8]))),
}


@pytest.mark.accelerator
@pytest.mark.parametrize("name", PROGRAMS)
def test_lines_add_up_to_what_xla_holds(name: str):
    fun = PROGRAMS[name]
    report = tg.memory(fun, *SHAPES)
    jitted = fun if hasattr(fun, "lower") else jax.jit(fun)
    stats = jitted.lower(*SHAPES).compile().memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert report.total == total - stats.alias_size_in_bytes
    assert report.temporary == stats.temp_size_in_bytes
    assert report.measured_on.endswith(f", JAX {jax.__version__}")
    assert report.listed == sum(line.size for line in report.lines) == max(report.timeline)
    assert 0.98 * report.total <= report.listed <= report.total
    assert all(line.line for line in report.lines if line.kind != "argument")


def test_where_xla_does_not_say_which_buffers_there_are_nothing_is_listed():
    compiled = jax.jit(PROGRAMS["two loops"]).lower(*SHAPES).compile()
    account = account_of_buffers(hlo.module_of(compiled), analysis=None, lines=None)
    assert (account.buffers, account.timeline) == ([], ())
    report = tg.memory(PROGRAMS["two loops"], *SHAPES)
    nothing = dataclasses.replace(report, lines=(), listed=0, at="", timeline=())
    assert "XLA does not list its buffers for this device" in str(nothing)
    assert nothing.total == report.total


def test_what_a_loop_stacks_is_of_the_line_that_computes_it():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            h = jnp.sin(x @ w)  # stacked
            return h, None

        return jnp.sum(jax.lax.scan(body, x, None, length=16)[0] ** 2)

    report = tg.memory(jax.grad(loss), *SHAPES)
    first = report.lines[0]
    place = line_of(loss, "stacked")
    assert first.line.startswith(f"{place} ")
    assert first.kind == "residual"
    assert "f32[16,256,64]" in first.values
    assert first.size >= 2 * 16 * 256 * 64 * 4  # x, and the cosine of x @ w, or x @ w itself
    assert first.kept_for.startswith("the backward pass of ")
    assert first.kept_for.endswith(place)


def test_a_function_of_a_library_is_told_by_the_line_that_calls_it():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.nn.silu(x @ w)  # one
        return jnp.sum(jax.nn.silu(jnp.sort(x) @ w) ** 2)  # another

    report = tg.memory(jax.grad(loss), *SHAPES)
    held: Counter[str] = Counter()
    for each in report.lines:
        held[each.line.partition(" ")[0]] += each.size
    for comment in ("one", "another"):  # each keeps as much as any residual of silu
        assert held[line_of(loss, comment)] >= 256 * 64 * 4


def test_what_branches_return_for_the_backward_pass_is_of_their_lines():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jax.lax.cond(
                x.sum() > 0,
                lambda x: jnp.tanh(jnp.sin(x @ w) @ w),  # the branch
                lambda x: x * 2,
                x,
            )
        return x.sum()

    report = tg.memory(tg.grad(loss), *SHAPES)
    first = report.lines[0]
    assert first.kind == "residual"
    assert first.line.startswith(f"{line_of(loss, 'the branch')} ")
    assert first.size > report.listed / 2


def test_in_the_place_of_a_result_is_told_what_is_there_at_the_peak():
    def fun(x: jax.Array) -> jax.Array:
        rows = jnp.sort(x)  # early
        wide = jnp.sort(jnp.tile(rows[:1] + x, (4, 1)), axis=0).sum()  # the peak
        return jnp.cos(rows * wide)  # late

    lines = tg.memory(fun, f32(512, 512)).lines
    early = [line for line in lines if line.line.startswith(f"{line_of(fun, 'early')} ")]
    assert [(line.kind, line.size) for line in early] == [("activation", 512 * 512 * 4)]
    assert not any(line.kind == "result" for line in lines)


def test_of_a_function_that_jax_traced_for_another_program_lines_are_of_this_one():
    def one(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 6, lambda _, x: jnp.sin(x @ w), x).sum()

    def other(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jnp.sin(jnp.cos(x) @ w), None), x, None, 6)[0].sum()

    tg.memory(jax.grad(one), *SHAPES)
    lines, first = inspect.getsourcelines(other)
    report = tg.memory(jax.grad(other), *SHAPES)
    places = {line.line.partition(" ")[0] for line in report.lines if line.line}
    assert places <= {f"test_memory_buffers.py:{first + k}" for k in range(len(lines))}


def test_a_step_of_equinox_filter_jit_has_what_xla_holds():
    def step(model: eqx.nn.MLP, x: jax.Array) -> eqx.nn.MLP:
        return eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)

    model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
    report = tg.memory(eqx.filter_jit(step), model, jnp.ones((128, 8)))
    assert any(line.kind == "residual" for line in report.lines)


def test_arrays_that_are_written_into_the_program_are_told_beside():
    table = np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)
    report = tg.memory(lambda x: jnp.sort(x @ table), f32(4, 64))
    given = sum(line.size for line in report.lines if line.kind == "argument")
    assert report.constants + given >= table.nbytes
    if report.constants >= table.nbytes:
        assert "constant arrays in the program hold 1 MiB" in str(report)


def test_lines_of_one_program_are_not_taken_for_those_of_another_that_jax_has_kept(tmp_path: Path):
    def one(x):
        return jnp.sort(jnp.sin(x))

    first = one

    def one(x):  # of the same name, on another line
        return jnp.sort(jnp.sin(x))

    with kept_on_disk(tmp_path):
        for fun in (first, one, first):
            jax.clear_caches()
            line = inspect.getsourcelines(fun)[1] + 1
            assert f"test_memory_buffers.py:{line} " in str(tg.memory(fun, f32(512, 512)))
        assert [*tmp_path.iterdir()]


def test_a_copy_of_an_argument_says_of_which():
    report = tg.memory(
        lambda tree: {"a": tree["a"].T, "b": tree["b"]}, {"a": f32(64, 32), "b": f32(8)}
    )
    assert "copy of tree['b']" in [line.line for line in report.lines]


# -------------------------------------------------------------------------------- what XLA writes


# As for a GPU: what runs as one has several results, and what runs aside begins and is waited for.
FOR_A_GPU = """HloModule jit_f, is_scheduled=true

%sums (p0: f32[8,8]) -> (f32[8,8], f32[8,8]) {
  %p0 = f32[8,8] parameter(0)
  %less = f32[8,8] subtract(%p0, %p0), metadata={op_name="jit(f)/jvp()/sub"}
  %square = f32[8,8] multiply(%less, %less), metadata={op_name="jit(f)/transpose(jvp())/mul"}
  ROOT %both = (f32[8,8], f32[8,8]) tuple(%square, %less)
}

%aside (p1: f32[8,8]) -> f32[8,8] {
  %p1 = f32[8,8] parameter(0)
  ROOT %sine = f32[8,8] sine(%p1), metadata={op_name="jit(f)/jvp()/sin"}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %exp = f32[8,8] exponential(%x), metadata={op_name="jit(f)/jvp()/exp"}
  %start = ((f32[8,8]), f32[8,8]) async-start(%exp), calls=%aside
  %log = f32[8,8] log(%x), metadata={op_name="jit(f)/jvp()/log"}
  %done = f32[8,8] async-done(%start)
  %fused = (f32[8,8], f32[8,8]) fusion(%done), kind=kLoop, calls=%sums
  %first = f32[8,8] get-tuple-element(%fused), index=0
  ROOT %sum = f32[8,8] add(%first, %log), metadata={op_name="jit(f)/transpose(jvp())/add"}
}
"""


def test_what_a_gpu_runs_aside_and_as_one_is_followed():
    module = compiled_to(FOR_A_GPU)
    flow = ValueFlow(module)
    by_op = {each.op: each for each in module.entry.instructions.values()}
    begins, done = by_op["exponential"].key, by_op["async-done"].key
    (started,) = flow.reads((begins, ()))
    told = flow.reading(started)
    assert told is not None
    assert told.name == "sin"
    assert flow.last_read((begins, ())) == flow.order[done]  # and not when it has begun
    start = by_op["async-start"].key, (1,)
    begun = flow.content(start)
    assert begun is not None
    assert begun.name == "sin"
    (read,) = flow.reads(start)
    # A subtraction of the forward pass, in what runs in the backward pass.
    told = flow.reading(read)
    assert told is not None
    assert (told.name, told.is_backward) == ("mul", True)


def test_settings_of_jax_are_as_they_were_after_lines_are_kept():
    before = jax.config.jax_traceback_in_locations_limit
    inside = []

    def fails() -> None:
        with hlo.lines_kept():
            inside.append(jax.config.jax_traceback_in_locations_limit)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert inside[0] > before
    assert jax.config.jax_traceback_in_locations_limit == before
    first, second = hlo.lines_kept(), hlo.lines_kept()  # as in two threads
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert jax.config.jax_traceback_in_locations_limit > before
    second.__exit__(None, None, None)
    assert jax.config.jax_traceback_in_locations_limit == before
    assert not jax.config.jax_compilation_cache_include_metadata_in_key
