"""What a plan promises of its regions, held against what XLA computes and holds."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import tracegrad as tg
from tracegrad.ir import Recompute
from tracegrad.ir.editing import around_each
from tracegrad.planning.flatten import flatten
from tracegrad.planning.measuring import MeasuredGradient
from tracegrad.planning.modelling import model
from tracegrad.planning.regions import with_planned_regions
from tracegrad.planning.scan_groups import in_groups
from tracegrad.planning.simulation import Piece, Segment

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("compiled_fully")]


@jax.custom_jvp
def exponential(x):
    return jnp.exp(x)


@exponential.defjvp
def _(primals, tangents):
    y = exponential(*primals)
    return y, y * tangents[0]


# Their derivatives, as JAX has them, read what they have returned.
READING_THEIR_RESULT = {
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "exp": lambda x: jnp.exp(-x),
    "sqrt": lambda x: jnp.sqrt(x + 2),
    "exponential": lambda x: exponential(x),
}


def layers_of(fun):
    """A product, what is to be saved of it, and what reads that."""

    def loss(x, first, last):
        return jnp.sum(jnp.sin(fun(x @ first)) @ last)

    return loss


def operands(dtype):
    random = np.random.default_rng(0)
    return [
        jnp.asarray(random.uniform(0, 0.1, shape), dtype) for shape in ((32, 64), (64, 16), (16, 8))
    ]


def saving(loss, args, op):
    """`loss` as one region that saves the results of one kind of operation."""
    m = model(flatten(tg.graph(loss, *args)))
    saved = frozenset(i for i, node in enumerate(m.nodes) if op in (node.op, node.name))
    assert saved
    return with_planned_regions(m, [Segment(0, len(m), True, saved)]).to_callable()


def products(fun, *args):
    """How many matrix products the gradient takes."""
    gradient = jax.grad(fun, tuple(range(len(args))))
    return str(jax.make_jaxpr(gradient)(*args)).count("dot_general[")


@pytest.mark.parametrize("op", READING_THEIR_RESULT)
def test_what_is_saved_is_not_computed_again(op):
    args = operands(jnp.float32)
    loss = layers_of(READING_THEIR_RESULT[op])
    assert products(jax.checkpoint(loss), *args) > products(loss, *args)
    assert products(saving(loss, args, op), *args) == products(loss, *args)


def assert_same_derivatives(planned, loss, args, of):
    """Of the second order, and of a batch of the first arguments."""

    def derivatives(loss):
        @jax.jit
        def second_and_mapped(*args):
            gradient = jax.grad(loss, of)
            batch = jnp.stack([args[0], 2 * args[0]])
            axes = (0, *[None] * (len(args) - 1))
            return jax.jvp(gradient, args, args), jax.vmap(gradient, axes)(batch, *args[1:])

        return jax.tree.leaves(second_and_mapped(*args))

    for got, want in zip(derivatives(planned), derivatives(loss), strict=True):
        np.testing.assert_allclose(got, want, 1e-12, 1e-14)


def test_what_is_saved_has_the_derivatives_that_jax_gives():
    with jax.enable_x64(True):
        args = operands(jnp.float64)
        losses = [layers_of(fun) for fun in READING_THEIR_RESULT.values()]
        planned = [saving(f, args, op) for f, op in zip(losses, READING_THEIR_RESULT, strict=True)]
        both = [lambda *args, fs=fs: sum(f(*args) for f in fs) for fs in (planned, losses)]
        assert_same_derivatives(*both, tuple(args), (0, 1, 2))


def gated(h, p, name=lambda value, _: value):
    """A step whose reset state one product alone reads; `name`: gives names to what is kept."""
    r = name(jax.nn.sigmoid(h @ p["gate"]), "r")
    c = name(jnp.tanh((r * h) @ p["state"]), "c")
    return (1 - r) * h + r * c


def unrolled(h, p):
    for _ in range(6):
        h = gated(h, p)
    return jnp.mean(h**2)


def scanned(h, p, step=gated):
    return jnp.mean(jax.lax.scan(lambda h, _: (step(h, p), None), h, None, 6)[0] ** 2)


GATED = (
    jax.ShapeDtypeStruct((1024, 64), jnp.float32),
    {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in ("gate", "state")},
)


def keeping_gates(m):
    """A region that keeps what a user's policy would."""
    saved = frozenset(i for i, node in enumerate(m.nodes) if node.op in ("logistic", "tanh"))
    return with_planned_regions(m, [Segment(0, len(m), True, saved)])


def test_what_one_operation_alone_reads_is_run_again_when_its_turn_comes(
    monkeypatch: pytest.MonkeyPatch,
):
    graph = flatten(tg.graph(unrolled, *GATED))
    planned, gradient = keeping_gates(model(graph)), MeasuredGradient(graph)
    (region,) = (node for node in planned.nodes if isinstance(node, Recompute))
    late = [node for node in region.regions["jaxpr"].nodes if isinstance(node, Recompute)]
    ops = [[node.op for node in each.regions["jaxpr"].nodes] for each in late]
    assert ops == [["mul", "dot_general"]] * 6
    held = gradient.held(planned)
    assert products(planned.to_callable(), *GATED) == products(unrolled, *GATED)
    monkeypatch.setattr(Piece, "_find_late", lambda *_: {})
    held_at_once = gradient.held(keeping_gates(model(graph)))
    assert held <= held_at_once - 2 * 1024 * 64 * 4  # the reset states of two steps of six


def test_what_is_run_again_late_has_the_derivatives_that_jax_gives():
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        args = jax.tree.map(lambda s: jnp.asarray(random.uniform(-1, 1, (4, 4))), GATED)
        planned = keeping_gates(model(flatten(tg.graph(unrolled, *args)))).to_callable()
        assert_same_derivatives(planned, unrolled, args, (0, 1))


def test_what_a_scan_keeps_is_kept_once_where_something_is_run_again_late():
    """JAX keeps what has a name once more for each region inside that takes it."""

    def kept(fun):
        residuals = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *GATED)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))

    graph = flatten(tg.graph(scanned, *GATED))
    (scan,) = (node for node in graph.nodes if node.op == "scan")
    body = flatten(scan.regions["jaxpr"])
    again = in_groups(scan, keeping_gates(model(body)), 1)
    place = tg.ir.Occurrence((), scan)
    graph = around_each(graph, [place], lambda op, *operands: again(*operands)).graph
    assert sum(isinstance(place.node, Recompute) for place in graph.walk()) > 1
    policy = jax.checkpoint_policies.save_only_these_names("r", "c")
    by_hand = jax.checkpoint(functools.partial(gated, name=checkpoint_name), policy=policy)
    assert kept(graph.to_callable()) == kept(functools.partial(scanned, step=by_hand))


# --------------------------------------------------------------- values that are compared for order


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


@clipped.defjvp
def _(primals, tangents):
    y = clipped(*primals)
    return y, tangents[0] * (y == primals[0])


# Each compares values with some of them: in its derivative, or in its own operations.
COMPARING = {
    "maximum": (lambda y: y * jnp.max(y, 1, keepdims=True), False),
    "rule": (lambda y: jnp.cumsum(clipped(y), 1), False),
    "equal": (
        lambda y: jnp.cumsum(jnp.where(y == jnp.max(y, 1, keepdims=True), y**2, 0), 1),
        True,
    ),
    "threshold": (lambda y: jnp.cumsum(jnp.where(y < jnp.sort(y)[:, 8:9], 0, y**2), 1), True),
}


@pytest.mark.parametrize("name", COMPARING)
def test_what_is_compared_is_computed_again_as_a_whole(name):
    # XLA may round a value in another way when it computes the value again. Here a callback does.
    compared, measure = COMPARING[name]
    runs = itertools.count(1)

    @jax.custom_jvp
    def rounded(x):
        return jax.pure_callback(lambda x: np.float32(x * (1 + 1e-6 * next(runs))), x, x)

    rounded.defjvp(lambda primals, tangents: (rounded(*primals), *tangents))

    def loss(w, x):
        for _ in range(4):
            x = compared(rounded(jnp.sin(x @ w))) + jnp.tanh(x)
        return jnp.sum(x**2)

    random = np.random.default_rng(0)
    w, x = (jnp.asarray(random.normal(size=shape), "float32") for shape in ((16, 16), (32, 16)))
    plan = tg.plan_recompute(loss, w / 3, x, memory_budget="70%", measure=measure)
    assert plan.is_needed
    got = jax.jit(jax.grad(plan.apply()))(w / 3, x)
    expected = jax.jit(jax.grad(loss))(w / 3, x)
    np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-3 * np.max(np.abs(expected)))


def test_a_result_without_a_gradient_that_a_batch_shares_can_be_planned():
    @jax.custom_vjp
    def scaled(x, scale):
        return jnp.sin(x * scale), scale + 1

    def backward(saved, dy):
        x, scale = saved
        d = dy[0] * jnp.cos(x * scale)
        return d * scale, jnp.sum(d * x) + dy[1]

    scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), backward)

    def loss(scale, x):
        for _ in range(6):
            x = x + jnp.tanh(jax.vmap(lambda x: scaled(x, scale)[0])(x))
        return jnp.sum(x**2)

    x, scale = jnp.ones((32, 16)), jnp.float32(0.7)
    plan = tg.plan_recompute(loss, scale, x, memory_budget="80%", wrt=0, measure=False)
    assert plan.is_needed
    expected = jax.grad(loss)(scale, x)
    np.testing.assert_allclose(jax.grad(plan.apply())(scale, x), expected, rtol=1e-5)
