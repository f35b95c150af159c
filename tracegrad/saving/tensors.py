"""How arrays lie in a safetensors file: written without copying them, read without believing it.

The format (https://huggingface.co/docs/safetensors) is eight bytes that tell the length of a JSON
header, the header, and the arrays one after another. A dtype that it has no name for is written as
the bytes of its elements, with one more axis; the header's ``__metadata__`` then has the dtype.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tracegrad.saving import documents
from tracegrad.saving.errors import ArtefactError

_NAMES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "C64": np.complex64,
}
_DTYPES = {name: np.dtype(kind) for name, kind in _NAMES.items()}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}

# Without a name in safetensors, so kept as bytes: one each, but for complex128. Which of them there
# are depends on the version of ml_dtypes.
_UNNAMED_KINDS = ["float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz"]
_UNNAMED_KINDS += ["float8_e5m2fnuz", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"]
_UNNAMED_KINDS += ["int1", "int2", "int4", "uint1", "uint2", "uint4"]
_UNNAMED = {"complex128": np.dtype(np.complex128)} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _UNNAMED_KINDS if hasattr(ml_dtypes, name)
}

# Elements that do not fill their byte: the largest that it can be.
_LARGEST_BYTE = {np.dtype(np.bool_): 1} | {
    _UNNAMED[name]: 2**bits - 1
    for name in _UNNAMED
    if (bits := int(re.findall(r"\d+", name)[0])) < 8
}

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64  # bytes; the first array begins there
_MOST_AXES = 64  # what NumPy can have
_METADATA = "__metadata__"
_TENSOR = {
    "dtype": documents.one_of(*_NAMES),
    "shape": [documents.natural],
    "data_offsets": [documents.natural],
}


@dataclass(frozen=True)
class Tensor:
    """What a header says of one array: bytes `start` to `end` of the member."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


def tensor_pieces(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, piece by piece; an array is copied only if it is strided.

    Args:
        arrays: by name; of any dtype that JAX has. Arrays of wide elements come first, so that
            each begins at a multiple of the size of its elements.

    Raises:
        ValueError: a dtype that JAX has not, the name ``__metadata__``, or tens of thousands of
            arrays of next to nothing, which `read_header` would not read; before any piece.

    Example:
        >>> data = b"".join(tensor_pieces({"x": np.arange(3, dtype=np.float32)}))
        >>> read_tensors(memoryview(data), "variables.safetensors")
        {'x': array([0., 1., 2.], dtype=float32)}
    """
    order = sorted(arrays, key=lambda name: (-_stored(name, arrays[name])[0].itemsize, name))
    header: dict[str, Any] = {}
    unnamed: dict[str, str] = {}
    position = 0
    for name in order:
        array = arrays[name]
        dtype, shape = _stored(name, array)
        end = position + array.nbytes
        fields = {"dtype": _NAME_OF[dtype], "shape": shape, "data_offsets": [position, end]}
        header[name] = fields
        if array.dtype not in _NAME_OF:
            unnamed[name] = array.dtype.name
        position = end
    if unnamed:
        header = {_METADATA: unnamed, **header}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    documents.check_cost(text, "the header of the arrays", 2 * position)
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return _pieces(_LENGTH.pack(len(text)) + text, [arrays[name] for name in order])


def _pieces(head: bytes, arrays: Sequence[np.ndarray[Any, Any]]) -> Iterator[memoryview]:
    yield memoryview(head)
    for array in arrays:
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        yield np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def _stored(name: str, array: np.ndarray[Any, Any]) -> tuple[np.dtype[Any], list[int]]:
    """The dtype and shape that an array has in the file."""
    if name == _METADATA:
        raise ValueError(f"an array cannot be called {name!r}: in safetensors that is no array")
    if array.dtype in _NAME_OF:
        return array.dtype, list(array.shape)
    if array.dtype.name not in _UNNAMED:
        raise ValueError(f"{name!r} has dtype {array.dtype}, which cannot be written")
    return np.dtype(np.uint8), [*array.shape, array.dtype.itemsize]


def read_header(view: memoryview, member: str) -> dict[str, Tensor]:
    """Reads what arrays a safetensors file has, without looking at them.

    Args:
        view: the file, u8[length].
        member: its name, for errors.

    Returns:
        The arrays by name, in their order in the file.

    Raises:
        ArtefactError: the header is longer than the file, no JSON, of wrong types, has a name
            twice, a dtype that does not exist, a shape that does not have the bytes it says, or
            arrays that overlap, leave a gap, or are not all there.

    Example:
        >>> data = b"".join(tensor_pieces({"x": np.zeros((2, 3), np.float32)}))
        >>> read_header(memoryview(data), "variables.safetensors")
        {'x': Tensor(dtype=dtype('float32'), shape=(2, 3), start=128, end=152)}
    """
    if len(view) < _LENGTH.size:
        raise ArtefactError(member, f"it has {len(view)} bytes, too few for a safetensors file")
    (length,) = _LENGTH.unpack_from(view)
    if length > len(view) - _LENGTH.size:
        raise ArtefactError(
            member, f"its header is declared to have {length} bytes, the member has {len(view)}"
        )
    begin = _LENGTH.size + length
    header = documents.read(view[_LENGTH.size : begin], member, most=2 * len(view))
    unnamed = header.pop(_METADATA, {})
    documents.check(unnamed, {str: str}, member, _METADATA)
    documents.check(header, {str: _TENSOR}, member, "header")
    for name in unnamed:
        if name not in header:
            raise ArtefactError(
                member, f"{_METADATA} has a dtype for {documents.show(name)}, which is no array"
            )
    found: dict[str, Tensor] = {}
    position = 0
    for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        found[name] = _read_tensor(member, name, fields, position, begin, unnamed.get(name))
        position = found[name].end - begin
    if begin + position != len(view):
        raise ArtefactError(
            member,
            f"its arrays are declared to have {position} bytes, there are {len(view) - begin}",
        )
    return found


def _read_tensor(
    member: str, name: str, fields: dict[str, Any], position: int, begin: int, unnamed: str | None
) -> Tensor:
    place = f"the array {documents.show(name)}"
    dtype, shape, offsets = _DTYPES[fields["dtype"]], fields["shape"], fields["data_offsets"]
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ArtefactError(member, f"{place} should have two offsets, from and to: {offsets[:3]}")
    if offsets[0] != position:
        what = "overlaps the one before it" if offsets[0] < position else "leaves a gap before it"
        raise ArtefactError(member, f"{place} {what}")
    if unnamed is not None:
        real = _UNNAMED.get(unnamed)
        if real is None or dtype != np.uint8 or not shape or shape[-1] != real.itemsize:
            words = f"{place} is declared to be {documents.show(unnamed)}"
            raise ArtefactError(member, f"{words}, and not stored as the bytes of that dtype")
        dtype, shape = real, shape[:-1]
    if len(shape) > _MOST_AXES:
        raise ArtefactError(member, f"{place} has {len(shape)} axes, at most {_MOST_AXES} may be")
    # NumPy multiplies what is not zero too, and so would overflow where there are no elements.
    extent = dtype.itemsize
    for size in shape:
        extent *= max(size, 1)
        if extent >= 2**63:
            raise ArtefactError(member, f"{place} has a shape beyond every memory: {shape[:4]}")
    size = 0 if 0 in shape else extent
    if offsets[1] - offsets[0] != size:
        raise ArtefactError(
            member,
            f"{place} has {offsets[1] - offsets[0]} bytes, {dtype.name}{shape} needs {size}",
        )
    return Tensor(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def read_tensors(view: memoryview, member: str) -> dict[str, np.ndarray[Any, Any]]:
    """Reads the arrays of a safetensors file.

    Args:
        view: the file, u8[length].
        member: its name, for errors.

    Returns:
        The arrays by name: the bytes of `view`, not copied; read-only if those are.

    Raises:
        ArtefactError: the header is wrong, see `read_header`; or an element is none of its dtype:
            a truth value that is neither 0 nor 1, an integer of four bits beyond them.
    """
    found = {}
    for name, tensor in read_header(view, member).items():
        stored = view[tensor.start : tensor.end]
        most = _LARGEST_BYTE.get(tensor.dtype)
        if most is not None and np.frombuffer(stored, np.uint8).max(initial=0) > most:
            words = f"the array {documents.show(name)} of {tensor.dtype.name}"
            raise ArtefactError(member, f"{words} has bytes beyond {most}, which are no elements")
        found[name] = np.frombuffer(stored, tensor.dtype).reshape(tensor.shape)
    return found
