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


def straight_through(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


def trained(step, model, x, y):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for _ in range(3):
        step(model, optimizer, x, y)
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def test_the_programs_of_the_readme_print_what_it_shows_and_do_what_it_says():
    """What they print is written anew by `docs/refresh.py README.md`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n") <= 150
    blocks = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", readme, re.M | re.S)
    assert len(blocks) == readme.count("```python") == 3
    names: dict[str, object] = {"__name__": "__main__"}
    for program, printed in blocks:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(program, "example.py", "exec"), names)
        assert output.getvalue() == printed
    view = tracegrad.show(names["loss"], names["Model"](nnx.Rngs(0)), names["x"], names["y"])
    picture = ROOT / "docs" / "pictures" / "readme.svg"
    assert picture.read_text(encoding="utf-8") == view.to_svg()  # docs/pictures/draw.py writes it

    class ByHand(names["Model"]):
        def __call__(self, x):
            return self.decoder(straight_through(nnx.tanh(self.encoder(x))))

    x, y = names["x"], names["y"]
    plain_step = nnx.jit(names["train_step"])
    edited = trained(names["step"], names["Model"](nnx.Rngs(0)), x, y)
    by_hand = trained(plain_step, ByHand(nnx.Rngs(0)), x, y)
    plain = trained(plain_step, names["Model"](nnx.Rngs(0)), x, y)
    assert all(jnp.allclose(a, b, atol=1e-6) for a, b in zip(edited, by_hand, strict=True))
    assert not all(jnp.allclose(a, b, atol=1e-6) for a, b in zip(edited, plain, strict=True))


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
