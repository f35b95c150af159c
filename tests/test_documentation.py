"""The README's programs do what the README says, and the reference leaves nothing out."""

from __future__ import annotations

import contextlib
import inspect
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


def test_the_programs_of_the_readme_do_what_it_says():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n") <= 150
    alone, listing, training, annotated = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    assert len(list(filter(None, alone.splitlines()))) == 5
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(alone, "example.py", "exec"), {"__name__": "__main__"})
    assert "■ stop_gradient" in output.getvalue()  # in the graph
    assert "✗ stop_gradient" in output.getvalue()  # in the explanation

    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(listing, "example.py", "exec"), namespace)
    fitted, plain, by_hand = (nnx.clone(namespace["model"]) for _ in range(3))
    with contextlib.redirect_stdout(io.StringIO()):
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
    w, x = jnp.full((8, 2), 0.3), jnp.ones((4, 8))
    expected = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(jnp.full((8, 2), 0.25))
    gradient = jax.grad(lambda w: jnp.sum(namespace["block"](w, x)))(w)
    assert jnp.allclose(gradient, expected, atol=1e-5)


def public_names() -> dict[str, object]:
    return {
        name: value
        for name in dir(tracegrad)
        if not name.startswith("_")
        and not isinstance(value := getattr(tracegrad, name), types.ModuleType)
    } | {"match": tracegrad.match, "rules": tracegrad.rules}


def test_the_reference_has_every_public_name():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    reference = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    documented = set(re.findall(r"^::: tracegrad\.(\w+)$", reference, re.M))
    assert public_names().keys() - documented == set()


def test_the_reference_has_every_rule():
    rules = {
        name
        for name, value in vars(tracegrad.rules).items()
        if getattr(value, "__annotations__", {}).get("return") == "MatchRule"
    }
    page = (ROOT / "docs" / "reference" / "surgery.md").read_text(encoding="utf-8")
    listed = page.partition("::: tracegrad.rules\n")[2].partition(":::")[0]
    assert set(re.findall(r"^ +- (\w+)$", listed, re.M)) == rules


def test_every_public_name_has_an_example_that_runs():
    """In its docstring, or, of a module, in those of its functions."""
    without = {
        name for name, value in public_names().items() if ">>>" not in (inspect.getdoc(value) or "")
    }
    assert without == set()
