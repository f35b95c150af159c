"""Edited programs in which operations, and the identities of rules, are repeated."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad import match, rules
from tracegrad.ir import Recompute
from tracegrad.ir.editing import around_each

pytestmark = pytest.mark.both_jax

X = jnp.linspace(0.3, 1.2, 12).reshape(3, 4)


def like_but_different(x):
    """Operations that are repeated, with other parameters, numbers and types between them."""
    total = 0.0
    for i in range(3):
        x = jnp.sin(x) * 2.0 + x * 3.0 - 0.5
        x = jax.lax.integer_pow(x, 2) + jax.lax.integer_pow(x, 3) / 7
        total += jnp.sum(x, axis=0).mean() + jnp.sum(x, axis=1).max() + x[i, i]
        half = x.astype(jnp.bfloat16) * jnp.bfloat16(2)
        total += half.astype(x.dtype).sum() * 0
        total += jnp.cumsum(x, axis=0, dtype=x.dtype)[::-1][0, 1] + jnp.where(x > 0.5, x, -x).sum()
        x = jax.nn.relu(x) - jax.nn.softmax(x) + jax.lax.stop_gradient(x) * 1e-3
    return total


NOTHING = rules.scale_gradient(match.op("no such operation"), 2.0, missing_ok=True)


@pytest.mark.parametrize(
    "derivative",
    [
        jax.grad,
        lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
        lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
        lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, 2 * x])))),
        lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),)),
        lambda f: jax.grad(jax.checkpoint(f)),
    ],
    ids=["grad", "grad of grad", "vmap of grad", "grad of vmap", "jvp of grad", "remat"],
)
def test_a_program_without_an_edit_has_the_derivatives_of_its_function_under_jit(derivative):
    ours = jax.jit(derivative(tg.rewrite(like_but_different, NOTHING)))(X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5),
        ours,
        jax.jit(derivative(like_but_different))(X),
    )


def deep(x):
    for _ in range(6):
        x = jnp.sin(x)
    return jnp.sum(x)


def test_repeated_operations_have_a_derivative_in_a_program_without_jit():
    halved = tg.rewrite(deep, rules.scale_gradient(match.op("sin"), 0.5))
    with jax.disable_jit():
        program = jax.make_jaxpr(jax.grad(halved))(X)
    (found,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, X)
    np.testing.assert_allclose(found, jax.grad(deep)(X) / 2**6, rtol=1e-5)


def test_a_rule_acts_at_each_of_many_equal_matches():
    halved = tg.rewrite(deep, rules.scale_gradient(match.op("sin"), 0.5))
    expected = jax.grad(deep)(X) * 0.5**6
    np.testing.assert_allclose(jax.jit(jax.grad(halved))(X), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(halved)(X), expected, rtol=1e-5)
    rule = rules.scale_gradient(match.op("sin"), 0.5)
    traced = tg.trace(lambda x: jax.grad(deep)(x), rules=rule)
    np.testing.assert_allclose(traced(X), expected, rtol=1e-5)


def test_a_clipped_gradient_adds_one_call_for_each_match():
    def text(count):
        def step(ws, x):
            def loss(ws):
                y = x
                for w in ws:
                    y = jnp.tanh(y @ w)
                return jnp.sum(y**2)

            return jax.grad(loss)(ws)

        args = [jnp.eye(4)] * count, X
        rule = rules.clip_gradient(match.op("tanh"), max_norm=1.0)
        edited, plain = tg.trace(step, rules=rule), jax.jit(step)
        return [f.lower(*args).as_text() for f in (edited, plain)]

    def lines_added(count):
        edited, plain = text(count)
        return edited.count("\n") - plain.count("\n")

    assert lines_added(20) - lines_added(10) <= 3 * 10  # the call, the limit, the result
    few, many = (text(count)[0].count("func.func") for count in (10, 20))
    assert few == many


def numbered_blocks(x):
    """Blocks at one line that differ in their numbers, each in a scope of its own."""
    for i in range(4):
        with jax.named_scope(f"block_{i}"):
            x = jnp.sin(x * (1.0 + i)) + jnp.log(x * x + (2.0 + i)) / (3.0 + i)
    return jnp.sum(x)


@pytest.mark.parametrize(
    "rule",
    [
        rules.recompute(match.scope("block_*")),
        rules.recompute(match.op("mul")),
        rules.override_gradient(match.op("sin"), lambda op, dy: dy * jnp.cos(op.inputs[0])),
        rules.override_gradient(match.op("div"), lambda op, dy: (dy / op.inputs[1], None)),
        rules.strong_zero(match.scope("block_*")),
        tg.edit(match.op("mul"), lambda op, *operands: op(*operands)),
    ],
    ids=["block", "operation", "override", "override with a number", "strong zero", "edit"],
)
def test_matches_at_one_line_that_differ_in_a_number_keep_their_numbers(rule):
    edited = tg.rewrite(numbered_blocks, rule)
    np.testing.assert_array_equal(edited(X), numbered_blocks(X))
    np.testing.assert_allclose(jax.grad(edited)(X), jax.grad(numbered_blocks)(X), rtol=1e-5)


def test_equal_matches_in_different_scopes_keep_their_scopes_and_lines():
    def deep(x):
        for i in range(4):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.sin(x)
        return jnp.sum(x)

    sines, graph = match.op("sin"), tg.graph(deep, X)
    clipped = tg.graph(tg.rewrite(deep, rules.clip_gradient(sines, max_norm=1.0)), X)
    halved = around_each(
        graph, graph.find(sines), lambda op, x: op(x) / 2, depends_on=lambda found: found.name
    ).graph
    for edited, added in ((clipped, match.call("clip_gradient")), (halved, match.op("div"))):
        places = [found for found in edited.find(added) if not found.path]
        assert [found.scope for found in places] == [f"layer_{i}" for i in range(4)]
        assert len({found.origin.line for found in places}) == 1


@pytest.mark.parametrize("rule", [rules.recompute, lambda at: tg.edit(at, lambda op, x: op(x))])
def test_operations_inside_of_a_match_keep_their_own_lines_and_inner_scopes(rule):
    def block(x):
        x = jnp.sin(x)
        with jax.named_scope("inner"):
            return jnp.cos(x)

    def deep(x):
        for i in range(3):
            with jax.named_scope(f"block_{i}"):
                x = block(x)
        return jnp.sum(x)

    edited, plain = (
        [(o.scope, o.origin.line) for o in tg.graph(f, X).find(match.op("sin", "cos"))]
        for f in (tg.rewrite(deep, rule(match.scope("block_*"))), deep)
    )
    assert len(edited) == 6
    assert edited == plain


def test_calls_that_are_recomputed_are_found_again_in_the_step_that_differentiates_them():
    def step(x):
        def loss(x):
            for _ in range(3):
                x = jax.nn.gelu(x * 2.0)
            return jnp.sum(x)

        return jax.value_and_grad(loss)(x)

    ours = tg.trace(step, rules=rules.recompute(match.call("gelu")))(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, jax.jit(step)(X))


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "jitted"])
def test_a_function_with_a_loop_of_its_own_is_recomputed_at_each_call_in_a_loop(compiled):
    def block(x, weights):
        a, b = (jnp.tanh(x @ w) for w in weights)
        return x + a * b

    def loss(layers, x):
        for weights in layers:
            x = block(x, weights)
        return jnp.sum(x**2)

    def step(layers, x):
        fun = jax.jit(loss) if compiled else loss
        return jax.grad(lambda layers, x: fun(layers, x))(layers, x)

    layers = [(jnp.eye(3) * 0.1 * k, jnp.eye(3) * 0.2) for k in range(1, 4)]
    args = layers, X[:, :3]
    traced = tg.trace(step, rules=rules.recompute(match.call("block")))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), traced(*args), step(*args))
    assert sum(isinstance(o.node, Recompute) for o in tg.graph(traced, *args).walk()) == 3
