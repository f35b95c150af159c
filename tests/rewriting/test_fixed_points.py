"""The rule for loops that converge: derivatives of the fixed point, by one linear equation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tests.harnesses import same_program
from tracegrad import match, rules

LOOPS = match.op("while")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def implicit(fun, *args, **kwargs):
    return tg.rewrite(fun, rules.fixed_point(LOOPS, *args, **kwargs))


def babylonian(a):
    return lax.while_loop(lambda x: jnp.abs(x * x - a) > 1e-9, lambda x: 0.5 * (x + a / x), a)


def kepler(mean, eccentricity):
    """The eccentric anomaly: E = M + e sin(E), of which dE/dM = 1 / (1 - e cos E)."""

    def step(carry):
        angle, _, steps = carry
        new = mean + eccentricity * jnp.sin(angle)
        return new, jnp.abs(new - angle), steps + 1

    return lax.while_loop(lambda carry: carry[1] > 1e-12, step, (mean, jnp.inf, 0))[0]


def limited(a, steps):
    """Towards x = a cos(x) / 2, so many steps."""
    start = (a, jnp.zeros_like(steps))
    going = lax.while_loop(
        lambda c: c[1] < steps, lambda c: (0.5 * jnp.cos(c[0]) * a, c[1] + 1), start
    )
    return going[0]


def bisected(a):  # the square root
    def halve(bounds):
        middle = (bounds[0] + bounds[1]) / 2
        below = middle * middle < a
        return jnp.where(below, middle, bounds[0]), jnp.where(below, bounds[1], middle)

    return lax.while_loop(lambda c: c[1] - c[0] > 1e-9, halve, (0 * a, a))[0]


def layer(weights, x):
    """A layer in equilibrium, and the state before: it carries its error and a count."""

    def step(carry):
        z, _, _, count = carry
        new = jnp.tanh(weights @ z + x)
        return new, z, jnp.linalg.norm(new - z), count + 1

    def goes_on(carry):
        return (carry[2] > 1e-11) & (carry[3] < 300)

    start = (jnp.zeros_like(x), jnp.ones_like(x), jnp.inf, 0)
    return lax.while_loop(goes_on, step, start)[:2]


def test_derivatives_of_both_modes_and_orders_are_those_worked_out_by_hand():
    solved = implicit(kepler)
    m, e = jnp.asarray(1.0), jnp.asarray(0.3)

    @jax.jit
    def derivatives(m, e):
        mixed = jax.jvp(jax.grad(solved), (m, e), (1.0, 0.0))[1]
        return *jax.jvp(solved, (m, e), (1.0, 0.0)), jax.grad(solved, (0, 1))(m, e), mixed

    value, tangent, gradient, second = derivatives(m, e)
    assert value == kepler(m, e)
    slope = 1 / (1 - e * jnp.cos(value))
    np.testing.assert_allclose(tangent, slope, rtol=1e-11)
    np.testing.assert_allclose(gradient, (slope, jnp.sin(value) * slope), rtol=1e-11)
    np.testing.assert_allclose(second, -e * jnp.sin(value) * slope**3, rtol=1e-9)


@pytest.mark.parametrize("solve", ["neumann", lambda matvec, b: b / matvec(jnp.ones(1))])
def test_the_derivative_of_a_root_is_that_of_the_root(solve):
    slope = jax.grad(implicit(babylonian, solve))
    found = jax.jit(jax.value_and_grad(slope))(9.0)
    np.testing.assert_allclose(found, (1 / 6, -1 / 108), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("solve", ["neumann", "gmres"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_layer_in_equilibrium_is_differentiated_as_by_forward_mode(solve, which):
    random = np.random.default_rng(0)
    weights, x, u = (jnp.asarray(random.normal(size=s)) for s in ((4, 4), (4,), (4, 4)))
    weights = 0.25 * weights

    def loss(weights):
        return jnp.sum(layer(weights, x)[which] ** 3)

    along = jax.jvp(loss, (weights,), (u,))[1]
    gradient = jax.jit(jax.grad(implicit(loss, solve)))(weights)
    np.testing.assert_allclose(jnp.vdot(gradient, u), along, rtol=1e-8)
    tg.check_grads(implicit(loss, solve), (weights,), order=2)


def test_what_is_carried_and_is_no_part_of_the_equation_does_not_disturb_it():
    """The derivative of a norm at zero is NaN; the state before is a state as well."""
    weights, x = jnp.array([[0.2, 0.4], [-0.3, 0.1]]), jnp.array([0.5, -0.2])

    def loss(x):
        z, before = jax.jit(layer)(weights, x)
        return jnp.sum(z**2 * before)

    along = jax.jvp(loss, (x,), (jnp.ones(2),))[1]  # of the steps
    gradient = jax.jit(jax.grad(implicit(loss)))(x)
    np.testing.assert_allclose(jnp.sum(gradient), along, rtol=1e-9)


def test_complex_states_that_are_conjugated():
    def loss(a):
        start = (a + 0j, 0)
        z, _ = lax.while_loop(
            lambda c: c[1] < 60,
            lambda c: (0.3 * jnp.conj(c[0]) * c[0] + a * (0.5 + 0.2j), c[1] + 1),
            start,
        )
        return jnp.abs(z)

    along = jax.jvp(loss, (0.7,), (1.0,))[1]
    np.testing.assert_allclose(jax.jit(jax.grad(implicit(loss)))(0.7), along, rtol=1e-9)


def test_loops_in_the_steps_that_do_not_match_are_differentiated_by_their_steps():
    def solver(a, n):
        def step(carry):
            y = lax.fori_loop(0, n, lambda i, y: 0.5 * y + 0.1 * jnp.sin(a * y), carry[0])
            return 0.5 * y + a, carry[1] + 1

        return lax.while_loop(lambda c: c[1] < 40, step, (a, 0))[0]

    edited = tg.rewrite(lambda a: jax.jit(solver)(a, 2), rules.fixed_point(match.call("solver")))
    along = jax.jvp(lambda a: solver(a, 2), (0.8,), (1.0,))[1]
    np.testing.assert_allclose(jax.jit(jax.grad(edited))(0.8), along, rtol=1e-9)


def test_where_a_loop_was_ended_by_its_limit_of_steps_the_gradient_is_nan_there_alone():
    slope = jax.jit(jax.vmap(jax.grad(implicit(limited)), (None, 0)))
    few, none, enough = slope(1.0, jnp.array([3, 0, 60]))
    x = limited(1.0, 60)
    assert np.isnan([few, none]).all()
    np.testing.assert_allclose(enough, jnp.cos(x) / 2 / (1 + jnp.sin(x) / 2), rtol=1e-12)


def slowly(a):
    """Each step goes a thousandth of the way, and they stop at a hundredth of it."""

    def step(carry):
        return carry[0] + 1e-3 * (a - carry[0]), carry[1] + 1

    return lax.while_loop(lambda c: c[1] < 10, step, (0.5 * a, 0))[0]


def accumulated(a):
    return lax.while_loop(lambda c: c[1] < 5, lambda c: (c[0] + 1e-9, c[1] + 1), (a, 0))[0]


def of_its_start(a):
    return lax.while_loop(lambda x: x < 3.0, lambda x: 1.5 * x, a)


def by_comparisons_alone(a):
    """The start is what counts, and what is compared; no derivative leads to either."""
    return lax.while_loop(lambda c: c[1] < a, lambda c: (0.5 * c[0], c[1] + 1), (1.0, 0.0))[0]


@pytest.mark.parametrize("fun", [bisected, slowly, accumulated, of_its_start, by_comparisons_alone])
@pytest.mark.parametrize("solve", ["neumann", pytest.param("gmres", marks=pytest.mark.slow)])
def test_what_is_no_fixed_point_of_a_contraction_has_a_derivative_of_nan(fun, solve):
    solved = implicit(fun, solve)
    assert np.isnan(jax.jit(jax.grad(solved))(2.5))
    assert np.isnan(jax.jit(lambda a: jax.jvp(solved, (a,), (1.0,))[1])(2.5))


def test_a_rule_that_keeps_zeros_does_not_make_zero_of_that():
    solved = tg.rewrite(bisected, rules.fixed_point(LOOPS), rules.strong_zero())
    assert np.isnan(jax.jit(jax.grad(solved))(2.5))


def test_explain_says_why_it_is_nan():
    (finding,) = tg.explain(implicit(bisected), 3.0).problems
    assert finding.cause == "NaN in the reverse pass"
    assert "no contraction there (as those of a bisection)" in finding.what
    assert "rules.checkpointed_loop" in finding.cure
    assert finding.rule is None
    assert finding.origin.line == bisected.__code__.co_firstlineno + 6


def test_without_derivatives_the_program_is_the_one_before():
    a, batch = jnp.asarray(4.0), jnp.ones(3)
    assert same_program(*(jax.jit(f).lower(a) for f in (implicit(babylonian), babylonian)))
    batched = (jax.jit(jax.vmap(f)).lower(batch) for f in (implicit(babylonian), babylonian))
    assert same_program(*batched)


def test_rules_of_a_trace_and_tapes_and_scans_reach_loops():
    rule = rules.fixed_point(LOOPS)
    a = jnp.asarray(4.0)

    def twice(a):
        return lax.scan(lambda c, _: (babylonian(c), None), a, None, 2)[0]

    @tg.trace(rules=[rule])
    def step(a):
        return jax.grad(babylonian)(a), tg.grad(jax.checkpoint(twice))(a)

    np.testing.assert_allclose(step(a), [0.25, 0.25 * 4**-0.75], rtol=1e-9)
    with tg.GradientTape() as tape:
        tape.watch(a)
        y = tg.rewrite(babylonian, rule)(a)
    np.testing.assert_allclose(tape.gradient(y, a), 0.25, rtol=1e-9)


def test_a_saved_function_has_the_derivative(tmp_path):
    a = jnp.asarray(4.0)
    tg.save(implicit(babylonian), tmp_path / "root.tg", [jax.typeof(a)])
    np.testing.assert_allclose(jax.grad(tg.load(tmp_path / "root.tg"))(a), 0.25, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "solve"), [(jnp.float32, "gmres"), (jnp.bfloat16, "neumann")])
def test_what_is_computed_in_less_precision_counts_as_converged_by_that(dtype, solve):
    def root(a):
        def step(c):
            return (0.3 * c[0] + 0.35 * (a / c[0] + c[0])).astype(dtype), c[1] + 1

        return lax.while_loop(lambda c: c[1] < 25, step, (a, 0))[0]

    gradient = jax.jit(jax.grad(implicit(root, solve)))(jnp.asarray(3.0, dtype))
    np.testing.assert_allclose(float(gradient), 0.5 / 3**0.5, rtol=4 * jnp.finfo(dtype).eps)


@pytest.mark.parametrize("together", [False, True])
def test_on_several_devices_each_solves_its_own_equation_and_common_ones_are_refused(together):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def one(x):
        def step(carry):
            z, _ = carry
            z = jnp.tanh((lax.psum(z, "d") if together else z) / 4 + x)
            return z, jnp.max(jnp.abs(z - carry[0]))

        start = (jnp.zeros_like(x), jnp.max(x) + jnp.inf)
        return lax.while_loop(lambda c: lax.pmax(c[1], "d") > 1e-12, step, start)[0]

    def loss(x):
        return jnp.sum(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)(x) ** 2)

    x, spec = jnp.array([0.3, -0.7]), jax.sharding.PartitionSpec("d")
    if together:
        with pytest.raises(tg.GraphError, match=r"test_fixed.* with others along an axis"):
            implicit(loss)(x)
        return
    along = jax.jvp(loss, (x,), (jnp.ones(2),))[1]
    np.testing.assert_allclose(jnp.sum(jax.jit(jax.grad(implicit(loss)))(x)), along, rtol=1e-9)


def test_what_solves_no_equation_is_refused():
    with pytest.raises(ValueError, match=r"'neumann', 'gmres' or a function .* not 'cholesky'"):
        rules.fixed_point(LOOPS, "cholesky")
