"""Writes the artefacts that are kept here, with the JAX that is running.

``python tests/saving/files/write.py`` for each supported version, when the format gets a new
version; files of earlier ones stay. The functions are what `test_load_kept_files` compares with.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import tracegrad as tg
from tracegrad import save

FOLDER = Path(__file__).parent
VALUES = {
    "half": np.array([[0.5, -1.5, 3.0]], jnp.bfloat16),
    "small": np.array([1.0, -2.0], jnp.float8_e4m3fn),
    "tiny": np.array([-8, 7], jnp.int4),
    "flags": np.array([True, False]),
    "turns": np.array([1 + 2j, -3.5j], np.complex64),
    "weight": np.array([0.5, -2.0, 1.5], np.float32),
    "nothing": np.zeros((0, 3), np.float32),
    "count": np.array(3, np.int32),
}


def variables():
    """A Variable of each of the dtypes that are stored in ways of their own."""
    made = {
        name: tg.Variable(value, name=name, trainable=name not in ("count", "flags"))
        for name, value in VALUES.items()
    }
    made["key"] = tg.Variable(jax.random.key(7), name="key", trainable=False)
    return made


@tg.custom_gradient
def wrong(x):  # on purpose
    return x * x, lambda dy: dy * (3.0 * x + 1.0)


def functions(v):
    """The functions on such Variables; what they compute is exact in float32, or nearly."""

    def sizes(x):  # for any number of rows
        v["count"].assign_add(1)
        return {"y": jnp.sum(wrong(x * v["weight"].value), axis=-1), "n": v["count"].value}

    def everything(x):  # for one size
        used = [jnp.sum(v[name].value.astype(jnp.float32)) for name in ("half", "small", "tiny")]
        used += [jnp.abs(v["turns"].value[1]), jnp.sum(v["nothing"].value)]
        picked = jnp.where(v["flags"].value[0], x, -x)
        noise = jax.random.randint(v["key"].value, (2,), 0, 100)
        return wrong(picked) * sum(used), (noise, None)

    return {"sizes": sizes, "everything": everything}


def specs():
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 3"), "float32")
    return {"sizes": [rows], "everything": [jax.ShapeDtypeStruct((2,), "float32")]}


if __name__ == "__main__":
    for name, fun in functions(variables()).items():
        path = FOLDER / f"{name}-jax-{jax.__version__}.tracegrad"
        save(fun, path, specs()[name], gradient_order=2, platforms=("cpu", "cuda", "tpu"))
        print(path.name, path.stat().st_size, "bytes")
