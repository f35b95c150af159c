"""grad_pass_through has the values of the function and the gradient of the identity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegrad import grad_pass_through, stop_gradient

pytestmark = pytest.mark.both_jax


def test_the_upstream_gradient_passes_unchanged():
    def loss(f):
        return lambda x: (f(x * 3) ** 2).sum()

    x = jnp.array([0.4, 1.1])
    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        got = jax.grad(transform(loss(grad_pass_through(jnp.round))))(x)
        np.testing.assert_allclose(got, 2 * np.round(3 * x) * 3)
    # Of any order: that of x + stop_gradient(round(x) - x).
    straight = loss(lambda x: x + stop_gradient(jnp.round(x) - x))
    second = jax.jacrev(jax.grad(lambda x: loss(grad_pass_through(jnp.round))(x)))(x)
    np.testing.assert_allclose(second, jax.jacrev(jax.grad(straight))(x), atol=1e-5)


def test_several_inputs_nested_with_keywords():
    @grad_pass_through()
    def swap(pair, z, *, by):
        a, b = pair
        return {"x": b * by, "y": a * by, "z": z}

    def loss(pair, z):
        out = swap(pair, z, by=100.0)
        return 2 * out["x"] + 3 * out["y"] + 5 * out["z"]

    assert jax.grad(loss, argnums=(0, 1))((1.0, 2.0), 4.0) == ((2.0, 3.0), 5.0)


def test_another_float_dtype_is_converted_back():
    half = grad_pass_through(lambda x: x.astype(jnp.bfloat16))
    gradient = jax.grad(lambda x: (half(x) * 2).sum().astype(jnp.float32))(jnp.ones(3))
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, 2.0)


def nearest(z, book):
    return book[jnp.argmin(jnp.abs(z[:, None] - book), 1)]


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda z, book: grad_pass_through(nearest)(z, book), r"keyword.*name=stop_gradient\(name"),
        (lambda z, book: grad_pass_through(nearest)(z, book=book), "apply stop_gradient to it;"),
        (lambda z, book: grad_pass_through(lambda z: nearest(z, book))(z), "apply stop_gradient"),
    ],
)
def test_an_array_without_an_output_is_a_constant_and_the_errors_say_so(call, cure):
    z, book = jnp.array([0.2, 0.9]), jnp.array([0.0, 1.0, 2.0])
    with pytest.raises(ValueError, match=cure):
        jax.grad(lambda *args: jnp.sum(call(*args) ** 2), argnums=(0, 1))(z, book)

    def cured(z, book):
        return jnp.sum(grad_pass_through(nearest)(z, book=stop_gradient(book)) ** 2)

    dz, dbook = jax.grad(cured, argnums=(0, 1))(z, book)
    np.testing.assert_array_equal(dz, [0.0, 2.0])
    np.testing.assert_array_equal(dbook, 0.0)


def test_integers_pass_without_a_gradient():
    f = grad_pass_through(lambda x, n: (x * n, n + 1))
    y, gradient = jax.value_and_grad(lambda x: f(x, jnp.int32(3))[0])(2.0)
    assert (y, gradient) == (6.0, 1.0)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad])
@pytest.mark.parametrize(
    ("f", "args", "error", "words"),
    [
        (lambda x, y: x + y, (1.0, 2.0), ValueError,
         r"'<lambda>' \(.*py:\d+\).* has 1 and 2 \(x, y\)"),
        (lambda x: jnp.stack([x, x]), (1.0,), ValueError,
         r"input x, so .* output is ~?f32\[2\], the input ~?f32"),
        (lambda x: x.astype("int32"), (1.0,), TypeError, "Return the output as float32"),
        (lambda x: x.astype("bool"), (1.0,), TypeError, "Return the output as float32"),
        (lambda x: x.astype("complex64"), (1.0,), TypeError, "Return the output as float32"),
    ],
    ids=["count", "shape", "int32", "bool", "complex64"],
)  # fmt: skip
def test_an_output_that_cannot_carry_the_gradient_raises(f, args, error, words, transform):
    with pytest.raises(error, match=words):
        transform(grad_pass_through(f))(*map(jnp.float32, args))
