"""`jacobian`, `hessian`, `hvp`: as JAX's, with selections, and through custom gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tracegrad import custom_gradient, grad, hessian, hvp, jacobian

pytestmark = pytest.mark.both_jax

X = np.array([0.3, -1.2, 2.0])


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@custom_gradient
def inner_square(x):
    return x * x, lambda dy: 2 * dy * x


@custom_gradient
def cube(x):
    """A custom gradient whose forward and backward are made of another."""
    y = inner_square(x) * x
    return y, lambda dy: 3 * dy * inner_square(x)


def energy(params, x, scale=1.0):
    hidden = jnp.tanh(params["w"] @ x)
    return jnp.sum(cube(hidden)) * scale + jnp.prod(params["b"]) * x[0]


def plain_energy(params, x, scale=1.0):
    hidden = jnp.tanh(params["w"] @ x)
    return jnp.sum(hidden**3) * scale + jnp.prod(params["b"]) * x[0]


def arguments():
    w = np.random.default_rng(0).normal(size=(2, 3))
    return {"w": w, "b": np.array([0.5, -2.0])}, X


def assert_trees_close(got, expected, **tolerance):
    tolerance = {"rtol": 1e-9, "atol": 1e-12, **tolerance}
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


each_wrt = pytest.mark.parametrize("wrt", [0, 1, (0, 1), (1,), "x", ("x", "params")], ids=str)
POSITIONS = {"x": 1, ("x", "params"): (1, 0)}


# -------------------------------------------------------------------------------------- jacobian


@pytest.mark.usefixtures("x64")
@each_wrt
@pytest.mark.parametrize("wrap", [lambda f: f, tg.trace, jax.jit], ids=["plain", "traced", "jit"])
def test_a_jacobian_is_that_of_jax(wrap, wrt):
    def f(params, x):
        return {"hidden": jnp.tanh(params["w"] @ x), "sum": jnp.sum(x) * params["b"][0]}

    got = jax.jit(jacobian(wrap(f), wrt))(*arguments())
    assert_trees_close(got, jax.jit(jax.jacrev(f, POSITIONS.get(wrt, wrt)))(*arguments()))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("wrap", [lambda f: f, tg.trace], ids=["plain", "traced"])
def test_a_jacobian_of_complex_results_of_real_arguments_is_that_of_forward_mode(wrap):
    def f(x, k):
        return {"z": (x + 1j * jnp.sin(x)) * k, "real": jnp.sum(x) * k[0], "of none": 1j + k[1]}

    k = jnp.array([2.0, 3.0, 5.0])
    got = jacobian(wrap(f), (0, 1))(X, k)
    assert_trees_close(got, jax.jacfwd(f, (0, 1))(X, k))
    assert got["real"][0].dtype == jnp.float64
    linked = jacobian(wrap(f), (0, 1), unconnected="none")(X, k)
    assert linked["of none"][0] is None
    np.testing.assert_allclose(linked["z"][0], got["z"][0])

    def scalar(x):
        return jnp.sum(x**3) * (1 + 2j) + jnp.prod(x)

    assert_trees_close(hessian(wrap(scalar))(X), jax.jacfwd(jax.jacfwd(scalar))(X))
    by_integer = jacobian(lambda n, x: n * x * 1j, (0, 1), allow_int=True)(3, 2.0)
    of_real = jacobian(lambda n, x: n * x, (0, 1), allow_int=True)(3, 2.0)
    assert by_integer[0] == of_real[0]
    assert by_integer[1] == 3j
    with pytest.raises(TypeError, match="holomorphic"):  # of what is no real argument
        jacobian(wrap(lambda z: z * jnp.conj(z)))(1.0 + 2.0j)


def test_leaves_that_are_not_selected_get_blocks_of_zeros():
    tree = {"a": jnp.ones(2), "b": jnp.ones(3), "n": jnp.arange(4), "k": 2.0, "f": jnp.sin}

    def f(tree):
        return {"v": jnp.outer(tree["a"], tree["b"]), "s": tree["f"](tree["a"]).sum()}

    got = jacobian(f, wrt=lambda path, leaf: path == "a")(tree)
    assert got["v"]["a"].shape == (2, 3, 2)
    assert got["v"]["a"].any()
    assert got["v"]["b"].shape == (2, 3, 3)
    assert (got["v"]["n"].shape, got["v"]["n"].dtype) == ((2, 3, 4), jnp.int32)
    assert got["v"]["k"].shape == (2, 3)
    assert got["s"]["b"].shape == (3,)
    assert got["s"]["k"] == 0.0
    assert got["v"]["f"] is None
    assert not any(got[out][leaf].any() for out, leaf in [("v", "b"), ("v", "n"), ("s", "b")])


def test_a_jacobian_hands_on_auxiliary_results():
    block, aux = jacobian(lambda x: (x**2, x.sum()), has_aux=True)(jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(block, [[2.0, 0.0], [0.0, 4.0]])
    assert aux == 3.0


def test_a_jacobian_of_what_is_not_connected():
    def f(x, n):
        return jnp.round(x), n * 2.0

    assert jacobian(f, (0, 1), unconnected="none")(1.5, 3.0) == ((None, None), (None, 2.0))
    assert jacobian(f, 1, unconnected="none")(1.5, 3) == (None, None)


# --------------------------------------------------------------------------------------- hessian


@pytest.mark.usefixtures("x64")
@each_wrt
@pytest.mark.parametrize("wrap", [lambda f: f, tg.trace, jax.jit], ids=["plain", "traced", "jit"])
def test_a_hessian_is_that_of_jax_and_goes_through_custom_gradients(wrap, wrt):
    expected = jax.jit(jax.hessian(plain_energy, POSITIONS.get(wrt, wrt)))(*arguments())
    assert_trees_close(jax.jit(hessian(wrap(energy), wrt))(*arguments()), expected)


@pytest.mark.usefixtures("x64")
def test_a_hessian_of_selected_leaves():
    params, x = arguments()
    full = jax.jit(jax.hessian(plain_energy))(params, x)
    got = jax.jit(hessian(energy, wrt=lambda path, leaf: path == "b"))(params, x)
    expected = jax.tree.map(jnp.zeros_like, full)
    expected["b"]["b"] = full["b"]["b"]
    assert_trees_close(got, expected)

    tree = {"x": X, "name": "leaf", "k": 2.0}
    got = hessian(lambda t: jnp.sum(t["x"] ** 3) * t["k"], wrt=lambda path, leaf: path == "x")(tree)
    np.testing.assert_allclose(got["x"]["x"], np.diag(12 * X))
    assert got["x"]["name"] is None
    assert got["name"] is None
    assert got["k"]["k"] == 0.0
    assert got["k"]["x"].shape == got["x"]["k"].shape == (3,)


@pytest.mark.usefixtures("x64")
def test_a_hessian_of_vectors_and_with_auxiliary_results():
    def f(x):
        return {"v": cube(x)}

    got = hessian(f)(X)
    assert_trees_close(got, jax.hessian(lambda x: {"v": x**3})(X))
    matrix, aux = hessian(lambda x: (jnp.sum(x**3), x[0]), has_aux=True)(X)
    np.testing.assert_allclose(matrix, np.diag(6 * X))
    assert aux == X[0]


# ------------------------------------------------------------------------------------------- hvp


@pytest.mark.usefixtures("x64")
@each_wrt
def test_a_product_is_that_with_the_hessian(wrt):
    params, x = arguments()
    shapes = jax.jit(grad(plain_energy, wrt))(params, x)
    v = jax.tree.map(lambda leaf: np.cos(leaf) + 1, shapes)

    def gradient_along(step):
        moved = {"params": params, "x": x}
        wanted = wrt if isinstance(wrt, tuple) else (wrt,)
        names = [("params", "x")[w] if isinstance(w, int) else w for w in wanted]
        parts = v if isinstance(wrt, tuple) else (v,)
        for name, part in zip(names, parts, strict=True):
            moved[name] = jax.tree.map(lambda a, b: a + step * b, moved[name], part)
        return gradient(moved["params"], moved["x"])

    gradient = jax.jit(grad(energy, wrt))
    step = 1e-6
    expected = jax.tree.map(
        lambda a, b: (a - b) / (2 * step), gradient_along(step), gradient_along(-step)
    )
    got = hvp(energy, (params, x), v, wrt)
    assert_trees_close(got, expected, rtol=1e-6, atol=1e-7)
    assert_trees_close(jax.jit(lambda p, x: hvp(tg.trace(energy), (p, x), v, wrt))(params, x), got)


@pytest.mark.usefixtures("x64")
def test_a_product_in_a_scan_and_its_derivative():
    def f(x):
        last, _ = lax.scan(lambda c, _: (cube(jnp.sin(c)) + c, None), x, None, length=3)
        return jnp.sum(last)

    def plain(x):
        last, _ = lax.scan(lambda c, _: (jnp.sin(c) ** 3 + c, None), x, None, length=3)
        return jnp.sum(last)

    v = np.cos(X)
    by_jax = lambda x: jax.hessian(plain)(x) @ v  # noqa: E731
    second, third = jax.jit(lambda x: (by_jax(x), jax.jacfwd(by_jax)(x)))(X)
    np.testing.assert_allclose(hvp(f, (X,), v), second, rtol=1e-9)
    got = jax.jit(jacobian(lambda x: hvp(f, (x,), v)))(X)
    np.testing.assert_allclose(got, third, rtol=1e-8, atol=1e-9)


def test_a_product_takes_what_grad_returns():
    tree = {"x": jnp.array([1.0, 2.0]), "frozen": jnp.ones(3), "f": jnp.sin}

    def f(tree):
        return jnp.sum(tree["x"] ** 3)

    def only_x(path, leaf):
        return path == "x"

    gradient = grad(f, wrt=only_x)(tree)
    got = hvp(f, (tree,), gradient, wrt=only_x)
    np.testing.assert_allclose(got["x"], 6 * tree["x"] * gradient["x"])
    assert not got["frozen"].any()
    assert got["f"] is None
    assert hvp(lambda x: x**3, (2.0,), 1) == 12.0  # a number takes the dtype of its leaf


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"v has the shape \(2,\) for x, whose shape is \(3,\)"):
        hvp(lambda x: x.sum(), (jnp.ones(3),), jnp.ones(2))
    with pytest.raises(ValueError, match="expected 2 trees"):
        hvp(lambda x, y: x * y, (1.0, 2.0), (1.0,), wrt=(0, 1))
    with pytest.raises(ValueError, match=r"like argument 0, of type dict, .* of type tuple"):
        hvp(lambda p: p["w"] ** 2, ({"w": 1.0},), ({"w": 1.0},))
    with pytest.raises(ValueError, match=r"v has a tuple: .* for x, whose shape is \(3,\)"):
        hvp(lambda x, y: x @ x * y, (jnp.ones(3), 2.0), (jnp.ones(3), jnp.ones(4)))
    with pytest.raises(TypeError, match="shape"):
        hvp(lambda x: x, (jnp.ones(3),), jnp.ones(3))
    with pytest.raises(TypeError, match="primals is a tuple"):
        hvp(lambda x: x, 1.0, 1.0)
    with pytest.raises(TypeError, match="wrt selects x, of type int32"):
        hessian(lambda x: x * 2.0)(3)
