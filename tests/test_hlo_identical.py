"""A traced function costs nothing: XLA makes the same program of it as of the function itself.

Compared is what XLA gets, the whole StableHLO and the compiler options; and for some programs what
it makes of that, the whole optimised HLO, after removing where instructions come from (their
``metadata={...}`` and the tables of files and stack frames at the head, to which the metadata
point), since tracegrad's own frames or none may stand there, and from JAX 0.12 on the function's
scope twice. XLA names instructions after these scopes, so that the names of instructions and
computations become numbers, in the order in which they appear. The name of the module stays.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from harnesses import rebuilt
from jax.sharding import PartitionSpec as P
from programs import PROGRAMS, Program

import tracegrad
from tracegrad import _jax

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("compiled_fully")]

# What XLA must be told so that it does not merge recomputed code with the original, on JAX before
# 0.11.2; tracegrad says it itself. A program that recomputes is compared with jit's under the same.
KEEP_RECOMPUTED = _jax.keep_recompute_options("cpu")

METADATA = re.compile(r',? ?metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
TABLES = re.compile(
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*\n?", re.MULTILINE
)


NAMES = re.compile(r"%[\w.-]+")


def without_metadata(hlo: str) -> str:
    numbers: dict[str, str] = {}
    plain = METADATA.sub("", TABLES.sub("", hlo))
    return NAMES.sub(lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), plain)


def optimised(lowered: jax.stages.Lowered) -> str:
    text = lowered.compile().as_text()
    assert text is not None
    return without_metadata(text)


def first_difference(got: str, expected: str) -> str:
    pairs = zip(got.splitlines(), expected.splitlines(), strict=False)
    for number, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            return f"line {number}\n  got      {ours[:300]}\n  expected {theirs[:300]}"
    return f"lengths {len(got)} and {len(expected)}"


def assert_same(got: str, expected: str, what: str) -> None:
    # A plain assert would diff a megabyte of text for minutes.
    if got != expected:
        pytest.fail(f"{what} differs from jax.jit's at {first_difference(got, expected)}")


# The same input gives the same output: that XLA is deterministic need not be seen for all of them.
COMPILED = {
    "mlp_sgd_step",
    "value_and_grad_checkpointed_blocks",
    "value_and_grad_control_flow",
    "value_and_grad_scan_rnn",
}


# Seconds each, and other programs of these libraries are compared.
SLOW = {"nnx_transformer_adamw_step", "value_and_grad_nnx_transformer_adamw_step"}


def options_of(lowered: jax.stages.Lowered) -> dict[str, Any]:
    return dict(lowered._lowering._compiler_options_kvs)


@pytest.mark.accelerator
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=[pytest.mark.slow] * (program.name in SLOW), id=program.name)
        for program in PROGRAMS
    ],
)
def test_traced_program_compiles_to_the_hlo_of_jit(program: Program) -> None:
    fun, args = program.build()
    options = KEEP_RECOMPUTED if program.recomputes else None
    assert_compiled_as_by_jit(fun, args, options, is_optimised=program.name in COMPILED)


def assert_compiled_as_by_jit(
    fun: Any, args: Any, options: Any = None, *, is_optimised: bool
) -> None:
    theirs = jax.jit(fun, compiler_options=options).lower(*args)
    traced = tracegrad.trace(fun).lower(*args)
    anew = rebuilt(fun, args)
    # The same signature: XLA names the parameters of a program after the function's arguments.
    anew = functools.wraps(fun)(anew)
    ours = {
        "of the traced function": traced,
        "with every region rebuilt": jax.jit(anew, compiler_options=options).lower(*args),
    }
    for what, lowered in ours.items():
        assert_same(lowered.as_text(), theirs.as_text(), f"StableHLO {what}")
        # Before JAX 0.11.2 `trace` asks for `KEEP_RECOMPUTED` where nothing is differentiated, too.
        if is_optimised or options_of(lowered) != options_of(theirs):
            assert_same(optimised(lowered), optimised(theirs), f"HLO {what}")


def layers(params, x):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)


def step(params, x):
    value, gradient = jax.value_and_grad(layers)(params, x)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient)


def gathered_step(params, x):
    """Fully sharded: what lies in parts is gathered where it is used."""

    def whole(params):
        return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, P()), params)

    value, gradient = jax.value_and_grad(lambda p: layers(whole(p), x))(params)
    split = jax.tree.map(lambda g: jax.lax.with_sharding_constraint(g, P("data")), gradient)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, split)


@jax.shard_map(in_specs=(P(), P("data")), out_specs=(P(), P()))
def mapped_step(params, x):
    value, gradient = jax.value_and_grad(lambda p: jax.lax.pmean(layers(p, x), "data"))(params)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient)


# The step, and how its two matrices lie: the batch is always split along "data".
SHARDED = {
    "data parallel": (step, P(), P()),
    "tensor parallel": (step, P(None, "model"), P("model", None)),
    "fully sharded": (gathered_step, P("data"), P("data")),
    "shard_map": (mapped_step, P(), P()),
}


@pytest.mark.parametrize("how", SHARDED)
def test_a_sharded_step_compiles_to_the_hlo_of_jit(how: str) -> None:
    fun, *specs = SHARDED[how]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shapes = [((4, 8), specs[0]), ((8, 4), specs[1]), ((8, 4), P("data"))]
    first, last, x = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in shapes
    )
    with jax.set_mesh(mesh):
        assert_compiled_as_by_jit(fun, ({"in": first, "out": last}, x), is_optimised=True)


def test_the_compiler_options_of_a_program_are_seen() -> None:
    lowered = jax.jit(lambda x: x, compiler_options={"xla_cpu_enable_fast_math": True}).lower(1.0)
    assert options_of(lowered) == {"xla_cpu_enable_fast_math": True}
    assert {program.name for program in PROGRAMS} >= COMPILED | SLOW


def test_a_changed_instruction_is_a_difference() -> None:
    """The comparison would notice: programs that differ in one constant are not the same."""
    args = (jax.ShapeDtypeStruct((3,), "float32"),)
    two = optimised(jax.jit(lambda x: x * 2).lower(*args))
    three = optimised(jax.jit(lambda x: x * 3).lower(*args))
    assert two != three
