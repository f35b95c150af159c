"""What a tape answers: gradients, None and zero, identity, targets and sources, Jacobians."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import by_tape
from tracegrad import GradientTape

F32 = jnp.float32


def grad_of(fun, *args):
    """The gradients of a function of arrays, on a tape."""
    return by_tape(fun, *args, sources=list(args))


# ---------------------------------------------------------------------------------- the first page


@pytest.mark.accelerator
def test_a_branch_of_python_is_differentiated_as_it_was_taken():
    for value, slope in ((2.0, 4.0), (-2.0, -1.0)):
        (dx,) = grad_of(lambda x: x * x if x > 0 else -x, F32(value))
        assert dx == slope


@pytest.mark.accelerator
def test_it_agrees_with_finite_differences_in_float64():
    def f(x):
        return jnp.sum(jnp.tanh(x @ x.T) * jnp.sin(x).sum())

    with jax.enable_x64(True):
        x = jnp.linspace(0.1, 0.9, 6).reshape(2, 3)
        (dx,) = grad_of(f, x)
        assert dx.dtype == jnp.float64
        step = 1e-6
        for i, j in np.ndindex(2, 3):
            moved = step * jnp.zeros((2, 3)).at[i, j].set(1.0)
            slope = (f(x + moved) - f(x - moved)) / (2 * step)
            np.testing.assert_allclose(dx[i, j], slope, rtol=1e-7)


# ------------------------------------------------------------------------------------ None and zero


def test_a_tape_shows_its_state():
    tape = GradientTape()
    assert repr(tape) == "<GradientTape: not recording>"
    x = F32(2.0)
    with tape:
        tape.watch(x)
        y = x * x
        assert repr(tape) == "<GradientTape: recording>"
    tape.gradient(y, x)
    assert repr(tape) == "<GradientTape: used up>"
    assert repr(GradientTape(persistent=True)) == "<GradientTape, persistent: not recording>"


CONNECTIONS = {
    "a gradient that happens to be zero": (lambda x: x * 0.0, [F32(2.0)], [0.0]),
    "NumPy": (lambda x: jnp.asarray(np.square(np.asarray(x))) * 2, [F32(2.0)], [None]),
    "a float": (lambda x: jnp.asarray(float(x)) * 2, [F32(2.0)], [None]),
    "a key": (lambda k, x: jax.random.uniform(k) * 0 + x, [jax.random.key(0), F32(2)], [None, 1.0]),
}


@pytest.mark.accelerator
@pytest.mark.parametrize(("fun", "args", "expected"), CONNECTIONS.values(), ids=CONNECTIONS)
def test_none_means_that_nothing_connects(fun, args, expected):
    assert grad_of(fun, *args) == expected


def test_an_integer_may_be_watched_which_warns():
    n = jnp.int32(10)
    with GradientTape() as tape:
        with pytest.warns(UserWarning, match="dtype int32, which has no gradient") as warned:
            tape.watch(n)
        y = n * n
    assert tape.gradient(y, n) is None
    assert [each.filename for each in warned] == [__file__]


@pytest.mark.parametrize("transform", [jax.jit, tg.trace, lambda f: lambda x: jax.vmap(f)(x[None])])
def test_a_target_in_a_function_that_is_traced_in_the_block_is_warned_of(transform):
    x = F32(3.0)

    def f(z):
        assert tape.gradient(z * z, [x, z]) == [None, None]
        return z

    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        with pytest.warns(UserWarning, match="does not see what computes the target"):
            y = transform(f)(x)
    assert tape.gradient(y, x) == 1.0


def test_what_was_watched_after_its_use_or_never_has_none_and_is_warned_of():
    x, c = F32(2.0), F32(5.0)
    with GradientTape(persistent=True) as tape:
        early = x * x
        tape.watch(x)
        y = x * c
    for target, sources, expected in ((early, [x], [None]), (y, [x, c], [5.0, None])):
        with pytest.warns(UserWarning, match="did not watch"):
            assert tape.gradient(target, sources) == expected


# ----------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("thing", [np.ones(2), 3.0, 2, np.float32(1.0)])
def test_only_jax_arrays_can_be_watched(thing):
    with GradientTape() as tape, pytest.raises(ValueError, match="watches JAX arrays"):
        tape.watch(thing)


def test_an_array_that_died_does_not_lend_its_identity():
    # CPython gives the address of a dead object to the next one.
    x = F32(2.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = x * 1.0
        for i in range(200):
            y = y + jnp.full((), float(i)) * 0.0
            assert F32(7.0) is not y
    fresh = [F32(i) for i in range(200)]
    found = tape.gradient(y, [x, *fresh])
    assert found[0] == 1.0
    assert all(g is None for g in found[1:])


# ------------------------------------------------------------------------------ targets and sources


def test_a_target_that_is_a_source_need_not_be_watched():
    x = F32(2.0)
    with GradientTape() as tape:
        pass
    assert tape.gradient(x, x) == 1.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("seed", [2, 2.0, np.int64(2), np.uint8(2), np.array(2)], ids=repr)
def test_numbers_take_the_dtype_of_what_they_are_the_gradient_of(seed, dtype):
    x = jnp.asarray(3.0, dtype)

    def of_second_order(x):
        return tg.hessian_vector_product(x**3, x, seed)[0]

    with GradientTape() as tape:
        tape.watch(x)
        y = x * x
    with tg.ForwardAccumulator(x, seed) as accumulator:
        z = x * x
    got = [
        tape.gradient(y, x, output_gradients=seed),
        tg.trace(lambda x: tg.gradients(x * x, x, grad_ys=seed)[0])(x),
        accumulator.jvp(z),
    ]
    assert [(each.dtype, complex(each)) for each in got] == [(x.dtype, 12.0)] * 3
    if dtype != "complex64":
        product = tg.hvp(lambda x: x**3, (x,), seed), tg.trace(of_second_order)(x)
        assert [(each.dtype, float(each)) for each in product] == [(x.dtype, 36.0)] * 2


ONES = jnp.ones(2)


@pytest.mark.parametrize(
    ("target", "x", "seed", "error", "words"),
    [
        (jnp.square, jnp.float16(3.0), 2j, TypeError, "complex.*its target float16"),
        (jnp.square, jnp.float16(3.0), np.float32(2), TypeError, "float32.*its target float16"),
        (jnp.square, jnp.float16(3.0), jnp.int32(2), TypeError, "int32.*its target float16"),
        (jnp.square, ONES, [ONES, ONES], ValueError, "2 arrays, the target 1"),
        (jnp.square, ONES, jnp.ones(3), ValueError, r"\(3,\), its target \(2,\)"),
        (jnp.square, ONES, jnp.ones(2, "float16"), TypeError, "float16, its target float32"),
        (lambda x: {"a": 2 * x, "b": 3 * x}, ONES, {"a": ONES, "x": ONES}, ValueError,
         r"output_gradients has .*, the target a and b"),
        (lambda x: {"a": 2 * x, "b": 3 * x}, ONES, OrderedDict(b=ONES, a=ONES), ValueError,
         r"output_gradients has .*, the target a and b"),
    ],
)  # fmt: skip
def test_output_gradients_that_do_not_fit_the_target_are_refused(target, x, seed, error, words):
    with GradientTape() as tape:
        tape.watch(x)
        y = target(x)
    with pytest.raises(error, match=words):
        tape.gradient(y, x, output_gradients=seed)


def test_output_gradients_go_by_the_keys_of_the_target():
    with GradientTape() as tape:
        tape.watch(ONES)
        y = {"a": 2 * ONES, "b": 3 * ONES}
    seed = {"b": ONES, "a": -ONES}
    np.testing.assert_array_equal(tape.gradient(y, ONES, output_gradients=seed), [1, 1])


# ---------------------------------------------------------------------------------- Jacobians


def test_the_jacobian_has_the_shape_of_the_target_and_then_of_the_source():
    x = jnp.arange(6.0).reshape(2, 3)
    w = jnp.arange(12.0).reshape(3, 4)
    with GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        y = jnp.tanh(x @ w / 10)
    found = tape.jacobian(y, {"x": x, "w": w})
    want = jax.jacrev(lambda x, w: jnp.tanh(x @ w / 10), (0, 1))(x, w)
    assert found["x"].shape == (2, 4, 2, 3)
    assert found["w"].shape == (2, 4, 3, 4)
    np.testing.assert_allclose(found["x"], want[0], atol=1e-6)
    np.testing.assert_allclose(found["w"], want[1], atol=1e-6)


def test_an_unconnected_source_has_no_jacobian_or_zeros_of_its_shape():
    x, z = jnp.ones((2, 3)), jnp.ones((2, 4, 5))
    with GradientTape(persistent=True) as tape:
        tape.watch([x, z])
        y = x * 2
    assert tape.jacobian(y, z) is None
    assert tape.jacobian(y, z, unconnected_gradients="zero").shape == (2, 3, 2, 4, 5)
    np.testing.assert_array_equal(tape.batch_jacobian(y, z), np.zeros((2, 3, 4, 5)))
    assert tape.batch_jacobian(y, z, unconnected_gradients="none") is None


def test_a_jacobian_is_of_one_real_array():
    x = jnp.ones(2)
    z = jnp.ones(2, jnp.complex64)
    with GradientTape(persistent=True) as tape:
        tape.watch([x, z])
        y = x * x
        w = z * z
    with pytest.raises(ValueError, match="there are 2"):
        tape.jacobian([y, y], x)
    with pytest.raises(TypeError, match="complex64"):
        tape.jacobian(w, z)


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [((2,), (2, 3), "at least one more"), ((2, 3), (2,), "at least one more"),
     ((2, 3), (3, 2), "size of the target is 2, and of the source 3")],
)  # fmt: skip
def test_batch_jacobian_wants_two_axes_and_one_batch(target, source, words):
    y, x = jnp.ones(target), jnp.ones(source)
    with GradientTape() as tape:
        tape.watch([y, x])
    with pytest.raises(ValueError, match=words):
        tape.batch_jacobian(y, x)


# ---------------------------------------------------------------------------------- higher orders


@pytest.mark.accelerator
def test_four_nested_tapes_give_four_derivatives():
    def slope_of(fun):
        return lambda x: by_tape(fun, x)

    x = F32(2.0)
    first = slope_of(lambda x: x**5)
    second = slope_of(first)
    third = slope_of(second)
    assert [f(x) for f in (first, second, third, slope_of(third))] == [80.0, 160.0, 240.0, 240.0]


def test_what_is_zero_by_structure_does_not_become_nan_on_its_way():
    gives_none = jax.custom_vjp(lambda x: x)
    gives_none.defvjp(lambda x: (x, None), lambda _, ct: (None,))
    for cut in (jnp.floor, jnp.sign, jax.lax.round, jax.lax.stop_gradient, gives_none):

        def f(x, cut=cut):
            return cut(jnp.sqrt(x)) + x

        assert by_tape(f, F32(0.0)) == jax.grad(f)(0.0) == 1


# ------------------------------------------------------------------------ what is no array


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (object(), "it is an object"),
        ("loss", "it is a str: 'loss'"),
        (None, "it is None"),
        (1.5, "it is a float: 1.5"),
        ({"a": [jnp.ones(()), "b"]}, r"\.a\.1 is a str: 'b'"),
    ],
)
def test_a_target_or_source_that_is_no_array_raises_and_leaves_the_tape_as_it_was(wrong, says):
    x = jnp.float32(3.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = x * x
    with tg.ForwardAccumulator(x, x) as accumulator:
        pass
    asked = [
        ("a target", lambda: tape.gradient(wrong, x)),
        ("a source", lambda: tape.gradient(y, wrong)),
        ("a target", lambda: tape.jacobian(wrong, x)),
        ("a source", lambda: tape.jacobian(y, wrong)),
        ("a target", lambda: tape.batch_jacobian(wrong, x)),
        ("a source", lambda: tape.batch_jacobian(y, wrong)),
        ("a target", lambda: accumulator.jvp(wrong)),
    ]
    if not isinstance(wrong, dict):
        asked.append(("a y", lambda: tg.trace(lambda x: tg.gradients(wrong, x))(x)))
        asked.append(("an? x", lambda: tg.trace(lambda x: tg.gradients(x * x, wrong))(x)))
    for what, ask in asked:
        with pytest.raises(TypeError, match=f"{what} is .*{says}"):
            ask()
    with pytest.raises(ValueError, match="is 'none' or 'zero'; got 'nought'"):
        tape.gradient(y, x, unconnected_gradients="nought")
    assert tape.gradient(y, x) == 6.0


def test_what_is_no_array_in_a_tree_of_sources_gets_none_and_none_is_no_target():
    x = jnp.float32(3.0)
    with GradientTape(persistent=True) as tape:
        tape.watch({"kernel": x, "act": jnp.sin})
        y = x * x
    with pytest.raises(TypeError, match=r"target\.1 is None"):
        tape.gradient([y, None], x)
    for source in (None, jnp.sin, np.ones(())):
        found = tape.gradient([y, np.ones(())], {"kernel": x, "other": source})
        assert found == {"kernel": 6.0, "other": None}


def test_a_variable_as_a_target_has_the_gradient_one_by_itself():
    v, untrained = tg.Variable(3.0), tg.Variable(1.0, trainable=False)
    with GradientTape(persistent=True) as tape:
        y = v * v
    assert tape.gradient(v, v) == 1.0
    assert tape.gradient([v, y], [v, untrained]) == [7.0, None]
    assert tape.gradient(y, untrained, unconnected_gradients="zero") == 0.0
    assert tape.gradient(untrained, untrained) == 1.0
    assert tape.jacobian(v, v) == 1.0
    v.assign(5.0)
    assert tape.gradient([v, y], v) == 1.0 + 6.0
    assert tg.trace(lambda: tg.gradients(v, v))() == [1.0]
