"""Functions with a custom gradient on a tape in a tape: what is compiled once serves every step,
and a rule that has changed is never answered from it."""

import functools
import inspect
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import by_tape, log1pexp, value_by_tape

X = jnp.array([0.3, -1.2, 2.0])


def by_tapes(f, x, sources=None):
    """The gradient of the sum of f, and that of the sum of its squares and of f."""
    with tg.GradientTape() as outer:
        outer.watch(x)
        y, g = value_by_tape(lambda x: f(x).sum(), x)
        z = (g**2).sum() + y
    return g, outer.gradient(z, x if sources is None else sources)


def by_jax(f, x):
    def g(x):
        return jax.grad(lambda x: f(x).sum())(x)

    return g(x), jax.grad(lambda x: (g(x) ** 2).sum() + f(x).sum())(x)


# ------------------------------------------------------------------------------- compiled once


def with_slope(value, slope):
    """A function with that derivative, written with JAX alone."""
    rule = jax.custom_jvp(value)
    rule.defjvp(lambda primals, tangents: (rule(*primals), slope(*primals) * tangents[0]))
    return rule


@tg.custom_gradient
def square(x):  # the gradient is not that of the value
    return x**2, lambda dy: x * dy


square_by_hand = with_slope(lambda x: x**2, lambda x: x)


@tg.custom_gradient
def power(x):  # the gradient calls the function
    return jnp.exp(3 * x), lambda dy: 2 * power(x) * dy


power_by_hand = with_slope(lambda x: jnp.exp(3 * x), lambda x: 2 * power_by_hand(x))


@tg.custom_gradient
def curved(x):  # the gradient has a gradient of its own
    @tg.custom_gradient
    def slope(x):
        return 2 * x, lambda dy: 5 * dy

    return x**2, lambda dy: slope(x) * dy


curved_by_hand = with_slope(lambda x: x**2, with_slope(lambda x: 2 * x, lambda x: 5 + 0 * x))


@tg.recompute_grad
def recomputed(x):
    return jnp.sin(square(x))


@jax.jit
def twice_log1pexp(x):
    return jax.lax.scan(lambda c, _: (log1pexp(c), None), x, None, length=2)[0]


@tg.custom_gradient
def looped(x):  # rules in the programs of the rule
    return twice_log1pexp(x), lambda dy: dy * recomputed(x) + twice_log1pexp(0 * dy)


def made_anew(x, factor=4.0):
    @tg.custom_gradient
    def f(x):
        return x**2, lambda dy: factor * x**2 * dy

    return f(x)


@tg.custom_gradient
def product(x, y, factor=3):
    return x * y, lambda dy: (factor * dy * y, None)


in_a_jvp = jax.custom_jvp(lambda x: x**2)
in_a_jvp.defjvp(lambda primals, tangents: jax.jvp(square, primals, tangents))


@jax.custom_vjp
def calls_itself(x):
    return x**2


calls_itself.defvjp(lambda x: (calls_itself(x), x), lambda x, dy: (calls_itself(x) * dy,))
itself_by_hand = with_slope(lambda x: x**2, lambda x: itself_by_hand(x))


FUNCTIONS = {
    "log1pexp": (log1pexp, lambda x: jnp.log(1 + jnp.exp(x))),
    "square": (square, square_by_hand),
    "power": (power, power_by_hand),
    "curved": (curved, curved_by_hand),
    "rounded": (
        tg.grad_pass_through(lambda x: jnp.round(x) * 3),
        with_slope(lambda x: jnp.round(x) * 3, jnp.ones_like),
    ),
    "recomputed": (recomputed, lambda x: jnp.sin(square_by_hand(x))),
    "in a jvp": (in_a_jvp, square_by_hand),
    "looped": (
        looped,
        with_slope(
            lambda x: jnp.log(2 + jnp.exp(x)), lambda x: jnp.sin(square_by_hand(x)) + jnp.log(3.0)
        ),
    ),
    "calls itself": (calls_itself, itself_by_hand),
    "calls itself in a jvp": (itself_by_hand, itself_by_hand),
    "mapped": (
        lambda x: jax.vmap(curved)(x) * jax.vmap(calls_itself)(x),
        lambda x: curved_by_hand(x) * itself_by_hand(x),
    ),
    "made anew": (made_anew, with_slope(lambda x: x**2, lambda x: 4 * x**2)),
    "of two": (
        lambda x: product(x, x + 1),
        with_slope(lambda x: x * (x + 1), lambda x: 3 * (x + 1)),
    ),
    "several": (
        lambda x: power(jnp.sin(x)) * square(x) + jax.jit(curved)(x),
        lambda x: power_by_hand(jnp.sin(x)) * square_by_hand(x) + curved_by_hand(x),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_second_step_compiles_nothing_and_its_numbers_are_those_of_jax(name, compilations):
    fun, by_hand = FUNCTIONS[name]
    steps = [X + float(i) / 4 for i in range(4)]
    found = [by_tapes(fun, x) for x in steps[:2]]
    before = compilations()
    found += [by_tapes(fun, x) for x in steps[2:]]
    assert compilations() == before
    for i in (0, 3):
        np.testing.assert_allclose(found[i], by_jax(by_hand, steps[i]), rtol=1e-4, atol=1e-5)


def test_the_second_step_with_a_variable_inside_compiles_nothing(compilations):
    v = tg.Variable(jnp.array([1.0, 2.0, 3.0]))

    @tg.custom_gradient
    def f(x):
        return x**2 * v, lambda dy, variables: (dy * v * 2 * x, [7 * dy * x**2 * v])

    def step(x):
        found = by_tapes(f, x, [x, v])
        v.assign(v + 1.0)
        return found

    step(X), step(X + 1.0)
    x, w, before = X + 2.0, v.value, compilations()
    g, (dx, dv) = step(x)
    assert compilations() == before
    np.testing.assert_allclose(g, 2 * w * x, rtol=1e-5)
    # Of z = sum((2 w x)²) + y, where dy/dx is 2 w x and dy/dv is 7 x² w.
    np.testing.assert_allclose(dx, 8 * w**2 * x + 2 * w * x, rtol=1e-5)
    np.testing.assert_allclose(dv, 8 * x**2 * w + 7 * x**2 * w, rtol=1e-5)


# ---------------------------------------------------------------------------------- never stale


def in_the_first(setting):
    return with_slope(lambda x: x**2, lambda x: setting * x)


def in_the_second(setting):
    return with_slope(lambda x: x**2, with_slope(lambda x: 2 * x, lambda x: setting + 0 * x))


def of_itself(setting):
    return with_slope(lambda x: x**2, with_slope(lambda x: x**2, lambda x: setting * x**2))


def in_a_gradient_function(now):
    return tg.custom_gradient(lambda x: (x**2, lambda dy: now["factor"] * x * dy))


def in_the_gradient_of_a_gradient_function(now):
    slope = tg.custom_gradient(lambda x: (2 * x, lambda dy: now["factor"] * dy))
    return tg.custom_gradient(lambda x: (x**2, lambda dy: slope(x) * dy))


def written_with_jax(slope):
    f = jax.custom_vjp(lambda x: x**2)
    f.defvjp(lambda x: (f(x), x), lambda x, dy: (slope(x) * dy,))
    return f


def in_a_rule_of_jax(now):
    return written_with_jax(lambda x: now["factor"] * x)


def in_the_rule_of_a_rule_of_jax(now):
    inner = jax.custom_jvp(lambda x: 2 * x)
    inner.defjvp(lambda primals, tangents: (inner(*primals), now["factor"] * tangents[0]))
    return written_with_jax(inner)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["factor"])
@dataclass(frozen=True)
class Scaled:
    x: jax.Array
    factor: float


def in_a_static_argument(now):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def rule(factor, x):
        return x**2

    def forward(factor, x):
        y = rule(now["factor"], x)
        return y, y

    rule.defvjp(forward, lambda factor, y, dy: (factor * y * dy,))
    return lambda x: rule(1.0, x)


def in_a_static_field(now):
    @jax.custom_vjp
    def rule(scaled):
        return scaled.x**2

    def forward(scaled):
        y = rule(Scaled(scaled.x, now["factor"]))
        return y, Scaled(y, scaled.factor)

    rule.defvjp(forward, lambda y, dy: (Scaled(y.factor * y.x * dy, y.factor),))
    return lambda x: rule(Scaled(x, 1.0))


def mapped(make, way):
    return lambda now: way(make(now))


def one_by_one(f):
    return lambda x: jax.lax.map(f, x)


# Where a Python value stands that changes between steps, and the function with that derivative.
CHANGING = {
    "gradient function": (in_a_gradient_function, in_the_first),
    "gradient of it": (in_the_gradient_of_a_gradient_function, in_the_second),
    "gradient of it, map": (
        mapped(in_the_gradient_of_a_gradient_function, one_by_one),
        in_the_second,
    ),
    "gradient of it, vmap": (
        mapped(in_the_gradient_of_a_gradient_function, jax.vmap),
        in_the_second,
    ),
    "rule of JAX": (in_a_rule_of_jax, in_the_first),
    "rule of JAX, vmap": (mapped(in_a_rule_of_jax, jax.vmap), in_the_first),
    "rule of it": (in_the_rule_of_a_rule_of_jax, in_the_second),
    "rule of it, vmap": (mapped(in_the_rule_of_a_rule_of_jax, jax.vmap), in_the_second),
    "static argument": (in_a_static_argument, of_itself),
    "static field": (in_a_static_field, of_itself),
}


def test_the_second_step_on_three_tapes_compiles_nothing(compilations):
    def step(x):
        return by_tape(lambda x: by_tapes(power, x)[1], x)

    for i in range(2):
        step(X + float(i))
    before = compilations()
    third = step(X)
    assert compilations() == before
    want = jax.grad(lambda x: by_jax(power_by_hand, x)[1].sum())(X)
    np.testing.assert_allclose(third, want, rtol=1e-4)


@pytest.mark.parametrize(("make", "by_hand"), CHANGING.values(), ids=CHANGING)
def test_a_python_value_may_change_between_steps(make, by_hand):
    now = {}
    f = make(now)
    for now["factor"] in (2.0, 3.0, 2.0):
        found = by_tapes(f, X)
        np.testing.assert_allclose(found, by_jax(by_hand(now["factor"]), X), rtol=1e-5)


def test_a_rule_that_makes_ever_new_rules_is_never_taken_for_another():
    def make(setting):
        def rule(depth):
            f = jax.custom_vjp(lambda x: x**2)
            slope = setting if depth == 1 else 1.0  # of the second derivative alone

            def forward(x):
                y = rule(depth + 1)(x)
                return y, y

            f.defvjp(forward, lambda y, dy: (slope * y * dy,))
            return f

        return rule(0)

    for setting in (2.0, 3.0, 2.0):
        slope = with_slope(lambda x: x**2, lambda x, s=setting: s * x**2)
        want = by_jax(with_slope(lambda x: x**2, slope), X)
        np.testing.assert_allclose(by_tapes(make(setting), X), want, rtol=1e-5)


def test_a_python_value_may_decide_which_inputs_have_a_gradient():
    @tg.custom_gradient
    def f(x, y, which=0):
        return x * y, lambda dy: (dy * y, None) if which == 0 else (None, dy * y)

    x, y = jnp.float32(2.0), jnp.float32(5.0)
    for which in (0, 1, 0, 1):
        with tg.GradientTape(persistent=True) as outer:
            outer.watch([x, y])
            z, found = value_by_tape(lambda x, y, which=which: f(x, y, which=which), x, y)
        assert [g is None for g in found] == [which != 0, which != 1]
        assert outer.gradient(found[which], [x, y]) == [None, 1.0]
        assert [g is None for g in outer.gradient(z, [x, y])] == [which != 0, which != 1]


def test_an_array_that_a_rule_closes_over_may_be_another_one_at_each_step(compilations):
    def make(setting):
        factor, offset = jnp.full(3, setting), np.full(3, setting, np.float32)
        return tg.custom_gradient(lambda x: (x**2 - offset, lambda dy: (factor * x + offset) * dy))

    for s in (2.0, 3.0, 2.0):
        want = by_jax(with_slope(lambda x, s=s: x**2 - s, lambda x, s=s: s * x + s), X)
        np.testing.assert_allclose(by_tapes(make(s), X), want, rtol=1e-5)
    functions = [make(7.0), make(8.0)]
    before = compilations()
    for function in functions:
        by_tapes(function, X)
    assert compilations() == before


def test_a_gradient_depends_on_a_watched_array_that_its_rule_closes_over():
    w, x = jnp.float32(3.0), jnp.float32(2.0)
    f = tg.custom_gradient(lambda x: (x * w, lambda dy: w**3 * dy))
    with tg.GradientTape(persistent=True) as outer:
        outer.watch([w, x])
        with pytest.warns(UserWarning, match=r"depends on 'w' \(f32\[\]\), which it closes over"):
            y, g = value_by_tape(f, x)
    assert float(g) == 27.0
    assert outer.gradient(g, [w, x]) == [27.0, None]  # d(w³)/dw
    assert outer.gradient(y, [w, x]) == [None, 27.0]


def in_a_scan(f):
    return lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=1)[0]


HAS_AN_OBJECT = "generic_batching" in inspect.signature(jax.custom_vjp.defvjp).parameters
BY_AN_OBJECT = [{"generic_batching": True}] if HAS_AN_OBJECT else []


@pytest.mark.both_jax
@pytest.mark.parametrize("options", [{}, *BY_AN_OBJECT])
@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit, jax.checkpoint, tg.trace, in_a_scan])
def test_also_a_gradient_that_is_compiled_depends_on_a_watched_array_that_its_rule_closes_over(
    compiled, options
):
    def slope(w):
        f = jax.custom_vjp(lambda x: jnp.sin(x))
        f.defvjp(lambda x: (f(x), None), lambda _, dy: (w**3 * dy,), **options)
        return by_tape(compiled(f), jnp.float32(2.0))

    for value in (3.0, 5.0):
        w = jnp.float32(value)
        assert value_by_tape(slope, w) == (value**3, 3 * value**2)
        with tg.ForwardAccumulator(w, 1.0) as accumulator:
            g = slope(w)
        assert (float(g), accumulator.jvp(g)) == (value**3, 3 * value**2)


def test_an_error_in_a_gradient_function_comes_when_its_gradient_is_asked_for_each_time():
    now = {"good": True}
    slope = tg.custom_gradient(lambda x: (2 * x, lambda dy: dy if now["good"] else (dy, dy)))
    f = tg.custom_gradient(lambda x: (x**2, lambda dy: slope(x) * dy))
    for _ in range(2):
        now["good"] = True
        by_tapes(f, X)
        now["good"] = False
        np.testing.assert_allclose(by_tape(f, X), 2 * X)
        with pytest.raises(ValueError, match="returned 2 gradients for 1 input"):
            by_tapes(f, X)
