"""`grad` and `value_and_grad`: numbers as jax.grad's, selections, auxiliary results, bad input."""

from __future__ import annotations

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tracegrad as tg
from tracegrad import grad, jacobian, select, value_and_grad

pytestmark = pytest.mark.usefixtures("compiled_fully")


def loss(params, x, scale=1.0, *rest, offset=0.0, **more):
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    total = jnp.sum(hidden @ params["last"]["kernel"]) * scale + offset
    return total + sum(rest) + sum(more.values())


def params_and_x():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "first": {"kernel": jax.random.normal(keys[0], (3, 4)), "bias": jnp.full(4, 0.1)},
        "last": {"kernel": jax.random.normal(keys[1], (4, 2))},
    }
    return params, jax.random.normal(keys[2], (5, 3))


def assert_trees_close(got, expected, **tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        np.testing.assert_allclose(a, b, **tolerance)


def is_bias(path, leaf):
    return path.endswith("bias")


# ------------------------------------------------------------------------------- as jax.grad


@pytest.mark.parametrize("wrap", [lambda f: f, tg.trace, jax.jit], ids=["plain", "traced", "jit"])
@pytest.mark.parametrize("wrt", [0, 1, -1, (0, 1), (1, 0), [1]], ids=str)
def test_positions_give_what_jax_grad_gives(wrap, wrt):
    params, x = params_and_x()
    got = value_and_grad(wrap(loss), wrt=wrt)(params, x)
    expected = jax.value_and_grad(loss, argnums=wrt)(params, x)
    assert_trees_close(got, expected, rtol=1e-5, atol=1e-6)


def test_zero_compiles_to_the_program_of_jax_grad():
    params, x = params_and_x()
    ours = jax.jit(value_and_grad(loss)).lower(params, x)
    theirs = jax.jit(jax.value_and_grad(loss)).lower(params, x)
    assert ours.as_text() == theirs.as_text()


def test_zero_runs_the_function_once_and_needs_no_tracing():
    calls = []

    def branching(x):
        calls.append(x)
        return x**2 if x > 0 else -x  # under tracing this would be an error

    assert grad(branching)(3.0) == 6.0
    assert len(calls) == 1


def test_works_under_every_transformation():
    params, x = params_and_x()
    gradient = grad(loss, wrt=("x",), unconnected="none")
    expected = jax.grad(loss, argnums=(1,))
    batch = jnp.stack([x, 2 * x])
    for transform in (jax.jit, tg.trace):
        got = transform(gradient)(params, x)
        assert_trees_close(got, transform(expected)(params, x), rtol=1e-5)
    for transform in (
        lambda f: jax.vmap(f, (None, 0)),
        lambda f: lambda p, b: jax.lax.map(lambda one: f(p, one), b),
    ):
        got = transform(gradient)(params, batch)
        assert_trees_close(got, transform(expected)(params, batch), rtol=1e-5)


def test_complex_numbers_follow_jax():
    def f(z):
        return jnp.real(z * z * jnp.conj(z)) + jnp.imag(z)

    z = 1.0 + 2.0j
    assert grad(f)(z) == jax.grad(f)(z)
    assert grad(jnp.sin, holomorphic=True)(z) == jax.grad(jnp.sin, holomorphic=True)(z)
    with pytest.raises(TypeError, match="real-valued outputs"):
        grad(jnp.sin)(z)


def test_integers_as_in_jax_where_they_are_allowed():
    def f(n, x):
        return x * n

    assert grad(f, wrt=(0, 1), allow_int=True)(3, 2.0)[0].dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match=r"wrt selects n, of type int32.*allow_int=True"):
        grad(f)(3, 2.0)
    assert grad(f, unconnected="none")(3, 2.0) is None
    of_a_tree = grad(lambda tree: tree["w"] ** 2 * tree["n"])({"w": 3.0, "n": jnp.array(2)})
    assert of_a_tree == {"w": 12.0, "n": None}

    def noise(key, x):
        return jax.random.normal(key) * x

    found = grad(noise, wrt=(0, 1), allow_int=True)(jax.random.key(0), 2.0)
    expected = jax.grad(noise, argnums=(0, 1), allow_int=True)(jax.random.key(0), 2.0)
    assert found[0].dtype == expected[0].dtype == jax.dtypes.float0
    assert found[1] == expected[1]


# ------------------------------------------------------------------------------- selections


def test_a_name_selects_however_the_argument_is_passed():
    params, x = params_and_x()
    expected = jax.grad(loss, argnums=1)(params, x)
    for call in (
        lambda f: f(params, x),
        lambda f: f(params, x=x),
        lambda f: f(x=x, params=params),
        lambda f: f(params, x, 1.0),
    ):
        assert_trees_close(call(grad(loss, wrt="x")), expected, rtol=1e-6)
        assert_trees_close(call(grad(loss, wrt=1)), expected, rtol=1e-6)
    both = grad(loss, wrt=("x", "params"))(params, x=x)
    assert_trees_close(both, (expected, jax.grad(loss)(params, x)), rtol=1e-6)


def test_keyword_only_and_further_arguments_have_names_too():
    params, x = params_and_x()
    assert grad(loss, wrt="offset")(params, x, offset=2.0) == 1.0
    assert grad(loss, wrt="other")(params, x, other=2.0) == 1.0
    assert grad(loss, wrt=3)(params, x, 1.0, 5.0) == 1.0


def test_names_on_methods_partials_and_traced_functions():
    class Model(NamedTuple):
        k: float

        @tg.trace
        def energy(self, x, y):
            return self.k * x * y

    assert grad(Model(2.0).energy, wrt="y")(3.0, 4.0) == 6.0
    assert grad(functools.partial(loss, offset=1.0), wrt="x")(*params_and_x()).shape == (5, 3)
    assert grad(tg.trace(lambda a, b: a * b), wrt="b")(2.0, 3.0) == 2.0


def test_a_predicate_freezes_everything_but_the_biases():
    params, x = params_and_x()
    seen = []

    def biases(path, leaf):
        seen.append((path, leaf.shape))
        return path.endswith("bias")

    got = grad(loss, wrt=biases)(params, x)
    full = jax.grad(loss)(params, x)
    assert seen == [("first.bias", (4,)), ("first.kernel", (3, 4)), ("last.kernel", (4, 2))]
    expected = jax.tree.map(jnp.zeros_like, full)
    expected["first"]["bias"] = full["first"]["bias"]
    assert_trees_close(got, expected, rtol=1e-6)
    assert_trees_close(grad(loss, wrt=biases)(x=x, params=params), expected, rtol=1e-6)


def test_leaves_that_are_not_selected_need_not_be_arrays():
    tree = {
        "w": jnp.array([1.0, 2.0]),
        "half": jnp.ones(2, jnp.bfloat16),
        "steps": jnp.arange(3),
        "numpy": np.ones(2),
        "mask": jnp.array([True, False]),
        "rate": 0.5,
        "layers": 3,
        "train": True,
        "name": "model",
        "activation": jnp.tanh,
        "key": jax.random.key(0),
        "nothing": None,
    }

    def f(tree):
        assert tree["name"] == "model"
        return jnp.sum(tree["activation"](tree["w"])) * tree["layers"] * tree["rate"]

    got = grad(f, wrt=lambda path, leaf: path == "w")(tree)
    np.testing.assert_allclose(got["w"], 1.5 * (1 - np.tanh([1.0, 2.0]) ** 2), rtol=1e-6)
    for name, dtype in {"half": jnp.bfloat16, "steps": jnp.int32, "mask": bool}.items():
        assert got[name].dtype == dtype
        assert got[name].shape == tree[name].shape
        assert not got[name].any()
    assert got["numpy"].shape == (2,)
    assert (got["rate"], got["layers"], got["train"]) == (0.0, 0, False)
    assert [type(got[name]) for name in ("rate", "layers", "train")] == [float, int, bool]
    assert all(got[name] is None for name in ("name", "activation", "key", "nothing"))


def test_flax_states_are_trees_like_others():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    definition, state = nnx.split(model)

    def f(state, x):
        return jnp.sum(nnx.merge(definition, state)(x))

    got = grad(f, wrt=lambda path, leaf: path == "bias")(state, jnp.ones((4, 3)))
    np.testing.assert_array_equal(got["bias"].get_value(), [4.0, 4.0])
    assert not got["kernel"].get_value().any()


def test_select_gives_a_mask_as_optax_takes_it():
    params, _ = params_and_x()
    mask = select(params, is_bias)
    assert mask == {"first": {"kernel": False, "bias": True}, "last": {"kernel": False}}


# --------------------------------------------------------------------------- auxiliary results


@pytest.mark.parametrize("unconnected", ["zero", "none", "raise"])
@pytest.mark.parametrize("sparse", [False, True], ids=["", "sparse"])
def test_any_auxiliary_result_is_handed_on_as_it_is_and_connects_nothing(sparse, unconnected):
    aux, options = {"text": "a", "fun": loss, "any": object(), "n": 3}, {"unconnected": unconnected}

    def f(x, y):
        return x * y, aux | {"sum": x + y}

    options |= {"has_aux": True, "sparse": sparse}
    gradient, handed_on = grad(f, (0, 1), **options)(2.0, 3.0)
    (value, again), slope = value_and_grad(f, **options)(2.0, 3.0)
    assert (gradient, value, slope) == ((3.0, 2.0), 6.0, 3.0)
    for found in (handed_on, again):
        assert found.pop("sum") == 5.0
        assert found == aux
    assert grad(lambda x, y: (x, y), (0, 1), True, "none")(2.0, 3.0)[0] == (1.0, None)


# ----------------------------------------------------------------------------------- bad input


def forgets(x):
    jnp.sin(x)


NO_SCALARS = [
    (
        grad(lambda x: x * 2),
        jnp.ones(3),
        r"<lambda> returns an array of shape \(3,\).*sum.*jacobian",
    ),
    (grad(lambda x: {"loss": x}), 1.0, r"returns a dict.*has_aux"),
    (grad(lambda x: (x, x)), 1.0, "returns a tuple"),
    (grad(lambda x: 1.0, has_aux=True), 1.0, r"pair \(value, aux\); it returns a float"),
    (grad(lambda x: (x, x, x), has_aux=True), 1.0, "of length 3"),
    (grad(forgets), 1.0, "forgets returns a NoneType"),
    (jacobian(forgets), 1.0, "forgets returns a NoneType"),
    (tg.hessian(forgets), 1.0, "forgets returns a NoneType"),
]


@pytest.mark.parametrize(("derivative", "x", "message"), NO_SCALARS)
def test_the_function_must_return_a_scalar(derivative, x, message):
    with pytest.raises(TypeError, match=message):
        derivative(x)


@pytest.mark.parametrize("derivative", [grad, value_and_grad, jacobian])
def test_unknown_ways_to_treat_the_unconnected_are_refused(derivative):
    with pytest.raises(ValueError, match="one of zero, none, raise; got 'zeros'"):
        derivative(loss, unconnected="zeros")


SIGNATURE = r"loss\(params, x, scale, \*rest, offset, \*\*more\) was called with params, x"
REFUSED = [
    (lambda: grad(loss, wrt=(0, None)), TypeError, "position, an argument name"),
    (lambda: grad(3), TypeError, "expected a function"),
    (lambda: grad(loss, wrt=()), ValueError, "selects nothing"),
    (lambda: select({"a": 1.0}, lambda path: True), TypeError, r"\(path, leaf\) .* takes \(path\)"),
    (lambda: grad(jnp.sin, wrt=lambda path: True)(1.0), TypeError, r"leaf\) .* takes \(path\)"),
    (lambda: select({"a": 1.0}, 3), TypeError, "predicate .* got 3"),
    (lambda: grad(loss, wrt=5)(*params_and_x()), ValueError, f"wrt=5: {SIGNATURE}"),
    (lambda: grad(loss, wrt="parms")(*params_and_x()), ValueError, f"wrt='parms': {SIGNATURE}"),
    (lambda: grad(loss, wrt="rest")(*params_and_x()), ValueError, f"wrt='rest': {SIGNATURE}"),
    (lambda: grad(loss, wrt="more")(*params_and_x()), ValueError, f"wrt='more': {SIGNATURE}"),
    (lambda: grad(loss, wrt=(1, "x"))(*params_and_x()), ValueError, "same argument twice: 'x'"),
    (lambda: grad(loss, wrt=lambda path, leaf: path.endswith("biases"))(*params_and_x()),
     ValueError, r"selects nothing; the leaves are 'first\.bias', 'first\."),
    (lambda: select({}, is_bias), ValueError, "the tree has no leaves"),
    (lambda: grad(lambda: 1.0, wrt=is_bias)(), ValueError, "called without one"),
    (lambda: grad(apply, wrt=lambda path, leaf: True)({"w": 1.0, "f": jnp.sin}), TypeError,
     r"wrt selects tree\.f, of type PjitFunction: only"),
]  # fmt: skip


def apply(tree):
    return tree["f"](tree["w"])


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_no_selection_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_derivative_has_the_name_and_signature_of_the_function():
    assert grad(loss).__name__ == "loss"
    assert inspect.signature(grad(loss)) == inspect.signature(loss)
