"""What a train step under a tape costs, and a recorded operation, beside TensorFlow and PyTorch.

A multilayer perceptron of three layers as wide as its batch's rows, float32, relu, mean squared
error, plain gradient descent; by hand it is one `jax.jit` of a pytree, donated. The peers run in
processes of their own, which stand by while another is timed: in each round every row is timed
once, in another order, so that what else the machine does falls on all alike. Before that the
losses after the same number of steps are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tape_peers
from report import print_table
from tape_peers import OPERATIONS, RATE, SIZES, WAYS, Row, Rows

import tracegrad as tg

Key = tuple[str, str]
Times = tuple[float, float, float]  # seconds, CPU seconds, and what was computed
OURS = "tracegrad"

# ------------------------------------------------------------------------------------- our side


def loss(parameters: Any, x: Any, y: Any, relu: Callable[[Any], Any] = jax.nn.relu) -> Any:
    for i in range(0, len(parameters), 2):
        x = x @ parameters[i] + parameters[i + 1]
        if i + 2 < len(parameters):
            x = relu(x)
    return jnp.mean(jnp.square(x - y))


def done(result: Any) -> float:
    return float(jax.block_until_ready(result)[0])


def maximum(x: Any) -> Any:
    """relu without a rule of its own, which costs JAX a tenth of a millisecond outside of jit."""
    return jnp.maximum(x, 0)


def tape_step(
    size: tuple[int, int],
    *,
    relu: Callable[[Any], Any] = jax.nn.relu,
    traced_loss: bool = False,
    traced: bool = False,
) -> Row:
    """Under a tape all of which runs eagerly, or over a traced loss, or in one traced function."""
    (x, y), parameters = map(as_arrays, tape_peers.batch_and_parameters(size))
    variables = [tg.Variable(p) for p in parameters]

    def value_now(x: Any, y: Any) -> Any:
        return loss(variables, x, y, relu)

    def descend(gradients: Any) -> None:
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(RATE * gradient)

    if traced_loss:
        value_now, descend = tg.trace(value_now), tg.trace(descend)

    def step(x: Any, y: Any) -> Any:
        with tg.GradientTape() as tape:
            value = value_now(x, y)
        descend(tape.gradient(value, variables))
        return value

    if traced:
        step = tg.trace(step)
        # One program: when its loss is there all is. (To read a Variable would keep its array.)
        return lambda: step(x, y), lambda value: done([value])
    return lambda: step(x, y), lambda value: done([value, *tg.values_of(variables)])


def eager_by_hand(size: tuple[int, int]) -> Row:
    """Without a tape, but for the gradient operation by operation: what JAX takes in any case."""
    (x, y), parameters = map(as_arrays, tape_peers.batch_and_parameters(size))
    gradient = jax.jit(jax.grad(loss))

    def call() -> Any:
        nonlocal parameters
        value, gradients = loss(parameters, x, y), gradient(parameters, x, y)
        parameters = [p - RATE * g for p, g in zip(parameters, gradients, strict=True)]
        return value

    return call, lambda value: done([value, *parameters])


def step_by_hand(size: tuple[int, int]) -> Row:
    (x, y), parameters = map(as_arrays, tape_peers.batch_and_parameters(size))

    @partial(jax.jit, donate_argnums=0)
    def step(parameters: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, x, y)
        return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients), value

    def call() -> Any:
        nonlocal parameters
        parameters, value = step(parameters, x, y)
        return value

    return call, lambda value: done([value])


def chain(multiply: Callable[[Any, Any], Any], way: str) -> Row:
    x, c = as_arrays(tape_peers.chain_start())

    def run(x: Any) -> Any:
        for _ in range(OPERATIONS):
            x = multiply(x, c)
        return x

    def under_tape() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = run(x)
        return tape.gradient(y, x) if way == "with gradient" else y

    return (lambda: run(x)) if way == "eager" else under_tape, lambda result: float(result[0])


def as_arrays(arrays: Any) -> list[Any]:
    return [jnp.asarray(array) for array in arrays]


MULTIPLICATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "x * c": lambda x, c: x * c,
    "mul(x, c)": jax.lax.mul,
}
STEPS: dict[str, Callable[[tuple[int, int]], Row]] = {
    "eager tape": tape_step,
    "eager tape, jnp.maximum": partial(tape_step, relu=maximum),
    "tape over a traced loss": partial(tape_step, traced_loss=True),
    "traced whole": partial(tape_step, traced=True),
    "by hand, jax.jit": step_by_hand,
    "by hand, eager, but a jitted gradient": eager_by_hand,
}


def our_rows() -> Rows:
    return {
        **{(n, str(size)): partial(make, size) for n, make in STEPS.items() for size in SIZES},
        **{(n, way): partial(chain, f, way) for n, f in MULTIPLICATIONS.items() for way in WAYS},
    }


class Here:
    """Our side, in this process."""

    def __init__(self) -> None:
        self.version = tg.__version__
        self.rows: dict[Key, Row] = {key: make() for key, make in our_rows().items()}

    def time(self, key: Key, calls: int) -> Times:
        return tape_peers.time_row(self.rows[key], calls)


class Peer:
    """A peer, in a process of its own."""

    def __init__(self, library: str, interpreter: str):
        script = Path(__file__).with_name("tape_peers.py")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [interpreter, str(script), library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        )
        self.version, rows = self._reply()
        self.rows: list[Key] = [(name, column) for name, column in rows]

    def time(self, key: Key, calls: int) -> Times:
        assert self._process.stdin is not None
        print(json.dumps([*key, calls]), file=self._process.stdin, flush=True)
        seconds, cpu, number = self._reply()
        return seconds, cpu, number

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self._process.args} ended:\n{self._log.read()}")
        return json.loads(line)


# ----------------------------------------------------------------------------------- measurement


def measure(
    sides: Mapping[str, Here | Peer], rounds: int, seconds: float
) -> dict[tuple[str, Key], list[Times]]:
    """The times of a call of each row of each side, one for each round."""
    rows = [(side, key) for side in sides for key in sides[side].rows]
    columns = list(dict.fromkeys(key[1] for _, key in rows))
    first = {(side, key): sides[side].time(key, 5)[2] for side, key in rows}
    for column in columns:
        check([(*row, number) for row, number in first.items() if row[1][1] == column])
    # By the least CPU time: where a neighbour held a core, a run of too few calls would be planned,
    # and be all warming up.
    calls = {
        (side, key): max(1, round(seconds / min(sides[side].time(key, 10)[1] for _ in range(3))))
        for side, key in rows
    }
    found: dict[tuple[str, Key], list[Times]] = {row: [] for row in rows}
    shuffled = random.Random(0)
    for _ in range(rounds):
        # What is compared comes one after the other.
        for column in shuffled.sample(columns, len(columns)):
            for side, key in shuffled.sample(rows, len(rows)):
                if key[1] == column:
                    found[side, key].append(sides[side].time(key, calls[side, key]))
    return found


def check(numbers: list[tuple[str, Key, float]]) -> None:
    """After as many steps from the same start all have the same loss, or time different things."""
    *_, expected = numbers[0]
    for side, key, number in numbers:
        if abs(number - expected) > 1e-3 * abs(expected):
            raise SystemExit(f"{side} {key}: {number}, but {numbers[0]}")


def lower_quartile(times: list[Times]) -> float:
    """Of the CPU time: where cores are shared, that of the clock is chance."""
    return statistics.quantiles([cpu for _, cpu, _ in times], n=4)[0]


def ratio(ours: list[Times], theirs: list[Times], clock: int) -> float:
    return statistics.median(a[clock] / b[clock] for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensorflow", help="a Python where TensorFlow is installed")
    parser.add_argument("--torch", help="a Python where PyTorch is installed")
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--seconds", type=float, default=0.02, help="for a row in a round")
    options = parser.parse_args()

    sides: dict[str, Here | Peer] = {OURS: Here()}
    for library, name in (("tensorflow", "TensorFlow"), ("torch", "PyTorch")):
        interpreter = getattr(options, library)
        if interpreter is None:
            print(f"without {name}: --{library} names no interpreter", file=sys.stderr)
        else:
            sides[name] = Peer(library, interpreter)
    found = measure(sides, options.rounds, options.seconds)
    for side in sides.values():
        if isinstance(side, Peer):
            side.end()
    print_report(sides, found, options.rounds)


# ----------------------------------------------------------------------------------------- report

SMALL, MIDDLE, LARGE = map(str, SIZES)
EAGER_TAPE = "TensorFlow", "eager tape"
# Ours, the peer's, where, and what the ratio is not to exceed.
LIMITS: list[tuple[str, tuple[str, str], str, float]] = [
    ("eager tape", EAGER_TAPE, SMALL, 0.5),
    ("eager tape, jnp.maximum", EAGER_TAPE, SMALL, 0.5),
    ("eager tape", EAGER_TAPE, MIDDLE, 0.5),
    ("eager tape", EAGER_TAPE, LARGE, 0.8),
    ("tape over a traced loss", EAGER_TAPE, SMALL, 0.12),
    ("tape over a traced loss", ("PyTorch", "eager"), SMALL, 1.5),
    ("traced whole", ("TensorFlow", "tf.function(jit_compile=True)"), SMALL, 0.5),
    ("traced whole", (OURS, "by hand, jax.jit"), SMALL, 1.2),
    ("traced whole", (OURS, "by hand, jax.jit"), MIDDLE, 1.2),
    ("traced whole", (OURS, "by hand, jax.jit"), LARGE, 1.2),
    ("x * c", ("TensorFlow", "x * c"), "with gradient", 0.85),
]


def print_report(
    sides: Mapping[str, Here | Peer], found: dict[tuple[str, Key], list[Times]], rounds: int
) -> None:
    who = ", ".join(f"{name} {side.version}" for name, side in sides.items())
    names = [
        (side, name) for side in sides for name in dict.fromkeys(k[0] for k in sides[side].rows)
    ]

    def times(columns: tuple[str, ...], operations: int) -> list[list[str]]:
        """The rows that have such columns, in microseconds."""
        return [
            [f"{side}, {name}"]
            + [f"{lower_quartile(found[side, (name, c)]) / operations * 1e6:,.1f}" for c in columns]
            for side, name in names
            if (side, (name, columns[0])) in found
        ]

    print(f"{who}; lower quartiles of {rounds} rounds\n")
    sizes = SMALL, MIDDLE, LARGE
    print_table(
        "CPU µs of all threads a train step, by (batch, width)", ["step", *sizes], times(sizes, 1)
    )
    print()
    print_table(
        f"CPU µs an operation on {tape_peers.ELEMENTS} elements, in a chain of {OPERATIONS}",
        ["operation", *WAYS],
        times(WAYS, OPERATIONS),
    )
    print()
    ratios = []
    for name, (side, other), column, limit in LIMITS:
        if (side, (other, column)) not in found:
            continue
        pair = found[OURS, (name, column)], found[side, (other, column)]
        wall, cpu = ratio(*pair, 0), ratio(*pair, 1)
        # Of the two the one that other processes do not decide.
        kept = "yes" if cpu <= limit else f"no, {cpu / limit:.2f} × the limit"
        cells = [f"{side}, {other}", f"{wall:.3f}", f"{cpu:.3f}", f"{limit}", kept]
        ratios.append([f"{name}, {column}", *cells])
    print_table(
        "Medians of the rounds' ratios",
        ["ours", "theirs", "time", "CPU time", "limit", "kept"],
        ratios,
    )


if __name__ == "__main__":
    main()
