"""Optimisers of slices give the numbers of PyTorch and TensorFlow, and touch the looked-up rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tracegrad as tg

TABLE = np.arange(1, 11, dtype=np.float32).reshape(5, 2) / 4
STEPS = [
    ([3, 0, 3], [[1.0, -2.0], [0.5, 0.25], [3.0, 1.0]]),
    ([0, 1], [[-1.0, 2.0], [4.0, -0.5]]),
    ([3, 4, 3], [[0.25, 0.5], [-2.0, 1.0], [1.5, -1.0]]),
]

# The table after these steps, rows 0, 1, 3 and 4; row 2 is never looked up.
# PyTorch 2.13: torch.optim.SparseAdam(lr=.1, betas=(.8, .9), eps=1e-3) and
# torch.optim.Adagrad(lr=.1, initial_accumulator_value=.1, eps=1e-3), of sparse COO gradients.
SPARSE_ADAM = [
    [0.19202353, 0.31773049],
    [0.67348242, 1.07609677],
    [1.57022107, 2.18123221],
    [2.31736112, 2.43274522],
]
ADAGRAD = [
    [0.25161946, 0.34015551],
    [0.65033591, 1.08437276],
    [1.61036789, 2.13825154],
    [2.34872413, 2.40474463],
]
# TensorFlow 2.21: tf.compat.v1.train.MomentumOptimizer(.1, .9), of tf.IndexedSlices.
MOMENTUM = [
    [0.25500000, 0.25250000],
    [0.34999999, 1.04999995],
    [0.81500000, 2.24000001],
    [2.45000005, 2.40000010],
]

OPTIMIZERS = {
    "adam": (tg.sparse_adam(0.1, 0.8, 0.9, 1e-3), SPARSE_ADAM),
    "adagrad": (tg.sparse_adagrad(0.1, 0.1, 1e-3), ADAGRAD),
    "momentum": (tg.sparse_sgd(0.1, 0.9), MOMENTUM),
}


def slices(ids, values):
    return tg.IndexedSlices(jnp.array(values), jnp.array(ids), (5, 2))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_half_precision_without_promotion_of_dtypes(name):
    optimizer, _ = OPTIMIZERS[name]
    table, values = jnp.ones((5, 2)), [[1.0, -2.0]]

    def updates(dtype):
        half = table.astype(dtype)
        gradient = tg.IndexedSlices(jnp.array(values, dtype), jnp.array([3]), (5, 2))
        return optimizer.update(gradient, optimizer.init(half), half)[0].to_dense()

    with jax.numpy_dtype_promotion("strict"):
        half = updates(jnp.bfloat16)
    single = updates(jnp.float32)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), single, rtol=2e-2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_are_those_of_pytorch_and_tensorflow(name):
    optimizer, recorded = OPTIMIZERS[name]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, gradient):
        updates, state = optimizer.update(gradient, state, table)
        return optax.apply_updates(table, updates), state

    table = jnp.array(TABLE)
    state = optimizer.init(table)
    for ids, values in STEPS:
        table, state = step(table, state, slices(ids, values))
    np.testing.assert_allclose(table[np.array([0, 1, 3, 4])], recorded, rtol=1e-5)
    np.testing.assert_array_equal(table[2], TABLE[2])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (tg.sparse_adam(0.1, eps=0.0), optax.adam(0.1, eps=0.0)),
        (tg.sparse_sgd(0.1, 0.9), optax.sgd(0.1, 0.9)),
        (tg.sparse_sgd(lambda n: 0.1 / (1 + n)), optax.sgd(lambda n: 0.1 / (1 + n))),
    ],
)
def test_of_arrays_they_are_the_optimisers_of_optax(ours, theirs):
    rng = np.random.default_rng(0)
    params = {"w": jnp.array(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.zeros(2)}
    states, found = [o.init(params) for o in (ours, theirs)], [params, params]
    for _ in range(3):
        gradients = jax.tree.map(lambda p: jnp.array(rng.normal(size=p.shape), p.dtype), params)
        for k, optimizer in enumerate((ours, theirs)):
            updates, states[k] = optimizer.update(gradients, states[k], found[k])
            found[k] = optax.apply_updates(found[k], updates)
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5)


@pytest.mark.both_jax
@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.sgd(0.1, 0.9), optax.sgd(0.1)])
@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit, tg.trace])
def test_where_an_optimiser_of_optax_fails_on_slices_the_error_names_one_that_does_not(
    optimizer, compiled
):
    table, of_table = {"table": jnp.array(TABLE)}, {"table": slices([3], [[1.0, -2.0]])}
    with pytest.raises((ValueError, TypeError), match="sparse_adam"):
        compiled(optimizer.update)(of_table, optimizer.init(table), table)


class Words(nnx.Module):
    """A sentence as the mean of its words' vectors, and a number of it."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(50, 4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, ids):
        return self.out(jnp.mean(self.embed(ids), axis=-2))


@pytest.mark.both_jax
def test_a_model_of_flax_trains_by_the_rows_that_were_looked_up():
    model = Words(nnx.Rngs(0))
    chain = optax.chain(tg.sparse_adam(0.05), optax.identity())
    optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)
    ids = jnp.array([[7, 3], [7, 9]])

    def loss(model):
        return jnp.mean((model(ids) - jnp.array([[1.0], [-1.0]])) ** 2)

    before, first = np.asarray(model.embed.embedding[...]), loss(model)
    for _ in range(20):
        gradients = tg.grad(loss, sparse=True)(model)
        optimizer.update(model, gradients)
    changed = np.flatnonzero(np.any(np.asarray(model.embed.embedding[...]) != before, axis=1))
    assert changed.tolist() == [3, 7, 9]
    assert loss(model) < 0.1 * first


def test_a_norm_is_that_of_the_array_that_slices_stand_for():
    of_table = slices([3, 0, 3], [[1.0, -2.0], [0.5, 0.25], [3.0, 1.0]])
    tree = {"table": of_table, "bias": jnp.array([2.0, 1.0j])}
    dense = {"table": of_table.to_dense(), "bias": tree["bias"]}
    np.testing.assert_allclose(tg.global_norm(tree), optax.tree.norm(dense), rtol=1e-6)
    assert tg.global_norm({}) == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("gradients", "problem"),
    [
        ({"table": slices([0], [[1.0, 2.0]]), "bias": jnp.ones(1)}, r"bias .* \[1\].* \[2\] there"),
        ({"table": jnp.ones((4, 2)), "bias": jnp.ones(2)}, r"table .* \[4, 2\].* \[5, 2\] there"),
        (
            {"table": tg.IndexedSlices(jnp.ones((3, 2)), jnp.arange(3), (9, 2)), "bias": None},
            r"table .* \[9, 2\].* \[5, 2\] there",
        ),
    ],
)
def test_the_gradient_of_another_table_is_an_error_with_its_path(name, gradients, problem):
    optimizer, _ = OPTIMIZERS[name]
    bias = None if gradients["bias"] is None else jnp.zeros(2)
    state = optimizer.init({"table": jnp.zeros((5, 2)), "bias": bias})
    with pytest.raises(ValueError, match=f"gradients.{problem}"):
        optimizer.update(gradients, state)
