"""`explain` notes a cut that ends one of several ways of a source; it passes over those meant."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tracegrad.insight import explain

stop = jax.lax.stop_gradient


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X = random(0, 16, 8)
NAMES = {"w": (8, 4), "b": (4,), "mu": (4, 2), "deviation": (4, 2), "decoder": (2, 8)}
NAMES |= {"policy": (4, 3), "value": (4,), "codes": (5, 4), "last": (4, 8)}
P = {name: random(k, *shape) for k, (name, shape) in enumerate(NAMES.items())}
ENCODED = {name: P[name] for name in ("w", "b", "mu", "deviation", "decoder")}


def encode(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


# -------------------------------------------------------------------------------- what is noted


def decoded(p, x, stopped):
    h = encode(p, x)
    z = h @ p["mu"] + stopped(jnp.exp(h @ p["deviation"])) * random(1, 16, 2)
    return jnp.mean((z @ p["decoder"] - x) ** 2)


def divergence(p, x):
    h = encode(p, x)
    mu, logarithm = h @ p["mu"], 2 * h @ p["deviation"]
    return jnp.mean(mu**2 + jnp.exp(logarithm) - logarithm)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_stopped_deviation_that_a_second_term_of_the_loss_trains_is_noted_with_its_line(around):
    stopped = around(lambda p, x: decoded(p, x, stop))
    assert not jnp.any(jax.grad(stopped)(ENCODED, X)["deviation"])
    (finding,) = explain(lambda p, x: stopped(p, x) + divergence(p, x), ENCODED, X).notes
    assert (finding.cause, finding.sources) == ("stop_gradient", ("p.deviation",))
    assert finding.origin.line == decoded.__code__.co_firstlineno + 2
    whole = explain(lambda p, x: decoded(p, x, lambda v: v) + divergence(p, x), ENCODED, X)
    assert whole.findings == ()


@pytest.mark.parametrize("limited", [lambda w: w, lambda w: jnp.clip(w, -8, 7)])
@pytest.mark.parametrize("wrt", [0, (0, 2)])
def test_a_rounding_past_which_only_the_scale_gets_a_gradient_is_noted(limited, wrt):
    def quantised(w, x, bias):
        scale = jnp.max(jnp.abs(w)) / 7
        return jnp.mean((x @ (limited(jnp.round(w / scale)) * scale) + bias) ** 2)

    assert jnp.mean(jax.grad(quantised)(P["w"], X, P["b"]) == 0) > 0.9
    (finding,) = explain(quantised, P["w"], X, P["b"], wrt=wrt).findings
    assert (finding.cause, finding.sources, finding.problem) == ("rounding", ("w",), False)
    assert finding.origin.line == quantised.__code__.co_firstlineno + 2


# ------------------------------------------------------------------------------ what is passed over


def straight_through(p, x):
    scale = jnp.max(jnp.abs(p["w"])) / 7
    w = p["w"] + stop(jnp.round(p["w"] / scale) * scale - p["w"])
    return jnp.mean((x @ w + p["b"]) ** 2)


def temporal_difference(p, x):
    target = 1 + 0.9 * stop(jnp.max(encode(p, x[::-1]), -1, keepdims=True))
    return jnp.mean((encode(p, x) - target) ** 2)


def actor_and_critic(p, x):
    h = encode(p, x)
    advantage = x[:, 0] - h @ p["value"]
    chosen = jax.nn.log_softmax(h @ p["policy"])[:, 0]
    return jnp.mean(advantage**2) - jnp.mean(chosen * stop(advantage))


def generalised_advantage(p, x):
    h = encode(p, x)
    values = h @ p["value"]
    errors = x[:-1, 0] + 0.9 * values[1:] - values[:-1]
    advantages = jax.lax.scan(lambda a, e: (e + 0.8 * a,) * 2, 0.0, errors, reverse=True)[1]
    chosen = jax.nn.log_softmax(h @ p["policy"])[:-1, 0]
    return jnp.mean((values - x[:, 1]) ** 2) - jnp.mean(chosen * stop(advantages))


def codebook(p, x):
    z = encode(p, x)
    distances = jnp.sum((z[:, None] - p["codes"]) ** 2, -1)
    code = p["codes"][jnp.argmin(distances, -1)]
    result = (z + stop(code - z)) @ p["last"]
    return jnp.mean((result - x) ** 2) + jnp.mean((stop(z) - code) ** 2 + (z - stop(code)) ** 2)


def first_order_of_a_step(p, x):
    def inner(p):
        return jnp.mean((encode(p, x) @ p["last"]) ** 2)

    gradient = jax.tree.map(stop, jax.grad(inner)(p))
    return inner(jax.tree.map(lambda p, g: p - 0.1 * g, p, gradient))


def siamese(p, x):
    def projected(x):
        return encode(p, x) @ p["last"]

    other = stop(projected(x + 0.1))
    other = other / jnp.linalg.norm(other, axis=-1, keepdims=True)
    return -jnp.mean(projected(x) @ p["w"] @ p["last"] * other)


def fraction(p, x):
    y = encode(p, x)
    return jnp.mean((y - jnp.floor(y)) ** 2) + jnp.mean(y - 0.5 * jnp.round(y / 0.5))


def interpolation(p, x):
    y = 5 * jax.nn.sigmoid(encode(p, x))
    below, table = jnp.floor(y), jnp.arange(8.0) ** 2
    i, part = below.astype(int), y - below
    return jnp.mean(table[i] * (1 - part) + table[i + 1] * part)


def normalised(p, x):
    y = encode(p, x)
    return jnp.mean(((y - stop(y.mean(0))) / stop(y.std(0)) - p["b"]) ** 2)


@pytest.mark.parametrize(
    "loss",
    [
        straight_through,
        temporal_difference,
        actor_and_critic,
        generalised_advantage,
        codebook,
        first_order_of_a_step,
        siamese,
        fraction,
        interpolation,
        normalised,
    ],
)
def test_a_cut_that_is_meant_is_passed_over(loss):
    names = [n for n, g in jax.grad(loss)(P, X).items() if jnp.any(g)]
    assert explain(loss, {name: P[name] for name in names}, X).notes == ()
