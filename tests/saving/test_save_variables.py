"""The Variables of a tree of objects go to a folder of Orbax's and come back."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from artefacts import DTYPES, array_of
from flax import nnx
from hypothesis import settings

import tracegrad as tg
from tracegrad import ArtefactError, load, load_variables, save, save_variables
from tracegrad.saving import checkpoints, seal
from tracegrad.saving.seal import SEAL
from tracegrad.saving.variables import variables_of

pytestmark = pytest.mark.both_jax


class Pair(NamedTuple):
    first: Any
    second: Any


class Slotted:
    __slots__ = ("inner", "never")

    def __init__(self, inner):
        self.inner = inner


class Layer:
    def __init__(self, start):
        self.weight = tg.Variable(np.full((2, 3), start, np.float32), name="weight")
        self.name = "layer"
        self.parent = None
        self.call = tg.trace(lambda x: x @ self.weight.value)


def network():
    layers = [Layer(1.0), Layer(2.0)]
    layers[0].parent = layers[1].parent = layers  # a circle
    shared = layers[1].weight
    half = tg.Variable(jnp.ones(3, jnp.bfloat16), name="half")
    return {
        "layers": layers,
        "pair": Pair(shared, (half, None)),
        "slotted": Slotted(tg.Variable(jax.random.key(5), name="key")),
        3: jnp.ones(2),
    }


NAMES = ["layers.0.weight", "layers.1.weight", "pair.second.0", "slotted.inner"]


def test_what_a_class_computes_is_not_looked_at():
    class Model:
        __slots__ = ("__dict__", "__hidden", "second")

        def __init__(self):
            self.__hidden = tg.Variable(1.0)
            self.second = tg.Variable(2.0)
            self.__dict__["broken"] = tg.Variable(3.0)

        @property
        def variables(self):
            return list(variables_of(self).values())

        @property
        def broken(self):
            raise RuntimeError("not now")

    model = Model()
    assert [float(v) for v in model.variables] == [3.0, 1.0, 2.0]
    assert list(variables_of([model])) == ["0.broken", "0._Model__hidden", "0.second"]

    class Computed(Slotted):
        __slots__ = ()

        @property
        def inner(self):
            return tg.Variable(7.0)

        def __getattr__(self, name):
            return {"never": tg.Variable(8.0)}

    computed, held = Computed.__new__(Computed), tg.Variable(1.0)
    Slotted.inner.__set__(computed, held)
    assert list(variables_of(computed).items()) == [("inner", held)]


def test_each_variable_is_found_once_by_its_path():
    tree = network()
    found = variables_of(tree)
    assert list(found) == NAMES
    assert found["layers.1.weight"] is tree["pair"].first
    assert list(variables_of(tree["pair"].first)) == ["weight"]


def test_keys_that_look_alike_in_a_path_are_different_leaves(tmp_path):
    v = [tg.Variable(float(i)) for i in range(1, 7)]
    tree = {
        "a.b": v[0],
        "a": {"b": v[1]},
        "c": {"0": v[2], 1: v[3], "1": v[4]},
        "d": {(1, 2): v[5]},
    }
    names = ['"a.b"', "a.b", 'c."0"', "c.1", 'c."1"', "d.<(1, 2)>"]
    assert list(variables_of(tree)) == names
    save_variables(tree, tmp_path / "state")
    for variable in variables_of(tree).values():
        variable.assign(0.0)
    load_variables(tree, tmp_path / "state")
    assert [float(v) for v in variables_of(tree).values()] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match=r"missing '\"a\.b\"'; too many"):
        load_variables(
            {"a.b": tree["a.b"]}, write(tmp_path / "other", {"a": {"b": tg.Variable(1.0)}})
        )


def write(path, tree):
    save_variables(tree, path)
    return path


def test_they_come_back(tmp_path):
    path, tree = tmp_path / "state", network()
    save_variables(tree, path)
    save_variables(tree, path)
    assert [step.name for step in path.iterdir()] == ["tracegrad-1"]  # the state is replaced
    other = network()
    for layer in other["layers"]:
        layer.weight.assign(layer.weight * 0)
    other["slotted"].inner.assign(jax.random.key(6))
    load_variables(other, path)
    for name, variable in variables_of(other).items():
        expected = variables_of(tree)[name].value
        if name == "slotted.inner":
            expected, found = jax.random.key_data(expected), jax.random.key_data(variable.value)
            np.testing.assert_array_equal(found, expected)
        else:
            assert variable.numpy().tobytes() == np.asarray(expected).tobytes()
    np.testing.assert_array_equal(other["layers"][0].call(jnp.ones((1, 2))), 2 * np.ones((1, 3)))


def test_what_another_thread_has_trained_comes_back(tmp_path):
    w = tg.Variable(1.0)
    training = threading.Thread(target=tg.trace(lambda x: w.assign_add(x)), args=(2.0,))
    training.start()
    training.join()
    path = write(tmp_path / "state", {"w": w})
    w.assign(0.0)
    load_variables({"w": w}, path)
    assert float(w) == 3.0


def test_orbax_alone_reads_them_too(tmp_path):
    save_variables(network(), tmp_path / "state")
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(tmp_path / "state" / "tracegrad-0")
    assert arrays.keys() == set(NAMES)
    np.testing.assert_array_equal(arrays["layers.1.weight"], np.full((2, 3), 2.0))


def test_variables_of_every_dtype_of_orbax_are_kept_bit_by_bit(tmp_path):
    supported = set(DTYPES) - {"uint4", "float8_e4m3"}  # by Orbax
    tree = {name: tg.Variable(array_of(name)) for name in sorted(supported)}
    tree["empty"] = tg.Variable(np.zeros((0, 3), np.float32))
    expected = {name: variable.numpy().tobytes() for name, variable in tree.items()}
    save_variables(tree, tmp_path / "state")
    for variable in tree.values():
        variable.assign(jnp.zeros_like(variable.value))
    load_variables(tree, tmp_path / "state")
    for name, variable in tree.items():
        assert variable.numpy().tobytes() == expected[name], name


def test_they_come_to_lie_as_the_variables_do(tmp_path):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.NamedSharding(mesh, jax.P("i"))
    tree = {"w": tg.Variable(jax.device_put(np.arange(8.0, dtype=np.float32), spread))}
    path = write(tmp_path / "state", tree)
    load_variables(tree, path)
    assert tree["w"].value.sharding == spread
    new = {"w": tg.Variable(np.zeros(8, np.float32))}
    load_variables(new, path)
    assert len(new["w"].value.sharding.device_set) == 1
    assert not new["w"].value.committed
    np.testing.assert_array_equal(new["w"].numpy(), np.arange(8.0))
    whole = jax.NamedSharding(mesh, jax.P())
    new["w"].assign(jax.device_put(np.zeros(8, np.float32), whole))
    load_variables(new, path)
    assert new["w"].value.sharding == whole
    np.testing.assert_array_equal(new["w"].numpy(), np.arange(8.0))


def test_they_can_be_those_of_a_loaded_function(tmp_path):
    save(Layer(4.0).call, tmp_path / "f", [np.ones((1, 2), np.float32)])
    loaded = load(tmp_path / "f")
    save_variables(loaded, tmp_path / "state")
    loaded.variables["weight"].assign(np.zeros((2, 3), np.float32))
    load_variables(loaded, tmp_path / "state")
    np.testing.assert_array_equal(loaded.variables["weight"].numpy(), np.full((2, 3), 4.0))


ZEROS, ONES, THREE = (np.full(n, value, np.float32) for n, value in ((2, 0), (2, 1), (3, 0)))
OF_SHAPE = r"the array 'b' of .* has the shape \[3\], but <Variable b: .*> has \[2\]"
OF_DTYPE = "the array 'b' of .* has the dtype float64, but <Variable b: .*> has float32"


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"a": ZEROS, "c": np.zeros(2)}, ValueError, "'b'; too many 'c'"),
        ({"a": ONES, "b": THREE}, ValueError, OF_SHAPE),
        ({"a": ONES, "b": np.zeros(2)}, TypeError, OF_DTYPE),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_assigned(arrays, error, message, tmp_path):
    tree = {name: tg.Variable(np.zeros(2, np.float32), name=name) for name in "ab"}
    with jax.enable_x64(True):
        saved = {name: tg.Variable(array) for name, array in arrays.items()}
        path = write(tmp_path / "state", saved)
    with pytest.raises(error, match=message):
        load_variables(tree, path)
    np.testing.assert_array_equal(tree["a"].numpy(), np.zeros(2))


def test_what_is_no_state_and_trees_without_variables_are_refused(tmp_path):
    file, layer = tmp_path / "file", Layer(0.0)
    file.touch()
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for action, tree, path, error, words in [
        (load_variables, layer, file, NotADirectoryError, "file"),
        (load_variables, layer, tmp_path, FileNotFoundError, "no complete checkpoint"),
        (load_variables, layer, tmp_path / "missing", FileNotFoundError, "missing"),
        (save_variables, layer, file, FileExistsError, "file"),
        (save_variables, {"a": 1}, file, ValueError, r"there is no Variable in a dict: \{'a': 1\}"),
        (save_variables, linear, file, ValueError, r"there is no Variable in a Linear: .{60}$"),
    ]:
        with pytest.raises(error, match=words):
            action(tree, path)


def damaged(random, step):
    """One file of a checkpoint is damaged in some way."""
    files = sorted(file for file in step.rglob("*") if file.is_file() and file.stat().st_size)
    file = random.choice(files)
    data = file.read_bytes()
    at = random.randrange(len(data))
    others = [other for each in files if (other := each.read_bytes()) != data]
    flipped = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    file.unlink()
    new = random.choice([flipped, data[:at], data + b"x", random.choice(others), None])
    if new is not None:
        file.write_bytes(new)


THOROUGH = settings.get_current_profile_name() != "steady"


def test_a_damaged_state_is_refused_and_nothing_is_assigned(tmp_path):
    tree = {f"w{i}": tg.Variable(np.full((40, 9), i, np.float32)) for i in range(6)}
    original = write(tmp_path / "state", tree)
    choose = random.Random(0)
    for number in range(150 if THOROUGH else 30):
        path = tmp_path / f"damaged-{number}"
        shutil.copytree(original, path)
        damaged(choose, path / "tracegrad-0")
        # Without its seal it was never saved.
        with pytest.raises((ArtefactError, FileNotFoundError)) as refused:
            load_variables(tree, path)
        if (path / "tracegrad-0" / SEAL).exists():
            assert refused.type is ArtefactError
            assert Path(refused.value.path).is_relative_to(path / "tracegrad-0")
            assert refused.value.member
        shutil.rmtree(path)
    assert [float(v.value[0, 0]) for v in tree.values()] == list(range(6))


def test_paths_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = {"w": tg.Variable(1.0, name="w")}
    save_variables(tree, "state")
    save(lambda x: x * tree["w"], "function", [np.float32(1)])
    tree["w"].assign(2.0)
    load_variables(tree, "state")
    assert float(tree["w"]) == float(load("function")(1.0)) == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["function", "state"]


def test_a_state_of_a_newer_format_is_named(tmp_path):
    tree = {"w": tg.Variable(1.0)}
    seal = write(tmp_path / "state", tree) / "tracegrad-0" / SEAL
    seal.write_bytes(seal.read_bytes().replace(b'"tracegrad":"2 ', b'"tracegrad":"3 '))
    with pytest.raises(ArtefactError, match="has format 3, but this version of tracegrad reads f"):
        load_variables(tree, tmp_path / "state")


def test_64_bits_are_kept_and_asked_for_where_they_are_needed(tmp_path):
    with jax.enable_x64(True):
        tree = {"f": tg.Variable(np.array([1e300])), "c": tg.Variable(np.array([1e300 - 2j]))}
    save_variables(tree, tmp_path / "state")
    with pytest.raises(ValueError, match=r"of complex128, float64, .*jax_enable_x64"):
        load_variables(tree, tmp_path / "state")
    with jax.enable_x64(True):
        new = {name: tg.Variable(np.zeros_like(v.numpy())) for name, v in tree.items()}
        load_variables(new, tmp_path / "state")
    assert new["f"].numpy().tolist() == [1e300]
    assert new["c"].numpy().tolist() == [1e300 - 2j]


def test_what_was_not_sealed_does_not_count(tmp_path):
    tree = {"w": tg.Variable(1.0)}
    path = write(tmp_path / "state", tree)
    shutil.copytree(path / "tracegrad-0", path / "tracegrad-1")
    (path / "tracegrad-1" / SEAL).unlink()
    tree["w"].assign(2.0)
    load_variables(tree, path)
    assert float(tree["w"]) == 1.0
    save_variables(tree, path)
    assert [step.name for step in path.iterdir()] == ["tracegrad-2"]


def test_a_missing_file_is_one_that_the_seal_lists(tmp_path):
    tree = {"w": tg.Variable(1.0)}
    (write(tmp_path / "state", tree) / "tracegrad-0" / "_METADATA").unlink()
    with pytest.raises(ArtefactError, match="_METADATA: the seal lists it, but it is missing"):
        load_variables(tree, tmp_path / "state")


def test_an_interrupt_behind_the_seal_leaves_the_new_state(tmp_path, monkeypatch):
    tree, remove = {"w": tg.Variable(1.0)}, seal.remove
    path = write(tmp_path / "state", tree)
    tree["w"].assign(2.0)

    def interrupted(steps):
        remove(steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(seal, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_variables(tree, path)
    tree["w"].assign(3.0)
    load_variables(tree, path)
    assert float(tree["w"]) == 2.0


def test_a_newer_state_that_another_save_sealed_meanwhile_stays(tmp_path, monkeypatch):
    tree, write_file = {"w": tg.Variable(1.0)}, seal.write_file
    path = write(tmp_path / "state", tree)

    def and_then_another(*args):
        write_file(*args)
        monkeypatch.undo()
        save_variables({"w": tg.Variable(2.0)}, path)

    monkeypatch.setattr(seal, "write_file", and_then_another)
    save_variables(tree, path)
    load_variables(tree, path)
    assert float(tree["w"]) == 2.0
    assert [step.name for step in path.iterdir()] == ["tracegrad-2"]


def test_of_two_saves_that_chose_one_number_the_second_leaves_the_first_alone(
    tmp_path, monkeypatch
):
    tree, digests = {"w": tg.Variable(1.0)}, checkpoints.digests_of_files
    path = write(tmp_path / "state", {"w": tg.Variable(0.0)})

    def while_another_begins(*args):
        with pytest.raises(FileExistsError, match="tracegrad-1"):
            save_variables({"w": tg.Variable(2.0)}, path)
        return digests(*args)

    monkeypatch.setattr(checkpoints, "next_step", lambda folder: 1)
    monkeypatch.setattr(checkpoints, "digests_of_files", while_another_begins)
    save_variables(tree, path)
    tree["w"].assign(3.0)
    load_variables(tree, path)
    assert float(tree["w"]) == 1.0
