"""What happens to slices in the hands of others: they go anywhere, and nobody computes with them
leaf by leaf, which would give another number than that of the gradient."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tracegrad as tg
from tests.derivatives import by_tape
from tracegrad.differentiation.indexed_slices import IndexedSlices
from tracegrad.differentiation.row_updates import apply_rows

TABLE = jnp.arange(8.0).reshape(4, 2)
IDS = jnp.array([0, 2, 0])
# Of the loss sum(table[[0, 2, 0]]**2): row 0 twice, which as rows of their own have another norm.
SLICES = IndexedSlices([[2.0, 0.0], [4.0, 0.0], [2.0, 0.0]], [0, 2, 0], TABLE.shape)
DENSE = np.array([[4.0, 0], [0, 0], [4, 0], [0, 0]])


def is_slices(tree):
    return isinstance(tree, IndexedSlices)


def assert_unchanged(slices):
    assert is_slices(slices)
    np.testing.assert_array_equal(slices.indices, [0, 2, 0])
    np.testing.assert_array_equal(slices.to_dense(), DENSE)


# ------------------------------------------------------------------------- what leaves them alone


def test_a_module_or_a_state_of_slices_is_printed():
    embed = nnx.Embed(4, 2, rngs=nnx.Rngs(0))
    gradient = tg.grad(lambda e: jnp.sum(e(IDS) ** 2), wrt=nnx.Param, sparse=True)(embed)
    for printed in (gradient, nnx.state(gradient)):
        assert "indices=i32[3], dense_shape=(4, 2)" in str(printed)


def through_a_mesh(slices):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    slices = jax.device_put(slices, NamedSharding(mesh, P("d")))
    return jax.shard_map(lambda s: s, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(slices)


@pytest.mark.parametrize(
    "through",
    [
        jax.jit(lambda s: s),
        tg.trace(lambda s: s),
        eqx.filter_jit(lambda s: s),
        jax.checkpoint(lambda s: s),
        lambda s: eqx.combine(*eqx.partition(s, eqx.is_inexact_array)),
        lambda s: lax.scan(lambda c, _: (c, None), s, length=2)[0],
        lambda s: jax.tree.map(lambda x: x[1], lax.scan(lambda c, _: (c, s), 0, length=2)[1]),
        lambda s: lax.cond(True, lambda s: s, lambda s: -s, s),
        lambda s: lax.while_loop(lambda s: s.values[0, 0] < 0, lambda s: -s, s),
        lambda s: jax.tree.map(
            lambda x: x[0], jax.vmap(lambda s: s)(jax.tree.map(lambda x: x[None], s))
        ),
        lambda s: jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)), s),
        lambda s: jax.jit(lambda s: s, donate_argnums=0)(copy.deepcopy(s)),
        through_a_mesh,
        jax.device_put,
        jax.device_get,
        jax.block_until_ready,
        copy.copy,
        copy.deepcopy,
        lambda s: pickle.loads(pickle.dumps(s)),
    ],
)
def test_what_moves_slices_returns_the_same(through):
    assert_unchanged(through(SLICES))


def test_shapes_of_slices_have_those_of_their_ids():
    shapes = jax.eval_shape(lambda s: 2 * s, SLICES)
    assert shapes.indices == jax.ShapeDtypeStruct((3,), jnp.int32)
    assert shapes.values == jax.ShapeDtypeStruct((3, 2), jnp.float32)
    jax.jit(IndexedSlices.to_dense).lower(shapes)


def test_a_tree_like_slices_may_hold_anything():
    for leaf in (None, "a", object(), True, P("d"), 3):
        filled = jax.tree.map(lambda _, leaf=leaf: leaf, SLICES)
        assert filled.values is leaf
        assert filled.indices is leaf
        repr(filled)


def test_the_slices_of_devices_are_gathered_and_not_summed():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def of_devices(combine):
        def local(table, ids):
            slices = tg.grad(lambda t: jnp.sum(t[ids] ** 2), sparse=True)(table)
            return combine(slices)

        spread = jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=False
        )
        return jax.jit(spread)(TABLE, jnp.array([0, 2, 1, 0]))

    gathered = of_devices(lambda s: jax.tree.map(lambda x: lax.all_gather(x, "d", tiled=True), s))
    np.testing.assert_array_equal(gathered.indices, [0, 2, 1, 0])
    np.testing.assert_array_equal(gathered.to_dense(), [[0, 4], [4, 6], [8, 10], [0, 0]])
    with pytest.raises(TypeError, match="row ids of IndexedSlices: use to_dense"):
        of_devices(lambda s: lax.psum(s, "d"))


def test_slices_inside_a_function_are_saved_with_it(tmp_path):
    gradient = jax.jit(tg.grad(lambda t: jnp.sum(t[IDS] ** 2), sparse=True))
    tg.save(lambda t: t - 0.5 * gradient(t), tmp_path / "step", [TABLE], gradient_order=0)
    stepped = tg.load(tmp_path / "step")(TABLE)
    np.testing.assert_array_equal(stepped, [[-0.0, -1], [2, 3], [0, 0], [6, 7]])


def test_a_tape_records_slices_into_and_out_of_compiled_functions():
    lookup = jax.jit(lambda table: IndexedSlices(table[IDS], IDS, table.shape))
    square = jax.jit(lambda s: jnp.sum(s.to_dense() ** 2))
    # Row 0 comes twice: the sum of (2 t)² has the gradient 8 t, that of t² has 2 t.
    expected = np.array(TABLE) * np.array([[8], [0], [2], [0]])
    np.testing.assert_array_equal(by_tape(lambda t: square(lookup(t)), TABLE), expected)


def test_ids_of_64_bits_keep_all_of_them():
    with jax.enable_x64(True):
        ids = [1, 2**40, -1]
        slices = IndexedSlices(jnp.ones(3), jnp.array(ids), (2**41,))
        for found in (slices, jax.jit(lambda s: s)(slices), pickle.loads(pickle.dumps(slices))):
            assert found.indices.dtype == jnp.int64
            assert found.indices.tolist() == ids
        assert slices.deduplicated().indices.tolist() == [1, 2**40, 2**41 - 1]
        short = IndexedSlices(jnp.ones(1), jnp.array([7], jnp.int32), (2**41,))
        assert (short + slices).indices.tolist() == [7, *ids]
        with pytest.raises(TypeError, match="row ids of IndexedSlices"):
            jax.tree.map(lambda x: 2 * x, slices)


# ----------------------------------------------------------------------- what would compute with it


def updated(optimiser):
    def update(slices):
        return optimiser.update(slices, optimiser.init(slices), slices)[0]

    return update


@pytest.mark.parametrize(
    "use",
    [
        lambda s: jax.tree.map(lambda g: -0.1 * g, s),
        lambda s: jax.tree.map(lambda g: 2 * g, s),
        lambda s: jax.tree.map(lambda g: g / 2, s),
        lambda s: jax.tree.map(lambda g: g**2, s),
        lambda s: jax.tree.map(jnp.negative, s),
        lambda s: jax.tree.map(jnp.add, s, s),
        lambda s: jax.tree.map(lambda g: jnp.clip(g, -1, 1), s),
        lambda s: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(s)),
        lambda s: jax.tree.reduce(lambda total, leaf: total + jnp.max(leaf), s, 0.0),
        updated(optax.sgd(0.1)),
        updated(optax.sgd(0.1, momentum=0.9)),
        updated(optax.adam(0.1)),
        updated(optax.clip(1.0)),
    ],
)
def test_computing_with_the_leaves_raises_and_says_what_to_do(use):
    for run in (use, jax.jit(use)):
        with pytest.raises(TypeError, match=r"use to_dense\(\), deduplicated\(\) or apply_rows"):
            run(SLICES)


@pytest.mark.parametrize(
    "other", [lambda x: jnp.zeros(x.shape), lambda x: jnp.ones(x.shape, int), jnp.isfinite]
)
def test_slices_that_others_gave_other_ids_are_not_used_as_slices(other):
    filled = jax.tree.map(other, SLICES)
    repr(filled)  # it may be a part of somebody's state
    for use in (
        lambda s: s.indices,
        lambda s: s.to_dense(),
        lambda s: s.deduplicated(),
        lambda s: TABLE.astype(s.dtype) + s,
        lambda s: apply_rows(TABLE, s, jnp.subtract),
    ):
        for run in (use, jax.jit(use)):
            with pytest.raises(TypeError, match=r"are not valid.*use to_dense\(\), deduplicated"):
                run(filled)


def test_slices_that_others_filled_with_a_number_are_nan_and_zeros_count_for_nothing():
    for use in (
        lambda s: s.to_dense(),
        lambda s: TABLE - 0.1 * s,
        lambda s: (s + SLICES).to_dense(),
        lambda s: jnp.sum(s.deduplicated().values),
        lambda s: apply_rows(TABLE, s, jnp.subtract),
    ):
        for run in (use, jax.jit(use)):
            for fill in (jnp.ones_like, lambda x: jnp.full_like(x, 3)):
                assert np.isnan(run(jax.tree.map(fill, SLICES))).any()
            assert np.isfinite(run(jax.tree.map(jnp.zeros_like, SLICES))).all()
    zeros = jax.tree.map(jnp.zeros_like, SLICES)
    np.testing.assert_array_equal((zeros + SLICES).to_dense(), DENSE)
    np.testing.assert_array_equal(apply_rows(TABLE, zeros, jnp.subtract), TABLE)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    "optimiser",
    [
        optax.masked(optax.sgd(0.1), {"table": False, "bias": True}),
        optax.multi_transform(
            {"frozen": optax.set_to_zero(), "sgd": optax.sgd(0.1)},
            {"table": "frozen", "bias": "sgd"},
        ),
        optax.zero_nans(),
    ],
    ids=["masked", "frozen", "zero_nans"],
)
def test_optimisers_that_do_not_compute_with_slices_take_them(optimiser, jitted):
    params = {"table": TABLE, "bias": jnp.zeros(2)}

    def step(gradients):
        updates, _ = optimiser.update(gradients, optimiser.init(params), params)
        return optax.apply_updates(params, updates)

    step = jax.jit(step) if jitted else step
    dense, sparse = ({"table": table, "bias": jnp.ones(2)} for table in (DENSE, SLICES))
    assert jax.tree.all(jax.tree.map(np.array_equal, step(sparse), step(dense)))


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (optax.tree.norm, (TypeError, NotImplementedError), None),  # JAX's, on ids.real
        (updated(optax.clip_by_global_norm(1.0)), (TypeError, NotImplementedError), None),
        (lambda s: optax.adam(0.1).update(s, optax.adam(0.1).init(TABLE), TABLE), ValueError,
         "IndexedSlices"),  # dense moments are trees of another structure
    ],
    ids=["norm", "clip", "dense moments"],
)  # fmt: skip
def test_no_norm_counts_the_slices_of_a_row_apart_and_no_moment(use, error, words):
    for run in (use, jax.jit(use)):
        with pytest.raises(error, match=words):
            run(SLICES)


def test_the_recipes_of_the_docstring_are_the_dense_ones():
    gradients = {"table": SLICES, "bias": jnp.ones(2)}
    dense = jax.tree.map(
        lambda g: g.to_dense() if is_slices(g) else g, gradients, is_leaf=is_slices
    )
    # 4² + 4² + 1 + 1
    np.testing.assert_allclose(optax.tree.norm(dense), np.sqrt(34), rtol=1e-6)
    np.testing.assert_allclose(optax.tree.norm(SLICES.deduplicated().values), np.sqrt(32))
    updates = jax.tree.map(lambda g: -0.5 * g, gradients, is_leaf=is_slices)
    step = optax.apply_updates({"table": TABLE, "bias": jnp.zeros(2)}, updates)
    np.testing.assert_array_equal(step["table"], TABLE - DENSE / 2)
    np.testing.assert_array_equal(step["bias"], [-0.5, -0.5])


def test_an_array_is_asked_for_by_to_dense_where_slices_are_traced():
    np.testing.assert_array_equal(jnp.asarray(SLICES), DENSE)
    with pytest.raises(TypeError, match=r"IndexedSlices\(.*is traced.*use \.to_dense\(\)"):
        jax.jit(jnp.asarray)(SLICES)
