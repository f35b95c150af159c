"""`explain` accuses no healthy model: beside each stands a sick one that looks alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tracegrad.insight import explain


def random(seed, *shape):
    return 0.4 * jax.random.normal(jax.random.key(seed), shape)


X, C = random(5, 8, 6), random(6, 8, 6)


# ------------------------------------------------------------------- what starts at the identity


def adaptive_norm(p, x):
    shift, scale, gate = jnp.split(jax.nn.silu(C) @ p["ada"] + p["bias"], 3, -1)
    branch = jax.nn.gelu((x * (1 + scale) + shift) @ p["w"])
    return jnp.mean((x + gate * branch - 1) ** 2)


def tanh_gate(p, x):
    return jnp.mean((x + jnp.tanh(p["gate"]) * jnp.tanh(x @ p["w"]) - 1) ** 2)


def scaled_head(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) @ (0.5 * p["head"].T) - 1) ** 2)


def low_rank_adapter(p, x):
    return jnp.mean((jax.jit(jnp.dot)(x @ p["down"], p["up"].T) - 1) ** 2)


def fixup(p, x):
    return jnp.mean((x + (jax.nn.relu(x @ p["w"]) @ p["last"]) * p["scale"] - 1) ** 2)


def gates_in_a_scan(p, x):
    def block(x, layer):
        w, gate = layer
        return x + jnp.tanh(gate) * jnp.tanh(x @ w), None

    return jnp.mean((jax.lax.scan(jax.checkpoint(block), x, (p["w"], p["gate"]))[0] - 1) ** 2)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, scale_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(x + self.norm(self.linear(x)))


def nnx_block(model, x):
    return jnp.mean((model(x) - 1) ** 2)


W = random(1, 6, 6)
STARTING_AT_ZERO = [
    (adaptive_norm, lambda: {"ada": jnp.zeros((6, 18)), "bias": jnp.zeros(18), "w": W}),
    (tanh_gate, lambda: {"gate": jnp.zeros(()), "w": W}),
    (scaled_head, lambda: {"w": random(1, 6, 4), "head": jnp.zeros((2, 4))}),
    (low_rank_adapter, lambda: {"down": random(1, 6, 2), "up": jnp.zeros((6, 2))}),
    (fixup, lambda: {"w": W, "last": jnp.zeros((6, 6)), "scale": jnp.ones(())}),
    (gates_in_a_scan, lambda: {"w": jnp.stack([W, W]), "gate": jnp.zeros(2)}),
    (nnx_block, lambda: NnxBlock(nnx.Rngs(0))),
]


@pytest.mark.parametrize(("loss", "build"), STARTING_AT_ZERO)
def test_a_model_that_starts_at_the_identity_has_no_problem(loss, build):
    found = explain(loss, build(), X)
    assert found.problems == ()
    assert {f.cause for f in found.notes} <= {"multiplied by zero", "state"}
    assert any("which gets a gradient itself" in f.what for f in found.notes)


def test_a_factor_that_is_zero_for_good_is_a_problem():
    def constant(p, x):
        return jnp.mean((x + jnp.tanh(0 * p["gate"]) * jnp.tanh(x @ p["w"]) - 1) ** 2)

    def both(p, x):  # neither gets a gradient
        return jnp.mean((x + p["gate"] * (x @ p["w"]) - 1) ** 2)

    def square(p, x):
        return jnp.mean((x + p["gate"] ** 2 * (x @ p["w"]) - 1) ** 2)

    def cosine(p, x):  # the parameter is zero, the factor because of the mask
        mask = jnp.zeros(6)
        return jnp.mean((x + p["gate"] + jnp.cos(p["gate"]) * mask * (x @ p["w"]) - 1) ** 2)

    def shared(p, x):  # what the mask multiplies gets its gradient by another use
        h = p["gate"] + 1
        return jnp.mean((x * h + h * jnp.zeros(6) * (x @ p["w"]) - 1) ** 2)

    gate = {"gate": jnp.zeros(())}
    for loss, p in (
        (shared, {**gate, "w": W}),
        (constant, {**gate, "w": W}),
        (both, {**gate, "w": jnp.zeros((6, 6))}),
        (square, {**gate, "w": W}),
        (cosine, {**gate, "w": W}),
    ):
        assert [f.sources[-1] for f in explain(loss, p, X).problems if "w" in f.sources[-1]]


@pytest.mark.parametrize("read", [0, slice(None)], ids=["first", "all"])
def test_the_state_that_a_recurrence_starts_with_is_zero_for_good(read):
    """If only the first step is read, as at the last position of a bidirectional RNN. The bias is
    zero, too, and the states of later steps are computed of it."""

    def recurrent(p, x):
        def step(h, x):
            h = jnp.tanh(x @ p["in"] + h @ p["w"] + p["bias"])
            return h, h

        _, states = jax.lax.scan(step, jnp.zeros(6), x[:4])
        return jnp.sum(states[read] ** 2)

    p = {"in": W, "w": W, "bias": jnp.zeros(6)}
    found = explain(recurrent, p, X)
    is_zero = not jnp.any(jax.grad(recurrent)(p, X)["w"])
    assert is_zero == (read == 0)
    assert [f.sources for f in found.findings] == ([("p.w",)] if is_zero else [])
    assert found.problems == found.findings


# ------------------------------------------------------------------------- what adds up to zero


def test_a_softmax_of_one_element_and_a_bias_that_cancels_are_notes():
    def attend(p, x):
        q, k, v = (x @ p[name] for name in "qkv")
        return jnp.sum((jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v) ** 2)

    p = dict(zip("qkv", 0.3 * jax.random.normal(jax.random.key(0), (3, 8, 8)), strict=True))
    found = explain(attend, p, jax.random.normal(jax.random.key(1), (4, 1, 8)))
    assert found.problems == ()
    assert [(f.cause, f.sources) for f in found.notes] == [("cancelled", ("p.k", "p.q"))]

    def contrast(b, x):
        h = x + b
        return jnp.sum(3 * h) - jnp.sum(3 * h)

    (finding,) = explain(contrast, jnp.ones(3), jnp.ones(3)).findings
    assert (finding.cause, finding.problem) == ("cancelled", False)

    def masked(b, x):  # two uses, each of them multiplied by zeros
        return jnp.sum(b * (x - x) + jnp.sin(b) * (x - x))

    (finding,) = explain(masked, jnp.ones(3), jnp.ones(3)).problems
    assert finding.cause == "multiplied by zero"


# ------------------------------------------------------------------- what stands side by side


def experts(p, x):
    gate = jax.nn.softmax(jnp.array([10.0, 0.0, -5.0, -20.0, -30.0]))
    return sum(jnp.sum((x @ q) ** 2) * g for q, g in zip(p, gate, strict=True))


def heads(p, x):
    scales = 1e-5, 1e-3, 0.1, 1.0, 10.0
    return sum(jnp.sum((x @ q) ** 2) * s for q, s in zip(p, scales, strict=True))


def polynomial(p, x):
    t = jnp.linspace(0.0, 20.0, 30)
    return jnp.mean((sum(k * t**i for i, k in enumerate(p)) - jnp.sin(t)) ** 2)


@pytest.mark.parametrize("loss", [experts, heads, polynomial])
def test_what_stands_side_by_side_in_a_list_is_no_stack_of_layers(loss):
    p = [jnp.float32(0.1)] * 8 if loss is polynomial else [random(1, 6, 4)] * 5
    assert explain(loss, p, X).problems == ()


@pytest.mark.parametrize("where", ["kernels", "biases"])
def test_layers_one_behind_the_other_vanish(where):
    def loss(p, x):
        for w, b in zip(p["kernels"], p["biases"], strict=True):
            x = jax.jit(lambda x, w, b: jax.nn.sigmoid(x @ w + b))(x, w, b)
        return jnp.sum(x)

    p = {"kernels": [0.02 * random(i, 6, 6) for i in range(5)], "biases": [jnp.zeros(6)] * 5}
    found = explain(lambda part, rest, x: loss({**rest, where: part}, x), p.pop(where), p, X)
    assert [f.cause for f in found.problems] == ["vanishing"]


def test_of_three_rectifiers_on_a_line_the_dead_one_is_told():
    def loss(p, x):
        a, b, c = (x @ w for w in p)
        return jnp.sum(jax.nn.relu(a) + jax.nn.relu(b - 100) + jax.nn.relu(c))

    (finding,) = explain(loss, [random(i, 6, 4) for i in range(3)], X).problems
    assert (finding.cause, finding.sources) == ("dead units", ("p.1",))
    assert "number 2 of 3 on that line" in finding.what


def normalise(p, x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(centred**2, -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]  # the line


def padded(masks):
    """A model with two normalisations, of which the last rows of the input are padding."""

    def loss(p, x, mask):
        h = normalise(p["first"], x @ p["in"])
        if masks:
            h = jnp.where(mask, h, 0.0)
        h = normalise(p["second"], jnp.tanh(h @ p["out"]))
        h = jnp.where(mask, h, 0.0) if masks else h
        return jnp.mean(jnp.tanh(h @ p["in"]) * jnp.arange(4.0))

    norm = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    first, second, x = jax.random.normal(jax.random.key(0), (3, 4, 4))
    mask = jnp.ones((4, 1), bool).at[3].set(False)
    p = {"in": first, "out": second, "first": norm, "second": norm}
    return explain(loss, p, jnp.where(mask, x, 0.0), mask)


def test_rows_of_padding_that_a_normalisation_makes_most_of_the_gradient_are_told():
    explanation = padded(masks=False)
    (finding,) = explanation.problems
    assert finding.cause == "rows without variance"
    assert finding.origin.line == normalise.__code__.co_firstlineno + 3
    assert "p.first.bias" in finding.sources
    norms = {report.path: report.norm for report in explanation.sources}
    assert norms["p.first.bias"] > 100 * norms["p.first.scale"]
    assert padded(masks=True).problems == ()
