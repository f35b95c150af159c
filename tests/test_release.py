"""What somebody meets who installs the package: its version, its types, its rooms, its errors."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tracegrad

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8"
    )


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.search(r"^## (\d\S+), (20\d\d-\d\d-\d\d)$", changes, re.M)
    cited = re.search(r"^version: (\S+)\ndate-released: (\S+)$", citation, re.M)
    assert dated.groups() == cited.groups()
    assert dated[1] == tracegrad.__version__


def test_the_command_line_says_which_versions_there_are(capsys):
    from tracegrad.__main__ import main

    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.startswith(f"tracegrad {tracegrad.__version__}, JAX ")


LATER = """
import importlib
import pkgutil
import sys
import jax

traced = []

@jax.jit
def compiled_before(x):
    traced.append(x)
    return x

import tracegrad as tg  # it makes contexts of JAX

compiled_before(1.0)

def rooms():
    return {name.split(".")[1] for name in sys.modules if name.startswith("tracegrad.")}

late = {"annotations", "differentiation", "insight", "planning", "rewriting", "saving", "tape"}
assert not late & rooms(), rooms()
assert {"explain", "grad", "save", "plan_recompute", "rules", "match"} <= set(dir(tg))
assert not (late | {"ir", "tracing", "variables", "_jax"}) & set(dir(tg))  # nobody types those
budget = tg.trace(lambda x: x, memory_budget="2GiB")  # the engine brings what it needs
assert "planning" in rooms() and "insight" not in rooms(), rooms()
of_saving = {name.split(".")[2] for name in sys.modules if name.startswith("tracegrad.saving.")}
assert not of_saving, of_saving
with tg.GradientTape() as tape:
    pass

@jax.jit
def asking_inside(x):
    assert tg.planning.BudgetTooSmall and tg.explain and tg.save
    return [getattr(tg, name) for name in {*dir(tg), *late}] and x

@jax.jit
def importing_inside(x):
    files = pkgutil.walk_packages(tg.__path__, "tracegrad.")
    return [importlib.import_module(file.name) for file in files] and x

with jax.checking_leaks():
    asking_inside(1.0)
    importing_inside(1.0)
assert late <= rooms() and "tqdm" not in sys.modules  # nothing has taken long
assert "scipy.sparse.csgraph" not in sys.modules  # nothing was planned, and it takes 14 MiB
compiled_before(1.0)
assert len(traced) == 1, traced
try:
    tg.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
"""


def test_what_tracing_does_not_need_is_imported_when_it_is_asked_for_and_compiles_nothing_anew():
    done = run("-c", LATER)
    assert done.returncode == 0, done.stderr


def test_type_checkers_are_told_of_what_is_imported_when_it_is_asked_for():
    source = (ROOT / "tracegrad" / "__init__.py").read_text(encoding="utf-8")
    told = dict(map(reversed, re.findall(r"^    from (\S+) import (\w+) as \2$", source, re.M)))
    files = {name: place.split(":")[0] for name, place in tracegrad._PLACES.items()}
    assert told.keys() == files.keys() - set(files.values())  # these are the rooms
    for name, file in told.items():
        assert getattr(importlib.import_module(file), name) is getattr(tracegrad, name), name


@pytest.mark.slow
def test_a_type_checker_sees_from_outside_what_the_functions_take_and_return(tmp_path):
    """In `.ci/outside.py`, which `.ci/release` gives to pyright as well."""
    for name in ("outside.py", "outside.ini"):
        shutil.copy(ROOT / ".ci" / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "outside.ini", "outside.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr


WITHOUT = """
import sys

missing = "flatbuffers msgspec safetensors orbax matplotlib tqdm rich flax equinox optax"
sys.modules.update(dict.fromkeys(missing.split()))  # to import one of them fails
import jax, jax.numpy as jnp, numpy as np
import tracegrad as tg

def loss(w, x):
    return jnp.mean(jax.nn.relu(x @ w) ** 2)

arguments = np.ones((3, 2), "float32"), np.ones((4, 3), "float32")
print(tg.graph(loss, *arguments))
assert not tg.explain(loss, *arguments).problems

def deep(w, x):
    for _ in range(8):
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)

def plan():
    return tg.plan_recompute(deep, *shapes, memory_budget="60%", measure=False)

def step(w, x):
    return jax.grad(deep)(w, x)

shapes = jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((999, 4), "float32")

def error_of(fun):
    try:
        fun()
    except ImportError as error:
        return str(error)

assert plan().is_needed
assert tg.trace(step, memory_budget="60%").lower(*shapes)
print(error_of(lambda: tg.save(loss, "/tmp/none.tracegrad", list(arguments))))
print(error_of(lambda: tg.save_variables({"w": tg.Variable(1.0)}, "/tmp/none")))
print(error_of(plan().plot))

from tracegrad.__main__ import main

sys.stderr = sys.stdout
assert main(["inspect", "/tmp/none.tracegrad"]) == 2
main(["--version"])
"""


def test_without_the_extras_the_core_works_and_errors_name_what_is_missing():
    done = run("-c", WITHOUT)
    assert done.returncode == 0, done.stderr
    *graph, save, variables, plot, inspect, version = done.stdout.splitlines()
    assert graph[0] == "loss(w: f32[3,2], x: f32[4,3]) -> f32[]"
    assert "pip install 'tracegrad[save]'" in save
    assert "pip install 'tracegrad[save]'" in variables
    assert "pip install matplotlib" in plot
    assert "pip install 'tracegrad[save]'" in inspect
    assert version.startswith(f"tracegrad {tracegrad.__version__}, JAX ")
