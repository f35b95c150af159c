"""A module of flax.nnx that is saved has its arrays as Variables of the file."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tracegrad as tg
from tests.derivatives import by_tape

pytestmark = pytest.mark.both_jax

X = jax.random.normal(jax.random.key(0), (4, 3))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.linear(x)))

    def loss(self, x):
        return jnp.sum(self.norm(self.linear(x)) ** 2 * X[:, :2])

    @tg.trace
    def encode(self, x):
        return self.linear(x)

    @nnx.jit
    def jitted_by_flax(self, x):
        return self.norm(self.linear(x))

    @jax.jit
    def jitted_by_jax(self, x):
        return self.linear(x)

    @nnx.remat
    def recomputed(self, x):
        return self.linear(x)


FORMS = {
    "module": lambda m: m,
    "traced": lambda m: tg.trace(m),
    "method": lambda m: m.__call__,
    "traced method": lambda m: tg.trace(m.__call__),
    "jitted": lambda m: nnx.jit(m),
    "traced jitted": lambda m: tg.trace(nnx.jit(m)),
    "jax.jit": lambda m: jax.jit(m),
    "traced jax.jit of a method": lambda m: tg.trace(jax.jit(m.__call__)),
    "partial": lambda m: functools.partial(Normed.__call__, m),
    "rewritten": lambda m: tg.rewrite(m, []),
}


@pytest.mark.parametrize("form", FORMS)
def test_arrays_are_variables_by_their_path_and_a_call_changes_them(tmp_path, form):
    model = Normed(nnx.Rngs(0))
    tg.save(FORMS[form](model), tmp_path / "model", (X,))
    loaded = tg.load(tmp_path / "model")
    trained = {name for name, variable in loaded.variables.items() if variable.trainable}
    assert trained == {"linear.kernel", "linear.bias", "norm.scale", "norm.bias"}
    others = {"norm.mean", "norm.var", "drop.rngs.count", "drop.rngs.key"}
    assert set(loaded.variables) == trained | others
    for _ in range(2):  # other units are dropped, and the statistics move on
        np.testing.assert_allclose(loaded(X), model(X), rtol=1e-5)
    np.testing.assert_allclose(loaded.variables["norm.mean"].value, model.norm.mean[...], rtol=1e-5)


def test_a_tape_trains_the_params_of_a_saved_module_and_nothing_else(tmp_path):
    model = Normed(nnx.Rngs(0))
    wanted = nnx.grad(lambda model: nnx.clone(model).loss(X))(model)
    tg.save(model.loss, tmp_path / "loss", (X,))
    loaded = tg.load(tmp_path / "loss")
    with tg.GradientTape() as tape:
        y = loaded(X)
    watched = {variable.name: variable for variable in tape.watched_variables()}
    assert set(watched) == {"linear.kernel", "linear.bias", "norm.scale", "norm.bias"}
    found = tape.gradient(y, watched)
    for layer, name in (path.split(".") for path in watched):
        expected = wanted[layer][name][...]
        np.testing.assert_allclose(found[f"{layer}.{name}"], expected, rtol=1e-4, atol=1e-5)


def test_methods_of_one_module_share_its_arrays(tmp_path):
    model = Normed(nnx.Rngs(0))
    tg.save({"encode": (model.encode, (X,)), "layer": (model.linear, (X,))}, tmp_path / "all")
    loaded = tg.load(tmp_path / "all")
    bias = loaded["encode"].variables["linear.bias"]
    assert loaded["layer"].variables["linear.bias"] is bias
    bias.assign_add(jnp.ones(2))
    np.testing.assert_allclose(loaded["layer"](X), model.linear(X) + 1, rtol=1e-5)


@pytest.mark.parametrize("name", ["jitted_by_flax", "jitted_by_jax", "recomputed", "encode"])
def test_a_method_that_is_compiled_by_itself_is_saved_and_the_module_stays_whole(tmp_path, name):
    model = Normed(nnx.Rngs(0))
    tg.save(getattr(model, name), tmp_path / "method", (X,))
    loaded = tg.load(tmp_path / "method")
    kernel = loaded.variables["linear.kernel"]
    found = by_tape(lambda: jnp.sum(loaded(X) ** 2), sources=kernel)
    wanted = nnx.grad(lambda m: jnp.sum(getattr(nnx.clone(m), name)(X) ** 2))(model)
    np.testing.assert_allclose(found, wanted["linear"]["kernel"][...], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loaded(X), getattr(model, name)(X), rtol=1e-4, atol=1e-5)


class Growing(nnx.Module):
    def __call__(self, x):
        self.last = nnx.Cache(x)
        return x


def test_a_module_that_changes_what_it_consists_of_is_refused(tmp_path):
    with pytest.raises(TypeError, match="changes the structure of Growing"):
        tg.save(Growing(), tmp_path / "growing", (X,))
    assert not list(tmp_path.iterdir())


class Sowing(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        self.sow(nnx.Intermediate, "y", y)
        return y


def without_values(module, x):
    y = module(x)
    nnx.pop(module, nnx.Intermediate)
    return y


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_a_module_that_collects_values_is_saved_in_a_function_that_removes_them(tmp_path):
    model, path = Sowing(nnx.Rngs(0)), tmp_path / "saved"
    with pytest.raises(TypeError, match=r"structure of Sowing, .*`sow`.*nnx\.pop\(module, nnx"):
        tg.save(model, path, [X])
    tg.save(functools.partial(without_values, model), path, [X])
    loaded = tg.load(path)
    np.testing.assert_allclose(loaded(X), model.linear(X), rtol=1e-6)
    assert loaded.variables["linear.kernel"].trainable


class Trainer(nnx.Module):
    def __init__(self, rngs):
        self.model = Normed(rngs)
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(self, x):
        value, gradient = nnx.value_and_grad(Normed.loss)(self.model, x)
        self.optimizer.update(self.model, gradient)
        return value


def test_a_train_step_of_a_model_and_its_optimizer_is_saved_as_a_method(tmp_path):
    trainer, path = Trainer(nnx.Rngs(0)), tmp_path / "saved"
    tg.save(trainer.step, path, [X], gradient_order=0)
    loaded = tg.load(path)
    found = [loaded(X) for _ in range(10)]
    np.testing.assert_allclose(found, [trainer.step(X) for _ in range(10)], rtol=1e-4)
    kernel, mean = (loaded.variables[f"model.{name}"] for name in ("linear.kernel", "norm.mean"))
    np.testing.assert_allclose(kernel, trainer.model.linear.kernel[...], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(mean, trainer.model.norm.mean[...], rtol=1e-3, atol=1e-4)
