"""Trains a classifier of handwritten digits whose gradient is changed in four places.

The data are scikit-learn's digits: 1797 images of 8 × 8 pixels. The network is small and residual.
Its gradient differs from plain differentiation in four places:

* the last layer computes with weights rounded to three bits, but learns as if they were exact;
* the gradient of each single image is limited;
* the residual blocks keep nothing but their arguments, and the backward pass recomputes the rest;
* the first layer is fitted beforehand and frozen: `wrt` excludes it by name, and weight decay does
  not reach it.

The example prints the graph of the loss, which shows the changes; trains; checks that the frozen
parameters did not change; and saves a picture of the learning curve. See ``--help``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import tracegrad as tg

GOAL = 0.95  # test accuracy
BATCH = 64  # images
FEATURES, HIDDEN, BLOCKS = 24, 128, 2


# ------------------------------------------------------------------------- changes to the gradient


@tg.custom_gradient
def quantise(weight):
    """Rounds to the eight levels -1, -3/4, ..., 3/4, so that three bits hold a weight.

    The derivative of rounding is zero wherever it exists, so the weights would learn nothing. The
    *straight-through* gradient is the gradient of the same function without rounding.
    """
    rounded = jnp.clip(jnp.round(4 * weight), -4, 3) / 4
    return rounded, lambda cotangent: cotangent


@tg.custom_gradient
def limit_each_image(x):
    """Returns f32[batch, features] unchanged, and limits the norm of each row of its cotangent.

    Optimisers clip too, but they see only the sum over the batch. Here each image still has its own
    row, so that an unusual image is limited and the other images are not.
    """
    limit = 0.3 / len(x)  # the loss is a mean: each image has a share of 1 / batch

    def clipped(cotangent):
        norm = jnp.linalg.norm(cotangent, axis=1, keepdims=True)
        return cotangent * jnp.minimum(1, limit / norm)

    return x, clipped


@tg.recompute_grad
def residual_block(block, x):
    """x + relu(x W₁ + b) W₂; only the arguments are kept until the backward pass."""
    return x + jax.nn.relu(x @ block["expand"] + block["bias"]) @ block["contract"]


def is_trained(path, leaf):
    """Whether a leaf is outside the stem. The path of a leaf reads "block_0.bias"."""
    return not path.startswith("stem.")


# --------------------------------------------------------------------------- an ordinary JAX model


def initial_params(images, seed):
    """Returns a stem fitted to the images without their labels, and random weights after it."""
    pca = PCA(FEATURES).fit(images)
    basis = pca.components_.T / np.sqrt(pca.explained_variance_)
    # Pixels that are always white leave weights around 1e-40; XLA flushes them to zero on a CPU.
    stem = {"mean": pca.mean_, "basis": basis.round(6)}
    draw = np.random.default_rng(seed).normal
    blocks = {
        f"block_{i}": {
            "expand": draw(scale=FEATURES**-0.5, size=(FEATURES, HIDDEN)),
            "bias": np.zeros(HIDDEN),
            "contract": draw(scale=0.5 * HIDDEN**-0.5, size=(HIDDEN, FEATURES)),
        }
        for i in range(BLOCKS)
    }
    head = {"weight": draw(scale=0.3, size=(FEATURES, 10)), "bias": np.zeros(10)}
    return jax.tree.map(jnp.float32, {"stem": stem, **blocks, "head": head})


def logits(params, images):
    """f32[batch, 64] → f32[batch, 10]."""
    x = (images - params["stem"]["mean"]) @ params["stem"]["basis"]
    for i in range(BLOCKS):
        x = residual_block(params[f"block_{i}"], x)
    x = limit_each_image(x)
    return x @ quantise(params["head"]["weight"]) + params["head"]["bias"]


def loss(params, images, labels):
    """The mean cross-entropy. `labels` are one-hot: f32[batch, 10]."""
    log_probabilities = jax.nn.log_softmax(logits(params, images))
    return -jnp.mean(jnp.sum(labels * log_probabilities, axis=1))


@tg.trace
def accuracy(params, images, labels):
    return jnp.mean(jnp.argmax(logits(params, images), 1) == jnp.argmax(labels, 1))


# ---------------------------------------------------------------------------------------- training


class Digits(NamedTuple):
    images: np.ndarray  # f32[n, 64], 0 white to 1 black
    labels: np.ndarray  # f32[n, 10], one-hot


def load_data(seed):
    """Returns three quarters of the data for training and one quarter for testing."""
    images, classes = load_digits(return_X_y=True)
    images, labels = np.float32(images / 16), np.eye(10, dtype=np.float32)[classes]
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.25, stratify=classes, random_state=seed
    )
    return Digits(train_x, train_y), Digits(test_x, test_y)


def make_optimizer(params, steps):
    """Returns AdamW for the trained parameters only.

    A gradient of zero would not freeze the stem, because weight decay changes a parameter without
    any gradient. `select` makes the mask by which optax does not apply AdamW to the stem.
    """
    adamw = optax.adamw(optax.cosine_decay_schedule(2e-3, steps), weight_decay=0.05)
    return optax.masked(adamw, tg.select(params, is_trained))


def make_step(optimizer):
    # The parameters that `wrt` excludes have gradients of zeros, which cost no computation.
    loss_and_gradients = tg.value_and_grad(loss, wrt=is_trained)

    @tg.trace(donate_argnums=(0, 1))  # the new parameters and state reuse the old memory
    def step(params, state, images, labels):
        value, gradients = loss_and_gradients(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def train(params, data, test, epochs, seed, progress):
    """Returns the parameters, the loss of each step, and the test accuracy after each epoch."""
    steps = len(data.images) // BATCH  # an epoch
    optimizer = make_optimizer(params, epochs * steps)
    step, state = make_step(optimizer), optimizer.init(params)
    params = jax.tree.map(jnp.copy, params)  # the step donates: the caller keeps the originals
    shuffle = np.random.default_rng(seed).permutation
    losses, accuracies = [], []
    for _ in (bar := tqdm(range(epochs), unit="epoch", disable=not progress)):
        for batch in shuffle(len(data.images))[: steps * BATCH].reshape(steps, BATCH):
            params, state, value = step(params, state, data.images[batch], data.labels[batch])
            losses.append(value)  # not read here, so that Python does not wait for the device
        accuracies.append(float(accuracy(params, *test)))
        bar.set_postfix(loss=f"{losses[-1]:.4f}", accuracy=f"{accuracies[-1]:.1%}")
    return params, np.array(losses), np.array(accuracies)


# ---------------------------------------------------------------------------------------- results


def largest_changes(before, after):
    """Returns the largest change of any number in each part of the network."""
    change = jax.tree.map(lambda old, new: float(jnp.max(jnp.abs(new - old))), before, after)
    return {part: max(leaves.values()) for part, leaves in change.items()}


def save_learning_curve(path, losses, accuracies):
    epochs = len(accuracies)
    by_epoch = losses.reshape(epochs, -1)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(np.linspace(0, epochs, losses.size), losses, color="0.8", label="step")
    left.semilogy(np.arange(epochs) + 0.5, by_epoch.mean(1), "C0.-", label="mean of an epoch")
    left.set(ylabel="cross-entropy (nats)", title="Training loss")
    right.plot(np.arange(epochs) + 1, 100 * accuracies, "C0.-", label="after an epoch")
    right.axhline(100 * GOAL, color="0.5", linestyle="--", linewidth=1, label=f"goal: {GOAL:.0%}")
    right.set(ylabel="correct (%)", title=f"Test accuracy: {accuracies[-1]:.1%} in the end")
    for axes in (left, right):
        axes.set(xlabel="epoch", xlim=(0, epochs + 0.2))
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights, the order")
    parser.add_argument(
        "--out", type=Path, default=Path("learning_curve.png"), help="where the picture goes"
    )
    parser.add_argument("--no-progress", action="store_true", help="without a progress bar")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs must be at least 1, not {arguments.epochs}")
    if not arguments.out.parent.is_dir():  # fail now, not after the training
        parser.error(f"--out: there is no folder {arguments.out.parent}")
    if arguments.out.suffix not in (".pdf", ".png", ".svg"):
        parser.error(f"--out must end in .png, .pdf or .svg, not {arguments.out.name}")
    return arguments


def main():
    arguments = read_arguments()
    data, test = load_data(arguments.seed)
    before = initial_params(data.images, arguments.seed)

    print("The graph of the loss: ◆ has a gradient of its own, ↻ is computed again, ■ has none.\n")
    print(tg.graph(loss, before, data.images[:BATCH], data.labels[:BATCH]), "\n")

    after, losses, accuracies = train(
        before, data, test, arguments.epochs, arguments.seed, not arguments.no_progress
    )

    print("\nThe largest change of a number in each part of the network:")
    changes = largest_changes(before, after)
    for part, change in changes.items():
        print(f"  {part:8} {change:.4f}" if change else f"  {part:8} none: frozen")
    levels = len(np.unique(quantise(after["head"]["weight"])))
    print(f"The {after['head']['weight'].size} weights of the head take {levels} values.")

    replaced = " (in place of the one that was there)" if arguments.out.exists() else ""
    save_learning_curve(arguments.out, losses, accuracies)
    print(f"Learning curve: {arguments.out}{replaced}")

    print(f"Test accuracy: {accuracies[-1]:.2%}")
    if changes["stem"] != 0:
        sys.exit("The stem was frozen, and has moved.")
    if accuracies[-1] < GOAL:
        sys.exit(f"That is below the goal of {GOAL:.0%}: more epochs?")


if __name__ == "__main__":
    main()
