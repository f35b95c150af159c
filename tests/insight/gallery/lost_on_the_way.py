"""A gradient arrives, and it is zero or of no use: saturated, dead, vanished, exploded."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp

from .bug import Bug, bug


@bug
def both_factors_start_at_zero():
    """A low-rank adapter with both matrices initialised to zeros."""

    def loss(adapter, x):
        h = x @ adapter["down"]
        y = h @ adapter["up"]  # cause: multiplied by zero
        return jnp.sum(y + x)

    return Bug(
        loss,
        ({"down": jnp.zeros((3, 2)), "up": jnp.zeros((2, 3))}, jnp.ones((4, 3))),
        wrt=lambda path, leaf: path == "down",
    )


@bug
def clipped_everywhere():
    """All logits are outside of the bounds they are clipped to."""

    def loss(w, x):
        logits = jnp.clip(x @ w, -1.0, 1.0)  # cause: clipped
        return jnp.sum(logits**2)

    def repaired(w, x):
        logits = x @ w
        logits = logits + jax.lax.stop_gradient(jnp.clip(logits, -1.0, 1.0) - logits)
        return jnp.sum(logits**2)

    return Bug(loss, (10.0 * jnp.ones((3, 2)), jnp.ones((4, 3))), repaired=repaired)


@bug
def dead_maximum():
    """A hand-written rectifier with inputs that are all negative."""

    def loss(w, x):
        h = jnp.maximum(-jnp.exp(x @ w), 0.0)  # cause: dead units
        return jnp.sum(h)

    def repaired(w, x):
        h = -jnp.exp(x @ w)
        return jnp.sum(h + jax.lax.stop_gradient(jnp.maximum(h, 0.0) - h))

    return Bug(loss, (jnp.ones((3, 4)), jnp.ones((8, 3))), repaired=repaired)


@bug
def dead_relu():
    """A bias far below zero: no unit of the layer is ever active (equinox)."""

    class Model(eqx.Module):
        first: eqx.nn.Linear
        second: eqx.nn.Linear

        def __call__(self, x):
            h = jax.nn.relu(self.first(x) - 30.0)  # cause: dead units
            return self.second(h)

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def repaired(model, x):
        h = jax.vmap(model.first)(x) - 30.0
        h = h + jax.lax.stop_gradient(jax.nn.relu(h) - h)
        return jnp.mean(jax.vmap(model.second)(h) ** 2)

    k1, k2 = jax.random.split(jax.random.key(0))

    return Bug(
        loss,
        (Model(eqx.nn.Linear(3, 4, key=k1), eqx.nn.Linear(4, 1, key=k2)), jnp.ones((8, 3))),
        repaired=repaired,
    )


@bug
def deep_sigmoids():
    """Twelve layers of sigmoids: the first gets next to nothing (flax.linen)."""

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(12):
                x = nn.sigmoid(nn.Dense(4)(x))  # cause: vanishing
            return x

    model = Deep()

    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    return Bug(loss, (model.init(jax.random.key(0), jnp.ones((1, 4))), jnp.ones((2, 4))))


@bug
def dropout_scale_by_zero():
    """The keep probability is zero: everything is dropped."""

    def dropout(x, keep, key):
        mask = jax.random.bernoulli(key, keep, x.shape)
        return x * mask  # cause: multiplied by zero

    def loss(w, x, key):
        return jnp.sum(dropout(x @ w, 0.0, key))

    return Bug(loss, (jnp.ones((3, 2)), jnp.ones((4, 3)), jax.random.key(0)))


@bug
def forgetting_recurrence():
    """A recurrence that forgets: after sixty steps nothing comes back."""

    def cell(h, x):
        h = jnp.tanh(0.2 * h + x)  # cause: vanishing
        return h, None

    def loss(h0, xs):
        h, _ = jax.lax.scan(cell, h0, xs)
        return jnp.sum(h)

    return Bug(loss, (jnp.ones(3), 0.1 * jnp.ones((40, 3))))


@bug
def saturated_tanh():
    """Inputs that were not normalised saturate `tanh` to the last bit."""

    def loss(w, x):
        h = jnp.tanh(x @ w)  # cause: saturated
        return jnp.sum(h)

    return Bug(loss, (jnp.ones((3, 2)), 100.0 * jnp.ones((4, 3))))


@bug
def weights_too_large():
    """Each of eight layers multiplies the gradient by twenty."""

    def loss(layers, x):
        for w in layers:
            x = jnp.sin(x @ w)  # cause: exploding
        return jnp.mean(x)

    return Bug(loss, ([40.0 * jnp.eye(3) for _ in range(8)], jnp.ones((2, 3))))
