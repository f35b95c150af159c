"""What ``wrt=`` takes beside positions and names: globs, filters of nnx, match.param."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tracegrad as tg

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
PARAMS = {
    "encoder": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)},
    "head": [jnp.array([[0.5], [2.0]]), jnp.array(3.0)],
    "steps": jnp.array(7),
}


def loss(params, x, weight=1.0):
    encoder, (kernel, bias) = params["encoder"], params["head"]
    y = jnp.tanh(x @ encoder["kernel"] + encoder["bias"]) @ kernel + bias
    return weight * jnp.sum(y**2)


def by_jax(params, x):
    found = jax.grad(loss, allow_int=True)(params, x)
    return {**found, "steps": None}


def entries(tree):
    """The entries of a tree by path; None is one."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}


def assert_selected(found, meant):
    """The gradients of what is meant are those of JAX; of all else there is None."""
    expected = entries(by_jax(PARAMS, X))
    found = entries(found)
    assert found.keys() == expected.keys()
    assert {path for path, entry in found.items() if entry is not None} == meant
    for path in meant:
        np.testing.assert_allclose(found[path], expected[path], rtol=1e-6)


KERNELS = {"encoder.kernel", "head.0"}


@pytest.mark.parametrize(
    ("wrt", "meant"),
    [
        ("params.encoder.kernel", {"encoder.kernel"}),
        ("encoder.kernel", {"encoder.kernel"}),
        ("encoder.*", {"encoder.kernel", "encoder.bias"}),
        ("encoder", {"encoder.kernel", "encoder.bias"}),
        ("head.0", {"head.0"}),
        ("params.*", {"encoder.kernel", "encoder.bias", "head.0", "head.1"}),
        (tg.match.param("*.kernel", "head.0"), KERNELS),
        (lambda path, leaf: path in KERNELS, KERNELS),
    ],
)
def test_leaves_that_are_not_selected_are_none(wrt, meant):
    assert_selected(tg.grad(loss, wrt=wrt, unconnected="none")(PARAMS, X), meant)
    assert_selected(tg.grad(loss, wrt=wrt, unconnected="none")(x=X, params=PARAMS), meant)
    assert_selected(tg.jacobian(loss, wrt=wrt, unconnected="none")(PARAMS, X), meant)


def test_a_name_in_the_first_argument_is_found_by_keyword_too():
    """JAX sorts arguments that are given by keyword, so `batch` comes before `weights`."""

    def scaled(weights, batch):
        return jnp.sum(weights["bias"] * batch)

    found = tg.grad(scaled, wrt="bias")(weights={"bias": jnp.ones(2)}, batch=jnp.array([2.0, 3.0]))
    np.testing.assert_array_equal(found["bias"], [2.0, 3.0])


def test_a_glob_may_name_another_argument_and_several_make_a_tuple():
    assert jnp.allclose(tg.grad(loss, wrt="x")(PARAMS, X), jax.grad(loss, argnums=1)(PARAMS, X))
    batch = {"left": X, "right": 2 * X}

    def pair(params, batch):
        return loss(params, batch["left"]) + loss(params, batch["right"])

    of_params, of_batch = tg.grad(pair, wrt=("encoder.*", "batch.r*"), unconnected="none")(
        PARAMS, batch
    )
    expected = jax.grad(pair, argnums=1)(PARAMS, batch)
    assert of_batch["left"] is None
    assert of_params["head"] == [None, None]
    np.testing.assert_allclose(of_batch["right"], expected["right"], rtol=1e-6)


def test_second_derivatives_take_globs():
    small = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0, 4.0])}

    def cubic(p):
        return jnp.sum(p["a"] ** 3 * p["b"])

    found = tg.hessian(cubic, wrt="a")(small)
    expected = jax.hessian(cubic)(small)
    np.testing.assert_allclose(found["a"]["a"], expected["a"]["a"])
    assert not found["b"]["b"].any()
    product = tg.hvp(cubic, (small,), {"a": jnp.ones(2), "b": None}, wrt="a")
    np.testing.assert_allclose(product["a"], expected["a"]["a"] @ jnp.ones(2))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def net_loss(model, x):
    return jnp.sum(model(x) ** 2)


def net_by_flax():
    return entries(nnx.to_pure_dict(nnx.grad(net_loss)(Net(nnx.Rngs(0)), X)))


@pytest.mark.parametrize(
    ("wrt", "meant"),
    [
        (nnx.Param, lambda path: not path.endswith(("mean", "var"))),
        (nnx.All(nnx.Param, nnx.PathContains("norm")), lambda path: path in KERNELS_OF_NORM),
        (nnx.Not(nnx.Any(nnx.BatchStat, nnx.PathContains("bias"))), lambda path: path in WEIGHTS),
        ("model.first.*", lambda path: path.startswith("first")),
        ("*.kernel", lambda path: path.endswith("kernel")),
    ],
    ids=["Param", "All", "Not", "argument", "glob"],
)
def test_filters_and_globs_select_in_a_module_of_flax(wrt, meant):
    model = Net(nnx.Rngs(0))
    found = tg.grad(net_loss, wrt=wrt, unconnected="none")(model, X)
    expected = {path: g for path, g in net_by_flax().items() if meant(path)}
    found = entries(nnx.to_pure_dict(nnx.state(found)))
    found = {path: g for path, g in found.items() if g is not None}
    assert found.keys() == expected.keys()
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, rtol=1e-5, atol=1e-6)


KERNELS_OF_NORM = {"norm.scale", "norm.bias"}
WEIGHTS = {"first.kernel", "last.kernel", "norm.scale"}


def test_a_selection_of_a_model_of_equinox_is_that_of_its_partition():
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    spec = jax.tree.map(lambda _: False, model)
    last = lambda tree: (tree.layers[-1].weight, tree.layers[-1].bias)  # noqa: E731
    spec = eqx.tree_at(last, spec, replace=(True, True))

    def eqx_loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    @eqx.filter_grad
    def by_equinox(trained, frozen, x):
        return eqx_loss(eqx.combine(trained, frozen), x)

    expected = by_equinox(*eqx.partition(model, spec), X)
    for wrt in ("layers.1.*", "model.layers.1"):
        found = tg.grad(eqx_loss, wrt=wrt, unconnected="none")(model, X)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_explain_takes_what_the_gradient_functions_take():
    found = tg.explain(lambda p, x: jnp.round(loss(p, x)), PARAMS, X, wrt="head.*")
    assert {finding.cause for finding in found.findings} == {"rounding"}
    assert "p.head.1" in str(found)
    assert "encoder" not in str(found)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("wrt", "message"),
    [
        (
            "encoder.kernl",
            r"match\.param\('encoder\.kernl'\) selects nothing.*'params\.encoder\.ke",
        ),
        ("x.left", r"match\.param\('x\.left'\) selects nothing; the nearest paths: 'x'"),
        (
            ("encoder.*", "head.*"),
            r"argument twice: 'head.* one tracegrad\.match\.param",
        ),
        (
            tg.match.param("params.encoder.*", "x.left"),
            r"names leaves of params and x, but .* one argument: give wrt a list with one glob for",
        ),
        ("parms", r"loss\(params, x, weight\) was called with params, x\. "),
        (
            nnx.BatchStat,
            r"the filter BatchStat selects nothing; the leaves are 'params\.encoder",
        ),
    ],
)
def test_what_selects_nothing_is_told_what_there_is(wrt, message):
    with pytest.raises(ValueError, match=message):
        tg.grad(loss, wrt=wrt)(PARAMS, X)


@pytest.mark.parametrize("wrt", [1.5, True, [nnx.Param], {"a": 1.0}])
def test_what_is_no_way_to_select_is_refused(wrt):
    with pytest.raises(TypeError, match="wrt is a position, an argument name, a glob"):
        tg.grad(loss, wrt=wrt)


@pytest.mark.parametrize("several", [lambda v: v, lambda v: [v], lambda v: {"v": v}])
def test_a_variable_is_no_argument_unless_it_is_given_as_one(several):
    v = tg.Variable(3.0)
    with pytest.raises(TypeError, match=r"a Variable that the function reads.*GradientTape"):
        tg.grad(lambda x: x * v, wrt=several(v))
    assert tg.grad(lambda x, w: x * w, wrt=1)(2.0, v) == 2.0


def with_default(x, scale=2.0, *, shift=1.0):
    return x * scale + shift


@pytest.mark.parametrize("wrt", ["scale", 1, "shift", ("x", "scale"), (0, 1)])
@pytest.mark.parametrize("ask", [tg.grad, tg.value_and_grad, tg.jacobian])
def test_an_argument_that_the_call_leaves_out_is_named(ask, wrt):
    with pytest.raises(ValueError, match=r"was called with x\. .* default is not") as caught:
        ask(with_default, wrt=wrt)(1.0)
    name = wrt if isinstance(wrt, str | int) else wrt[1]
    assert f"wrt={name!r}: with_default(x, scale, shift)" in str(caught.value)
    with pytest.raises(ValueError, match=r"was called with x\. "):
        tg.explain(with_default, 1.0, wrt=wrt)


def test_a_position_of_a_parameter_with_a_default_is_counted():
    np.testing.assert_array_equal(tg.grad(with_default, wrt=1)(3.0, 2.0), 3.0)
