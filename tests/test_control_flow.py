"""Control flow and effects go through a Graph with every region rebuilt, and nothing changes.

Three ways, each compared with plain JAX: transforming the rebuilt function, rebuilding the
transformed one, and tracing both. Where JAX lowers one of them to the very program of the plain
function, that is the answer; where it does not, both run, and their results are compared bit by
bit. What is traced and not transformed runs in any case.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_flow import CASES, VECTOR, Case
from harnesses import QUICK, assert_bits_equal, is_inexact, jitted, rebuilt, same_program
from jax import lax
from jax.experimental import io_callback

import tracegrad

pytestmark = pytest.mark.both_jax

Function = Callable[..., Any]
BATCH = 3


# --------------------------------------------------------------------------- run, grad and vmap


def total(tree: Any) -> jax.Array:
    """The sum of everything real in it; of the squared absolute values of what is complex."""
    parts = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    real = [jnp.abs(x) ** 2 if jnp.iscomplexobj(x) else x for x in parts if is_inexact(x)]
    return sum((x.astype(jnp.float32).sum() for x in real), jnp.float32(0))


def run(fun: Function, args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    return fun, args


def grad(fun: Function, args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    floats = tuple(i for i, arg in enumerate(args) if is_inexact(arg))
    return jax.grad(lambda *args: total(fun(*args)), floats), args


def batched(arg: Any) -> Any:
    if jnp.issubdtype(arg.dtype, jax.dtypes.prng_key):
        return jax.random.split(arg, BATCH)
    shifts = np.arange(BATCH).reshape(-1, *[1] * np.ndim(arg))
    return (arg + shifts * (1 if arg.dtype.kind == "i" else 0.1)).astype(arg.dtype)


def vmap(fun: Function, args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    return jax.vmap(fun), tuple(map(batched, args))


MODES = {"run": run, "grad": grad, "vmap": vmap}


def ways(
    fun: Function, args: tuple[Any, ...], mode: str
) -> tuple[Function, dict[str, Function], tuple[Any, ...]]:
    """Plain JAX's transformed function, ours, and the arguments of all of them.

    The function is jitted before JAX transforms it, since that is what tracing stands for (and
    differentiating a function that is not rounds the sums of its second derivatives elsewhere).
    Ours trace when they are called: what JAX refuses is refused there.
    """
    transform = MODES[mode]
    plain, new_args = transform(jax.jit(fun), args)

    def first_rebuilt(*given: Any) -> Any:
        again = jax.jit(functools.wraps(fun)(rebuilt(fun, args)))
        return transform(again, args)[0](*given)

    def last_rebuilt(*given: Any) -> Any:
        return rebuilt(plain, given)(*given)

    both = transform(tracegrad.trace(fun), args)[0]
    ours = {
        "rebuilt, then transformed": jitted(first_rebuilt),
        "transformed, then rebuilt": jitted(last_rebuilt),
        "traced": tracegrad.trace(both, compiler_options=QUICK),
    }
    return jitted(plain), ours, new_args


def assert_refused(plain: Function, ours: dict[str, Function], args: tuple[Any, ...]) -> None:
    with pytest.raises(Exception) as refusal:
        plain(*args)
    for fun in ours.values():
        with pytest.raises(refusal.type):
            fun(*args)


def assert_answer_is_that_of_jax(case: Case, mode: str) -> None:
    plain, ours, args = ways(case.fun, case.args, mode)
    if mode in case.refused:
        assert_refused(plain, ours, args)
        return
    lowered = plain.lower(*args)
    others = [
        way
        for way, fun in ours.items()
        if (mode, way) == ("run", "traced") or not same_program(fun.lower(*args), lowered)
    ]
    if others:
        expected = lowered.compile()(*args)
        for way in others:
            assert_bits_equal(ours[way](*args), expected, f"{case}, {mode}, {way}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_answer_is_that_of_jax(case: Case, mode: str) -> None:
    assert_answer_is_that_of_jax(case, mode)


X64 = (
    "associative_scan cond custom_jvp custom_root custom_vjp fori_loop library_custom_jvp "
    "pure_callback random_keys remat_dots scan shard_map switch while_loop"
)


def wide(arg: Any) -> Any:
    if isinstance(arg, jax.Array):  # a key
        return arg
    return arg.astype({"f": np.float64, "i": np.int64}[arg.dtype.kind])


@pytest.mark.parametrize("case", [case for case in CASES if case.name in X64.split()], ids=str)
def test_answer_is_that_of_jax_in_x64(case: Case) -> None:
    with jax.enable_x64(True):
        in_64_bits = dataclasses.replace(case, args=tuple(map(wide, case.args)))
        for mode in MODES:
            assert_answer_is_that_of_jax(in_64_bits, mode)


def test_cases_are_what_they_say() -> None:
    """Each kind of region is there, and shard_map's mesh has its devices."""
    assert jax.device_count() >= 4
    assert {case.name for case in CASES} >= set(X64.split())
    found = set()
    for case in CASES:
        found |= {o.node.op for o in tracegrad.graph(case.fun, *case.args).walk()}
    regions = (
        "jit scan while cond custom_jvp_call custom_vjp_call custom_vmap_call custom_linear_solve "
        "shard_map pure_callback optimization_barrier stop_gradient get swap"
    )
    assert found >= set(regions.split())
    assert any(name in found for name in ("remat2", "checkpoint"))


# ------------------------------------------------------------------------------------- effects

Record = Callable[..., None]


@dataclass(frozen=True)
class Effectful:
    """A function of a vector that reports to `record`; `ordered`: whether JAX promises the order
    of what it reports."""

    name: str
    build: Callable[[Record], Function]
    ordered: bool
    refused: frozenset[str]

    def __str__(self) -> str:
        return self.name


EFFECTFUL: list[Effectful] = []


def effectful(*, ordered: bool, refused: str = "") -> Function:
    def add(build: Function) -> Function:
        EFFECTFUL.append(Effectful(build.__name__, build, ordered, frozenset(refused.split())))
        return build

    return add


@effectful(ordered=False)
def debug_print(record: Record) -> Function:
    def fun(x):
        jax.debug.print("start {}", x[0])
        x, _ = lax.scan(lambda c, i: (jax.debug.print("step {}", i), (c * 2, None))[1], x, VECTOR)
        lax.cond(x[0] > 0, lambda: jax.debug.print("yes"), lambda: jax.debug.print("no {}", x))
        jax.jit(lambda y: jax.debug.print("in jit {y}", y=y))(x[1])
        return jnp.sin(x)

    return fun


@effectful(ordered=True)
def debug_print_ordered(record: Record) -> Function:
    def fun(x):
        for i in range(3):
            jax.debug.print("line {} {}", i, x[i], ordered=True)

        def step(c, i):
            jax.debug.print("step {}", i, ordered=True)
            lax.cond(i > 1, lambda: jax.debug.print("late", ordered=True), lambda: None)
            return jnp.sin(c), None

        return lax.scan(step, x, jnp.arange(3))[0]

    return fun


@effectful(ordered=False)
def debug_print_in_a_rule(record: Record) -> Function:
    @jax.custom_vjp
    def f(x):
        jax.debug.print("primal")
        return x * 2

    def forward(x):
        jax.debug.print("forward {}", x[0])
        return x * 2, x

    def backward(x, ct):
        jax.debug.print("backward {}", x[1])
        return (ct * x,)

    f.defvjp(forward, backward)
    return lambda x: f(jnp.sin(f(x)))


@effectful(ordered=False)
def debug_print_recomputed(record: Record) -> Function:
    @jax.checkpoint
    def f(x):
        jax.debug.print("computing {}", x[0])
        return jnp.sin(jnp.cos(x))

    return lambda x: f(f(x))


@effectful(ordered=False)
def debug_print_nobody_needs(record: Record) -> Function:
    """Effects stay when no output depends on what they are about."""

    def fun(x):
        jax.jit(lambda y: (jax.debug.print("unused {}", y), y)[1])(jnp.cos(x[0]))
        return jnp.ones(3) * 2

    return fun


@effectful(ordered=True)
def debug_callback_in_loop(record: Record) -> Function:
    def fun(x):
        def body(c):
            jax.debug.callback(lambda i: record("body", int(i)), c[0], ordered=True)
            return c[0] + 1, jnp.sin(c[1])

        return lax.fori_loop(0, 2, lambda i, y: body((i, y))[1], x)

    return fun


@effectful(ordered=True, refused="grad vmap")
def io_callback_ordered(record: Record) -> Function:
    def report(what: str, *values: Any) -> None:
        shape = jax.ShapeDtypeStruct((), jnp.int32)

        def host(*values: Any) -> Any:
            record(what, *map(float, values))
            return np.int32(0)

        io_callback(host, shape, *values, ordered=True)

    def fun(x):
        report("start", x[0])

        def step(c, i):
            report("step", i)
            lax.cond(i > 1, lambda: report("large", c[0]), lambda: report("small"))
            return c * 2, None

        x, _ = lax.scan(step, x, jnp.arange(4))
        jax.jit(lambda y: report("in jit", y))(x[0])
        x = lax.while_loop(lambda c: c[0] > -2, lambda c: (report("loop", c[1]), c - 1)[1], x)
        report("end", x[0])
        return x

    return fun


@effectful(ordered=False, refused="grad")
def io_callback_with_a_result(record: Record) -> Function:
    def host(x: Any) -> Any:
        record("host", *np.asarray(x, float).tolist())
        return np.asarray(x) * 2

    return lambda x: io_callback(host, x, x) + io_callback(host, x, jnp.sin(x))


def reported(
    fun: Function, args: tuple[Any, ...], events: list[Any], capsys: Any, *, ordered: bool
) -> Any:
    """What a call reports and prints, in order if that is promised, and its result."""
    events.clear()
    capsys.readouterr()
    result = fun(*args)
    jax.block_until_ready(result)
    jax.effects_barrier()
    found = [*events, *capsys.readouterr().out.splitlines()]
    return found if ordered else sorted(found), result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", EFFECTFUL, ids=str)
def test_effects_happen_as_often_and_in_the_order_of_jax(
    case: Effectful, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[Any] = []
    plain, ours, args = ways(case.build(lambda *event: events.append(event)), (VECTOR,), mode)
    if mode in case.refused:
        assert_refused(plain, ours, args)
        return
    expected, answer = reported(plain, args, events, capsys, ordered=case.ordered)
    assert expected
    for way, fun in ours.items():
        # The second call does not trace, the effects happen all the same.
        for _ in range(2):
            got, result = reported(fun, args, events, capsys, ordered=case.ordered)
            assert got == expected, way
            assert_bits_equal(result, answer, f"{case}, {mode}, {way}")


@pytest.mark.parametrize("case", EFFECTFUL, ids=str)
def test_effects_of_a_graph_run_eagerly(
    case: Effectful, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[Any] = []
    fun = case.build(lambda *event: events.append(event))
    expected, answer = reported(fun, (VECTOR,), events, capsys, ordered=case.ordered)
    again = rebuilt(fun, (VECTOR,))
    got, result = reported(again, (VECTOR,), events, capsys, ordered=case.ordered)
    assert got == expected
    assert_bits_equal(result, answer, str(case))


# ------------------------------------------------------------------------------------------ Refs


def accumulate(ref, x):
    ref[...] += x
    lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(i, ref[i] * 2), None)
    lax.cond(x[0] > 0, lambda: ref.__setitem__(0, 7.0), lambda: ref.__setitem__(1, 5.0))
    return ref[...] * x


@pytest.mark.parametrize("way", ["rebuilt", "rebuilt under jit", "traced", "closed over"])
def test_array_refs_are_written_as_by_jax(way: str) -> None:
    theirs, ours = jax.new_ref(jnp.ones(6)), jax.new_ref(jnp.ones(6))
    closes = tracegrad.trace(lambda x: accumulate(ours, x))
    fun = {
        "rebuilt": lambda: rebuilt(accumulate, (ours, VECTOR)),
        "rebuilt under jit": lambda: jax.jit(rebuilt(accumulate, (ours, VECTOR))),
        "traced": lambda: tracegrad.trace(accumulate),
        "closed over": lambda: lambda ref, x: closes(x),
    }[way]()
    plain = jax.jit(accumulate)
    for _ in range(2):
        assert_bits_equal(fun(ours, VECTOR), plain(theirs, VECTOR), way)
        assert_bits_equal(ours[...], theirs[...], way)


@pytest.mark.parametrize("wrap", [tracegrad.trace, lambda fun: tracegrad.rewrite(fun, [])])
def test_a_part_of_a_reference_is_refused_as_an_argument(wrap) -> None:
    try:
        part = jax.new_ref(jnp.ones(6)).at[0]
    except NotImplementedError:
        pytest.skip("this JAX has no parts of references")
    with pytest.raises(TypeError, match="Pass the reference and the index"):
        wrap(lambda ref: ref[...] * 2)(part)


def test_gradients_of_a_function_with_array_refs_passed_in() -> None:
    def fun(ref, x):
        ref[...] = lax.stop_gradient(x) * 2
        return jnp.sum(jnp.sin(x) * x)

    theirs, ours = jax.new_ref(jnp.ones(6)), jax.new_ref(jnp.ones(6))
    expected = jax.jit(jax.grad(fun, 1))(theirs, VECTOR)
    got = tracegrad.trace(jax.grad(tracegrad.trace(fun), 1))(ours, VECTOR)
    assert_bits_equal(got, expected, "grad")
    assert_bits_equal(ours[...], theirs[...], "grad")
