"""Models as what a tape watches and is asked about: arrays count, the rest gets None, and what they
assign stays."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.errors import TraceContextError

import tracegrad as tg

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


def assert_leaves_agree(got, expected, rtol=1e-5, atol=0.0):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert_leaves_agree(got, expected, atol=1e-6)


class Scaled(eqx.Module):
    linear: eqx.nn.Linear
    rate: float
    activation: object

    def __call__(self, x):
        return self.activation(self.rate * self.linear(x))


@pytest.mark.parametrize("unconnected", ["none", "zero"])
@pytest.mark.parametrize("compiled", [lambda f: f, eqx.filter_jit], ids=["eager", "filter_jit"])
def test_an_equinox_model_is_watched_and_gets_the_gradient_of_filter_grad(compiled, unconnected):
    model = Scaled(eqx.nn.Linear(3, 2, key=jax.random.key(0)), 0.5, jnp.tanh)

    def loss(model):
        return jnp.sum(jax.vmap(model)(X) ** 2)

    with tg.GradientTape() as tape:
        tape.watch(model)
        value = compiled(loss)(model)
    gradient = tape.gradient(value, model, unconnected_gradients=unconnected)
    assert_same(gradient, eqx.filter_grad(loss)(model))


def test_an_object_with_variables_is_refused_with_a_cure_that_works():
    class Model:  # a `tf.Module`
        def __init__(self):
            self.w = tg.Variable(2.0, name="w")

        def __call__(self, x):
            return self.w * x

    model, cure = Model(), r"tracegrad\.variables_of\(model\)"
    with tg.GradientTape() as tape:
        with pytest.raises(ValueError, match=cure):
            tape.watch(model)
        tape.watch(tg.variables_of(model))
        y = model(3.0)
    with pytest.raises(TypeError, match=cure):
        tape.gradient(y, model)
    with pytest.raises(ValueError, match=cure):
        tg.ForwardAccumulator(model, 1.0)
    assert tape.gradient(y, tg.variables_of(model)) == {"w": 3.0}


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(jnp.tanh(self.linear(x))))


def squares(model):
    return jnp.sum(model(X) ** 2)


@nnx.remat
def recomputed(model, x):
    return model(x)


@nnx.custom_vjp
def halved(linear):
    return linear(X)


halved.defvjp(
    lambda linear: (halved(linear), None),
    lambda _, cotangents: (jax.tree.map(lambda c: jnp.full_like(c, 0.5), cotangents[0][0]),),
)


def layers(rngs):
    return nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(rngs.split(2))


def in_a_scan(layers):
    over = nnx.scan(recomputed, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return jnp.sum(over(layers, X) ** 2)


def in_a_loop_and_a_branch(linear):
    def step(_, carry):
        return carry[0], jnp.tanh(recomputed(*carry))

    linear, out = nnx.fori_loop(0, 2, step, (linear, X))
    return jnp.sum(nnx.cond(out[0, 0] < 2, recomputed, lambda linear, x: x, linear, out) ** 2)


MODULES = {
    "statistics and dropout": (Noisy, squares),
    "recomputed twice": (
        Noisy,
        lambda model: jnp.sum(recomputed(model, recomputed(model, X)[:, :3]) ** 2),
    ),
    "recomputed in a scan over layers": (layers, in_a_scan),
    "recomputed in a loop and a branch": (
        lambda rngs: nnx.Linear(3, 3, rngs=rngs),
        in_a_loop_and_a_branch,
    ),
    "a rule of its own": (
        lambda rngs: nnx.Linear(3, 2, rngs=rngs),
        lambda linear: jnp.sum(halved(linear) ** 2),
    ),
    "a cell in a scan, with random carries": (
        lambda rngs: nnx.RNN(nnx.SimpleCell(3, 2, rngs=rngs), rngs=rngs),
        lambda rnn: jnp.sum(rnn(X[None]) ** 2),
    ),
}


def numbers(state):
    keys = jax.dtypes.prng_key
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x, state
    )


@pytest.mark.parametrize("compile", [lambda f: f, nnx.jit], ids=["eager", "nnx.jit"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_train_mode_has_the_gradient_and_the_state_of_nnx(name, compile):
    make, loss = MODULES[name]
    model, other = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    compiled = compile(loss)
    for _ in range(2):
        with tg.GradientTape() as tape:
            tape.watch(model)
            value = compiled(model)
        gradient = tape.gradient(value, nnx.state(model, nnx.Param))
        expected, expected_gradient = nnx.value_and_grad(loss)(other)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert_leaves_agree(gradient, expected_gradient, 1e-4, 1e-5)
        assert_leaves_agree(numbers(nnx.state(model)), numbers(nnx.state(other)), 1e-5, 1e-6)


def test_a_module_that_a_jitted_function_hands_on_is_one_source():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    jitted = nnx.jit(squares)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(model)
        first = jitted(model)
        both = first + nnx.jit(jitted)(model) + squares(model)
    once = nnx.grad(squares)(model)
    for target, expected in ((first, once), (both, jax.tree.map(lambda g: 3 * g, once))):
        for sources in (model, nnx.state(model, nnx.Param)):
            assert_leaves_agree(tape.gradient(target, sources), expected)


def test_a_module_that_a_scan_carries_unchanged_is_one_source():
    model, weights = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.arange(2.0)
    jitted = nnx.jit(lambda model, x: jnp.sum(weights * model(x) ** 2))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def each(model, x):
        return model, jitted(model, x)

    with tg.GradientTape() as tape:
        tape.watch(model)
        loss = jnp.sum(each(model, X)[1])
    expected = nnx.grad(lambda model: jnp.sum(weights * model(X) ** 2))(model)
    assert_leaves_agree(tape.gradient(loss, model), expected)


def test_modules_may_be_changed_where_the_tape_was_made_and_no_deeper():
    model, jaxs_own = Noisy(nnx.Rngs(0)), jax.extend.core.get_opaque_trace_state
    with tg.GradientTape():
        inside = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        with pytest.raises(TraceContextError):
            jax.jit(lambda: squares(model))()
    assert jax.extend.core.get_opaque_trace_state is jaxs_own
    inside.bias.set_value(jnp.ones(2))
    with pytest.raises(TraceContextError):
        jax.jit(lambda: squares(model))()


def test_a_source_that_was_used_but_not_watched_warns_and_says_what_to_do():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    weights = {"dense": {"kernel": jnp.ones((3, 2)), "count": jnp.ones((), int)}}
    for sources, loss, named in (
        (nnx.state(model, nnx.Param), squares, "sources.bias and sources.kernel are"),
        (
            weights,
            lambda w: jnp.sum(X @ w["dense"]["kernel"]),
            "gradient of sources.dense.kernel is",
        ),
        (weights["dense"]["kernel"], lambda k: jnp.sum(X @ k), "the gradient of the source is"),
    ):
        head = jnp.float32(2.0)
        with tg.GradientTape() as tape:
            tape.watch(head)
            value = head * loss(model if loss is squares else sources)
        with pytest.warns(UserWarning, match=rf"{named} None, .*tape\.watch") as warned:
            gradient = tape.gradient(value, sources)
        assert jax.tree.leaves(gradient) == []
        assert warned[0].filename == __file__


def test_sources_may_hold_none_and_functions():
    x = jnp.float32(3.0)
    tree = {"w": x, "bias": None, "act": jnp.sin}
    with tg.GradientTape() as tape:
        tape.watch(tree)
        y = x * x
    assert tape.gradient(y, tree) == {"w": 6.0, "bias": None, "act": None}


def test_what_is_left_out_on_purpose_warns_of_nothing():
    model, x, unused = Noisy(nnx.Rngs(0)), jnp.ones(3), jnp.ones(3)
    model.eval()
    frozen = tg.Variable(jnp.ones(3), trainable=False)
    with tg.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(nnx.state(model, nnx.Param))
        with tape.stop_recording():
            shift = 2 * x
        value = squares(model) + jnp.sum(frozen * tg.Variable(2.0) + jax.lax.stop_gradient(shift))
    assert tape.gradient(value, {"model": model, "unused": unused})["unused"] is None
    assert tape.gradient(value, [frozen, x, jnp.arange(3)]) == [None] * 3


@pytest.mark.both_jax
def test_a_linen_model_with_statistics_and_dropout():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.BatchNorm(use_running_average=False)(linen.relu(linen.Dense(4)(x)))
            return linen.Dense(1)(linen.Dropout(0.5, deterministic=False)(x))

    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(Net().init)(rngs, X)

    def loss(params):
        given = variables | {"params": params}
        return jnp.mean(Net().apply(given, X, rngs=rngs, mutable=["batch_stats"])[0] ** 2)

    params = variables["params"]
    with tg.GradientTape() as tape:
        tape.watch(params)
        value = loss(params)
    assert_leaves_agree(tape.gradient(value, params), jax.jit(jax.grad(loss))(params), 1e-4, 1e-5)
