"""Each rule on an unmodified transformer against the same transformer changed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg

WIDTH, LENGTH, LAYERS = 4, 3, 2


def block(params, x, relu=jax.nn.relu, softmax=jax.nn.softmax):
    query, key, value = (x @ params[name] for name in ("query", "key", "value"))
    x = x + softmax(query @ key.T / 2) @ value
    return x + relu(x) @ params["mlp"]


def in_turn(params, x, block=block):
    for i, own in enumerate(params):
        with jax.named_scope(f"block_{i}"):
            x = block(own, x)
    return jnp.sum(jnp.sin(x))


def by_scan(stacked, x):
    def step(x, own):
        with jax.named_scope("block"):
            return block(own, x), None

    return jnp.sum(jnp.sin(jax.lax.scan(step, x, stacked)[0]))


X, BATCH = (
    jax.random.normal(jax.random.key(seed), (*batch, LENGTH, WIDTH))
    for seed, batch in ((7, ()), (8, (2,)))
)
PARAMS = [
    dict(
        zip(
            ("query", "key", "value", "mlp"),
            jax.random.normal(jax.random.key(layer), (4, WIDTH, WIDTH)) / 2,
            strict=True,
        )
    )
    for layer in range(LAYERS)
]


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def assert_close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, expected
    )


@jax.custom_vjp
def guided_relu(x):
    return jax.nn.relu(x)


guided_relu.defvjp(
    lambda x: (jax.nn.relu(x), x), lambda x, dy: (jnp.where((x > 0) & (dy > 0), dy, 0),)
)


@jax.custom_vjp
def peaked_softmax(x):
    return jax.nn.softmax(x)


peaked_softmax.defvjp(lambda x: (jax.nn.softmax(x), jax.nn.softmax(x)), lambda p, dy: (3 * dy * p,))


def guided(op, dy):
    return jnp.where((op.inputs[0] > 0) & (dy > 0), dy, 0)


RULES = {
    "a guided relu": (
        tg.rules.override_gradient(tg.match.call("relu"), guided),
        lambda own, x: block(own, x, relu=guided_relu),
    ),
    "another softmax, which jax inlines": (
        tg.rules.override_gradient(tg.match.call("softmax"), lambda op, dy: 3 * dy * op.outputs[0]),
        lambda own, x: block(own, x, softmax=peaked_softmax),
    ),
    "recomputed blocks": (tg.rules.recompute(tg.match.scope("block*")), jax.checkpoint(block)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_a_change_of_the_model_by_hand(name):
    rule, changed = RULES[name]
    gradient = jax.jit(jax.grad(lambda params, x: in_turn(params, x, changed)))
    edited = tg.rewrite(in_turn, rule)
    value, found = jax.jit(jax.value_and_grad(edited))(PARAMS, X)
    assert value == jax.jit(in_turn)(PARAMS, X)  # to the bit
    assert_close(found, gradient(PARAMS, X))
    mapped = jax.jit(jax.vmap(jax.grad(edited), (None, 0)))(PARAMS, BATCH)
    assert_close(mapped, stack([gradient(PARAMS, x) for x in BATCH]))
    scanned = jax.jit(jax.grad(tg.rewrite(by_scan, rule)))(stack(PARAMS), X)
    assert_close(scanned, stack(gradient(PARAMS, X)))
    if name == "recomputed blocks":
        nodes = edited.graph(PARAMS, X).nodes
        assert [type(node) for node in nodes[:LAYERS]] == [tg.ir.Recompute] * LAYERS


def test_values_and_gradients_at_the_blocks():
    def by_hand(noise, x):
        values = []
        for own, n in zip(PARAMS, noise, strict=True):
            x = block(own, x) + n
            values.append(x)
        return jnp.sum(jnp.sin(x)), values

    def look(tool):
        blocks = tg.match.scope("block*")
        in_a_row = jax.jit(lambda x: tool(in_turn, PARAMS, x, where=blocks)[1])
        each, mapped = in_a_row(X), jax.vmap(in_a_row)(BATCH)
        assert list(each) == list(mapped) == [f"block_{i}" for i in range(LAYERS)]
        scanned = jax.jit(lambda x: tool(by_scan, stack(PARAMS), x, where=blocks)[1])(X)
        return [*each.values()], [*mapped.values()], scanned["block"]

    expected = jax.jit(jax.grad(by_hand, has_aux=True))
    noise = [jnp.zeros((LENGTH, WIDTH))] * LAYERS
    of_x, of_batch = expected(noise, X), stack([expected(noise, x) for x in BATCH])
    for i, tool in enumerate((tg.intermediate_gradients, tg.intermediates)):
        assert_close(look(tool), (of_x[i], of_batch[i], jnp.stack(of_x[i])))
