"""What the recorder sees: transformations, compiled functions, rules, effects, libraries."""

import functools
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import hijax, io_callback
from jax.sharding import PartitionSpec as P

import tracegrad as tg
from tests.control_flow import CASES
from tests.derivatives import by_tape, value_by_tape
from tracegrad import GradientTape

pytestmark = pytest.mark.both_jax

F32 = jnp.float32


def tape_gradients(fun, *args):
    return by_tape(fun, *args, sources=list(args))


def agrees_with_jax(fun, *args, rtol=1e-5, atol=1e-6):
    """Whether the gradient of a scalar function on a tape is that of `jax.grad`; twice, so that
    the second comes from the programs that are remembered."""
    want = jax.jit(jax.grad(fun, tuple(range(len(args)))))(*args)
    for _ in range(2):
        for g, w in zip(tape_gradients(fun, *args), want, strict=True):
            np.testing.assert_allclose(jnp.zeros_like(w) if g is None else g, w, rtol, atol)


# -------------------------------------------------------------------------------- transformations

X = jnp.array([0.3, -1.2, 2.0])
CONSTANT = X + 0  # another array, which no tape watches
KEY = jax.random.key(1)


@functools.partial(jax.custom_vjp)
def doubled_rule(x):
    return x**2


doubled_rule.defvjp(lambda x: (x**2, x), lambda x, dy: (4 * x * dy,))


@jax.custom_jvp
def tripled_rule(x):
    return x**2


tripled_rule.defjvp(lambda p, t: (p[0] ** 2, 6 * p[0] * t[0]))


@tg.custom_gradient
def halved_rule(x):
    return x**2, lambda dy: x * dy


class Unhashable:
    __hash__ = None
    __name__ = "unhashable"

    def __call__(self, x):
        return jnp.sin(x)


unhashable = jax.custom_vjp(Unhashable())
unhashable.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (2 * dy * jnp.cos(x),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def power(x, n):
    return x**n


power.defvjp(lambda x, n: (x**n, x), lambda n, x, dy: (10 * n * x * dy,))


@jax.custom_vjp
def told_of_zeros(x, y):
    return x * y


told_of_zeros.defvjp(
    lambda x, y: (x.value * y.value, (x.value, y.value, x.perturbed, y.perturbed)),
    lambda r, dy: (dy * r[1] * (1 + r[3]), dy * r[0] * (1 + r[2])),
    symbolic_zeros=True,
)


@jax.checkpoint
def checkpointed_loop(x):
    last, each = lax.scan(lambda c, y: (jnp.tanh(c), c), x, x)
    return jnp.sum(last * x) + jnp.sum(each)


@jax.jit
def added_to_a_ref(x):
    """Adding gives no result, as printing does; and a `Ref`'s own derivative adds to one."""
    ref = jax.new_ref(jnp.zeros_like(x))
    jax.ref.addupdate(ref, ..., jnp.sin(x))
    return (ref[...] ** 2).sum()


@jax.jit
def some_without_gradients(x):
    return x * 2, jnp.argmax(x), x > 0, jax.random.key(0)


def by_what_has_no_gradient(x):
    y, best, positive, _ = some_without_gradients(x)
    return jnp.where(positive, y, 0)[best] * x[best]


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jax.grad(lambda x: jnp.sum(x**3))(x).sum(),
        lambda x: jax.jit(jax.grad(lambda x: jnp.sum(x**3)))(x).sum(),
        lambda x: jax.vmap(lambda x: jnp.sin(x) * x)(x).sum(),
        lambda x: jax.jit(jax.vmap(lambda x: jnp.sin(x) * x))(x).sum(),
        lambda x: jax.jvp(jnp.sin, (x,), (x,))[1].sum(),
        lambda x: jax.linearize(jnp.sin, x)[1](x).sum(),
        lambda x: jax.vjp(jnp.sin, x)[1](x)[0].sum(),
        lambda x: jax.jacrev(lambda x: x**2)(x).sum(),
        lambda x: jax.hessian(lambda x: jnp.sum(x**4))(x).sum(),
        lambda x: doubled_rule(x).sum(),
        lambda x: jax.jit(doubled_rule)(x).sum(),
        lambda x: jax.vmap(doubled_rule)(x).sum(),
        lambda x: lax.map(doubled_rule, x).sum(),
        lambda x: tripled_rule(x).sum(),
        lambda x: jax.vmap(tripled_rule)(x).sum(),
        lambda x: halved_rule(x).sum(),
        lambda x: jax.jit(halved_rule)(x).sum(),
        lambda x: jax.vmap(halved_rule)(x).sum(),
        lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x / 0.5, 0).sum(),  # dropout
        lambda x: unhashable(x).sum() + power(x, 2).sum() + power(x, 3).sum(),
        lambda x: told_of_zeros(x, 2 * x).sum() + told_of_zeros(CONSTANT, x).sum(),
        lambda x: jnp.sum(jax.grad(checkpointed_loop)(x) ** 2),
        lambda x: jax.scipy.special.expi(x).sum() + jnp.max(x) * x[jnp.argmin(x)],
        by_what_has_no_gradient,
        added_to_a_ref,
        lambda x: x.at[1].set(x[0] ** 2).at[1].multiply(3.0).at[0].add(x[0]).sum(),
        lambda x: jnp.where(x > 0, x, 0).sum() * jnp.asarray(x, jnp.float16).astype(F32)[2],
    ],
)  # fmt: skip
def test_the_gradient_around_a_transformation_is_that_of_jax(fun):
    agrees_with_jax(fun, X)


@pytest.mark.parametrize("case", [each for each in CASES if "grad" not in each.refused], ids=str)
def test_the_gradient_of_every_kind_of_region_is_that_of_jax(case):
    floats = [i for i, arg in enumerate(case.args) if jnp.issubdtype(arg.dtype, jnp.inexact)]

    def total(*given):
        args = dict(enumerate(case.args)) | dict(zip(floats, given))
        leaves = map(jnp.asarray, jax.tree.leaves(case.fun(*args.values())))
        return sum(jnp.sum(jnp.abs(y) ** 2) for y in leaves if jnp.issubdtype(y.dtype, jnp.inexact))

    total = jax.jit(total) if "reference" in case.name else total  # an eager Ref is refused
    agrees_with_jax(total, *(jnp.asarray(case.args[i]) for i in floats), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fun", [jnp.sin, doubled_rule, tripled_rule, halved_rule, jax.nn.relu])
def test_a_tape_inside_a_transformation(fun):
    def slope(x):
        return by_tape(lambda x: fun(x).sum(), x)

    want = jax.grad(lambda x: fun(x).sum())
    second = jax.grad(lambda x: want(x).sum())(X)
    for _ in range(2):
        for run in (jax.jit, tg.trace, lambda f: lambda x: lax.cond(x[0] > 0, f, jnp.sin, x)):
            np.testing.assert_allclose(run(slope)(X), want(X))
        for each in (jax.vmap(slope), lambda xs: lax.map(slope, xs)):
            np.testing.assert_allclose(each(X), jax.vmap(want)(X))
        np.testing.assert_allclose(jax.grad(lambda x: slope(x).sum())(X), second)
        for run in (slope, jax.jit(slope)):
            nested = by_tape(run, X)
            if fun is jax.nn.relu:
                assert nested is None  # its slope is a step, which has none
            else:
                np.testing.assert_allclose(nested, second)


def test_a_tape_in_a_transformation_follows_closures_and_no_value_outlives_it():
    def result(x):
        inner = jax.jit(lambda z: z * x)
        return inner(x) + halved_rule(x) + jax.nn.relu(x) + doubled_rule(x)

    def slope(x):
        return by_tape(result, x)

    want = 2 * X + X + (X > 0) + 4 * X
    with jax.checking_leaks():
        np.testing.assert_allclose(jax.jit(slope)(X), want, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(slope)(X), want, rtol=1e-6)
    assert jax.grad(slope)(F32(2.0)) == 2.0 + 1.0 + 4.0


# ------------------------------------------------------------------------- closures and constants


CLOSED = jnp.array([2.0, 3.0])
times_closed = jax.jit(lambda x: x * CLOSED)


def looped_once(body, x):
    return lax.scan(lambda c, _: (body(c), None), x, None, length=1)[0]


CLOSING_OVER = {
    "jit": times_closed,
    "jit in jit": jax.jit(lambda x: times_closed(x) + 0 * x),
    "scan in jit": jax.jit(lambda x: looped_once(times_closed, x)),
    "cond in jit": jax.jit(lambda x: lax.cond(x[0] > 0, times_closed, lambda x: x, x)),
    "checkpoint in jit": jax.jit(lambda x: jax.checkpoint(times_closed)(x)),
    "vmap in jit": jax.jit(lambda x: jax.vmap(jnp.multiply)(x, CLOSED)),
    "loop in jit": jax.jit(lambda x: lax.fori_loop(0, 1, lambda i, x: times_closed(x), x)),
    "trace": tg.trace(lambda x: x * CLOSED),
    "jit that returns it": lambda x: x * jax.jit(lambda: CLOSED)(),
    "scan": lambda x: looped_once(lambda x: x * CLOSED, x),
    "cond": lambda x: lax.cond(True, lambda x: x * CLOSED, lambda x: x, x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: x * CLOSED)(x),
    "vmap": lambda x: jax.vmap(lambda i: (x * CLOSED)[i])(jnp.arange(2)),
}


@pytest.mark.parametrize("f", CLOSING_OVER.values(), ids=CLOSING_OVER)
def test_a_function_that_closes_over_a_watched_array_passes_gradients_to_it(f):
    for _ in range(3):  # the first call traces, the others do not
        x = jnp.array([5.0, 7.0])
        with GradientTape() as tape:
            tape.watch([x, CLOSED])
            y = f(x).sum()
        dx, dw = tape.gradient(y, [x, CLOSED])
        np.testing.assert_allclose(dx, [2.0, 3.0], rtol=1e-6)
        np.testing.assert_allclose(dw, [5.0, 7.0], rtol=1e-6, atol=1e-6)


def test_a_compiled_function_returns_its_argument_and_what_it_closes_over():
    x, c = F32(2.0), F32(5.0)
    f = jax.jit(lambda x: (x, c, x * c))
    for watched in (True, False, True):
        with GradientTape(persistent=True) as tape:
            tape.watch([x, c] if watched else x)
            same, constant, product = f(x)
        with nullcontext() if watched else pytest.warns(UserWarning, match="did not watch"):
            assert tape.gradient(product, [x, c]) == [5.0, 2.0 if watched else None]
        if watched:
            assert tape.gradient(same, [x, c]) == [1.0, None]
            assert tape.gradient(constant, [x, c]) == [None, 1.0]


def test_a_rule_sees_all_that_varies_also_what_gets_nothing_from_it():
    # As the loops of equinox (and by them diffrax): `weight` gets its gradient elsewhere, and here
    # only says by varying that the result does.
    if_varying = jax.custom_jvp(lambda result, weight: result)

    def jvp(primals, tangents):
        result, weight = tangents
        varies = not isinstance(weight, jax.custom_derivatives.SymbolicZero)
        return primals[0], result if varies else jnp.zeros_like(primals[0])

    if_varying.defjvp(jvp, symbolic_zeros=True)

    def loss(x, weight):
        return if_varying(x * weight, weight)

    x, weight = F32(2.0), F32(3.0)
    for f in (loss, lambda x, weight: jax.jit(loss)(x, weight)):
        assert list(jax.grad(f, (0, 1))(x, weight)) == tape_gradients(f, x, weight) == [3.0, 2.0]
    assert tg.explain(loss, x, weight, wrt=(0, 1))["weight"].norm == 2.0
    assert tg.check_grads(loss, (x, weight), order=1, modes=["rev"])


def closing_rule(wrap, value):
    rule = wrap(value)
    if wrap is jax.custom_jvp:
        rule.defjvp(lambda p, t: (rule(*p), 3 * t[0]))
    else:
        rule.defvjp(lambda x: (rule(x), None), lambda _, dy: (3 * dy,))
    return rule


# Its other uses would have a gradient: a part of the whole. And what a call inside of the function
# closes over is no operand of it.
@pytest.mark.parametrize("wrap", [jax.custom_jvp, jax.custom_vjp])
@pytest.mark.parametrize("value", [lambda x: x * CLOSED[1], lambda x: times_closed(x).sum()])
def test_a_function_with_a_rule_that_closes_over_a_watched_array_raises(value, wrap):
    f, x = closing_rule(wrap, value), F32(2.0)
    functions = [
        f,
        jax.jit(f),
        jax.jit(lambda x: jax.jit(f)(x) * 1),
        lambda x: jax.vmap(f)(x[None]),
    ]
    if wrap is jax.custom_vjp:
        rewritten = tg.rewrite(f, tg.rules.stop_gradient(tg.match.op("sin"), missing_ok=True))
        functions += [rewritten, tg.rewrite(rewritten, [])]
    for g in functions:
        with GradientTape() as tape:
            tape.watch([x, CLOSED])
            with pytest.raises(ValueError, match="closes over an array that a tape watches"):
                g(x) + CLOSED
        assert by_tape(g, x) == 3.0


@pytest.mark.parametrize("wrap", [jax.custom_jvp, jax.custom_vjp])
@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit])
def test_a_function_with_a_rule_that_closes_over_its_own_argument_raises(compiled, wrap):
    x = F32(2.0)
    f = compiled(closing_rule(wrap, lambda a: a * x))
    for persistent in (False, True):
        with GradientTape() as outer, GradientTape(persistent) as tape:
            outer.watch(x)
            tape.watch(x)
            with pytest.raises(ValueError, match="closes over an array that a tape watches"):
                f(x)
    own = closing_rule(wrap, lambda a: a * a)
    with GradientTape() as outer:
        outer.watch(x)
        first = by_tape(lambda x: compiled(own)(x) * x, x)  # 3 x + a a
    assert (first, outer.gradient(first, x)) == (10.0, 6.0)


@pytest.mark.parametrize("wrap", [jax.custom_jvp, jax.custom_vjp])
def test_a_rule_reads_python_values_when_its_function_is_called(wrap):
    now = {"slope": 3.0}
    f = wrap(lambda x: x * 1)
    if wrap is jax.custom_jvp:
        f.defjvp(lambda p, t: (f(*p), now["slope"] * t[0]))
    else:
        f.defvjp(lambda x: (f(x), now["slope"] * jnp.ones_like(x)), lambda r, dy: (r * dy,))
    x = F32(2.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    now["slope"] = 5.0
    assert tape.gradient(y, x) == 3.0


class Scaled(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):
    """The square, with 50 times its derivative."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return x * x

    def vjp_fwd(self, _, x):
        return self(x), x

    def vjp_bwd_retval(self, x, dy):
        return (100.0 * x * dy,)

    def jvp(self, primals, tangents):
        return self(*primals), 100.0 * primals[0] * tangents[0]


def as_operation(x):
    return 2.0 * Scaled(jax.typeof(x))(x)


@pytest.mark.parametrize("f", [as_operation, lambda x: jnp.ldexp(x, 2), lambda x: jnp.frexp(x)[0]])
def test_operations_with_rules_of_their_own(f):
    x = F32(3.0)
    expected = jax.grad(f)(x)
    for function in (f, jax.jit(f)):
        with tg.ForwardAccumulator(x, F32(1.0)) as accumulator:
            y, gradient = value_by_tape(function, x)
        assert gradient == accumulator.jvp(y) == expected
    assert tg.trace(lambda x: tg.gradients(f(x), [x]))(x) == [expected]


# --------------------------------------------------------------------------------------- aliasing

IDENTITIES = {
    "asarray": jnp.asarray,
    "reshape": lambda x: x.reshape(3),
    "slice": lambda x: x[:],
    "ellipsis": lambda x: x[...],
    "astype": lambda x: x.astype(F32),
    "device_put": jax.device_put,
    "broadcast_to": lambda x: jnp.broadcast_to(x, (3,)),
    "concatenate": lambda x: jnp.concatenate([x]),
    "jit": jax.jit(lambda x: x),
    "scan": lambda x: lax.scan(lambda c, _: (c, None), x, None, length=2)[0],
    "no iteration": lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=0)[0],
    "cond": lambda x: lax.cond(True, lambda x: x, lambda x: x * 2, x),
    "while": lambda x: lax.fori_loop(0, 2, lambda i, x: x, x),
    "checkpoint": jax.checkpoint(lambda x: x),
    "vmap": jax.vmap(lambda x: x),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_what_returns_its_argument_passes_the_gradient_on(name):
    same = IDENTITIES[name]
    x = jnp.array([1.0, 2.0, 3.0])
    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = same(x)
        z = (y * x).sum()
    assert tape.gradient(z, x).tolist() == [2.0, 4.0, 6.0]
    if y is not x:
        assert tape.gradient(z, y).tolist() == [1.0, 2.0, 3.0]
        assert tape.gradient(x, y) is None


@pytest.mark.parametrize(
    "rule",
    [
        closing_rule(jax.custom_vjp, lambda x: x),
        closing_rule(jax.custom_jvp, lambda x: x),
        tg.custom_gradient(lambda x: (x, lambda dy: 3 * dy)),
    ],
)
def test_an_identity_with_a_rule_is_another_value(rule):
    x = F32(2.0)
    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = rule(x)
        z = y * y
    assert y is not x
    assert tape.gradient(z, [x, y]) == [12.0, 4.0]


def test_one_result_returned_twice_has_two_gradients():
    x = F32(2.0)
    with GradientTape() as tape:
        tape.watch(x)
        a, b, c = jax.jit(lambda x: (x * 2, x * 2, x))(x)
        y = a * 3 + b * 5 + c
    assert tape.gradient(y, [x, c]) == [17.0, 1.0]


def test_a_donated_argument_lives_on_under_a_tape():
    f = jax.jit(lambda x: x * 2.0, donate_argnums=0)
    x = jnp.arange(4.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = f(x)
        z = f(y)
    assert not x.is_deleted()
    assert not y.is_deleted()
    assert tape.gradient(z, x).tolist() == [4.0] * 4
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


# ---------------------------------------------------------------------------------------- effects


PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(lambda x: jax.jit(f)(x)),
    "cond in jit": lambda f: jax.jit(lambda x: lax.cond(True, f, f, x)),
    "cond": lambda f: lambda x: lax.cond(x[0] > -100, f, f, x),
    "scan in jit": lambda f: jax.jit(lambda x: looped_once(f, x)),
    "scan": lambda f: lambda x: looped_once(f, x),
    "vmap in jit": lambda f: jax.jit(lambda x: jax.vmap(lambda y: f(x) * y)(jnp.ones(2))),
    "trace": lambda f: tg.trace(f),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_callback_happens_once_wherever_it_stands(place, ordered):
    seen = []

    def f(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x[0], ordered=ordered)
        return jnp.sin(x)

    x = X + 0
    g = place(f)
    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = g(x).sum()
        d = tape.gradient(y, x)
    second = tape.gradient(d, x)
    jax.effects_barrier()
    assert len(seen) == 1
    factor = 2 if g(x).ndim == 2 else 1
    np.testing.assert_allclose(d, factor * np.cos(x), rtol=1e-5)
    np.testing.assert_allclose(second, -factor * np.sin(x), rtol=1e-5)


def once(ask, x):
    return jnp.sin(x) * ask()


def in_a_loop(ask, x):
    return lax.scan(lambda c, _: (c * ask(), None), jnp.sin(x), None, length=2)[0]


@pytest.mark.parametrize(
    ("program", "ordered", "expected"),
    [(once, False, 3.0), (once, True, 3.0), (in_a_loop, False, 3.0 * 100.0)],
)
def test_what_the_host_gave_a_compiled_function_is_asked_for_once(program, ordered, expected):
    answers = iter([3.0, 100.0, 1000.0])
    host = lambda: np.float32(next(answers))  # noqa: E731
    ask = functools.partial(io_callback, host, jax.ShapeDtypeStruct((), F32), ordered=ordered)
    y, dx = value_by_tape(jax.jit(functools.partial(program, ask)), F32(1.0))
    np.testing.assert_allclose(dx, expected * np.cos(1.0), rtol=1e-6)
    np.testing.assert_allclose(y, expected * np.sin(1.0), rtol=1e-6)


def test_a_print_in_a_custom_rule_happens_once(capfd):
    def told(word, value):
        jax.debug.print(word)
        return value

    f = jax.custom_vjp(lambda x: told("forward", x * x))
    f.defvjp(lambda x: (f(x), x), lambda x, dy: (told("backward", 2 * x * dy),))
    for g in (f, jax.jit(f)):
        assert by_tape(g, F32(3.0)) == 6.0
        jax.effects_barrier()
        assert sorted(capfd.readouterr().out.split()) == ["backward", "forward"]


# ------------------------------------------------------------------------ arrays that change


def looked_through(x, scale):
    return jnp.sum(jnp.sin(x) * scale)


@pytest.mark.parametrize(
    "of_array",
    [
        lambda x, a: looked_through(x, a),
        lambda x, a: jnp.sum(lax.mul(jnp.sin(x), a)),
        lambda x, a: jax.jit(looked_through)(x, a),
        lambda x, a: jax.jit(looked_through)(x, scale=a),
        lambda x, a: jax.jit(lambda x: looked_through(x, a))(x),
        lambda x, a: jax.jit(lambda x: jax.jit(lambda x: looked_through(x, a))(x))(x),
        lambda x, a: jax.jit(lambda x: jnp.sum(jax.vmap(lambda x, s: jnp.sin(x) * s)(x, a)))(x),
        lambda x, a: tg.trace(lambda x: looked_through(x, a))(x),
        lambda x, a: jax.checkpoint(lambda x: looked_through(x, a))(x),
        lambda x, a: lax.scan(lambda c, _: (c + looked_through(x, a), None), 0.0, None, 1)[0],
        lambda x, a: lax.cond(x[0] > 0, lambda x: looked_through(x, a), jnp.sum, x),
        lambda x, a: tg.custom_gradient(lambda x, a: (x * a, lambda dy: (jnp.cos(x) * a, None)))(
            x, a
        ).sum(),
    ],
)
def test_a_numpy_array_counts_with_the_values_that_it_had_when_it_was_used(of_array):
    array, x = np.array([3.0, 4.0], np.float32), jnp.array([1.0, 2.0])
    with GradientTape() as tape:
        tape.watch(x)
        y = of_array(x, array)
    array[:] = 100.0
    expected = np.array([3.0, 4.0]) * np.cos([1.0, 2.0])
    np.testing.assert_allclose(tape.gradient(y, x), expected, rtol=1e-6)


# ---------------------------------------------------------------------------------- compiled once


W = jnp.linspace(-1.0, 1.0, 3)
closing = jax.jit(lambda x: x * W)


def sine(carry, _):
    return jnp.sin(carry), None


def tripled(x):
    return 3 * x


def one_tape(fun, x):
    return by_tape(lambda x, _: fun(x), x, W)


def two_tapes(fun, x):
    return by_tape(lambda x: one_tape(lambda x: fun(x).sum(), x)[0], x)


ON_ONE_TAPE = [
    lambda x: jnp.tanh(x * 2).sum(),
    lambda x: (jax.nn.relu(x) * jax.nn.silu(x)).sum(),
    lambda x: jax.nn.softmax(x)[0] + jax.nn.gelu(x).sum(),
    lambda x: doubled_rule(x).sum(),
    lambda x: tripled_rule(x).sum(),
    lambda x: halved_rule(x).sum() * halved_rule(x * 2).sum(),
    lambda x: jax.jit(halved_rule)(x).sum(),
    lambda x: closing(x).sum(),
    lambda x: sum(jnp.sin(x * i) for i in range(4)).sum(),
    # Functions made anew in each step:
    lambda x: lax.scan(lambda c, _: (jnp.sin(c) * c, None), x, None, length=3)[0].sum(),
    lambda x: lax.cond(True, lambda x: x * x, lambda x: x, x).sum(),
    lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum(),
    lambda x: jax.jit(lambda x: jnp.exp(x) * x)(x).sum(),
    # Functions of which JAX makes programs anew at each call:
    lambda x: lax.map(jnp.sin, x).sum(),
    lambda x: jax.grad(lambda x: lax.scan(sine, x, None, length=2)[0].sum())(x).sum(),
    lambda x: jax.grad(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x).sum())(x).sum(),
    lambda x: jax.scipy.sparse.linalg.cg(tripled, x)[0].sum(),
]
ON_TWO_TAPES = [jnp.tanh, jax.nn.relu, doubled_rule, tripled_rule, closing, jax.jit(halved_rule)]


@pytest.mark.parametrize(
    ("way", "fun"),
    [(one_tape, fun) for fun in ON_ONE_TAPE] + [(two_tapes, fun) for fun in ON_TWO_TAPES],
)
def test_the_second_step_of_a_loop_compiles_nothing(way, fun, compilations):
    way(fun, X + 0.0)
    way(fun, X + 1.0)
    before = compilations()
    for i in range(3):
        way(fun, X + float(i))
    assert compilations() == before


def test_programs_that_differ_in_a_constant_are_told_apart():
    for value in (2.0, 3.0, -0.0, 0.0):
        fun = jax.jit(lambda x, value=value: looped_once(lambda c: c * value, x))
        assert by_tape(fun, F32(1.0)) == value
    for array in (jnp.ones(3), jnp.full(3, 2.0), jnp.ones(3)):
        fun = jax.jit(lambda x, array=array: (x * array).sum())
        assert by_tape(fun, jnp.ones(3)).tolist() == array.tolist()


# ---------------------------------------------------------------------------- dtypes and operands


def test_float64_half_precision_and_weak_types():
    with jax.enable_x64(True):
        dx = by_tape(lambda x: jnp.sin(x) * 3, jnp.float64(1.0))
        assert dx.dtype == jnp.float64
        np.testing.assert_allclose(dx, 3 * np.cos(1.0), rtol=1e-15)
    assert by_tape(lambda x: jnp.sin(x).astype(F32) * 3, jnp.bfloat16(1.0)).dtype == jnp.bfloat16
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    assert by_tape(lambda x: x * jnp.bfloat16(3.0), weak) == 3.0


def test_sharded_arrays():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P("i"))
    x = jax.device_put(jnp.arange(8.0), sharding)
    with GradientTape() as tape:
        tape.watch(x)
        y = jnp.sin(x) * x.reshape(8)
    dx = tape.gradient(y, x)
    want = np.cos(x) * x + np.sin(x)
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-6)
    assert dx.sharding.is_equivalent_to(sharding, 1)


@pytest.mark.both_jax
def test_gradients_of_arrays_are_split_over_explicit_axes_as_the_arrays():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, P("i")))

    @tg.custom_gradient
    def sine(x):
        return (jnp.sin(x), jnp.cos(x)), lambda ds, dc: ds * jnp.cos(x) - dc * jnp.sin(x)

    with jax.set_mesh(mesh):
        with GradientTape(persistent=True) as tape:
            tape.watch(x)
            y, z = sine(x)[0], jnp.sin(x)
        gradients = tape.gradient(y, x), tape.gradient(z, x)
        jacobian = tape.jacobian(z, x)
    for dx in gradients:
        np.testing.assert_allclose(dx, np.cos(np.arange(8.0)), rtol=1e-6)
        assert jax.typeof(dx) == jax.typeof(x)
    np.testing.assert_allclose(jacobian, np.diag(np.cos(np.arange(8.0))), rtol=1e-6)


def test_arrays_on_different_devices():
    """As a model that is put on two devices by hand: `jax.grad` differentiates it where it runs."""
    here, there = jax.devices()[1:3]
    x = jax.device_put(jnp.arange(1.0, 4.0), here)
    w = jax.device_put(jnp.arange(2.0, 5.0), there)

    def loss(x, w):
        return jnp.sum(jax.device_put(jnp.sin(x) * x, there) ** 2 * w)

    with GradientTape(persistent=True) as outer:
        outer.watch((x, w))
        y, gradients = value_by_tape(loss, x, w)
    np.testing.assert_allclose(outer.jacobian(y, x), jax.grad(loss)(x, w), rtol=1e-5)
    for got, wanted in zip(gradients, jax.grad(loss, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        assert got.devices() == wanted.devices()
    second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, w)))(x)
    np.testing.assert_allclose(outer.gradient(gradients[0], x), second, rtol=1e-5)


def of_shards(fun, **specs):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, **{"in_specs": P("i"), "out_specs": P("i"), **specs})


def test_a_shard_map_outside_of_a_compiled_function():
    x, w = jnp.arange(8.0), F32(3.0)

    def total(x, w):  # the mapped function closes over w
        mapped = of_shards(lambda x: {"sum": lax.psum(jnp.sum(jnp.sin(w * x)), "i")}, out_specs=P())
        return mapped(x)["sum"] ** 2

    def on_a_tape(x, w):
        return by_tape(total, x, w)

    scale = 2 * np.sum(np.sin(3 * np.arange(8.0)))
    cosines = scale * np.cos(3 * np.arange(8.0))
    expected = 3 * cosines, np.sum(np.arange(8.0) * cosines)
    symbolic = tg.trace(lambda x, w: tg.gradients(total(x, w), [x, w]))
    for gradient in (on_a_tape, tg.trace(on_a_tape), symbolic):
        for got, wanted in zip(gradient(x, w), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4)
    with jax.disable_jit():
        np.testing.assert_allclose(on_a_tape(x, w)[0], expected[0], rtol=1e-4)


def test_a_jitted_function_in_a_shard_map_may_close_over_a_watched_array():
    x, w = jnp.arange(8.0), F32(3.0)
    scaled = jax.jit(lambda x: x * w)
    for mapped in (of_shards(lambda x: 2 * scaled(x)), jax.jit(of_shards(lambda x: 2 * scaled(x)))):
        dx, dw = by_tape(lambda x, w, mapped=mapped: mapped(x), x, w)
        np.testing.assert_array_equal(dx, np.full(8, 6.0))
        assert dw == 2 * np.arange(8.0).sum()


def test_a_variable_that_a_shard_map_reads_is_not_lost_in_silence():
    v = tg.Variable(3.0)
    with GradientTape(), pytest.raises(RuntimeError, match="read inside a function that JAX"):
        of_shards(lambda x: x * v)(jnp.arange(8.0))


def test_tapes_in_the_body_of_a_shard_map():
    x, w = jnp.arange(8.0), F32(3.0)

    def body(x, w):  # the axes over which values vary are checked
        with GradientTape(persistent=True) as tape:
            tape.watch((x, w))
            y = jnp.sin(w * x)
        dx, dw = tape.gradient(y, (x, w))
        return dx, dw, jnp.diagonal(tape.jacobian(y, x))

    mapped = of_shards(body, in_specs=(P("i"), P()), out_specs=(P("i"), P(), P("i")))
    cosines = np.cos(3 * np.arange(8.0))
    expected = 3 * cosines, np.sum(np.arange(8.0) * cosines), 3 * cosines
    for run in (mapped, jax.jit(mapped)):
        for got, wanted in zip(run(x, w), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4)


def test_a_gradient_given_by_name_inside_of_a_shard_map():
    tg.register_gradient("Tenfold", replace=True)(lambda op, dy: 10 * dy)

    def total(x):
        with tg.gradient_override_map({"sin": "Tenfold"}):
            return jnp.sum(of_shards(jnp.sin)(x))

    x = jnp.arange(8.0)
    for gradient in (jax.grad(total)(x), tg.grad(total)(x), by_tape(total, x)):
        np.testing.assert_array_equal(gradient, np.full(8, 10.0))


# ------------------------------------------------------------------------- what cannot be recorded


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_an_unbounded_while_loop_raises_as_jax_does_and_names_the_line(compiled):
    x = F32(1.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = compiled(lambda x: lax.while_loop(lambda x: x < 10, lambda x: x * 2, x))(x)
    assert y == 16.0
    with pytest.raises(ValueError, match="Reverse-mode differentiation") as raised:
        tape.gradient(y, x)
    assert "test_recording.py" in "".join(raised.value.__notes__)


def test_a_second_derivative_that_jax_does_not_have_raises_as_jax_does_and_names_the_line():
    """The operation that fails is the pull-back of a sampler: several operations, with a loop."""
    x = jnp.ones(3)
    with GradientTape() as outer:
        outer.watch(x)
        with GradientTape() as inner:
            inner.watch(x)
            y = jax.random.gamma(jax.random.key(0), x)
        z = inner.gradient(y, x)
    with pytest.raises(ValueError, match=r"lax\.while_loop") as caught:
        outer.gradient(z, x)
    notes = "\n".join(caught.value.__notes__)
    assert "How often this loop runs" in notes
    assert "pull _gamma" in notes
    assert "test_recording.py" in notes


def test_what_was_compiled_ahead_of_time_is_not_recorded():
    compiled = jax.jit(lambda x: x * x).lower(F32(2.0)).compile()
    assert value_by_tape(compiled, F32(2.0)) == (4.0, None)


def test_an_eager_ref_raises():
    x = F32(2.0)
    ref = jax.new_ref(F32(1.0))
    with GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(NotImplementedError, match=r"jax\.Ref"):
            ref[...] = x
        with pytest.raises(NotImplementedError, match=r"jax\.Ref"):
            jax.new_ref(x)


def test_a_compiled_function_that_uses_a_ref_has_a_second_derivative():
    slope = by_tape(lambda x: by_tape(added_to_a_ref, x), X)
    np.testing.assert_allclose(slope, 2 * np.cos(2 * X), rtol=1e-5)


def test_a_ref_beside_an_effect_which_would_happen_twice_is_refused(capfd):
    @jax.jit
    def f(x):
        ref = jax.new_ref(x)
        jax.debug.print("met {}", x)
        return ref[...] ** 2

    x = F32(3.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    with pytest.raises(NotImplementedError, match=r"f has effects.*jax\.Ref.*run once more"):
        tape.gradient(y, x)
    jax.effects_barrier()
    assert capfd.readouterr().out == "met 3.0\n"


# ------------------------------------------------------------------------------------- the record


def test_the_trace_of_the_backward_pass_grows_linearly():
    def equations(count):
        x = F32(1.0)
        with GradientTape() as outer:
            outer.watch(x)
            by_tape(lambda x: functools.reduce(lambda y, _: lax.sin(y), range(count), x), x)
        return len(outer._record.entries)

    small, middle, large = map(equations, (10, 20, 40))
    assert large - middle == 2 * (middle - small)


@pytest.mark.parametrize("wrap", [lambda f: f, tg.trace], ids=["eager", "traced"])
@pytest.mark.parametrize("recomputed", [jax.checkpoint, tg.recompute_grad])
def test_a_recomputed_function_gives_zeros_to_arguments_that_it_does_not_use(recomputed, wrap):
    def of_a_constant(x):  # it is a number in the program, wherever it is read
        y = recomputed(lambda x: jnp.zeros_like(W[0]))(x)
        return y, jnp.sin(y) + 1.0

    def of_what_it_closes_over(x, unused):
        inner = jax.jit(lambda: jnp.sin(x))
        return recomputed(lambda unused: inner())(unused)

    for i in (0, 1):
        found = wrap(lambda x: by_tape(lambda x: of_a_constant(x)[i], x))(X)  # noqa: B023
        assert found.tolist() == [0.0, 0.0, 0.0]
    at_x, at_unused = wrap(lambda *xs: by_tape(of_what_it_closes_over, *xs))(X, F32(2.0))
    np.testing.assert_allclose(at_x, np.cos(X), 1e-6)
    assert at_unused == 0.0


def test_to_trace_a_tape_takes_no_more_calls_of_functions_than_to_trace_jax_grad():
    # Each operation's VJP was traced anew, and before JAX 0.12 for each array JAX wrote out the
    # whole program, in an error that nobody saw.
    def chain(x):
        return functools.reduce(lambda y, _: jnp.sin(y) * y, range(40), x)

    def count_calls(gradient):
        calls, before = [], sys.getprofile()
        sys.setprofile(lambda frame, event, arg: event == "call" and calls.append(None))
        try:
            jax.make_jaxpr(lambda x: gradient(x))(jnp.float32(0.5))  # JAX caches by function
        finally:
            sys.setprofile(before)
        return len(calls)

    by_jax, on_tape = jax.grad(chain), functools.partial(by_tape, chain)
    for gradient in (by_jax, on_tape):
        jax.make_jaxpr(gradient)(jnp.float32(0.5))
    assert count_calls(on_tape) < count_calls(by_jax)
