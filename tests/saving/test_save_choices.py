"""Of a loaded function, as of the original, results without a cotangent take no part in a gradient:
their rules are not asked, and their infinite derivatives make nothing NaN."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tracegrad as tg
from tests.derivatives import by_tape
from tracegrad import load, save
from tracegrad.saving.inspection import inspect

pytestmark = pytest.mark.both_jax

X = np.float32(2)


@tg.custom_gradient
def plus_one(x):
    return 3 * x, lambda dy: dy + 1


def pair(x):
    return x * x, plus_one(x)


def saved(fun, specs, path, order=1):
    save(fun, path / "function", specs, gradient_order=order)
    return load(path / "function")


def first(fun):
    return lambda *args: jnp.sum(jax.tree.leaves(fun(*args))[0])


def on_a_mesh(fun):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=P(), out_specs=P())


def carried(x):
    return lax.scan(lambda c, _: ((c[0], plus_one(c[1])), None), (x * x, x), None, 1)[0]


# (x², plus_one(x)) in other words: whichever call it is in, the first alone has the gradient 2 x.
PAIRS = {
    "plain": pair,
    "jitted": jax.jit(pair),
    "recomputed": jax.checkpoint(pair),
    "branch": lambda x: lax.cond(x > 0, pair, lambda x: (x, x), x),
    "carried": carried,
    "of each step": lambda x: lax.scan(lambda c, _: (c, plus_one(x)), x * x, None, 1),
    "on a mesh": on_a_mesh(pair),
    "deeper": lambda x: lax.scan(lambda c, _: jax.jit(pair)(c), x, None, 1),
    "shared": lambda x: (lambda y: (y * y / 4, plus_one(y)))(jnp.sqrt(4 * x * x)),
    "stopped": lambda x: (lambda y: (lax.stop_gradient(y) * x + x * x - 6 * x, y))(plus_one(x)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_rule_on_the_way_to_another_result_is_not_asked(name, tmp_path):
    loaded = saved(PAIRS[name], [X], tmp_path)
    assert jax.grad(first(loaded))(X) == 4
    assert by_tape(lambda x: loaded(x)[0], jnp.asarray(X)) == 4


def test_each_choice_of_results_has_its_gradient(tmp_path):
    loaded = saved(pair, [X], tmp_path)

    def loss(x, factors):
        return sum(f * y for f, y in zip(factors, loaded(x)) if f is not None)

    # 2 x for the first; dy + 1 for the second, once whatever the first has.
    choices = {(1, None): 4, (None, 1): 2, (1, 1): 6, (5, 7): 28, (0, 0): 1}
    for factors, expected in choices.items():
        assert jax.grad(loss)(X, factors) == expected


def cube_and_root(x):
    return x**3 + x, jnp.sqrt(x)


@jax.custom_jvp
def with_a_rule(x):
    return cube_and_root(x)


@with_a_rule.defjvp
def _(primals, tangents):
    ((x,), (moved,)) = primals, tangents
    return with_a_rule(x), ((3 * x**2 + 1) * moved, 0.5 / jnp.sqrt(x) * moved)


ROOTS = {
    "plain": cube_and_root,
    "branch": lambda x: lax.cond(x < 9, cube_and_root, lambda x: (x, x), x),
    "on a mesh": on_a_mesh(cube_and_root),
    "of each step": lambda x: lax.scan(lambda c, _: cube_and_root(c), x, None, 1),
    "with a rule": with_a_rule,
    "with a rule in a branch": lambda x: lax.cond(x < 9, with_a_rule, lambda x: (x, x), x),
    "with a rule in a loop": lambda x: lax.scan(lambda c, _: with_a_rule(c), x, None, 1),
}


@pytest.mark.parametrize("name", ROOTS)
def test_an_infinite_derivative_of_another_result_is_no_nan(name, tmp_path):
    loaded = saved(ROOTS[name], [X], tmp_path, order=2)
    zero = np.float32(0)
    assert jax.grad(first(loaded))(zero) == 1
    assert jax.grad(lambda x: jnp.sum(loaded(x)[1]))(zero) == np.inf
    assert jax.grad(jax.grad(first(loaded)))(zero) == 0
    assert jax.grad(jax.grad(first(loaded)))(X) == 12
    assert jax.jit(jax.grad(first(loaded)))(zero) == 1


def test_a_result_of_its_own_argument_is_left_out_among_many(tmp_path):
    def roots(*xs):
        return [jnp.sqrt(x) for x in xs]

    zeros = [np.float32(0)] * 6
    loaded = saved(roots, zeros, tmp_path)
    found = jax.grad(first(loaded), argnums=tuple(range(6)))(np.float32(4), *zeros[1:])
    assert found == (0.25, 0, 0, 0, 0, 0)


def test_derivatives_of_gradients_leave_out_what_the_gradient_left_out(tmp_path):
    loaded = saved(pair, [X], tmp_path, order=2)
    assert jax.grad(jax.grad(first(loaded)))(X) == 2
    # The rule's own derivative is that of dy + 1 by x, which is none.
    assert jax.grad(jax.grad(lambda x: sum(loaded(x))))(X) == 2

    def product(x, y):  # of which each gradient has a rule in it
        return plus_one(x) * y, x * y

    loaded = saved(product, [X, X], tmp_path, order=2)
    assert jax.grad(jax.grad(lambda x: loaded(x, X)[1] * x))(X) == 4  # of x² y
    by_x = jax.grad(lambda x, y: loaded(x, y)[0])  # y + 1
    assert jax.grad(by_x, argnums=(0, 1))(X, X) == (0, 1)


def test_derivatives_of_gradients_go_through_a_loop_that_began_with_a_constant(tmp_path):
    def function(x):  # its backward pass is a loop that carries cotangents from zeros on
        last, rows = lax.scan(lambda c, _: (jnp.sin(c) * x, c), x, length=3)
        return jnp.sum(last * x), rows

    x = np.array([0.3, -1.2, 0.8], np.float32)
    loaded = saved(function, [x], tmp_path, order=2)

    def second(fun):
        return jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(first(fun))(x))))(x)

    np.testing.assert_allclose(second(loaded), second(function), rtol=1e-5)


def chosen_gradient(fun, chosen, x):
    """Of results that are asked for in one call."""

    def loss(x):
        results = fun(x)
        return sum(jnp.sum(results[j]) * (j + 1) for j in chosen)

    return jax.grad(loss)(x)


def with_zeros(fun, chosen, x):
    """The same, with zeros for the cotangents of the rest."""
    results, pullback = jax.vjp(fun, x)
    factors = [(j + 1.0) * (j in chosen) for j in range(len(results))]
    return pullback(type(results)(jnp.full_like(y, f) for y, f in zip(results, factors)))[0]


CHOICES = [c for n in (1, 2, 3, 4) for c in itertools.combinations(range(4), n)]


def test_without_rules_every_choice_is_that_of_jax_on_the_original(tmp_path):
    def function(x):  # at 0 the second has infinite derivatives, and the fourth has NaN
        return jnp.sum(x**2), jnp.sqrt(x), jnp.sin(x), jnp.sqrt(x * 0) * x

    x = np.array([0.5, 0.0, 2.0], np.float32)
    loaded = saved(function, [x], tmp_path)
    for chosen in CHOICES:
        found, wanted = (chosen_gradient(fun, chosen, x) for fun in (loaded, function))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=str(chosen))


def test_with_rules_one_result_and_all_are_those_of_jax_and_the_rest_is_given_zeros(tmp_path):
    @jax.custom_vjp
    def two(x):
        return x, 2 * x

    two.defvjp(lambda x: (two(x), x), lambda x, ct: (ct[0] * x + 2 * ct[1] + 1,))

    def function(x):
        a, b = two(jnp.tanh(x))
        return jnp.sum(x) ** 2, a, plus_one(b) * x, jnp.sqrt(x)

    x = np.array([0.5, 1.5, 2.0], np.float32)
    loaded = saved(function, [x], tmp_path)
    for chosen in CHOICES:
        wanted = (chosen_gradient if len(chosen) in (1, 4) else with_zeros)(function, chosen, x)
        found = chosen_gradient(loaded, chosen, x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=str(chosen))


def test_rules_are_not_asked_for_parts_of_a_cotangent(tmp_path):
    @tg.custom_gradient
    def clip(x):
        return x, lambda dy: jnp.clip(dy, -5, 5)

    loaded = saved(lambda x: (lambda y: (3 * y, 4 * y))(clip(x)), [X], tmp_path)
    assert jax.grad(lambda x: sum(loaded(x)))(X) == 5  # and not 3 + 4


def test_more_results_than_have_programs_of_their_own_share_one(tmp_path):
    def function(x):
        return [x * k for k in range(1, 18)]

    save(function, tmp_path / "f", [X])
    (found,) = inspect(tmp_path / "f")["functions"]
    assert [len(each["results"]) for each in found["program"]["gradients"]] == [17]
    loaded = load(tmp_path / "f")
    assert jax.grad(lambda x: loaded(x)[4])(X) == 5
    assert jax.grad(lambda x: sum(loaded(x)))(X) == sum(range(18))


def test_programs_of_single_results_are_bounded_for_higher_orders_too(tmp_path):
    def function(*xs):
        return [x * y for x, y in itertools.pairwise(xs)]

    save(function, tmp_path / "f", [X] * 5, gradient_order=2)
    (found,) = inspect(tmp_path / "f")["functions"]
    assert len(found["calls"]) < 64
    loaded = load(tmp_path / "f")
    slope = jax.grad(lambda *xs: loaded(*xs)[0] ** 2)  # 2 x y²
    np.testing.assert_allclose(jax.grad(slope, 1)(X, X + 1, X, X, X), 4 * 2 * 3)


sine = jax.custom_jvp(lambda x, y: jnp.sin(x) * y)
sine.defjvps(lambda dx, out, x, y: 3 * jnp.cos(x) * y * dx, lambda dy, out, x, y: jnp.sin(x) * dy)


@tg.custom_gradient
def one_sine(x):
    return jnp.sin(x), lambda dy: 3 * dy * jnp.cos(x)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: (one_sine(x), one_sine(y)),
        lambda x, y: (jnp.sin(y), one_sine(x)),
        lambda x, y: (sine(x, y) * y, sine(y, jnp.ones_like(x))),
        lambda x, y: (sine(x, y), sine(y, x)),
    ],
)
def test_results_that_compute_the_same_of_other_arguments_have_gradients_of_their_own(
    fun, tmp_path
):
    """The gradient programs of such results have one text, in which arguments have no names."""
    loaded = saved(fun, [X, X], tmp_path, order=2)
    args = jnp.float32(0.3), jnp.float32(1.2)
    for result, i, j in itertools.product(range(2), repeat=3):
        gradients = [jax.grad(lambda *xs, f=f, j=result: f(*xs)[j], i) for f in (fun, loaded)]
        np.testing.assert_allclose(*[each(*args) for each in gradients], rtol=1e-5)
        np.testing.assert_allclose(*[jax.grad(g, j)(*args) for g in gradients], rtol=1e-5)
