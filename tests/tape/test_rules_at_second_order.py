"""Derivatives of gradients of functions with rules. JAX, and what is one program, differentiates
the forward pass of a rule; a tape differentiates what the inner gradient has computed, in which
the rule acts once more. By hand that is a rule whose forward pass calls its own function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import by_tape, value_by_tape
from tracegrad import match, rules

pytestmark = pytest.mark.both_jax

X = jnp.array([0.3, -1.2])
V = jnp.array([0.5, 2.0])


# ------------------------------------------------------------------- programs, and the ways to them


def product(sin, x):
    return jnp.sum(sin(x) * x)


def after_several(sin, x):  # what comes after the rule is read once more
    y = sin(x * x)
    return jnp.sum(jnp.exp(y * x) * y + sin(y))


def jitted(sin, x):
    return jnp.sum(jax.jit(lambda x: sin(x) * 2)(x) * x)


PROGRAMS = product, after_several, jitted


def through(backward, at_every_order=False):
    """sin, with another cotangent of its result; a rule that acts at every order calls itself."""

    @jax.custom_vjp
    def changed(y):
        return y

    def forward(y):
        return (changed(y) if at_every_order else y), None

    changed.defvjp(forward, lambda _, ct: (backward(ct),))
    return lambda x: changed(jnp.sin(x))


@jax.custom_vjp
def steeper(x):
    return jnp.sin(x)


# A rule of this kind acts at every order.
steeper.defvjp(lambda x: (steeper(x), x), lambda x, ct: (3 * ct * jnp.cos(x),))


@jax.custom_jvp
def tripled(y):
    return y


tripled.defjvp(lambda primals, tangents: (tripled(*primals), 3 * tangents[0]))


def clipped_values(ct):
    return jnp.clip(ct, -0.4, 0.4)


def clipped_norm(ct):
    return ct * jnp.minimum(1, 0.5 / jnp.linalg.norm(ct))


SIN = match.op("sin")
RULES = {
    "stop": (rules.stop_gradient(SIN), lambda x: jax.lax.stop_gradient(jnp.sin(x))),
    "stop an input": (
        rules.stop_gradient(SIN, inputs=0),
        lambda x: jnp.sin(jax.lax.stop_gradient(x)),
    ),
    "clip the norm": (rules.clip_gradient(SIN, max_norm=0.5), through(clipped_norm)),
    "clip values": (rules.clip_gradient(SIN, max_value=0.4), through(clipped_values)),
    "scale": (rules.scale_gradient(SIN, 3.0), lambda x: tripled(jnp.sin(x))),
    "override": (
        rules.override_gradient(SIN, lambda op, dy: 3 * dy * jnp.cos(op.inputs[0])),
        steeper,
    ),
    "recompute": (rules.recompute(SIN), jax.checkpoint(jnp.sin)),
    "tap": (rules.tap_gradient(SIN, lambda place, ct: None), jnp.sin),
}


def by_one_tape(f, x):
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x, unconnected_gradients="zero")


def tape_over(gradient):
    def jacobian(f, x):
        with tg.GradientTape() as tape:
            tape.watch(x)
            found = gradient(f)(x)
        return tape.jacobian(found, x, unconnected_gradients="zero")

    return jacobian


on_tapes = tape_over(lambda f: functools.partial(by_one_tape, f))


def on_tapes_of_which_the_inner_is_persistent(f, x):
    with tg.GradientTape() as outer:
        outer.watch(x)
        with tg.GradientTape(persistent=True) as inner:
            inner.watch(x)
            y = f(x)
        gradient = inner.gradient(y, x, unconnected_gradients="zero")
    return outer.jacobian(gradient, x, unconnected_gradients="zero")


def on_one_tape(f, x):
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        gradient = tape.gradient(f(x), x, unconnected_gradients="zero")
    return tape.jacobian(gradient, x, unconnected_gradients="zero")


def accumulated(f, x):
    with tg.ForwardAccumulator(x, V) as accumulator:
        gradient = by_one_tape(f, x)
    return accumulator.jvp(gradient, unconnected_gradients="zero")


JACOBIANS = {
    "jax.hessian": lambda f, x: jax.hessian(f)(x),
    "jax.jacrev of jax.grad": lambda f, x: jax.jacrev(jax.grad(f))(x),
    "tg.hessian": lambda f, x: tg.hessian(f)(x),
    "jax.jacrev of a tape": lambda f, x: jax.jacrev(lambda x: by_one_tape(f, x))(x),
    "jax.jacrev of a traced tape": lambda f, x: jax.jacrev(tg.trace(lambda x: by_one_tape(f, x)))(
        x
    ),
    "two tapes": on_tapes,
    "two tapes, one persistent": on_tapes_of_which_the_inner_is_persistent,
    "one persistent tape": on_one_tape,
    "a tape over jax.grad": tape_over(jax.grad),
    "a tape over tg.grad": tape_over(tg.grad),
    "two tapes in a traced function": lambda f, x: tg.trace(lambda x: on_tapes(f, x))(x),
    "hessians() in a traced function": lambda f, x: tg.trace(lambda x: tg.hessians(f(x), x)[0])(x),
}
FORWARD = {
    "tg.jvp of a tape": lambda f, x: tg.jvp(lambda x: by_one_tape(f, x), (x,), (V,))[1],
    "an accumulator over a tape": accumulated,
}
# These differentiate by the rule once more.
ON_TAPES = {
    "jax.jacrev of a tape",
    "jax.jacrev of a traced tape",
    "two tapes",
    "two tapes, one persistent",
    "one persistent tape",
    "two tapes in a traced function",
    "hessians() in a traced function",
    "gradients() of gradients()",
}
REVERSE = {
    "gradients() of gradients()": lambda f, x: tg.trace(
        lambda x: tg.hessian_vector_product(f(x), x, V)[0]
    )(x),
}


# Nothing of these runs on values, however they are called.
IN_ONE_PROGRAM = (
    "tg.grad",
    "jax.hessian",
    "jax.jacrev of jax.grad",
    "tg.hessian",
    "jax.jacrev of a tape",
    "jax.jacrev of a traced tape",
    "tg.jvp of a tape",
)


# Before JAX 0.11.2 a traced function warns of that in a program of jax.jit; its numbers are right.
merging = pytest.mark.filterwarnings("ignore:.* recomputes, and is called inside another")


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def check(f, by_hand, without=None, on_tapes=None):
    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(f, x):
        gradient = jax.grad(f)
        (product,) = jax.vjp(gradient, x)[1](V)  # not V @ Jacobian where a rule is not linear
        return gradient(x), jax.jacrev(gradient)(x), product

    first, second, product = map(np.asarray, derivatives(by_hand, X))
    expected = {"a tape": first, "tg.grad": first}
    for ways, value in ((JACOBIANS, second), (FORWARD, second @ V), (REVERSE, product)):
        expected.update(dict.fromkeys(ways, value))
    expected.pop(without, None)
    if on_tapes is not None:
        _, second, product = map(np.asarray, derivatives(on_tapes, X))
        of_tapes = dict.fromkeys(JACOBIANS, second)
        of_tapes |= dict.fromkeys(REVERSE, product)
        expected.update((name, of_tapes[name]) for name in ON_TAPES)
        for name in FORWARD:  # clipping is not linear, and has no transpose
            del expected[name]
    ways = {"a tape": by_one_tape, "tg.grad": lambda f, x: tg.grad(f)(x)}
    ways |= JACOBIANS | FORWARD | REVERSE

    @jax.jit
    def transformed(x):
        return {name: ways[name](f, x) for name in IN_ONE_PROGRAM if name in expected}

    found = transformed(X)
    found.update((name, ways[name](f, X)) for name in expected if name not in found)
    for name in expected:
        np.testing.assert_allclose(
            found[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=f"by {name}"
        )


def mostly_slow(values, always):
    """All of them in .ci/nightly; elsewhere those that go different ways in a tape."""
    return [
        value if value in always else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]


@merging
@pytest.mark.parametrize("name", mostly_slow(RULES, ["scale", "stop an input"]))
def test_every_way_to_a_second_derivative_takes_a_rule_as_jax_does(name):
    rule, by_hand = RULES[name]
    program = product if name == "clip the norm" else after_several  # that one takes long
    # JAX has no forward mode of a rule that is there at every order.
    without = "jax.hessian" if name == "override" else None
    f = functools.partial(program, jnp.sin)
    backward = {"clip values": clipped_values, "clip the norm": clipped_norm}.get(name)
    on_tapes = backward and functools.partial(program, through(backward, at_every_order=True))
    check(tg.rewrite(f, rule), functools.partial(program, by_hand), without, on_tapes)


@merging
@pytest.mark.parametrize("program", mostly_slow(PROGRAMS, [jitted]))
def test_every_way_to_a_second_derivative_takes_a_rule_anywhere_as_jax_does(program):
    rule, by_hand = RULES["clip values"]
    f = functools.partial(program, jnp.sin)
    on_tapes = functools.partial(program, through(clipped_values, at_every_order=True))
    check(tg.rewrite(f, rule), functools.partial(program, by_hand), None, on_tapes)


def test_a_traced_function_with_rules_and_a_saved_one_have_that_second_derivative(tmp_path):
    rule, by_hand = RULES["clip values"]
    f = tg.trace(functools.partial(product, jnp.sin), rules=[rule])
    by_hand = functools.partial(product, by_hand)
    second = jax.jacrev(jax.grad(by_hand))(X)
    for way in (on_tapes, on_one_tape, JACOBIANS["two tapes in a traced function"]):
        close(way(f, X), second)
    tg.save(f, tmp_path / "f", [X], gradient_order=2)
    loaded = tg.load(tmp_path / "f")
    for way in (on_tapes, JACOBIANS["jax.jacrev of jax.grad"]):
        close(way(loaded, X), second)


# ------------------------------------------------------------------- rules that run on values


@tg.custom_gradient
def cubed(x):  # on a tape it runs on values
    e = x**3
    return e, lambda dy: dy * (5 * x + e)


@jax.custom_vjp
def cubed_by_hand(x):
    return x**3


def cubed_forward(x):
    return cubed_by_hand(x), x


cubed_by_hand.defvjp(cubed_forward, lambda x, ct: (ct * (5 * x + x**3),))


@jax.custom_vjp
def square(x):
    return x * x


square.defvjp(lambda x: (square(x), x), lambda x, ct: (3 * ct * x,))

EAGER = {
    "before": lambda c, x: square(c(jnp.sin(x))) * x,
    "after": lambda c, x: c(square(jnp.sin(x))) * x,
    "after a jitted one": lambda c, x: c(jax.jit(lambda x: square(x) * 2)(x)) * x,
    "between": lambda c, x: square(c(square(x))) * c(x),
    "around": lambda c, x: c(square(c(x))),
    "beside": lambda c, x: square(x) * c(x) + x * square(x),
}


def crossed(f, x):  # the tape that was entered first gives the first derivative
    inner, outer = tg.GradientTape(), tg.GradientTape()
    with inner:
        inner.watch(x)
        with outer:
            outer.watch(x)
            gradient = inner.gradient(f(x), x)
    return outer.jacobian(gradient, x)


def by_gradients(f, x):
    with tg.GradientTape() as tape:
        tape.watch(x)
        (gradient,) = tg.gradients(f(x), x)
        return jnp.stack([tg.gradients(each, x)[0] for each in gradient])


@pytest.mark.parametrize("name", mostly_slow(EAGER, ["after"]))
def test_a_rule_on_values_and_one_of_jax_are_taken_as_jax_does_in_any_order(name):
    def f(c):
        return lambda x: jnp.sum(EAGER[name](c, x))

    first, second = jax.grad(f(cubed_by_hand)), jax.jacrev(jax.grad(f(cubed_by_hand)))(X)
    close(by_one_tape(f(cubed), X), first(X))
    for way in (on_tapes, on_one_tape, crossed, by_gradients, tape_over(tg.grad)):
        close(way(f(cubed), X), second)
    close(accumulated(f(cubed), X), second @ V)


def test_a_rule_on_values_after_one_of_jax_may_close_over_what_that_gives():
    w = jnp.array([2.0, 3.0])

    def f(x, w):
        y = square(x)
        scaled = tg.custom_gradient(lambda z: (z * z, lambda dy: 2 * dy * z * y * w))
        return jnp.sum(scaled(jnp.sin(x)) * x)

    with tg.GradientTape() as outer:
        outer.watch([X, w])
        gradient, none = by_tape(f, X, w)
    assert none is None
    second = jax.grad(lambda x, w: jnp.sum(jax.grad(f)(x, w)), (0, 1))(X, w)
    for found, expected in zip(outer.gradient(gradient, [X, w]), second, strict=True):
        close(found, expected)


def test_a_rule_on_values_may_ask_for_one_in_a_second_derivative():
    @tg.custom_gradient
    def clipped(x):
        return x, lambda dy: dy if jnp.linalg.norm(dy) < 1 else dy / jnp.linalg.norm(dy)

    def second(f):
        return by_tape(lambda x: by_one_tape(f, x), X)

    def after(x):
        return jnp.sum(clipped(square(x)))

    def by_hand(x):
        return jnp.sum(jnp.cos(x) / jnp.linalg.norm(jnp.cos(x)))

    close(second(lambda x: jnp.sum(jnp.sin(clipped(x)))), jax.grad(by_hand)(X))
    close(by_one_tape(after, X), 3 * X / np.sqrt(2))
    close(second(after), np.full(2, 3 / np.sqrt(2)))


tripled_by_jax = jax.custom_vjp(lambda x: jnp.sin(x))
tripled_by_jax.defvjp(lambda x: (jnp.sin(x), None), lambda _, dy: (3 * dy,))


@pytest.mark.parametrize(
    "r",
    [
        tg.custom_gradient(lambda x: (jnp.sin(x), lambda dy: 3 * dy)),
        tripled_by_jax,
        jax.jit(tripled_by_jax),
    ],
    ids=["custom_gradient", "custom_vjp", "jit"],
)
def test_a_tape_differentiates_what_a_rule_has_computed_as_tensorflow_does(r):
    x = jnp.float32(0.7)
    gradient, second = value_by_tape(lambda x: by_tape(lambda x: r(x) * x, x), x)
    np.testing.assert_allclose(gradient, 3 * 0.7 + np.sin(0.7), rtol=1e-6)
    assert second == 6.0  # TensorFlow's


# ----------------------------------------------------- rules with a gradient where nothing flows


@jax.custom_vjp
def rounded(x):
    return jax.lax.stop_gradient(jnp.round(4 * x))


rounded.defvjp(lambda x: (rounded(x), x), lambda x, ct: (4 * ct * x,))


def on_host(x):
    return tg.numpy_function(np.sin, [x], x.dtype, lambda op, dy: dy * jnp.cos(op.inputs[0]))


@pytest.mark.parametrize(("r", "by_hand"), [(rounded, rounded), (on_host, jnp.sin)])
def test_a_second_derivative_goes_by_a_rule_whose_function_stops_the_gradient(r, by_hand):
    def product(r, x):
        return jnp.sum(jax.lax.scan(lambda total, _: (total * r(x), None), x, None, length=1)[0])

    f = functools.partial(product, r)
    second = jax.jacrev(jax.grad(functools.partial(product, by_hand)))(X)
    close(on_tapes(f, X), second)
    close(on_tapes(jax.jit(f), X), second)


# ------------------------------------------------------------------------ values in the middle


clipped = through(clipped_values, at_every_order=True)


def cubic(x, moved=0.0):
    """A function of a value in the middle that comes after a rule, and the derivative by it."""
    y = clipped(x) + moved
    return jnp.sum(y * y * x)


def by_the_middle(x):
    """The derivative, by the value in the middle, of the gradient by x."""
    return jax.grad(lambda moved: jnp.sum(jax.grad(cubic)(x, moved)))(jnp.zeros_like(x))


def test_what_comes_after_a_rule_is_a_source_of_a_gradients_gradient():
    with tg.GradientTape(persistent=True) as outer:
        outer.watch(X)
        with tg.GradientTape() as inner:
            inner.watch(X)
            y = clipped(X)
            z = jnp.sum(y * y * X)
        gradient, by_y = inner.gradient(z, [X, y])
        total = jnp.sum(gradient)
    close(outer.gradient(total, y), by_the_middle(X))
    by_both = outer.gradient(total, [y, X])
    close(by_both[0], by_the_middle(X))
    close(by_both[1], jax.grad(lambda x: jnp.sum(jax.grad(cubic)(x)))(X))
    close(outer.gradient(by_y, y), 2 * X)
    # The gradients of the value itself go by the rule on every tape.
    close(outer.gradient(z, X), jax.grad(cubic)(X))
    close(outer.gradient(y, X), 0.4 * jnp.cos(X))


@pytest.mark.parametrize("traced", [False, True])
def test_what_comes_after_a_rule_is_a_source_where_it_alone_is_watched(traced):
    def gradient(x):
        with tg.GradientTape() as inner:
            inner.watch(x)
            y = clipped(x)
            with tg.GradientTape() as outer:
                outer.watch(y)
                z = jnp.sum(y * y * x)
                gradient = inner.gradient(z, x)
        return outer.gradient(gradient, y)

    close((tg.trace(gradient) if traced else gradient)(X), by_the_middle(X))


def test_what_comes_after_a_rule_moves_by_itself_where_an_accumulator_says_so():
    with tg.GradientTape() as tape:
        tape.watch(X)
        y = clipped(X)
        with tg.ForwardAccumulator(y, V) as accumulator:
            gradient = tape.gradient(jnp.sum(y * y * X), X)
    close(accumulator.jvp(gradient), by_the_middle(X) * V)


def test_gradients_of_gradients_have_sources_after_a_rule_and_may_stop_there():
    def by_gradients(x, stopping):
        y = clipped(x)
        (first,) = tg.gradients(jnp.sum(y * y * x), x)
        return tg.gradients(first, y, stop_gradients=y if stopping else None)[0]

    traced = tg.trace(by_gradients, static_argnums=1)
    close(traced(X, False), by_the_middle(X))
    close(traced(X, True), by_the_middle(X))

    def stopped_in_both(x):
        y = clipped(x)
        (first,) = tg.gradients(jnp.sum(y * y * x), x, stop_gradients=y)
        return tg.gradients(jnp.sum(first * x), x, stop_gradients=y)[0]

    close(tg.trace(stopped_in_both)(X), jnp.sin(X) ** 2)


# ------------------------------------------------------------------------- what else may differ


def scaled(x):
    return through(lambda ct: 3 * ct, at_every_order=True)(x)


@pytest.mark.parametrize(
    "compiled",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda w, x: jax.lax.cond(w[0] > 0, f, f, w, x),
    ],
    ids=["plain", "jit", "checkpoint", "cond"],
)
@pytest.mark.parametrize(
    "body", [lambda w, x: scaled(w) * x, lambda w, x: scaled(w * x)], ids=["beside", "on the way"]
)
def test_a_rule_is_differentiated_once_more_only_where_the_gradient_goes_through_it(compiled, body):
    w, f = jnp.array([0.7, 1.4]), compiled(body)

    def total(w, x):
        return jnp.sum(f(w, x) ** 2 * x)

    expected = jax.grad(lambda w: jnp.sum(jax.grad(total, 1)(w, X)))(w)
    for followed in ([X], [w, X]):
        with tg.GradientTape() as outer:
            outer.watch([w, X])
            with tg.GradientTape() as inner:
                inner.watch(followed)
                z = total(w, X)
            gradient = inner.gradient(z, X)
        close(outer.gradient(gradient, w), expected)


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_third_derivatives_take_a_rule_as_jax_does(compiled):
    part = compiled(clipped)

    def f(x):
        return jnp.sum(part(x) * x * x)

    def sum_of(gradient, f):
        return lambda x: jnp.sum(gradient(f)(x))

    def slope(f):
        return lambda x: by_tape(f, x)

    third = slope(sum_of(slope, sum_of(slope, f)))
    close(third(X), jax.grad(sum_of(jax.grad, sum_of(jax.grad, f)))(X))


def with_a_long_tail(z):
    for _ in range(20):  # enough that its forward pass saves what the backward pass needs
        z = z + 0.01 * jnp.sin(z)
    return z


def test_a_rule_that_is_called_twice_is_differentiated_once_more_where_the_gradient_goes_through():
    @jax.custom_vjp
    def marked(x):  # its forward pass gives the same, with another derivative
        return jnp.sin(x)

    marked.defvjp(
        lambda x: (jax.lax.stop_gradient(jnp.sin(x) - x**2) + x**2, x),
        lambda x, ct: (3 * ct * x**2,),
    )
    shared = jax.jit(marked)
    f = jax.jit(lambda x, other: with_a_long_tail(shared(other) * shared(x)))
    x, other = jnp.float32(0.7), jnp.float32(0.4)
    second = by_tape(lambda other: by_tape(lambda x: f(x, other), x), other)
    close(second, jax.grad(jax.grad(f), 1)(x, other))


def test_each_tape_has_its_own_first_derivative_of_a_rule_in_a_compiled_function():
    f = jax.jit(lambda x, other: with_a_long_tail(tripled_by_jax(x + other) * x))
    x, other = jnp.float32(0.7), jnp.float32(0.4)
    with tg.GradientTape(persistent=True) as outer:
        outer.watch([x, other])
        with tg.GradientTape() as inner:
            inner.watch(x)
            z = f(x, other)
        gradient = inner.gradient(z, x)
    close(gradient, jax.grad(f)(x, other))
    close(outer.gradient(z, other), jax.grad(f, 1)(x, other))
    close(outer.gradient(z, [x, other]), jax.grad(f, (0, 1))(x, other))
    # In one program, it is of the forward pass of the rule.
    close(outer.gradient(gradient, [x, other]), jax.grad(jax.grad(f), (0, 1))(x, other))
