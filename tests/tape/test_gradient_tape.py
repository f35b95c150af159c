"""What a tape answers: gradients, None and zero, identity, targets and sources, Jacobians."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad import GradientTape

F32 = jnp.float32


def grad_of(fun, *args, **options):
    """The gradient of a function of arrays, on a tape."""
    with GradientTape() as tape:
        tape.watch(args)
        y = fun(*args)
    return tape.gradient(y, list(args), **options)


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


def test_any_other_word_for_unconnected_raises_before_the_tape_is_used():
    x = F32(2.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = x * x
    with pytest.raises(ValueError, match="is 'none' or 'zero'; got 'nought'"):
        tape.gradient(y, x, unconnected_gradients="nought")
    assert tape.gradient(y, x) == 4.0


def test_a_part_that_is_stopped_is_a_constant():
    assert grad_of(lambda x: x * jax.lax.stop_gradient(x), F32(3.0)) == [3.0]


def test_an_integer_source_has_none_and_may_be_watched():
    n = jnp.int32(10)
    assert grad_of(lambda n: n * n, n) == [None]
    with GradientTape() as tape:
        with pytest.warns(UserWarning, match="dtype int32, which has no gradient") as warned:
            tape.watch(n)
        y = n * n
    assert tape.gradient(y, n) is None
    assert [each.filename for each in warned] == [__file__]


def test_a_gradient_that_happens_to_be_zero_is_connected():
    (dx,) = grad_of(lambda x: x * 0.0, F32(2.0))
    assert dx == 0.0


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


def test_an_array_watched_after_its_use_has_none():
    x = F32(2.0)
    with GradientTape() as tape:
        y = x * x
        tape.watch(x)
    with pytest.warns(UserWarning, match="did not watch"):
        assert tape.gradient(y, x) is None


@pytest.mark.accelerator
def test_a_host_conversion_ends_the_gradient():
    x = jnp.ones(3)
    assert grad_of(lambda x: jnp.asarray(np.square(np.asarray(x))).sum(), x) == [None]
    assert grad_of(lambda x: jnp.asarray(float(x[0])) * 2, x) == [None]


def test_none_passes_through_a_function_boundary_argument_by_argument():
    def f(x, y):
        return jax.lax.stop_gradient(x) + y

    for boundary in (f, jax.jit(f), tg.trace(f)):
        assert grad_of(boundary, F32(1.0), F32(2.0)) == [None, 1.0]


# ----------------------------------------------------------------------------------------- identity


def test_one_array_under_two_names_is_one_source():
    a = F32(3.0)
    b = a
    with GradientTape() as tape:
        tape.watch(a)
        y = a * b
    assert tape.gradient(y, [a, b]) == [6.0, 6.0]


@pytest.mark.parametrize("thing", [np.ones(2), 3.0, 2, np.float32(1.0)])
def test_only_jax_arrays_can_be_watched(thing):
    with GradientTape() as tape, pytest.raises(ValueError, match="watches JAX arrays"):
        tape.watch(thing)


def test_a_tree_is_watched_whole():
    params = {"w": jnp.ones(2), "b": [jnp.zeros(()), jnp.int32(3)]}
    with GradientTape() as tape:
        tape.watch(params)
        y = (params["w"] * 2).sum() + params["b"][0] * params["b"][1]
    found = tape.gradient(y, params)
    assert found["w"].tolist() == [2.0, 2.0]
    assert found["b"][0] == 3.0
    assert found["b"][1] is None


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


def test_a_target_that_is_a_source_adds_its_seed():
    x = F32(2.0)
    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x**2
    assert tape.gradient([x, y], x) == 5.0
    assert tape.gradient(x, x) == 1.0
    assert tape.gradient(y, [x, y]) == [4.0, 1.0]


def test_a_target_that_is_a_source_need_not_be_watched():
    x = F32(2.0)
    with GradientTape() as tape:
        pass
    assert tape.gradient(x, x) == 1.0


def test_a_constant_that_was_not_watched_has_none():
    x, c = F32(2.0), F32(5.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = x * c
    with pytest.warns(UserWarning, match="did not watch"):
        assert tape.gradient(y, [x, c]) == [5.0, None]


def test_a_source_on_the_way_to_another_keeps_both_gradients():
    x = F32(3.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = x * x
        z = y * x
    assert tape.gradient(z, {"x": x, "y": (y,)}) == {"x": 27.0, "y": (3.0,)}


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


def test_a_number_of_another_kind_is_no_gradient():
    x = jnp.float16(3.0)
    for seed, kind in [(2j, "complex"), (np.float32(2), "float32"), (jnp.int32(2), "int32")]:
        with GradientTape() as tape:
            tape.watch(x)
            y = x * x
        with pytest.raises(TypeError, match=f"{kind}.*its target float16"):
            tape.gradient(y, x, output_gradients=seed)


def test_output_gradients_have_the_keys_of_the_target():
    x = jnp.ones(2)
    with GradientTape() as tape:
        tape.watch(x)
        y = {"a": 2 * x, "b": 3 * x}
    for seed in ({"a": x, "x": x}, OrderedDict(b=x, a=x)):
        with pytest.raises(ValueError, match=r"output_gradients has .*, the target a and b"):
            tape.gradient(y, x, output_gradients=seed)
    np.testing.assert_array_equal(tape.gradient(y, x, output_gradients={"b": x, "a": -x}), [1, 1])


def test_output_gradients_are_checked():
    x = jnp.array([1.0, 2.0])
    with GradientTape() as tape:
        tape.watch(x)
        y = x**2
    with pytest.raises(ValueError, match="2 arrays, the target 1"):
        tape.gradient(y, x, output_gradients=[y, y])
    with pytest.raises(ValueError, match=r"\(3,\), its target \(2,\)"):
        tape.gradient(y, x, output_gradients=jnp.ones(3))
    with pytest.raises(TypeError, match="float16, its target float32"):
        tape.gradient(y, x, output_gradients=jnp.ones(2, jnp.float16))


def test_complex_gradients_follow_the_convention_of_jax():
    z = jnp.complex64(1 + 2j)

    def f(z):
        return (jnp.abs(z) ** 2 + (z * z).imag).real

    (found,) = grad_of(f, z)
    np.testing.assert_allclose(found, jax.grad(f)(z), rtol=1e-6)
    with GradientTape() as tape:
        tape.watch(z)
        y = z**3
    seed = jnp.complex64(2 - 1j)
    (want,) = jax.vjp(lambda z: z**3, z)[1](seed)
    np.testing.assert_allclose(tape.gradient(y, z, output_gradients=seed), want, rtol=1e-6)


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
    x, z = jnp.ones(2), jnp.ones(3)
    with GradientTape(persistent=True) as tape:
        tape.watch([x, z])
        y = x * 2
    assert tape.jacobian(y, z) is None
    assert tape.jacobian(y, z, unconnected_gradients="zero").shape == (2, 3)


@pytest.mark.accelerator
def test_a_hessian_is_the_jacobian_of_a_gradient():
    x = jnp.array([1.0, 2.0, 3.0])
    with GradientTape() as outer:
        outer.watch(x)
        with GradientTape() as inner:
            inner.watch(x)
            y = jnp.prod(x) + (x**3).sum()
        g = inner.gradient(y, x)
    want = jax.hessian(lambda x: jnp.prod(x) + (x**3).sum())(x)
    np.testing.assert_allclose(outer.jacobian(g, x), want, rtol=1e-5)


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


@pytest.mark.accelerator
def test_batch_jacobian_is_the_diagonal_of_the_jacobian():
    x = jnp.arange(6.0).reshape(2, 3)
    w = jnp.arange(12.0).reshape(3, 2, 2) / 10
    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = jnp.tanh(jnp.tensordot(x, w, 1) / 5)
    found = tape.batch_jacobian(y, x)
    whole = tape.jacobian(y, x)
    assert found.shape == (2, 2, 2, 3)
    for i in range(2):
        np.testing.assert_allclose(found[i], whole[i, :, :, i], rtol=1e-6)


def test_batch_jacobian_gives_zeros_for_an_unconnected_source():
    x, z = jnp.ones((2, 3)), jnp.ones((2, 4, 5))
    with GradientTape(persistent=True) as tape:
        tape.watch([x, z])
        y = x * 2
    found = tape.batch_jacobian(y, z)
    assert found.shape == (2, 3, 4, 5)
    assert not found.any()
    assert tape.batch_jacobian(y, z, unconnected_gradients="none") is None


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
    x = F32(2.0)
    with GradientTape() as t4:
        t4.watch(x)
        with GradientTape() as t3:
            t3.watch(x)
            with GradientTape() as t2:
                t2.watch(x)
                with GradientTape() as t1:
                    t1.watch(x)
                    y = x**5
                d1 = t1.gradient(y, x)
            d2 = t2.gradient(d1, x)
        d3 = t3.gradient(d2, x)
    d4 = t4.gradient(d3, x)
    assert [d1, d2, d3, d4] == [80.0, 160.0, 240.0, 240.0]


@pytest.mark.accelerator
def test_a_gradient_penalty_trains_through_the_gradient():
    w, x = jnp.array([[1.0, -2.0], [0.5, 3.0]]), jnp.array([[1.0, 2.0]])

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    with GradientTape() as outer:
        outer.watch(w)
        with GradientTape() as inner:
            inner.watch(x)
            value = loss(w, x)
        penalty = jnp.sum(inner.gradient(value, x) ** 2)
    want = jax.grad(lambda w: jnp.sum(jax.grad(loss, 1)(w, x) ** 2))(w)
    np.testing.assert_allclose(outer.gradient(penalty, w), want, rtol=1e-4, atol=1e-6)


def test_what_is_zero_by_structure_does_not_become_nan_on_its_way():
    @jax.custom_vjp
    def gives_none(x):
        return x

    gives_none.defvjp(lambda x: (x, None), lambda _, ct: (None,))
    x = F32(0.0)
    for cut in (jnp.floor, jnp.sign, jax.lax.round, jax.lax.stop_gradient, gives_none):
        with GradientTape() as tape:
            tape.watch(x)
            y = cut(jnp.sqrt(x)) + x
        assert tape.gradient(y, x) == jax.grad(lambda x, cut=cut: cut(jnp.sqrt(x)) + x)(x) == 1


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
    for method in (tape.gradient, tape.jacobian):
        with pytest.raises(TypeError, match=f"a target is .*{says}"):
            method(wrong, x)
        with pytest.raises(TypeError, match=f"a source is .*{says}"):
            method(y, wrong)
    with pytest.raises(TypeError, match=f"a target is .*{says}"):
        tape.batch_jacobian(wrong, x)
    with pytest.raises(TypeError, match=f"a source is .*{says}"):
        tape.batch_jacobian(y, wrong)
    assert tape.gradient(y, x) == 6.0
    with tg.ForwardAccumulator(x, x) as accumulator:
        pass
    with pytest.raises(TypeError, match=f"a target is .*{says}"):
        accumulator.jvp(wrong)
    if not isinstance(wrong, dict):
        with pytest.raises(TypeError, match=f"a y is .*{says}"):
            tg.trace(lambda x: tg.gradients(wrong, x))(x)
        with pytest.raises(TypeError, match=f"an? x is .*{says}"):
            tg.trace(lambda x: tg.gradients(x * x, wrong))(x)


def test_a_none_among_targets_raises_and_among_sources_is_a_part_of_the_tree():
    x = jnp.float32(3.0)
    with GradientTape() as tape:
        tape.watch(x)
        y = x * x
    with pytest.raises(TypeError, match=r"target\.1 is None"):
        tape.gradient([y, None], x)
    assert tape.gradient(y, {"kernel": x, "bias": None}) == {"kernel": 6.0, "bias": None}


def test_a_numpy_array_is_an_array_that_nothing_connects():
    x = jnp.float32(3.0)
    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x * x
    assert tape.gradient(np.asarray(y), x) is None
    assert tape.gradient(y, np.asarray(x)) is None


def test_a_variable_as_a_target_has_the_gradient_one_by_itself():
    v, untrained = tg.Variable(3.0), tg.Variable(1.0, trainable=False)
    with GradientTape(persistent=True) as tape:
        y = v * v
    assert tape.gradient(v, v) == 1.0
    assert tape.gradient([v, y], [v, untrained]) == [7.0, None]
    assert tape.gradient(untrained, untrained) == 1.0
    assert tape.jacobian(v, v) == 1.0
    v.assign(5.0)
    assert tape.gradient([v, y], v) == 1.0 + 6.0
    assert tg.trace(lambda: tg.gradients(v, v))() == [1.0]
