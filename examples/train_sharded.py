"""Trains a small transformer on a mesh, data × model parallel, and resumes on fewer devices.

    python examples/train_sharded.py                  # four devices of the CPU, in one process
    python examples/train_sharded.py --processes 2    # the same in two processes of two devices

The model predicts the next letter of a text. The batch is split along the mesh axis "data", the
matrices along "model". A rule clips the gradient of each block, and a memory budget makes the
backward pass recompute the blocks. After some steps each process saves its part of the state. One
process with half as many devices loads the state and continues the training.

The same file runs on a cluster, where the cluster starts each process and JAX finds the other
processes:

    srun python train_sharded.py --cluster --checkpoint /shared/state     # Slurm
    gcloud compute tpus tpu-vm ssh NAME --worker=all \\
        --command="python train_sharded.py --cluster --checkpoint /shared/state"

On Kubernetes (GKE), run the same command in the pods of an indexed Job or a JobSet.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure

import tracegrad as tg

with contextlib.redirect_stdout(None):
    import this  # the Zen of Python; the import prints it

TEXT = "".join(this.d.get(letter, letter) for letter in this.s)
LETTERS = sorted(set(TEXT))
WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 32, 4, 1, 32, 32
RATE, MOMENTUM = 0.1, 0.9


def shapes() -> dict[str, tuple[tuple[int, ...], P]]:
    """Returns the shape of each parameter and the axes of the mesh that split it."""
    found = {
        "letters": ((len(LETTERS), WIDTH), P(None, "model")),
        "places": ((LENGTH, WIDTH), P(None, "model")),
        "last": ((WIDTH, len(LETTERS)), P("model", None)),
    }
    for k in range(BLOCKS):
        found |= {
            f"block_{k}.qkv": ((WIDTH, 3, HEADS, WIDTH // HEADS), P(None, None, "model", None)),
            f"block_{k}.mix": ((HEADS, WIDTH // HEADS, WIDTH), P("model", None, None)),
            f"block_{k}.up": ((WIDTH, 4 * WIDTH), P(None, "model")),
            f"block_{k}.down": ((4 * WIDTH, WIDTH), P("model", None)),
        }
    return found


def make_state(mesh: jax.sharding.Mesh) -> dict[str, dict[str, tg.Variable]]:
    """Returns the parameters and their momenta; each process holds its part."""

    def variable(name: str, init) -> tg.Variable:
        shape, spec = shapes()[name]
        start = init(shape).astype(np.float32)
        sharding = NamedSharding(mesh, spec)
        value = jax.make_array_from_callback(shape, sharding, lambda index: start[index])
        return tg.Variable(value, name=name)

    random = np.random.default_rng(0)  # the same numbers in all processes
    scale = {name: 1 / np.sqrt(WIDTH) for name in shapes()}
    return {
        "params": {
            name: variable(name, lambda shape, name=name: scale[name] * random.normal(size=shape))
            for name in shapes()
        },
        "momenta": {name: variable(name, np.zeros) for name in shapes()},
    }


def normalised(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def block(params, k, x):
    with jax.named_scope(f"block_{k}"):
        q, k_, v = jnp.einsum("btd,dshe->sbthe", normalised(x), params[f"block_{k}.qkv"])
        attended = jax.nn.dot_product_attention(q, k_, v, is_causal=True)
        x = x + jnp.einsum("bthe,hed->btd", attended, params[f"block_{k}.mix"])
        hidden = jax.nn.gelu(normalised(x) @ params[f"block_{k}.up"])
        return x + hidden @ params[f"block_{k}.down"]


def loss(params, text):
    x = params["letters"][text[:, :-1]] + params["places"]
    for k in range(BLOCKS):
        x = block(params, k, x)
    logits = normalised(x) @ params["last"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)
    return -jnp.mean(chosen)


def batch_of(step: int, mesh: jax.sharding.Mesh) -> jax.Array:
    """Returns pieces of the text; all processes choose the same pieces and keep their own rows."""
    numbers = np.array([LETTERS.index(letter) for letter in TEXT], np.int32)
    begins = np.random.default_rng(step).integers(0, len(TEXT) - LENGTH - 1, BATCH)
    rows = np.stack([numbers[begin : begin + LENGTH + 1] for begin in begins])
    sharding = NamedSharding(mesh, P("data"))
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def train(devices: int, first: int, last: int, checkpoint: Path) -> list[float]:
    """Trains from step `first` to step `last` and returns the losses. Starts from the checkpoint
    if `first` is not 0."""
    mesh = jax.make_mesh(
        (devices // 2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:devices]
    )
    state = make_state(mesh)
    if first:
        tg.load_variables(state, checkpoint)  # each Variable keeps its sharding

    def train_step(text):
        params = {name: variable.value for name, variable in state["params"].items()}
        value, gradient = jax.value_and_grad(loss)(params, text)
        for name, momentum in state["momenta"].items():
            momentum.assign(MOMENTUM * momentum + gradient[name])
            state["params"][name].assign_sub(RATE * momentum)
        return value

    clip = tg.rules.clip_gradient(tg.match.scope("block_*"), max_norm=1.0)
    step = tg.trace(train_step, rules=[clip], memory_budget="80%")
    losses = []
    with jax.set_mesh(mesh):
        for number in range(first, last):
            losses.append(step(batch_of(number, mesh)))
            is_told = number % 20 == 0 or number == last - 1
            if is_told and jax.process_index() == 0:  # all processes have the loss; one prints it
                print(f"step {number:3}: loss {float(losses[-1]):.3f}", flush=True)
    tg.save_variables(state, checkpoint)
    return [float(loss) for loss in losses]


def plot(losses: dict[str, list[float]], path: Path) -> None:
    """Plots the losses on each mesh, one after the other."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    first = 0
    for mesh, of in losses.items():
        axes.plot(range(first, first + len(of)), of, label=mesh)
        first += len(of)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"Saved {path}")


def describe() -> str:
    return f"{jax.process_count()} process(es) with {jax.device_count()} devices"


def start_processes(count: int, arguments: list[str]) -> None:
    """Starts this program `count` times; the processes find each other on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *arguments, "--found", address, str(count)]
    processes = [subprocess.Popen([*command, str(k)]) for k in range(count)]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        sys.exit(f"the processes ended with the exit statuses {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1, help="how many to start")
    parser.add_argument("--devices", type=int, default=4, help="of the CPU, in all")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", type=Path, default=Path("train_sharded.state"))
    parser.add_argument(
        "--out", type=Path, default=Path("train_sharded.png"), help="where the losses are drawn"
    )
    parser.add_argument("--cluster", action="store_true", help="this is one of its processes")
    parser.add_argument("--found", nargs=3, help=argparse.SUPPRESS)  # set by start_processes
    given = parser.parse_args()
    if given.devices % (2 * given.processes) or given.devices < 4:
        parser.error("--devices must be at least 4, and a multiple of twice the processes")

    if given.cluster:
        jax.distributed.initialize()
        print(f"{describe()}; this is process {jax.process_index()}", flush=True)
        first = given.steps if os.path.exists(given.checkpoint) else 0
        train(jax.device_count(), first, first + given.steps, given.checkpoint)
    elif given.found:
        address, count, place = given.found
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.devices // int(count))
        jax.distributed.initialize(address, int(count), int(place))
        train(given.devices, 0, given.steps, given.checkpoint)
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.devices)
        losses = {}
        print(f"{given.devices} devices in {given.processes} process(es)", flush=True)
        if given.processes > 1:
            arguments = ["--devices", str(given.devices), "--steps", str(given.steps)]
            start_processes(given.processes, [*arguments, "--checkpoint", str(given.checkpoint)])
        else:
            on_all = train(given.devices, 0, given.steps, given.checkpoint)
            losses[f"{given.devices // 2} × 2 devices"] = on_all
        print(f"{given.devices // 2} devices in one process, from {given.checkpoint}", flush=True)
        on_half = train(given.devices // 2, given.steps, 2 * given.steps, given.checkpoint)
        losses[f"then {given.devices // 4} × 2 devices"] = on_half
        print(f"Loss after {2 * given.steps} steps: {on_half[-1]:.3f}")
        plot(losses, given.out)


if __name__ == "__main__":
    main()
