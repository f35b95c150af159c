"""What `save` and `load` cost beside what nobody can do without.

Programs: a perceptron of many layers with its weights as arguments. `save` beside `jax.export` of
the same programs (the function, its gradient), and `load` beside reading those.
Arrays: a file of 200 MB, nearly all of it Variables. `load` beside reading the file and taking its
SHA-256, `save` beside taking that and writing the bytes, flushed to the disk. A state:
`save_variables` and `load_variables` of 1 GB beside Orbax alone, which checks nothing, and of that
the digests of the files beside reading them. CPU
seconds, and seconds by the clock; medians; the two take turns in one process, with the files in the
system's cache.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from report import print_table

import tracegrad as tg
from tracegrad import load, save
from tracegrad.saving.seal import digests_of_files, files_of, last_sealed, step_folder

ARRAYS = 8
CLOCKS = (time.process_time, time.perf_counter)
LAYERS, WIDTH = 24, 64


def row(
    name: str, ours: Callable[[], object], peer: Callable[[], object], rounds: int
) -> list[str]:
    """The medians of the CPU seconds of both and of their ratios; then the same by the clock."""
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    for i in range(rounds + 1):
        for j in (0, 1) if i % 2 else (1, 0):
            start = [clock() for clock in CLOCKS]
            (ours, peer)[j]()
            if i:  # the first round warms up
                times[j].append([clock() - s for clock, s in zip(CLOCKS, start, strict=True)])
    found = [name]
    for k in range(len(CLOCKS)):
        both = [[each[k] for each in of_one] for of_one in times]
        ratios = [a / b for a, b in zip(*both, strict=True)]
        found += [f"{statistics.median(each):.3f}" for each in both]
        found.append(f"{statistics.median(ratios):.2f}")
    return found


# ------------------------------------------------------------------------------------ programs


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def programs(folder: Path, rounds: int) -> list[list[str]]:
    specs = [
        [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS,
        jax.ShapeDtypeStruct((8, WIDTH), "float32"),
    ]
    path = folder / "programs"

    def gradient(weights: list[jax.Array], x: jax.Array, ct: jax.Array) -> object:
        return jax.vjp(loss, weights, x)[1](ct)

    def by_hand() -> None:
        jax.clear_caches()
        one = jax.ShapeDtypeStruct((), "float32")
        for fun, args in ((loss, specs), (gradient, [*specs, one])):
            exported = jax.export.export(jax.jit(lambda *args, fun=fun: fun(*args)))(*args)
            Path(folder, fun.__name__).write_bytes(exported.serialize(vjp_order=0))

    def ours() -> None:
        jax.clear_caches()
        save(loss, path, specs)

    found = row("save, beside jax.export", ours, by_hand, rounds)
    sizes = [os.path.getsize(folder / name) for name in ("loss", "gradient")]
    more = (path.stat().st_size - sum(sizes)) / 1024
    print(
        f"The file has {path.stat().st_size / 1024:.0f} KiB, {more:+.0f} KiB of what jax.export has"
    )
    read = row("load, beside jax.export", lambda: load(path), lambda: parse(folder), rounds)
    return [found, read]


def parse(folder: Path) -> None:
    for name in ("loss", "gradient"):
        jax.export.deserialize(bytearray(Path(folder, name).read_bytes()))


# -------------------------------------------------------------------------------------- arrays


def model(megabytes: int) -> tuple[Callable[..., object], list[tg.Variable]]:
    """A function of `ARRAYS` Variables of so many megabytes together."""
    rows = megabytes * 10**6 // ARRAYS // 4 // 1000
    rng = np.random.default_rng(0)
    variables = [
        tg.Variable(rng.standard_normal((rows, 1000), np.float32), name=f"w{i}")
        for i in range(ARRAYS)
    ]

    def apply(x: jax.Array) -> jax.Array:
        for variable in variables:
            x = jnp.tanh((x @ variable.value) @ variable.value.T)
        return x

    return apply, variables


def ready(loaded: object) -> None:
    """Waits for the arrays, which JAX makes in the background."""
    for variable in loaded.variables.values():  # type: ignore[attr-defined]
        variable.value.block_until_ready()


def read_and_hash(path: Path) -> None:
    hashlib.sha256(path.read_bytes()).digest()


def hash_and_write(contents: bytes, path: Path) -> None:
    hashlib.sha256(contents).digest()
    with open(path, "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def arrays(folder: Path, megabytes: int, rounds: int) -> list[list[str]]:
    fun, variables = model(megabytes)
    specs = [jax.ShapeDtypeStruct((1, variables[0].shape[0]), "float32")]
    path, other = folder / "model", folder / "bytes"
    save(fun, path, specs)
    contents = path.read_bytes()
    more = (len(contents) - sum(variable.value.nbytes for variable in variables)) / 1024
    print(f"The file of {megabytes} MB has {more:.0f} KiB beside its arrays, programs among them")
    return [
        row(f"{name} {len(contents) / 1e6:.0f} MB, beside bytes", ours, peer, rounds)
        for name, ours, peer in [
            ("load", lambda: ready(load(path)), lambda: read_and_hash(path)),
            ("save", lambda: save(fun, path, specs), lambda: hash_and_write(contents, other)),
        ]
    ]


# --------------------------------------------------------------------------------------- state


def state(folder: Path, megabytes: int, rounds: int) -> list[list[str]]:
    _, variables = model(megabytes)
    tree = {variable.name: variable for variable in variables}
    values = {name: variable.value for name, variable in tree.items()}
    types = {
        n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for n, v in values.items()
    }
    path, other = folder / "state", folder / "orbax"

    def saved() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(other, values, force=True)

    def read() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            jax.block_until_ready(checkpointer.restore(other, types))

    def ours() -> None:
        tg.load_variables(tree, path)
        jax.block_until_ready([variable.value for variable in variables])

    name = f"{megabytes / 1000:.1f} GB, beside Orbax alone"

    def write() -> None:
        tg.save_variables(tree, path)

    found = [
        row(f"save_variables {name}", write, saved, rounds),
        row(f"load_variables {name}", ours, read, rounds),
    ]
    step = step_folder(path, last_sealed(path))
    files = files_of(step)

    def only_read() -> None:
        for file in files:
            (step / file).read_bytes()

    seal = functools.partial(digests_of_files, step, files)
    return [*found, row("the seal alone, beside reading its files", seal, only_read, rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--state", type=int, default=1000, help="megabytes of the state")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = programs(Path(name), options.rounds)
        rows += arrays(Path(name), options.megabytes, options.rounds)
        rows += state(Path(name), options.state, max(2, options.rounds // 2))
    print_table(
        f"Seconds, with JAX {jax.__version__}",
        ["", "CPU", "peer", "ratio", "clock", "peer", "ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
