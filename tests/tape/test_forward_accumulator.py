"""Forward mode over recorded arrays: numbers, nesting with tapes and accumulators, and refusals."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import tracegrad as tg
from tests.derivatives import by_tape, log1pexp
from tracegrad import GradientTape, UnconnectedGradients, custom_gradient
from tracegrad.tape.forward_accumulator import ForwardAccumulator
from tracegrad.variables.variable import Variable


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def along(function, primal, tangent):
    """What an accumulator gives for a function."""
    with ForwardAccumulator(primal, tangent) as accumulator:
        y = function(primal)
    return accumulator.jvp(y)


def difference(function, primal, tangent, step=1e-6):
    return (function(primal + step * tangent) - function(primal - step * tangent)) / (2 * step)


X = np.array([0.5, 1.25, -2.0])
V = np.array([1.0, -0.5, 2.0])
TABLE = np.arange(12.0).reshape(4, 3)

FUNCTIONS = {
    "elementwise": lambda x: jnp.sin(x) * x + 2.0 / (3.0 + x**2),
    "the same operand twice": lambda x: x * x,
    "matmul and reduction": lambda x: jnp.tanh(TABLE @ x).sum(),
    "gather": lambda x: x[jnp.array([0, 2, 0])] ** 2,
    "where": lambda x: jnp.where(x > 0, x**2, jnp.exp(x)),
    "python branch": lambda x: x**3 if x[0] > 0 else x,
    "softmax": jax.nn.softmax,
    "custom jvp": lambda x: jax.nn.relu(x) + jax.nn.gelu(x),
    "jitted": jax.jit(lambda x: jnp.cos(x).sum() * x),
    "traced": tg.trace(lambda x: jnp.cos(x).sum() * x),
    "scan": lambda x: lax.scan(lambda c, a: (c * jnp.sin(a), c + a), 1.0, x)[1],
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "while": lambda x: lax.while_loop(lambda c: jnp.sum(c) < 20.0, lambda c: c * 2.0, x**2),
    "vmap": lambda x: jax.vmap(lambda a: a * x)(x),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "inner grad": lambda x: jax.grad(lambda y: (y**3).sum())(x),
    "inner jvp": lambda x: jax.jvp(jnp.sin, (x,), (x,))[1],
    "sort": lambda x: jnp.sort(x) * jnp.arange(3.0),
    "solve": lambda x: jnp.linalg.solve(jnp.eye(3) * 4 + jnp.outer(x, x), x),
    "reshape to the same shape": lambda x: x.reshape(3) * 3.0,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_derivative_is_that_of_jax_and_of_finite_differences(function):
    x, v = jnp.asarray(X), jnp.asarray(V)
    found = along(function, x, v)
    _, expected = (
        jax.jit(lambda x, v: jax.jvp(function, (x,), (v,)))(x, v)
        if function is not FUNCTIONS["python branch"]
        else (None, 3 * x**2 * v)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(found, difference(function, X, V), rtol=1e-6, atol=1e-8)
    assert found.dtype == jnp.float64


# --------------------------------------------------------------------------------- compiled once


def nested_blocks(function):
    def step(x, direction):
        with ForwardAccumulator(x, direction) as outer:
            inner = along(function, x, direction)
            gradient = by_tape(function, x)
        return outer.jvp([inner, gradient])

    return step


STEPS = {
    "operations": lambda x: (jnp.tanh(x) * 2).sum(),
    "jitted": jax.jit(lambda x: jax.nn.softmax(x)[0]),
    "rules of jax": lambda x: jax.nn.relu(x) + jax.nn.gelu(x),
    "custom gradient": log1pexp,
    "custom gradient made anew": lambda x: custom_gradient(lambda x: (x * 2, lambda dy: dy))(x),
}
BLOCKS = {name: functools.partial(along, function) for name, function in STEPS.items()}
BLOCKS |= {
    "nested, operations": nested_blocks(jnp.tanh),
    "nested, a rule of jax": nested_blocks(jax.nn.relu),
    "nested, jitted": nested_blocks(STEPS["jitted"]),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_second_block_of_one_structure_compiles_nothing(block, compilations):
    direction = jnp.asarray(V)
    inputs = [jnp.asarray(X) + i for i in range(4)]
    for x in inputs[:2]:
        block(x, direction)
    before = compilations()
    for x in inputs:
        block(x, direction)
    assert compilations() == before


# -------------------------------------------------------------------------------- what is followed


def test_none_is_structural_and_can_be_zeros():
    x = jnp.asarray(X)
    with ForwardAccumulator(x, jnp.asarray(V)) as accumulator:
        connected, cut = jax.jit(lambda x: (x * 0.0, lax.stop_gradient(x)))(x)
        results = {
            "floor": jnp.floor(x),
            "sign": jnp.sign(x),
            "integer": x.astype(int),
            "through integers": x.astype(int).astype(float) * 2,
            "compared": x > 0,
            "cut": cut,
            "tg": tg.stop_gradient(x) * 2,
            "constant": jnp.ones(3) * 2,
            "host": np.asarray(x) * 2.0,
        }
    outside = x * 2
    assert set(accumulator.jvp(results | {"outside": outside}).values()) == {None}
    np.testing.assert_array_equal(accumulator.jvp(connected), jnp.zeros(3))
    for zero in ("zero", UnconnectedGradients.ZERO):
        zeros = accumulator.jvp([outside, results["integer"]], unconnected_gradients=zero)
        assert [(z.shape, z.dtype) for z in zeros] == [((3,), jnp.float64), ((3,), jnp.int64)]
        assert not any(map(jnp.any, zeros))
    with pytest.raises(ValueError, match="zeroes"):
        accumulator.jvp(outside, unconnected_gradients="zeroes")


def test_primals_and_targets_are_trees():
    primals = {"w": jnp.asarray(X), "b": (jnp.asarray(1.0), jnp.asarray(3.0))}
    tangents = {"w": jnp.asarray(V), "b": (2.0, jnp.asarray(-1.0))}

    def function(p):
        return {"sum": p["w"].sum() * p["b"][0], "list": [p["b"][1] ** 2, p["w"] * p["b"][1]]}

    with ForwardAccumulator(primals, tangents) as accumulator:
        y = function(primals)
    _, expected = jax.jvp(
        function, (primals,), (jax.tree.map(lambda t: jnp.asarray(t, jnp.float64), tangents),)
    )
    jax.tree.map(np.testing.assert_allclose, accumulator.jvp(y), expected)
    assert accumulator.jvp([y["sum"], None, ()]) == [expected["sum"], None, ()]


def test_a_block_can_be_entered_again_though_not_twice_at_once_and_asked_at_any_time():
    x = jnp.asarray(2.0)
    accumulator = ForwardAccumulator(x, 1.0)
    assert accumulator.jvp(x) == 1.0
    with accumulator:
        y = x**2
        assert accumulator.jvp(y) == 4.0
        with pytest.raises(ValueError, match="twice"):
            accumulator.__enter__()
    between = y * 1.0
    with accumulator:
        z = y * x
    assert accumulator.jvp(between) is None
    assert accumulator.jvp([z, z]) == [12.0, 12.0]


def test_an_exception_closes_the_block_and_keeps_what_it_has():
    x = jnp.asarray(2.0)
    with ForwardAccumulator(x, 1.0) as outer:
        with contextlib.suppress(KeyError), ForwardAccumulator(x, 1.0) as inner:
            y = x**2
            raise KeyError
        z = y * x
    assert inner.jvp(y) == outer.jvp(y) == 4.0
    assert (inner.jvp(z), outer.jvp(z)) == (None, 12.0)


def test_a_tangent_is_freed_with_its_array_and_all_without_the_garbage_collector():
    x = jnp.asarray(X)
    accumulator = ForwardAccumulator(x, jnp.asarray(V))
    gc.disable()
    try:
        with accumulator:
            y = jnp.sin(x) * 2
            tangent = weakref.ref(accumulator.jvp(y))
            del y
            assert tangent() is None
            y = x * 2
        tangent = weakref.ref(accumulator.jvp(y))
        kept = weakref.ref(accumulator)
        del accumulator
        assert kept() is None
        assert tangent() is None
    finally:
        gc.enable()


def test_a_jitted_function_that_closes_over_a_primal_moves_with_it():
    x = jnp.asarray(X)
    function = jax.jit(lambda y: (y * x).sum())
    for _ in range(2):
        np.testing.assert_allclose(along(function, x, jnp.asarray(V)), 2 * (X * V).sum())


def test_effects_happen_once():
    seen = []

    @jax.jit
    def function(x):
        def body(c, a):
            jax.debug.callback(seen.append, c)
            return c * a, c

        c, _ = lax.scan(body, 1.0, x)
        c = lax.cond(c < 0, lambda c: (jax.debug.callback(seen.append, -1.0), 2 * c)[1], jnp.sin, c)
        jax.debug.callback(seen.append, 0.0)
        return c

    found = along(function, jnp.asarray(X), jnp.asarray(V))
    jax.effects_barrier()
    assert sorted(map(float, seen)) == [-1.0, 0.0, 0.5, 0.625, 1.0]
    np.testing.assert_allclose(found, jax.jvp(function, (X,), (V,))[1])


def test_a_host_call_is_made_once_for_each_call_and_in_a_loop_it_is_not_made_again():
    calls, like = [], jax.ShapeDtypeStruct((), jnp.float64)
    count = lambda: np.float64(calls.append(None) or len(calls))  # noqa: E731
    counted = jax.jit(lambda x: x * io_callback(count, like))
    assert [along(counted, jnp.asarray(7.0), 1.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    calls.clear()
    x = jnp.asarray(X)
    with ForwardAccumulator(x, jnp.asarray(V)), pytest.raises(NotImplementedError):
        lax.scan(lambda c, a: (c * a * io_callback(count, like), None), 1.0, x)
    assert len(calls) == 3


def test_what_a_derivative_rule_prints_of_tangents_is_printed():
    seen = []
    spied = jax.custom_jvp(lambda x: x * 2)

    @spied.defjvp
    def _(primals, tangents):
        jax.debug.callback(lambda t: seen.append(float(t)), tangents[0])
        return spied(*primals), 2 * tangents[0]

    assert along(jax.jit(spied), jnp.asarray(1.0), 3.0) == 6.0
    jax.effects_barrier()
    assert seen == [3.0]


# ----------------------------------------------------------------------------------------- nesting


def cubic(x):
    return jnp.sin(x) * x**3


def third(x):
    return jax.grad(jax.grad(jax.grad(cubic)))(x)


def test_forward_over_forward_to_the_third_order():
    x = jnp.asarray(1.1)
    with (
        ForwardAccumulator(x, 1.0) as outer,
        ForwardAccumulator(x, 1.0) as middle,
        ForwardAccumulator(x, 1.0) as inner,
    ):
        y = cubic(x)
    first = inner.jvp(y)  # the tangents were computed in the block: asking outside is as good
    second = middle.jvp(first)
    np.testing.assert_allclose(first, jax.jit(jax.grad(cubic))(1.1))
    np.testing.assert_allclose(second, jax.jit(jax.grad(jax.grad(cubic)))(1.1))
    np.testing.assert_allclose(outer.jvp(second), jax.jit(third)(1.1))
    np.testing.assert_allclose([outer.jvp(y), middle.jvp(y)], [first, first])
    # What stands inside does not see what is computed outside of it.
    assert inner.jvp(outer.jvp(y)) is None


def test_reverse_over_forward():
    x, v = jnp.asarray(X), jnp.asarray(V)

    def function(x):
        return (jnp.sin(x) * jnp.roll(x, 1) ** 2).sum()

    with GradientTape(persistent=True) as tape:
        tape.watch([x, v])
        with ForwardAccumulator(x, v) as accumulator:
            y = function(x)
        slope = accumulator.jvp(y)
    np.testing.assert_allclose(tape.gradient(slope, x), jax.hessian(function)(x) @ v)
    np.testing.assert_allclose(tape.gradient(slope, v), jax.grad(function)(x))
    np.testing.assert_allclose(tape.gradient(y, x), jax.grad(function)(x))
    assert tape.gradient(y, v) is None


def test_a_tape_inside_does_not_hold_the_tangents_of_an_accumulator_around_it():
    x = jnp.asarray(2.0)
    with ForwardAccumulator(x, 1.0) as accumulator, GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x**3
    assert tape.gradient(accumulator.jvp(y), x) is None


def jitted_loop(x):
    return jax.jit(lambda x: lax.scan(lambda c, _: (jnp.sin(c) * x, None), x, length=3)[0])(x)


@pytest.mark.parametrize("function", [cubic, jitted_loop])
def test_tapes_and_accumulators_take_derivatives_of_each_other(function):
    def slope(x):
        return along(function, x, 1.0)

    def curvature(x):
        return along(lambda x: by_tape(function, x), x, 1.0)

    def of_its_own_gradient(x):
        with GradientTape() as tape:
            tape.watch(x)
            return along(lambda x: tape.gradient(function(x), x), x, 1.0)

    x, second = jnp.asarray(0.7), jax.grad(jax.grad(function))
    found = [along(slope, x, 1.0), by_tape(slope, x), curvature(x), of_its_own_gradient(x)]
    np.testing.assert_allclose(found, [second(0.7)] * 4)
    np.testing.assert_allclose(by_tape(curvature, x), jax.grad(second)(0.7))


def test_stop_recording_hides_tangents_from_the_tape_only():
    x = jnp.asarray(2.0)
    with GradientTape() as tape:
        tape.watch(x)
        with ForwardAccumulator(x, 1.0) as accumulator, tape.stop_recording():
            y = x**3
        slope = accumulator.jvp(y)
    assert slope == 12.0
    assert tape.gradient(slope, x) is None


# ------------------------------------------------------------------------ inside other functions


@pytest.mark.parametrize("compiled", [jax.jit, tg.trace])
def test_inside_a_compiled_function(compiled):
    @compiled
    def slope(x, v):
        with ForwardAccumulator(x, v) as accumulator:
            y = jnp.sin(x) * x
        assert accumulator.jvp(jnp.ones(3)) is None
        return accumulator.jvp(y)

    for shift in (0.0, 1.0):
        expected = jax.jvp(lambda x: jnp.sin(x) * x, (X + shift,), (V,))[1]
        np.testing.assert_allclose(slope(X + shift, V), expected)


def test_inside_functions_that_jax_differentiates_and_batches():
    def slope(x):
        return along(cubic, x, jnp.ones_like(x))

    x = jnp.asarray(1.1)
    np.testing.assert_allclose(jax.grad(slope)(x), jax.grad(jax.grad(cubic))(1.1))
    np.testing.assert_allclose(jax.jvp(slope, (x,), (x,))[1], 1.1 * jax.grad(jax.grad(cubic))(1.1))
    np.testing.assert_allclose(jax.vmap(slope)(jnp.asarray(X)), jax.vmap(jax.grad(cubic))(X))


# ------------------------------------------------------------------------------ custom gradients


@custom_gradient
def clipped(x):
    return x * 2, lambda dy: jnp.clip(dy, -1.0, 1.0)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, tg.trace])
def test_a_custom_gradient_moves_by_the_transpose_of_its_gradient_function(wrap):
    def slope(x):
        return along(wrap(log1pexp), x, 1.0)

    def gradient(x):
        return by_tape(wrap(log1pexp), x)

    assert along(wrap(log1pexp), jnp.asarray(100.0), 3.0) == 3.0  # the naive form: NaN
    x = jnp.asarray(0.0)
    for first in (slope, gradient):
        np.testing.assert_allclose([first(x), along(first, x, 1.0)], [0.5, 0.25])


def test_a_custom_gradient_has_nothing_for_what_it_closes_over():
    c, x = jnp.asarray(3.0), jnp.asarray(2.0)
    scaled = custom_gradient(lambda x: (c * x, lambda dy: 7.0 * dy))
    for primals, tangents, expected in (([x, c], [1.0, 1.0], 7.0), (c, 1.0, None)):
        told = pytest.warns(UserWarning, match="depends on 'c' .*, which it closes over")
        with ForwardAccumulator(primals, tangents) as accumulator, told:
            y = scaled(x)
        assert accumulator.jvp(y) == expected
    of_jax = jax.custom_vjp(lambda x: c * x)
    of_jax.defvjp(lambda x: (c * x, None), lambda _, dy: (7.0 * dy,))
    with ForwardAccumulator(c, 1.0), pytest.raises(ValueError, match="closes over an array"):
        of_jax(x)


def test_an_operation_without_forward_mode_raises_unless_its_operand_is_stopped():
    x = jnp.asarray(X)
    host = functools.partial(jax.pure_callback, np.sin, jax.typeof(x))
    with ForwardAccumulator(x, jnp.asarray(V)) as accumulator:
        with pytest.raises(ValueError, match=r"clipped at .*test_forward_accumulator.*linear"):
            clipped(x)
        with pytest.raises(ValueError, match="JVP"):
            host(x)
        y = host(lax.stop_gradient(x)) * x
    np.testing.assert_allclose(accumulator.jvp(y), np.sin(X) * V, rtol=1e-6)


def test_a_backward_that_jax_cannot_transpose_is_refused_in_words_about_forward_mode():
    def backward(times, dy):
        return (lax.fori_loop(0, times, lambda _, dy: dy / 2, dy),)

    @jax.custom_vjp
    def halved(x):
        return x

    halved.defvjp(lambda x: (x, jnp.argmax(x)), backward)
    x, v = jnp.asarray(X), jnp.asarray(V)
    for jvp in (lambda: along(halved, x, v), lambda: tg.jvp(halved, (x,), (x,))):
        with pytest.raises(ValueError, match=r"halved .*no forward-mode derivative.*JAX cannot"):
            jvp()


def test_complex_numbers_follow_jax():
    z, v = jnp.asarray([1 + 2j, -0.5j]), jnp.asarray([2 - 1j, 1j])

    def function(z):
        return {"conj": jnp.conj(z) * z**2, "abs": jnp.abs(z), "real": z.real}

    found, expected = along(function, z, v), jax.jvp(function, (z,), (v,))[1]
    jax.tree.map(np.testing.assert_allclose, found, expected)
    assert found["conj"].dtype == jnp.complex128


# --------------------------------------------------------------------------------------- Variables


def test_a_variable_moves_at_every_read_also_after_an_assignment():
    v, still = Variable(3.0), Variable(2.0)
    before = v.value
    with ForwardAccumulator(v, 1.0) as accumulator:
        y1 = v * v
        of_before = before * 2.0
        v.assign(5.0)
        y2 = jnp.sin(v) * still
    assert (accumulator.jvp(y1), accumulator.jvp(of_before)) == (6.0, None)
    np.testing.assert_allclose(accumulator.jvp(y2), 2 * np.cos(5.0))
    assert accumulator.jvp(v) == 1.0
    assert accumulator.jvp(still) is None
    assert accumulator.jvp(v * v) is None  # outside of the block
    with pytest.raises(ValueError, match="twice"):
        ForwardAccumulator([v, v], [1.0, 1.0])


@pytest.mark.filterwarnings("ignore:the Variable .* is read after it was assigned")
def test_an_assignment_of_what_moves_changes_no_tangent_of_a_variable():
    """The numbers are TensorFlow's (2.21), also those of a `tf.function`."""
    for wrap in (lambda fun: fun, tg.trace):
        v, w = Variable(3.0), Variable(1.0)

        @wrap
        def fun(v=v, w=w):
            v.assign(2 * v.value)
            w.assign(v.value)
            return v.value * v.value, v.value + 0, w.value * w.value

        with ForwardAccumulator(v, 1.0) as accumulator:
            results = fun()
        assert [float(result) for result in results] == [36, 6, 36]
        assert accumulator.jvp(results) == (12, 1, None)
        assert accumulator.jvp(v) == 1


def test_variables_of_a_traced_function_move():
    v = Variable(3.0)
    square = tg.trace(lambda v, a: v * v * a)
    slope = tg.trace(lambda: along(lambda v: v**3, v, 1.0))
    for value in (3.0, 5.0):
        v.assign(value)
        assert along(lambda v: square(v, 2.0), v, 1.0) == 4 * value
        assert slope() == 3 * value**2
        assert along(lambda v: by_tape(lambda v: v**3, v), v, 1.0) == 6 * value


# --------------------------------------------------------------------------------------- bad input


def test_another_thread():
    accumulator = ForwardAccumulator(jnp.asarray(2.0), 1.0)
    refused = r"another thread"
    with ThreadPoolExecutor(1) as other:
        with accumulator:
            for call in (lambda: accumulator.jvp([]), accumulator.__enter__, accumulator.__exit__):
                with pytest.raises(RuntimeError, match=refused):
                    other.submit(call).result()
        assert other.submit(accumulator.jvp, []).result() == []


@pytest.mark.parametrize(
    ("primals", "tangents", "error", "message"),
    [
        (lambda x: [x, x], [1.0, 2.0], ValueError, r"f64\[3\].*listed twice.*sum of its tangents"),
        (lambda x: x, jnp.ones(2), ValueError, r"\(2,\).*\(3,\)"),
        (lambda x: x, 1.0, ValueError, r"\(\).*\(3,\)"),
        (lambda x: x, np.ones(3, "float32"), TypeError, r"float32.*float64"),
        (lambda x: x[0], 1j, TypeError, r"complex.*float64"),
        (lambda x: [x, x * 2], [1.0], ValueError, r"structure.*\[\*, \*\].*\[\*\]"),
        (lambda x: np.ones(3), np.ones(3), ValueError, r"jnp\.asarray"),
        (lambda x: 1.0, 1.0, ValueError, r"jnp\.asarray"),
        (lambda x: jnp.arange(3), np.arange(3), ValueError, "int"),
    ],
    ids=["twice", "shape", "number", "dtype", "kind", "structure", "NumPy", "float", "integers"],
)
def test_a_direction_that_does_not_fit_is_refused(primals, tangents, error, message):
    with pytest.raises(error, match=message):
        ForwardAccumulator(primals(jnp.asarray(X)), tangents)


@pytest.mark.both_jax
@pytest.mark.parametrize("called", [lambda f: f, jax.jit])
def test_tangents_go_through_a_shard_map_with_a_collective(called):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    def f(x):
        return jnp.sin(x) * jax.lax.psum(x.sum(), "i")

    x, direction = jnp.array([0.5, 1.0]), jnp.array([1.0, -2.0])
    with ForwardAccumulator(x, direction) as accumulator:
        y = called(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    want = np.cos(x) * direction * 1.5 + np.sin(x) * -1.0
    np.testing.assert_allclose(accumulator.jvp(y), want, rtol=1e-6)


def test_a_budget_changes_no_tangent():
    def loss(x):
        return jnp.sum(jnp.sin(jnp.sin(x)))

    def step(x):
        with ForwardAccumulator(x, jnp.ones_like(x)) as accumulator:
            y = loss(x)
        return accumulator.jvp(y), jax.grad(loss)(x)

    x = jnp.arange(3.0)
    tangent, gradient = tg.trace(step, memory_budget="100%")(x)
    expected = jnp.cos(jnp.sin(x)) * jnp.cos(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    np.testing.assert_allclose(tangent, jnp.sum(expected), rtol=1e-6)
