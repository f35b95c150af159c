"""A rule connects what it returns a gradient for, whatever that is; None is no gradient.

The example is the auxiliary loss of mixtures of experts: a rule that hands on its first argument
and gives the second one the gradient of a loss that nobody adds up.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import zero_from_primal

import tracegrad as tg
from tests.derivatives import by_tape
from tracegrad.differentiation.connectivity import connections
from tracegrad.insight.gradient_flow import Flow, gradient_flow
from tracegrad.ir.editing import around_each

pytestmark = pytest.mark.both_jax

X, AUX, OTHER = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]), jnp.array([5.0, 6.0])
MESH = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def gradients_of_rule(aux, dy):
    """Of `y` the cotangent, of `aux` ones, of `zeros` zeros, of `none` none."""
    return dy, jnp.ones_like(aux), jnp.zeros_like(aux), None


@tg.custom_gradient
def of_tracegrad(y, aux, zeros, none):
    return y * 1.0, lambda dy: gradients_of_rule(aux, dy)


@jax.custom_vjp
def of_jax(y, aux, zeros, none):
    return y * 1.0


of_jax.defvjp(lambda y, aux, *_: (y * 1.0, aux), gradients_of_rule)


def of_numpy(y, aux, zeros, none):
    def grad(op, dy):
        return gradients_of_rule(op.inputs[1], dy)

    return tg.numpy_function(
        lambda y, *_: y, [y, aux, zeros, none], jnp.float32, grad, stateful=False
    )


@jax.jit
def to_be_overridden(y, aux, zeros, none):
    return y * 1.0 + 0.0 * (aux + zeros + none)


@tg.register_gradient("auxiliary loss", replace=True)
def registered(op, dy):
    return gradients_of_rule(op.inputs[1], dy)


def of_registry(*operands):
    with tg.gradient_override_map({"to_be_overridden": "auxiliary loss"}):
        return to_be_overridden(*operands)


def of_rewriting(*operands):
    rule = tg.rules.override_gradient(tg.match.call("to_be_overridden"), registered)
    return tg.rewrite(to_be_overridden, rule)(*operands)


RULES = {
    "custom_gradient": of_tracegrad,
    "custom_vjp": of_jax,
    "numpy_function": of_numpy,
    "register_gradient": of_registry,
    "override_gradient": of_rewriting,
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def in_scan(f):
    def step(carry, factor):
        (y, *rest) = carry
        return (f(y * factor, *rest), *rest), None

    return lambda *operands: lax.scan(step, operands, jnp.array([2.0, 3.0]))[0][0]


def in_shard_map(f):
    split = jax.sharding.PartitionSpec("i")
    return jax.jit(jax.shard_map(f, mesh=MESH, in_specs=(split,) * 4, out_specs=split))


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "trace": tg.trace,
    "checkpoint": jax.checkpoint,
    "vmap": jax.vmap,
    "scan": in_scan,
    "cond": lambda f: lambda y, *rest: lax.cond(y[0] > 0, f, lambda y, *_: y, y, *rest),
    "while": lambda f: lambda *xs: lax.fori_loop(0, 2, lambda _, y: f(2 * y, *xs[1:]), xs[0]),
    "shard_map": in_shard_map,
}


def a_loss(f):
    def loss(x, aux, zeros, none):
        return jnp.sum(f(x * x, 2 * aux, 2 * zeros, 2 * none) ** 2)

    return loss


OPERANDS = X, AUX, OTHER, OTHER + 1


def on_a_tape(loss, *operands):
    return by_tape(lambda operands: loss(*operands), operands)


WAYS = {
    "tape": on_a_tape,
    "traced tape": lambda loss, *operands: tg.trace(functools.partial(on_a_tape, loss))(*operands),
    "gradients": lambda loss, *xs: tg.trace(lambda *xs: tg.gradients(loss(*xs), list(xs)))(*xs),
    "grad": lambda loss, *xs: tg.grad(loss, (0, 1, 2, 3), unconnected="none")(*xs),
}


def check(found, loss, *operands, counts_as_a_whole=False):
    """What the rule returned is there, as `jax.grad` has it, and what it did not is None."""
    wanted = jax.grad(loss, (0, 1, 2, 3))(*operands)
    assert np.any(wanted[1])
    for i in range(3):
        np.testing.assert_allclose(found[i], wanted[i], rtol=1e-6)
    if counts_as_a_whole:  # TensorFlow's answer for a recomputed function
        assert not np.any(found[3])
    else:
        assert found[3] is None


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@each_rule
def test_a_gradient_that_does_not_depend_on_the_cotangent_is_one(rule, way):
    if rule is of_rewriting and way is not WAYS["grad"]:
        way = WAYS["tape"]
    loss = a_loss(rule)
    check(way(loss, *OPERANDS), loss, *OPERANDS)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("rule", [of_tracegrad, of_jax], ids=["custom_gradient", "custom_vjp"])
def test_so_it_is_inside_of(rule, around):
    loss = a_loss(AROUND[around](rule))
    whole = around == "checkpoint"
    check(WAYS["tape"](loss, *OPERANDS), loss, *OPERANDS, counts_as_a_whole=whole)
    check(WAYS["gradients"](loss, *OPERANDS), loss, *OPERANDS, counts_as_a_whole=whole)
    check(WAYS["grad"](loss, *OPERANDS), loss, *OPERANDS)


def test_a_rule_connects_all_results_to_what_it_returns():
    @jax.custom_vjp
    def penalised(x, y):
        return x * 1.0, y * 1.0

    # x gets a gradient of one, be it the first result that has a cotangent or the second alone.
    penalised.defvjp(lambda x, y: ((x, y), None), lambda _, ct: (ct[0] + 1.0, ct[1]))

    def second(x, y):
        return 3.0 * penalised(x, y)[1]

    for wrap in (lambda f: f, jax.jit, tg.trace):
        found = on_a_tape(wrap(second), 2.0 * X[0], X[0])
        assert [float(g) for g in found] == list(jax.grad(second, (0, 1))(2.0, 1.0)) == [1.0, 3.0]


@jax.custom_vjp
def offset(x):
    return x * 1.0


offset.defvjp(lambda x: (x, x), lambda x, dy: (dy + 1.0 + x,))


def both(x):
    return jnp.sin(x), offset(jnp.cos(x)) * 2.0


def scan_of_both(x):
    step = lambda carry, _: ((jnp.sin(carry[0]), offset(carry[1])), offset(jnp.cos(x)))  # noqa: E731
    (first, second), third = lax.scan(step, (x, 2 * x), None, length=2)
    return first, second, third


def loop_of_both(x):
    return lax.fori_loop(0, 2, lambda _, c: (jnp.sin(c[0]), offset(c[1])), (x, 2 * x))


def printing_both(x):
    jax.debug.print("ran with {}", x)
    return both(x)


PARTED = {
    "jit": jax.jit(both),
    "jit in jit": jax.jit(lambda x: jax.jit(both)(2 * x)),
    "trace": tg.trace(both),
    "checkpoint": jax.checkpoint(both),
    "scan": scan_of_both,
    "while": loop_of_both,
    "cond": lambda x: lax.cond(x < 5, both, lambda x: (x, x), x),
    "effects": jax.jit(printing_both),
}


@pytest.mark.parametrize("name", PARTED)
def test_a_rule_on_the_way_to_another_result_alone_is_not_asked(name, capfd):
    f, x = PARTED[name], jnp.float32(0.5)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        results = f(x)
    parts = [*range(len(results)), slice(0, 2)]  # each alone, and two together
    for part in parts:
        wanted = jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x)[part]))))(x)  # noqa: B023
        np.testing.assert_allclose(tape.gradient(results[part], x), wanted, rtol=1e-6)
    jax.effects_barrier()
    if name == "effects":  # once for the tape, once for each gradient of JAX
        assert capfd.readouterr().out.count("ran with") == 1 + len(parts)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nor_is_it_in_a_trace(way):
    if way is WAYS["grad"]:
        way = lambda loss, *xs: tg.grad(loss, (0,))(*xs)  # noqa: E731
    for f in (PARTED["jit"], PARTED["scan"], PARTED["checkpoint"]):
        (found,) = way(lambda x: f(x)[0], jnp.float32(0.5))  # noqa: B023
        np.testing.assert_allclose(found, jax.grad(lambda x: f(x)[0])(0.5), rtol=1e-6)  # noqa: B023


def test_nor_for_a_jacobian_or_a_second_derivative():
    f, x = PARTED["jit"], jnp.array([0.5, 1.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)[0]
    np.testing.assert_allclose(tape.jacobian(y, x), jnp.diag(jnp.cos(x)), rtol=1e-6)
    for wrap in (lambda f: f, tg.trace):
        second = wrap(lambda x: by_tape(lambda x: by_tape(lambda x: f(x)[0], x), x))
        np.testing.assert_allclose(second(x), -jnp.sin(x), rtol=1e-6)


# --------------------------------------------------------------------- rules of forward mode


def connected(fun, *args):
    return [sorted(inputs) for inputs in connections(tg.graph(fun, *args))]


def test_a_rule_of_tangents_that_writes_zeros_gives_zeros():
    @jax.custom_jvp
    def flat(x, y):
        return x + y

    flat.defjvp(lambda primals, _: (sum(primals), jnp.zeros_like(primals[0])))

    @jax.custom_jvp
    def of_the_second(x, y):
        return x + y

    of_the_second.defjvps(None, lambda tangent, out, x, y: 2.0 * tangent)

    @jax.custom_jvp
    def nothing(x):
        return x * 1.0

    def no_tangent(primals, tangents):
        return primals[0] * 1.0, zero_from_primal(primals[0], symbolic_zeros=True)

    nothing.defjvp(no_tangent, symbolic_zeros=True)

    assert connected(flat, 1.0, 2.0) == [[0, 1]]
    assert connected(of_the_second, 1.0, 2.0) == [[1]]
    assert connected(nothing, 1.0) == [[]]
    x = jnp.float32(3.0)
    assert on_a_tape(flat, x, 2 * x) == (0.0, 0.0)
    assert on_a_tape(of_the_second, x, 2 * x) == (None, 2.0)
    assert on_a_tape(nothing, x) == (None,)


# ------------------------------------------------------------------------------ edits, and keys


def test_none_survives_an_edit_of_the_rule():
    def doubled(graph):
        (rule,) = graph.find(lambda found: isinstance(found.node, tg.ir.CustomGradient))
        backward = rule.node.face("backward")
        ones = backward.producers[backward.outputs[1]]
        place = tg.ir.Occurrence(rule.into("backward"), ones)
        return around_each(graph, [place], lambda op, *operands: 2 * op(*operands)).graph

    rewritten = tg.rewrite(of_jax, doubled)
    found = on_a_tape(rewritten, *OPERANDS)
    np.testing.assert_allclose(found[0], [1.0, 1.0])
    np.testing.assert_allclose(found[1], [2.0, 2.0])
    assert not np.any(found[2])
    assert found[3] is None


def test_rules_that_differ_in_a_none_alone_are_not_taken_for_one_another():
    def step(returned):
        @jax.custom_vjp
        def f(x, y):
            return x * 1.0

        f.defvjp(lambda x, y: (x * 1.0, None), lambda _, dy: (dy, returned))
        return on_a_tape(f, X[0], X[1])

    for _ in range(2):
        assert step(None)[1] is None
        assert float(step(0.0)[1]) == 0.0


# ------------------------------------------------------------------------------- what follows


def test_explain_and_show_follow():
    loss = a_loss(of_jax)
    explanation = tg.explain(loss, *OPERANDS, wrt=(0, 1, 2, 3))
    assert [source.gradient for source in explanation.sources] == ["32.2", "2.83", "0", "None"]
    assert "custom rule" in explanation.sources[3].reason
    flow = gradient_flow(tg.graph(loss, *OPERANDS))
    assert flow.reached == [True, True, True, False]
    doubled = [n for n in flow.flows if n.op == "mul" and n.inputs[1] is not n.inputs[0]]
    assert [flow.flows[n] for n in doubled] == [Flow.FLOWS, Flow.FLOWS, Flow.UNREACHED]


@pytest.mark.parametrize("rule", [of_tracegrad, of_jax, of_rewriting])
def test_a_saved_function_has_the_same_gradients(rule, tmp_path):
    loss, path = a_loss(rule), tmp_path / "saved"
    tg.save(loss, path, OPERANDS, gradient_order=1)
    loaded = tg.load(path)
    wanted = jax.grad(loss, (0, 1, 2, 3))(*OPERANDS)
    for found, right in zip(jax.grad(loaded, (0, 1, 2, 3))(*OPERANDS), wanted, strict=True):
        np.testing.assert_allclose(found, right)
    for way in WAYS.values():
        check(way(loaded, *OPERANDS), loss, *OPERANDS)
    assert np.any(tg.grad(loaded, 1, unconnected="raise")(*OPERANDS))
    with pytest.raises(tg.UnconnectedError):
        tg.grad(loaded, 3, unconnected="raise")(*OPERANDS)
