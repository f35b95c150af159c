"""The gradients of the TensorFlow-flavoured half, against what TensorFlow gave for them.

TensorFlow's results are in ``tensorflow.json``, recorded by ``record.py``. Where tracegrad decided
otherwise, ``statements`` has the result that it must have, and the reason.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from statements import STATEMENTS, plain

import tracegrad as tg
from tracegrad import numpy_function

RECORDED = json.loads(Path(__file__).with_name("tensorflow.json").read_text())["results"]

FUNCTIONS = "sum reshape sin cosh exp log floor ceil round sign real imag"


def warnings_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return len(caught)


def to_dense(slices, dtype=None, run=True):
    if run:
        return slices.to_dense(dtype)
    return jax.eval_shape(lambda: slices.to_dense(dtype))


def tracegrad_namespace():
    """What the programs use, of tracegrad and `jax.numpy`."""
    lib = SimpleNamespace(
        constant=lambda value, dtype="float32": jnp.array(value, dtype),
        function=tg.trace,
        sparse={"sparse": True},
        dense_shape=lambda shape: shape,
        to_dense=to_dense,
        warnings_of=warnings_of,
        has_scope=lambda fun, x, name: f"# {name}" in str(tg.graph(fun, x)),
        name_of=lambda variable: variable.name,
        tick=lambda runs: jax.debug.callback(lambda: runs.append(None)),
        finish=jax.effects_barrier,
        cond=lambda p, yes, no: jax.lax.cond(p, yes, no),
        cast=lambda x, dtype: x.astype(dtype),
        gather=lambda table, ids: table[jnp.array(ids, "int32")],
        io_callback=lambda x: jax.experimental.io_callback(lambda x: x, x, x),
        SIN="sin",
        numpy_function=numpy_function,
        float32=jnp.float32,
    )
    for name in FUNCTIONS.split():
        setattr(lib, name, getattr(jnp, name))
    for name in dir(tg):
        if not name.startswith("_"):
            setattr(lib, name, getattr(tg, name))
    return lib


def assert_same(got, expected):
    """None is no number, a list has its length, numbers agree as float32 does."""
    if isinstance(expected, dict):
        assert isinstance(got, dict), got
        assert sorted(got) == sorted(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, list):
        assert isinstance(got, list), got
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            assert_same(one, other)
    elif expected is None or isinstance(expected, (bool, str)):
        assert got == expected
    else:
        assert isinstance(got, (int, float)), got
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def differs(got, expected):
    try:
        assert_same(got, expected)
    except AssertionError:
        return True
    return False


@pytest.mark.filterwarnings("ignore:.*the tape did not watch")  # TensorFlow gives None unasked
@pytest.mark.filterwarnings("ignore:.*which it closes over or is given by keyword")  # likewise
@pytest.mark.both_jax
@pytest.mark.parametrize("name", STATEMENTS)
def test_statement(name):
    statement, lib = STATEMENTS[name], tracegrad_namespace()
    got = plain(statement.program(lib))
    if statement.because:
        assert_same(got, statement.ours)
    else:
        assert_same(got, RECORDED[name])


def test_every_program_is_recorded_that_tensorflow_can_run():
    assert sorted(RECORDED) == sorted(name for name, s in STATEMENTS.items() if s.recorded)


@pytest.mark.parametrize("name", [name for name, s in STATEMENTS.items() if s.because])
def test_where_tracegrad_decided_otherwise_tensorflow_does_otherwise(name):
    if STATEMENTS[name].recorded:
        assert differs(RECORDED[name], STATEMENTS[name].ours)
