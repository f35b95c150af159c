"""Modules of flax.nnx that a traced function closes over: each call uses what they are then."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tracegrad as tg
from tracegrad import match

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Model(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, deterministic=True)

    def __call__(self, x):
        return jnp.tanh(self.linear(self.dropout(x)))

    def encode(self, x):
        return self(x)


model = Model()
box = {"teachers": [model]}
kernel = model.linear.kernel
traced = tg.trace(lambda x: model(x))


@pytest.fixture(autouse=True)
def _bias():
    model.linear.bias.set_value(jnp.zeros(2))


def loss(x):
    return jnp.sum(model(x) ** 2)


def closing_over():
    network = model
    return lambda x: network(x)


class Trainer:
    def __init__(self):
        self.model = model

    def predict(self, x):
        return self.model(x)

    @tg.trace
    def predicted(self, x):
        return self.model(x)


WAYS = {
    "a closure": lambda: tg.trace(closing_over()),
    "an attribute of an object": lambda: tg.trace(Trainer().predict),
    "a traced method": lambda: Trainer().predicted,
    "a partial": lambda: tg.trace(functools.partial(lambda network, x: network(x), model)),
    "a container": lambda: tg.trace(lambda x: box["teachers"][0](x)),
    "the module itself": lambda: tg.trace(model),
    "a method of it": lambda: tg.trace(model.encode),
    "another traced function": lambda: tg.trace(lambda x: traced(x)),
    "a loop": lambda: tg.trace(lambda x: jax.lax.map(lambda row: model(row), x)),
    "a nested jit": lambda: tg.trace(lambda x: jax.jit(lambda x: model(x))(x)),
    "one of its Variables": lambda: tg.trace(lambda x: jnp.tanh(x @ kernel[...] + bias()[...])),
    "its state": lambda: tg.trace(lambda x: nnx.merge(*nnx.split(model))(x)),
    "a rewritten function": lambda: tg.rewrite(lambda x: model(x)),
    "a graph": lambda: tg.graph(lambda x: model(x))(X).to_callable(),
}


def bias():
    return model.linear.bias


@pytest.mark.parametrize("way", WAYS)
def test_each_call_reads_the_weights_of_that_moment(way):
    compiled = WAYS[way]()
    for value in (0.0, 0.5, 1.0):
        bias()[...] = value * jnp.ones(2)
        np.testing.assert_allclose(compiled(X), model(X), rtol=1e-5)
    if isinstance(compiled, tg.tracing.TracedFunction) and way != "one of its Variables":
        assert compiled.cache_info().count == 1
        graph = compiled.graph(X)
        assert {v.name.split(".", 1)[1] for v in graph.variables} >= {"linear.bias"}


def test_derivatives_are_of_the_weights_of_that_moment():
    derivatives = {
        "jax.grad": (jax.grad(tg.trace(loss)), jax.grad(loss)),
        "traced": (tg.trace(tg.value_and_grad(loss)), jax.value_and_grad(loss)),
    }
    for value in (0.0, 1.0):
        bias()[...] = value * jnp.ones(2)
        for ours, expected in derivatives.values():
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
                ours(X),
                expected(X),
            )


def test_a_rule_reads_the_weights_of_that_moment_or_is_refused():
    """JAX keeps what it found in a rule, when it differentiates a compiled function."""

    @jax.custom_vjp
    def rule_of_jax(x):
        return x + bias()[...]

    rule_of_jax.defvjp(lambda x: (x, None), lambda _, dy: (dy * bias()[...],))

    @tg.custom_gradient
    def ours(x):
        return x + bias()[...], lambda dy: dy * bias()[...]

    compiled = tg.trace(lambda x: jnp.sum(ours(x)))
    inside = tg.trace(lambda x: jax.grad(lambda x: jnp.sum(rule_of_jax(x)))(x))
    for value in (1.0, 2.0):
        bias()[...] = value * jnp.ones(2)
        for gradient in (jax.grad(compiled), inside):
            np.testing.assert_array_equal(gradient(jnp.zeros(2)), [value, value])
    with pytest.raises(RuntimeError, match=r"rule_of_jax.*whose rule reads \S+\.linear\.bias"):
        tg.trace(lambda x: rule_of_jax(x) + bias()[...])(jnp.zeros(2))


def test_a_tape_that_watches_the_module_sees_its_arrays_used():
    compiled = tg.trace(loss)
    expected = nnx.grad(lambda network, x: jnp.sum(network(x) ** 2))(model, X)
    for _ in range(2):
        with tg.GradientTape() as tape:
            tape.watch(model)
            value = compiled(X)
        gradient = tape.gradient(value, model)
        np.testing.assert_allclose(
            gradient.linear.kernel[...], expected.linear.kernel[...], rtol=1e-5
        )


def test_settings_and_parts_of_today_decide_what_is_compiled():
    class Scaled(Model):
        def __init__(self):
            super().__init__()
            self.factor = jnp.float32(2.0)

        def __call__(self, x):
            return super().__call__(x) * (self.factor if self.dropout.deterministic else -1)

    network = Scaled()
    compiled = tg.trace(lambda x: network(x) if network.dropout.deterministic else -x)
    first = network(X)
    np.testing.assert_allclose(compiled(X), first, rtol=1e-5)
    for _ in range(2):
        network.train()
        np.testing.assert_array_equal(compiled(X), -X)
        network.eval()
        np.testing.assert_allclose(compiled(X), first, rtol=1e-5)
    reasons = [signature.reason for signature in compiled.cache_info().signatures]
    assert reasons[1:] == [
        "the structure of `network.dropout.deterministic` changed from True to False"
    ]
    network.factor = jnp.float32(3.0)
    np.testing.assert_allclose(compiled(X), 1.5 * first, rtol=1e-5)
    network.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(compiled(X), network(X), rtol=1e-5)


def test_what_a_step_assigns_between_two_calls_of_a_function_in_it_is_read():
    def step(network, x):
        predict = tg.trace(lambda x: network(x))
        before = predict(x)
        network.linear.bias[...] += 1.0
        return before, predict(x)

    for compile in (tg.trace, nnx.jit):
        network = nnx.clone(model)
        before, after = compile(step)(network, X)
        np.testing.assert_allclose(before, model(X), rtol=1e-5)
        np.testing.assert_allclose(after, network(X), rtol=1e-5)


@pytest.mark.parametrize("compile", [jax.jit, nnx.jit])
def test_a_program_of_jax_around_keeps_the_weights_as_of_any_module_it_closes_over(compile):
    network = nnx.clone(model)
    plain, first = compile(lambda x: network(x)), network(X)
    ways = [
        compile(tg.trace(lambda x: network(x))),
        compile(tg.rewrite(lambda x: network(x), tg.rules.stop_gradient(match.op("tanh")))),
    ]
    for f in (plain, *ways):
        np.testing.assert_allclose(f(X), first, rtol=1e-5)
    network.linear.bias[...] += 1.0
    for f in (plain, *ways):
        np.testing.assert_allclose(f(X), first, rtol=1e-5)


def test_a_module_that_is_gone_is_let_go_of_and_one_in_its_place_is_found(request):
    names = {"network": Model()}
    compiled = tg.trace(lambda x: names["network"](x))
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    compiled(X)
    gone = weakref.ref(names["network"])
    names["network"] = Model()
    assert gone() is None  # at once: nothing waits for the garbage collector
    bias = names["network"].linear.bias
    bias[...] += 1.0
    np.testing.assert_allclose(compiled(X), names["network"](X), rtol=1e-5)


def test_a_saved_function_holds_the_arrays_of_its_module_by_name(tmp_path):
    network = Model()
    network.linear.bias[...] += 1.0
    tg.save(lambda x: network(x), tmp_path / "predict", (X,))
    loaded = tg.load(tmp_path / "predict")
    assert set(loaded.variables) == {"network.linear.kernel", "network.linear.bias"}
    np.testing.assert_allclose(loaded(X), network(X), rtol=1e-5)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


def test_a_tape_trains_the_params_of_a_saved_module_and_nothing_else(tmp_path):
    network = Normed(nnx.Rngs(0))
    tg.save(lambda x: jnp.sum(network(x) ** 2), tmp_path / "loss", (X,))
    loaded = tg.load(tmp_path / "loss")
    is_trained = {name.split(".", 1)[1]: v.trainable for name, v in loaded.variables.items()}
    params = {"linear.kernel", "linear.bias", "norm.scale", "norm.bias"}
    assert {name for name, trained in is_trained.items() if trained} == params
    assert len(is_trained) == 6
    with tg.GradientTape() as tape:
        y = loaded(X)
    found = tape.gradient(y, loaded.variables["network.linear.kernel"])
    wanted = nnx.grad(lambda network: jnp.sum(network(X) ** 2))(network)
    np.testing.assert_allclose(found, wanted["linear"]["kernel"][...], rtol=1e-5)


def test_a_module_among_the_results_has_the_values_of_that_moment():
    compiled = tg.trace(lambda x: (model.linear, bias(), x))
    for value in (0.0, 1.0):
        bias()[...] = value * jnp.ones(2)
        linear, one, _ = compiled(X)
        assert linear is not model.linear
        np.testing.assert_array_equal(jnp.stack([linear.bias[...], one[...]]), value)


def test_what_is_inside_is_not_searched_for_what_is_outside():
    """A module that is made in the function is no input, also of arrays that are no traced ones."""

    def fun(x):
        network = Model()
        network.linear.bias = nnx.Param(np.ones(2, np.float32))
        return network(x)

    graph = tg.graph(fun)(X)
    assert not graph.variables
    assert len(graph.find(match.op("tanh"))) == 1
