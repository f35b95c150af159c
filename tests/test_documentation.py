"""The README's listing prints what the README says, and the reference leaves nothing out."""

from __future__ import annotations

import contextlib
import io
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp

import tracegrad

ROOT = Path(__file__).parents[1]


def test_the_readme_prints_what_it_says():
    blocks = re.findall(
        r"^```(python|text)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert [language for language, _ in blocks] == ["python", "text", "python", "python"]
    (_, listing), (_, printed), (_, training), (_, surgery) = blocks
    namespace: dict[str, object] = {"__name__": "__main__"}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(listing, "example.py", "exec"), namespace)
    assert output.getvalue() == printed

    exec(compile(training, "example.py", "exec"), namespace)
    gradients = namespace["gradients"]
    assert not jnp.any(gradients["first"])  # not selected
    assert jnp.any(gradients["last"])

    exec(compile(surgery, "example.py", "exec"), namespace)
    plain = jax.grad(lambda x: namespace["model"](x)[0])(jnp.ones(8))
    # A positive cotangent arrives at some units only; the others' share is left out.
    model = namespace["model"]
    hidden, out = model.layers[0].kernel.get_value(), model.layers[2].kernel.get_value()[:, 0]
    arrives = (jnp.ones(8) @ hidden > 0) & (out > 0)
    assert jnp.allclose(namespace["saliency"], hidden @ jnp.where(arrives, out, 0), atol=1e-6)
    assert not jnp.allclose(namespace["saliency"], plain)


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs" / "reference.md").read_text()
    documented = set(re.findall(r"^::: tracegrad\.(\w+)$", reference, re.M))
    public = {
        name
        for name, value in vars(tracegrad).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - documented == set()
