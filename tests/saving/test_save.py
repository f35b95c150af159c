"""What is saved is what is loaded: Variables, trees, sizes, several functions; and again."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from artefacts import DTYPES, array_of

import tracegrad as tg
from tests.derivatives import by_tape, value_by_tape
from tracegrad import LoadedFunction, load, save
from tracegrad.saving.inspection import inspect as inspect_file

pytestmark = pytest.mark.both_jax

X = np.linspace(-1.0, 2.0, 6, dtype=np.float32).reshape(2, 3)
AB = {"a": np.float32(1), "b": np.float32(2)}
ROWS = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 3"), "float32")


class State(NamedTuple):
    mean: Any
    rest: Any


jax.export.register_namedtuple_serialization(State, serialized_name="test_save.State")


class Moments(NamedTuple):
    mean: Any


@tg.custom_gradient
def wrong(x):  # on purpose
    return x * x, lambda dy: dy * (3.0 * x + 1.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.tracegrad"


def saved(path, fun, specs, **options):
    save(fun, path, specs, **options)
    return load(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two functions that share a Variable, loaded; with the path."""
    w = tg.Variable(np.array([0.5, -2.0, 1.5], np.float32), name="w")
    steps = tg.Variable(0, name="steps", trainable=False)

    def predict(x):
        return jnp.sum(wrong(x * w.value), axis=-1)

    def update(x, *, rate):
        w.assign_sub(rate * jnp.mean(x, axis=0))
        steps.assign_add(1)
        return {"steps": steps.value, "w": w.value}

    file = tmp_path_factory.mktemp("model") / "model.tracegrad"
    by_name = {"x": ROWS, "rate": np.float32(0.5)}
    save({"predict": (predict, [ROWS]), "update": (update, by_name)}, file, gradient_order=2)
    return load(file), file


# ------------------------------------------------------------------------- Variables, again and on


def test_several_functions_share_their_variables(model):
    loaded, _ = model
    assert list(loaded) == ["predict", "update"]
    variables = loaded["update"].variables
    assert set(variables) == {"w", "steps"}
    assert set(loaded["predict"].variables) == {"w"}
    w = variables["w"]
    assert loaded["predict"].variables["w"] is w
    assert isinstance(w, tg.Variable)
    assert (w.name, w.trainable, variables["steps"].trainable) == ("w", True, False)
    w.assign([0.5, -2.0, 1.5])
    result = loaded["update"](X, rate=0.5)
    expected = np.array([0.5, -2.0, 1.5]) - 0.5 * X.mean(axis=0)
    np.testing.assert_allclose(result["w"], expected, rtol=1e-6)
    np.testing.assert_array_equal(w.numpy(), result["w"])
    np.testing.assert_allclose(loaded["predict"](X), ((X * expected) ** 2).sum(-1), rtol=1e-6)
    score = lambda: jnp.sum(loaded["predict"](X))  # noqa: E731
    assert by_tape(score, sources=loaded["predict"].variables)["w"].shape == w.shape


def test_a_loaded_function_is_saved_again_with_its_present_values(model, path):
    predict = model[0]["predict"]
    predict.variables["w"].assign([1.0, 2.0, 3.0])
    again = saved(path, predict, predict.specs)
    assert isinstance(again, LoadedFunction)
    np.testing.assert_array_equal(again.variables["w"].numpy(), [1.0, 2.0, 3.0])
    np.testing.assert_allclose(again(X), predict(X), rtol=1e-6)
    found, wanted = (jax.grad(lambda x, f=f: jnp.sum(f(x)))(X) for f in (again, predict))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_it_is_loaded_and_saved_inside_of_a_tape_and_of_a_derivative(path):
    v = tg.Variable(2.0, name="v")
    key = tg.Variable(jax.random.key(0), name="key", trainable=False)
    save(lambda x: x**2 * v.value + 0 * jax.random.normal(key.value), path, [jnp.float32(1)])
    assert jax.grad(lambda x: load(path)(x))(3.0) == 12
    x = jnp.float32(3)
    with tg.GradientTape() as tape:
        tape.watch(x)
        loaded = load(path)
        y = loaded(x)
        save(loaded, path, [x])
    assert tape.gradient(y, [x, loaded.variables["v"]]) == [12, 9]
    assert load(path)(x) == 18


def test_a_loaded_function_is_copied_with_its_variables_and_not_pickled(path):
    v = tg.Variable(2.0, name="v")
    loaded = saved(path, lambda x: x * v.value, [1.0])
    other = copy.deepcopy(loaded)
    other.variables["v"].assign(5.0)
    assert (loaded(3.0), other(3.0), jax.grad(other)(3.0)) == (6, 15, 5)
    assert copy.copy(other).variables["v"] is other.variables["v"]
    assert copy.copy(other)(3.0) == 15
    with pytest.raises(TypeError, match=r"<loaded <lambda>.* cannot be pickled: call tracegrad.l"):
        pickle.dumps(loaded)


def test_what_a_loaded_function_says_of_itself(model):
    loaded, _ = model
    assert str(loaded["predict"].signature) == "predict(x: f32[rows,3]) -> f32[rows]"
    assert str(loaded["update"].signature).startswith("update(x: f32[rows,3], rate: f32[]) -> {'st")
    assert str(inspect.signature(loaded["predict"])) == "(x)"
    assert str(inspect.signature(loaded["update"])) == "(x, *, rate)"
    assert loaded["update"].specs.keys() == {"x", "rate"}
    assert repr(loaded["predict"]) == "<loaded predict(x: f32[rows,3]) -> f32[rows]>"
    assert loaded["predict"].platforms == ("cpu",)


def test_a_tape_finds_what_was_read_after_an_assignment(path):
    v, x = tg.Variable(1.0, name="v"), jnp.float32(3.0)

    @tg.trace
    def fun(x):
        before = v * v
        v.assign(2 * x)
        return before + v * v

    save(fun, path, [x])
    loaded = load(path)
    assert value_by_tape(loaded, x, sources=tg.variables_of(loaded)["v"]) == (1 + 36, 2 + 12)


@pytest.mark.filterwarnings("error")
def test_it_runs_under_every_transformation(model):
    loaded, _ = model
    w = loaded["predict"].variables["w"]
    w.assign([0.5, -2.0, 1.5])
    expected = ((X * w.numpy()) ** 2).sum(-1)

    def slope(fun):
        return lambda x: jax.grad(lambda x: jnp.sum(fun(x)))(x)

    rule = (3 * X * w.numpy() + 1) * w.numpy()
    traced = tg.trace(loaded["predict"])
    stacked = jnp.stack([X, X + 1, X])
    np.testing.assert_allclose(traced(X), expected, rtol=1e-6)
    np.testing.assert_allclose(tg.trace(slope(loaded["predict"]))(X), rule, rtol=1e-6)
    np.testing.assert_allclose(tg.grad(lambda x: jnp.sum(traced(x)))(jnp.asarray(X)), rule, 1e-6)
    for batched in (jax.vmap(loaded["predict"]), tg.trace(jax.vmap(traced))):
        np.testing.assert_allclose(batched(stacked)[2], expected, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(slope(loaded["predict"]))(stacked)[0], rule, rtol=1e-6)
    of_batch = slope(jax.vmap(jax.vmap(loaded["predict"])))(stacked[None])
    np.testing.assert_allclose(of_batch[0, 2], rule, rtol=1e-6)
    w.assign(w * 2)  # what was traced reads the present value
    np.testing.assert_allclose(traced(X), 4 * expected, rtol=1e-6)
    with pytest.raises(RuntimeError, match=r"Compile the function with `tracegrad.trace`"):
        jax.jit(loaded["predict"])(X)


@pytest.mark.parametrize("of", [jax.jvp, tg.jvp], ids=["jax", "tracegrad"])
def test_forward_mode_is_refused_in_words_that_name_the_function(path, of):
    loaded = saved(path, lambda x: jnp.sum(x**3), [X], gradient_order=2)
    x = jnp.asarray(X)
    for fun in (loaded, jax.grad(loaded)):
        with pytest.raises((TypeError, ValueError), match=r"<lambda> was .*no forward-mode deri"):
            of(fun, (x,), (x,))
    with pytest.raises(TypeError, match=r"jax.jacrev\(jax.grad\(...\)\) uses reverse mode only"):
        jax.hessian(loaded)(x)
    assert jax.jacrev(jax.grad(loaded))(x)[0, 1, 0, 1] == 6 * X[0, 1]


def test_check_grads_judges_a_loaded_function_and_names_its_rules(path):
    x = jnp.array([0.3, 1.2, 2.0])
    for order, second in ((2, "right"), (1, "none")):
        right = saved(path, lambda x: (jnp.sum(x**2), jnp.sin(x)), [x], gradient_order=order)
        found = {check.mode: check.status for check in tg.check_grads(right, (x,)).leaves}
        expected = {"rev": "right", "fwd": "none", "rev of rev": second, "fwd of rev": "none"}
        assert found == expected
    broken = saved(path, lambda x: jnp.sum(wrong(x)), [x])
    with pytest.raises(AssertionError, match=r"<lambda>, input 0 .*order 1, rev: expected"):
        tg.check_grads(broken, (x,), order=1)


def test_a_function_of_a_loaded_one_is_saved_with_open_sizes(model, path):
    loaded, _ = model
    loaded["predict"].variables["w"].assign([0.5, -2.0, 1.5])
    cubes = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, rows, 3"), "float32")
    outer = saved(path, lambda xs: jnp.sum(jax.vmap(loaded["predict"])(xs)), [cubes])
    stacked = jnp.stack([X, X + 1])
    w = np.array([0.5, -2.0, 1.5], np.float32)
    np.testing.assert_allclose(outer(stacked), ((stacked * w) ** 2).sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(outer)(stacked)[0], (3 * X * w + 1) * w, rtol=1e-5)
    assert set(outer.variables) == {"w"}
    with pytest.raises(ValueError, match=r"saved with gradient_order=2, .* order 3"):
        save(lambda x: loaded["predict"](x), path, [ROWS], gradient_order=3)


def test_variables_of_one_name_are_told_apart(path):
    first, second, none = tg.Variable(1.0), tg.Variable(2.0), tg.Variable(3.0, name="")
    loaded = saved(path, lambda x: x * first.value + second.value - none.value, [1.0])
    assert set(loaded.variables) == {"Variable", "Variable_1", "Variable_2"}
    assert [v.name for v in loaded.variables.values()] == ["Variable", "Variable", ""]
    assert float(loaded(10.0)) == 9.0


def test_variables_of_every_dtype_and_of_many_axes_are_kept_bit_by_bit(path):
    arrays = {dtype: array_of(dtype) for dtype in DTYPES} | {"axes": np.ones((1,) * 40, "f4")}
    variables = {name: tg.Variable(array, name=name) for name, array in arrays.items()}
    read = lambda: {name: v.value for name, v in variables.items()}  # noqa: E731
    loaded = saved(path, read, [], gradient_order=0)
    results = loaded()
    for name, variable in variables.items():
        assert loaded.variables[name].dtype == arrays[name].dtype
        assert results[name].shape == arrays[name].shape
        assert loaded.variables[name].numpy().tobytes() == variable.numpy().tobytes(), name
        assert np.asarray(results[name]).tobytes() == variable.numpy().tobytes(), name


def test_random_keys_are_saved_by_the_name_of_their_generator(path):
    keys = tg.Variable(jax.random.key(3, impl="rbg"), name="keys")

    def draw(key):
        return jax.random.bits(key), jax.random.bits(keys.value)

    key = jax.random.key(1)
    loaded = saved(path, draw, [key])
    assert loaded.variables["keys"].dtype == keys.dtype
    np.testing.assert_array_equal(loaded(key), draw(key))


# ------------------------------------------------------------------------------ trees and sizes


def test_a_function_that_draws_from_a_key_of_its_own_is_differentiated(path):
    key = tg.Variable(jax.random.key(3), name="key", trainable=False)

    def noisy(x):
        now, following = jax.random.split(key.value)
        key.assign(following)
        return x * jax.random.normal(now)

    save(noisy, path, [jnp.float32(1)])
    loaded = load(path)
    expected = [jax.grad(noisy)(1.0), tg.trace(jax.grad(noisy))(1.0)]
    assert expected[0] != expected[1]
    found = [jax.grad(loaded)(1.0), tg.trace(lambda x: jax.grad(loaded)(x))(1.0)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_trees_of_containers_come_back(path):
    def f(state, pair, *, scale):
        mean, rest = state
        return State(mean * scale, [rest["b"][0], (), {"c": pair[1], "a": None}]), None

    arguments = (State(X, {"a": None, "b": (X + 1,)}), [X, 2.0])
    loaded = saved(path, lambda state, pair: f(state, pair, scale=2.0), arguments)
    found, expected = loaded(*arguments), f(*arguments, scale=2.0)
    np.testing.assert_array_equal(found[0].mean, expected[0].mean)
    assert type(found[0]).__name__ == "State"
    assert found[0]._fields == ("mean", "rest")
    assert list(found[0].rest[2]) == ["a", "c"]
    assert [*found[0].rest[1:2], found[1]] == [(), None]
    # By name, with Variables for arrays, and a named tuple of another class.
    other = jax.tree.map(tg.Variable, arguments[0])
    np.testing.assert_array_equal(loaded(pair=[X, 2.0], state=other)[0].mean, 2 * X)
    text = "s(state: State(mean=f32[2,3], rest={'a': None, 'b': (f32[2,3],)}), pair: [f32[2,3], f32"
    assert str(loaded.signature).replace("<lambda>", "s").startswith(text)


def test_arguments_go_where_their_names_say_whatever_was_called_before(path):
    loaded = saved(path, lambda d, *, k: d["a"] - 10 * d["b"] + 100 * k, {"d": AB, "k": AB["a"]})
    same = jnp.float32(3)
    ways = [
        dict,
        lambda **d: dict(reversed(d.items())),
        lambda **d: {key: tg.Variable(value) for key, value in d.items()},
    ]
    for _ in range(2):
        for way in ways:
            assert float(loaded(way(b=same, a=same), k=same)) == 273
            assert float(loaded(k=3.0, d=way(b=1.0, a=5.0))) == 295
            assert float(loaded(way(a=5.0, b=1.0), k=3.0)) == 295


def test_a_mapping_that_was_saved_as_itself_is_called_as_itself(path):
    loaded = saved(path, lambda d: d["b"] - 3 * d["a"], [d := OrderedDict(b=X, a=2 * X)])
    np.testing.assert_allclose(loaded(d), -5 * X, rtol=1e-6)
    with pytest.raises(TypeError, match=r"Rank mismatch for d\['a'\]: expected \(2, 3\)"):
        loaded(OrderedDict(b=X, a=X[0]))
    with pytest.raises(TypeError, match=r"d is a .*dict.* and a .*OrderedDict.* types differ"):
        loaded(dict(d))


def in_another_process(script, path):
    return subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )


def test_a_class_that_is_not_registered_where_the_file_is_loaded_is_named(path):
    jax.export.register_namedtuple_serialization(Moments, serialized_name="test_save.Moments")
    save(lambda s: s.mean, path, [Moments(X)])
    done = in_another_process("import sys, tracegrad as tg; tg.load(sys.argv[1])", path)
    assert "unregistered type `test_save.Moments`" in done.stderr


def test_a_named_tuple_is_saved_where_its_class_is_registered_and_is_of_that_class(path):
    loaded = saved(path, lambda s: s.mean - 10 * s.rest, [State(np.float32(1), np.float32(2))])
    other = namedtuple("Other", "mean rest")
    same = jnp.float32(3)
    for _ in range(2):
        assert float(loaded(State(same, same))) == -27
        assert float(loaded(State(5.0, 1.0))) == -5
        for values in ((same, same), (1.0, 5.0)):
            with pytest.raises(TypeError, match=r"s is a .*Other.* and a .*State.* types differ"):
                loaded(other(*values))


NAMES = ["a", "match", "ä", "𐐀", "名", "fi", "_0", "a" * 100, "self", "args", "__debug__"]


def test_every_name_that_is_saved_is_loaded(path):
    keys = [*NAMES, "my-key", "", "\0", "if", "ﬁ", "__metadata__"]

    specs = dict.fromkeys(NAMES, np.float32(1))
    loaded = saved(path, lambda **kwargs: kwargs, specs, gradient_order=0)
    assert list(loaded(**specs)) == sorted(NAMES)
    functions = {f"f{key}": (lambda d: d, [{key: np.float32(1)}]) for key in keys}
    loaded = saved(path, functions, None, gradient_order=0)
    assert [list(loaded[f"f{key}"]({key: 2.0})) for key in keys] == [[key] for key in keys]
    variables = [tg.Variable(3.0, name=key) for key in keys]
    loaded = saved(path, lambda: sum(v.value for v in variables), [], gradient_order=0)
    assert float(loaded()) == 3 * len(keys)
    assert [v.name for v in loaded.variables.values()] == keys


def test_a_saved_function_takes_more_arguments_and_names_as_the_original(path):
    def scaled(x, power=2.0, *more, scale, **names):
        return scale * (x**power + sum(more)) - names.get("b", 0) ** names.get("a", 1)

    odd = {"my-key": np.float32(1), "if": np.float32(2), "ﬁ": np.float32(3)}
    for names in ({}, {"b": 2.0, "a": 3.0}):
        loaded = saved(path, scaled, {"x": 1.0, "scale": 2.0, **names})
        assert float(loaded(1.0, scale=2.0, **names)) == float(scaled(1.0, scale=2.0, **names))
    several = functools.partial(scaled, scale=0.5)
    loaded = saved(path, several, [1.0, 3.0, 4.0, 5.0])
    assert str(loaded.signature).endswith(", power: f32[], *more: (f32[], f32[])) -> f32[]")
    assert float(loaded(1.0, 3.0, 4.0, 5.0)) == float(several(1.0, 3.0, 4.0, 5.0))
    assert jax.grad(lambda more: loaded(1.0, 3.0, *more))((4.0, 5.0)) == (0.5, 0.5)
    with pytest.raises(TypeError, match="more"):
        loaded(1.0, 3.0, 4.0)
    loaded = saved(path, lambda **x: x["my-key"] - x["if"] * x["ﬁ"], odd)
    assert float(loaded(**odd)) == 1 - 2 * 3
    with pytest.raises(TypeError, match=r"x is a .*dict"):
        loaded(**{"my-key": 1.0})
    # What stands behind a default that was left out is given by name.
    loaded = saved(path, lambda a, b=1.0, c=2.0: a - b * c, {"a": 1.0, "c": 5.0})
    assert float(loaded(1.0, c=5.0)) == -4.0
    with pytest.raises(TypeError, match="too many positional"):
        loaded(1.0, 5.0)


@pytest.mark.parametrize(
    "around", [lambda t: (t,), lambda t: [t], lambda t: {"key": t}, lambda t: State(t, None)]
)
def test_the_deepest_tree_that_is_saved_is_loaded(around, path):
    def nested(x):
        return functools.reduce(lambda tree, _: around(tree), range(100), x)

    assert jax.tree.leaves(saved(path, nested, [1.0], gradient_order=0)(3.0)) == [3.0]


def test_arguments_that_do_not_fit_are_named(path):
    loaded = saved(path, lambda a, b: a["k"] * b, [{"k": ROWS}, np.float32(1)])
    for args, message in [
        (({"k": X},), "missing a required argument: 'b'"),
        (({"j": X}, 1.0), r"a is a .*dict.* metadata \('j',\) in the invocation and .* \('k',\)"),
        (({"k": [X]}, 1.0), r"a\['k'\] is a .*list.* in the invocation and an array when"),
        (({"k": X[0]}, 1.0), r"Rank mismatch for a\['k'\]: expected \(rows, 3\) and .* \(3,\)"),
        (({"k": X.T}, 1.0), r"mismatch for a\['k'\].shape\[1\] .* and called with \(3, 2\)"),
        (({"k": X.astype(int)}, 1.0), r"for a\['k'\]: expected float32 and called with int32"),
    ]:
        with pytest.raises(TypeError, match=message):
            loaded(*args)
    np.testing.assert_array_equal(loaded({"k": X}, 2), 2 * X)  # numbers are converted


def test_sizes_and_constraints_between_them_are_kept(path):
    b, c = jax.export.symbolic_shape("b, c", constraints=["b >= 3", "c <= 2*b"])
    specs = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(b, c), (c,), (b * 2,)]]
    loaded = saved(path, lambda x, y, z: (x @ y, x[:3], z[: 2 * x.shape[0]]), specs)
    ones = jnp.ones
    results = loaded(ones((4, 5)), ones(5), ones(8))
    assert [r.shape for r in results] == [(4,), (3, 5), (8,)]
    save(loaded, path, loaded.specs)
    for shapes, message in [
        ([(4, 5), (6,), (8,)], r"size y.shape\[0\] \(= 6\) and the specification 'c' \(= 5\)"),
        ([(4, 5), (5,), (9,)], r"size z.shape\[0\] \(= 9\) and the specification '2\*b' \(= 8\)"),
        ([(2, 4), (4,), (4,)], r"the symbolic shape constraint b ?>= ?3.*'b' = 2"),
        ([(3, 7), (7,), (6,)], r"the symbolic shape constraint c ?<= ?2\*b.*'b' = 3"),
    ]:
        for each in (loaded, load(path)):  # and by the next one too
            with pytest.raises(TypeError, match=message):
                each(*map(ones, shapes))


def test_a_constraint_that_divides_is_kept(path):
    b, c = jax.export.symbolic_shape("b, c", constraints=["b >= floordiv(12, c - 1)"])
    specs = [jax.ShapeDtypeStruct((b, c), "float32")]
    loaded = saved(path, jnp.sum, specs, gradient_order=0)
    assert float(loaded(jnp.ones((4, 4)))) == 16
    with pytest.raises(TypeError, match=r"shape constraint b"):
        loaded(jnp.ones((3, 4)))


def test_what_a_method_is_bound_to_is_part_of_the_program(path):
    class Model:
        def __init__(self):
            self.w = tg.Variable(3.0, name="w")

        @tg.trace(static_argnums=0)
        def call(self, x):
            return self.w.value * x**2

    model = Model()
    loaded = saved(path, model.call, [np.float32(1)])
    assert str(loaded.signature) == "call(x: f32[]) -> f32[]"
    model.w.assign(5.0)
    assert float(loaded(2.0)) == 12.0


def test_whatever_can_be_called_is_saved_under_a_name(path):
    class Scaled:
        def __call__(self, x):
            return x * 2

    partial = functools.partial(jnp.add, np.float32(1))
    for fun, name in [(Scaled(), "Scaled"), (Scaled().__call__, "__call__"), (partial, "add")]:
        loaded = saved(path, fun, [np.float32(0)], gradient_order=0)
        assert loaded.__name__ == name
        assert float(loaded(3.0)) == float(fun(3.0))


def test_what_a_trace_rewrites_is_saved(path):
    without_sine = tg.edit(tg.match.op("sin"), lambda op, x: x)
    fun = tg.trace(lambda x: jnp.sin(x) * 2, rules=[without_sine])
    np.testing.assert_array_equal(saved(path, fun, [X])(X), 2 * X)


def test_programs_for_other_platforms_are_written_here(path):
    loaded = saved(path, lambda x: jnp.tanh(x) @ x.T, [ROWS], platforms=("cpu", "cuda", "tpu"))
    assert loaded.platforms == ("cpu", "cuda", "tpu")
    assert loaded(X).shape == (2, 2)
    elsewhere = saved(path, jnp.sin, [X], platforms={"tpu"})
    with pytest.raises(ValueError, match=r"tpu.*cpu"):
        elsewhere(X)


MESH = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
ON_EACH = jax.P("i")


def on_devices(fun, specs):
    return jax.shard_map(fun, mesh=MESH, in_specs=specs, out_specs=specs)


def test_a_sharded_variable_is_saved_whole(path):
    spread = jax.device_put(np.arange(8.0, dtype=np.float32), jax.NamedSharding(MESH, ON_EACH))
    v = tg.Variable(spread, name="v")
    loaded = saved(path, lambda x: x * v.value, [np.float32(2)])
    np.testing.assert_array_equal(loaded(np.float32(2)), 2 * np.arange(8))


def test_a_function_of_several_devices_is_saved_for_as_many(path):
    x = jnp.arange(8.0)
    loaded = saved(path, on_devices(lambda x: x * jax.lax.psum(jnp.sum(x), "i"), ON_EACH), [x])
    spread = jax.device_put(x, jax.NamedSharding(MESH, ON_EACH))
    np.testing.assert_array_equal(loaded(spread), x * x.sum())
    slope = jax.grad(lambda x: jnp.sum(loaded(x)))(spread)
    np.testing.assert_array_equal(slope, np.full(8, 2 * x.sum()))
    with pytest.raises(ValueError, match="exported for 4 devices"):
        loaded(x)


def test_a_loaded_function_is_differentiated_in_a_shard_map(path):
    loaded = saved(path, lambda w, x: w**2 * x, [1.0, np.ones(2, "float32")])

    def slopes(w, x):
        return jax.grad(lambda w, x: jax.lax.psum(loaded(w, x) @ x, "i"), (0, 1))(w, x)

    w, x = jnp.float32(3), jnp.arange(8.0)
    dw, dx = jax.jit(on_devices(slopes, (jax.P(), ON_EACH)))(w, x)
    np.testing.assert_array_equal(dw, 2 * w * x @ x)
    np.testing.assert_array_equal(dx, 2 * w**2 * x)


def test_what_writes_to_a_place_of_its_own_is_no_effect(path):
    def f(x):
        place = jax.new_ref(x)
        place[...] = place[...] * x
        return place[...]

    loaded = saved(path, f, [X])
    np.testing.assert_array_equal(loaded(X), X * X)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(loaded(x)))(X), 2 * X)


# ------------------------------------------------------------------------------ what is connected


def test_a_variable_that_a_rule_closes_over_needs_a_stopped_gradient(path):
    scale = tg.Variable(4.0, trainable=False, name="scale")

    def with_scale(read):
        @tg.custom_gradient
        def rounded(x):  # a gradient straight through; none for the scale
            return jnp.round(x * read()) / read(), lambda dy: dy

        return lambda x: jnp.sum(rounded(x) ** 2)

    x = jnp.array([0.3, 1.2])
    with pytest.raises(ValueError, match=r"'rounded' \(.*test_save.py:\d+\).* apply stop_gr"):
        save(with_scale(lambda: scale.value), path, [x])
    loaded = saved(path, with_scale(lambda: tg.stop_gradient(scale.value)), [x], gradient_order=2)
    np.testing.assert_array_equal(jax.grad(loaded)(x), [0.5, 2.5])
    curvature = jax.grad(lambda x: jnp.sum(jax.grad(loaded)(x) ** 2))(x)
    np.testing.assert_array_equal(curvature, [2.0, 10.0])  # twice straight through: 2 * 2 * 2 x
    np.testing.assert_array_equal(by_tape(loaded, x), [0.5, 2.5])


def test_many_results_that_depend_on_different_arguments_have_right_gradients(path):
    def f(*xs):  # more patterns than are kept apart
        return [xs[i] * xs[(i + 1) % 6] for i in range(6)]

    args = [float(i + 1) for i in range(6)]
    loaded = saved(path, f, args)
    weights = np.arange(1.0, 7.0)
    found = jax.grad(lambda xs: sum(w * y for w, y in zip(weights, loaded(*xs), strict=True)))(args)
    at = np.array(args)
    expected = weights * np.roll(at, -1) + np.roll(weights * at, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_same_program_is_written_once(path):
    def count(fun):
        save(fun, path, [X], gradient_order=1)
        return sum("/program/" in name for name in inspect_file(path)["digests"])

    assert count(jnp.tanh) == 2
    assert count(jax.nn.relu) == 2  # its rule computes the same value
    other = jax.custom_vjp(lambda x: x * 2)
    other.defvjp(lambda x: (x * 3, None), lambda _, ct: (ct * 5,))
    assert count(other) == 3
    value, pullback = jax.vjp(load(path), jnp.asarray(X))
    np.testing.assert_array_equal(value, 3 * X)  # as JAX has it of the original
    np.testing.assert_array_equal(pullback(jnp.ones((2, 3)))[0], 5 * np.ones((2, 3)))


def test_a_model_is_saved_by_its_arrays_or_closed_over_and_runs_without_its_classes(path):
    model = eqx.nn.MLP(3, 2, 4, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)

    def of_arrays(leaves, x):
        return eqx.combine(jax.tree.unflatten(structure, leaves), rest)(x)

    functions = {"given": (of_arrays, [leaves, X[0]]), "closed": (lambda x: model(x), [X[0]])}
    loaded = saved(path, functions, None)
    np.testing.assert_allclose(loaded["given"](leaves, X[0]), model(X[0]), rtol=1e-6)
    script = (
        "import sys, numpy as np, tracegrad as s\n"
        "f = s.load(sys.argv[1])\n"
        "leaves = [np.full(l.shape, 0.5, 'float32') for l in f['given'].specs[0]]\n"
        "x = np.ones(3, 'float32')\n"
        "print(*f['closed'](x), *f['given'](leaves, x), 'equinox' in sys.modules)\n"
    )
    done = in_another_process(script, path)
    assert done.returncode == 0, done.stderr
    *numbers, has_equinox = done.stdout.split()
    halves = [np.full(leaf.shape, 0.5, "float32") for leaf in leaves]
    x = np.ones(3, "float32")
    expected = [*model(x), *of_arrays(halves, x)]
    np.testing.assert_allclose([float(n) for n in numbers], expected, rtol=1e-5)
    assert has_equinox == "False"


def test_a_graph_shows_a_loaded_function_as_one_node(path):
    def model(x):
        return jnp.sum(wrong(x))

    loaded = saved(path, model, [X])
    program = tg.graph(lambda x: 2.0 * loaded(x), X)
    assert [node.name for node in program.nodes] == ["model", "mul"]
    halved = tg.rewrite(loaded, tg.rules.scale_gradient(tg.match.call("model"), 0.5))
    np.testing.assert_allclose(jax.grad(halved)(X), (3.0 * X + 1.0) / 2, rtol=1e-6)
    with pytest.raises(tg.NoMatchError) as error:
        tg.rewrite(loaded, tg.rules.stop_gradient(tg.match.call("wrong")))(X)
    assert "nearest names: 'model'" in str(error.value)
    assert "alike" not in str(error.value)
