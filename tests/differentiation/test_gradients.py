"""`grad` and `value_and_grad`: numbers as jax.grad's, selections, auxiliary results, bad input."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
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


@pytest.mark.parametrize("unconnected", ["zero", "none", "raise"])
def test_a_connected_gradient_is_the_same_for_every_way_to_treat_others(unconnected):
    params, x = params_and_x()
    got = grad(loss, unconnected=unconnected)(params, x)
    assert_trees_close(got, jax.grad(loss)(params, x), rtol=1e-6)


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


def test_gradients_of_gradients():
    third = grad(grad(grad(lambda x: jnp.sin(2 * x))))
    np.testing.assert_allclose(third(0.3), -8 * np.cos(0.6), rtol=1e-6)


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
    class Model:
        def __init__(self, k):
            self.k = k

        @tg.trace
        def energy(self, x, y):
            return self.k * x * y

        def __hash__(self):
            return hash(self.k)

        def __eq__(self, other):
            return self.k == other.k

    jax.tree_util.register_pytree_node(Model, lambda m: ((m.k,), None), lambda _, c: Model(*c))
    model = Model(2.0)
    assert grad(model.energy, wrt="y")(3.0, 4.0) == 6.0
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


def test_none_for_what_has_no_gradient_is_what_equinox_works_with():
    model = eqx.filter_jit(eqx.nn.MLP)(3, "scalar", 8, 2, key=jax.random.key(0))
    x = jnp.ones(3)

    def f(model, x):
        return model(x) ** 2

    got = grad(f, unconnected="none")(model, x)
    expected = eqx.filter_jit(eqx.filter_grad(f))(model, x)
    assert_trees_close(got, expected, rtol=1e-6)
    assert eqx.apply_updates(model, got)(x).shape == ()

    last_bias = grad(f, wrt=lambda path, leaf: path == "layers.2.bias")(model, x)
    assert last_bias.layers[2].bias == expected.layers[2].bias
    assert not last_bias.layers[0].weight.any()
    assert last_bias.activation is None


def test_flax_states_are_trees_like_others():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    definition, state = nnx.split(model)

    def f(state, x):
        return jnp.sum(nnx.merge(definition, state)(x))

    got = grad(f, wrt=lambda path, leaf: path == "bias")(state, jnp.ones((4, 3)))
    np.testing.assert_array_equal(got["bias"].get_value(), [4.0, 4.0])
    assert not got["kernel"].get_value().any()


def test_select_is_the_mask_that_optax_takes():
    params, x = params_and_x()
    mask = select(params, is_bias)
    assert mask == {"first": {"kernel": False, "bias": True}, "last": {"kernel": False}}
    optimiser = optax.partition(
        {True: optax.adamw(0.1, weight_decay=0.5), False: optax.set_to_zero()}, mask
    )
    updates, _ = optimiser.update(
        grad(loss, wrt=is_bias)(params, x), optimiser.init(params), params
    )
    new = optax.apply_updates(params, updates)
    assert (new["first"]["bias"] != params["first"]["bias"]).all()
    np.testing.assert_array_equal(new["first"]["kernel"], params["first"]["kernel"])
    np.testing.assert_array_equal(new["last"]["kernel"], params["last"]["kernel"])


# --------------------------------------------------------------------------- auxiliary results


@pytest.mark.parametrize("unconnected", ["zero", "none", "raise"])
def test_auxiliary_results_are_handed_on(unconnected):
    def f(x, y):
        return x * y, {"sum": x + y, "name": "f"} if unconnected == "zero" else {"sum": x + y}

    gradient, aux = grad(f, (0, 1), has_aux=True, unconnected=unconnected)(2.0, 3.0)
    assert gradient == (3.0, 2.0)
    assert aux["sum"] == 5.0
    (value, aux), gradient = value_and_grad(f, has_aux=True, unconnected=unconnected)(2.0, 3.0)
    assert (value, aux["sum"], gradient) == (6.0, 5.0, 3.0)


def test_an_auxiliary_result_connects_nothing():
    assert grad(lambda x, y: (x, y), (0, 1), True, "none")(2.0, 3.0)[0] == (1.0, None)


# ----------------------------------------------------------------------------------- bad input


def test_the_function_must_return_a_scalar():
    with pytest.raises(
        TypeError, match=r"<lambda> returns an array of shape \(3,\).*sum.*jacobian"
    ):
        grad(lambda x: x * 2)(jnp.ones(3))
    with pytest.raises(TypeError, match=r"returns a dict.*has_aux"):
        grad(lambda x: {"loss": x})(1.0)
    with pytest.raises(TypeError, match="returns a tuple"):
        grad(lambda x: (x, x))(1.0)
    with pytest.raises(TypeError, match=r"pair \(value, aux\); it returns a float"):
        grad(lambda x: 1.0, has_aux=True)(1.0)
    with pytest.raises(TypeError, match="of length 3"):
        grad(lambda x: (x, x, x), has_aux=True)(1.0)


@pytest.mark.parametrize("derivative", [grad, value_and_grad, jacobian])
def test_unknown_ways_to_treat_the_unconnected_are_refused(derivative):
    with pytest.raises(ValueError, match="one of zero, none, raise; got 'zeros'"):
        derivative(loss, unconnected="zeros")


@pytest.mark.parametrize("derivative", [tg.grad, tg.jacobian, tg.hessian])
def test_a_function_that_returns_nothing_is_named(derivative):
    def forgets(x):
        jnp.sin(x)

    with pytest.raises(TypeError, match="forgets returns a NoneType"):
        derivative(forgets)(1.0)


def test_what_is_no_selection_is_refused():
    with pytest.raises(TypeError, match="position, an argument name"):
        grad(loss, wrt=(0, None))
    with pytest.raises(TypeError, match="expected a function"):
        grad(3)
    with pytest.raises(ValueError, match="selects nothing"):
        grad(loss, wrt=())
    for ask in (lambda p: select({"a": 1.0}, p), lambda p: grad(jnp.sin, wrt=p)(1.0)):
        with pytest.raises(TypeError, match=r"predicate \(path, leaf\) .* takes \(path\)"):
            ask(lambda path: True)
    with pytest.raises(TypeError, match=r"predicate .* got 3"):
        select({"a": 1.0}, 3)


def test_wrong_positions_and_names_are_told_the_parameters():
    params, x = params_and_x()
    signature = r"loss\(params, x, scale, \*rest, offset, \*\*more\)"
    with pytest.raises(ValueError, match=f"wrt=5: {signature} was called with params, x"):
        grad(loss, wrt=5)(params, x)
    for name in ("parms", "rest", "more"):
        with pytest.raises(
            ValueError, match=rf"wrt='{name}': {signature} was called with params, x"
        ):
            grad(loss, wrt=name)(params, x)
    with pytest.raises(ValueError, match="same argument twice: 'x'"):
        grad(loss, wrt=(1, "x"))(params, x)


def test_a_predicate_that_selects_nothing_is_told_the_leaves():
    params, x = params_and_x()
    with pytest.raises(
        ValueError, match=r"selects nothing; the leaves are 'first\.bias', 'first\."
    ):
        grad(loss, wrt=lambda path, leaf: path.endswith("biases"))(params, x)
    with pytest.raises(ValueError, match="the tree has no leaves"):
        select({}, is_bias)
    with pytest.raises(ValueError, match="called without one"):
        grad(lambda: 1.0, wrt=is_bias)()


def test_a_selected_leaf_must_be_differentiable():
    tree = {"w": 1.0, "f": jnp.sin}

    def apply(tree):
        return tree["f"](tree["w"])

    assert grad(apply)(tree)["f"] is None  # a model has such leaves
    with pytest.raises(TypeError, match=r"wrt selects tree\.f, of type PjitFunction: only"):
        grad(apply, wrt=lambda path, leaf: True)(tree)


def test_the_derivative_has_the_name_and_signature_of_the_function():
    import inspect

    assert grad(loss).__name__ == "loss"
    assert inspect.signature(grad(loss)) == inspect.signature(loss)
