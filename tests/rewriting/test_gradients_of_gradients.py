"""Rules for parameters in gradients of gradients: they act on each of the two gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import grad as grad_by_name
from jax import jvp as jvp_by_name

import tracegrad as tg
from tests.derivatives import by_tape


def cube(w):
    return jnp.sum(w**3)


def adapted_by(gradient, w):
    """One step of an inner loop, as in MAML."""
    return jnp.sum((w - 0.1 * gradient(cube)(w)) ** 2)


def after_each(change, w):
    """The gradient of `adapted_by`, in which `change` follows each gradient."""
    inner = lambda w: change(3 * w**2)  # noqa: E731
    return change(jax.grad(lambda w: jnp.sum((w - 0.1 * inner(w)) ** 2))(w))


def tripled(gradient):
    return 3 * gradient


def within_two(gradient):
    return jnp.where(gradient > 2, 2.0, jnp.where(gradient < -2, -2.0, gradient))


def of_tape(f):
    return lambda w: by_tape(f, w)


STEPS = {
    "jax.grad": lambda w: jax.grad(lambda w: adapted_by(jax.grad, w))(w),
    "jit": lambda w: jax.grad(lambda w: adapted_by(lambda f: jax.jit(jax.grad(f)), w))(w),
    "value_and_grad": lambda w: jax.value_and_grad(lambda w: adapted_by(jax.grad, w))(w)[1],
    "vjp": lambda w: jax.vjp(lambda w: adapted_by(jax.grad, w), w)[1](1.0)[0],
    "jacrev": lambda w: jax.jacrev(lambda w: adapted_by(jax.jacrev, w))(w),
    "tg.grad": lambda w: tg.grad(lambda w: adapted_by(tg.grad, w))(w),
    "tapes": lambda w: by_tape(lambda w: adapted_by(of_tape, w), w),
    "jax.grad under a tape": lambda w: by_tape(lambda w: adapted_by(jax.grad, w), w),
    "a tape under jax.grad": lambda w: jax.grad(lambda w: adapted_by(of_tape, w))(w),
}


def adapted(w):
    return adapted_by(jax.grad, w)


UNDER = {
    "around a trace": lambda rule: jax.grad(tg.trace(adapted, rules=[rule])),
    "around a rewrite": lambda rule: jax.grad(tg.rewrite(adapted, rule)),
    "a tape around": lambda rule: of_tape(tg.trace(adapted, rules=[rule])),
}


@pytest.mark.parametrize("way", [*STEPS, *UNDER])
def test_a_rule_acts_on_each_gradient_as_code_after_it_would(way):
    def make(rule):
        if way in UNDER:
            return UNDER[way](rule)
        return tg.trace(lambda w: STEPS[way](w), rules=[rule])

    w, where, seen = jnp.array([2.0, -0.5]), tg.match.param("w"), []
    found = make(tg.rules.scale_gradient(where, 3.0))(w)
    np.testing.assert_allclose(found, after_each(tripled, w), rtol=1e-5)
    np.testing.assert_allclose(found[0], 3 * 2 * (2 - 0.1 * 36) * (1 - 0.1 * 36), rtol=1e-5)
    found = make(tg.rules.clip_gradient(where, max_value=2.0))(w)
    np.testing.assert_allclose(found, after_each(within_two, w), rtol=1e-5)
    assert found[0] == 2.0
    assert found[1] < -1.0  # neither of its two gradients is clipped
    make(tg.rules.tap_gradient(where, lambda place, g: seen.append((place, *g.tolist()))))(w)
    jax.effects_barrier()
    if way not in ("tapes", "a tape under jax.grad"):  # whose inner gradient is None
        assert not np.any(make(tg.rules.stop_gradient(where))(w))
    inner, outer = 3 * w**2, after_each(lambda g: g, w)
    assert {place for place, *_ in seen} == {"w"}
    np.testing.assert_allclose(sorted([g for _, *g in seen]), [outer, inner], rtol=1e-5)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_parameter_that_is_stopped_is_frozen_in_gradients_of_gradients_too(around):
    """Where a gradient of the parameter is taken inside, the rule has acted already."""

    def loss(params):
        return params["w"] ** 3 * params["b"]

    def adapted(params):  # w³ (b - 0.1 w³), if w is not moved
        gradients = around(jax.grad(loss))(params)
        return loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))

    rule = tg.rules.stop_gradient(tg.match.param("params.w"))
    inside = tg.trace(lambda params: jax.grad(adapted)(params), rules=[rule])
    traced, edited = tg.trace(adapted, rules=[rule]), tg.rewrite(adapted, rule)
    for gradient in (inside, jax.grad(traced), jax.grad(edited)):
        assert gradient({"w": 0.5, "b": 2.0}) == {"w": 0.0, "b": 0.125}


SECOND = {
    "jax.hessian": lambda f, p: jax.hessian(f)(p),
    "jax.hessian with aux": lambda f, p: jax.hessian(lambda q: (f(q), 1), has_aux=True)(p)[0],
    "tg.hessian": lambda f, p: tg.hessian(f)(p),
    "jacfwd of grad": lambda f, p: jax.jacfwd(jax.grad(f))(p),
    "jacrev of grad": lambda f, p: jax.jacrev(jax.grad(f))(p),
    "jacfwd of jacfwd": lambda f, p: jax.jacfwd(jax.jacfwd(f))(p),
    "jacobian of tg.grad": lambda f, p: tg.jacobian(tg.grad(f))(p),
    "hvp": lambda f, p: {"w": jax.vmap(lambda v: tg.hvp(f, (p,), v))({"w": jnp.eye(2)})},
}


@pytest.mark.parametrize("way", SECOND)
@pytest.mark.parametrize("glob", ["params.w", "q.w"])
def test_second_derivatives_are_scaled_once_for_each_derivative(way, glob):
    def of_parameter(q):
        return cube(q["w"])

    rule = tg.rules.scale_gradient(tg.match.param(glob), 3.0)
    step = tg.trace(lambda params: SECOND[way](of_parameter, params), rules=[rule])
    w = jnp.array([2.0, -0.5])
    np.testing.assert_allclose(step({"w": w})["w"]["w"], 3 * jnp.diag(6 * w) * 3, rtol=1e-5)


def test_a_derivative_of_a_scaled_gradient_that_the_rule_is_not_given_to_is_not_scaled():
    alone = tg.rewrite(cube, tg.rules.scale_gradient(tg.match.param("w"), 3.0))
    w = jnp.array([2.0, -0.5])
    np.testing.assert_allclose(jax.hessian(alone)(w), 3 * jnp.diag(6 * w), rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(alone, (w,), (w,))[1], 3 * 3 * w**3 @ jnp.ones(2), rtol=1e-5)


@pytest.mark.parametrize("name", ["critic", "maker"])
def test_a_gradient_penalty_is_taken_of_what_it_is_and_clipped_outside(name):
    """Its input is made of one parameter, and has the shape of both."""

    def critic(params, x):
        return jnp.sum(jnp.tanh(x @ params["critic"]))

    def loss(params, z):
        made = jnp.tanh(z @ params["maker"])
        return critic(params, made) + jnp.sum(jax.grad(critic, argnums=1)(params, made) ** 2)

    rule = tg.rules.clip_gradient(tg.match.param(f"params.{name}"), max_norm=0.5)
    params = {"critic": jnp.cos(jnp.arange(9.0)).reshape(3, 3), "maker": jnp.eye(3)}
    expected = jax.grad(loss)(params, jnp.ones((3, 3)))
    expected[name] *= min(1.0, 0.5 / float(jnp.linalg.norm(expected[name])))
    step = tg.trace(lambda params, z: jax.grad(loss)(params, z), rules=[rule])
    for gradient in (step, jax.grad(tg.trace(loss, rules=[rule]))):
        found = gradient(params, jnp.ones((3, 3)))
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5)


def test_further_steps_and_jitted_functions_of_tapes_have_the_rule_by_the_places_of_sources():
    """An array that is computed, or that enters a jitted function, has no path in the step."""

    def loss(params):
        return cube(params["w"])

    def adapted(gradient, params):
        for _ in range(2):
            step = jax.tree.map(lambda g: -0.1 * g, gradient(loss, params))
            params = jax.tree.map(jnp.add, params, step)
        return loss(params)

    def of_step(params):
        gradient = jax.jit(lambda params: by_tape(loss, params))
        return by_tape(lambda p: adapted(lambda f, p: gradient(p), p), params)

    rule = tg.rules.scale_gradient(tg.match.param("w"), 0.5)
    params = {"w": jnp.array([1.0, -0.5])}
    expected = jax.grad(lambda p: adapted(lambda f, p: {"w": 0.5 * 3 * p["w"] ** 2}, p))(params)
    direct = tg.trace(lambda p: by_tape(lambda p: adapted(by_tape, p), p), rules=[rule])
    for step in (direct, tg.trace(of_step, rules=[rule])):
        np.testing.assert_allclose(step(params)["w"], 0.5 * expected["w"], rtol=1e-5)


@pytest.mark.both_jax
@pytest.mark.parametrize("inner", [jax.grad, of_tape], ids=["jax.grad", "tape"])
def test_an_outer_gradient_that_the_rule_does_not_reach_is_refused(inner):
    """The rule acted on the inner gradient alone."""
    if inner is jax.grad:
        inner = lambda f: jax.grad(f)  # noqa: E731 (looked up while the step is traced)
    rule = tg.rules.scale_gradient(tg.match.param("w"), 3.0)
    clip = tg.rules.clip_gradient(tg.match.param("w"), max_value=2.0)
    w = jnp.array([2.0, -0.5])
    for each in (rule, clip):
        step = tg.trace(lambda w: grad_by_name(lambda w: adapted_by(inner, w))(w), rules=[each])
        with pytest.raises(tg.GraphError, match="and another one around it"):
            step(w)


def test_an_outer_gradient_by_name_of_another_argument_is_not_refused():
    rule = tg.rules.scale_gradient(tg.match.param("w"), 3.0)
    w = jnp.array([2.0, -0.5])
    step = tg.trace(
        lambda w, x: grad_by_name(lambda x: jnp.sum(jax.grad(cube)(w) * x))(x), rules=rule
    )
    np.testing.assert_allclose(step(w, w), 3 * 3 * w**2, rtol=1e-6)


def test_a_second_gradient_that_the_rule_does_not_reach_is_refused():
    """The rule acted on the first gradient alone."""
    clip = tg.rules.clip_gradient(tg.match.param("w"), max_value=2.0)
    w, x = jnp.array([2.0, -0.5]), jnp.array([0.1, 0.2])
    made = jax.grad(cube)
    step = tg.trace(lambda w: (jax.grad(cube)(w), made(w)), rules=[clip])
    with pytest.raises(tg.GraphError, match="differentiated already"):
        step(w)
    outer = tg.trace(lambda w: jax.jit(grad_by_name(adapted))(w), rules=[clip])
    with pytest.raises(tg.GraphError, match="differentiated already"):
        outer(w)

    def with_slope(w, x):  # inside of a gradient on which the rule acts: of x alone
        return jnp.sum(grad_by_name(lambda x: jnp.sum(jnp.sin(x * w)))(x) ** 2)

    found = tg.trace(lambda w, x: jax.grad(with_slope)(w, x), rules=[clip])(w, x)
    np.testing.assert_allclose(found, within_two(jax.grad(with_slope)(w, x)), rtol=1e-6)


@pytest.mark.both_jax
def test_a_traced_function_that_takes_gradients_is_clipped_under_every_transformation():
    """Of a function that takes a gradient inside, and for which the rule acts on its own, too."""
    clip = tg.rules.clip_gradient(tg.match.param("w"), max_norm=2.0)
    traced = tg.trace(adapted, rules=[clip])

    def within_norm(gradient):
        return gradient * jnp.minimum(1.0, 2.0 / jnp.linalg.norm(gradient))

    ws = jnp.array([[2.0, -0.5], [0.1, 3.0], [0.2, 0.1]])
    expected = jnp.stack([after_each(within_norm, w) for w in ws])
    gradient = jax.grad(traced)
    np.testing.assert_allclose(jax.vmap(gradient)(ws), expected, rtol=1e-5)
    np.testing.assert_allclose(
        jax.grad(lambda ws: jnp.sum(jax.vmap(traced)(ws)))(ws), expected, rtol=1e-5
    )
    np.testing.assert_allclose(jax.jit(jax.vmap(gradient, 1, 1))(ws.T).T, expected, rtol=1e-5)
    np.testing.assert_allclose(jax.lax.map(gradient, ws), expected, rtol=1e-5)
    np.testing.assert_allclose(gradient(ws[0]), expected[0], rtol=1e-5)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(traced))(ws[0]), expected[0], rtol=1e-5)
    scanned = lambda w: jax.lax.scan(lambda c, _: (c, traced(c)), w, None, length=1)[1][0]  # noqa: E731
    np.testing.assert_allclose(jax.grad(scanned)(ws[0]), expected[0], rtol=1e-5)
    mesh, everywhere = jax.make_mesh((1,), ("i",)), jax.sharding.PartitionSpec()
    sharded = jax.shard_map(traced, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    np.testing.assert_allclose(jax.grad(sharded)(ws[0]), expected[0], rtol=1e-5)


FORWARD_OVER_REVERSE = {
    "tg.hvp in a trace": lambda clipped, w: clipped(lambda w: tg.hvp(cube, (w,), jnp.ones(2)))(w),
    "a jvp by name in a trace": lambda clipped, w: clipped(
        lambda w: jvp_by_name(jax.grad(cube), (w,), (jnp.ones(2),))[1]
    )(w),
    "jax.jvp of a trace": lambda clipped, w: jax.jvp(
        clipped(lambda w: jax.grad(cube)(w)), (w,), (jnp.ones(2),)
    )[1],
    "tg.jvp of a trace": lambda clipped, w: tg.jvp(
        clipped(lambda w: jax.grad(cube)(w)), (w,), (jnp.ones(2),)
    )[1],
}


@pytest.mark.both_jax
@pytest.mark.parametrize("way", FORWARD_OVER_REVERSE)
def test_forward_mode_over_a_gradient_is_that_of_the_clipped_gradient(way):
    clip = tg.rules.clip_gradient(tg.match.param("w"), max_value=1.0)
    w = jnp.array([0.1, 2.0])  # 3 w² is below 1, and above
    found = FORWARD_OVER_REVERSE[way](lambda f: tg.trace(f, rules=[clip]), w)
    np.testing.assert_allclose(found, [0.6, 0.0], rtol=1e-6)


@pytest.mark.both_jax
def test_forward_mode_that_a_rule_of_parameters_has_no_place_in_is_refused():
    w, scale = jnp.array([0.1, 2.0]), tg.rules.scale_gradient(tg.match.param("w"), 3.0)
    step = tg.trace(lambda w: jvp_by_name(jax.grad(cube), (w,), (w,))[1], rules=[scale])
    with pytest.raises(tg.GraphError, match="another one around it"):
        step(w)
    clip = tg.rules.clip_gradient(tg.match.param("w"), max_value=1.0)
    with pytest.raises(TypeError, match="forward-mode"):  # no gradient is taken inside
        jax.jvp(tg.trace(cube, rules=[clip]), (w,), (w,))
