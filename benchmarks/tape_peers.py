"""The side of the peers in `tape_steps.py`: the same steps in TensorFlow and in PyTorch.

``python tape_peers.py tensorflow`` (or ``torch``) stands by in a process of its own, and times what
it is asked to over a pipe. Without JAX: the interpreter is one where only the peer is installed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

SIZES = ((8, 16), (64, 64), (256, 512))  # (batch, width)
LAYERS = 3
RATE = 0.01
OPERATIONS = 100  # in the chain whose operations are timed
ELEMENTS = 16  # in each of its arrays

# A function to time, and one that waits until what it did is done, and gives a number to compare.
Row = tuple[Callable[[], Any], Callable[[Any], float]]
# How each is made when it is first asked for: by the step and its size, or by the operation of a
# chain and the way in which it runs.
Rows = dict[tuple[str, str], Callable[[], Row]]
WAYS = ("eager", "recorded", "with gradient")


def batch_and_parameters(size: tuple[int, int]) -> tuple[list[Any], list[Any]]:
    """The arrays that every side starts from: inputs, targets; weights and biases in turn."""
    batch, width = size
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    parameters = []
    for _ in range(LAYERS):
        parameters += [normal(width, width, scale=width**-0.5), np.zeros(width, np.float32)]
    return [normal(batch, width), normal(batch, width)], parameters


def chain_start() -> tuple[Any, Any]:
    """The array that a chain of multiplications starts from, and the factor."""
    return np.linspace(0.5, 1.5, ELEMENTS, dtype=np.float32), np.full(ELEMENTS, 1.01, np.float32)


def time_row(row: Row, calls: int) -> tuple[float, float, float]:
    """Seconds a call, one after the other until the last is done, and of CPU time in all threads;
    and the last one's number."""
    call, finish = row
    finish(call())  # whatever ran before in other processes has left the caches cold
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        result = call()
    number = finish(result)
    return (time.perf_counter() - start) / calls, (time.process_time() - cpu) / calls, number


# ------------------------------------------------------------------------------------- TensorFlow


def tensorflow_rows() -> Rows:
    import tensorflow as tf

    def loss(variables, x, y):
        for i in range(0, len(variables), 2):
            x = x @ variables[i] + variables[i + 1]
            if i + 2 < len(variables):
                x = tf.nn.relu(x)
        return tf.reduce_mean(tf.square(x - y))

    def train_step(size, **compiled):
        (x, y), parameters = batch_and_parameters(size)
        x, y = tf.constant(x), tf.constant(y)
        variables = [tf.Variable(p) for p in parameters]

        def step(x, y):
            with tf.GradientTape() as tape:
                value = loss(variables, x, y)
            for v, g in zip(variables, tape.gradient(value, variables), strict=True):
                v.assign_sub(RATE * g)
            return value

        if compiled:
            step = tf.function(step, **compiled)
        return lambda: step(x, y), float

    def chain(multiply, way):
        x, c = map(tf.constant, chain_start())

        def run(x):
            for _ in range(OPERATIONS):
                x = multiply(x, c)
            return x

        def under_tape():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = run(x)
            return tape.gradient(y, x) if way == "with gradient" else y

        return (lambda: run(x)) if way == "eager" else under_tape, lambda result: float(result[0])

    steps = {
        "eager tape": {},
        "tf.function": {"jit_compile": False},
        "tf.function(jit_compile=True)": {"jit_compile": True},
    }
    multiplications = {
        "x * c": lambda x, c: x * c,
        "mul(x, c)": lambda x, c: tf.raw_ops.Mul(x=x, y=c),
    }
    return {
        **{
            (name, str(size)): partial(train_step, size, **options)
            for name, options in steps.items()
            for size in SIZES
        },
        **{(n, way): partial(chain, f, way) for n, f in multiplications.items() for way in WAYS},
    }


# ---------------------------------------------------------------------------------------- PyTorch


def torch_rows() -> Rows:
    import torch
    from torch.nn import functional as F

    def loss(parameters, x, y):
        for i in range(0, len(parameters), 2):
            x = torch.addmm(parameters[i + 1], x, parameters[i])  # as in torch.nn.Linear
            if i + 2 < len(parameters):
                x = F.relu(x)
        return F.mse_loss(x, y)

    def train_step(size):
        (x, y), parameters = batch_and_parameters(size)
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        parameters = [torch.from_numpy(p).requires_grad_() for p in parameters]

        def step():
            value = loss(parameters, x, y)
            value.backward()
            with torch.no_grad():
                for p in parameters:
                    p.sub_(p.grad, alpha=RATE)
                    p.grad = None
            return value

        return step, lambda value: float(value.detach())

    def chain(multiply, way):
        x, c = map(torch.from_numpy, chain_start())
        x.requires_grad_(way != "eager")

        def run():
            y = x
            for _ in range(OPERATIONS):
                y = multiply(y, c)
            return torch.autograd.grad(y.sum(), x)[0] if way == "with gradient" else y

        return run, lambda result: float(result.detach()[0])

    multiplications = {"x * c": lambda x, c: x * c, "mul(x, c)": torch.mul}
    return {
        **{("eager", str(size)): partial(train_step, size) for size in SIZES},
        **{(n, way): partial(chain, f, way) for n, f in multiplications.items() for way in WAYS},
    }


# ------------------------------------------------------------------------------------------- pipe


def main() -> None:
    rows = {"tensorflow": tensorflow_rows, "torch": torch_rows}[sys.argv[1]]()
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply
    made: dict[tuple[str, str], Row] = {}

    def reply(value: Any) -> None:
        print(json.dumps(value), file=replies, flush=True)

    reply([sys.modules[sys.argv[1]].__version__, list(rows)])
    for line in sys.stdin:
        *key, calls = json.loads(line)
        row = tuple(key)
        if row not in made:
            made[row] = rows[row]()
        reply(time_row(made[row], calls))


if __name__ == "__main__":
    main()
