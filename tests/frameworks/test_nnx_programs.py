"""Programs of flax.nnx, unmodified but for ``tg.trace`` in the place of ``nnx.jit``."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from zoo import LIMIT, STEPS, Program, check, clipped, each

from tracegrad import match, rules

pytestmark = pytest.mark.both_jax


def arrays_of(*modules):
    return [jax.tree.leaves(nnx.state(module)) for module in modules]


class CNN(nnx.Module):
    def __init__(self, edit, *, rngs):
        self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(4, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.1)
        self.conv2 = nnx.Conv(4, 4, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(4, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear = nnx.Linear(16, 3, rngs=rngs)
        self.edit = edit

    def __call__(self, x, rngs=None):
        x = self.edit(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.avg_pool(self.edit(nnx.relu(self.batch_norm2(self.conv2(x)))))
        return self.linear(x.reshape(x.shape[0], -1))


def mnist_cnn(compiled, edit):
    """Batch norm, dropout and metrics, which the step updates in place."""
    model = CNN(edit, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    rngs = nnx.Rngs(1)

    def loss_fn(model, rngs, batch):
        logits = model(batch["image"], rngs)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, logits

    @compiled
    def train_step(model, optimizer, metrics, rngs, batch):
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    images = jax.random.normal(jax.random.key(2), (64, 4, 4, 1))
    batch = {"image": images, "label": jnp.arange(64) % 3}
    model.train()
    for _ in range(STEPS):
        train_step(model, optimizer, metrics, rngs, batch)
    model.eval()
    return metrics.compute(), model(images), arrays_of(model, optimizer, metrics, rngs)


class MiniGPT(nnx.Module):
    def __init__(self, edit, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, 8, use_bias=False, dropout_rate=0.1, decode=False, rngs=rngs
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.output_layer = nnx.Linear(8, 11, use_bias=False, rngs=rngs)
        self.edit = edit

    def __call__(self, tokens):
        x = self.embed(tokens)
        mask = nnx.make_causal_mask(tokens)
        x = self.norm(x + self.dropout(self.attention(x, mask=mask)))
        return self.output_layer(x + self.down(self.edit(nnx.relu(self.up(x)))))


def transformer(compiled, edit):
    """Dropout in attention; random numbers in the layers."""
    model = MiniGPT(edit, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @compiled
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            logits = model(batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    batch = jax.random.randint(jax.random.key(1), (16, 7), 0, 11)
    model.train()
    losses = [train_step(model, optimizer, batch) for _ in range(STEPS)]
    return losses, arrays_of(model, optimizer)


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.linear2 = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, z):
        return self.linear2(nnx.relu(self.norm(self.linear1(z))))


class Discriminator(nnx.Module):
    def __init__(self, edit, rngs):
        self.linear1 = nnx.Linear(2, 8, rngs=rngs)
        self.linear2 = nnx.Linear(8, 8, rngs=rngs)
        self.linear3 = nnx.Linear(8, 1, rngs=rngs)
        self.edit = edit

    def __call__(self, x):
        for linear in (self.linear1, self.linear2):
            x = self.edit(nnx.leaky_relu(linear(x), 0.2))
        return self.linear3(x)[:, 0]


def gan(compiled, edit):
    """Two models, two optimizers, two gradients in one step."""
    rngs = nnx.Rngs(0, noise=1)
    generator, discriminator = Generator(rngs), Discriminator(edit, rngs)
    g_optimizer = nnx.Optimizer(generator, optax.adam(1e-2, b1=0.5), wrt=nnx.Param)
    d_optimizer = nnx.Optimizer(discriminator, optax.adam(1e-2, b1=0.5), wrt=nnx.Param)
    bce = optax.sigmoid_binary_cross_entropy

    def discriminator_loss(discriminator, real, fake):
        on_real, on_fake = discriminator(real), discriminator(fake)
        return jnp.mean(bce(on_real, jnp.ones(64)) + bce(on_fake, jnp.zeros(64)))

    def generator_loss(generator, discriminator, z):
        return jnp.mean(bce(discriminator(generator(z)), jnp.ones(64)))

    @compiled
    def train_step(generator, discriminator, g_optimizer, d_optimizer, rngs, real):
        z = jax.random.normal(rngs.noise(), (64, 3))
        fake = jax.lax.stop_gradient(generator(z))
        d_loss, d_grads = nnx.value_and_grad(discriminator_loss)(discriminator, real, fake)
        d_optimizer.update(discriminator, d_grads)
        g_loss, g_grads = nnx.value_and_grad(generator_loss)(generator, discriminator, z)
        g_optimizer.update(generator, g_grads)
        return {"discriminator": d_loss, "generator": g_loss}

    modules = generator, discriminator, g_optimizer, d_optimizer, rngs
    real, losses = jax.random.normal(jax.random.key(2), (64, 2)) + 3, []
    for _ in range(STEPS):
        losses.append(train_step(*modules, real))
    return losses, arrays_of(*modules)


class Tagger(nnx.Module):
    def __init__(self, edit, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs), rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear = nnx.Linear(8, 4, rngs=rngs)
        self.edit = edit

    def __call__(self, tokens):
        return self.linear(self.dropout(self.edit(jnp.tanh(self.rnn(self.embed(tokens))))))


def rnn(compiled, edit):
    """A recurrent cell, scanned by `nnx.RNN`; the model and its optimizer in one tree."""
    model = Tagger(edit, nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    training = {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}

    @compiled
    def train_step(training, tokens, tags):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tags).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(training["model"])
        training["optimizer"].update(training["model"], grads)
        return loss

    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 11)
    losses = [train_step(training, tokens, tokens % 4) for _ in range(STEPS)]
    return losses, arrays_of(model, training["optimizer"])


class Classifier(nnx.Module):
    def __init__(self, edit, rngs):
        self.layers = nnx.List([nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.edit = edit

    def __call__(self, x):
        for layer in self.layers:
            x = self.edit(nnx.gelu(layer(x)))
        return self.head(x)


def lora(compiled, edit):
    """Only what `nnx.DiffState` selects is trained."""
    model = Classifier(edit, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=nnx.LoRAParam)

    @compiled
    def train_step(model, optimizer, x, y):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        grad_fn = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))
        loss, grads = grad_fn(model)
        optimizer.update(model, grads)
        return loss

    x, y = jax.random.normal(jax.random.key(1), (16, 8)), jnp.arange(16) % 3
    frozen = arrays_of(model.head)
    losses = [train_step(model, optimizer, x, y) for _ in range(STEPS)]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, arrays_of(model.head), frozen))
    return losses, arrays_of(model, optimizer)


CLIP = partial(rules.clip_gradient, max_value=LIMIT)


@each(
    Program(mnist_cnn, nnx.jit, CLIP(match.call("relu")), clipped, "90%", mark="slow"),
    Program(transformer, nnx.jit, CLIP(match.call("relu")), clipped, "75%", mark="slow"),
    Program(gan, nnx.jit, CLIP(match.call("leaky_relu")), clipped, "90%", mark="slow"),
    Program(rnn, nnx.jit, CLIP(match.op("tanh") & ~match.call("GRUCell")), clipped, mark="slow"),
    Program(lora, nnx.jit, CLIP(match.call("gelu")), clipped, "70%"),
)
def test_a_program_of_nnx(program):
    check(program)
