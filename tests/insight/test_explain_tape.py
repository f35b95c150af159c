"""What cuts a gradient off on a tape, beyond what a function has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.insight import explain_tape

X = jnp.array([0.3, 1.2])


def cause(tape, target, source):
    """The one cause, and whether `explain_tape` agrees with the gradient on what is connected."""
    explanation = explain_tape(tape, target, source)
    assert explanation.sources[0].connected == (tape.gradient(target, source) is not None)
    (finding,) = explanation.findings
    return finding


@pytest.fixture
def tape():
    return tg.GradientTape(persistent=True)


def test_a_healthy_tape_has_the_norms_of_its_gradients(tape):
    v = tg.Variable(2.0, name="scale")
    with tape:
        tape.watch(X)
        middle = jnp.sin(X)
        y = jnp.sum(jax.jit(lambda m: m**2)(middle) * v)
    explanation = explain_tape(tape, y, {"x": X, "middle": middle, "v": v})
    assert explanation.findings == ()
    gradients = tape.gradient(y, {"x": X, "middle": middle, "v.scale": v})
    for path, gradient in gradients.items():
        np.testing.assert_allclose(
            explanation[path].norm, jnp.linalg.norm(jnp.ravel(gradient)), rtol=1e-5
        )


V, FROZEN = tg.Variable(2.0), tg.Variable(2.0, trainable=False)
BEFORE, VALUE = jnp.sum(X * 2), V.value


def read_while_it_does_not_record(tape):
    with tape.stop_recording():
        y = V * 2.0
    return y * 3.0


def of_numpy(tape):
    return tg.numpy_function(np.sin, X, X.dtype)


@pytest.mark.parametrize(
    ("compute", "source", "expected", "words"),
    [
        (lambda tape: jnp.sum(X * 2), jnp.array([0.3, 1.2]), "not watched", "not a copy"),
        (lambda tape: jnp.sum(X * VALUE), V, "not watched", "while the tape records"),
        (lambda tape: jnp.sum(X * FROZEN), FROZEN, "not watched", "not trainable"),
        (read_while_it_does_not_record, V, "not watched", "while the tape records"),
        (lambda tape: BEFORE, X, "unused", "before the block"),
        (lambda tape: jnp.asarray(np.sum(np.asarray(X))), X, "unused", "NumPy"),
        (of_numpy, X, "unused", "without `grad=`"),
    ],
)
def test_what_a_tape_does_not_follow_is_told(tape, compute, source, expected, words):
    with tape:
        tape.watch(X)
        y = compute(tape)
    finding = cause(tape, y, source)
    assert finding.cause == expected
    assert words in finding.what + finding.cure


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (lambda x: x.astype(int) * 1.5, "cast"),
        (lambda x: jnp.where(x > 1, 1.0, 2.0), "comparison"),
        (lambda x: jnp.argmax(x) * 1.5, "argmax"),
        (jnp.round, "rounding"),
        (lambda x: tg.stop_gradient(x) * 2, "stop_gradient"),
    ],
)
def test_what_cuts_inside_of_the_block_is_named_with_its_line(tape, cut, expected):
    with tape:
        tape.watch(X)
        y = jnp.sum(cut(X))
    finding = cause(tape, y, X)
    assert finding.cause == expected
    assert finding.origin.place.startswith("test_explain_tape.py:")


def test_the_line_of_a_nan(tape):
    with tape:
        tape.watch(X)
        zero = X - X
        y = jnp.sum(jnp.sqrt(zero))
    (finding,) = explain_tape(tape, y, X).findings
    assert finding.cause == "Inf in the reverse pass"
    assert finding.operands == (0.0,)
    source = test_the_line_of_a_nan.__code__
    assert finding.origin.line == source.co_firstlineno + 4


def test_a_tape_that_is_used_up_says_so():
    with tg.GradientTape() as tape:
        tape.watch(X)
        y = jnp.sum(X)
    tape.gradient(y, X)
    with pytest.raises(RuntimeError, match="used up"):
        explain_tape(tape, y, X)
