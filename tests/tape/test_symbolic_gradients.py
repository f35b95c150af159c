"""`gradients`, `hessians` and `hessian_vector_product` inside traced functions and tapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tracegrad as tg
from tests.derivatives import value_by_tape
from tracegrad import GradientTape, gradients, hessian_vector_product, hessians


def floats(values):
    return [None if v is None else float(v) for v in values]


def inside(fun, *args):
    """What a function returns that calls `gradients`, as a tree of which None is a part."""
    return tg.trace(fun)(*args)


def test_a_y_that_is_an_x_adds_its_seed():
    assert floats(inside(lambda x: gradients([x, x**2], x), 2.0)) == [5.0]


def test_gradients_of_gradients_are_derivatives_of_higher_order():
    def f(x):
        (first,) = gradients(jnp.sin(x) * x, x)
        (second,) = gradients(first, x)
        (third,) = gradients(second, x)
        return first, second, third

    def g(x):
        return jnp.sin(x) * x

    expected = [jax.grad(g), jax.grad(jax.grad(g)), jax.grad(jax.grad(jax.grad(g)))]
    np.testing.assert_allclose(inside(f, 0.7), [h(0.7) for h in expected], rtol=1e-5)


def test_a_gate_is_a_barrier_and_a_name_a_scope():
    def f(x, z):
        return gradients(x * z, [x, z], gate_gradients=True, name="backward")

    text = str(tg.graph(f, 2.0, 3.0))
    assert "optimization_barrier" in text
    assert "# backward" in text


def test_it_is_transformed_like_any_traced_function():
    cube = tg.trace(lambda x: gradients(x**3, x)[0])
    np.testing.assert_allclose(jax.grad(cube)(2.0), 12.0)
    np.testing.assert_allclose(jax.vmap(cube)(jnp.arange(3.0)), [0.0, 3.0, 12.0])
    np.testing.assert_allclose(tg.trace(lambda x: cube(x) * gradients(x**2, x)[0])(2.0), 48.0)


v = tg.Variable(3.0)


def of_a_variable(y, x):
    return tg.trace(lambda z: gradients(y * v * z, v))(x)


@pytest.mark.parametrize(
    "inner",
    [
        lambda x, y: tg.trace(lambda z: gradients(y * z, x))(x * 2),
        lambda x, y: of_a_variable(v * x, x),
        lambda x, y: tg.trace(lambda: hessians(y * y, x))(),
        lambda x, y: tg.trace(lambda z: gradients(x * z, x))(3.0),
    ],
)
def test_an_x_of_an_enclosing_function_is_refused(inner):
    with pytest.raises(NotImplementedError, match="as arguments"):
        inside(lambda x: inner(x, jnp.sin(x)), 0.5)


def test_under_a_tape_it_gives_what_the_tape_follows():
    slope, second = value_by_tape(lambda x: gradients(x * x, x)[0], jnp.float32(3.0))
    assert (float(slope), float(second)) == (6.0, 2.0)


def test_the_function_is_traced_twice_at_most():
    traces = []

    def f(x):
        traces.append(None)
        return gradients(x**2, x)[0] + gradients(x**3, x)[0]

    traced = tg.trace(f)
    assert traced(2.0) == 16.0
    assert traced(3.0) == 33.0
    assert len(traces) == 2


def test_a_linear_function_has_a_zero_hessian():
    (found,) = inside(lambda x: hessians(jnp.sum(2 * x), x), jnp.ones((2, 2)))
    np.testing.assert_array_equal(found, np.zeros((2, 2, 2, 2)))


# ---------------------------------------------------------------------------------------- bad input


def test_under_a_tape_an_x_that_the_tape_does_not_follow_has_no_part_of_its_gradient():
    """The tape has recorded ``w * x``, and not ``x * x``: what it could give is half of the sum."""
    w, x = jnp.float32(2.0), jnp.float32(3.0)
    with GradientTape() as tape:
        tape.watch(w)
        y = w * x + x * x
        with pytest.warns(UserWarning, match="did not watch it"):
            assert gradients(y, [w, x])[1] is None
        with pytest.warns(UserWarning, match=r"gradient of xs\.1 is None"):
            (dw, dx) = gradients(y, [w, x], unconnected_gradients="zero")
        assert floats([dw, dx]) == [3.0, 0.0]
        with pytest.warns(UserWarning, match="did not watch it"):
            assert float(hessians(y, x)[0]) == 0.0
    with GradientTape() as tape:
        tape.watch([w, x])
        y = w * x + x * x
        assert floats(gradients(y, [w, x])) == [3.0, 8.0]


def test_outside_of_a_traced_function_and_of_a_tape_it_says_what_to_use():
    x = jnp.float32(1.0)
    with pytest.raises(RuntimeError, match=r"tracegrad\.trace.*tracegrad\.grad"):
        gradients(x * x, x)


@pytest.mark.parametrize("compiled", [tg.trace, lambda f: f], ids=["traced", "on a tape"])
def test_in_the_block_of_an_accumulator_it_sees_what_is_around_the_block(compiled):
    @compiled
    def cubed(x):
        with GradientTape() as tape, tg.ForwardAccumulator(x, jnp.float32(1.0)) as accumulator:
            tape.watch(x)
            y = x**3
            (slope,) = gradients(y, x)
            (curvature,) = hessians(y, x)
        return slope, curvature, accumulator.jvp(slope)

    assert floats(cubed(jnp.float32(3.0))) == [27.0, 18.0, 18.0]
    assert float(tg.trace(_slope_in_accumulator)(jnp.float32(3.0))) == 27.0
    with pytest.raises(RuntimeError, match="inside a GradientTape"):
        _slope_in_accumulator(jnp.float32(3.0))


def _slope_in_accumulator(x):
    with tg.ForwardAccumulator(x, jnp.float32(1.0)):
        return gradients(x**3, x)[0]


def test_in_the_body_of_a_loop_it_says_so():
    def f(x):
        return jax.lax.scan(lambda c, _: (gradients(c * c, c)[0], None), x, None, length=2)

    with pytest.raises(RuntimeError, match="not in the body of a scan"):
        inside(f, 1.0)
    assert float(tg.trace(lambda x: gradients(x**2, x)[0])(1.0)) == 2.0  # nothing is left behind


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"grad_ys": [1.0, 2.0]}, ValueError, "grad_ys has 2 arrays, the target 1"),
        ({"grad_ys": [np.ones(3, "float32")]}, ValueError, r"grad_ys.*\(3,\).*\(\)"),
        ({"grad_ys": [jnp.int32(1)]}, TypeError, "int32.*float32"),
        ({"aggregation_method": "sideways"}, ValueError, "sideways.*ADD_N"),
        ({"unconnected_gradients": "maybe"}, ValueError, "maybe"),
    ],
)
def test_wrong_options_are_named_with_both_sides(options, error, message):
    with pytest.raises(error, match=message):
        inside(lambda x: gradients(x * x, x, **options), 2.0)


@pytest.mark.parametrize(
    "tree", [lambda x: {"w": x}, lambda x: [[x]], nnx.Param], ids=["dict", "list", "Param"]
)
def test_a_tree_is_no_x_and_no_y_and_its_arrays_may_be_constants(tree):
    for call in (
        lambda x: gradients(x * x, [x, tree(x)]),
        lambda x: gradients([tree(x)], x),
        lambda x: hessians(x * x, nnx.Param(x)),
    ):
        with pytest.raises(TypeError, match=r"one array or Variable, no tree of them.*leaves"):
            inside(call, 2.0)

    def partial(a):
        c = 2 * a
        return gradients(a + c, a, stop_gradients=tree(c))

    assert inside(partial, 1.0) == [1.0]


def test_a_complex_y_needs_a_seed():
    with pytest.raises(TypeError, match="real and imaginary"):
        inside(lambda z: gradients(z * z, z), np.complex64(1 + 2j))
    seed = [np.complex64(1)]
    assert inside(lambda z: gradients(z * z, z, grad_ys=seed), np.complex64(1 + 2j)) == [2 + 4j]


def test_all_reads_of_a_variable_count_in_traced_functions_and_on_tapes():
    v, x = tg.Variable([1.0, 2.0]), jnp.array([3.0, 4.0])

    def inside(x):
        a = v * v * v
        v.assign(2 * x)
        y = jnp.sum(a + a * (v * v * v))
        v.assign(jnp.zeros(2))
        (product,) = hessian_vector_product(y, v, jnp.ones(2))
        (stopped,) = gradients(y, x, stop_gradients=v)
        return *gradients(jnp.sum(a), v), *gradients(y, v), *hessians(y, v), product, stopped

    def on_a_tape(x):
        with GradientTape():
            return inside(x)

    # Of y = a³ + a³ b³ along (1, 1).
    a, b = np.array([1.0, 2.0]), np.array([6.0, 8.0])
    second = 6 * a + 6 * a * b**3 + 2 * 9 * a**2 * b**2 + 6 * a**3 * b
    for fun in (tg.trace(inside), on_a_tape):
        v.assign(a.astype(np.float32))
        early, slope, hessian, product, stopped = fun(x)
        np.testing.assert_allclose(early, 3 * a**2)
        np.testing.assert_allclose(slope, 3 * a**2 + 3 * a**2 * b**3 + 3 * a**3 * b**2)
        np.testing.assert_allclose(hessian, np.diag(second))
        np.testing.assert_allclose(product, second)
        assert stopped is None


def test_a_second_derivative_goes_by_a_linear_solve_to_which_none_leads():
    """The factors of the matrix, which the solve keeps, depend on no x: JAX refuses to
    differentiate a solve where they alone vary."""
    matrix = jnp.array([[2.0, 0.5], [0.5, 1.0]])

    def f(x):
        y = jnp.sum(jnp.linalg.solve(matrix, x)) + jnp.sum(x**3)
        return gradients(gradients(y, x), x)

    assert np.allclose(inside(f, jnp.array([1.0, -2.0]))[0], [6.0, -12.0])
