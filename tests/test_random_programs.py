"""Gradients of random programs: tapes, ``gradients`` and ``grad`` against `jax.grad`.

A program is a list of steps. Each makes one more value out of those before it (so that values are
shared), some by a body of further steps in a loop, a branch, a compiled or recomputed function, or
a function with a custom rule that is right. In float64 the gradient is that of finite differences,
too. The nightly run, of
thousands, is ``pytest --hypothesis-profile=nightly tests/test_random_programs.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

import tracegrad as tg
from tests.derivatives import by_tape

pytestmark = pytest.mark.both_jax

N = 3  # values have the shapes [], [N] and [N, N]


@dataclass(frozen=True)
class Step:
    """One value: what is done, with which values (counted from the newest), by which bodies."""

    op: str
    of: tuple[int, int]
    bodies: tuple[tuple[Step, ...], ...] = ()

    def __repr__(self) -> str:
        bodies = "".join(f", {list(body)}" for body in self.bodies)
        return f"{self.op}({self.of[0]}, {self.of[1]}{bodies})"


# ----------------------------------------------------------------------------------- operations


def scalar(v):
    return v if jnp.ndim(v) == 0 else jnp.mean(v)


def vector(v):
    return [lambda: jnp.broadcast_to(v, (N,)), lambda: v, lambda: v @ weights(v)][jnp.ndim(v)]()


def matrix(v):
    return v if jnp.ndim(v) == 2 else jnp.outer(vector(v), weights(v))


def weights(v):
    return jnp.arange(1, N + 1, dtype=v.dtype) / N - 0.5


def same_rank(a, b):
    return [scalar, vector, matrix][max(jnp.ndim(a), jnp.ndim(b))](a), b


def indices(a):
    """Integers that depend on a value, which cuts."""
    return (vector(a) * 5).astype(jnp.int32) % N


def through_integers(a):
    return (a * 4).astype(jnp.int32).astype(a.dtype) / 4


STOPS = {"lax_stop": lax.stop_gradient, "tg_stop": tg.stop_gradient}

UNARY: dict[str, Callable[..., Any]] = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "bump": lambda a: jnp.exp(-a * a),
    "root": lambda a: jnp.sqrt(1 + a * a),
    "cube": lambda a: 0.1 * a**3,
    "relu": jax.nn.relu,
    "softmax": lambda a: jax.nn.softmax(vector(a)),
    "logsumexp": lambda a: jax.nn.logsumexp(matrix(a), axis=1),
    "silu": jax.nn.silu,
    "floor": lambda a: jnp.floor(3 * a),
    "sign": jnp.sign,
    "round": lambda a: jnp.round(3 * a),
    "integers": through_integers,
    "sum": jnp.sum,
    "max": jnp.max,
    "prod": lambda a: jnp.prod(vector(a)),
    "rows": lambda a: matrix(a).sum(0),
    "cumsum": lambda a: jnp.cumsum(vector(a)),
    "sort": lambda a: jnp.sort(vector(a)),
    "transpose": lambda a: matrix(a).T,
    "reshape": lambda a: matrix(a).reshape(-1)[1 : N + 1],
    "flip": lambda a: vector(a)[::-1],
    "identity": lambda a: a.astype(a.dtype).reshape(a.shape),  # the same object
    "half": lambda a: a.astype(jnp.float16).astype(a.dtype) if a.dtype == jnp.float32 else a * 0.5,
    "argmax": lambda a: a * jnp.argmax(vector(a)),
    "complex": lambda a: jnp.abs(jnp.exp(1j * a) + 0.5),
    "zero": jnp.zeros_like,
}

BINARY: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (1 + b * b),
    "maximum": jnp.maximum,
    "power": lambda a, b: (1 + a * a) ** jnp.tanh(b),
    "where": lambda a, b: jnp.where(a > 0.1, b, jnp.sin(a)),
    "matmul": lambda a, b: matrix(a) @ matrix(b) / N,
    "matvec": lambda a, b: matrix(a) @ vector(b),
    "dot": lambda a, b: vector(a) @ vector(b),
    "einsum": lambda a, b: jnp.einsum("ij,jk->ki", matrix(a), matrix(b)) / N,
    "gather": lambda a, b: vector(b)[indices(a)],
    "take_rows": lambda a, b: jnp.take(matrix(b), indices(a), axis=0),
    "scatter": lambda a, b: vector(a).at[1].set(scalar(b)),
    "scatter_add": lambda a, b: vector(a).at[indices(b)].add(vector(b)),
    "concatenate": lambda a, b: jnp.concatenate([vector(a), vector(b)])[2 : 2 + N],
    "slice": lambda a, b: lax.dynamic_slice_in_dim(
        jnp.concatenate([vector(a)] * 2), indices(b)[0], N
    ),
    "solve": lambda a, b: jnp.linalg.solve(
        matrix(a) * 0.1 + 2 * jnp.eye(N, dtype=a.dtype), vector(b)
    ),
    "select": lambda a, b: lax.cond(scalar(a) > 0, lambda: vector(b), lambda: vector(a) * 2),
    "count": lambda a, b: a * jnp.sum(b > 0),
}


# Each makes one value of two and of functions of two values. What `closes` are given bodies that
# see the values around them as well.


def scanned(f, a, b):
    def body(carry, x):
        y = f(carry, x)
        return jnp.tanh(vector(y)), scalar(y)

    last, each = lax.scan(body, vector(a), vector(b))
    return last + each


def looped(f, a, b):
    return lax.fori_loop(0, 2, lambda i, c: jnp.tanh(vector(f(c, b * i))), vector(a))


def branched(f, g, a, b):
    return lax.cond(
        scalar(a) > 0.2, lambda a, b: vector(f(a, b)), lambda a, b: vector(g(a, b)), a, b
    )


def mapped(f, a, b):
    return jax.vmap(lambda x: scalar(f(x, x)))(vector(a)) * scalar(b)


def differentiated(f, a, b):
    return jax.grad(lambda a: jnp.sum(f(a, b)))(a)


def by_custom_vjp(f, a, b):
    @jax.custom_vjp
    def g(a, b):
        return f(a, b)

    g.defvjp(lambda a, b: jax.vjp(f, a, b), lambda vjp, ct: vjp(ct))
    return g(a, b)


def by_custom_jvp(f, a, b):
    @jax.custom_jvp
    def g(a, b):
        return f(a, b)

    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g(a, b)


def by_custom_gradient(f, a, b):
    return tg.custom_gradient(lambda a, b: jax.vjp(f, a, b))(a, b)


def by_inputs_alone(f, a, b):
    """The same with a gradient function that computes everything again."""
    return tg.custom_gradient(lambda a, b: (f(a, b), lambda ct: jax.vjp(f, a, b)[1](ct)))(a, b)


WITH_CLOSURES: dict[str, Callable[..., Any]] = {
    "scan": scanned,
    "loop": looped,
    "cond": branched,
    "vmap": mapped,
    "jit": lambda f, a, b: jax.jit(f)(a, b),
    "trace": lambda f, a, b: tg.trace(f)(a, b),
    "checkpoint": lambda f, a, b: jax.checkpoint(f)(a, b),
    "recompute": lambda f, a, b: tg.recompute_grad(f)(a, b),
    "grad": differentiated,
}

WITHOUT_CLOSURES: dict[str, Callable[..., Any]] = {
    "custom_vjp": by_custom_vjp,
    "custom_jvp": by_custom_jvp,
    "custom_gradient": by_custom_gradient,
    "custom_gradient_of_inputs": by_inputs_alone,
}


def run(steps: Sequence[Step], values: Sequence[Any], stop: Any = None) -> Any:
    """The last value. `stop`, if given, takes the place of stop_gradient outside of bodies."""
    values = list(values)
    for step in steps:
        a, b = (values[-1 - i % len(values)] for i in step.of)
        around = () if step.op in WITHOUT_CLOSURES else tuple(values)
        bodies = [as_function(body, around) for body in step.bodies]
        if step.op in STOPS:
            values.append((stop or STOPS[step.op])(a))
        elif step.op in UNARY:
            values.append(UNARY[step.op](a))
        elif step.op in BINARY:
            values.append(BINARY[step.op](*same_rank(a, b)))
        else:
            values.append((WITH_CLOSURES | WITHOUT_CLOSURES)[step.op](*bodies, a, b))
    return values[-1]


def as_function(body: Sequence[Step], around: Sequence[Any]) -> Callable[..., Any]:
    return lambda *own: run(body, (*around, *own))


def loss_of(steps, stop=None):
    def loss(*inputs):
        return jnp.sum(run(steps, inputs, stop)) * 1.0

    return loss


def does(steps, ops):
    """Whether one of some operations is among the steps or in their bodies."""
    return any(step.op in ops or any(does(body, ops) for body in step.bodies) for step in steps)


# ------------------------------------------------------------------------------------ strategies


PLAIN = st.sampled_from([*UNARY, *BINARY, *STOPS])
PLACES = st.tuples(st.integers(0, 4), st.integers(0, 4))
NESTED = [*WITH_CLOSURES, *WITHOUT_CLOSURES]


def steps(longest, bodies):
    """Up to so many steps; `bodies` is whether some may have bodies of two plain steps."""
    plain = st.builds(Step, PLAIN, PLACES)
    step = plain | st.sampled_from(NESTED).flatmap(step_with_body) if bodies else plain
    return st.lists(step, max_size=longest).map(tuple)


def step_with_body(op, bodies=False):
    body = steps(2, bodies)
    return st.builds(Step, st.just(op), PLACES, st.tuples(*[body] * (2 if op == "cond" else 1)))


def programs_with(op):
    """Programs in which an operation takes part, with steps before and after it."""
    step = step_with_body(op, bodies=True) if op in NESTED else st.builds(Step, st.just(op), PLACES)
    parts = st.tuples(steps(2, False), step.map(lambda step: (step,)), steps(2, False))
    return parts.map(lambda parts: [step for part in parts for step in part])


def inputs_of(seed, dtype):
    """Three inputs in general position: no two equal, none at a kink."""
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.uniform(-1, 1, shape), dtype) for shape in ((), (N,), (N, N))]


# ---------------------------------------------------------------------------------- the claims


def in_one_program(loss, inputs):
    """All that can be asked for inside one compiled program, which is compiled once."""
    positions = tuple(range(len(inputs)))
    return {
        "jax.grad": jax.grad(loss, positions),
        "a tape in a traced function": lambda *inputs: by_tape(loss, *inputs),
        "gradients()": lambda *inputs: tg.gradients(loss(*inputs), list(inputs)),
        "tg.grad": tg.grad(loss, positions),
        "tg.grad(unconnected='none')": tg.grad(loss, positions, unconnected="none"),
    }


def check(program, seed, dtype):
    inputs = inputs_of(seed, dtype)
    loss = loss_of(program)
    asked = in_one_program(loss, inputs)
    found = tg.trace(lambda *inputs: {name: list(ask(*inputs)) for name, ask in asked.items()})(
        *inputs
    )
    expected = found.pop("jax.grad")
    assume(all(jnp.all(jnp.abs(g) < 1e4) for g in expected))  # and neither NaN
    found["a tape"] = by_tape(loss, *inputs)

    tolerance = 1e-9 if dtype == jnp.float64 else 2e-3
    scale = max(1.0, *(float(jnp.max(jnp.abs(g))) for g in expected))
    zeros = [jnp.zeros_like(x) for x in inputs]
    for name, gradients in found.items():
        for got, want, zero in zip(gradients, expected, zeros, strict=True):
            np.testing.assert_allclose(
                zero if got is None else got, want, tolerance, tolerance * scale, err_msg=name
            )
    unconnected = {
        name: [g is None for g in gradients]
        for name, gradients in found.items()
        if name != "tg.grad"
    }
    # What a recomputed function does not use gets zeros from tapes, as in TensorFlow.
    if does(program, ["checkpoint", "recompute"]):
        del unconnected["tg.grad(unconnected='none')"]
    assert len(set(map(tuple, unconnected.values()))) == 1, unconnected
    if dtype == jnp.float64 and not any(
        does(body, STOPS) for step in program for body in step.bodies
    ):
        check_by_differences(program, inputs, expected, scale)


def check_by_differences(program, inputs, expected, scale):
    """Along one direction, with what is stopped held at its value."""
    random = np.random.default_rng(0)
    direction = [jnp.asarray(random.normal(size=x.shape)) for x in inputs]

    @jax.jit
    def at(t):
        held = []
        loss_of(program, lambda a: held.append(a) or a)(*inputs)
        values = iter(held)
        moved = [x + t * d for x, d in zip(inputs, direction)]
        return loss_of(program, lambda a: next(values))(*moved)

    step = 1e-4
    slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
    along = sum(jnp.vdot(g, d) for g, d in zip(expected, direction))
    np.testing.assert_allclose(along, slope, 1e-5, 1e-5 * scale, err_msg="finite differences")


OPERATIONS = [*NESTED, "lax_stop", "tg_stop", "gather", "where", "matmul", "identity", "integers"]
# Of each operation; most of them in float64, where ten digits have to agree and not three.
EXAMPLES = max(3, 3 * settings().max_examples // len(OPERATIONS))

each_operation = pytest.mark.parametrize("op", OPERATIONS)


@pytest.mark.slow
@each_operation
@settings(max_examples=EXAMPLES // 3)
@given(st.data(), st.integers(0, 100))
def test_every_way_gives_the_gradient_that_jax_gives(op, data, seed):
    check(data.draw(programs_with(op)), seed, jnp.float32)


@each_operation
@settings(max_examples=2 * EXAMPLES // 3)
@given(st.data(), st.integers(0, 100))
def test_in_float64_it_is_also_that_of_finite_differences(op, data, seed):
    with jax.enable_x64(True):
        check(data.draw(programs_with(op)), seed, jnp.float64)
