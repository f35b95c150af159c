"""Sparse gradients: slices for what was looked up, and what slices can do."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tracegrad as tg
from tracegrad import grad, value_and_grad
from tracegrad.differentiation.indexed_slices import IndexedSlices
from tracegrad.differentiation.row_updates import apply_rows

TABLE = jnp.arange(40.0).reshape(10, 4) / 7
IDS = jnp.array([0, 2, 0])
ANY = jnp.array([-1, 3, 10, -11, 99, 3, -10, 9])  # in range, negative, out of range


def squares(lookup):
    """A loss of what a function looks up in a table; what it fills in for no row is left out."""
    return lambda table, *args: jnp.sum(jnp.nan_to_num(lookup(table, *args)) ** 2)


to_dense = jax.jit(IndexedSlices.to_dense)
dense_of = jax.jit(jax.grad(squares(lambda t: t[IDS])))


def sparse_gradient(lookup, table, *args):
    """The sparse gradient, which must be slices and agree with `jax.grad`."""
    loss = squares(lookup)
    lookups = jax.jit(grad(loss, sparse=True))
    slices = lookups(table, *args)
    assert isinstance(slices, IndexedSlices)
    assert slices.dense_shape == table.shape
    expected = jax.jit(jax.grad(loss))(table, *args)
    np.testing.assert_allclose(to_dense(slices), expected, rtol=1e-6)
    program = jax.make_jaxpr(lookups)(table, *args)
    rows = f"f32[{','.join(map(str, table.shape))}] ="
    assert rows not in str(program)  # nothing of the table's shape is ever made
    return slices


# ----------------------------------------------------------------------------- what gives slices


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("fill", [9, 3, 10, 10, 10, 3, 0, 9]),
        ("wrap", [9, 3, 0, 9, 9, 3, 0, 9]),
        ("clip", [0, 3, 9, 0, 9, 3, 0, 9]),
        (None, [9, 3, 10, 10, 10, 3, 0, 9]),
    ],
)
def test_ids_are_normalised_and_those_out_of_range_dropped(mode, rows):
    slices = sparse_gradient(lambda t, i: jnp.take(t, i, axis=0, mode=mode), TABLE, ANY)
    np.testing.assert_array_equal(slices.indices, rows)  # 10 is no row
    assert not np.any(np.asarray(slices.values)[np.asarray(rows) == 10])


def called_twice(t, i):
    lookup = jax.jit(lambda t, i: t[i])
    return lookup(t, i) * lookup(t, i + 1)


def compiled_by(compile):
    return compile(lambda t, i: jnp.take(t, i, axis=0) * compile(lambda t: t[jnp.array([3])])(t))


LOOKUPS = {
    "brackets": (lambda t, i: t[i], ANY, [9, 3, 10, 10, 10, 3, 0, 9]),
    "a matrix of ids": (lambda t, i: t[i], jnp.array([[1, 2], [1, 3]]), [1, 2, 1, 3]),
    "two lookups": (lambda t, i: t[i] * jnp.take(t, i + 1, axis=0), IDS, [0, 2, 0, 1, 3, 1]),
    "a function that is called twice": (called_twice, IDS, [0, 2, 0, 1, 3, 1]),
    "in what was looked up": (lambda t, i: t[i][jnp.array([0, 0, -1])], IDS, [0, 2, 0]),
    "vmap": (lambda t, i: jax.vmap(lambda j: t[j])(i), IDS, IDS),
    "jit": (compiled_by(jax.jit), IDS, [0, 2, 0, 3]),
    "trace": (compiled_by(tg.trace), IDS, [0, 2, 0, 3]),
    "jit in jit": (compiled_by(lambda f: jax.jit(jax.jit(f))), IDS, [0, 2, 0, 3]),
    "hundreds": (lambda t, i: sum(t[i[:1] + k % 10] for k in range(300)), IDS, np.arange(300) % 10),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_give_a_slice_for_each_row_in_their_order(name):
    lookup, ids, rows = LOOKUPS[name]
    slices = sparse_gradient(lookup, TABLE, ids)
    np.testing.assert_array_equal(slices.indices, rows)
    assert slices.values.shape == (len(rows), 4)


@pytest.mark.parametrize("table", [TABLE[:, 0], TABLE.reshape(10, 2, 2)], ids=["1d", "3d"])
def test_tables_of_other_ranks(table):
    slices = sparse_gradient(lambda t, i: t[i], table, IDS)
    assert slices.values.shape == (3, *table.shape[1:])


WAYS_TO_LOOK_UP = {
    "brackets": lambda t, i: t[i],
    "fill": lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=0.0),
    "clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "wrap": lambda t, i: jnp.take(t, i, axis=0, mode="wrap"),
    "at clip": lambda t, i: t.at[i].get(mode="clip"),
    "promised": lambda t, i: t.at[i].get(mode="promise_in_bounds"),
}


def ids_of(dtype, length, *, in_bounds=False):
    """Rows at the edges of a table and of the types, from the end too, and what is no row."""
    ids = [0, 1, 99, 100, 127, 128, 199, 200, 255, 256, 65_535, length - 1, -1, -3, -length]
    if not in_bounds:
        ids += [length, length + 5, -length - 1, 2**31 - 1, 2**31 + 1, 2**32 - 1, -(2**31), 2**40]
    limits = jnp.iinfo(dtype)
    ids = [i for i in ids if limits.min <= i <= limits.max]
    return np.array([i for i in ids if -length <= i < length] if in_bounds else ids, dtype)


@pytest.mark.parametrize(
    ("dtypes", "length"),
    [
        (["int16", "uint8", "uint32"], 200),
        (["uint8", "uint32"], 70_000),
        (["int64", "uint64"], 200),
    ],
    ids=str,
)
def test_ids_of_every_dtype_give_the_dense_gradient_however_they_are_looked_up(dtypes, length):
    with jax.enable_x64("int64" in dtypes):
        check_every_way(dtypes, length)


def check_every_way(dtypes, length):
    pairs = [
        (dtype, way)
        for dtype in dtypes
        for way in WAYS_TO_LOOK_UP
        if way != "wrap" or length <= jnp.iinfo(dtype).max  # else JAX refuses
    ]
    tables = {pair: jnp.linspace(1.0, 2.0, length) for pair in pairs}
    ids = {(d, w): jnp.asarray(ids_of(d, length, in_bounds=w == "promised")) for d, w in pairs}

    def loss(tables, ids):
        looked_up = [WAYS_TO_LOOK_UP[pair[1]](t, ids[pair]) for pair, t in tables.items()]
        return sum(jnp.sum(rows**2) for rows in looked_up)

    @jax.jit
    def both(tables, ids):
        slices = grad(loss, sparse=True)(tables, ids)
        assert all(isinstance(each, IndexedSlices) for each in slices.values())
        return {pair: each.to_dense() for pair, each in slices.items()}, jax.grad(loss)(tables, ids)

    found, expected = both(tables, ids)
    for pair in pairs:
        np.testing.assert_allclose(found[pair], expected[pair], rtol=1e-6, err_msg=str(pair))


def test_under_vmap_with_the_ids_mapped_inside_or_out():
    sparse_gradient(
        lambda t, i: jax.vmap(lambda j: jnp.take(t, j, axis=0), out_axes=1)(i), TABLE, ANY
    )
    loss = squares(lambda t, i: t[i])
    each = jax.jit(jax.vmap(lambda i: grad(loss, sparse=True)(TABLE, i)))(
        np.array([[1, 2], [3, 3]])
    )
    dense = jax.jit(jax.vmap(IndexedSlices.to_dense))(each)
    by_jax = jax.jit(jax.grad(loss))
    expected = [by_jax(TABLE, np.array(i)) for i in ([1, 2], [3, 3])]
    np.testing.assert_allclose(dense, expected, rtol=1e-6)


def test_a_table_that_is_looked_up_in_another_precision():
    slices = grad(lambda t: jnp.sum(t.astype("bfloat16")[IDS]), sparse=True)(TABLE)
    assert slices.dtype == TABLE.dtype
    np.testing.assert_array_equal(slices.values, np.ones((3, 4)))


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_gradient_that_is_a_number_in_the_program(compile):
    def scaled_sum(t, a):
        return a * jnp.sum(t[IDS])

    def loss(t, a, unused):
        return compile(scaled_sum)(t, 2.0) + 3 * a

    found, *others = grad(loss, (0, 1, 2), sparse=True)(TABLE, 1.0, 5.0)
    assert others == [3.0, 0.0]
    assert isinstance(found, IndexedSlices)
    np.testing.assert_array_equal(found.values, np.full((3, 4), 2.0))


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")], ids=["rows", "columns"])
def test_a_table_that_is_spread_over_devices(spec):
    for axis_type, kind in [(AxisType.Auto, IndexedSlices), (AxisType.Explicit, jax.Array)]:
        mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
        with jax.set_mesh(mesh):
            table = jax.device_put(TABLE, NamedSharding(mesh, spec))
            where = {} if axis_type is AxisType.Auto else {"out_sharding": P(None, spec[1])}
            loss = squares(lambda t, where=where: t.at[IDS].get(**where))
            found = jax.jit(grad(loss, sparse=True))(table)
        assert isinstance(found, kind)
        np.testing.assert_allclose(np.asarray(found), dense_of(TABLE), rtol=1e-6)


def test_embeddings_of_flax_and_equinox():
    linen = nn.Embed(10, 4)
    params = jax.jit(linen.init)(jax.random.key(0), IDS)
    definition, state = nnx.split(nnx.Embed(10, 4, rngs=nnx.Rngs(0)))
    equinox = eqx.nn.Embedding(10, 4, key=jax.random.key(0))
    for lookup, model in (
        (lambda p: linen.apply(p, IDS), params),
        (lambda s: nnx.merge(definition, s)(IDS), state),
        (lambda e: jax.vmap(e)(IDS), equinox),
    ):
        found = jax.jit(grad(squares(lookup), sparse=True))(model)
        (slices,) = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, IndexedSlices))
        np.testing.assert_array_equal(slices.indices, IDS)
        (table,) = jax.tree.leaves(model)
        np.testing.assert_allclose(slices.values, 2 * table[IDS], rtol=1e-6)


@pytest.mark.parametrize("shape", [lambda t: t.shape, lambda t: jnp.array(t.shape), lambda t: None])
def test_a_rule_may_return_slices_which_have_the_shape_of_its_input(shape):
    @tg.custom_gradient
    def custom(t):
        return t[IDS], lambda dy: IndexedSlices(2 * dy, IDS, shape(t))

    def grad_of(op, dy):
        return IndexedSlices(2 * dy, IDS, shape(op.inputs[0]))

    def host(t):
        rows = jax.ShapeDtypeStruct((3, 4), t.dtype)
        return tg.numpy_function(lambda t: t[np.asarray(IDS)], [t], rows, grad_of, stateful=False)

    @jax.jit
    def called(t):
        return t[IDS]

    overridden = tg.rewrite(called, tg.rules.override_gradient(tg.match.call("called"), grad_of))
    expected = 2 * np.asarray(dense_of(TABLE))
    for lookup in (custom, host, overridden):
        slices = grad(squares(lookup), sparse=True)(TABLE)
        assert isinstance(slices, IndexedSlices)
        np.testing.assert_array_equal(slices.indices, IDS)
        np.testing.assert_allclose(to_dense(slices), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(squares(custom))(TABLE), expected, rtol=1e-6)


def test_slices_that_do_not_fit_the_input_of_a_rule_say_so():
    lookup = tg.custom_gradient(lambda t: (t[IDS], lambda dy: IndexedSlices(dy, IDS, (11, 4))))
    with pytest.raises(ValueError, match=r"gradient f32\[11,4\] for the input t, which is f32\[10"):
        jax.grad(squares(lookup))(TABLE)


# ------------------------------------------------------------------------------ what gives arrays


OTHER_USES = {
    "mixed": lambda t: t[IDS].sum() + t,
    "dense": lambda t: t * 2,
    "computed": lambda t: (t * 2)[IDS],
    "columns": lambda t: t[:, IDS],
    "elements": lambda t: t[IDS, IDS],
    "slice": lambda t: t[2:5],
    "scan": lambda t: jax.lax.scan(lambda c, i: (c, t[i]), 0.0, IDS)[1],
    "checkpoint": lambda t: jax.checkpoint(lambda t: jnp.sin(t[IDS]))(t),
    "cond": lambda t: jax.lax.cond(IDS[0] == 0, lambda: t[IDS], lambda: t[IDS + 1]),
}


@pytest.mark.parametrize("use", OTHER_USES)
def test_other_uses_give_arrays(use):
    loss = squares(OTHER_USES[use])
    found = jax.jit(grad(loss, sparse=True))(TABLE)
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, jax.jit(jax.grad(loss))(TABLE), rtol=1e-6)


def test_a_table_that_is_not_used_gets_zeros_or_none():
    loss = squares(lambda t, u: t[IDS])
    slices, zeros = grad(loss, (0, 1), sparse=True)(TABLE, TABLE)
    assert isinstance(slices, IndexedSlices)
    np.testing.assert_array_equal(zeros, np.zeros((10, 4)))
    _, nothing = grad(loss, (0, 1), unconnected="none", sparse=True)(TABLE, TABLE)
    assert nothing is None


def test_each_leaf_gets_what_it_can_get():
    params = {"table": TABLE, "weight": jnp.ones(4), "scale": 2.0}

    def loss(p):
        value = jnp.sum(p["table"][IDS] @ p["weight"]) * p["scale"]
        return value, {"seen": IDS, "nothing": None}

    (value, aux), found = value_and_grad(loss, has_aux=True, sparse=True)(params)
    (expected, _), dense = jax.value_and_grad(loss, has_aux=True)(params)
    assert float(value) == float(expected)
    np.testing.assert_array_equal(aux["seen"], IDS)
    assert isinstance(found["table"], IndexedSlices)
    np.testing.assert_allclose(found["table"].to_dense(), dense["table"], rtol=1e-6)
    np.testing.assert_allclose(found["weight"], dense["weight"], rtol=1e-6)
    np.testing.assert_allclose(found["scale"], dense["scale"], rtol=1e-6)


def test_integers_may_be_among_the_leaves():
    found = grad(lambda t, i: jnp.sum(t[i]), (0, 1), sparse=True, allow_int=True)(TABLE, IDS)
    assert isinstance(found[0], IndexedSlices)
    assert found[1].dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    "kept",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda t: jax.lax.map(f, t),
        lambda f: lambda t: jax.lax.cond(t[0] > 0, f, jnp.negative, t),
    ],
    ids=["jit", "checkpoint", "loop", "branch"],
)
def test_a_variable_may_be_read_and_is_not_frozen_into_programs_that_jax_keeps(kept):
    v = tg.Variable(3.0)
    slices = grad(lambda t: jnp.sum(t[IDS]) * v, sparse=True)(TABLE)
    np.testing.assert_array_equal(slices.values, np.full((3, 4), 3.0))
    scaled = kept(lambda t: t * v)
    gradient = grad(lambda t: jnp.sum(scaled(t)), sparse=True)
    for call in (gradient, scaled):  # by the first it has not been kept
        with pytest.raises(RuntimeError, match="kept as a constant for all later calls"):
            call(jnp.ones(2))
    traced = tg.trace(gradient)
    for value in (1.0, 5.0):
        v.assign(value)
        assert traced(jnp.ones(2)).tolist() == [value, value]


def test_effects_are_kept_once(capfd):
    @jax.jit
    def lookup(t):
        jax.debug.print("looked up")
        return t[IDS]

    grad(squares(lookup), sparse=True)(TABLE)
    jax.effects_barrier()
    assert capfd.readouterr().out == "looked up\n"


@pytest.mark.accelerator
def test_memory_is_in_proportion_to_the_batch():
    def step(table, ids):
        return table - 0.1 * grad(squares(lambda t, i: t[i]), sparse=True)(table, ids)

    table = jax.ShapeDtypeStruct((1_000_000, 128), "float32")
    ids = jax.ShapeDtypeStruct((1024,), "int32")
    for compiled in (jax.jit, tg.trace):
        memory = compiled(step, donate_argnums=0).lower(table, ids).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 5 * 1024 * 128 * 4
        assert memory.alias_size_in_bytes == 1_000_000 * 128 * 4  # written in place


# ------------------------------------------------------------------------------- what slices can do

SLICES = IndexedSlices(jnp.arange(6.0).reshape(3, 2), IDS, (4, 2))


def test_dense_is_the_sum_of_the_slices_in_their_rows():
    np.testing.assert_array_equal(SLICES.to_dense(), [[4, 6], [0, 0], [2, 3], [0, 0]])
    np.testing.assert_array_equal(np.asarray(SLICES), SLICES.to_dense())
    no_row = IndexedSlices(jnp.ones((3, 2)), jnp.array([4, -1, -5]), (4, 2))
    np.testing.assert_array_equal(no_row.to_dense(), [[0, 0], [0, 0], [0, 0], [1, 1]])


def test_arithmetic_is_that_of_the_dense_array():
    dense = SLICES.to_dense()
    other = IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (4, 2))
    pairs = [
        (SLICES + other, dense + other.to_dense()),
        (SLICES - other, dense - other.to_dense()),
        (sum([SLICES, other]), dense + other.to_dense()),
        (-SLICES, -dense),
        (3 * SLICES, 3 * dense),
        (SLICES * jnp.float32(3), 3 * dense),
        (SLICES / 2, dense / 2),
    ]
    for slices, expected in pairs:
        assert isinstance(slices, IndexedSlices)
        np.testing.assert_array_equal(slices.to_dense(), expected)
    table = jnp.ones((4, 2))
    for array, expected in [
        (table + SLICES, table + dense),
        (SLICES + table, table + dense),
        (table - 2 * SLICES, table - 2 * dense),
        (SLICES - table, dense - table),
        (np.asarray(table) + SLICES, table + dense),
        (np.asarray(table) - SLICES, table - dense),
    ]:
        assert isinstance(array, jax.Array)
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda: IndexedSlices(jnp.ones((3, 2)), jnp.array([0, 1]), (4, 2)), ValueError,
         r"one index for each slice.*\[3, 2\] and \[2\]"),
        (lambda: IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (4, 3)), ValueError,
         r"shape \[2\] are no rows of an array \[4, 3\]"),
        (lambda: IndexedSlices(jnp.ones((1, 2)), jnp.ones(1)), TypeError, "float32"),
        (lambda: SLICES.to_dense("float16"), TypeError, r"float32.*float16"),
        (lambda: IndexedSlices(jnp.ones((1, 2)), jnp.array([0])).to_dense(), ValueError,
         r"has no dense shape.*IndexedSlices\(slices.values, slices.indices, dens"),
        (lambda: apply_rows(TABLE, IndexedSlices(jnp.ones((1, 4)), jnp.array([0])), jnp.subtract),
         ValueError, r"IndexedSlices\(slices.values, slices.indices, dens"),
        (lambda: SLICES + IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (5, 2)), ValueError,
         "their shapes differ"),
        (lambda: SLICES + IndexedSlices(jnp.ones((1, 2), "float16"), jnp.array([0]), (4, 2)),
         TypeError, "their dtypes differ"),
        (lambda: SLICES + "no", TypeError, "unsupported operand"),
        (lambda: SLICES + jnp.ones(2), ValueError, r"an array \[2\]"),
        (lambda: SLICES + jnp.ones((4, 2), "float16"), TypeError, "an array of float16"),
        (lambda: SLICES * jnp.ones(2), TypeError, None),
        (lambda: SLICES / jnp.ones(2), TypeError, None),
        (lambda: apply_rows(TABLE, SLICES, lambda r, g: r), ValueError,
         r"a table of 4 rows.*\[10, 4\]"),
        (lambda: apply_rows(jnp.ones((4, 2)), SLICES, lambda r, g: r[0]), ValueError,
         r"returned \[2\] for rows of shape \[3, 2\]"),
        (lambda: apply_rows(TABLE, TABLE, lambda r, g: r - g), TypeError,
         "sparse=True returns; it got an array float32"),
    ],
)  # fmt: skip
def test_what_does_not_fit_raises(use, error, words):
    with pytest.raises(error, match=words):
        use()


@pytest.mark.parametrize(
    "use",
    [
        IndexedSlices.to_dense,
        IndexedSlices.deduplicated,
        lambda slices: TABLE - slices,
        lambda slices: apply_rows(TABLE, slices, lambda rows, gradients: rows - gradients),
    ],
)
def test_slices_of_all_steps_of_a_scan_name_their_cures_which_work(use):
    def square(table, ids):
        return jnp.sum(table[ids] ** 2)

    ids = jnp.array([[0, 2], [2, 9], [1, 1]])
    gradient = tg.grad(square, sparse=True)
    _, slices = jax.lax.scan(lambda carry, row: (carry, gradient(TABLE, row)), None, ids)
    with pytest.raises(ValueError, match=r"row ids \[3, 2\] .* jax.vmap.*for their sum"):
        use(slices)
    dense = jax.vmap(lambda s: s.to_dense())(slices)
    np.testing.assert_array_equal(dense, jax.vmap(jax.grad(square), (None, 0))(TABLE, ids))
    shape = TABLE.shape
    total = IndexedSlices(slices.values.reshape(-1, *shape[1:]), slices.indices.ravel(), shape)
    np.testing.assert_array_equal(total.to_dense(), jnp.sum(dense, axis=0))


def test_turning_a_large_one_dense_warns_with_its_size():
    large = IndexedSlices(jnp.ones((1, 128)), jnp.array([0]), (1_000_000, 128))
    with pytest.warns(UserWarning, match=r"float32\[1000000, 128\] dense takes 488 MiB"):
        jax.eval_shape(IndexedSlices.to_dense, large)
    small = IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (1_000, 2))
    jax.eval_shape(IndexedSlices.to_dense, small)  # a warning would be a failure


def test_deduplicated_has_each_row_once_in_order():
    slices = IndexedSlices(
        jnp.arange(7.0)[:, None] + 1, jnp.array([3, 0, 3, -1, 4, 99, -99]), (4, 1)
    )
    found = jax.jit(IndexedSlices.deduplicated)(slices)
    np.testing.assert_array_equal(found.indices, [0, 3, 4, 4, 4, 4, 4])
    np.testing.assert_array_equal(np.asarray(found.values)[:, 0], [2, 8, 0, 0, 0, 0, 0])
    empty = IndexedSlices(jnp.ones((0, 2)), jnp.zeros(0, int), (4, 2))
    assert empty.deduplicated().values.shape == (0, 2)


@pytest.mark.parametrize("length", [127, 128, 200, 256, 70_000])
def test_indices_of_small_and_unsigned_types_are_rows_of_long_tables(length):
    all_ids = {dtype: ids_of(dtype, length) for dtype in ("int8", "uint8", "uint32")}

    @jax.jit
    def uses(all_ids):
        slices = [IndexedSlices(jnp.arange(1.0, len(i) + 1), i, (length,)) for i in all_ids]
        zeros = jnp.zeros(length)
        dense = [(s.to_dense(), zeros + s, apply_rows(zeros, s, jnp.add)) for s in slices]
        return dense, [s.deduplicated() for s in slices]

    for dense, unique, (dtype, ids) in zip(*uses(list(all_ids.values())), all_ids.items()):
        expected = np.zeros(length, np.float32)
        is_row = [-length <= i < length for i in map(int, ids)]
        np.add.at(expected, ids[is_row].astype(int), np.arange(1.0, len(ids) + 1)[is_row])
        for found in dense:
            np.testing.assert_array_equal(found, expected, err_msg=dtype)
        rows = np.unique(ids[is_row].astype(int) % length)
        np.testing.assert_array_equal(unique.indices[: len(rows)], rows)
        np.testing.assert_array_equal(unique.values[: len(rows)], expected[rows])
        assert np.all(np.asarray(unique.indices[len(rows) :]) == length)


def test_a_dense_shape_may_be_an_array():
    def dense(values):
        slices = IndexedSlices(values, IDS, jnp.array([4, 2]))
        return slices if slices.dense_shape is None else slices.to_dense()

    np.testing.assert_array_equal(dense(SLICES.values), SLICES.to_dense())
    traced = jax.jit(dense)(SLICES.values)  # in what is traced it is not known
    assert traced.dense_shape is None
    expected = jax.ShapeDtypeStruct((4, 2), "float32")
    np.testing.assert_array_equal(traced.dense_as(expected), SLICES.to_dense())


def test_it_is_a_tree_of_values_and_indices():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(SLICES)]
    assert paths == [".values", ".indices"]
    back = jax.jit(lambda s: s)(SLICES)
    assert isinstance(back, IndexedSlices)
    assert back.dense_shape == SLICES.dense_shape == SLICES.shape
    assert repr(back) == "IndexedSlices(values=f32[3,2], indices=i32[3], dense_shape=(4, 2))"
    doubled = jax.tree.map(
        lambda s: 2 * s, [SLICES], is_leaf=lambda x: isinstance(x, IndexedSlices)
    )
    np.testing.assert_array_equal(doubled[0].to_dense(), 2 * SLICES.to_dense())


# -------------------------------------------------------------------------------------- optimisers


def adagrad(rows, gradients):
    table, sums = rows
    sums = sums + jnp.mean(gradients**2, axis=1)
    return table - 0.1 * gradients / jnp.sqrt(sums + 1e-8)[:, None], sums


def test_apply_rows_is_the_dense_optimiser_where_there_are_gradients():
    table, sums = TABLE, jnp.full(10, 0.5)
    slices = jax.jit(grad(squares(lambda t: jnp.take(t, ANY, axis=0)), sparse=True))(TABLE)
    found = jax.jit(lambda state, s: apply_rows(state, s, adagrad))((table, sums), slices)
    # Rows without a gradient stay, with adagrad.
    expected = jax.jit(adagrad)((table, sums), to_dense(slices))
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_apply_rows_takes_variables_and_leaves_the_other_rows_alone():
    v = tg.Variable(TABLE)
    v.assign(apply_rows(v, IndexedSlices(jnp.ones((3, 4)), IDS, (10, 4)), lambda r, g: -r))
    np.testing.assert_array_equal(v.value, TABLE.at[np.array([0, 2])].multiply(-1))


@pytest.mark.parametrize(
    "lookup",
    [
        lambda t: t[IDS],
        lambda t: jnp.take(t, IDS.reshape(3, 1), axis=0),
        lambda t: jnp.take(t, ANY, axis=0),
    ],
)
def test_slices_need_no_promotion_of_ranks(lookup):
    @jax.jit
    def used(table):
        slices = grad(squares(lookup), sparse=True)(table)
        assert isinstance(slices, IndexedSlices)
        stepped = apply_rows(table, slices, lambda rows, gradients: rows - gradients)
        return (slices + slices.deduplicated()).to_dense(), stepped

    with jax.numpy_rank_promotion("raise"):
        dense, stepped = used(TABLE)
        with tg.GradientTape() as tape:
            tape.watch(TABLE)
            loss = squares(lookup)(TABLE)
        on_tape = tape.gradient(loss, TABLE, sparse=True).to_dense()
    want = jax.grad(squares(lookup))(TABLE)
    np.testing.assert_allclose(dense, 2 * want)
    np.testing.assert_allclose(stepped, TABLE - want, rtol=1e-6)
    np.testing.assert_allclose(on_tape, want)
