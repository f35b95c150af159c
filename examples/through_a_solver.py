"""Gradients through solvers of other libraries, whose loops JAX cannot differentiate in reverse.

A solver runs until it converges, in a `jax.lax.while_loop`, so `jax.grad` cannot train a model that
calls the solver. The rule `rules.checkpointed_loop` makes the model trainable from outside: the
rule keeps some states of a loop and replays the steps between them. The libraries do not change.

The first part limits how much a layer can amplify: it penalises the layer's spectral norm, which
optax computes by iteration. The second part learns a penalty for each weight of a fit, by the error
on points that the fit has not seen. The fit is BFGS from `jax.scipy.optimize`. The example compares
all gradients with finite differences, and plots both trainings.

    python examples/through_a_solver.py --out solver.png

Needs `pip install 'tracegrad[examples]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.optimize import minimize
from matplotlib.figure import Figure

import tracegrad as tg

Loss = Callable[[jax.Array], Any]
CHECKPOINTED = tg.rules.checkpointed_loop()


def layer_with_penalty(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the loss of a layer plus a penalty on a spectral norm above one."""
    largest, _ = optax.power_iteration(weights.T @ weights, num_iters=500, error_tolerance=1e-12)
    excess = jax.nn.relu(jnp.sqrt(largest) - 1.0)
    return jnp.mean((jnp.tanh(x @ weights) - y) ** 2) + excess**2


def error_after_fit(held_back: jax.Array, seen: tuple, unseen: tuple) -> jax.Array:
    """Fits a logistic regression to the seen points; returns its error on the unseen points."""

    def error(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(jnp.logaddexp(0.0, -y * (x @ weights)))

    def objective(weights: jax.Array) -> jax.Array:
        return error(weights, *seen) + jnp.sum(jnp.exp(held_back) * weights**2)

    start = jnp.zeros_like(held_back)
    return error(minimize(objective, start, method="BFGS").x, *unseen)


def by_differences(loss: Loss, at: jax.Array) -> np.ndarray:
    """Returns the gradient by central differences."""
    moved = 1e-5 * jnp.eye(at.size).reshape(at.size, *at.shape)
    values = jax.lax.map(loss, jnp.concatenate([at + moved, at - moved]))
    return np.asarray(values[: at.size] - values[at.size :]).reshape(at.shape) / 2e-5


def say_without_a_rule(title: str, loss: Loss, at: jax.Array) -> None:
    print(title)
    try:
        tg.grad(loss)(at)
    except ValueError as error:
        (note,) = (note for note in error.__notes__ if "checkpointed_loop" in note)
        line, words = note.splitlines()
        print(f"  without a rule, of {line.split('/')[-1]}")
        print(f"    {words.split('. ')[0]}.")


def with_rule(name: str, rule: tg.rules.MatchRule, loss: Loss, at: jax.Array) -> Loss:
    """Returns the compiled loss and gradient; prints their distance from finite differences."""
    slope = jax.jit(jax.value_and_grad(tg.rewrite(loss, rule)))
    expected = by_differences(loss, at)
    error = np.abs(np.asarray(slope(at)[1]) - expected).max() / np.abs(expected).max()
    print(f"  by {name}: {error:.0e} from finite differences")
    return slope


def plot(norms: list[float], errors: list[float], path: Path) -> None:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(norms)
    left.axhline(1.0, color="grey", linestyle=":")
    left.set(title="A layer with a penalty", xlabel="step", ylabel="spectral norm of its weights")
    right.plot(errors, color="tab:orange")
    right.set(
        title="A fit whose penalties are learned", xlabel="step", ylabel="error on new points"
    )
    figure.savefig(path, dpi=120)
    print(f"Saved {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("through_a_solver.png"), help="where the picture goes"
    )
    out = parser.parse_args().out
    jax.config.update("jax_enable_x64", True)
    random = np.random.default_rng(0)

    x, weights = random.normal(size=(64, 4)), jnp.asarray(random.normal(size=(4, 3)))
    y = np.sign(x @ np.outer(random.normal(size=4), random.normal(size=3)))

    def layer(weights: jax.Array) -> jax.Array:
        return layer_with_penalty(weights, x, y)

    say_without_a_rule("A layer with a penalty on its spectral norm", layer, weights)
    slope = with_rule("checkpointed_loop", CHECKPOINTED, layer, weights)
    norms = [float(jnp.linalg.norm(weights, 2))]
    for _ in range(60):
        weights -= 0.2 * slope(weights)[1]
        norms.append(float(jnp.linalg.norm(weights, 2)))
    print(f"  60 steps take the norm from {norms[0]:.2f} to {norms[-1]:.2f}\n")

    features = random.normal(size=(120, 8))
    labels = np.sign(features[:, 0] + 0.5 * random.normal(size=120))  # only feature 0 counts
    seen, unseen = (features[:40], labels[:40]), (features[40:], labels[40:])
    held_back = jnp.full(8, -4.0)  # logarithms of the penalties

    def fit(held_back: jax.Array) -> jax.Array:
        return error_after_fit(held_back, seen, unseen)

    say_without_a_rule("A fit whose weights are held back", fit, held_back)
    slope = with_rule("checkpointed_loop", CHECKPOINTED, fit, held_back)
    errors = []
    for _ in range(100):
        error, gradient = slope(held_back)
        errors.append(float(error))
        held_back -= 20 * gradient
    first, *others = jnp.exp(held_back)
    print(f"  100 steps take the error from {errors[0]:.3f} to {errors[-1]:.3f}: the weight that")
    print(
        f"  counts is held back by {first:.3f} then, the others by {np.mean(others):.3f} on average"
    )
    plot(norms, errors, out)


if __name__ == "__main__":
    main()
