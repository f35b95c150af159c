"""What a function assigns in modules of flax.nnx is kept where it is differentiated, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError

import tracegrad as tg

X = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)


class Noisy(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.seen = nnx.Variable({"calls": jnp.zeros(())})

    def __call__(self, x):
        self.seen.set_value({"calls": self.seen["calls"] + 1.0})
        return self.dropout(self.norm(self.linear(x)))


class Scaling(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.array([1.0, 2.0]))
        self.calls = nnx.BatchStat(jnp.zeros(()))


def sum_of_scaled(model):
    model.calls.set_value(model.calls.get_value() + 1.0)
    return jnp.sum(model.scale.get_value() ** 3)


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def state_of(model):
    leaves = jax.tree.leaves(nnx.state(model, (nnx.BatchStat, nnx.RngCount, nnx.Variable)))
    return [x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def by_aux(model, x):
    gradient, aux = tg.grad(lambda m, x: (loss(m, x), x), has_aux=True)(model, x)
    np.testing.assert_allclose(aux, x)
    return gradient


WAYS = {
    "grad": tg.grad(loss),
    "value_and_grad": lambda *args: tg.value_and_grad(loss)(*args)[1],
    "with aux": by_aux,
    "jacobian": tg.jacobian(loss),
    "unconnected": tg.grad(loss, unconnected="none"),
    "of a traced function": tg.grad(tg.trace(loss)),
    "of nnx.jit": tg.grad(nnx.jit(loss)),
    "of a rewritten function": tg.grad(tg.rewrite(loss, [])),
    "in a trace": tg.trace(tg.grad(loss)),
    "in nnx.jit": nnx.jit(
        lambda model, x: jax.tree.map(jnp.asarray, nnx.state(tg.grad(loss)(model, x)))
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_statistics_and_counts_are_kept_as_by_nnx_grad(way):
    model, expected = Noisy(), Noisy()
    for _ in range(2):
        WAYS[way](model, X)
        nnx.grad(loss)(expected, X)
    for a, b in zip(state_of(model), state_of(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert float(model.seen["calls"]) == 2.0


@pytest.mark.parametrize(
    "differentiate", [tg.hessian(sum_of_scaled), lambda m: tg.hvp(sum_of_scaled, (m,), m)]
)
def test_second_derivatives_keep_what_is_assigned(differentiate):
    model = Scaling()
    differentiate(model)
    differentiate(model)
    assert float(model.calls.get_value()) == 2.0
    np.testing.assert_array_equal(model.scale.get_value(), [1.0, 2.0])


def test_modules_beside_those_that_are_differentiated_are_changed_too():
    def noisy(model, rngs, x, metric):
        noise = rngs.normal(x.shape)
        metric.update(values=jnp.sum(noise))
        return jnp.sum(model.scale.get_value() * (x + noise))

    def of_step(differentiated, wrap=lambda step: step):
        model, rngs, metric = Scaling(), nnx.Rngs(0), nnx.metrics.Average()
        step = wrap(lambda *given, metric: differentiated(noisy)(*given, metric=metric))
        gradients = [step(model, rngs, X[:, :2], metric=metric) for _ in range(2)]
        return jax.tree.leaves(gradients), metric.compute(), rngs.default.count.get_value()

    expected, mean, count = of_step(nnx.grad)
    for found in (of_step(tg.grad), of_step(tg.grad, tg.trace)):
        np.testing.assert_allclose(found[0][1::2], expected, rtol=1e-6)
        np.testing.assert_allclose(found[1], mean, rtol=1e-6)
        assert found[2] == count == 2

    # Two copies of one would draw the same numbers.
    rngs = nnx.Rngs(0)
    with pytest.raises(TraceContextError):
        tg.grad(lambda x, ours, theirs: jnp.sum(x * ours.normal() * theirs.normal()))(X, rngs, rngs)


def test_a_change_of_structure_raises():
    def in_evaluation(model, x):
        model.eval()
        return loss(model, x)

    with pytest.raises(TypeError, match=r"changes the structure .* before the call \(model.eval"):
        tg.grad(in_evaluation)(Noisy(), X)
