"""Files that other versions of JAX wrote are read, or refused with the names of both versions."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad import ArtefactError, load
from tracegrad.saving.inspection import inspect

sys.path.append(str(Path(__file__).parent / "files"))
import write

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("compiled_fully")]

FILES = sorted(write.FOLDER.glob("*.tracegrad"))
RUNNING = jax.__version__
X = {"sizes": np.arange(6, dtype=np.float32).reshape(2, 3), "everything": np.float32([0.5, -2])}


def version(text):
    return tuple(map(int, text.split(".")))


@functools.cache
def measured(name):
    """What the function itself, on its own Variables, gives on the JAX that is running."""
    variables = write.variables()
    fun = tg.trace(write.functions(variables)[name])
    return variables, fun(X[name]), gradients(name, fun)


def gradients(name, fun):
    def loss(x):
        return jnp.sum(jax.tree.leaves(fun(x))[-1 if name == "sizes" else 0] ** 2)

    first = jax.grad(loss)
    return tg.trace(lambda x: (first(x), jax.grad(lambda x: jnp.sum(first(x) ** 2))(x)))(X[name])


def test_each_kind_of_file_is_kept_of_several_versions():
    kinds = {path.name.split("-jax-")[0] for path in FILES}
    assert kinds == {"sizes", "everything"}
    assert len(FILES) >= 2 * len(kinds)


@pytest.mark.accelerator
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_kept_file_loads(path: Path):
    name, written = path.stem.split("-jax-")
    try:
        loaded = load(path)
    except ArtefactError:
        if version(written) <= version(RUNNING):  # only what a newer one wrote may be refused
            raise
        loaded = None
    if loaded is None:
        with pytest.raises(ArtefactError, match=f"JAX {written}, and JAX {RUNNING}") as refused:
            load(path)
        assert refused.value.member.startswith("tracegrad/program/")
        return
    assert inspect(path)["versions"]["jax"] == written
    variables, expected, expected_gradients = measured(name)
    for key, variable in loaded.variables.items():
        assert variable.dtype == variables[key].dtype
        assert variable.trainable == variables[key].trainable
        if key in write.VALUES:
            np.testing.assert_array_equal(variable.numpy(), write.VALUES[key])
        else:
            words = jax.random.key_data(variable.value), jax.random.key_data(variables[key].value)
            np.testing.assert_array_equal(*words)
    assert loaded.platforms == ("cpu", "cuda", "tpu")
    found = loaded(X[name])
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(gradients(name, loaded), expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
