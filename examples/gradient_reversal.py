"""Domain-adversarial training on two moons, and on the same moons turned by 35 degrees, unlabelled.

A network has two heads. One head tells the moons apart, the other head the two domains. The
gradient of the second head is reversed before it reaches the features, so that the features learn
what the domains have in common (Ganin and Lempitsky, 2015). The model has no code for the reversal:
one rule of the training step edits the loss. The example prints how many of the turned points are
classified correctly, and saves a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import make_moons

import tracegrad as tg
from tracegrad import match, rules

Classifier = Callable[[jax.Array], jax.Array]


def two_domains() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the labelled points f32[300, 2], the turned points, and the moon of each point."""
    points, moons = make_moons(300, noise=0.05, random_state=0)
    points -= points.mean(0)
    turn = np.deg2rad(35)
    turned = points @ np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    return tuple(jnp.asarray(array, jnp.float32) for array in (points, turned, moons))


class DomainHead(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden, self.out = nnx.Linear(15, 15, rngs=rngs), nnx.Linear(15, 1, rngs=rngs)

    def __call__(self, features: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(features)))[:, 0]


class TwoHeads(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(2, 15, rngs=rngs), nnx.Linear(15, 15, rngs=rngs)
        self.moon, self.domain = nnx.Linear(15, 1, rngs=rngs), DomainHead(rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        features = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.moon(features)[:, 0], self.domain(features)


def trained(
    chosen: Sequence[tg.rules.MatchRule], source: jax.Array, moons: jax.Array, target: jax.Array
) -> Classifier:
    """Returns a classifier of points, trained with these rules."""
    definition, params = nnx.split(TwoHeads(nnx.Rngs(1)))
    optimiser = optax.adam(5e-3)
    cross_entropy = optax.sigmoid_binary_cross_entropy

    def loss(params: nnx.State) -> jax.Array:
        moon, domain = nnx.merge(definition, params)(jnp.concatenate([source, target]))
        is_target = jnp.repeat(jnp.array([0.0, 1.0]), len(source))
        of_moons = cross_entropy(moon[: len(source)], moons).mean()
        return of_moons + cross_entropy(domain, is_target).mean()

    @tg.trace(rules=chosen)
    def step(params: nnx.State, state: optax.OptState) -> tuple[nnx.State, optax.OptState]:
        updates, state = optimiser.update(tg.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimiser.init(params)
    for _ in range(600):
        params, state = step(params, state)
    return lambda x: nnx.merge(definition, params)(x)[0]


def main() -> None:
    source, target, moons = two_domains()
    head = match.call("DomainHead")
    ways = {
        "the domain head left out": rules.scale_gradient(head, 0.0, inputs=0),
        "its gradient reversed": rules.scale_gradient(head, -1.0, inputs=0),
    }
    grid = jnp.stack(jnp.meshgrid(jnp.linspace(-2, 2, 80), jnp.linspace(-1.6, 1.6, 80)), -1)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for axis, (name, rule) in zip(axes, ways.items(), strict=True):
        moon_of = trained([rule], source, moons, target)
        share = jnp.mean((moon_of(target) > 0) == (moons > 0.5))
        print(f"{name}: {share:.1%} of the turned moons are told apart")
        regions = moon_of(grid.reshape(-1, 2)).reshape(80, 80) > 0
        axis.contourf(grid[..., 0], grid[..., 1], regions, cmap="coolwarm", alpha=0.3)
        axis.scatter(*target.T, c=moons, cmap="coolwarm", s=8)
        axis.set(title=f"{name}: {share:.0%}", xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig("gradient_reversal.png", dpi=120)
    print("saved gradient_reversal.png")


if __name__ == "__main__":
    main()
