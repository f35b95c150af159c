"""Programs of haiku, unmodified but for ``tg.trace`` in the place of ``jax.jit``."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from zoo import LIMIT, STEPS, Program, check, clipped, each

from tracegrad import match, rules

pytestmark = pytest.mark.both_jax

hk = pytest.importorskip("haiku", reason="dm-haiku is in the extra `test`")


class TrainingState(NamedTuple):
    params: Any
    state: Any
    opt_state: optax.OptState
    key: jax.Array


def mlp_with_batch_norm(compiled, edit):
    """`hk.transform_with_state`: batch norm, dropout, a moving average."""

    def net_fn(images, is_training):
        x = hk.Flatten()(images)
        for _ in range(2):
            x = hk.Linear(8, with_bias=False)(x)
            x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
            x = edit(jax.nn.relu(x))
        if is_training:
            x = hk.dropout(hk.next_rng_key(), 0.2, x)
        return hk.Linear(3)(x)

    network = hk.transform_with_state(net_fn)
    optimiser = optax.adam(1e-2)

    def loss_fn(params, state, key, images, labels):
        logits, state = network.apply(params, state, key, images, is_training=True)
        log_likelihood = jnp.sum(jax.nn.one_hot(labels, 3) * jax.nn.log_softmax(logits))
        return -log_likelihood / len(labels), state

    @compiled
    def update(state, images, labels):
        key, own = jax.random.split(state.key)
        grads, new_state = jax.grad(loss_fn, has_aux=True)(
            state.params, state.state, own, images, labels
        )
        updates, opt_state = optimiser.update(grads, state.opt_state)
        return TrainingState(optax.apply_updates(state.params, updates), new_state, opt_state, key)

    images, labels = jax.random.normal(jax.random.key(1), (16, 2, 3)), jnp.arange(16) % 3
    params, state = network.init(jax.random.key(0), images, is_training=True)
    state = TrainingState(params, state, optimiser.init(params), jax.random.key(2))
    for _ in range(STEPS):
        state = update(state, images, labels)
    return state


@each(
    Program(
        mlp_with_batch_norm,
        jax.jit,
        rules.clip_gradient(match.call("relu"), max_value=LIMIT),
        clipped,
        "98%",
        mark="slow",
    ),
)
def test_a_program_of_haiku(program):
    check(program)
