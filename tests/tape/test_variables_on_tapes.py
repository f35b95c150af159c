"""Variables on tapes: watched at their first read, each read with the value it had."""

import copy

import flax.nnx  # noqa: F401 (where it is imported, calls are searched for its modules)
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.derivatives import by_tape, value_by_tape
from tracegrad import GradientTape, custom_gradient, recompute_grad
from tracegrad.tape.forward_accumulator import ForwardAccumulator
from tracegrad.tracing import trace
from tracegrad.variables.variable import Variable


@pytest.mark.both_jax
def test_of_the_variables_that_a_traced_function_is_given_those_that_it_uses_are_watched():
    a, b = Variable(3.0), Variable(2.0)
    square = trace(lambda pair, x: pair[0] * pair[0] * x)
    for used, unused in ((a, b), (b, a), (a, b), (b, a)):  # traced for each, and as it is compiled
        with GradientTape() as tape:
            y = square((used, unused), 2.0)
        assert tape.watched_variables() == (used,)
        assert tape.gradient(y, [used, unused]) == [4 * float(used), None]
    with GradientTape(watch_accessed_variables=False) as tape:
        square((a, b), 2.0)
    assert tape.watched_variables() == ()


def test_an_assignment_is_not_differentiated_however_often_its_value_was_handed_on():
    v, average, x = Variable(3.0), Variable(0.0, trainable=False), jnp.float32(2.0)
    for _ in range(3):  # the first time the two share their buffers, then the value is copied
        with GradientTape(persistent=True) as tape:
            tape.watch(x)
            average.assign(v)
            y = average * 2.0 + v + Variable(v.value) + copy.copy(v)
            average.assign(x)
            z = average * x
        assert float(tape.gradient(y, v)) == 1.0
        assert float(tape.gradient(z, x)) == 2.0


def plain(fun):
    return fun


def scanned(fun):
    return jax.lax.scan(lambda carry, _: (carry, fun()), None, length=1)[1]


def annotated(fun):
    ruled = custom_gradient(
        lambda x: (x * fun(), lambda dy, variables=None: (jnp.sum(dy), [jnp.zeros(())]))
    )
    return ruled(1.0)


# Where derivatives are taken, and how a function further inside is kept by JAX there.
PLACES = {
    "eager": (plain, plain),
    "traced": (trace, jax.jit),
    "in jit": (lambda fun: trace(lambda: jax.jit(lambda: fun())()), jax.jit),
    "in a scan": (lambda fun: trace(lambda: scanned(fun)), jax.jit),
    "in a custom gradient": (lambda fun: trace(lambda: annotated(fun)), jax.jit),
}


@pytest.mark.parametrize(
    ("place", "is_assigned"),
    [*[(place, False) for place in PLACES], ("eager", True), ("traced", True)],
)
def test_what_was_read_of_a_variable_before_a_tape_is_a_constant_to_it(place, is_assigned):
    """As in TensorFlow, where each read gives another tensor."""
    way, kept = PLACES[place]
    v = Variable(3.0)
    doubled = kept(lambda: 2.0 * v)

    def derivatives():
        if is_assigned:
            v.assign(3.0)
        before = v.value
        with GradientTape() as outer:
            between = v.value
            with GradientTape() as inner:
                y = v * before * between
            slope = inner.gradient(y, v)
        with GradientTape() as other:
            z = doubled() * before + v * before
        with ForwardAccumulator(v, jnp.float32(1.0)) as accumulator:
            w = v * before * between
        second, third = outer.gradient(slope, v), other.gradient(z, v)
        return jnp.stack([slope, second, third, accumulator.jvp(w)])

    run = way(derivatives)
    for value in (3.0, 5.0):
        v.assign(value)
        now = 3.0 if is_assigned else value
        assert run().ravel().tolist() == [now**2, now, 3 * now, now**2]


def test_a_tape_keeps_nothing_of_a_function_that_is_traced_in_its_block():
    v = Variable(3.0)

    @jax.jit
    def slope():
        before = v.value
        return by_tape(lambda: jax.jit(lambda x: v * x * before)(2.0) * v, sources=v)

    with jax.checking_leaks():
        assert trace(lambda: slope())() == 36.0


def test_an_assigned_variable_that_inner_functions_read_has_its_gradient_by_what_the_tape_sees():
    v = Variable(3.0)
    doubled = jax.jit(lambda: 2.0 * v)

    @trace
    def derivatives(x):
        v.assign(x)
        doubled()  # JAX keeps it, and does not run it again
        before = v.value
        with GradientTape() as tape:
            y = doubled() * v * before + jax.jit(lambda: doubled())()
        with GradientTape() as other:
            z = jax.jit(lambda old: old * 2.0)(before)
        return tape.gradient(y, v), other.gradient(z, v)

    for _ in range(2):
        assert derivatives(5.0) == (102.0, None)


@pytest.mark.parametrize("way", [lambda fun: fun, trace], ids=["eager", "traced"])
def test_what_a_gradient_function_reads_before_a_tape_of_its_own_is_a_constant_to_it(way):
    """Of a Variable that its function has read, too; tapes around follow both reads."""
    v, one = Variable(3.0), jnp.array(1.0)

    @custom_gradient
    def times_v(x):
        y = x * v.value

        def grad_fn(dy, variables=None):
            before = v.value
            with GradientTape() as own:
                read = v.value
                with own.stop_recording():
                    meanwhile = v.value
                product = before * read * meanwhile
            return dy * own.gradient(product, v), [dy * 0]

        return y, grad_fn

    @way
    def derivatives():
        with GradientTape() as outer:
            with GradientTape(persistent=True) as tape:
                tape.watch(one)
                y = times_v(one)
            first, again = tape.gradient(y, one), tape.gradient(y, one)
        return first, again, outer.gradient((first, again), v)

    # v² each, in whose place all three reads have a part; and so twice 2 v.
    assert list(map(float, derivatives())) == [9.0, 9.0, 12.0]


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (plain, plain),
        (trace, plain),
        (trace, jax.jit),
        (lambda f: trace(lambda x: jax.jit(f)(x)), plain),
    ],
    ids=["eager", "traced", "kept by JAX", "in a function that JAX keeps"],
)
def test_what_is_read_on_a_tape_is_watched_from_the_moment_that_it_is_to_be(way, kind):
    """Also where it was read on the tape before; not while the tape does not record."""
    v, frozen = Variable(3.0), Variable(2.0, trainable=False)
    scaled, scaled_by_frozen = kind(lambda x: v * x), kind(lambda x: frozen * x)

    @way
    def slopes(x):
        with GradientTape() as anew:
            before = scaled(x)
            anew.reset()
            y = scaled(x) * before
        with GradientTape() as late:
            before = scaled_by_frozen(x)
            late.watch(frozen)
            z = scaled_by_frozen(x) * before
        with GradientTape() as tape:
            w = scaled(x)
            with tape.stop_recording():
                aside = scaled(x)
            w = w * aside * scaled(x)
        return anew.gradient(y, v), late.gradient(z, frozen), tape.gradient(w, v)

    assert list(map(float, slopes(jnp.float32(5.0)))) == [75.0, 50.0, 2 * 5 * 15 * 15]


def test_variables_work_in_functions_of_jax_numpy_in_indexing_and_in_jit():
    x = jnp.array([[0.1, 0.2, 0.3]])  # where tanh is not flat

    def fun(table, bias):
        rows = jnp.sum(jnp.take(table, 0, axis=0)) + table[1, 1]
        return jnp.sum(jnp.tanh(x @ table + bias)) + rows

    table, bias = Variable(jnp.arange(6.0).reshape(3, 2)), Variable(jnp.ones(2))
    expected = jax.grad(fun, (0, 1))(table.value, bias.value)
    for each in (fun, jax.jit(fun)):
        for got, wanted in zip(by_tape(each, table, bias), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)


def summed_over_a_loop(v, x):
    def body(total, _):
        return total + v * v, None

    return jax.lax.scan(body, 0.0, length=1)[0]


READERS = {
    "read": lambda v, x: v * v,
    "jit": lambda v, x: jax.jit(lambda: v * v)(),
    "checkpoint": lambda v, x: jax.checkpoint(lambda: v * v)(),
    "scan": summed_over_a_loop,
    "traced": lambda v, x: trace(lambda: v * v)(),
    "recomputed": lambda v, x: recompute_grad(lambda x: v * v)(x),
}


@pytest.mark.both_jax
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("given", [lambda x: 2 * x, lambda x: 6.0], ids=["computed", "number"])
def test_a_tape_around_a_traced_function_sees_the_reads_after_an_assignment(reader, given):
    v, x = Variable(1.0), jnp.float32(3.0)

    def fun(x):
        before = v * v
        v.assign(given(x))
        return before + reader(v, x)

    traced = trace(fun)
    for start in (1.0, 4.0):  # traced, and as it was compiled
        v.assign(start)
        with GradientTape() as tape:
            tape.watch(x)
            y = traced(x)
        assert float(y) == start**2 + 36
        slope, of_argument = tape.gradient(y, [v, x])
        assert float(slope) == 2 * start + 12
        assert of_argument is None  # an assignment is not differentiated
        assert float(v) == 6.0


def test_derivatives_of_a_traced_function_that_assigns_are_those_of_its_values():
    v, x, one = Variable(1.0), jnp.float32(3.0), jnp.float32(1.0)

    def fun(x):
        before = v * v
        v.assign(2 * x)
        middle = v * v * v
        v.assign_add(x)
        return before + middle * v

    for f in (fun, trace(fun), trace(fun).graph(x).to_callable()):
        v.assign(1.0)
        with GradientTape() as outer:
            y, slope = value_by_tape(f, x, sources=v)
        assert (float(y), float(v)) == (1 + 6**3 * 9, 9.0)
        assert float(slope) == 2 + 3 * 6**2 * 9 + 6**3
        # The second derivative of a² + b³ c along (1, 1, 1).
        assert float(outer.gradient(slope, v)) == 2 + 6 * 6 * 9 + 2 * 3 * 6**2
        v.assign(1.0)
        with ForwardAccumulator(v, one) as accumulator:
            y = f(x)
        assert float(accumulator.jvp(y)) == 2 + 3 * 6**2 * 9 + 6**3


def test_a_function_that_assigns_compiles_to_the_same_program_as_by_hand():
    v = Variable(jnp.ones(3))

    def fun(x):
        v.assign(v * x)
        return jnp.sum(v * x)

    def by_hand(value, x):
        new = value * x
        return [new], jnp.sum(new * x)

    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    compiled = trace(fun).lower(x).compile().as_text()
    ours, theirs = compiled, jax.jit(by_hand, donate_argnums=0).lower(x, x).compile().as_text()
    for opcode in ("multiply(", "reduce(", "copy("):
        assert ours.count(opcode) == theirs.count(opcode)
