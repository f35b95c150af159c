"""A NumPy function computes what NumPy does, and has the gradient that it is given, or none."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tracegrad as tg
from tests.derivatives import GRADIENTS, by_tape, value_by_tape
from tracegrad.annotations.host_function import numpy_function

pytestmark = pytest.mark.both_jax

X = jnp.array([0.3, 0.7, 1.2, 1.7])
Y = jnp.array([0.2, 0.5, 1.0, 2.9])


def np_mod(x, y):
    return (x % y).astype(np.float32)


def mod_gradient(op, dz):
    x, y = op.inputs
    return dz, dz * -jnp.floor_divide(x, y)


def mod(x, y, **options):
    return numpy_function(np_mod, [x, y], np.float32, grad=mod_gradient, name="mod", **options)


pure_mod = functools.partial(mod, stateful=False)


def np_exp(x):
    return np.exp(x)


def exp(x):
    """Its gradient is made of its result, and so are those of all orders."""
    return numpy_function(np_exp, x, x.dtype, grad=lambda op, dy: dy * op.outputs[0])


def sinh(x, **options):
    """Each derivative calls the host in its turn."""
    return numpy_function(
        np.sinh, [x], x.dtype, grad=lambda op, dy: dy * cosh(op.inputs[0], **options), **options
    )


def cosh(x, **options):
    return numpy_function(
        np.cosh, [x], x.dtype, grad=lambda op, dy: dy * sinh(op.inputs[0], **options), **options
    )


def negative(x):
    return numpy_function(np.negative, [x], x.dtype)


def counted(function=lambda x: np.sin(x)):
    runs = []

    def host(*arrays):
        runs.append(tuple(np.copy(a) for a in arrays))
        return function(*arrays)

    return host, runs


# ---------------------------------------------------------------------------- the known example

MOD = (  # of the example in which TensorFlow was taught this operation
    [0.10000001, 0.19999999, 0.20000005, 1.70000005],
    [1.0, 1.0, 1.0, 1.0],
    [-1.0, -1.0, -1.0, 0.0],
)


def value_by_gradients(f, *args):
    @tg.trace
    def both(*args):
        y = f(*args)
        gradients = tg.gradients(y, list(args))
        return y, gradients if len(args) > 1 else gradients[0]

    return both(*args)


def value_by_tape_in_a_traced_function(f, *args):
    return tg.trace(functools.partial(value_by_tape, f))(*args)


WAYS = [value_by_tape, value_by_tape_in_a_traced_function, value_by_gradients]


def by_grad(transform, differentiate, mod=mod):
    def value_and_gradients(_, *args):
        f = transform(mod)
        return f(*args), differentiate(lambda *args: jnp.sum(f(*args)), (0, 1))(*args)

    return value_and_gradients


@pytest.mark.parametrize(
    "way",
    [
        *WAYS,
        lambda f, *args: value_by_tape(tg.trace(f), *args),
        by_grad(lambda f: f, jax.grad),
        by_grad(jax.jit, jax.grad),
        by_grad(tg.trace, tg.grad),
        by_grad(jax.vmap, jax.grad, pure_mod),
        by_grad(jax.checkpoint, jax.grad, pure_mod),
    ],
)
def test_the_mod_operation_has_its_known_values_and_gradients(way):
    value, gradients = way(mod, X, Y)
    for got, expected in zip((value, *gradients), MOD, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-7)


# ------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize(
    ("f", "wrap"),
    [
        (sinh, lambda f: f),
        (sinh, tg.trace),
        (functools.partial(sinh, stateful=False), jax.jit),
    ],
)
def test_derivatives_of_every_order_are_those_of_the_gradient_functions(f, wrap):
    x = jnp.float32(0.5)
    derivatives = f, jax.grad(f), jax.grad(jax.grad(f))
    found = [wrap(derivative)(x) for derivative in derivatives]
    np.testing.assert_allclose(found, [np.sinh(0.5), np.cosh(0.5), np.sinh(0.5)], rtol=1e-6)


def test_forward_mode_transposes_the_gradient():
    primals, tangents = (X, Y), (jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.ones(4))
    _, along = tg.jvp(mod, primals, tangents)
    np.testing.assert_allclose(along, [1 - 1, 2 - 1, 3 - 1, 4 - 0], rtol=1e-6)
    with tg.ForwardAccumulator(X, tangents[0]) as accumulator:
        z = mod(X, Y)
    np.testing.assert_allclose(accumulator.jvp(z), tangents[0], rtol=1e-6)
    hessian = tg.hessian(lambda x: jnp.sum(exp(x) ** 2))(X[:2])
    np.testing.assert_allclose(hessian, np.diag(4 * np.exp(2 * np.array(X[:2]))), rtol=1e-5)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(mod, primals, tangents)


def test_several_results_and_inputs_without_gradient():
    def split(x, n):
        return np.float32(x * n), x.astype(np.int32), np.sin(x)

    def gradient(op, d_product, d_int, d_sin):
        assert d_int.dtype == jnp.int32
        assert (op.name, op.params["func"], op.params["stateful"]) == ("split", split, True)
        assert "split(f32[4], i32[]) -> (f32[4], i32[4], f32[4])" in repr(op)
        x, n = op.inputs
        return [d_product * n + d_sin * jnp.cos(x), "an integer has none"]

    def results(x, n):
        types = (jnp.float32, jax.ShapeDtypeStruct((4,), jnp.int32), "float32")
        product, integer, sin = numpy_function(split, (x, n), types, gradient)
        assert integer.dtype == jnp.int32
        return product, integer, sin

    def f(x, n):
        product, _, sin = results(x, n)
        return jnp.sum(product + sin)

    three = np.int32(3)
    values, dx = value_by_tape(lambda x: results(x, three), X)
    for found in (dx, jax.grad(f)(X, three), jax.jit(jax.grad(f))(X, three)):
        np.testing.assert_allclose(found, 3 + np.cos(X), rtol=1e-6)
    for found, expected in zip(values, (3 * X, X.astype(int), np.sin(X)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_gradient_function_may_ask_for_values_where_there_are_some():
    def f(x):
        return numpy_function(np.abs, x, x.dtype, lambda op, dy: dy if op.inputs[0] > 0 else -dy)

    assert jax.grad(f)(-2.0) == -1.0


def test_results_used_in_a_gradient_have_that_gradient_themselves():
    f = functools.partial(by_tape, lambda x: exp(x) ** 2)
    on_tapes = value_by_tape(f, jnp.float32(0.3))
    np.testing.assert_allclose(on_tapes, [2 * np.exp(0.6), 4 * np.exp(0.6)], rtol=1e-5)


def test_what_the_gradient_function_closes_over_is_differentiated_in_its_turn():
    @jax.jit
    def f(x, scale):
        return numpy_function(np.sin, x, x.dtype, lambda op, dy: dy * scale * op.inputs[0])

    assert jax.grad(f, argnums=1)(0.5, 3.0) == 0.0  # the result does not depend on it
    assert jax.grad(jax.grad(f), argnums=1)(0.5, 3.0) == 0.5


def test_variables_are_inputs_and_their_reads_have_gradients():
    v = tg.Variable(2.0)
    np.testing.assert_allclose(by_tape(lambda v: mod(v, 1.5) * v, v), 2.0 + 0.5)


def test_a_gradient_function_may_read_a_variable():
    scale = tg.Variable(3.0, trainable=False)
    f = tg.trace(lambda x: numpy_function(np.sin, x, x.dtype, lambda op, dy: dy * scale.value))
    for value in (3.0, 4.0):
        scale.assign(value)
        assert tg.grad(f)(0.5) == value


# ----------------------------------------------------------------------------- without a gradient


def constant(x, **options):
    return numpy_function(np.sin, [x], x.dtype, **options)


@pytest.mark.parametrize(
    ("wrap", "stateful"),
    [(lambda f: f, True), (jax.jit, True), (tg.trace, True), (jax.jit, False), (jax.vmap, False)],
)
def test_without_a_gradient_a_tape_finds_no_connection(wrap, stateful):
    def f(x):
        found = constant(x, stateful=stateful)
        return found, found + 2 * x

    f = wrap(f)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(X)
        cut, both = f(X)
    np.testing.assert_allclose(cut, np.sin(X), rtol=1e-6)
    assert tape.gradient(cut, X) is None
    np.testing.assert_allclose(tape.gradient(both, X), [2, 2, 2, 2])


def test_without_a_gradient_gradients_and_accumulators_find_no_connection():
    @tg.trace
    def f(x):
        loop = jax.lax.scan(lambda c, _: (constant(c), None), x, None, length=2)[0]
        assert tg.gradients([constant(x), loop], x) == [None]
        return tg.gradients(loop + x, x)[0]

    assert f(0.5) == 1.0
    with tg.ForwardAccumulator(X, jnp.ones(4)) as accumulator:
        y = constant(X)
        z = jax.jit(constant)(X)
    assert accumulator.jvp(y) is None
    assert accumulator.jvp(z) is None


@pytest.mark.parametrize("differentiate", [jax.grad, tg.grad])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, tg.trace, jax.checkpoint])
def test_without_a_gradient_a_functional_gradient_says_so(differentiate, wrap):
    with pytest.raises(ValueError, match=r"'np_exp'.*has no gradient.*grad="):
        differentiate(wrap(lambda x: numpy_function(np_exp, x, x.dtype)))(1.0)


def sorted_cubes(argsort, p):
    return jnp.sum(p[argsort(p)] ** 3 * jnp.arange(3.0))


def second_derivative_by_tapes(f, x):
    return by_tape(lambda x: jnp.sum(by_tape(f, x)), x)


@pytest.mark.parametrize(
    "derivative",
    [*GRADIENTS.values(), lambda f, x: tg.hessian(f)(x).sum(0), second_derivative_by_tapes],
)
def test_integer_results_are_constants_and_need_no_gradient(derivative):
    def by_numpy(c):
        return numpy_function(
            lambda c: np.argsort(c).astype(np.int32), [c], jnp.int32, stateful=False
        )

    x = jnp.array([3.0, 1.0, 2.0])
    expected = derivative(functools.partial(sorted_cubes, jnp.argsort), x)
    got = derivative(functools.partial(sorted_cubes, by_numpy), x)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, tg.trace])
def test_bools_of_a_stateful_function_are_constants(wrap):
    def f(x):
        is_large = numpy_function(lambda x: x > 1.0, [x], bool)
        return jnp.sum(jnp.where(is_large, x, 0.0) ** 2)

    np.testing.assert_array_equal(jax.grad(wrap(f))(X), jnp.where(X > 1.0, 2 * X, 0.0))


def test_a_float_beside_an_integer_needs_a_gradient():
    def f(x):
        order, values = numpy_function(
            lambda c: (np.argsort(c).astype(np.int32), np.sort(c)), [x], [jnp.int32, x.dtype]
        )
        return jnp.sum(x[order] * values)

    with pytest.raises(ValueError, match="has no gradient"):
        jax.grad(f)(X)


def test_without_a_gradient_the_answer_does_not_depend_on_who_asked_first():
    f = jax.jit(constant)
    for _ in range(2):
        assert by_tape(f, X) is None
        with pytest.raises(ValueError, match="has no gradient"):
            jax.grad(lambda x: f(x).sum())(X)


def test_stopped_inputs_need_no_gradient():
    f = jax.jit(lambda x: constant(jax.lax.stop_gradient(x)) * x)
    np.testing.assert_allclose(jax.grad(f)(0.5), np.sin(0.5), rtol=1e-6)
    assert jax.grad(lambda x: numpy_function(np.negative, 3, "int32") * x)(1.0) == -3.0


# -------------------------------------------------------------------------------- when it runs


def test_it_is_never_run_while_tracing():
    host, runs = counted()
    f = tg.trace(lambda x: numpy_function(host, x, x.dtype, lambda op, dy: dy))
    f.graph(1.0)
    jax.make_jaxpr(jax.grad(f))(1.0)
    jax.eval_shape(f, 1.0)
    jax.jit(jax.grad(f)).lower(1.0)
    assert runs == []
    f(1.0)
    f(1.0)
    assert len(runs) == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["scan", "branch", "call", "inner scan", "custom gradient"])
def test_what_is_the_same_at_each_step_is_called_at_each_step(way, place):
    host, runs = counted(lambda: np.float32(len(runs)))

    def draw():
        return numpy_function(host, [], "float32")

    @tg.custom_gradient
    def scaled(x):
        scale = draw()
        return scale * x, lambda dy: dy * scale

    within = {
        "scan": lambda x: x * draw(),
        "branch": lambda x: jax.lax.cond(x > 0, lambda: x * draw(), lambda: x),
        "call": lambda x: x * jax.jit(draw)(),
        "inner scan": lambda x: jax.lax.scan(lambda c, _: (c + x * draw(), None), 0.0, None, 1)[0],
        "custom gradient": scaled,
    }[place]

    def f(x):
        return jax.lax.scan(lambda total, _: (total + within(x), None), 0.0, None, length=4)[0]

    assert way(f, jnp.float32(2.0)) == (20.0, 10.0)
    jax.effects_barrier()
    assert len(runs) == 4


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, tg.trace])
def test_a_second_derivative_calls_what_the_first_has_called_not_again(wrap, persistent):
    """y = (Σ n) x³ for n of 1, 2, 3, as the calls are counted."""
    host, runs = counted(lambda *_: np.float32(len(runs)))

    def f(x):
        def step(total, _):
            return total + x**3 * numpy_function(host, [total], "float32"), None

        return jax.lax.scan(step, 0.0, None, length=3)[0]

    @wrap
    def derivatives(x):
        with tg.GradientTape(persistent=persistent) as outer:
            outer.watch(x)
            if persistent:
                y = f(x)
                dy = outer.gradient(y, x)
            else:
                y, dy = value_by_tape(f, x)
        return y, dy, outer.gradient(dy, x)

    assert derivatives(jnp.float32(2.0)) == (48.0, 72.0, 72.0)
    jax.effects_barrier()
    assert len(runs) == 3


@pytest.mark.parametrize("way", [*WAYS, lambda f, x: jax.value_and_grad(f)(x)])
def test_a_gradient_function_is_called_once_for_each_gradient(way):
    host, runs = counted(lambda x: x * x)
    backward, backward_runs = counted(lambda x: 2 * x)

    def square(x):
        def gradient(op, dy):
            return dy * numpy_function(backward, op.inputs, "float32")

        return numpy_function(host, [x], "float32", gradient)

    def loop(x):
        return jax.lax.scan(lambda c, _: (square(c), None), x, None, length=2)[0]

    for f, expected, count in ((square, (9.0, 6.0), 1), (loop, (81.0, 108.0), 2)):
        runs.clear()
        backward_runs.clear()
        assert way(f, jnp.float32(3.0)) == expected
        jax.effects_barrier()
        assert (len(runs), len(backward_runs)) == (count, count)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, tg.trace])
def test_a_stateful_function_keeps_order_and_count(wrap):
    host, runs = counted(lambda x: np.float32(len(runs)))

    def call(x):
        return numpy_function(host, x, "float32", lambda op, dy: dy)

    @wrap
    def f(x):
        call(x)  # its result is not used
        _, ys = jax.lax.scan(lambda c, x: (c, call(x)), None, jnp.stack([x, x]))
        return call(x), ys

    last, ys = f(1.0)
    jax.effects_barrier()
    assert (last, *ys) == (4.0, 2.0, 3.0)
    assert len(runs) == 4


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f])
def test_vmap_gives_what_a_loop_gives(wrap):
    host, runs = counted(lambda x, y: np.cumsum(x) * y)  # wrong if it saw a batch

    def f(x, y):
        def gradient(op, dz):
            x, y = op.inputs
            return jnp.cumsum(dz[::-1])[::-1] * y, jnp.sum(dz * jnp.cumsum(x))

        return numpy_function(
            host, (x, y), jax.ShapeDtypeStruct(x.shape, x.dtype), gradient, stateful=False
        )

    xs, ys = jnp.arange(6.0).reshape(3, 2), jnp.arange(1.0, 4.0)
    loop = jnp.stack([np.cumsum(x) * y for x, y in zip(xs, ys)])
    np.testing.assert_array_equal(wrap(jax.vmap(f))(xs, ys), loop)
    jax.effects_barrier()
    assert [tuple(map(np.shape, run)) for run in runs] == [((2,), ())] * 3

    def total(x, y):
        return jnp.sum(f(x, y) ** 2)

    by_jax = jax.grad(lambda x, y: jnp.sum((jnp.cumsum(x) * y) ** 2))
    expected = [by_jax(x, y) for x, y in zip(xs, ys)]
    np.testing.assert_allclose(wrap(jax.vmap(jax.grad(total)))(xs, ys), expected, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_stateful_function_is_not_mapped(wrap):
    with pytest.raises(NotImplementedError, match=r"'sinh'.*mapped by jax.vmap.*stateful=False"):
        jax.vmap(wrap(sinh))(X)
    # A Jacobian maps the backward pass over cotangents, and so what is computed of these.
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = wrap(sinh)(X)
        z = wrap(lambda x: numpy_function(np.negative, x, x.dtype, lambda op, dy: negative(dy)))(X)
    np.testing.assert_allclose(tape.jacobian(y, X), np.diag(np.cosh(X)), rtol=1e-6)
    with pytest.raises(NotImplementedError, match=r"'negative'.*mapped by jax.vmap.*stateful="):
        tape.jacobian(z, X)


def test_arrays_on_several_devices():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("i")))
    np.testing.assert_allclose(jax.jit(sinh)(x), np.sinh(X), rtol=1e-6)
    grad = jax.jit(jax.grad(lambda x: sinh(x).sum()))(x)
    np.testing.assert_allclose(grad, np.cosh(X), rtol=1e-6)


def test_a_large_array_does_not_block():
    x = jnp.ones((1000, 1000))
    assert jax.jit(lambda x: constant(x * 2).sum())(x) == pytest.approx(np.sin(2) * 1e6, rel=1e-4)


def test_a_stateful_one_may_not_be_in_a_recomputed_function():
    f = tg.recompute_grad(sinh)
    with pytest.raises(NotImplementedError, match="ffects not supported"):
        jax.grad(f)(0.5)
    pure = tg.recompute_grad(functools.partial(sinh, stateful=False))
    np.testing.assert_allclose(jax.grad(pure)(0.5), np.cosh(0.5), rtol=1e-6)


# -------------------------------------------------------------------------------- what it takes


def test_results_come_as_tout_says():
    one = numpy_function(np.sin, [X], "float32")
    (in_list,) = numpy_function(np.sin, [X], [np.float32])
    (in_tuple,) = numpy_function(lambda x: (np.sin(x),), [X], (jnp.float32,))
    for result in (one, in_list, in_tuple):
        np.testing.assert_allclose(result, np.sin(X), rtol=1e-6)
    assert isinstance(numpy_function(np.sin, [X], [np.float32]), list)
    outer = numpy_function(np.multiply.outer, [X, Y], jax.ShapeDtypeStruct((4, 4), "float32"))
    np.testing.assert_allclose(outer, np.multiply.outer(X, Y), rtol=1e-6)
    broadcast = numpy_function(np.add, [X, X[:, None]], "float32")
    np.testing.assert_allclose(broadcast, X + X[:, None])
    assert numpy_function(lambda: 7, [], "int32") == 7
    assert numpy_function(lambda: True, [], bool).dtype == bool
    np.testing.assert_array_equal(jax.jit(lambda: numpy_function(lambda: 7, [], "float32"))(), 7.0)


def test_python_numbers_take_every_dtype_that_has_them():
    dtypes = ["uint8", "int4", "uint32", "float16", "bfloat16", "complex64", "float32"]
    numbers = [255, -8, 2**32 - 1, 2.5, 3, 1, 2**70]
    got = numpy_function(lambda: numbers, [], dtypes)
    for result, dtype, number in zip(got, dtypes, numbers, strict=True):
        assert result.dtype == jnp.dtype(dtype)
        assert complex(result) == pytest.approx(complex(number), rel=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(
    ("function", "tout", "says"),
    [
        (lambda x: np.zeros(3, np.float32), "float32", r"float32\[3\].*Tout says float32\[4\]"),
        (lambda x: np.float64(x), "float32", r"float64\[4\].*Tout says float32\[4\].*astype"),
        (lambda x: 1.5, jax.ShapeDtypeStruct((), "int32"), r"float64\[\].*Tout says int32\[\]"),
        (lambda x: 1.5, jax.ShapeDtypeStruct((), "int4"), r"float64\[\].*Tout says int4\[\]"),
        (lambda x: 2j, jax.ShapeDtypeStruct((), "bfloat16"), r"complex128\[\].*says bfloat16"),
        (lambda x: 300, jax.ShapeDtypeStruct((), "int8"), "returned 300 as the result: int8 has"),
        (lambda x: -1, jax.ShapeDtypeStruct((), "uint8"), "returned -1 as the result: uint8 has"),
        (lambda x: 2**40, jax.ShapeDtypeStruct((), "int32"), r"int32 has integers from -2"),
        (lambda x: 9, jax.ShapeDtypeStruct((), "int4"), "int4 has integers from -8 to 7 only"),
        (lambda x: (x, None), ["float32", "int32"], r"None as result 1, .*Tout says int32\[4\]"),
        (lambda x: None, "float32", r"None as the result, which is not an array, where Tout says"),
        (lambda x: [x, [1, [2]]], "float32", "returned a list: .* which is not an array"),
        (lambda x: "a", "float32", "returned a str: 'a' as the result, which is not an array"),
        (lambda x: x, ["float32", "float32"], "2 results by Tout; it returned an array"),
        (lambda x: [x], ["float32", "float32"], "2 results by Tout; it returned 1 results"),
        (lambda x: 1 / 0, "float32", "raised ZeroDivisionError: division by zero"),
        (lambda x: x.__setitem__(0, 1.0), "float32", "raised ValueError: .*read-only"),
    ],
)
def test_an_error_on_the_host_names_the_function(function, tout, says, wrap, stateful):
    f = wrap(lambda x: numpy_function(function, [x], tout, stateful=stateful))
    place = rf"'<lambda>' \({re.escape(__file__)}:\d+\), called by numpy_function,"

    def run():
        jax.block_until_ready(f(X))
        jax.effects_barrier()

    with pytest.raises(Exception, match=rf"{place}.*{says}"):
        run()


def test_a_wrong_gradient_is_an_error_when_it_is_asked_for():
    def wrong(op, dy):
        return dy, dy[0]

    f = jax.jit(lambda x, y: numpy_function(np_mod, [x, y], "float32", wrong).sum())
    f(X, Y)
    said = rf"'wrong' \({re.escape(__file__)}:.*of np_mod at test_numpy.*f32\[\] for the input 1"
    with pytest.raises(ValueError, match=said):
        jax.grad(f)(X, Y)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((np_mod, [X, "y"], "float32"), TypeError, "'np_mod'.*input 1 is a str: 'y'"),
        (("np_mod", [X], "float32"), TypeError, "numpy_function.*'np_mod'"),
        ((np_mod, [X, Y], "float33"), TypeError, "Tout a dtype.*'np_mod'.*'float33'"),
        ((np_mod, [X, Y], None), TypeError, "Tout a dtype.*'np_mod'.*None"),
        ((np_mod, [X, Y], np.float64), TypeError, "Tout=float64.*'np_mod'.*jax_enable_x64"),
        ((np_mod, [X, Y], "float32", "grad"), TypeError, "numpy_function.*'grad'"),
        ((np_mod, [X, Y[:3]], "float32"), ValueError,
         r"'np_mod'.*these do not broadcast: \[4\], \[3\].*ShapeDtypeStruct"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        numpy_function(*arguments)


@pytest.mark.parametrize(
    "f", [mod, lambda x, y: constant(x), lambda x, y: numpy_function(lambda: 1.0, [], "float32")]
)
def test_an_export_names_the_function(f):
    with pytest.raises(NotImplementedError, match=r"'.*numpy_function, cannot be exported"):
        jax.export.export(jax.jit(f))(X, Y)


def test_calls_of_one_function_share_their_compiled_gradient_on_tapes(compilations):
    for _ in range(2):  # the first time compiles, and the second what is done from then on
        by_tape(sinh, X)
    before = compilations()
    # With a gradient function made for this one call.
    np.testing.assert_allclose(by_tape(sinh, X), np.cosh(X), rtol=1e-6)
    assert compilations() == before


def test_functions_that_are_equal_are_two_functions():
    class Times:
        def __init__(self, factor):
            self.factor = np.float32(factor)

        def __eq__(self, other):
            return isinstance(other, Times)

        def __hash__(self):
            return 1

        def __call__(self, x):
            return self.factor * x

    x = jnp.float32(1.0)
    for stateful in (True, False):
        results = [
            float(tg.numpy_function(f, [x], np.float32, stateful=stateful))
            for f in (Times(2), Times(3), Times(4).__call__, Times(5).__call__)
        ]
        assert results == [2.0, 3.0, 4.0, 5.0]


def test_calls_are_seen_in_a_graph():
    assert {"mod", "to_host"} <= set(re.findall(r"\w+", str(tg.graph(mod, X, Y))))
