"""The Variables of a tree of objects go to a safetensors file and come back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tracegrad as tg
from tracegrad import ArtefactError, load, load_variables, save, save_variables
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
    assert list(variables_of([model])) == ["0.broken", "0.__hidden", "0.second"]


def test_each_variable_is_found_once_by_its_path():
    tree = network()
    found = variables_of(tree)
    assert list(found) == NAMES
    assert found["layers.1.weight"] is tree["pair"].first
    assert list(variables_of(tree["pair"].first)) == ["weight"]


def test_they_come_back_and_others_can_read_them(tmp_path):
    path, tree = tmp_path / "weights.safetensors", network()
    save_variables(tree, path)
    arrays = load_file(path)  # the library of the format's authors
    assert arrays.keys() == set(NAMES)
    np.testing.assert_array_equal(arrays["layers.1.weight"], np.full((2, 3), 2.0))
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


def test_they_can_come_from_another_program(tmp_path):
    path, layer = tmp_path / "weights.safetensors", Layer(0.0)
    wanted = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file({"weight": wanted}, path)
    load_variables(layer, path)
    np.testing.assert_array_equal(layer.weight.numpy(), wanted)


def test_those_of_a_loaded_function_are_taken_too(tmp_path):
    layer = Layer(4.0)
    save(layer.call, tmp_path / "f", [np.ones((1, 2), np.float32)])
    loaded = load(tmp_path / "f")
    save_variables(loaded, tmp_path / "weights.safetensors")
    loaded.variables["weight"].assign(np.zeros((2, 3), np.float32))
    load_variables(loaded, tmp_path / "weights.safetensors")
    np.testing.assert_array_equal(loaded.variables["weight"].numpy(), np.full((2, 3), 4.0))


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({}, ValueError, "missing 'a', 'b'$"),
        ({"a": np.zeros(2, np.float32), "c": np.zeros(2)}, ValueError, "'b'; too many 'c'"),
        (
            {"a": np.ones(2, np.float32), "b": np.zeros(3, np.float32)},
            ValueError,
            r"the array 'b' of .* has the shape \[3\], <Variable b: .*> \[2\]",
        ),
        (
            {"a": np.ones(2, np.float32), "b": np.zeros(2)},
            TypeError,
            "the array 'b' of .* has the dtype float64, <Variable b: .*> float32",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_assigned(arrays, error, message, tmp_path):
    path = tmp_path / "weights.safetensors"
    tree = {name: tg.Variable(np.zeros(2, np.float32), name=name) for name in "ab"}
    save_file(arrays, path)
    with pytest.raises(error, match=message):
        load_variables(tree, path)
    np.testing.assert_array_equal(tree["a"].numpy(), np.zeros(2))


def test_damaged_files_and_trees_without_variables_are_refused(tmp_path):
    path, layer = tmp_path / "weights.safetensors", Layer(0.0)
    save_variables(layer, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtefactError, match=r"weights.safetensors: header: its arrays are"):
        load_variables(layer, path)
    with pytest.raises(ArtefactError, match="it is a folder"):
        load_variables(layer, tmp_path)
    with pytest.raises(FileNotFoundError):
        load_variables(layer, tmp_path / "missing")
    with pytest.raises(ValueError, match="there is no Variable in"):
        save_variables({"a": 1}, path)
