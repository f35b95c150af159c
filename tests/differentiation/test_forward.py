"""`jvp`: as jax.jvp, and through custom gradients the transpose of their backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint

import tracegrad as tg
from tests.derivatives import log1pexp
from tracegrad import custom_gradient, grad, jvp

pytestmark = pytest.mark.both_jax

X = np.array([0.3, -1.2, 2.0])
T = np.array([1.0, 0.5, -2.0])


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@jax.custom_vjp
def product(x, y):
    return jnp.sin(x) * y, jnp.sum(y**2)


def product_forward(x, y):
    return product(x, y), (x, y)


def product_backward(saved, cotangents):
    x, y = saved
    dz, ds = cotangents
    return dz * jnp.cos(x) * y, dz * jnp.sin(x) + 2 * y * ds


product.defvjp(product_forward, product_backward)


@jax.custom_jvp
def product_forwards(x, y):
    return jnp.sin(x) * y, jnp.sum(y**2)


@product_forwards.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    dz = jnp.cos(x) * y * dx + jnp.sin(x) * dy
    return product_forwards(x, y), (dz, jnp.sum(2 * y * dy))


def plain(rule):
    def f(x, y):
        z, s = rule(jnp.tanh(x), y * 2)
        return jnp.cumsum(z) * s

    return f


def in_jit(rule):
    return lambda x, y: jax.jit(plain(rule))(x, y) + jax.jit(plain(rule))(y, x)


def in_scan(rule):
    def f(x, y):
        def step(carry, one):
            z, s = rule(carry, one + y)
            return z * 0.5, s

        last, stacked = lax.scan(step, x, jnp.stack([x, y]))
        return last * stacked[1] + stacked[0]

    return f


def in_cond(rule):
    def f(x, y):
        return lax.cond(x[0] > 0, lambda x, y: rule(x, y)[0], lambda x, y: x, x, y) * y

    return f


def in_while(rule):
    def f(x, y):
        return lax.while_loop(lambda s: s[1] < 3, lambda s: (rule(s[0], y)[0], s[1] + 1), (x, 0))[0]

    return f


def in_checkpoint(rule):
    return jax.checkpoint(plain(rule))


def in_vmap(rule):
    return lambda x, y: jax.vmap(rule, (None, 0))(x, jnp.stack([x, y]))


def in_traced(rule):
    return tg.trace(plain(rule))


PLACES = [plain, in_jit, in_scan, in_cond, in_while, in_checkpoint, in_vmap, in_traced]
each_place = pytest.mark.parametrize("place", PLACES, ids=lambda p: p.__name__)


def assert_close(got, expected, **tolerance):
    tolerance = {"rtol": 1e-9, "atol": 1e-9, **tolerance}
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


def finite_difference(fun, primals, tangents, step=1e-6):
    there, back = (
        fun(*(p + s * t for p, t in zip(primals, tangents, strict=True))) for s in (step, -step)
    )
    return jax.tree.map(lambda a, b: (a - b) / (2 * step), there, back)


# ----------------------------------------------------------------------------------- as jax.jvp


@pytest.mark.usefixtures("x64")
def test_without_custom_gradients_it_is_jax_jvp():
    def f(x, tree):
        return {"sum": jnp.sum(x * tree["a"]), "scan": lax.scan(lambda c, z: (c * z, c), 1.0, x)}

    primals, tangents = (X, {"a": X**2}), (T, {"a": T})
    assert_close(jvp(f, primals, tangents), jax.jvp(f, primals, tangents))


def test_auxiliary_results_and_integers():
    def f(x, n):
        return log1pexp(x) * n, {"n": n}

    zero = np.zeros((), jax.dtypes.float0)
    y, dy, aux = jvp(f, (0.0, 3), (1.0, zero), has_aux=True)
    np.testing.assert_allclose((y, dy), (3 * np.log(2), 1.5), rtol=1e-6)
    assert aux == {"n": 3}


def test_a_variable_among_the_primals_is_its_value():
    assert jvp(lambda v: v * v, (tg.Variable(3.0),), (1.0,)) == (9.0, 6.0)


def test_what_does_not_fit_is_refused_as_by_jax():
    with pytest.raises(TypeError, match="primals and tangents are tuples"):
        jvp(log1pexp, 1.0, 1.0)
    with pytest.raises((TypeError, ValueError), match="tangent"):
        jvp(log1pexp, (1.0,), (jnp.ones(3),))
    with pytest.raises((TypeError, ValueError), match="tree structure"):
        jvp(log1pexp, (1.0,), (1.0, 1.0))


# ------------------------------------------------------------------------- through custom rules


@pytest.mark.usefixtures("x64")
@each_place
def test_a_custom_vjp_gets_the_jvp_of_a_hand_written_one(place):
    primals, tangents = (X, X[::-1] * 0.7), (T, T**2)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(place(product), primals, tangents)
    got = jvp(place(product), primals, tangents)
    by_hand = jax.jit(lambda p, t: jax.jvp(place(product_forwards), p, t))
    assert_close(got, by_hand(primals, tangents))
    function = jax.jit(place(product))
    assert_close(got[0], function(*primals))
    assert_close(got[1], finite_difference(function, primals, tangents), rtol=1e-6, atol=1e-6)
    assert_close(jax.jit(lambda *p: jvp(place(product), p, tangents))(*primals), got)


@pytest.mark.usefixtures("x64")
@each_place
def test_it_is_differentiable_batchable_and_its_own_jvp(place):
    primals, tangents = (X, X[::-1] * 0.7), (T, T**2)

    def along(transform, rule, x):
        return transform(place(rule), (x, primals[1]), tangents)

    def ways(transform, rule):
        def once(x):
            return along(transform, rule, x)

        def twice(x):
            return transform(once, (x,), (T,))

        def every(x):
            found = [twice(x), transform(twice, (x,), (T,))]
            found.append(jax.vmap(once)(jnp.stack([x, 2 * x])))
            found.append(jax.jvp(once, (x,), (T,)))
            if place is not in_while:  # JAX has no reverse mode there
                y, pullback = jax.vjp(once, x)
                found.append(pullback(jax.tree.map(jnp.ones_like, y)))
            return found

        return jax.jit(every)

    assert_close(ways(jvp, product)(X), ways(jax.jvp, product_forwards)(X))


def test_forward_and_reverse_agree_where_the_rule_is_not_the_derivative():
    @custom_gradient
    def straight_through(x):
        return jnp.round(x), lambda dy: 3 * dy

    def f(x):
        return jnp.sum(straight_through(x) ** 2 * x)

    x, t = jnp.array([0.6, 1.7, -2.2]), jnp.array([1.0, -1.0, 0.5])
    _, along = jvp(f, (x,), (t,))
    np.testing.assert_allclose(along, jnp.vdot(grad(f)(x), t), rtol=1e-6)
    # The derivative of the value is the rule at the second order too, not that of `round`.
    second = jvp(lambda x: jvp(straight_through, (x,), (1.0,))[0], (0.6,), (1.0,))
    assert [float(v) for v in second] == [1.0, 3.0]


def test_a_missing_gradient_is_a_tangent_of_zero():
    @custom_gradient
    def one_sided(x, y):
        return x * y, lambda dy: (dy * y, None)

    assert jvp(one_sided, (2.0, 3.0), (1.0, 10.0)) == (6.0, 3.0)
    assert jvp(lambda y: one_sided(2.0, y), (3.0,), (1.0,)) == (6.0, 0.0)


def test_integer_results_and_closed_over_values():
    def f(x, k):
        @custom_gradient
        def scaled(x):
            return (x * k, jnp.argmax(x)), lambda dy, _: dy * k

        y, i = scaled(x)
        return y[i] + y.sum()

    x, t = jnp.array([1.0, 3.0, 2.0]), jnp.array([1.0, 10.0, 100.0])
    y, dy = jvp(lambda x: f(x, jnp.float32(2.0)), (x,), (t,))
    assert (y, dy) == (18.0, 242.0)
    assert jax.jit(lambda x, k: jvp(lambda x: f(x, k), (x,), (t,)))(x, 2.0) == (18.0, 242.0)


def test_inside_of_a_shard_map():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("d")

    @custom_gradient
    def square(x):
        return x * x, lambda dy: 2 * dy * x

    def total(x, check):
        mapped = jax.shard_map(
            square, mesh=mesh, in_specs=(split,), out_specs=split, check_vma=check
        )
        return jnp.sum(mapped(x))

    x = jnp.arange(8.0)
    assert jvp(lambda x: total(x, False), (x,), (x,)) == (140.0, 280.0)
    with pytest.raises(ValueError, match=r"square.* varies over its axes d: .*check_vma=False"):
        jvp(lambda x: total(x, True), (x,), (x,))


def test_effects_of_a_rule_happen_once():
    seen = []

    @custom_gradient
    def noisy(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        return x * x, lambda dy: 2 * dy * x

    assert jax.jit(lambda x: jvp(noisy, (x,), (1.0,)))(3.0) == (9.0, 6.0)
    jax.effects_barrier()
    assert seen == [3.0]


# ------------------------------------------------------------------- what has no forward mode


def rule_with(backward):
    @custom_gradient
    def rule(x):
        return x * 1.0, lambda dy: backward(dy, x)

    return rule


@jax.custom_jvp
def shifted(dy):
    return dy + 1.0


shifted.defjvp(lambda primals, tangents: (shifted(*primals), tangents[0]))


def steps(body, start):
    return lax.scan(lambda c, _: (body(c), None), start, None, length=3)[0]


@pytest.mark.parametrize(
    "backward",
    [
        lambda dy, x: jnp.clip(dy, -1, 1),
        lambda dy, x: jnp.sign(dy),
        lambda dy, x: dy * dy,
        lambda dy, x: dy / jnp.maximum(jnp.linalg.norm(dy), 1.0),
        lambda dy, x: jnp.where(dy > 0, dy, 0.0),
        lambda dy, x: dy + 1.0,
        lambda dy, x: dy + x,
        lambda dy, x: x,
        lambda dy, x: jnp.where(x > 0, dy, 1.0),
        lambda dy, x: jnp.concatenate([dy[:2], jnp.ones(1)]),
        lambda dy, x: jnp.concatenate([dy[:2], x[:1]]),
        lambda dy, x: jnp.round(dy),
        lambda dy, x: jax.jit(jnp.add)(dy, x),
        lambda dy, x: jax.checkpoint(lambda dy: dy + x)(dy),
        lambda dy, x: shifted(dy),
        lambda dy, x: steps(lambda c: c + x, dy),
        lambda dy, x: steps(lambda c: c + dy, x),
        lambda dy, x: lax.fori_loop(0, 3, lambda _, c: c + 1.0, dy),
        lambda dy, x: lax.cond(x[0] > 0, lambda: dy + 1.0, lambda: dy),
        lambda dy, x: lax.cond(x[0] > 0, lambda: dy, lambda: x),
    ],
)
def test_a_backward_that_is_not_linear_is_refused_by_name_and_line(backward):
    rule = rule_with(backward)

    def f(x):
        return jnp.sum(rule(x))

    line = f.__code__.co_firstlineno + 1
    message = (
        rf"the custom gradient rule at test_forward.py:{line} \(.*f\) has no forward-mode "
        "derivative: that is the transpose of its backward, which is not linear"
    )
    for function in (f, jax.jit(f)):
        with pytest.raises(ValueError, match=message):
            jvp(function, (jnp.array(X, "float32"),), (jnp.ones(3),))


def test_a_backward_that_calls_its_own_function_with_the_cotangent_is_refused():
    """Its transpose is that of the next one's backward, and so on; JAX's odeint is such, too."""

    @jax.custom_vjp
    def solve(a, b):
        return jnp.linalg.solve(a, b)

    def forward(a, b):
        x = solve(a, b)
        return x, (a, x)

    def backward(kept, ct):
        a, x = kept
        y = solve(a.T, ct)
        return -jnp.outer(y, x), y

    solve.defvjp(forward, backward)
    a = jnp.array([[2.0, 1.0], [0.5, 3.0]])
    with pytest.raises(ValueError, match=r"solve at test_forward.*calls the rule again, so that"):
        jvp(lambda a: solve(a, jnp.ones(2)), (a,), (a,))
    with pytest.raises(ValueError, match=r"_odeint .*calls the rule again, so that"):
        jvp(lambda a: odeint(lambda y, t: -a * y, 1.0, jnp.arange(2.0)), (1.3,), (1.0,))


def iterate(step, y):
    """A fixed point of a step, by a loop that ends when it no longer moves."""
    moves = lambda pair: jnp.abs(pair[0] - pair[1]) > 1e-7  # noqa: E731
    return lax.while_loop(moves, lambda pair: (step(pair[0]), pair[0]), (step(y), y))[0]


def solve_linear(matvec, ct):
    def solver(matvec, b):
        return iterate(lambda u: u - matvec(u) + b, b)

    return lax.custom_linear_solve(matvec, ct, solver, transpose_solve=solver)


def by_loop(matvec, ct):
    return iterate(lambda u: u - matvec(u) + ct, ct)


def by_cg(matvec, ct):  # JAX has no transpose of it
    return jax.scipy.sparse.linalg.cg(matvec, ct, tol=1e-8)[0]


def around_cg(matvec, ct):
    return lax.custom_linear_solve(matvec, ct, by_cg, symmetric=True)


def implicit(solve):
    """The root of y = cos(a y) by iteration, with an implicit derivative."""

    @jax.custom_vjp
    def root(a):
        return iterate(lambda y: jnp.cos(a * y), a)

    def backward(kept, ct):
        a, y = kept
        sine = jnp.sin(a * y)
        return (-y * sine * solve(lambda u: u + a * sine * u, ct),)

    root.defvjp(lambda a: (root(a), (a, root(a))), backward)
    return root


def unrolled(a):
    return functools.reduce(lambda y, _: jnp.cos(a * y), range(60), a)


@pytest.mark.parametrize("solve", [by_loop, by_cg])
def test_an_implicit_derivative_by_a_loop_is_told_of_custom_linear_solve(solve):
    cure = r"root at .*call jax\.lax\.custom_linear_solve, also around a solver of jax\.scipy"
    with pytest.raises(ValueError, match=cure):
        tg.hvp(implicit(solve), (0.5,), 1.0)


@pytest.mark.parametrize("solve", [solve_linear, around_cg])
def test_an_implicit_derivative_by_custom_linear_solve_has_second_derivatives(solve):
    cured = implicit(solve)
    np.testing.assert_allclose(grad(cured)(0.5), jax.grad(unrolled)(0.5), rtol=1e-5)
    second = jax.grad(jax.grad(unrolled))(0.5)
    np.testing.assert_allclose(tg.hvp(cured, (0.5,), 1.0), second, rtol=1e-4)


@pytest.mark.parametrize(
    "backward",
    [
        lambda dy, x: dy * x,
        lambda dy, x: jnp.where(x > 0, dy, 0.0),
        lambda dy, x: jnp.zeros_like(x).at[jnp.argsort(x)].set(dy),
        lambda dy, x: jnp.zeros_like(x),
        lambda dy, x: jnp.concatenate([dy[:2], jnp.zeros(1)]),
        lambda dy, x: jnp.pad(dy[1:], (0, 1)) + dy / 2 - dy @ jnp.outer(x, x),
        lambda dy, x: lax.scan(lambda c, z: (c + z * jnp.sin(x), c), dy, dy)[0],
        lambda dy, x: jnp.real(jnp.fft.ifft(jnp.fft.fft(dy))),
        lambda dy, x: jax.vjp(jnp.tanh, x)[1](dy)[0],
        lambda dy, x: lax.cond(x[0] > 0, lambda d: d * 2, lambda d: d, dy),
        lambda dy, x: lax.cond(x[0] > 0, lambda: x * dy, lambda: jnp.zeros_like(dy)),
        lambda dy, x: lax.fori_loop(0, 3, lambda i, d: (i + 1) * d * x, dy),
        lambda dy, x: steps(lambda c: c * x + dy, jnp.zeros_like(dy)),
        lambda dy, x: dy * x + 0.0,
        lambda dy, x: jax.jit(lambda z: -z.at[0].set(0.0).sum())(jnp.zeros(3)) * dy,
        lambda dy, x: jnp.zeros(3).at[jnp.array([0, 0, 1])].add(dy)[::-1],
        lambda dy, x: product(x, dy)[0],
        lambda dy, x: custom_gradient(lambda dy: (dy * x, lambda ddy: ddy * x))(dy),
        lambda dy, x: jnp.cumsum(dy) + dy.sum() + jnp.sort(x) * 0 * dy,
    ],
)
def test_a_linear_backward_is_transposed(backward):
    rule = rule_with(backward)
    x = jnp.array(X, "float32")
    matrix = jnp.stack([grad(lambda x, i=i: rule(x)[i])(x) for i in range(3)])
    for t in (jnp.eye(3)[0], jnp.eye(3)[1], jnp.array(T, "float32")):
        _, along = jvp(rule, (x,), (t,))
        np.testing.assert_allclose(along, matrix @ t, rtol=1e-5, atol=1e-6)


def test_a_rule_off_the_path_may_be_anything():
    clipped = rule_with(lambda dy, x: jnp.clip(dy, -1, 1))
    assert jvp(lambda x: x * clipped(3.0), (2.0,), (1.0,)) == (6.0, 3.0)


def test_an_error_in_the_rule_itself_stays_what_it_is():
    broken = rule_with(lambda dy, x: dy[:2])
    with pytest.raises(ValueError, match="has the shape of its input"):
        jvp(broken, (jnp.ones(3),), (jnp.ones(3),))
