"""`explain` finds where a NaN began also in programs so long that they are measured run by run."""

from __future__ import annotations

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tracegrad.insight import explain

X = jnp.linspace(0.1, 0.9, 6).reshape(2, 3)


def layers(w, x, count):
    for k in range(count):
        x = x + jnp.tanh(x @ w) * jnp.cos(x * (k + 1)) / (1.0 + jnp.exp(-x))
    return x


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if text in line)


def square_root(x):
    return x + jnp.sqrt(jnp.maximum(x - 9.0, 0.0))


def logarithm(x):
    return x + jnp.log(jnp.minimum(x, 1.0) - 1.0)


# The mistake is in the first, in a middle, and in the last run; there are layers in several.
@pytest.mark.parametrize(("place", "is_jitted"), [(0, False), (15, False), (15, True), (30, False)])
@pytest.mark.parametrize(
    ("mistake", "cause", "operation", "words"),
    [
        (square_root, "Inf in the reverse pass", "sqrt", "the derivative of sqrt at 0 "),
        (logarithm, "NaN in the forward pass", "log", "log makes NaN in the forward pass of -"),
    ],
)
def test_a_mistake_is_found_in_any_run(mistake, cause, operation, words, place, is_jitted):
    def model(w, x):
        y = layers(w, mistake(layers(w, x, place)), 30 - place)
        return jnp.sum(y**2) + jnp.sum(x)  # the last run gives x a finite cotangent

    loss = jax.jit(model) if is_jitted else model
    arguments = 0.1 * jnp.eye(3), X
    found = explain(loss, *arguments, wrt=(0, 1))
    worst = found.findings[0]
    gradients = jax.grad(loss, (0, 1))(*arguments)
    bad = [int(jnp.sum(~jnp.isfinite(gradient))) for gradient in gradients]
    assert [report.nans + report.infs for report in found.sources] == bad
    assert len(worst.sources) == sum(count > 0 for count in bad)
    assert (worst.cause, worst.operation) == (cause, operation)
    assert worst.what.startswith(words)
    assert worst.origin.line == line_of(mistake, "return")


def test_an_inf_that_is_made_many_runs_before_a_product_is_named():
    def loss(w, x):
        inverse = 1.0 / (x - x)
        h = layers(w, x, 30)
        return jnp.sum(jnp.where(x > 9.0, h * inverse, h))

    worst = explain(loss, 0.1 * jnp.eye(3), X).findings[0]
    assert worst.cause == "NaN in the reverse pass"
    assert worst.origin.line == line_of(loss, "jnp.where")
    place = f"{Path(__file__).name}:{line_of(loss, '1.0 /')}"
    assert f"div at {place} made the Inf" in worst.what


def test_the_range_of_an_operand_is_that_of_a_loop_many_runs_before():
    def loss(w, x):
        total, _ = jax.lax.scan(lambda c, row: (c - jnp.sum(row), None), 0.0, x)
        h = layers(w, x, 30)
        return jnp.sum(h) * jnp.log(total)

    (finding,) = explain(loss, 0.1 * jnp.eye(3), X).problems
    assert (finding.cause, finding.operation) == ("NaN in the forward pass", "log")
    assert finding.what == "log makes NaN in the forward pass of -3"


def test_a_nan_beside_the_result_hides_no_nan_of_the_reverse_pass():
    def loss(x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0)), jnp.log(-1.0 - x**2)

    (worst,) = explain(loss, jnp.arange(3.0), has_aux=True).findings
    assert (worst.cause, worst.operation) == ("NaN in the reverse pass", "sqrt")
    assert worst.origin.line == line_of(loss, "jnp.sqrt")


def test_a_nan_beside_a_gradient_of_zeros_is_found_in_one_more_run():
    seen = []

    def loss(w, x):
        jax.debug.callback(lambda x: seen.append(1), x[0, 0])
        return jnp.sum(square_root(x)) + jnp.sum(jax.nn.relu(x @ w["dead"] - 99.0))

    found = explain(loss, {"dead": jnp.eye(3)}, X, wrt=(0, 1))
    jax.effects_barrier()
    assert {finding.cause for finding in found.problems} == {
        "Inf in the reverse pass",
        "dead units",
    }
    assert len(seen) == 2
