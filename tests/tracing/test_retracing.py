"""One function that is traced again and again says which argument does it, and how."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tracegrad as tg

pytestmark = pytest.mark.both_jax

MODEL = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
DTYPES = ("float32", "float16", "bfloat16", "int32", "int16", "int8", "uint32", "uint16", "bool")


def new_class():
    class Same:
        def tree_flatten(self):
            return (), None

        @classmethod
        def tree_unflatten(cls, *_):
            return cls()

    return Same


CHANGES = {
    "shape": (lambda i: {"x": jnp.ones(i + 1)}, r"shape of `x` changed.*\[8\] to \[9\].*pad"),
    "dtype": (
        lambda i: {"x": jnp.ones((), DTYPES[i])},
        r"dtype of `x` changed.*from uint16 to bool",
    ),
    "weak type": (
        lambda i: {"x": [1.0 if i >> k & 1 else np.float32(1) for k in range(4)]},
        r"weak type of `x\.0` changed.*from a Python number's to an array's",
    ),
    "static value": (lambda i: {"x": 1.0, "n": i}, r"static value of `n` changed.*from 7 to 8"),
    "a string or an array": (
        lambda i: {"x": {"k": jnp.ones(i) if i % 2 else str(i)}},
        r"static value of `x\.k` changed.*from float32\[7\] to '8'",
    ),
    "a string": (lambda i: {"x": {"k": str(i)}}, r"static value of `x\.k` changed"),
    "a new function": (lambda i: {"x": {"k": lambda: i}}, "make it once"),
    "a Variable": (
        lambda i: {"x": tg.Variable(float(i))},
        r"the Variable of `x` changed.*pass its `.value`",
    ),
    "a new optimiser": (
        lambda i: {"x": nnx.Optimizer(MODEL, optax.sgd(0.1), wrt=nnx.Param)},
        r"the tree of `x` changed.*to Optimizer with GradientTransformation.*once",
    ),
    "a class that is made anew": (
        lambda i: {"x": jax.tree_util.register_pytree_node_class(new_class())()},
        r"tree of `x` changed.*from Same to Same",
    ),
    "tree": (
        lambda i: {"x": {f"k{j}": 1.0 for j in range(i)}},
        r"tree of `x` changed.*to dict with 'k7'",
    ),
}


def fresh_function():
    def step(x, y=None, n=None):
        return x

    return tg.trace(step, static_argnames="n")


def repeat(step, calls):
    for arguments in calls:
        step(**arguments)


@pytest.mark.parametrize("kind", CHANGES)
def test_the_argument_and_its_change_are_named(kind):
    make, message = CHANGES[kind]
    step = fresh_function()
    calls = [make(i) for i in range(9)]
    with pytest.warns(tg.RetraceWarning, match=message) as caught:
        repeat(step, calls)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_few_signatures_are_nobodys_fault():
    step = fresh_function()
    for _ in range(30):  # a warning would fail
        for n in range(5):
            step(jnp.ones(n))


def test_it_is_said_at_doubling_counts_only():
    step = fresh_function()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(40):
            step(np.ones(i, np.float32))
    assert len(caught) == 3  # at 8, 16 and 32 retraces


@pytest.mark.parametrize("wrap", [jax.jit, tg.trace])
def test_a_part_of_another_program_is_not_compiled_and_not_counted(wrap):
    dense = tg.trace(lambda w, x: x + jnp.sum(w))

    def net(x):
        for i in range(20):
            x = dense(jnp.ones(i + 1), x)
        return x

    wrap(net)(1.0)  # a warning would fail
