"""What `save` and `load` cost beside what nobody can do without: the bytes and their checksum.

A file of 200 MB, nearly all of it Variables. Loading is compared with reading the file and taking
its SHA-256, saving with taking the SHA-256 of the bytes and writing them, flushed to the disk.
Seconds by the clock, medians; the two take turns in one process, with the file in the cache of the
system. Memory is the growth of the resident set at its peak, each in a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from report import print_table

import tracegrad as tg
from tracegrad import load, save

ARRAYS = 8


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


def in_turns(ours: Callable[[], object], peer: Callable[[], object], rounds: int) -> list[float]:
    """The medians of the seconds of both, and that of their ratios."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):
        for j in (0, 1) if i % 2 else (1, 0):
            start = time.perf_counter()
            (ours, peer)[j]()
            if i:  # the first round warms up
                times[j].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return [statistics.median(each) for each in (*times, ratios)]


def growth(code: str) -> float:
    """By how many MB the resident set grows at its peak while a process runs a line of code."""
    script = f"import sys; sys.argv = ['saving.py']; import saving; saving.measure_growth({code!r})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout)


def peak() -> int:
    """The resident set at its peak, in kB."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def measure_growth(code: str) -> None:
    jnp.ones(3).block_until_ready()
    if code.startswith("save"):
        path, megabytes = code.split()[1:]
        fun, variables = model(int(megabytes))
        specs = [jax.ShapeDtypeStruct((1, variables[0].shape[0]), "float32")]
        before = peak()
        save(fun, path, specs)
    else:
        before = peak()
        ready(load(code.split()[1]))
    print((peak() - before) / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    fun, variables = model(options.megabytes)
    specs = [jax.ShapeDtypeStruct((1, variables[0].shape[0]), "float32")]
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder, "model.tracegrad"), Path(folder, "bytes")
        save(fun, path, specs)
        contents = path.read_bytes()
        loaded = load(path)
        size = len(contents) / 1e6
        rows = []
        for name, ours, peer in [
            ("load", lambda: ready(load(path)), lambda: read_and_hash(path)),
            ("save again", lambda: save(loaded, path), lambda: hash_and_write(contents, other)),
            ("save", lambda: save(fun, path, specs), lambda: hash_and_write(contents, other)),
        ]:
            seconds = in_turns(ours, peer, options.rounds)
            more = growth(f"{'load' if name == 'load' else 'save'} {path} {options.megabytes}")
            rows.append([name, *(f"{s:.3f}" for s in seconds), f"{more:.0f}"])
    print_table(
        f"A file of {size:.0f} MB: seconds, and MB by which the process grows",
        ["", "tracegrad", "bytes and SHA-256", "ratio", "grows by"],
        rows,
    )


if __name__ == "__main__":
    main()
