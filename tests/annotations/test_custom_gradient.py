"""A function with a custom gradient has that gradient, everywhere, or says why it has none."""

import gc
import inspect
import re
import types
import weakref
from collections import OrderedDict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import by_tape
from tracegrad import custom_gradient, hessian, stop_gradient

pytestmark = pytest.mark.both_jax


def nth(f, order):
    for _ in range(order):
        f = jax.grad(f)
    return f


@custom_gradient
def log1pexp(x):
    e = jnp.exp(x)

    def grad(dy):
        return dy * (1 - 1 / (1 + e))

    return jnp.log(1 + e), grad


@custom_gradient
def sine(x):
    """The sine, whose derivative is written in terms of a custom gradient again."""
    return jnp.sin(x), lambda dy: dy * cosine(x)


@custom_gradient
def cosine(x):
    return jnp.cos(x), lambda dy: -dy * sine(x)


# ----------------------------------------------------------------------------------- figures


def fused_backprop(close_over):
    """x³, computing its slope in the forward pass; the slope's derivative is 6x."""

    @custom_gradient
    def op(x):
        y, slope = x**3, close_over(3 * x**2)

        def first_order(dy):
            @custom_gradient
            def first_order_custom(x):
                return slope, lambda ddy: ddy * 6 * x

            return dy * first_order_custom(x)

        return y, first_order

    return op


def test_the_wrapped_form_may_close_over_a_slope_only_if_it_is_a_constant():
    with jax.enable_x64(True):
        f = fused_backprop(stop_gradient)
        second = jax.grad(jax.grad(lambda x: f(x) ** 2))(1.5)
        assert float(second) == pytest.approx(30 * 1.5**4)  # of x⁶
    f = fused_backprop(lambda slope: slope)
    assert jax.grad(f)(1.5) == 3 * 1.5**2
    with pytest.raises(ValueError, match=r"'slope' \(~f32\[\]\), which is being differentiated"):
        jax.grad(jax.grad(f))(1.5)


# --------------------------------------------------------------------- orders, transformations


WRAPS = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "trace": tg.trace,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x > -9, f, lambda x: x, x),
}


@pytest.mark.parametrize("name", WRAPS)
def test_derivatives_of_any_order_go_through_every_transformation(name):
    wrap = WRAPS[name]
    with jax.enable_x64(True):
        x = jnp.float64(0.7)
        for order in (1, 2, 3, 4) if name == "nothing" else (1, 3):
            expected = nth(jnp.sin, order)(x)
            np.testing.assert_allclose(jax.jit(nth(wrap(sine), order))(x), expected, rtol=1e-12)
            np.testing.assert_allclose(wrap(nth(sine, order))(x), expected, rtol=1e-12)


def test_inside_shard_map():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("i",))
    spec = jax.sharding.PartitionSpec("i")

    def loss(x, w):
        mapped = jax.shard_map(closing_over_w, mesh=mesh, in_specs=spec, out_specs=spec)
        return mapped(x, w).sum()

    w = jnp.arange(4.0)
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        np.testing.assert_array_equal(gradient(jnp.ones(4), w), 5 * w)


def test_forward_mode_of_jax_refuses_as_for_any_custom_vjp():
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(log1pexp, (0.0,), (1.0,))
    with jax.enable_x64(True):  # tracegrad's transposes the gradient
        second = hessian(lambda x: sine(x) ** 3)(0.7)
        assert float(second) == pytest.approx(nth(lambda x: jnp.sin(x) ** 3, 2)(0.7))


def test_without_a_gradient_the_program_is_that_of_the_function():
    def operations(f):
        text = jax.jit(f).lower(jnp.ones(3)).compile().as_text()
        text = re.sub(r"metadata=\{[^}]*\}|^.*(HloModule|FileNames|\"|\d+ \{).*$", "", text)
        return re.findall(r" (\w+)\(", text)

    assert operations(lambda x: log1pexp(x)) == operations(lambda x: jnp.log(1 + jnp.exp(x)))


# --------------------------------------------------------------------------- inputs and outputs


def test_cotangents_arrive_flat_one_per_output_leaf():
    seen = []

    @custom_gradient
    def f(x):
        def grad(*dys):
            seen.append([(dy.shape, dy.dtype) for dy in dys])
            return dys[0] + 10 * dys[1].sum() + 100 * dys[2]

        return {"b": {"inner": jnp.stack([x, x])}, "a": x, "c": (x, None)}, grad

    assert jax.grad(lambda x: f(x)["a"] + f(x)["b"]["inner"].sum() + f(x)["c"][0])(1.0) == 121.0
    assert seen[0] == [((), np.float32), ((2,), np.float32), ((), np.float32)]
    # Those of outputs that are not used are zeros.
    assert jax.grad(lambda x: f(x)["b"]["inner"][1])(1.0) == 10.0


def test_an_integer_output_has_a_cotangent_of_zeros():
    @custom_gradient
    def f(x):
        def grad(dn, dflag, dy):
            assert (dn.dtype, dn.shape, dflag.dtype) == (jnp.int32, (2,), bool)
            return dy + 1000 * dn.sum() + 1000 * dflag

        return (x.astype(jnp.int32), x > 0, x.sum()), grad

    def loss(x):
        n, flag, y = f(x)
        return (n * flag).sum() + y

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        np.testing.assert_array_equal(gradient(jnp.array([1.0, 2.0])), [1.0, 1.0])


def test_integer_and_key_inputs_have_a_gradient_that_is_ignored():
    @custom_gradient
    def f(key, n, x):
        noise = jax.random.normal(key, x.shape)
        return x * n + noise, lambda dy: (None, jnp.ones_like(n), dy * n)

    key, n, x = jax.random.key(0), jnp.array([2, 3]), jnp.ones(2)
    np.testing.assert_array_equal(jax.grad(lambda x: f(key, n, x).sum())(x), [2.0, 3.0])
    keys = jax.random.split(key, 4)
    assert jax.vmap(jax.grad(lambda x, k: f(k, n, x).sum()), (None, 0))(x, keys).shape == (4, 2)
    gradient = jax.grad(lambda n: f(key, n, x).sum(), allow_int=True)(n)
    assert gradient.dtype == jax.dtypes.float0


def test_python_values_stay_python_values_and_have_no_gradient():
    @custom_gradient
    def f(x, mode, axis, flag, nothing, fun, *, scale):
        assert (mode, axis, flag, nothing) == ("sum", 1, True, None)
        assert isinstance(axis, int)
        return fun(x).sum(axis) * scale, lambda dy: dy[:, None] * jnp.ones_like(x) * scale

    def loss(x):
        return f(x, "sum", 1, True, None, jnp.sin, scale=3.0).sum()

    expected = np.full((2, 3), 3.0)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        np.testing.assert_array_equal(transform(loss)(jnp.ones((2, 3))), expected)


@pytest.mark.parametrize(
    "returned",
    [
        lambda da, db, dx: ({"a": da, "b": db}, dx),
        lambda da, db, dx: (da, db, dx),
        lambda da, db, dx: [[da, db], [dx]],
        lambda da, db, dx: ({"a": da, "b": db}, dx, None, None),
        lambda da, db, dx: (da, db, dx, None, None),
    ],
)
def test_gradients_are_returned_flat_or_nested(returned):
    @custom_gradient
    def f(params, x, name, nothing):
        y = params["a"] * x + params["b"]
        return y, lambda dy: returned(2 * dy, 3 * dy, 4 * dy)

    gradients = jax.grad(f, argnums=(0, 1))({"a": 1.0, "b": 1.0}, 1.0, "name", None)
    assert gradients == ({"a": 2.0, "b": 3.0}, 4.0)


@pytest.mark.parametrize(
    ("params", "returned", "names"),
    [
        ({"a": 1.0, "b": 1.0}, lambda a, b: {"a": a, "x": b}, "a and x for the inputs p.a and p.b"),
        ({"a": 1.0, "b": 1.0}, lambda a, b: [{"a": a, "x": b}], "0.a and 0.x for the inputs p.a"),
        (OrderedDict(b=1.0, a=1.0), lambda a, b: {"a": a, "b": b}, "a and b for the inputs p.b"),
        ([1.0, 1.0], lambda a, b: {"a": a, "b": b}, "a and b for the inputs p.0 and p.1"),
    ],
)
def test_gradients_under_other_keys_than_the_inputs_have_are_an_error(params, returned, names):
    @custom_gradient
    def f(p):
        return sum(jax.tree.leaves(p)), lambda dy: returned(dy, 2 * dy)

    params = jax.tree.map(jnp.float32, params)
    for gradient in (jax.grad(f), partial(by_tape, f)):
        with pytest.raises(ValueError, match=f"'f'.* returned gradients named {names}"):
            gradient(params)


def test_none_stands_for_the_gradient_of_one_input_or_of_a_whole_argument():
    @custom_gradient
    def f(params, x, z):
        return params["a"] * x + params["b"] + z, lambda dy: (None, None, dy)

    params = {"a": 1.0, "b": 1.0}
    assert jax.grad(f, argnums=(0, 1, 2))(params, 1.0, 1.0) == ({"a": 0.0, "b": 0.0}, 0.0, 1.0)
    assert jax.grad(custom_gradient(lambda x: (x, lambda dy: None)))(1.0) == 0.0


def test_a_key_output_has_no_cotangent():
    @custom_gradient
    def noisy(x, key):
        taken, left = jax.random.split(key)

        def grad(dy, dkey):
            assert dkey.dtype == jax.dtypes.float0
            return 5 * dy, None

        return (2 * x + 0 * jax.random.uniform(taken), left), grad

    def f(x):
        y, key = noisy(x, jax.random.key(0))
        return y**2 + 0 * jax.random.uniform(key)

    assert jax.grad(f)(3.0) == tg.jvp(f, (3.0,), (1.0,))[1] == 60.0
    assert tg.hessian(f)(3.0) == 50.0


def test_keyword_arguments_are_passed_on():
    @custom_gradient
    def f(x, *, w):
        return x * w, lambda dy: dy * w * 10

    def by_keyword(x, w):
        return f(x, w=w)

    assert by_keyword(2.0, 3.0) == 6.0
    assert jax.grad(by_keyword)(2.0, 3.0) == jax.jit(jax.grad(by_keyword))(2.0, 3.0) == 30.0
    mapped = jax.vmap(jax.grad(by_keyword))(jnp.ones(2), jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(mapped, [10, 20])


def test_a_function_without_arguments():
    def outer(x):
        return custom_gradient(lambda: (stop_gradient(x) + 1.0, lambda dy: ()))() * x

    assert jax.grad(outer)(2.0) == jax.grad(jax.jit(outer))(2.0) == 3.0


def test_a_python_number_is_a_gradient_of_a_scalar():
    f = custom_gradient(lambda x: (x.astype(jnp.float32), lambda dy: 7))
    assert jax.grad(f)(jnp.bfloat16(1.0)) == 7.0


# --------------------------------------------------------------------- decorating and methods


def test_bare_and_with_parentheses():
    @custom_gradient()
    def f(x):
        """What f does."""
        return x, lambda dy: 3 * dy

    assert jax.grad(f)(1.0) == 3.0
    assert (f.__name__, f.__doc__) == ("f", "What f does.")
    assert f.__wrapped__(2.0)[0] == 2.0
    assert list(inspect.signature(f).parameters) == ["x"]


def test_methods_class_methods_and_static_methods():
    class Layer:
        factor = 2.0

        @custom_gradient
        def method(self, x):
            return self.factor * x, lambda dy: dy * self.factor * 10

        @classmethod
        @custom_gradient
        def of_class(cls, x):
            return cls.factor * x, lambda dy: dy * cls.factor * 100

        @custom_gradient
        @staticmethod
        def static(x):
            return x, lambda dy: dy * 1000

    layer = Layer()
    assert (layer.method(3.0), Layer.method(layer, 3.0)) == (6.0, 6.0)
    for method, expected in ((layer.method, 20.0), (layer.of_class, 200.0), (layer.static, 1000.0)):
        assert jax.grad(method)(3.0) == expected
        assert jax.grad(jax.jit(method))(3.0) == expected
    assert jax.grad(Layer.static)(3.0) == 1000.0


def test_a_method_of_a_module_that_is_a_tree_has_no_gradient_for_the_module():
    equinox = pytest.importorskip("equinox")

    class Scale(equinox.Module):
        factor: jax.Array

        @custom_gradient
        def __call__(self, x):
            return self.factor * x, lambda dy: dy * self.factor * 10

    scale = Scale(jnp.float32(2.0))
    assert jax.grad(lambda x: scale(x))(3.0) == 20.0
    with pytest.raises(ValueError, match=r"'self.factor' \(f32\[\]\), which is being differ"):
        jax.grad(lambda scale: scale(3.0))(scale)


# --------------------------------------------------------------------------------- closing over


def closing_over_w(x, w):
    @custom_gradient
    def f(x):
        return x * w, lambda dy: 5 * dy * w

    return f(x)


def scanned(f):
    return lambda x, w: jax.lax.scan(lambda c, _: (f(c, w), None), x, None, length=1)[0]


def mapped(f):
    return lambda x, w: jax.vmap(f)(jnp.stack([x, x]), jnp.stack([w, w])).mean()


AROUND = {
    "grad": lambda f, i: jax.grad(f, i),
    "jit of grad": lambda f, i: jax.jit(jax.grad(f, i)),
    "grad of jit": lambda f, i: jax.grad(jax.jit(f), i),
    "grad of trace": lambda f, i: jax.grad(tg.trace(f), i),
    "grad of scan": lambda f, i: jax.grad(scanned(f), i),
    "grad of scan of jit": lambda f, i: jax.grad(scanned(jax.jit(f)), i),
    "jit of grad of scan": lambda f, i: jax.jit(jax.grad(scanned(f), i)),
    "grad of vmap": lambda f, i: jax.grad(mapped(f), i),
    "grad of vmap of jit": lambda f, i: jax.grad(mapped(jax.jit(f)), i),
    "vmap of grad": lambda f, i: (
        lambda x, w: jax.tree.map(
            jnp.mean, jax.vmap(jax.grad(f, i))(jnp.stack([x, x]), jnp.stack([w, w]))
        )
    ),
    "grad of checkpoint": lambda f, i: jax.grad(jax.checkpoint(f), i),
    "grad of cond": lambda f, i: jax.grad(lambda x, w: jax.lax.cond(True, f, f, x, w), i),
}


def used_by_the_gradient_alone(x, w):
    return custom_gradient(lambda x: (x * 2, lambda dy: 5 * dy * w))(x)


def closing_over_a_constant(x, w):
    return custom_gradient(lambda x: (x * stop_gradient(w), lambda dy: 5 * dy * w))(x)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    ("fun", "wrt", "gradient"),
    [
        (closing_over_w, 0, 15.0),
        (used_by_the_gradient_alone, (0, 1), (15.0, 0.0)),
        (closing_over_a_constant, (0, 1), (15.0, 0.0)),
    ],
)
def test_what_does_not_depend_on_a_value_that_is_differentiated_may_close_over_it(
    around, fun, wrt, gradient
):
    assert AROUND[around](fun, wrt)(2.0, 3.0) == gradient


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("wrt", [1, (0, 1)])
def test_closing_over_a_value_that_is_differentiated_raises_and_names_it(around, wrt):
    with pytest.raises(
        ValueError, match=r"'f' \(.*test_custom_gradient.py:\d+\).* depends on 'w' \(~?f32\[\]\)"
    ):
        AROUND[around](closing_over_w, wrt)(2.0, 3.0)


@pytest.mark.parametrize("around", ["grad", "grad of jit", "grad of vmap", "grad of scan"])
def test_the_gradient_itself_may_be_differentiated_in_what_it_closes_over(around):
    def slope(x, w):
        return jax.grad(closing_over_w)(x, w)  # 5 w

    assert AROUND[around](slope, (0, 1))(2.0, 3.0) == (0.0, 5.0)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, tg.trace])
def test_what_the_gradient_of_a_function_inside_closes_over_may_be_differentiated(around):
    def f(x, w):
        inner = tg.custom_gradient(lambda x: (x * x, lambda dy: 5 * dy * w))
        return tg.custom_gradient(lambda x: (inner(x), lambda dy: 7 * dy))(x)

    assert around(jax.grad(f, (0, 1)))(3.0, 2.0) == (7.0, 0.0)


def through_another_function(w):
    def inner(x):
        return x * w

    return custom_gradient(lambda x: (inner(x), lambda dy: dy))(1.0)


def through_an_object(w):
    model = types.SimpleNamespace(weights={"w": w})
    return custom_gradient(lambda x: (x * model.weights["w"], lambda dy: dy))(1.0)


def by_keyword(w):
    f = custom_gradient(lambda x, *, params: (x * params["w"], lambda dy: dy))
    return f(1.0, params={"w": w})


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (through_another_function, r"depends on 'w' \("),
        (through_an_object, r"depends on 'model\.weights\.w' \("),
        (by_keyword, r"keyword argument 'params\.w'"),
    ],
)
def test_a_value_that_is_differentiated_is_named_wherever_it_comes_from(loss, named):
    with pytest.raises(ValueError, match=named):
        jax.grad(loss)(2.0)


def test_an_integer_closed_over_is_never_differentiated():
    assert jax.grad(jax.jit(closing_over_w))(2.0, 3) == 15.0


def test_functions_of_another_trace_are_not_reused():
    f = custom_gradient(lambda x: (x * factor, lambda dy: dy * factor))
    for factor in (2.0, 3.0):
        assert jax.grad(f)(1.0) == factor


def test_no_trace_is_kept_alive():
    def closing_over(x, w):  # its own: JAX keeps what it traced, and under this check what failed
        return closing_over_w(x, w)

    with jax.checking_leaks():
        assert jax.jit(jax.grad(closing_over))(2.0, 3.0) == 15.0
        assert jax.grad(jax.jit(closing_over))(2.0, 3.0) == 15.0
        jax.vmap(jax.grad(closing_over))(jnp.ones(2), jnp.ones(2))


def test_what_a_function_closes_over_is_freed_with_it():
    def once():
        big = jnp.ones(1000)

        @custom_gradient
        def f(x):
            return x * big, lambda dy: jnp.sum(dy * big)

        jax.grad(lambda x: f(x).sum())(1.0)
        return weakref.ref(big)

    big = once()
    gc.collect()
    assert big() is None


# ---------------------------------------------------------------------------------- bad input


each_transform = pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(f),
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: lambda x, *more: by_tape(f, *jax.tree.map(jnp.float32, (x, *more))),
    ],
    ids=["grad", "jit of grad", "grad of jit", "tape"],
)


OF_TWO = r"the input more\.0, which is ~?f32\[\].*astype\('float32"


@each_transform
@pytest.mark.parametrize(
    ("more", "returned", "error", "words"),
    [
        ([2.0], lambda dy: (dy, dy, dy), ValueError,
         r"of 'f' \(.*test_custom_gradient.py:\d+\) returned 3 gradients for 2 inputs"),
        ([], lambda dy: (dy, dy, dy), ValueError,
         "returned 3 gradients for 1 input .*Keyword arguments are not inputs"),
        ([{"w": jnp.ones(3)}], lambda dy: (dy, {"w": dy}), ValueError,
         r"'<lambda>' \(.*test_custom_gradient.py:\d+\).* a gradient ~?f32\[\].*"
         r" more\.0\.w, which is f32\[3\]"),
        ([2.0], lambda dy: (dy, dy.astype("float16")), TypeError, OF_TWO),
        ([2.0], lambda dy: (dy, dy.astype("int32")), TypeError, OF_TWO),
        ([2.0], lambda dy: (dy, dy.astype("complex64")), TypeError, OF_TWO),
        ([], lambda dy: "steep", TypeError, "a str: 'steep' for the input x"),
    ],
    ids=["too many", "of keywords", "shape", "float16", "int32", "complex64", "no array"],
)  # fmt: skip
def test_a_wrong_gradient_says_what_is_wrong(more, returned, error, words, transform):
    @custom_gradient
    def f(x, *more):
        return x * sum(map(jnp.sum, jax.tree.leaves(more))), returned

    assert jnp.isfinite(f(1.0, *more))
    assert jnp.isfinite(jax.jit(f)(1.0, *more))  # only a gradient needs the gradient function
    with pytest.raises(error, match=words):
        transform(f)(1.0, *more)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x, "must return a pair .* it returned an array float32"),
        (lambda x: (x, x), "a pair with an array float32.* in second place"),
        (lambda x: None, "it returned None"),
        (lambda x: ({"a": "text"}, lambda dy: dy), r"y\.a is a str: 'text'"),
    ],
)
def test_a_function_that_returns_something_else_says_what(returned, message):
    f = custom_gradient(lambda x: returned(x))
    for call in (f, jax.jit(f), jax.grad(f)):
        with pytest.raises(TypeError, match=message if call is f else "custom gradient"):
            call(jnp.float32(1.0))


def test_what_is_no_function_cannot_be_decorated():
    with pytest.raises(
        TypeError, match="custom_gradient decorates a function; it was given an int"
    ):
        custom_gradient(3)


@each_transform
def test_an_exception_in_user_code_keeps_its_type_and_gets_a_note(transform):
    @custom_gradient
    def forward(x):
        raise KeyError("forward")

    @custom_gradient
    def backward(x):
        def grad(dy):
            raise KeyError("backward")

        return x, grad

    for f, place in ((forward, "in 'forward' ("), (backward, "in the gradient function 'grad' (")):
        with pytest.raises(KeyError) as error:
            transform(f)(1.0)
        assert any(note.startswith(place) for note in error.value.__notes__)
        assert error.traceback[-1].path.name == "test_custom_gradient.py"
    assert backward(1.0) == jax.jit(backward)(1.0) == 1.0


def test_a_gradient_function_may_call_its_own_function_twice():
    @custom_gradient
    def product(x, y):
        return x * y, lambda dz: (product(dz, y), product(dz, x))

    def cube(x):
        return product(product(x, x), x)

    assert [nth(cube, order)(2.0) for order in range(4)] == [8.0, 12.0, 12.0, 6.0]


# ----------------------------------------------------------------------------- integer results


def rounded_to(backward):
    @tg.custom_gradient
    def rounded(x):
        return jnp.round(x).astype(jnp.int8), backward

    return lambda x: rounded(x).astype(jnp.float32) * 3.0


@pytest.mark.parametrize(
    "backward", [lambda g: g, lambda g: g.astype(jnp.float32), lambda g: 2.0 * g]
)
@pytest.mark.parametrize("run", [jax.grad, tg.grad, lambda f: tg.trace(jax.grad(f))])
def test_the_cotangent_of_an_integer_is_no_gradient_to_hand_on(backward, run):
    loss = rounded_to(backward)
    assert loss(11.3) == 33.0
    said = r"^The result of 'rounded' .* is i8\[\], and only floats have"
    with pytest.raises(TypeError, match=said):
        run(loss)(11.3)


@pytest.mark.parametrize("backward", [lambda g: None, lambda g: jnp.float32(0)])
def test_an_integer_may_have_a_rule_that_does_not_use_its_cotangent(backward):
    loss = rounded_to(backward)
    assert jax.grad(lambda x: loss(x) + x)(11.3) == 1.0


def test_floats_that_are_rounded_have_the_gradient_that_the_rule_says():
    rounded = custom_gradient(lambda x: (jnp.round(x).astype("int8").astype("f4"), lambda g: g))
    assert jax.grad(lambda x: rounded(x) * 3.0)(11.3) == 3.0


def test_explain_says_of_a_rule_of_jax_that_it_returns_integers():
    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x).astype(jnp.int8)

    rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (jnp.float32(1),))
    (finding,) = tg.explain(lambda x: rounded(x).astype(jnp.float32) * 3.0, 11.3).problems
    assert "rounded returns i8[], integers" in finding.what
    assert "floats" in finding.cure
    assert finding.rule is None
