"""Each rule on unmodified models of three libraries against the same models changed by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import LAYERS, LENGTH, MODELS, PLAIN, WIDTH

import tracegrad as tg

X = jax.random.normal(jax.random.key(7), (LENGTH, WIDTH))
BATCH = jax.random.normal(jax.random.key(8), (2, LENGTH, WIDTH))

each_library = pytest.mark.parametrize("library", MODELS)


@functools.cache
def plain(library):
    return MODELS[library]()


@functools.cache
def plain_gradient(library):
    """Value and gradient as they are."""
    return jax.jit(jax.value_and_grad(plain(library).loss))(plain(library).params, X)


@functools.cache
def plain_value(library):
    return jax.jit(plain(library).loss)(plain(library).params, X)


def assert_equal_trees(got, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, expected)


def stack(params):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)


def check(library, rule, by_hand):
    """`rule` on the plain model's loss against the gradients that a loss written by hand has; for
    one of the libraries under vmap too, and for another in a scan over layers."""
    model = plain(library)
    edited = tg.rewrite(model.loss, rule)
    value, gradients = jax.jit(jax.value_and_grad(edited))(model.params, X)
    assert value == plain_value(library)  # to the bit
    expected = jax.jit(jax.grad(by_hand))
    assert_equal_trees(gradients, expected(model.params, X), rtol=2e-5, atol=1e-6)

    if library == "linen":
        mapped = jax.jit(jax.vmap(jax.grad(edited), (None, 0)))(model.params, BATCH)
        one_by_one = [expected(model.params, x) for x in BATCH]
        assert_equal_trees(mapped, stack(one_by_one), rtol=2e-5, atol=1e-6)
    if library == "equinox":
        scanned = jax.jit(jax.grad(tg.rewrite(model.loss_by_scan, rule)))(stack(model.params), X)
        assert_equal_trees(scanned, stack(gradients), rtol=2e-5, atol=1e-6)
    return gradients


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


@each_library
def test_a_guided_relu(library):
    def guided(op, dy):
        return jnp.where((op.inputs[0] > 0) & (dy > 0), dy, 0)

    by_hand = MODELS[library]((guided_relu, PLAIN[1])).loss
    gradients = check(library, tg.rules.override_gradient(tg.match.call("relu"), guided), by_hand)
    ordinary = plain_gradient(library)[1]
    differences = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), gradients, ordinary)
    assert max(map(float, jax.tree.leaves(differences))) > 1e-3  # it does something


@each_library
def test_another_rule_for_softmax_which_jax_inlines(library):
    def peaked(op, dy):
        return 3 * dy * op.outputs[0]

    by_hand = MODELS[library]((PLAIN[0], peaked_softmax)).loss
    check(library, tg.rules.override_gradient(tg.match.call("softmax"), peaked), by_hand)


@each_library
def test_recompute_by_block(library):
    model = plain(library)

    def by_hand(params, x):
        for own in params:
            x = jax.checkpoint(model.block)(own, x)
        return jnp.sum(jnp.sin(x))

    rule = tg.rules.recompute(tg.match.scope("block*"))
    check(library, rule, by_hand)
    edited = tg.rewrite(model.loss, rule).graph(model.params, X)
    assert [type(node) for node in edited.nodes[:LAYERS]] == [tg.ir.Recompute] * LAYERS


@each_library
def test_taps_at_the_blocks(library):
    model = plain(library)

    def perturbed(params, x, noise):
        for own, n in zip(params, noise, strict=True):
            x = model.block(own, x) + n
        return jnp.sum(jnp.sin(x))

    noise = [jnp.zeros((LENGTH, WIDTH))] * LAYERS
    by_noise = jax.jit(jax.grad(perturbed, 2))
    expected = by_noise(model.params, X, noise)

    def at_blocks(params, x):
        return tg.intermediate_gradients(model.loss, params, x, where=tg.match.scope("block_*"))[1]

    arriving = at_blocks(model.params, X)
    for i, cotangent in enumerate(expected):
        np.testing.assert_allclose(arriving[f"block_{i}"], cotangent, rtol=1e-5)
    mapped = jax.jit(jax.vmap(at_blocks, (None, 0)))(model.params, BATCH)
    for n, x in enumerate(BATCH):
        for i, cotangent in enumerate(by_noise(model.params, x, noise)):
            np.testing.assert_allclose(mapped[f"block_{i}"][n], cotangent, rtol=1e-5, atol=1e-6)

    gradients = functools.partial(tg.intermediate_gradients, where=tg.match.scope("block"))
    stacked = jax.jit(functools.partial(gradients, model.loss_by_scan))
    _, found = stacked(stack(model.params), X)
    np.testing.assert_allclose(found["block"], jnp.stack(expected), rtol=1e-5)


@each_library
def test_the_values_at_the_blocks(library):
    model = plain(library)

    @jax.jit
    def by_hand(params, x):
        values = []
        for own in params:
            x = model.block(own, x)
            values.append(x)
        return values

    values = by_hand(model.params, X)
    at_blocks = functools.partial(tg.intermediates, where=tg.match.scope("block*"))
    out, found = jax.jit(functools.partial(at_blocks, model.loss))(model.params, X)
    assert list(found) == [f"block_{i}" for i in range(LAYERS)]
    for value, expected in zip(found.values(), values, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert out == plain_value(library)
    by_scan = jax.jit(functools.partial(at_blocks, model.loss_by_scan))
    _, stacked = by_scan(stack(model.params), X)
    np.testing.assert_allclose(stacked["block"], jnp.stack(values), rtol=1e-5, atol=1e-6)
