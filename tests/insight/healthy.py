"""Programs whose gradients are as they should be: nothing is to be reported as a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tracegrad as tg
from tests import programs

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), jnp.float32)

# How each makes a loss and its arguments.
PROGRAMS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    model.__name__: model
    for model in (
        programs.mlp,
        programs.per_example_gradients,
        programs.scan_rnn,
        programs.checkpointed_blocks,
        programs.checkpointed_scan,
        programs.control_flow,
        programs.attention_with_dropout,
        programs.linen_mlp,
        programs.equinox_conv_net,
        programs.nnx_transformer,
    )
}


def healthy(*arguments):
    def register(fun):
        PROGRAMS[fun.__name__] = lambda: (fun, arguments)
        return fun

    return register


@healthy({"first": W, "second": W}, X)
def rectifiers_some_of_which_are_quiet(params, x):
    return jnp.mean((jax.nn.relu(x @ params["first"]) @ params["second"]) ** 2)


@healthy(jnp.array([3.0, 0.0]))
def safe_norm(x):
    square = jnp.sum(x * jnp.array([0.0, 1.0])) ** 2
    safe = jnp.where(square > 0, square, 1.0)
    return jnp.where(square > 0, jnp.sqrt(safe), 0.0) + jnp.sum(x)


@healthy(jnp.array([0.5, 0.5, 0.0]))
def entropy_with_a_double_where(p):
    safe = jnp.where(p > 0, p, 1.0)
    return -jnp.sum(jnp.where(p > 0, p * jnp.log(safe), 0.0)) + jnp.sum(p)


@healthy(jnp.array([0.5, 0.5, 0.0]))
def entropy_of_the_library(p):
    return jnp.sum(jax.scipy.special.entr(p[:2])) + jnp.sum(p)


@healthy(W, jnp.array([[True, False, True], [True, True, False], [True, True, True]]))
def attention_with_a_mask_of_infinities(q, mask):
    scores = jnp.where(mask, q @ q.T, -jnp.inf)
    return jnp.sum(jax.nn.softmax(scores) @ q)


@healthy(X)
def stable_softplus(x):
    return jnp.sum(jax.nn.softplus(100.0 * x))


@healthy(X)
def logsumexp(x):
    return jnp.sum(jax.nn.logsumexp(100.0 * x, axis=1))


@healthy(X)
def layer_norm(x):
    y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return jnp.sum(y * X[::-1])


@healthy(np.ones((5, 2), np.float32), jnp.array([0, 3, 3]))
def lookup(table, ids):
    return jnp.sum(table[ids] ** 2)


@healthy(W, X)
def stopped_target_beside_a_live_value(w, x):
    target = jax.lax.stop_gradient(x @ w)
    return jnp.mean((target + 1.0 - x @ w) ** 2)


@healthy(W, X)
def rule_that_is_right(w, x):
    @tg.custom_gradient
    def log1pexp(x):
        e = jnp.exp(x)
        return jnp.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))

    return jnp.sum(log1pexp(x @ w))


@healthy(0.5 * np.asarray(W), np.ones((4, 3), np.float32))
def rule_whose_gradient_cancels(w, x):
    """Along its argument the derivative of a normalisation is zero, up to rounding."""

    def plain(x):
        return x / jnp.sqrt(jnp.mean(x**2))

    normalise = jax.custom_vjp(plain)
    normalise.defvjp(lambda x: (plain(x), x), lambda x, ct: jax.vjp(plain, x)[1](1.0 * ct))
    y = normalise(x)
    return jnp.sum(normalise(y * jnp.sum(w**2)) * y)


@healthy(W, X)
def straight_through(w, x):
    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x)

    rounded.defvjp(lambda x: (rounded(x), None), lambda _, ct: (ct,))
    return jnp.sum(rounded(x @ w) ** 2)


@healthy(X)
def maximum_over_time(x):
    return jnp.sum(jnp.max(x, axis=0))


@healthy(X)
def clipped_in_part(x):
    return jnp.sum(jnp.clip(x, -1.0, 1.0))


@healthy(np.diag(np.array([1.0, 2.0, 4.0], np.float32)))
def eigenvalues(a):
    values, vectors = jnp.linalg.eigh(a)
    return jnp.sum(values**2) + jnp.sum(vectors[0] ** 4)


@healthy(W)
def log_determinant(w):
    return jnp.linalg.slogdet(w @ w.T + jnp.eye(3))[1]


@healthy(X.astype(jnp.bfloat16))
def half_precision(x):
    return jnp.sum(jnp.tanh(x).astype(jnp.float32))


@healthy(jnp.array([1.0 + 2.0j, 3.0 - 1.0j]))
def complex_numbers(z):
    return jnp.sum(jnp.abs(z * z))


@healthy(X, (X,))
def flag_that_is_a_python_value(x, rest, training=True):
    return jnp.sum(x * rest[0]) if training else jnp.float32(0.0)


SERIES = jnp.asarray(np.random.default_rng(2).normal(size=(20, 8, 3)), jnp.float32)


@healthy(W, SERIES)
def loop_that_carries_its_last_output(w, series):
    def step(carry, x):
        number, _ = carry
        return (number + 1, jnp.tanh(x @ w)), None

    (_, last), _ = jax.lax.scan(step, (0, jnp.zeros((8, 3))), series)
    return jnp.mean(last**2)


@healthy(W, SERIES, jnp.arange(20) == 10)
def episodes_that_start_anew_by_where(w, series, starts):
    def step(h, step):
        x, starts = step
        return jnp.tanh(x + jnp.where(starts, 0.0, h) @ w), None

    return jnp.mean(jax.lax.scan(step, jnp.zeros((8, 3)), (series, starts))[0] ** 2)


@healthy(W, SERIES, jnp.arange(20) == 10)
def episodes_that_start_anew_by_a_factor(w, series, starts):
    def step(h, step):
        x, starts = step
        return jnp.tanh(x + (h * (1.0 - starts)) @ w), None

    return jnp.mean(jax.lax.scan(step, jnp.zeros((8, 3)), (series, starts))[0] ** 2)


@healthy(W)
def newtons_method(w):
    def step(root, _):
        return root - (root**3 - jnp.sum(w**2)) / (3 * root**2), None

    return jax.lax.scan(step, jnp.float32(2.0), None, length=12)[0]


@healthy(W, X)
def equilibrium_of_a_layer(w, x):
    def step(h, _):
        return jnp.tanh(h @ w / (2 * jnp.linalg.norm(w)) + x), None

    return jnp.mean(jax.lax.scan(step, jnp.zeros((8, 3)), None, length=60)[0] ** 2)
