"""How arrays lie in a safetensors file: written without copying them, read without believing it.

The format (https://huggingface.co/docs/safetensors) is eight bytes that tell the length of a JSON
header, the header, and the arrays one after another. A dtype that it has no name for is written as
the bytes of its elements, with one more axis; the header's ``__metadata__`` then has the dtype.

The format's own library reads what is written here. It does not write it: it takes each array as
`bytes`, a second time in memory, in an order of its own, and it has no name for ten of JAX's
dtypes. Nor does it read it, since nothing may be parsed before its checksum was compared.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import ml_dtypes
import numpy as np

from tracegrad.saving import documents
from tracegrad.saving.errors import ArtefactError

Array = np.ndarray[Any, Any]

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

_BY_OWN_NAME = {dtype.name: dtype for dtype in (*_DTYPES.values(), *_UNNAMED.values())}

# Elements that do not fill their byte: the largest that it can be.
_LARGEST_BYTE = {np.dtype(np.bool_): 1} | {
    _UNNAMED[name]: 2**bits - 1
    for name in _UNNAMED
    if (bits := int(re.findall(r"\d+", name)[0])) < 8
}

_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 64 << 20  # bytes; the format's own library reads up to 100 MB
_ALIGNMENT = 64  # bytes; the first array begins there
_MOST_AXES = 64  # what NumPy can have
HEADER = "header"
"""What the header is called in errors."""
_METADATA = "__metadata__"
_UNNAMED_KEY = "tracegrad.dtypes"  # where the metadata have the dtypes without a name, as JSON


@dataclass(frozen=True)
class Tensor:
    """What a header says of one array: bytes `start` to `end` of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """The arrays of a file by name, in their order in it, and the other metadata."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


# --------------------------------------------------------------------------------------- written


def in_order(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays of wide elements first, so that each begins at a multiple of their size."""
    order = sorted(arrays, key=lambda name: (-_stored(name, arrays[name])[0].itemsize, name))
    return {name: arrays[name] for name in order}


def header_of(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """What stands in a file before these arrays, which follow it in this order.

    Raises:
        ValueError: a dtype that JAX has not, the name ``__metadata__`` or one that is no Unicode,
            or tens of thousands of arrays of next to nothing, which `read_header` would not read.

    Example:
        >>> array = np.arange(3, dtype=np.float32)
        >>> data = memoryview(header_of({"x": array}, {}) + bytes_of(array))
        >>> read_tensor(data, "x", read_header(data).tensors["x"])
        array([0., 1., 2.], dtype=float32)
    """
    fields: dict[str, Any] = {}
    unnamed: dict[str, str] = {}
    position = 0
    for name, array in arrays.items():
        dtype, shape = _stored(name, array)
        end = position + array.nbytes
        fields[name] = {
            "dtype": _NAME_OF[dtype],
            "shape": shape,
            "data_offsets": [position, end],
        }
        if array.dtype not in _NAME_OF:
            unnamed[name] = array.dtype.name
        position = end
    more = {_UNNAMED_KEY: documents.write(unnamed)} if unnamed else {}
    if metadata or more:
        fields = {_METADATA: {**metadata, **more}, **fields}
    text = documents.write(fields).encode("utf-8")
    documents.check_cost(text, HEADER, 2 * position)
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    if len(text) > _MOST_HEADER:
        raise ValueError(
            f"the names and shapes of {len(arrays)} arrays, and what is known of them, have "
            f"{len(text)} bytes; at most {_MOST_HEADER} can be read"
        )
    return _LENGTH.pack(len(text)) + text


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array as they are in the file; copied only if it is strided."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def _stored(name: str, array: Array) -> tuple[np.dtype[Any], list[int]]:
    """The dtype and shape that an array has in the file."""
    if name == _METADATA or documents.text(name) is not None:
        raise ValueError(f"an array cannot be called {name!a} in safetensors")
    if array.dtype in _NAME_OF:
        return array.dtype, list(array.shape)
    if array.dtype.name not in _UNNAMED:
        raise ValueError(f"{name!r} has dtype {array.dtype}, which cannot be written")
    return np.dtype(np.uint8), [*array.shape, array.dtype.itemsize]


# ------------------------------------------------------------------------------------------ read


@dataclass(frozen=True)
class _Fields:
    dtype: Annotated[str, documents.one_of(*_NAMES)]
    shape: tuple[documents.Natural, ...]
    data_offsets: tuple[documents.Natural, documents.Natural]


def header_size(view: memoryview) -> int:
    """How many bytes of a file are its header, without looking at them."""
    if len(view) < _LENGTH.size:
        raise ArtefactError(HEADER, f"the file has {len(view)} bytes, too few for one")
    (length,) = _LENGTH.unpack_from(view)
    if length > min(len(view) - _LENGTH.size, _MOST_HEADER):
        raise ArtefactError(
            HEADER, f"it is declared to have {length} bytes, the file has {len(view)}"
        )
    return int(_LENGTH.size + length)


def read_header(view: memoryview) -> Header:
    """Reads what arrays a safetensors file has, without looking at them.

    Args:
        view: the file, u8[length].

    Raises:
        ArtefactError: the header is longer than the file, no JSON, of wrong types, has a name
            twice, a dtype that does not exist, a shape that does not have the bytes it says, or
            arrays that overlap, leave a gap, or are not all there.

    Example:
        >>> array = np.zeros((2, 3), np.float32)
        >>> data = header_of({"x": array}, {}) + bytes_of(array)
        >>> read_header(memoryview(data)).tensors
        {'x': Tensor(dtype=dtype('float32'), shape=(2, 3), start=128, end=152)}
    """
    begin = header_size(view)
    text, most = view[_LENGTH.size : begin].tobytes(), 2 * len(view)
    document = documents.read(text, HEADER, most=most)
    metadata = documents.parse(dict[str, str], document.pop(_METADATA, {}), HEADER, _METADATA)
    unnamed: dict[str, str] = {}
    if _UNNAMED_KEY in metadata:
        where = f"{_METADATA}[{_UNNAMED_KEY!r}]"
        named = documents.read(metadata.pop(_UNNAMED_KEY).encode("utf-8"), where, most=most)
        unnamed = documents.parse(dict[str, str], named, HEADER, where)
    fields = documents.parse(dict[str, _Fields], document, HEADER)
    for name in unnamed:
        if name not in fields:
            raise ArtefactError(
                HEADER, f"it has a dtype for {documents.show(name)}, which is no array"
            )
    found: dict[str, Tensor] = {}
    position = 0
    for name, each in sorted(fields.items(), key=lambda item: item[1].data_offsets):
        found[name] = _read_tensor(name, each, position, begin, unnamed.get(name))
        position = found[name].end - begin
    if begin + position != len(view):
        raise ArtefactError(
            HEADER,
            f"its arrays are declared to have {position} bytes, there are {len(view) - begin}",
        )
    return Header(found, metadata)


def _read_tensor(
    name: str, fields: _Fields, position: int, begin: int, unnamed: str | None
) -> Tensor:
    place = f"the array {documents.show(name)}"
    dtype, shape, (first, last) = _DTYPES[fields.dtype], fields.shape, fields.data_offsets
    if first > last:
        raise ArtefactError(
            HEADER, f"{place} should have two offsets, from and to: {first}, {last}"
        )
    if first != position:
        what = "overlaps the one before it" if first < position else "leaves a gap before it"
        raise ArtefactError(HEADER, f"{place} {what}")
    if unnamed is not None:
        real = _UNNAMED.get(unnamed)
        if real is None or dtype != np.uint8 or not shape or shape[-1] != real.itemsize:
            words = f"{place} is declared to be {documents.show(unnamed)}"
            raise ArtefactError(HEADER, f"{words}, and not stored as the bytes of that dtype")
        dtype, shape = real, shape[:-1]
    if len(shape) > _MOST_AXES:
        raise ArtefactError(HEADER, f"{place} has {len(shape)} axes, at most {_MOST_AXES} may be")
    # NumPy multiplies what is not zero too, and so would overflow where there are no elements.
    extent = dtype.itemsize
    for size in shape:
        extent *= max(size, 1)
        if extent >= 2**63:
            raise ArtefactError(HEADER, f"{place} has a shape beyond every memory: {shape[:4]}")
    size = 0 if 0 in shape else extent
    if last - first != size:
        words = f"{dtype.name}{list(shape)} needs {size}"
        raise ArtefactError(HEADER, f"{place} has {last - first} bytes, {words}")
    return Tensor(dtype, shape, begin + first, begin + last)


def read_tensor(view: memoryview, name: str, tensor: Tensor) -> Array:
    """An array of a file: the bytes of `view`, not copied; read-only if those are.

    Raises:
        ArtefactError: an element is none of its dtype: a truth value that is neither 0 nor 1, an
            integer of four bits beyond them.
    """
    stored = view[tensor.start : tensor.end]
    most = _LARGEST_BYTE.get(tensor.dtype)
    if most is not None and np.frombuffer(stored, np.uint8).max(initial=0) > most:
        reason = f"an array of {tensor.dtype.name} has bytes beyond {most}, which are no elements"
        raise ArtefactError(name, reason)
    return np.frombuffer(stored, tensor.dtype).reshape(tensor.shape)


def dtype_named(name: str) -> np.dtype[Any] | None:
    """The dtype that NumPy calls by this name; None if arrays in files cannot have it."""
    return _BY_OWN_NAME.get(name)
