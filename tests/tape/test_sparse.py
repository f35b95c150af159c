"""Sparse gradients of tapes and of `gradients()`: slices for tables that were only looked up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad import GradientTape, gradients, hessians
from tracegrad.differentiation.indexed_slices import IndexedSlices
from tracegrad.variables.variable import Variable

TABLE = jnp.arange(40.0).reshape(10, 4) / 7
IDS = jnp.array([0, 2, 0])


def sparse_and_dense(loss, table):
    """Both gradients of ``loss(table)`` by one tape."""
    with GradientTape(persistent=True) as tape:
        if not isinstance(table, Variable):
            tape.watch(table)
        y = loss(table)
    return tape.gradient(y, table, sparse=True), tape.gradient(y, table)


ANY = jnp.array([-1, 10, 3])

LOOKUPS = {
    "brackets": (lambda t: jnp.sum(t[IDS] ** 2), [0, 2, 0]),
    "take": (lambda t: jnp.sum(jnp.take(t, IDS, axis=0) ** 2), [0, 2, 0]),
    "jit": (lambda t: jax.jit(lambda t: jnp.sum(jnp.take(t, IDS, axis=0) ** 2))(t), [0, 2, 0]),
    "trace": (lambda t: tg.trace(lambda t: jnp.sum(t[IDS] ** 2))(t), [0, 2, 0]),
    "any ids": (lambda t: jnp.sum(t[ANY] ** 2), [9, 10, 3]),  # 10 is no row
}


@pytest.mark.accelerator
@pytest.mark.parametrize(("loss", "rows"), LOOKUPS.values(), ids=LOOKUPS)
@pytest.mark.parametrize("make", [jnp.array, Variable], ids=["array", "Variable"])
def test_a_tape_gives_one_slice_for_each_lookup(loss, rows, make):
    slices, dense = sparse_and_dense(loss, make(TABLE))
    assert isinstance(slices, IndexedSlices)
    np.testing.assert_array_equal(slices.indices, rows)
    np.testing.assert_allclose(slices.to_dense(), dense, rtol=1e-6)
    np.testing.assert_allclose(dense, jax.grad(loss)(TABLE), rtol=1e-6)


def test_a_computed_table_is_dense_for_what_it_was_computed_from():
    with GradientTape() as tape:
        tape.watch(TABLE)
        computed = TABLE * 2
        y = jnp.sum(computed[IDS] ** 2)
    of_table, of_computed = tape.gradient(y, [TABLE, computed], sparse=True)
    expected = jax.grad(lambda t: jnp.sum(t[IDS] ** 2))(2 * TABLE)
    assert isinstance(of_computed, IndexedSlices)
    np.testing.assert_allclose(of_computed.to_dense(), expected, rtol=1e-6)
    np.testing.assert_allclose(of_table, 2 * expected, rtol=1e-6)


def test_a_table_that_is_looked_up_in_two_precisions_has_slices_of_its_own():
    def looked_up(table):
        return jnp.sum(table.astype("bfloat16")[IDS].astype("float32") ** 2)

    def both(table):
        return looked_up(table) + jnp.sum(table[jnp.array([1])] ** 3)

    for fun in (looked_up, both):
        slices, _ = sparse_and_dense(fun, TABLE)
        assert isinstance(slices, IndexedSlices)
        assert slices.dtype == TABLE.dtype
        np.testing.assert_allclose(slices.to_dense(), jax.grad(fun)(TABLE), rtol=1e-2)


def test_other_sources_get_arrays_or_none_or_zeros():
    x, unused = jnp.ones(4), jnp.ones((5, 2))
    with GradientTape(persistent=True) as tape:
        tape.watch([TABLE, x, unused])
        y = jnp.sum(TABLE[IDS] @ x)
    sources = {"t": TABLE, "x": x, "u": unused}
    found = tape.gradient(y, sources, sparse=True)
    assert isinstance(found["t"], IndexedSlices)
    assert found["u"] is None
    np.testing.assert_allclose(found["x"], TABLE[IDS].sum(0), rtol=1e-6)
    zeros = tape.gradient(y, sources, unconnected_gradients="zero", sparse=True)["u"]
    np.testing.assert_array_equal(zeros, np.zeros((5, 2)))


def test_slices_are_accepted_as_seeds():
    ones, ids = jnp.ones((2, 4)), jnp.array([1, 1])
    expected = jnp.zeros((10, 4)).at[1].set(6.0)
    with GradientTape(persistent=True) as tape:
        tape.watch(TABLE)
        y = TABLE * 3
    seed = IndexedSlices(ones, ids, (10, 4))
    np.testing.assert_array_equal(tape.gradient(y, TABLE, output_gradients=seed), expected)
    for shape in ((10, 4), None, jnp.array([10, 4])):  # those of its target, known or not

        def of_traced(t, shape=shape):
            if isinstance(shape, jax.Array):
                shape = shape + 0 * t[0, 0].astype(int)
            return gradients(t * 3, t, grad_ys=[IndexedSlices(ones, ids, shape)])[0]

        np.testing.assert_array_equal(tg.trace(of_traced)(TABLE), expected)
    half = IndexedSlices(ones.astype("float16"), ids, (10, 4))
    with pytest.raises(TypeError, match="float16"):
        tape.gradient(y, TABLE, output_gradients=half)


def test_gradients_in_a_traced_function_are_slices_too():
    @tg.trace
    def f(table, x):
        looked_up = jnp.take(table, IDS, axis=0)
        y = jnp.sum((looked_up * x) ** 2)
        return gradients(y, [table, x, looked_up], sparse=True)

    of_table, of_x, of_rows = f(TABLE, jnp.float32(2.0))
    np.testing.assert_array_equal(of_table.indices, IDS)
    np.testing.assert_allclose(of_table.values, of_rows, rtol=1e-6)
    assert of_x.shape == ()
    program = str(f.lower(TABLE, jnp.float32(2.0)).as_text())
    assert "scatter" not in program


def test_reads_of_a_variable_with_several_values_stand_one_after_the_other():
    table = Variable(TABLE)
    with GradientTape(persistent=True) as tape:
        first = jnp.sum(table[IDS] ** 2)
        table.assign(TABLE + 1)
        y = first + jnp.sum(table[IDS + 1] ** 2)
        (inside,) = gradients(y, table, sparse=True)
    for slices in (inside, tape.gradient(y, table, sparse=True)):
        np.testing.assert_array_equal(slices.indices, [0, 2, 0, 1, 3, 1])
        expected = jnp.concatenate([2 * TABLE[IDS], 2 * (TABLE[IDS + 1] + 1)])
        np.testing.assert_allclose(slices.values, expected, rtol=1e-6)


SLICES_OF = {
    "tape": lambda loss, table: sparse_and_dense(loss, table)[0],
    "gradients": lambda loss, table: gradients(loss(table), table, sparse=True)[0],
    "grad": lambda loss, table: tg.grad(loss, sparse=True)(table.value),
}


@pytest.mark.accelerator
@pytest.mark.parametrize("slices_of", SLICES_OF.values(), ids=SLICES_OF)
def test_a_traced_step_on_a_variable_writes_the_rows_that_it_looked_up(slices_of):
    table, expected = Variable(TABLE), TABLE

    def loss(table):
        return jnp.sum((jnp.take(table, IDS, axis=0) - 1.0) ** 2)

    @tg.trace
    def step():
        table.assign_sub(0.1 * slices_of(loss, table))

    for _ in range(3):
        step()
        expected = expected - 0.1 * jax.grad(loss)(expected)
    np.testing.assert_allclose(table.value, expected, rtol=1e-5)


def test_hessians_are_dense():
    f = tg.trace(lambda t: hessians(jnp.sum(t[jnp.array([1])] ** 2), t, sparse=True)[0])
    np.testing.assert_array_equal(f(jnp.ones(2)), [[0, 0], [0, 2]])


def on_a_tape(table):
    with GradientTape() as inner:
        inner.watch(table)
        y = jnp.sum(table[IDS] ** 3)
    return inner.gradient(y, table, sparse=True)


@pytest.mark.parametrize(
    "sparse_gradient", [on_a_tape, tg.grad(lambda t: jnp.sum(t[IDS] ** 3), sparse=True)]
)
def test_a_tape_differentiates_the_values_of_slices(sparse_gradient):
    with GradientTape() as outer:
        outer.watch(TABLE)
        slices = sparse_gradient(TABLE)
    found = outer.gradient(slices.values, TABLE, sparse=True)
    np.testing.assert_array_equal(found.indices, IDS)
    np.testing.assert_allclose(found.values, 6 * TABLE[IDS], rtol=1e-6)
