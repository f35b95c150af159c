"""Under an eager tape a function with a custom gradient runs on values, its gradient too."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import by_tape

X = jnp.array([1.0, 2.0, 3.0])


def gradient(f, x, *, of=jnp.sum):
    return by_tape(lambda x: of(f(x)), x)


def test_a_function_runs_once_when_it_is_called_and_its_gradient_once_for_each_that_reaches_it():
    runs = []

    @tg.custom_gradient
    def f(x):
        runs.append("f")

        def grad(dy):
            runs.append("grad")
            return 5 * dy

        return x * 2, grad

    with tg.GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = f(X)
        z = jnp.sum(X)
        cut = jnp.round(y)
    assert runs == ["f"]
    np.testing.assert_array_equal(tape.gradient(z, X), [1.0, 1.0, 1.0])
    assert tape.gradient(cut, X) is None
    assert runs == ["f"]  # no gradient has reached it
    for _ in range(2):
        np.testing.assert_array_equal(tape.gradient(y, X), [5.0, 5.0, 5.0])
    assert runs == ["f", "grad", "grad"]


def test_the_backward_of_a_jax_custom_vjp_runs_once_for_a_gradient_and_its_none_stays_none():
    runs = []

    @jax.custom_vjp
    def product(x, y):
        return x * y

    def backward(kept, dy):
        runs.append("backward")
        return 7 * dy, None

    product.defvjp(lambda x, y: (x * y, None), backward)
    y = X + 1
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([X, y])
        z = product(X, y)
    np.testing.assert_array_equal(tape.gradient(z, X), [7.0, 7.0, 7.0])
    assert runs == ["backward"]
    assert tape.gradient(z, y) is None


def test_both_may_branch_on_values_and_give_them_to_numpy():
    @tg.custom_gradient
    def f(x):
        steps = 0
        while float(x.sum()) < 20:
            x, steps = x * 2, steps + 1

        def grad(dy):
            if dy[0] > 10:
                return jnp.asarray(np.clip(np.asarray(dy), -10, 10))
            return dy * steps

        return x, grad

    np.testing.assert_array_equal(gradient(f, X), [2.0, 2.0, 2.0])
    found = gradient(f, X, of=lambda y: (y * jnp.array([30.0, 1.0, 2.0])).sum())
    np.testing.assert_array_equal(found, [10.0, 1.0, 2.0])


def test_none_for_an_input_may_depend_on_the_cotangent():
    @tg.custom_gradient
    def f(x):
        return x * 2, lambda dy: None if dy.sum() > 10 else dy

    assert gradient(f, X, of=lambda y: 9 * y.sum()) is None
    np.testing.assert_array_equal(gradient(f, X), [1.0, 1.0, 1.0])


def test_targets_and_sources_may_be_in_the_middle_and_be_stopped():
    f = tg.custom_gradient(lambda x: (x**2, lambda dy: 3 * x * dy))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(X)
        a = X * 2
        y = f(a)
        z = y * a
        sums = tg.gradients(z, [X, a])
        assert tg.gradients(z, [X], stop_gradients=[a]) == [None]
        stopped = tg.gradients(z, [X, a], stop_gradients=[y])
    np.testing.assert_allclose(sums[1], 4 * a**2)  # a² + 3 a²
    np.testing.assert_allclose(sums[0], 8 * a**2)
    np.testing.assert_allclose(stopped[1], a**2)
    np.testing.assert_allclose(stopped[0], 2 * a**2)
    both = tape.gradient([z, y, a], [y, a])
    np.testing.assert_allclose(both[0], a + 1)
    np.testing.assert_allclose(both[1], 4 * a**2 + 3 * a + 1)


def test_a_variable_is_handed_over_the_only_time_that_it_is_read():
    v = tg.Variable(2.0, name="v")
    runs = []

    @tg.custom_gradient
    def f(x):
        runs.append(float(v.value))

        def grad(dy, variables=None):
            runs.append([float(each.numpy()) for each in variables])
            return dy * v * 5, [jnp.sum(dy * x) * 7]

        return x * v, grad

    with tg.GradientTape(persistent=True) as outer:
        outer.watch(X)
        with tg.GradientTape() as tape:
            tape.watch(X)
            y = jnp.sum(f(X) ** 2)
        dx, dv = tape.gradient(y, [X, v])
    assert runs == [2.0, [2.0]]
    np.testing.assert_allclose(dx, 5 * 2 * 2 * (X * 2))
    assert float(dv) == 7 * 2 * 2 * float(jnp.sum(X**2))
    # dx is 5 v dy, where dy is 2 f(x), whose gradients are 5 v and 7 x.
    ddx, ddv = outer.gradient(dx, [X, v])
    np.testing.assert_allclose(ddx, jnp.full(3, 10 * 2 * 5 * 2.0))
    assert float(ddv) == float(jnp.sum(10 * 2 * X + 10 * 2 * 7 * X))


def test_what_a_function_does_is_recorded_and_its_result_is_another_array():
    w, x = jnp.float32(3.0), jnp.float32(2.0)
    seen = []

    @tg.custom_gradient
    def f(x):
        seen.append(x * w)
        return seen[0], lambda dy: 7 * dy

    with tg.GradientTape(persistent=True) as tape:
        tape.watch([w, x])
        with pytest.warns(UserWarning, match=r"depends on 'w' \(f32\[\]\), which it closes over"):
            y = f(x)
    assert y is not seen[0]
    assert tape.gradient(y, [w, x]) == [None, 7.0]
    assert tape.gradient(seen[0], [w, x]) == [2.0, 3.0]


def test_jacobians_map_the_gradient_function_over_the_rows():
    runs = []
    f = tg.custom_gradient(lambda x: (x**2, lambda dy: runs.append(dy) or 3 * x * dy))
    x = jnp.stack([X, -X])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = jnp.cumsum(f(2 * x), axis=1)
    rule = jax.custom_jvp(lambda x: x**2)
    rule.defjvp(lambda primals, tangents: (rule(*primals), 3 * primals[0] * tangents[0]))
    want = jax.jacobian(lambda x: jnp.cumsum(rule(2 * x), axis=1))(x)
    np.testing.assert_allclose(tape.jacobian(y, x), want)
    np.testing.assert_allclose(tape.batch_jacobian(y, x), jnp.einsum("bibj->bij", want), rtol=1e-6)
    assert len(runs) == 2


def test_a_rule_may_be_around_host_functions():
    @tg.custom_gradient
    def on_host(x):
        y = tg.numpy_function(lambda a: a**2, [x], jnp.float32)
        return y, lambda dy: tg.numpy_function(lambda a, b: 3 * a * b, [x, dy], jnp.float32)

    np.testing.assert_allclose(gradient(on_host, X), 3 * X)


def test_slices_of_a_gradient_function_stay_slices_and_meet_others():
    table, ids = jnp.ones((5, 2)), jnp.array([0, 2, 0])

    @tg.custom_gradient
    def doubled(t):
        return t[ids], lambda dy: tg.IndexedSlices(2 * dy, ids)

    with tg.GradientTape(persistent=True) as tape:
        tape.watch(table)
        y = jnp.sum(doubled(table))
        both = y + jnp.sum(table[1:2])
        computed = jnp.sum(doubled(table * 3))
    found = tape.gradient(y, table, sparse=True)
    assert isinstance(found, tg.IndexedSlices)
    np.testing.assert_array_equal(found.indices, ids)
    assert found.dense_shape == (5, 2)
    dense = tape.gradient(both, table)
    np.testing.assert_array_equal(dense[:, 0], [4.0, 1.0, 2.0, 0.0, 0.0])
    as_slices = tape.gradient(both, table, sparse=True)
    np.testing.assert_array_equal(np.asarray(as_slices), dense)
    of_computed = tape.gradient(computed, table, sparse=True)
    np.testing.assert_array_equal(of_computed[:, 0], [12.0, 0.0, 6.0, 0.0, 0.0])


def test_a_step_of_a_loop_compiles_nothing_and_keeps_nothing(compilations):
    held = []

    def step(i, inner=gradient):
        factor = jnp.full(3, float(i))
        held.append(weakref.ref(factor))
        f = tg.custom_gradient(lambda x: (x * factor, lambda dy: dy * factor * x))
        with tg.GradientTape() as outer:
            outer.watch(X)
            first = inner(lambda x: jnp.sin(f(jnp.cos(f(x)))), X)
        return outer.gradient(first, X)

    for i in range(2):
        step(i)
    gc.collect()
    gc.disable()
    try:
        before = compilations()
        for i in range(20):
            step(i)
        assert compilations() == before
        assert [each() for each in held] == [None] * 22
    finally:
        gc.enable()


@pytest.mark.both_jax
def test_a_result_without_a_gradient_that_a_batch_shares_is_no_hindrance():
    @jax.custom_vjp
    def scaled(x, scale):  # a solver that returns its number of steps beside the solution
        return x * scale, scale + 1, jnp.int32(scale)

    scaled.defvjp(
        lambda x, scale: (scaled(x, scale), (x, scale)),
        lambda saved, dy: (dy[0] * saved[1], dy[0] * saved[0] + dy[1]),
    )

    def loss(x, scale):
        return jnp.sum(jax.vmap(lambda x: scaled(x, scale)[0])(x) ** 2)

    scale = jnp.float32(2.0)
    found = by_tape(loss, X, scale)
    for gradient, expected in zip(found, jax.grad(loss, (0, 1))(X, scale), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)
