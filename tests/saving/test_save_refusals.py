"""What cannot be saved is refused in words that help, and leaves nothing behind."""

from __future__ import annotations

import re
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.interpreters import mlir

import tracegrad as tg
from tests.derivatives import refuses_second
from tracegrad import load, save, save_variables

X = np.ones((2, 3), np.float32)
ROWS = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3"), "float32")


def calls_back(x):
    return jax.pure_callback(np.sin, x, x) * 2  # the line of the callback


def prints(x):
    jax.debug.print("{}", x)  # the line of the print
    return x


def calls_out(x):
    one = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("of_this_process", one)(x)  # the line of the call


@jax.custom_vjp
def with_rule(x):
    return x


def backward(_, ct):
    return (jax.pure_callback(np.sin, ct, ct),)


with_rule.defvjp(lambda x: (x, None), backward)


def line_of(words):
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i + 1 for i, line in enumerate(lines) if line.endswith(f"# {words}"))
    return number


@pytest.fixture
def path(tmp_path):
    """Where to save; afterwards what was there is there, and nothing else."""
    file = tmp_path / "saved.tracegrad"
    file.write_bytes(b"what was there")
    yield file
    assert file.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [file]


def checked(x):
    return eqx.error_if(x, jnp.any(x > 9), "too large") * 2  # the line of the check


# As `lineax.linear_solve` is: XLA gets its runtime check where it is compiled.
solve = jax.extend.core.Primitive("solve")
solve.def_abstract_eval(lambda x: x)
mlir.register_lowering(solve, mlir.lower_fun(lambda x: checked(x), multiple_results=False))


def solves(x):
    return solve.bind(x) * 2  # the line of the solve


def loops(x):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 100, grow, x)  # the line of the loop


def grow(x):
    return x * 2 + 1


def calls_without_derivative(x):
    one = jax.ShapeDtypeStruct((3, 3), x.dtype)
    factor = jax.ffi.ffi_call("lapack_spotrf_ffi", one)(x @ x.T)  # the line of the factor
    return jnp.sum(factor)


@jax.custom_jvp
def magnitude(x):
    return jnp.abs(x)


magnitude.defjvp(lambda primals, tangents: (magnitude(*primals), jnp.abs(tangents[0])))


@jax.custom_vjp
def counted(x):
    return loops(x)


counted.defvjp(lambda x: (counted(x), None), lambda _, ct: (ct,))


def uses_rules(x):
    def step(carry, _):
        return magnitude(counted(carry)), None  # the line of the transpose

    return jax.lax.scan(step, x, None, length=2)[0]


OF_RULE = "the derivative of order 1 of <lambda> cannot be saved, because of .*pure_callback"


@pytest.mark.parametrize(
    ("fun", "place", "message"),
    [
        (calls_back, "callback", "pure_callback.* calls back into Python"),
        (prints, "print", "debug_.* and the process that loads"),
        (jax.vmap(jax.jit(prints)), "print", "debug_"),
        (calls_out, "call", "ffi_call.*no compatibility guarantees"),
        (lambda x: with_rule(x) * 2, "rule", OF_RULE),  # the line of the rule
        (checked, "check", r"`equinox.error_if`.*EQX_ON_ERROR=nan"),
        (solves, "solve", r"XLA compiles it.*lineax.*EQX_ON_ERROR=nan"),
        (loops, "loop", r"(?s)order 1 of loops .*while.*gradient_order=0"),
        (calls_without_derivative, "factor", r"(?s)order 1 of .*ffi_call.*gradient_order=0"),
        (uses_rules, "transpose", r"(?s)cannot differentiate .*magnitude.*_order=0"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_line(fun, place, message, path):
    spec = np.eye(3, dtype=np.float32) if fun is calls_without_derivative else X
    with pytest.raises(ValueError, match=message) as refused:
        save(fun, path, [spec])
    assert f"{Path(__file__).name}:{line_of(f'the line of the {place}')}" in str(refused.value)
    # The loop that has a derivative is for a loop that stands by itself, and has no rule.
    assert ("tracegrad.rules.checkpointed_loop()" in str(refused.value)) == (fun is loops)


def test_the_cure_for_a_loop_gives_it_a_gradient(tmp_path):
    cured = tg.rewrite(loops, tg.rules.checkpointed_loop())
    save(cured, tmp_path / "f", [X], gradient_order=2)
    loaded = load(tmp_path / "f")
    np.testing.assert_allclose(loaded(X), loops(X))
    steps = np.log2((loops(X) + 1) / (X + 1))  # c -> 2 c + 1 doubles c + 1 and its gradient
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(loaded(x)))(X), 2**steps, rtol=1e-6)


def test_a_rule_that_refuses_an_operand_is_saved_where_its_gradient_is_stopped(tmp_path):
    x, y = jnp.arange(3.0), jnp.full(3, 2.0)

    @jax.jit
    def fun(x, y):
        return jnp.sum(refuses_second(x, y) ** 2)

    with pytest.raises(ValueError, match=r"refuses_second(?s:.*)the second operand has"):
        save(fun, tmp_path / "f", [x, y])
    save(lambda x, y: fun(x, jax.lax.stop_gradient(y)), tmp_path / "f", [x, y])
    np.testing.assert_allclose(jax.grad(load(tmp_path / "f"))(x, y), 8 * x)
    np.testing.assert_allclose(jax.grad(fun)(x, y), 8 * x)


def test_a_callback_in_a_rule_does_not_matter_where_no_gradient_is_saved(tmp_path):
    save(lambda x: with_rule(x) * 2, tmp_path / "f", [X], gradient_order=0)
    loaded = load(tmp_path / "f")
    np.testing.assert_array_equal(loaded(X), 2 * X)
    with pytest.raises(ValueError, match=r"saved with gradient_order=0, .* gradient_order=1"):
        jax.grad(lambda x: jnp.sum(loaded(x)))(X)


@jax.tree_util.register_dataclass
@dataclass
class Model:
    w: Any


Folded = namedtuple("Folded", ["x"])


def same(x):
    return x


OTHER_ROWS = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3"), "float32")
SIN = (jnp.sin, [X])
NO_SIZE = jax.ShapeDtypeStruct((-1, 3), "float32")
NO_ARRAYS = [  # an argument, and how it is named
    (
        NO_SIZE,
        "argument d is a ShapeDtypeStruct: .*-1, 3.* with sizes >= 0 or of jax.export.symbol",
    ),
    (jax.ShapeDtypeStruct(("b", 3), "float32"), r"argument d is a Shape.*'b', 3.*give an array or"),
    (
        {"w": [jax.Array]},
        r"argument d\.w\.0 is an ArrayMeta: <class 'jax.*Array'>\. .*give an array",
    ),
    (np.float32, "argument d is a type: <class 'numpy.float32'>"),
    (np.array(["text"]), "argument d is an array <U4"),
    ({"x": X, "how": "fast"}, r"argument d\.how is a str: 'fast'.*close over other objects"),
    ({"f": jnp.sin}, r"argument d\.f is .*arrays only"),
    (nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "argument d is a Linear: .*Save a flax.nnx module itself"),
    ([nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))], r"argument d\.0.* is a Param"),
]
CLASS = "unregistered type .*{}.*register_namedtuple_serialization.*convert it to a dictionary"
ONE_CALL = r"^the arguments of .* cannot be saved: .*in one call, b, n = jax.*_shape\(\"b, n\"\)"
NOT_SPECS = [
    (lambda x, y: x, [X], r"do not fit <lambda>\(x, y\): missing a required argument: 'y'"),
    (same, [X, X], r"do not fit same\(x\): too many positional arguments"),
    (same, {"y": X}, r"do not fit same\(x\): missing a required argument: 'x'"),
    (lambda x, y: x @ y, [X, X], "contracting dimensions"),
    (same, X, r"(?s)specs should be a list .*but is .*: write \[spec\] for one argument"),
    (same, None, "the specs of same are missing: give a list with one array"),
    *[(lambda d: X, [argument], message) for argument, message in NO_ARRAYS],
    (lambda x: (x, jnp.sin), [X], r"the result of <lambda>\.1 is .*arrays only\. Let the function"),
    *[(fun, [ROWS, OTHER_ROWS], f"{ONE_CALL}$") for fun in (jnp.add, lambda x, y: (x, y))],
    (lambda m: m.w, [Model(X)], f"the arguments of <lambda> .*{CLASS.format('Model')}"),
    (lambda x: {"a": Model(x)}, [X], f"the result of <lambda> .*{CLASS.format('Model')}"),
    (lambda d: d[1], [{1: X}], "the arguments of .* string keys. Found key 1"),
    (lambda x: Folded(x), [X], f"the result of .*{CLASS.format('Folded')}"),
    (lambda x: {"\ud800": x}, [X], "the result of <lambda> cannot be saved: .* surrogates not all"),
    (3, [X], "expected a function to save, or a dictionary"),
    *[
        (functions, specs, rf"saved by save\(\{{name: \(fun, specs\)\}}, path\), .*but got {got}")
        for functions, specs, got in [
            ({"f": SIN, "g": jnp.sin}, None, "the entry 'g': <PjitFunction"),
            ({"f": SIN}, [X], r"\{'f': (?s:.*) and specs=\["),
            ({3: SIN}, None, r"the entry 3: \("),
        ]
    ],
    ({}, None, r"but got \{\} and specs=None"),
]
NOT_VALUES = [
    # Nothing is written where a later one cannot be saved.
    ({"f": SIN, "g": (prints, [X])}, None, {}, "prints cannot be|g cannot"),
    (*SIN, {"gradient_order": -1}, "gradient_order should be an integer, 0 or greater"),
    (*SIN, {"gradient_order": 1.0}, "gradient_order should be an integer"),
    *[
        (*SIN, {"platforms": wrong}, f"platforms should be a list of .*{re.escape(repr(wrong))}")
        for wrong in (["gpu"], "cpu", [], 1, [[]])
    ],
]


@pytest.mark.parametrize(
    ("fun", "specs", "options", "error", "message"),
    [
        *[(fun, specs, {}, TypeError, message) for fun, specs, message in NOT_SPECS],
        *[(fun, specs, more, ValueError, message) for fun, specs, more, message in NOT_VALUES],
    ],
)
def test_requests_and_options_are_checked(fun, specs, options, error, message, path):
    with pytest.raises(error, match=message):
        save(fun, path, specs, **options)


@pytest.mark.parametrize(
    ("fun", "spec", "error", "types"),
    [
        (lambda x: x @ np.ones(4), X, TypeError, "x: f32[2,3]"),
        (lambda f: f.x / (1 / 0), Folded(1.0), ZeroDivisionError, "f: Folded(x=f32[])"),
    ],
)
def test_an_error_of_the_function_names_it_its_types_and_its_line(fun, spec, error, types, path):
    with pytest.raises(error) as raised:
        save({"good": SIN, "bad": (fun, [spec])}, path)
    (note,) = [note for note in raised.value.__notes__ if "to be saved" in note]
    assert note.endswith(f"\nwhile bad was traced to be saved, for ({types})")
    assert f"{Path(__file__).name}:{fun.__code__.co_firstlineno} in <lambda>" in note


@pytest.mark.both_jax
@pytest.mark.parametrize("compiled", [jax.jit, tg.trace])
@pytest.mark.parametrize(
    "write",
    [lambda path: save(jnp.sin, path, [X]), lambda path: save_variables([tg.Variable(1.0)], path)],
)
def test_nothing_is_saved_while_a_function_is_traced(write, compiled, path):
    with pytest.raises(RuntimeError, match="inside a function that is being traced"):
        compiled(lambda x: write(path))(1.0)


def test_64_bits_are_asked_for_where_they_are_needed(tmp_path):
    path = tmp_path / "wide"
    with jax.enable_x64(True):
        v = tg.Variable(np.array([1 / 3, 1e300]), name="v")
        c = tg.Variable(np.array([1e300 + 2j]), name="c")
        save(lambda x: (x * v.value, c.value), path, [v], gradient_order=0)
        loaded = load(path)
        assert loaded.variables["v"].numpy().tobytes() == v.numpy().tobytes()
        assert loaded(v)[1] == c.numpy()
    with pytest.raises(ValueError, match=r"complex128, float64, .*jax_enable_x64"):
        load(path)


def test_a_missing_package_is_named_with_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match=r"pip install 'tracegrad\[save\]'"):
        save(jnp.sin, path, [X])
