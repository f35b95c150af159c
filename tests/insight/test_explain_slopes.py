"""Gradients that vanish or explode: one finding for one cause, at the line where the norm falls."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tracegrad.insight import explain

X = jax.random.normal(jax.random.key(99), (16, 8))


def weights(count, scale, width=8):
    keys = jax.random.split(jax.random.key(0), count)
    return [scale * jax.random.normal(key, (width, width)) for key in keys]


def line_of(fun, marked):
    return fun.__code__.co_firstlineno + marked


def residual(w, x):
    return x + 0.1 * jnp.tanh(x @ w)


def saturated(w, x):
    h = 2 * x + 20
    return jax.nn.sigmoid(h) @ w


def squashed(w, x):
    return jnp.tanh(4 * x + 12) @ w


def blocks_with(sick):
    """Residual blocks but for those that are given by their numbers."""

    def loss(ws, x, added=0.0):
        for i, w in enumerate(ws):
            with jax.named_scope(f"block{i}"):
                x = sick.get(i, residual)(w, x)
            if i == min(sick) - 1:
                x = x + added
        return jnp.mean((x - 1) ** 2)

    return loss


def test_one_block_that_vanishes_among_others_is_blamed_once_with_its_scope_and_its_numbers():
    loss, ws = blocks_with({4: saturated}), weights(8, 0.4)
    found = explain(loss, ws, X)
    (finding,) = found.findings
    assert (finding.cause, finding.operation) == ("vanishing", "logistic")
    assert (finding.origin.line, finding.scope) == (line_of(saturated, 2), "block4")
    norms = [float(jnp.linalg.norm(g)) for g in jax.grad(loss)(ws, X)]
    behind = sorted(range(4), key=lambda i: norms[i])
    assert finding.sources == tuple(f"ws.{i}" for i in behind)
    # 2 * x + 20 is what the norm falls in front of.
    after = jnp.linalg.norm(jax.grad(loss, 2)(ws, X, jnp.zeros_like(X))) / 2
    assert f"to {float(after):.3g}"[:6] in finding.what
    x = X
    for w in ws[:4]:
        x = residual(w, x)
    assert (
        f"of {float(jnp.min(2 * x + 20)):.4g} to {float(jnp.max(2 * x + 20)):.4g}" in finding.what
    )
    assert "normalise what goes in" in finding.cure
    assert f"vanishing at {finding.origin.place}, in block4" in str(found)


def test_two_blocks_that_vanish_are_two_findings_and_the_one_with_more_behind_it_comes_first():
    found = explain(blocks_with({2: saturated, 6: squashed}), weights(9, 0.4), X)
    places = [(f.cause, f.origin.line, f.scope) for f in found.findings]
    assert places == [
        ("vanishing", line_of(squashed, 1), "block6"),
        ("vanishing", line_of(saturated, 2), "block2"),
    ]
    assert set(found.findings[1].sources) == {"ws.0", "ws.1"}


def test_lines_that_share_a_fall_of_which_none_has_much_are_not_passed_over():
    def loss(biases, x):
        x = jnp.sin(x + biases[0])
        x = 0.03 * jnp.sin(x + biases[1])
        x = 0.03 * jnp.tanh(x + biases[2])
        x = 0.03 * jnp.arctan(x + biases[3])
        return jnp.mean(jnp.sin(x + biases[4]))

    (finding,) = explain(loss, [jnp.zeros(8)] * 5, X).findings
    assert finding.cause == "vanishing"
    assert finding.origin.line in range(line_of(loss, 2), line_of(loss, 5))
    assert finding.sources[0] == "biases.0"


@pytest.mark.parametrize("unit", [1e3, 1e-3, 1.0])
def test_of_a_plain_stack_the_activation_is_blamed_and_no_change_of_units_or_mean(unit):
    def loss(layers, x):
        for layer in layers:
            x = x * unit
            x = x / unit
            h = x @ layer["kernel"] + layer["bias"]
            x = jax.nn.sigmoid(h)
        return jnp.mean(x)

    layers = [{"kernel": w, "bias": jnp.zeros(8)} for w in weights(10, 0.3)]
    (finding,) = explain(loss, layers, X).findings
    assert (finding.operation, finding.origin.line) == ("logistic", line_of(loss, 5))
    if unit == 1:
        assert "over 10 layers, most of it in logistic" in finding.what
    assert {"layers.0.kernel", "layers.0.bias"} <= set(finding.sources)
    assert not {"layers.9.kernel", "layers.9.bias"} & set(finding.sources)


def test_a_stack_that_explodes_is_one_finding_also_where_it_overflows():
    def loss(ws, x):
        for w in ws:
            x = jnp.sin(x @ w)
        return jnp.mean(x)

    (finding,) = explain(loss, weights(8, 20.0), X).findings
    assert (finding.cause, finding.origin.line) == ("exploding", line_of(loss, 2))
    assert finding.sources[0] == "ws.0"
    # With diagonal weights each element overflows alone. (The sum of two infinite terms is NaN if
    # their signs differ, and whether two overflow depends on the order of a dot's sum.)
    (finding,) = explain(loss, [200 * jnp.eye(8)] * 40, X).findings
    assert (finding.cause, finding.origin.line) == ("Inf in the reverse pass", line_of(loss, 2))
    assert "the norm of the cotangent has grown to" in finding.what
    assert "explodes" in finding.cure


def test_an_equinox_network_whose_lines_are_a_librarys_is_one_finding_with_its_scope():
    model = eqx.nn.MLP(8, 1, 8, 10, activation=jax.nn.sigmoid, key=jax.random.key(0))
    (finding,) = explain(lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2), model, X).findings
    assert (finding.cause, finding.operation) == ("vanishing", "logistic")
    assert "MLP" in finding.scope
    assert {"m.layers.0.weight", "m.layers.0.bias"} <= set(finding.sources)


def test_a_recurrence_may_forget():
    def recurrence(p, xs):
        def cell(h, x):
            return jax.nn.sigmoid(h @ p["w"] + x), None

        return jnp.mean(jax.lax.scan(cell, jnp.zeros(8), xs)[0])

    assert explain(recurrence, {"w": weights(1, 0.3)[0]}, X[:10], wrt=(0, 1)).problems == ()


@pytest.mark.parametrize(("gain", "cause"), [(0.2, "vanishing"), (1.0, ""), (5.0, "exploding")])
def test_a_recurrence_of_which_the_last_stacked_state_is_read_is_told_as_by_its_last_carry(
    gain, cause
):
    def step(h, x):
        h = gain * h @ jnp.roll(jnp.eye(8), 1, axis=0) * x
        return h, h

    def recurrence(start, xs, read):
        return jnp.sum(read(*jax.lax.scan(step, start, xs)))

    xs, start = jnp.ones((30, 8)), jnp.ones(8)
    reads = [lambda last, _: last, lambda _, states: states[-1]]
    found = [explain(recurrence, start, xs, read) for read in reads]
    for count, explanation in zip((30, 29), found, strict=True):
        assert [f.cause for f in explanation.problems] == [cause] * bool(cause)
        for finding in explanation.problems:
            assert f"over {count} steps" in finding.what
    if cause:  # what the last step gives to the state before it
        given = jax.grad(lambda h: jnp.sum(step(h, xs[-1])[0]))(jnp.ones(8))
        assert f"from {jnp.linalg.norm(given):.4g} to" in found[1].problems[0].what
    # Discounted, the states of all steps are read: that is no slope of the recurrence.
    discounts = 0.2 ** jnp.arange(30.0)[:, None]
    assert explain(recurrence, start, xs, lambda _, states: states * discounts).problems == ()


def test_a_recurrence_of_flax_of_which_the_last_state_is_read_vanishes():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.SimpleCell(2, 4, rngs=rngs))

        def __call__(self, x):
            return jnp.mean(self.rnn(x)[:, -1] ** 2)

    x = 3 * jnp.ones((2, 200, 2))
    found = explain(lambda model, x: model(x), Model(nnx.Rngs(0)), x)
    assert [finding.cause for finding in found.problems] == ["vanishing"]
    given = jax.grad(lambda x: Model(nnx.Rngs(0))(x))(x)
    assert jnp.linalg.norm(given[:, 0]) < 1e-8 * jnp.linalg.norm(given[:, -1])


def test_a_recurrence_in_a_branch_is_told_if_the_branch_is_taken():
    def loss(h, xs, is_taken):
        def step(h, x):
            h = jnp.tanh(0.1 * h + x)
            return h, h

        def last(h):
            return jax.lax.scan(step, h, xs)[1][-1]

        return jnp.sum(jax.lax.cond(is_taken, last, lambda h: 2 * h, h))

    h, xs = jnp.ones(3), jnp.full((30, 3), 0.1)
    for is_taken in (True, False):
        problems = explain(loss, h, xs, jnp.bool_(is_taken)).problems
        assert [finding.cause for finding in problems] == ["vanishing"] * is_taken


def test_an_iteration_vanishes_if_its_parameters_or_its_start_get_next_to_nothing():
    def iteration(p, x):
        def step(h, _):
            return jnp.tanh(h @ p["w"]), None

        return jnp.sum(jax.lax.scan(step, p["start"] + x, None, length=20)[0])

    p = {"w": 0.01 * jnp.eye(8), "start": jnp.zeros(8)}
    for wrt in ("w", "start"):
        (finding,) = explain(iteration, p, X, wrt=wrt).problems
        assert (finding.cause, finding.operation) == ("vanishing", "dot_general")


def test_a_recurrence_whose_carry_vanishes_after_a_mask_is_told():
    def recurrence(w, xs, starts):
        def cell(h, step):
            x, starts = step
            return jnp.tanh(jnp.where(starts, 0.0, h) @ w + x), None

        return jnp.mean(jax.lax.scan(cell, jnp.zeros(8), (xs, starts))[0])

    xs = jnp.tile(X[:1], (30, 1))
    (finding,) = explain(recurrence, 0.2 * jnp.eye(8), xs, jnp.arange(30) == 10).problems
    assert finding.cause == "vanishing"
    assert finding.what.endswith("over 20 steps, most of it in dot_general")


def test_a_recurrence_that_ends_at_one_saturated_step_is_told():
    def recurrence(w, xs):
        def cell(h, x):
            h = jnp.tanh(h @ w + x)
            return h, h

        return jnp.sum(jax.lax.scan(cell, jnp.full(3, 0.5), xs)[0])

    xs = jnp.full((20, 3), 0.1).at[5].set(-1000.0)
    (finding,) = explain(recurrence, 0.9 * jnp.eye(3), xs).problems
    assert finding.cause == "vanishing"
    assert "to 0 over 20 steps" in finding.what


# -------------------------------------------------------------------------------------- the table


def test_what_is_measured_at_one_line_in_each_of_many_layers_is_one_finding():
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))

    def loss(ws, x):
        for w in ws:
            x = clip(residual(w, x))
        return jnp.sum((x - 1) ** 2)

    (finding,) = explain(loss, weights(6, 0.4), X).findings
    assert finding.cause == "changed by a rule"
    assert finding.what.endswith("; the same in 5 more operations there, with other numbers")


def test_a_long_table_has_both_ends():
    many = {f"leaf_{chr(97 + k // 26)}{chr(97 + k % 26)}": jnp.ones(2) for k in range(100)}
    found = explain(lambda p: sum(jnp.sum(v) * 1.1**k for k, v in enumerate(p.values())), many)
    lines = str(found).splitlines()
    assert "... 80 sources with norms between these ..." in lines
    assert {"p.leaf_aa", "p.leaf_dv"} <= set(str(found).split())
    by_norm = [report.norm for report in sorted(found.sources, key=lambda report: report.rank)]
    np.testing.assert_array_equal(by_norm, sorted(by_norm))
