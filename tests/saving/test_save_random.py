"""Random programs, saved and loaded, have the gradients of the originals, and None where they do.

The nightly run is ``pytest --hypothesis-profile=nightly tests/saving/test_save_random.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tracegrad as tg
from tracegrad import load, save

sys.path.append(str(Path(__file__).parents[1]))
from test_random_programs import OPERATIONS, inputs_of, programs_with, run

EXAMPLES = max(4, (settings().max_examples - 50) // 10)  # seconds each


def asked_of(fun, inputs):
    """Gradients of two orders of the first result, and a tape's of all of them."""

    def first(*inputs):
        return fun(*inputs)[0]

    def slope(*inputs):
        return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(first, (0, 1, 2))(*inputs))

    asked = (jax.value_and_grad(first, (0, 1, 2)), jax.grad(slope, (0, 1, 2)))
    found = tg.trace(lambda *inputs: [ask(*inputs) for ask in asked])(*inputs)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(inputs)
        results = fun(*inputs)
    return found, [tape.gradient(result, inputs) for result in results]


@settings(max_examples=EXAMPLES)
@given(st.sampled_from(OPERATIONS).flatmap(programs_with), st.integers(0, 100))
def test_a_random_program_is_the_same_after_loading(tmp_path_factory, program, seed):
    path, inputs = tmp_path_factory.mktemp("random") / "program", inputs_of(seed, jnp.float32)

    def fun(*inputs):
        return jnp.sum(run(program, inputs)) * 1.0, run(program[:-1], inputs) * 1.0

    found, gradients = asked_of(tg.trace(fun), inputs)
    assume(all(jnp.all(jnp.abs(x) < 1e4) for x in jax.tree.leaves(found)))  # and neither NaN
    save(fun, path, inputs, gradient_order=2)
    loaded = load(path)
    for got, want in zip(loaded(*inputs), tg.trace(fun)(*inputs), strict=True):
        np.testing.assert_array_equal(got, want)
    again, gradients_again = asked_of(loaded, inputs)
    none = lambda tree: jax.tree.map(lambda g: g is None, tree, is_leaf=lambda g: g is None)  # noqa: E731
    assert none(gradients_again) == none(gradients)
    pairs = zip(*map(jax.tree.leaves, ([again, gradients_again], [found, gradients])), strict=True)
    for got, want in pairs:
        scale = max(1.0, float(jnp.max(jnp.abs(want), initial=0)))
        np.testing.assert_allclose(got, want, 2e-4, 2e-4 * scale)
