"""Trains, is interrupted, and resumes from a checkpoint as if nothing had happened.

The state of a training run is the weights, the optimiser's state and the number of the step. orbax
keeps this state in a folder with the last few checkpoints; a checkpoint names each weight by the
path of its Variable in the network. Training stops in the middle. A new network with other weights
restores the last checkpoint, and ends with the same weights, bit for bit, as an uninterrupted run.

After training, users need only the function. `save` writes the function into one file, with its
Variables and its gradient, which a custom gradient limits here. `load` needs none of this code.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure

import tracegrad as tg

STEPS, EVERY, STOP = 120, 25, 70  # the run stops after step 70 and resumes from step 50
BATCH, WIDTH, RATE = 64, 32, 0.01

optimiser = optax.adam(RATE)


@tg.custom_gradient
def limited(y: jax.Array) -> Any:
    """The identity; each element of its gradient is clipped to -0.01 ... 0.01."""
    return y, lambda dy: jnp.clip(dy, -0.01, 0.01)


class Network:
    """A function of one number with two hidden layers; its weights are Variables."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        sizes = [1, WIDTH, WIDTH, 1]
        self.layers = [
            {
                "weight": tg.Variable(rng.normal(0, n**-0.5, (n, m)).astype(np.float32)),
                "bias": tg.Variable(np.zeros(m, np.float32)),
            }
            for n, m in itertools.pairwise(sizes)
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = jnp.tanh(x @ layer["weight"].value + layer["bias"])
        return limited(x @ last["weight"].value + last["bias"])


class Run:
    """A network and all state that its training needs to resume."""

    def __init__(self, seed: int):
        self.network = Network(seed)
        self.weights = tg.variables_of(self.network)  # by paths such as layers.0.weight
        self.memory = optimiser.init(tg.values_of(self.weights))
        self.step = 0
        self.losses: list[float] = []

    def state(self) -> dict[str, Any]:
        """Returns the content of a checkpoint: a tree of arrays."""
        return {
            "weights": tg.values_of(self.weights),
            "memory": self.memory,
            "step": np.array(self.step),
        }

    def take_up(self, state: dict[str, Any]) -> None:
        tg.assign_values(self.weights, state["weights"])
        self.memory, self.step = state["memory"], int(state["step"])

    def train(self, until: int, checkpoints: ocp.CheckpointManager | None = None) -> None:
        @tg.trace
        def update(memory: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            with tg.GradientTape() as tape:
                loss = jnp.mean((self.network(x) - y) ** 2)
            gradients = tape.gradient(loss, self.weights)
            updates, memory = optimiser.update(gradients, memory)
            for name, weight in self.weights.items():
                weight.assign_add(updates[name])
            return memory, loss

        while self.step < until:
            self.step += 1
            key = jax.random.fold_in(jax.random.key(0), self.step)  # the data of this step
            x = jax.random.uniform(key, (BATCH, 1), minval=-2, maxval=2)
            self.memory, loss = update(self.memory, x, jnp.sin(3 * x))
            self.losses.append(float(loss))
            if checkpoints is not None and self.step % EVERY == 0:
                checkpoints.save(self.step, args=ocp.args.StandardSave(self.state()))


def plot(straight: list[float], stopped: list[float], resumed: list[float], path: Path) -> None:
    """Plots the losses of the uninterrupted run and of the run that stops and resumes."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(straight, color="lightgrey", linewidth=6, label="without a break")
    axes.semilogy(stopped, color="tab:blue", label=f"stopped after step {len(stopped)}")
    last = len(straight) - len(resumed)
    axes.semilogy(
        range(last, len(straight)), resumed, "--", color="tab:orange", label=f"from step {last} on"
    )
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("run"), help="for all that is written")
    folder = parser.parse_args().folder.resolve()
    if folder.exists():
        parser.error(f"{folder} is there already; the example starts with a new folder")

    straight = Run(seed=1)
    straight.train(STEPS)
    print(f"Without a break: loss {straight.losses[0]:.3f} to {straight.losses[-1]:.3f}.")

    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as checkpoints:
        stopped = Run(seed=1)
        stopped.train(STOP, checkpoints)  # the steps after the last checkpoint are lost
        checkpoints.wait_until_finished()
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as checkpoints:
        resumed = Run(seed=2)
        last = checkpoints.latest_step()
        form = ocp.args.StandardRestore(resumed.state())
        resumed.take_up(checkpoints.restore(last, args=form))
        print(f"Stopped after step {STOP}, went on after step {last}.")
        resumed.train(STEPS, checkpoints)
        checkpoints.wait_until_finished()
    same = all(
        np.array_equal(weight.numpy(), straight.weights[name].numpy())
        for name, weight in resumed.weights.items()
    )
    print(f"The weights are {'the same' if same else 'DIFFERENT'}, bit for bit.")

    plot(straight.losses, stopped.losses, resumed.losses, folder / "losses.png")

    path = folder / "network.tracegrad"
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 1"), "float32")
    tg.save({"network": (resumed.network, [rows])}, path)
    network = tg.load(path)["network"]
    size = path.stat().st_size
    print(f"{path.name}: {network.signature}, {len(network.variables)} Variables, {size} bytes.")
    x = jnp.linspace(-1, 1, 5)[:, None]
    whole, hundredth = (
        jax.grad(lambda x, scale=scale: scale * jnp.sum(network(x)))(x) for scale in (1.0, 0.01)
    )
    limited_too = np.array_equal(whole, hundredth)
    print(f"Loaded, its gradient is {'' if limited_too else 'NOT '}limited by its own rule.")
    sys.exit(0 if same and limited_too else 1)


if __name__ == "__main__":
    main()
