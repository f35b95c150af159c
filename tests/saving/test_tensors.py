"""Arrays in safetensors: read back as written, and by the format's own library."""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tracegrad.saving import tensors
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.tensors import (
    HEADER,
    bytes_of,
    header_of,
    in_order,
    read_header,
    read_tensor,
)

NAMED = ["bool", "uint8", "int8", "uint16", "int16", "float16", "bfloat16", "uint32", "int32"]
NAMED += ["float32", "uint64", "int64", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"]
UNNAMED = ["complex128", "int2", "int4", "uint2", "uint4", "float8_e3m4", "float8_e4m3"]
UNNAMED += ["float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn"]


def written(**arrays: np.ndarray[Any, Any]) -> memoryview:
    arrays = in_order(arrays)
    return memoryview(b"".join([header_of(arrays, {}), *map(bytes_of, arrays.values())]))


def file_of(header: Any, data: bytes = b"") -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(struct.pack("<Q", len(text)) + text + data)


def read_tensors(view: memoryview) -> dict[str, np.ndarray[Any, Any]]:
    tensors = read_header(view).tensors
    return {name: read_tensor(view, name, tensor) for name, tensor in tensors.items()}


def of_dtypes(dtypes: dict[str, str]) -> dict[str, Any]:
    return {"__metadata__": {"tracegrad.dtypes": json.dumps(dtypes)}}


def tensor(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("name", NAMED + UNNAMED)
def test_every_dtype_comes_back_bit_for_bit(name: str):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    arrays = {
        "one": np.ones((), dtype),
        "none": np.ones((0, 3), dtype),
        "some": np.arange(6).astype(dtype).reshape(2, 3),
        "strided": np.arange(6).astype(dtype).reshape(2, 3).T,
    }
    back = read_tensors(written(**arrays))
    assert back.keys() == arrays.keys()
    for key, array in arrays.items():
        assert back[key].dtype == dtype
        assert back[key].shape == array.shape
        assert back[key].tobytes() == array.tobytes()


def test_the_library_of_the_format_reads_what_is_written():
    from safetensors.numpy import load

    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(3, dtype=np.int8),
        "ö": np.float64(2.5).reshape(()),
    }
    back = load(bytes(written(**arrays)))
    assert back.keys() == arrays.keys()
    for key in arrays:
        np.testing.assert_array_equal(back[key], arrays[key], strict=True)


def test_what_the_library_of_the_format_writes_is_read():
    from safetensors.numpy import save

    arrays = {"x": np.arange(6, dtype=np.int16).reshape(3, 2), "y": np.ones(5, np.float64)}
    back = read_tensors(memoryview(save(arrays)))
    for key in arrays:
        np.testing.assert_array_equal(back[key], arrays[key], strict=True)


def test_arrays_are_neither_copied_when_written_nor_when_read():
    array = np.arange(1000, dtype=np.float32)
    assert np.shares_memory(np.frombuffer(bytes_of(array), np.uint8), array)
    view = written(x=array)
    assert np.shares_memory(read_tensors(view)["x"], np.frombuffer(view, np.uint8))


def test_each_array_begins_at_a_multiple_of_its_elements():
    arrays = {"a": np.ones(3, np.int8), "b": np.ones(1, np.float64), "c": np.ones(3, np.float16)}
    for name, found in read_header(written(**arrays)).tensors.items():
        assert found.start % arrays[name].itemsize == 0


def test_what_cannot_be_written_is_refused_before_anything_is(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="'x' has dtype"):
        header_of({"x": np.array(["text"])}, {})
    with pytest.raises(ValueError, match="reading it could take"):
        header_of({f"x{i}": np.ones((), np.int8) for i in range(40_000)}, {})
    with pytest.raises(ValueError, match="__metadata__"):
        header_of({"__metadata__": np.ones(1)}, {})
    monkeypatch.setattr(tensors, "_MOST_HEADER", 1000)  # else the test writes 64 MiB of JSON
    with pytest.raises(ValueError, match="at most 1000 can be read"):
        header_of({"x": np.ones(1)}, {"text": "x" * 1000})


@pytest.mark.parametrize(("dtype", "most"), [("bool", 1), ("int4", 15), ("uint2", 3)])
def test_bytes_that_are_no_element_are_refused(dtype: str, most: int):
    data = bytearray(written(x=np.ones(3, np.dtype(getattr(ml_dtypes, dtype, dtype)))))
    data[-2] = most
    read_tensors(memoryview(data))
    data[-2] = most + 1
    with pytest.raises(ArtefactError, match=f"x: an array of {dtype} has bytes beyond {most}"):
        read_tensors(memoryview(data))


F32 = tensor("F32", [2], 0, 8)
BAD_HEADERS = {
    "longer than the file": (struct.pack("<Q", 2**63) + b"{}", "declared to have"),
    "cut off": (b"\1\0\0", "3 bytes, too few for one"),
    "no JSON": (file_of(b"{x}"), "no JSON"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "no JSON"),
    "no object": (file_of([]), "should be a JSON object and is a list of 0"),
    "nested deeply": (file_of(b"[" * 100_000), "nested too deeply"),
    "an integer of thousands of digits": (file_of(b'{"x": %s}' % (b"9" * 9999)), "no JSON"),
    "a name twice": (file_of(b'{"x": {}, "x": {}}'), "'x' occurs twice"),
    "half a surrogate pair": (file_of(rb'{"\ud800": 1}'), "no JSON that can be read"),
    "unknown dtype": (file_of({"x": tensor("F31", [2], 0, 8)}, bytes(8)), "'F31'"),
    "dtype of wrong type": (file_of({"x": {**F32, "dtype": []}}, bytes(8)), "dtype should be"),
    "a key too many": (file_of({"x": {**F32, "code": "x"}}, bytes(8)), "'code' that should not"),
    "a key too few": (file_of({"x": {"dtype": "F32", "shape": []}}), "lacks .* 'data_offsets'"),
    "a negative size": (file_of({"x": tensor("F32", [-2], 0, 8)}, bytes(8)), r"is -2"),
    "true for a size": (file_of({"x": tensor("F32", [True], 0, 4)}, bytes(4)), r"is true"),
    "a float for a size": (file_of({"x": tensor("F32", [2.0], 0, 8)}, bytes(8)), r"is 2.0"),
    "a size of 2**70": (file_of({"x": tensor("F32", [2**70], 0, 8)}, bytes(8)), "71 bits"),
    "sizes that overflow": (
        file_of({"x": tensor("F32", [2**31, 2**31, 4], 0, 0)}),
        "beyond every memory",
    ),
    "huge and empty": (
        file_of({"x": tensor("F32", [0, 2**60, 2**60], 0, 0)}),
        "beyond every memory",
    ),
    "many axes": (file_of({"x": tensor("U8", [1] * 70, 0, 1)}, b"x"), "70 axes"),
    "wrong length": (file_of({"x": tensor("F32", [3], 0, 8)}, bytes(8)), r"\[3\] needs 12"),
    "offsets reversed": (
        file_of({"x": tensor("F32", [0], 8, 0)}, bytes(8)),
        "two offsets, from and to: 8, 0",
    ),
    "three offsets": (
        file_of({"x": {**F32, "data_offsets": [0, 8, 8]}}, bytes(8)),
        "data_offsets should be a list of 2 and is a list of 3",
    ),
    "overlap": (file_of({"x": F32, "y": tensor("F32", [2], 4, 12)}, bytes(12)), "overlaps"),
    "gap": (file_of({"x": F32, "y": tensor("F32", [1], 12, 16)}, bytes(16)), "gap"),
    "too little data": (file_of({"x": F32}, bytes(4)), "have 8 bytes, there are 4"),
    "too much data": (file_of({"x": F32}, bytes(9)), "have 8 bytes, there are 9"),
    "metadata of wrong type": (file_of({"__metadata__": {"a": 1}}), "should be a string"),
    "dtypes of no array": (file_of(of_dtypes({"a": "int4"})), "is no array"),
    "dtypes that are no JSON": (
        file_of({"__metadata__": {"tracegrad.dtypes": "[["}}),
        "no JSON that can be read",
    ),
    "metadata of no dtype": (
        file_of({**of_dtypes({"x": "object"}), "x": tensor("U8", [8], 0, 8)}, bytes(8)),
        "declared to be 'object'",
    ),
    "metadata of a wider dtype": (
        file_of({**of_dtypes({"x": "complex128"}), "x": tensor("U8", [8], 0, 8)}, bytes(8)),
        "declared to be 'complex128'",
    ),
}


@pytest.mark.parametrize("what", BAD_HEADERS)
def test_a_header_is_refused_that_is(what: str):
    data, reason = BAD_HEADERS[what]
    with pytest.raises(ArtefactError, match=reason) as caught:
        read_header(memoryview(data))
    assert caught.value.member in (HEADER, "__metadata__['tracegrad.dtypes']")
