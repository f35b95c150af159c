"""A process that has none of a function's code runs and differentiates it as the original."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measure import measure, measure_on_tape

import tracegrad as tg
from tracegrad import save

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("compiled_fully")]

ROOT = Path(__file__).parents[2]
X = np.linspace(-1.0, 2.0, 6, dtype=np.float32).reshape(2, 3)

# JAX compiles where an entry of its cache is still being written by another process.
UNREADABLE = "ignore:Error reading persistent compilation cache entry"


@tg.custom_gradient
def wrong(x):  # on purpose: nobody could find this rule in the program
    return x * x, lambda dy: dy * (7 * jnp.cos(x))


@tg.custom_gradient
def wrong_twice(x):
    @tg.custom_gradient
    def first(x):
        return -1.1 * x, lambda dy: -2.1 * dy * x

    return x + 10, lambda dy: dy * first(x)


@jax.custom_vjp
def of_jax(x, n):
    return x * n


of_jax.defvjp(lambda x, n: (x * n, (x, n)), lambda kept, ct: (3 * ct * kept[0], None))


@jax.custom_jvp
def forward_rule(x):
    return jnp.sin(x)


forward_rule.defjvp(lambda primals, tangents: (jnp.sin(*primals), 5 * primals[0] * tangents[0]))


@tg.recompute_grad
def recomputed(x):
    return jnp.tanh(wrong(x)) * x


@tg.grad_pass_through
def rounded(x):
    return jnp.round(4 * x) / 4


def annotations(x, y):
    return {
        "wrong": wrong(x),
        "twice": wrong_twice(x) ** 2,
        "stopped": (tg.stop_gradient(x) * 3, x * tg.stop_gradient(y)),
        "recomputed": recomputed(x),
        "rounded": rounded(x) * y,
        "jax": of_jax(x, 2) + forward_rule(y),
        "unused": None,
    }


def control_flow(x, n):
    def body(carry, row):
        carry = jnp.where(row > 0, wrong(carry) * row, carry)
        return carry, carry + row

    last, rows = jax.lax.scan(body, x[0], x)
    return jax.lax.cond(jnp.sum(x) > n, wrong, lambda z: z**3, last), rows


weight = tg.Variable(np.array([0.5, -2.0, 1.5], np.float32), name="weight")
calls = tg.Variable(0, trainable=False, name="calls")


@tg.trace
def with_variables(x):
    calls.assign_add(1)
    return jnp.sum(wrong(x * weight.value), axis=-1), calls.value


FUNCTIONS = {
    "annotations": (annotations, [X, np.float32(0.7)]),
    "control_flow": (control_flow, [X, np.float32(1.0)]),
    "with_variables": (with_variables, [X]),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a fresh process measures of the functions above, saved."""
    folder = tmp_path_factory.mktemp("fresh")
    b, n = jax.export.symbolic_shape("b, n")
    specs = {
        "annotations": [jax.ShapeDtypeStruct((b, n), "float32"), np.float32(0.7)],
        "control_flow": [X, np.float32(1.0)],
        "with_variables": [jax.ShapeDtypeStruct((b, 3), "float32")],
    }
    weight.assign([0.5, -2.0, 1.5])
    calls.assign(0)
    saved = {name: (fun, specs[name]) for name, (fun, _) in FUNCTIONS.items()}
    loops = {"control_flow": saved.pop("control_flow")}
    save(saved, folder / "functions.tracegrad", gradient_order=2)
    save(loops, folder / "loops.tracegrad")
    arrays = {
        f"{name}/{i}": arg for name, (_, args) in FUNCTIONS.items() for i, arg in enumerate(args)
    }
    np.savez(folder / "arguments.npz", **arrays)
    script = Path(__file__).with_name("measure.py")
    files = ["arguments.npz", "results.npz", "functions.tracegrad", "loops.tracegrad"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", UNREADABLE, str(script), *files],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    with np.load(folder / "results.npz") as results:
        return {key: results[key] for key in results.files}


def of(measured, name):
    return {k.split("/", 1)[1]: v for k, v in measured.items() if k.startswith(f"{name}/")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_fresh_process_finds_the_same_results_and_gradients(name, measured):
    fun, args = FUNCTIONS[name]
    weight.assign([0.5, -2.0, 1.5])
    calls.assign(0)
    variables = [calls, weight] if name == "with_variables" else []
    fun, args = tg.trace(fun) if not variables else fun, list(map(jnp.asarray, args))
    order = 1 if name == "control_flow" else 2
    expected = measure(fun, args, order)
    if order > 1:
        expected |= measure_on_tape(fun, args, variables)
    found = of(measured, name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith("['result']"):
            np.testing.assert_array_equal(found[key], value, err_msg=key)
        else:
            np.testing.assert_allclose(found[key], value, rtol=2e-6, atol=1e-6, err_msg=key)


def test_the_rules_themselves_were_saved_and_not_the_derivatives(measured):
    found, (y, _) = of(measured, "with_variables"), with_variables(X)
    w = np.array([0.5, -2.0, 1.5], np.float32)
    of_rows = 2 * np.asarray(y)[:, None]  # of the sum of squares, with respect to each row's sum
    expected = of_rows * 7 * np.cos(X * w) * w
    np.testing.assert_allclose(found["['gradient'][0]"], expected, rtol=1e-5)
    assert np.isnan(found["tape 1 0"])  # the count has no gradient
    np.testing.assert_allclose(found["tape 0 2"], np.sum(7 * np.cos(X * w) * X, axis=0), rtol=1e-5)
