"""The README's listing prints what the README says, and the reference leaves nothing out."""

from __future__ import annotations

import contextlib
import io
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import tracegrad

ROOT = Path(__file__).parents[1]


@jax.custom_vjp
def only_positive(x):
    return x


only_positive.defvjp(lambda x: (x, None), lambda _, dy: (jnp.maximum(dy, 0),))


def same_weights(a, b):
    pairs = zip(*(jax.tree.leaves(nnx.state(model)) for model in (a, b)), strict=True)
    return all(jnp.allclose(p, q, atol=1e-6) for p, q in pairs)


def test_the_readme_prints_what_it_says():
    blocks = re.findall(
        r"^```(python|text)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert [language for language, _ in blocks] == ["python", "text", "python", "python"]
    (_, listing), (_, printed), (_, training), (_, annotated) = blocks
    namespace: dict[str, object] = {"__name__": "__main__"}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(listing, "example.py", "exec"), namespace)
    assert output.getvalue() == printed

    fitted, plain, by_hand = (nnx.clone(namespace["model"]) for _ in range(3))
    exec(compile(training, "example.py", "exec"), namespace)
    by_hand.last = nnx.Sequential(only_positive, by_hand.last)
    plain_step = nnx.jit(namespace["train_step"])
    steps = {fitted: namespace["fitted_step"], plain: plain_step, by_hand: plain_step}
    for model, step in steps.items():
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        step(model, optimizer, namespace["x"], namespace["y"])
    assert same_weights(namespace["model"], by_hand)
    assert same_weights(fitted, plain)
    assert not same_weights(by_hand, plain)

    exec(compile(annotated, "example.py", "exec"), namespace)
    gradients = namespace["gradients"]
    assert not jnp.any(gradients["first"])  # not selected
    assert jnp.any(gradients["last"])


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs" / "reference.md").read_text()
    documented = set(re.findall(r"^::: tracegrad\.(\w+)$", reference, re.M))
    public = {
        name
        for name, value in vars(tracegrad).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - documented == set()
