"""`Variable`: works like its value wherever an array does, is assigned, and owns what it holds."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tracegrad as tg
from tracegrad.tracing import trace
from tracegrad.variables.trees import assign_values, values_of
from tracegrad.variables.variable import Variable


def test_it_has_the_type_of_its_value():
    v = Variable(jnp.ones((2, 3), "bfloat16"), name="w", trainable=False)
    assert (v.shape, v.dtype, v.ndim, v.size) == ((2, 3), jnp.bfloat16, 2, 6)
    assert (v.name, v.trainable) == ("w", False)
    assert isinstance(v.value, jax.Array)
    assert Variable([1, 2]).dtype == jnp.int32
    assert Variable(1.0).name == "Variable"
    assert Variable(3, dtype="float16").dtype == jnp.float16
    assert Variable(jnp.arange(2), dtype=jnp.float32).dtype == jnp.float32


def test_a_python_number_changes_no_type():
    """With a weak type, each assignment of an array would compile a step anew."""
    v, w = Variable(3.0), Variable(jnp.ones(2, "bfloat16"))
    assert not v.value.weak_type
    assert not v.assign(2.0).value.weak_type
    assert w.assign([2, 3]).dtype == jnp.bfloat16
    assert Variable(jnp.float16(1)).assign(5).dtype == jnp.float16


THREE, INTEGERS = jnp.array([1.0, 2.0, 3.0]), jnp.array([1, 6])
USES = {
    "functions of JAX": [jnp.sin, jnp.sum, jax.nn.relu, jnp.linalg.norm, jnp.asarray],
    "several operands": [lambda v: jnp.stack([v, 2 * v]), lambda v: jnp.einsum("i,j->ij", v, v)],
    "in jit": [jax.jit(lambda v: v * 2)],
    "NumPy": [np.asarray],
    "+": [lambda v: v + np.ones(3), lambda v: np.ones(3) + v, lambda v: jnp.ones(3) + v],
    "-": [lambda v: v - 1, lambda v: 1 - v, lambda v: -v],
    "*": [lambda v: v * v, lambda v: 2 * v],
    "/": [lambda v: v / 2, lambda v: 1 / v],
    "//": [lambda v: v // 2, lambda v: 7 // v],
    "%": [lambda v: v % 2, lambda v: 7 % v, lambda v: jnp.stack(divmod(v, 2))],
    "**": [lambda v: v**2, lambda v: 2**v],
    "@": [lambda v: v @ np.ones(3), lambda v: np.ones((2, 3)) @ v],
    "comparisons": [lambda v: v < 2, lambda v: v <= 2, lambda v: v == 2, lambda v: v != 2],
    "indices": [lambda v: v[1], lambda v: v[::-1], lambda v: v[jnp.array([2, 0])]],
    "as an index": [lambda v: jnp.arange(9)[v.astype(int)]],
    "attributes": [lambda v: v.at[0].set(5.0), lambda v: v.T, lambda v: v.reshape(1, 3).sum(0)],
    "Python's functions": [abs, lambda v: round(v, -1), lambda v: jnp.array([len(v), *v])],
}
USES_OF_INTEGERS = {
    "&": [lambda v: v & 3, lambda v: 3 & v],
    "|": [lambda v: v | 8, lambda v: 8 | v],
    "^": [lambda v: v ^ 1, lambda v: 1 ^ v],
    "<<": [lambda v: v << 1, lambda v: 1 << v],
    ">>": [lambda v: v >> 1, lambda v: 64 >> v],
    "~": [lambda v: ~v],
}


@pytest.mark.parametrize("kind", USES | USES_OF_INTEGERS)
def test_it_works_as_its_value_does(kind):
    array = THREE if kind in USES else INTEGERS
    for fun in (USES | USES_OF_INTEGERS)[kind]:
        got, expected = fun(Variable(array)), fun(array)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_a_scalar_converts_to_pythons_numbers_and_has_a_hash():
    v = Variable(2.5)
    assert (float(v), int(v), complex(v), bool(v)) == (2.5, 2, 2.5 + 0j, True)
    assert f"{v:.2f}" == "2.50"
    assert [10, 20, 30][Variable(1)] == 20
    assert len({v, Variable(2.5), v}) == 2  # by identity, as no array can be


def test_it_prints_its_type_and_value():
    v = Variable([1.0, 2.0], name="w", trainable=False)
    assert repr(v) == str(v) == f"{v}" == "<Variable w: f32[2], not trainable = [1. 2.]>"


def vector():
    return Variable([1.0, 2.0], name="w")


def scalar():
    return Variable(1.0, name="b")


REFUSED = [
    (lambda: vector().assign(jnp.ones(3)), ValueError, r"shape \[3\] to .* 'w' \(f32\[2\]\)"),
    (lambda: scalar().assign_add([1.0, 2.0]), ValueError, r"shape \[2\] to .* 'b' \(f32\[\]\)"),
    (lambda: vector().assign(jnp.arange(2)), TypeError, r"dtype int32 to .* 'w' \(f32\[2\]\)"),
    (lambda: Variable(1, name="n").assign(1.5), TypeError, "dtype float32 to the Variable 'n'"),
    (lambda: jax.jit(Variable)(1.0), TypeError, "created inside a function that is being traced"),
    (lambda: vector().no_such, AttributeError, "no attribute 'no_such'"),
]


@pytest.mark.parametrize(("use", "error", "message"), REFUSED)
def test_what_it_cannot_do_is_refused(use, error, message):
    with pytest.raises(error, match=message):
        use()


# ---------------------------------------------------------------------------------- assignment


def test_assignment_returns_the_variable_and_chains():
    v = Variable([1.0, 2.0])
    assert v.assign([3.0, 4.0]).assign_add(1.0).assign_sub([1.0, 2.0]) is v
    np.testing.assert_array_equal(v.numpy(), [3.0, 3.0])
    assert v.read_value() is v.value


def test_what_was_read_stays_when_something_is_added():
    class Kept:
        """Adds by handing out an array of its own."""

        array = jnp.array([5.0, 6.0])

        def __radd__(self, other):
            return self.array

    v = Variable([1.0, 2.0])
    before = v.value
    v.assign_add(0.0).assign_sub(np.zeros(2, np.float32))
    assert v.value is not before
    last = v.assign_add(Kept()).value
    assert last is not Kept.array
    # A step may write over an array that is the Variable's own.
    trace(lambda: (v.assign_add(1.0), None)[1])()
    np.testing.assert_array_equal(
        [before, Kept.array, last, v.value], [[1, 2], [5, 6], [5, 6], [6, 7]]
    )


def test_it_may_be_assigned_from_another():
    v, w = Variable(1.0), Variable(2.0)
    v.assign(w)
    w.assign(3.0)
    assert (float(v), float(w)) == (2.0, 3.0)


def test_it_has_an_array_object_of_its_own():
    """A tape tells values apart by identity."""
    x = jnp.ones(3)
    v = Variable(x)
    assert v.value is not x
    assert v.value is v.value
    v.assign(x)
    assert v.value is not x


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))]
)
def test_a_copy_is_a_variable_of_its_own(copied):
    v = Variable(np.ones(1 << 16, np.float32), trainable=False, name="v")
    double = trace(lambda: v.assign(v * 2.0).value[0])
    double(), double()
    other = copied(v)
    both = trace(lambda: (v[0], other[0]))
    assert both() == (4.0, 4.0)
    double(), double()
    assert both() == (16.0, 4.0)
    other.assign(jnp.zeros(1 << 16))
    assert both() == (16.0, 0.0)
    assert (other.name, other.trainable) == ("v", False)


def test_a_copy_of_a_subclass_keeps_its_attributes():
    class Named(Variable):
        def __init__(self, value, axes):
            super().__init__(value, name="named")
            self.axes = axes

    v = Named([1.0, 2.0], ["batch"])
    shallow, deep = copy.copy(v), copy.deepcopy(v)
    assert type(shallow) is type(deep) is Named
    assert shallow.axes is v.axes
    assert deep.axes == ["batch"]
    assert deep.axes is not v.axes


def test_a_numpy_array_that_changes_later_does_not_change_it():
    x = np.ones(1024, np.float32)
    v = Variable(x)
    w = Variable(np.zeros_like(x)).assign(x)
    x[:] = 7
    assert float(v.sum()) == float(w.sum()) == 1024


# ------------------------------------------------------------------------- under transformations


def test_eager_transformations_take_it_for_a_constant():
    v = Variable(3.0)
    assert jax.grad(lambda x: v * x * x)(2.0) == 12.0
    np.testing.assert_array_equal(jax.vmap(lambda x: v * x)(jnp.arange(3.0)), [0.0, 3.0, 6.0])
    assert jax.jvp(lambda x: x / v, (6.0,), (3.0,)) == (2.0, 1.0)
    v.assign(1.0)
    assert jax.grad(lambda x: v * x * x)(2.0) == 4.0


FREEZING = {
    "jit": lambda f: jax.jit(f)(1.0),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(1.0),
    "checkpoint": lambda f: jax.checkpoint(f)(1.0),
    "scan": lambda f: jax.lax.scan(lambda c, _: (f(c), None), 1.0, None, length=2),
    "cond": lambda f: jax.lax.cond(True, f, lambda x: x, 1.0),
    "while": lambda f: jax.lax.while_loop(lambda c: c < 2, f, 1.0),
    "jit in vmap": lambda f: jax.vmap(jax.jit(f))(jnp.ones(2)),
}


@pytest.mark.parametrize("run", FREEZING.values(), ids=FREEZING)
def test_a_read_that_would_freeze_the_value_is_refused(run):
    v = Variable(2.0, name="w")
    with pytest.raises(RuntimeError, match=r"Variable 'w' is read inside .*tracegrad\.trace"):
        run(lambda x: x * v)


def test_an_assignment_that_would_be_lost_is_refused():
    v = Variable(2.0, name="w")
    with pytest.raises(RuntimeError, match=r"Variable 'w' is assigned .*tracegrad\.trace"):
        jax.jit(v.assign)(1.0)
    with pytest.raises(RuntimeError, match=r"jax\.vmap"):
        jax.vmap(lambda x: v.assign(x).value)(jnp.ones(2))
    assert float(v) == 2.0


# --------------------------------------------------------------------------------------- trees


def test_flattening_gives_the_value_and_unflattening_a_plain_array():
    v = Variable([1.0, 2.0])
    leaves, structure = jax.tree.flatten({"w": v})
    assert leaves[0] is v.value
    assert type(jax.tree.unflatten(structure, leaves)["w"]) is type(jnp.ones(1))
    ((path, _),) = jax.tree_util.tree_flatten_with_path({"w": v})[0]
    assert jax.tree_util.keystr(path) == "['w'].value"


def test_the_state_of_an_optimiser_holds_no_variables():
    state = optax.adam(1e-3).init({"w": Variable([1.0, 2.0])})
    is_variable = [isinstance(x, Variable) for x in jax.tree.leaves(state, is_leaf=lambda x: True)]
    assert not any(is_variable)
    assert state[0].mu["w"].shape == (2,)


def test_trees_of_variables_are_read_and_assigned():
    tree = {"w": Variable([1.0, 2.0]), "steps": 3, "b": [Variable(0.5)]}
    values = values_of(tree)
    assert isinstance(values["w"], jax.Array)
    assert values["steps"] == 3
    assign_values(tree, jax.tree.map(lambda x: x + 1, values))
    np.testing.assert_array_equal(tree["w"].value, [2.0, 3.0])
    assert tree["steps"] == 3
    assert float(tree["b"][0]) == 1.5


def test_a_tree_is_assigned_whole_or_not_at_all():
    tree = [Variable(1.0), Variable(2.0)]
    with pytest.raises(ValueError, match="shape"):
        assign_values(tree, [3.0, jnp.ones(2)])
    with pytest.raises(ValueError):
        assign_values(tree, [3.0])
    assert [float(v) for v in tree] == [1.0, 2.0]


# ------------------------------------------------------------------------------ trees of Variables


def test_variables_of_a_tree_are_named_by_their_paths_wherever_they_are_told_of():
    params = tg.as_variables(
        {"dense": {"kernel": jnp.ones((2, 3)), "steps": jnp.arange(2)}, "act": jnp.tanh}, "params"
    )
    kernel, steps = params["dense"]["kernel"], params["dense"]["steps"]
    assert (kernel.name, steps.name) == ("params.dense.kernel", "params.dense.steps")
    assert (kernel.trainable, steps.trainable) == (True, False)
    assert params["act"] is jnp.tanh
    assert tg.as_variables(params, "other")["dense"]["kernel"] is kernel
    assert tg.as_variables([jnp.ones(2)])[0].name == "0"
    assert tg.as_variables(jnp.ones(2)).name == "Variable"

    def loss(x):
        return jnp.sum(params["act"](x @ kernel.value))

    assert "params.dense.kernel: f32[2,3]" in str(tg.graph(loss, jnp.ones(2)))
    with pytest.raises(ValueError, match=r"params\.dense\.kernel"):
        kernel.assign(jnp.ones(4))
