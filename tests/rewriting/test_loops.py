"""The rule for while loops: reverse mode by replaying."""

from __future__ import annotations

from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tests.derivatives import by_tape
from tests.harnesses import same_program
from tracegrad import match, rules

pytestmark = pytest.mark.both_jax

LOOPS = match.op("while")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def checkpointed(fun, checkpoints=3):
    return tg.rewrite(fun, rules.checkpointed_loop(LOOPS, checkpoints))


# ------------------------------------------------------------------------------------- programs


def newton(a):
    return lax.while_loop(lambda x: jnp.abs(x * x - a) > 1e-9, lambda x: 0.5 * (x + a / x), a)


def traced_bound(x, n=11):
    def step(i, carry):
        return {"y": jnp.sin(carry["y"] * x[0]) + 0.9 * carry["y"], "n": carry["n"] + i}

    out = lax.fori_loop(jnp.asarray(2), jnp.asarray(2 + n), step, {"y": x, "n": 0})
    return out["y"] * out["n"]


def nested(x):
    def inner(i, y):
        return lax.fori_loop(0, i + 2, lambda j, y: jnp.sin(y) * x + 0.1 * j * y, y)

    return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, inner(*c)), (0, x))[1]


def in_scan_cond_jit(x):
    def step(c, x):
        c = lax.cond(x > 0, lambda c: jax.jit(newton)(c * x * x), lambda c: 2.0 * c, c)
        return c, c * x

    return lax.scan(step, x[0] ** 2, x)


def with_keys_and_flags(x):
    def step(carry):
        key, y, i, _ = carry
        key, sub = jax.random.split(key)
        return key, y * x + jax.random.normal(sub, y.shape), i + 1, i < 6

    start = (jax.random.key(0), x, jnp.uint8(0), True)
    return lax.while_loop(lambda c: c[3], step, start)[1]


def complex_carry(x):
    return lax.while_loop(
        lambda c: c[0] < 6,
        lambda c: (c[0] + 1, c[1] * (0.5 + 0.7j) + 0.1 * jnp.sin(c[1])),
        (0, x + 1j),
    )[1]


def recomputed(x):
    return jax.checkpoint(traced_bound)(x) + x


def mixed_types(x):
    def step(carry):
        i, y, table = carry
        y = y * 0.5 + jnp.sin(table[i % 3])
        return i + 1, y, table.at[i % 3].multiply(y.astype(jnp.float32))

    return lax.while_loop(lambda c: c[0] < 8, step, (0, x[0], x.astype(jnp.float32)))


def of_scipy(x):
    from jax.scipy.optimize import minimize

    return minimize(lambda y: jnp.sum((y - x) ** 4 + y**2), jnp.zeros(3), method="BFGS").x


X = np.array([0.7, 1.3, 0.4])
FEW = {f.__name__: f for f in (nested, with_keys_and_flags, in_scan_cond_jit)}
MORE = {f.__name__: f for f in (*(traced_bound, complex_carry, of_scipy, recomputed, mixed_types),)}
MORE["newton"] = lambda x: newton(x[1])


def inner(a, b):
    """Of two trees of float arrays, as real vectors."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(np.sum(np.real(np.asarray(x) * np.asarray(y)), dtype=float) for x, y in pairs)


def floats(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def check_transpose(fun, tolerance=1e-9):
    """That <v, J u> = <J^T v, u>, where J u is JAX's forward mode of the function as it was, and by
    finite differences of it."""
    random = np.random.default_rng(0)
    x, u = jnp.asarray(X), random.normal(size=X.shape)

    def of_floats(x):
        return floats(fun(x))

    forward = jax.jit(lambda x: jax.jvp(of_floats, (x,), (jnp.asarray(u),)))
    outs, tangents = forward(x)
    v = [jnp.asarray(random.normal(size=out.shape), out.dtype) for out in outs]
    edited = checkpointed(of_floats)

    @jax.jit
    def with_cotangents(x):
        values, back = jax.vjp(edited, x)
        return values, back(v)[0]

    values, back = with_cotangents(x)
    for ours, expected in zip(values, outs, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-13, atol=1e-15)
    expected, backward = inner(v, tangents), inner(back, u)
    assert abs(expected - backward) <= tolerance * max(1.0, abs(expected))
    assert np.any(back) or not np.any(expected)
    step = 1e3 * tolerance
    above, below = (inner(v, forward(x + sign * step * u)[0]) for sign in (1, -1))
    difference = (above - below) / (2 * step)
    assert abs(difference - backward) <= 1e3 * tolerance * max(1.0, abs(expected))


@pytest.mark.parametrize("name", FEW)
def test_the_backward_pass_is_the_transpose_of_forward_mode(name):
    check_transpose(FEW[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_the_backward_pass_is_the_transpose_of_forward_mode_in_more_programs(name):
    check_transpose(MORE[name], 1e-6 if name == "mixed_types" else 1e-9)


def cube_of_root(a):  # whose second derivative at 4 is 3/8
    return newton(a) ** 3


def test_derivatives_of_second_order_in_mixed_modes():
    edited = checkpointed(cube_of_root, 2)

    @jax.jit
    def second(a):
        forward_first = jax.grad(lambda a: jax.jvp(edited, (a,), (1.0,))[1])(a)
        return jax.jvp(jax.grad(edited), (a,), (1.0,))[1], forward_first

    np.testing.assert_allclose(second(4.0), [3 / 8] * 2, rtol=1e-6)


@pytest.mark.slow
def test_elements_of_a_batch_that_take_no_step_add_no_nan_to_second_derivatives():
    """Of the sum of sqrt(w a), by Newton, which would divide zero by zero where a is zero."""
    a = jnp.array([0.0, 4.0])
    edited = checkpointed(lambda w: jnp.sum(jax.vmap(newton)(w * a)), 2)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.grad(edited)))(1.0), -2 / 4, rtol=1e-6)


def test_a_batch_of_gradients_is_that_of_each():
    gradient = jax.jit(jax.grad(checkpointed(lambda x, n: jnp.sum(traced_bound(x, n) ** 2), 2)))
    counts, x = jnp.array([0, 5, 3]), jnp.asarray(X)
    for n, row in zip(counts, jax.vmap(gradient, (None, 0))(x, counts), strict=True):
        np.testing.assert_allclose(row, gradient(x, n), rtol=1e-12)


def test_elements_of_a_batch_that_take_no_step_add_no_nan():
    def f(n, w):  # the first step would divide by zero where there is none
        def step(carry):
            return carry[0] + 1, w / carry[1] + 3.0

        return lax.while_loop(lambda c: c[0] < n, step, (0.0, n))[1]

    def loss(w, n):
        return jnp.sum(jax.vmap(f, (0, None))(n, w))

    n = jnp.array([0.0, 2.0])
    forward = jax.jvp(loss, (1.5, n), (1.0, 0 * n))[1]
    np.testing.assert_allclose(jax.grad(checkpointed(loss))(1.5, n), forward, rtol=1e-12)


def test_elements_of_a_batch_that_are_done_add_no_nan():
    def f(x, n):  # one step more would divide by zero
        return lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] / c[0]), (n, x))[1]

    def loss(x, n):
        return jnp.sum(jax.vmap(f, (None, 0))(x, n))

    n = jnp.array([1.0, 3.0])
    assert jax.grad(checkpointed(loss))(2.0, n) == 1 + 1 / 6


def test_without_reverse_mode_the_program_is_the_one_before():
    edited, a = checkpointed(newton), jnp.asarray(4.0)
    assert same_program(jax.jit(edited).lower(a), jax.jit(newton).lower(a))

    def forward(fun):
        return jax.jit(lambda a: jax.jvp(fun, (a,), (a,))).lower(a)

    assert same_program(forward(edited), forward(newton))
    batch = jnp.ones(3)
    assert same_program(*(jax.jit(jax.vmap(f)).lower(batch) for f in (edited, newton)))


def test_the_derivative_of_a_loop_lets_no_value_out_of_its_trace():
    with jax.checking_leaks():
        value, slope = jax.jvp(checkpointed(newton), (4.0,), (1.0,))
    assert np.allclose([value, slope], [2.0, 0.25], rtol=1e-3)


LINEAR = {
    "eager": lambda f: f(3.0),
    "jit": lambda f: jax.jit(f)(3.0),
    "vmap": lambda f: jax.vmap(f)(jnp.array([3.0]))[0],
    "jvp": lambda f: jax.jvp(f, (1.0,), (3.0,))[1],
}


@pytest.mark.parametrize("run", LINEAR.values(), ids=LINEAR)
def test_a_linearised_loop_runs_as_the_linear_function_that_it_is(run):
    root, along = jax.linearize(checkpointed(newton), 4.0)
    np.testing.assert_allclose([root, run(along)], [2.0, 3 / 4], rtol=1e-6)


def test_rules_of_a_trace_and_tapes_reach_loops():
    rule = rules.checkpointed_loop(LOOPS)
    a = jnp.asarray(4.0)

    @tg.trace(rules=[rule])
    def step(a):
        return jax.grad(newton)(a), tg.grad(newton)(a)

    np.testing.assert_allclose(step(a), 0.25, rtol=1e-6)
    np.testing.assert_allclose(by_tape(tg.rewrite(newton, rule), a), 0.25, rtol=1e-6)


def fewest_replayed(steps: int, slots: int) -> int:
    """The binomial optimum for a number of steps that is known from the start."""
    if steps <= 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2 - (steps - 1)
    repetitions = 0
    while comb(slots + repetitions, slots) < steps:
        repetitions += 1
    return repetitions * steps - comb(slots + repetitions, slots + 1) - (steps - 1)


@pytest.mark.parametrize("slots", [1, 2, 3, 6, 16])
def test_no_more_steps_are_replayed_than_if_their_number_had_been_known(slots):
    runs = []

    @jax.custom_jvp
    def counted(x):
        return jax.pure_callback(lambda x: runs.append(None) or x, x, x)

    counted.defjvp(lambda primals, tangents: (counted(*primals), *tangents))

    def loop(x, n):
        return lax.fori_loop(0, n, lambda i, x: jnp.sin(counted(x)), x)

    gradient = jax.jit(jax.grad(checkpointed(loop, slots)))
    for n in (0, 1, 2, slots + 1, 7, 20, 60, 119, *[300] * (slots > 1)):
        runs.clear()
        jax.block_until_ready(gradient(0.5, n))
        replayed = len(runs) - 2 * n  # once forward, and once where a step is differentiated
        assert 0 <= replayed <= fewest_replayed(n, slots), n
        assert replayed == 0 or n > slots + 1


def test_memory_does_not_grow_with_the_number_of_steps():
    size, slots = 1 << 12, 4

    def f(x, n):
        return jnp.sum(lax.fori_loop(0, n, lambda i, y: jnp.sin(y) * x, x))

    compiled = jax.jit(jax.grad(checkpointed(f, slots))).lower(jnp.ones(size), 5).compile()
    held = compiled.memory_analysis().temp_size_in_bytes // (8 * size)
    one_step = 4  # a state, its cotangent, that of what is closed over, sin or cos of the state
    assert held <= 2 * slots + one_step


# ------------------------------------------------------------------------------------ bad input


def test_no_checkpoint_is_refused():
    with pytest.raises(ValueError, match="one checkpoint or more, not 0"):
        rules.checkpointed_loop(LOOPS, 0)


def test_what_is_no_loop_is_refused_by_its_line():
    rule = rules.checkpointed_loop
    no_loop = r"checkpointed_loop: .*sin.*test_loops.py:\d+.*is no while loop"
    with pytest.raises(tg.GraphError, match=no_loop):
        tg.rewrite(lambda x: jnp.sin(x), rule(match.op("sin")))(1.0)


def test_loops_inside_of_what_matches_are_meant():
    def solver(a):
        return newton(newton(a))

    edited = tg.rewrite(
        lambda a: 2 * jax.jit(solver)(a), rules.checkpointed_loop(match.call("solver"))
    )
    np.testing.assert_allclose(jax.grad(edited)(16.0), 2 / 32, rtol=1e-5)


def test_without_a_selector_all_loops_are_meant_and_what_cannot_be_run_again_may_be_there():
    def prints(x):
        def step(x):
            jax.debug.print("", ordered=True)
            return 2 * x

        return lax.while_loop(lambda x: x < 4, step, x)

    rule = rules.checkpointed_loop()
    assert repr(rule) == "rules.checkpointed_loop()"
    edited = tg.rewrite(lambda a: newton(newton(a)) * prints(1), rule)
    np.testing.assert_allclose(jax.grad(edited)(16.0), 4 / 32, rtol=1e-5)
    assert tg.rewrite(lambda x: 2 * x, rule)(1.0) == 2.0
    for each in (rule, rules.checkpointed_loop(LOOPS)):
        with pytest.raises(
            ValueError, match=r"loop at test_loops.py:\d+ \(.*prints\) has an effect"
        ):
            jax.grad(tg.rewrite(prints, each))(1.0)


@pytest.mark.parametrize("way", ["grad", "jacobian", "trace", "rewrite", "tape"])
def test_reverse_mode_without_the_rule_names_the_loop_and_the_rule(way):
    def loss(x):
        y = jax.lax.while_loop(lambda y: y < 10.0, lambda y: y * 1.5, x)  # the loop
        return y * 2.0

    unmoved = tg.rules.stop_gradient(match.op("no such operation"), missing_ok=True)
    ways = {
        "grad": tg.grad(loss),
        "jacobian": tg.jacobian(loss),
        "trace": tg.trace(lambda x: jax.grad(loss)(x)),
        "rewrite": tg.rewrite(lambda x: jax.grad(loss)(x), unmoved),
        "tape": lambda x: by_tape(loss, x),
    }
    with pytest.raises(ValueError, match=r"while_loop") as caught:
        ways[way](jnp.float32(1.0))
    line = loss.__code__.co_firstlineno + 1
    (note,) = [note for note in caught.value.__notes__ if "checkpointed_loop" in note]
    assert f"test_loops.py:{line} in " in note
    where = match.source(f"test_loops.py:{line}")
    assert f"`where={where!r}`" in note
    cured = tg.rewrite(loss, tg.rules.checkpointed_loop(where))
    np.testing.assert_allclose(jax.grad(cured)(1.0), jax.jvp(loss, (1.0,), (1.0,))[1])


def test_collectives_in_a_loop_are_no_effect_that_must_not_be_repeated():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))

    def on_each(x, w):
        def step(carry):
            return carry[0] + 1, jnp.sin(carry[1]) * w + lax.pmean(carry[1], "i")

        return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]

    @jax.jit
    def sharded(w):
        spec = jax.P("i")
        over = jax.shard_map(on_each, mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec)
        return jnp.sum(over(jnp.arange(2.0), w))

    def alone(w):
        x = jnp.arange(2.0)
        for _ in range(3):
            x = jnp.sin(x) * w + jnp.mean(x)
        return jnp.sum(x)

    np.testing.assert_allclose(jax.grad(checkpointed(sharded, 1))(0.7), jax.grad(alone)(0.7))
