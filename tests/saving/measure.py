"""What is compared of a function and of what was saved of it: results and two orders of gradients.

Run as a script, in a process that has none of the function's code, it measures what is in a file:
``python measure.py ARGUMENTS RESULTS FILE...``, where ARGUMENTS and RESULTS are ``.npz`` files.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import GradientTape, trace


def measure(fun, args, order=2):
    """Results, gradients of the sum of their squares, and of that of the squares of those."""

    def loss(args):
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(fun(*args)))

    def slope(args):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(args)))

    found = {"result": fun(*args)}
    if order > 0:
        found["gradient"] = trace(jax.grad(loss))(args)
    if order > 1:
        found["second"] = trace(jax.grad(slope))(args)
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def measure_on_tape(fun, args, variables):
    """Which gradients a tape finds, and their values."""
    args = [jnp.array(x) for x in args]
    with GradientTape(persistent=True) as tape:
        tape.watch(args)
        results = jax.tree.leaves(fun(*args))
    found = {}
    for i, y in enumerate(results):
        for j, x in enumerate([*args, *variables]):
            gradient = tape.gradient(y, x)
            found[f"tape {i} {j}"] = np.array(np.nan if gradient is None else gradient)
    return found


def arguments_of(name, arrays):
    """The arguments of a function among those of all, called ``name/0`` and so on."""
    count = sum(key.startswith(f"{name}/") for key in arrays)
    return [jnp.asarray(arrays[f"{name}/{i}"]) for i in range(count)]


if __name__ == "__main__":
    from tracegrad import load

    arguments, results, *paths = sys.argv[1:]
    with np.load(arguments) as arrays:
        measured = {}
        for name, fun in [pair for path in paths for pair in load(path).items()]:
            args = arguments_of(name, arrays)
            found = measure(fun, args, fun.gradient_order)
            if fun.gradient_order > 1:
                found |= measure_on_tape(fun, args, fun.variables.values())
            measured |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez(results, **measured)
