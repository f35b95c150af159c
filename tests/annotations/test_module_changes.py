"""Annotated functions that change modules of flax.nnx which are their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tracegrad as tg

pytestmark = pytest.mark.both_jax

X = jax.random.normal(jax.random.key(3), (8, 4))


class Block(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def grown(model, x):
    model.scale = nnx.Param(jnp.ones(4))
    return model.linear(x) * model.scale


def with_gradient(f):
    def call(model, x):
        return f(model, x), lambda dy: (jax.tree.map(jnp.zeros_like, model), dy)

    return tg.custom_gradient(call)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, tg.trace, jax.grad])
@pytest.mark.parametrize(
    ("annotate", "cure"), [(with_gradient, "outside"), (tg.recompute_grad, "nnx.remat")]
)
@pytest.mark.parametrize("f", [lambda m, x: m(x), grown], ids=["assigned", "grown"])
def test_an_annotated_function_that_would_lose_what_a_module_assigns_is_refused(
    f, annotate, cure, around
):
    call, model = annotate(f), Block()
    with pytest.raises(TypeError, match=f"changes a module of flax.nnx .*{cure}"):
        around(lambda x: jnp.sum(call(model, x)))(X)
    with tg.GradientTape() as tape:
        tape.watch(X)
        with pytest.raises(TypeError, match=f"changes a module of flax.nnx .*{cure}"):
            call(model, X)


def test_a_module_that_is_only_read_is_an_argument_like_others():
    model = Block().linear
    call = tg.recompute_grad(lambda m, x: jnp.sum(m(x) ** 2))
    ours, by_flax = jax.grad(call)(model, X), nnx.grad(lambda m: jnp.sum(m(X) ** 2))(model)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(by_flax), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
