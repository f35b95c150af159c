"""Programs of flax.linen, unmodified but for ``tg.trace`` in the place of ``jax.jit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import struct
from flax.training import train_state
from zoo import LIMIT, STEPS, Program, check, clipped, each

from tracegrad import match, rules

pytestmark = pytest.mark.both_jax


@struct.dataclass
class Metrics:
    loss: jax.Array
    correct: jax.Array
    count: jax.Array

    @classmethod
    def empty(cls):
        return cls(jnp.zeros(()), jnp.zeros((), int), jnp.zeros((), int))

    def update(self, loss, logits, labels):
        correct = jnp.sum(jnp.argmax(logits, -1) == labels)
        return self.replace(
            loss=self.loss + loss, correct=self.correct + correct, count=self.count + len(labels)
        )


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array
    metrics: Metrics


class ConvBlock(nn.Module):
    features: int
    edit: Callable

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return self.edit(nn.relu(x))


class CNN(nn.Module):
    edit: Callable

    @nn.compact
    def __call__(self, x, train: bool):
        x = ConvBlock(4, self.edit, name="first")(x, train)
        x = ConvBlock(4, self.edit, name="second")(x, train)
        x = ConvBlock(4, self.edit, name="third")(x, train)
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(3)(x)


def cnn_with_batch_stats(compiled, edit):
    """A TrainState with batch statistics, dropout and metrics."""
    model = CNN(edit)
    variables = model.init(jax.random.key(0), jnp.ones((1, 4, 4, 1)), train=False)
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        key=jax.random.key(1),
        metrics=Metrics.empty(),
        tx=optax.adamw(1e-2),
    )

    @compiled
    def train_step(state, batch):
        dropout_key = jax.random.fold_in(state.key, state.step)

        def loss_fn(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x=batch["image"],
                train=True,
                rngs={"dropout": dropout_key},
                mutable=["batch_stats"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, (logits, updates)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, updates)), grads = grad_fn(state.params)
        state = state.apply_gradients(grads=grads)
        metrics = state.metrics.update(loss, logits, batch["label"])
        return state.replace(batch_stats=updates["batch_stats"], metrics=metrics)

    images = jax.random.normal(jax.random.key(2), (64, 4, 4, 1))
    batch = {"image": images, "label": jnp.arange(64) % 3}
    for _ in range(STEPS):
        state = train_step(state, batch)
    return jax.tree.leaves(state)


class CharacterLSTM(nn.Module):
    edit: Callable

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8, name="embed")(tokens)
        x = nn.RNN(nn.LSTMCell(8), name="lstm")(x)
        return nn.Dense(11, name="head")(self.edit(nn.LayerNorm(name="norm")(x)))


def lstm(compiled, edit):
    """Next characters, with the learning rate of a schedule."""
    model = CharacterLSTM(edit)
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 11)
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), tokens),
        tx=optax.chain(
            optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, 10))
        ),
    )

    @compiled
    def train_step(state, tokens):
        def loss_fn(params):
            logits = state.apply_fn(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(STEPS):
        state, loss = train_step(state, tokens)
        losses.append(loss)
    return losses, jax.tree.leaves(state)


@each(
    Program(
        cnn_with_batch_stats,
        jax.jit,
        rules.clip_gradient(match.call("relu"), max_value=LIMIT),
        clipped,
        "70%",
    ),
    Program(
        lstm,
        jax.jit,
        rules.clip_gradient(match.scope("norm"), max_value=LIMIT),
        clipped,
        mark="slow",
    ),
)
def test_a_program_of_linen(program):
    check(program)
