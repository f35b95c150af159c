"""The file: arrays as the safetensors library writes them, and a manifest in their metadata.

The metadata have one entry, ``tracegrad``: the number of the format, the SHA-256 of the header, the
manifest. The manifest has the SHA-256 of each array. So every byte is covered: the header's digest
covers the names, types and places of the arrays and the manifest, the manifest covers the arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import ml_dtypes
import numpy as np

from tracegrad.saving.atomic import replacing
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.libraries import msgspec, safetensors_numpy
from tracegrad.saving.manifest import FORMAT, Manifest

Array = np.ndarray[Any, Any]

# Those of safetensors that its NumPy side can read.
_WRITABLE = {"bool", "float16", "bfloat16", "float32", "float64", "complex64"}
_WRITABLE |= {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}

_BEGIN = b'{"__metadata__":{"tracegrad":"'
_BLANK = b"0" * 64  # in the place of the digest of the header, while that is computed
_HEAD = re.compile(re.escape(_BEGIN) + rb"(\d{1,9}) ([0-9a-f]{64}) ")
_LARGE, _AT_ONCE = 16 << 20, 4  # bytes; digests, which take most of the time of loading


class _Entry(msgspec.Struct, frozen=True):
    """What a header says of one array."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Contents:
    """What is in a file. The bytes of the arrays were compared with the manifest, and are in memory
    of their own: whatever happens to the file, they stay what was checked."""

    size: int
    manifest: Manifest
    arrays: dict[str, memoryview]


def sha256(contents: Any) -> str:
    """The SHA-256 of bytes, in hexadecimal digits."""
    return hashlib.sha256(contents).hexdigest()


def digests_of(contents: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each array; of large ones several at a time."""
    if sum(each.nbytes for each in contents.values()) < _LARGE:
        return {name: sha256(each) for name, each in contents.items()}
    with ThreadPoolExecutor(_AT_ONCE) as several:
        return dict(zip(contents, several.map(sha256, contents.values()), strict=True))


def stored(array: Array) -> Array:
    """An array as it is written: contiguous, since safetensors ignores strides, in little-endian
    order, and one of a dtype that the format does not know as bytes, with one more axis."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # the first makes a scalar one axis
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return array if array.dtype.name in _WRITABLE else array[..., None].view(np.uint8)


def array_of(contents: memoryview, dtype: str, shape: tuple[int, ...]) -> Array:
    """What `stored` was given, not copied."""
    return np.frombuffer(contents, np.dtype(getattr(ml_dtypes, dtype, dtype))).reshape(shape)


# --------------------------------------------------------------------------------------- written


def write_file(
    path: str | os.PathLike[str], arrays: Mapping[str, Array], manifest: Manifest
) -> None:
    """Writes `stored` arrays and a manifest to a file, which is there whole or not at all.

    Raises OSError: the file cannot be written. Its ``filename`` is `path`; nothing is left behind.
    """
    digests = digests_of({name: each.reshape(-1).view(np.uint8) for name, each in arrays.items()})
    text = msgspec.json.encode(msgspec.structs.replace(manifest, digests=digests))
    metadata = {"tracegrad": f"{FORMAT} {_BLANK.decode()} {text.decode()}"}
    with replacing(path) as partial:
        try:
            safetensors_numpy.save_file(dict(arrays), partial, metadata)
        except Exception as error:  # the library's own, with the number of the system's in its text
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), partial) from error
        with open(partial, "r+b") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
            found = _HEAD.match(header)
            if found is None or found[2] != _BLANK:
                begin = repr(header[:99])
                raise RuntimeError(f"this version of safetensors writes another header: {begin}")
            file.seek(8 + found.start(2))
            file.write(sha256(length + header).encode())


# ------------------------------------------------------------------------------------------ read


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the path of a file to errors of what is in it."""
    try:
        yield
    except ArtefactError as error:
        if error.path is not None:
            raise
        raise ArtefactError(error.member, error.reason, path) from error.__cause__


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """An ordinary file, to be read. (Of a pipe one would wait for ever.)"""
    if os.path.isdir(path):
        raise ArtefactError("file", "it is a folder")
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ArtefactError("file", "it is no ordinary file")
    return file


def read_header(file: BufferedReader) -> tuple[int, Manifest, dict[str, tuple[int, int]]]:
    """The size of a file, its manifest, and where each array begins and ends.

    Raises ArtefactError: the header is damaged, or `save` did not write the file.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    header = file.read(min(length, size))
    found = _HEAD.match(header)
    if found is None:
        reason = "it does not begin as what tracegrad.save writes: another program wrote it, or it"
        raise ArtefactError("file", f"{reason} is damaged" if size else "it is empty")
    if (number := int(found[1])) != FORMAT:
        reason = f"it is of format {number}, and this tracegrad reads format {FORMAT}"
        raise ArtefactError("file", reason)
    view = memoryview(header)
    digest = sha256(b"".join((start, view[: found.start(2)], _BLANK, view[found.end(2) :])))
    if digest.encode() != found[2] or length > len(header):
        raise ArtefactError(
            "header",
            f"it was changed, or bytes are missing: its SHA-256 is {digest}, and should be "
            f"{found[2].decode()}",
        )
    member = "header"
    try:
        entries = msgspec.json.decode(header)
        text = entries.pop("__metadata__")["tracegrad"][found.end() - len(_BEGIN) :]
        entries = msgspec.convert(entries, dict[str, _Entry])
        member = "manifest"
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ArtefactError(member, str(error)) from error
    begin = 8 + length
    spans = {
        name: (begin + each.data_offsets[0], begin + each.data_offsets[1])
        for name, each in entries.items()
    }
    last = max((end for _, end in spans.values()), default=begin)
    if last != size:
        raise ArtefactError("file", f"it has {size} bytes, and {last} by its header")
    for name in sorted(spans.keys() ^ manifest.digests.keys()):
        reason = "the manifest does not refer to it" if name in spans else "there is no such array"
        raise ArtefactError(name or "manifest", reason)
    return size, manifest, spans


def read_file(path: str | os.PathLike[str]) -> Contents:
    """What is in a file, compared with its checksums.

    Raises:
      ArtefactError: the file is damaged, or none that `save` wrote.
      OSError: it is not there, or may not be read.
    """
    with open_file(path) as file:
        size, manifest, spans = read_header(file)
        arrays = {}
        for name, (first, end) in spans.items():
            file.seek(first)
            arrays[name] = _read_into_own_memory(file, end - first)
    for name, found in digests_of(arrays).items():
        if found != (expected := manifest.digests[name]):
            reason = f"its SHA-256 is {found}, and {expected} by the manifest"
            raise ArtefactError(name, f"its contents were changed: {reason}")
    return Contents(size, manifest, arrays)


def _read_into_own_memory(file: BufferedReader, size: int) -> memoryview:
    """The next bytes of a file, in pages of their own, which JAX can use without a copy."""
    memory = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    file.readinto(memory)
    return memory.toreadonly()
