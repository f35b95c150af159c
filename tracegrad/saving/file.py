"""Writes and reads files: a safetensors file with a manifest in its metadata.

The metadata has one entry, ``tracegrad``, with three parts: the format number, the SHA-256 of the
header, and the manifest. The manifest has the SHA-256 of each array. So every byte is covered: the
header's digest covers the manifest and the arrays' names, dtypes and offsets, and the digests in
the manifest cover the arrays' contents.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from tracegrad.saving.atomic import replacing
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.libraries import msgspec, safetensors_numpy
from tracegrad.saving.manifest import FORMAT, Digested, Manifest

Array = np.ndarray[Any, Any]
PathLike = str | os.PathLike[str]
M = TypeVar("M", bound=Digested)

# The dtypes of safetensors that `safetensors.numpy` can read; others are written as bytes.
_WRITABLE = {"bool", "float16", "bfloat16", "float32", "float64", "complex64"}
_WRITABLE |= {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}

_BEGIN = b'{"__metadata__":{"tracegrad":"'
_BLANK = b"0" * 64  # replaces the header's digest while the digest is computed
_HEAD = re.compile(re.escape(_BEGIN) + rb"(\d{1,9}) ([0-9a-f]{64}) ")
# Digests take most of the loading time. From this many bytes on, this many threads compute them.
_LARGE, _AT_ONCE = 16 << 20, 4


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Contents:
    """The contents of a file. The arrays match the digests in the manifest. They are copies in
    memory, so later changes to the file do not affect them."""

    path: PathLike
    manifest: Manifest
    arrays: dict[str, memoryview]


def sha256(contents: Any) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(contents).hexdigest()


def digests_of(
    contents: Mapping[str, Any], digest: Callable[[Any], str] = sha256
) -> dict[str, str]:
    """Digests each array, or each item by `digest`; on threads, unless the arrays are small in
    total."""
    if sum(getattr(each, "nbytes", _LARGE) for each in contents.values()) < _LARGE:
        return {name: digest(each) for name, each in contents.items()}
    with ThreadPoolExecutor(_AT_ONCE) as several:
        return dict(zip(contents, several.map(digest, contents.values()), strict=True))


def stored(array: Array) -> Array:
    """Converts an array to the written form: contiguous, since safetensors ignores strides, and
    little-endian. An array of a dtype that is not in `_WRITABLE` becomes bytes, with one more
    axis."""
    # `ascontiguousarray` gives a scalar an axis; `reshape` removes it.
    array = np.ascontiguousarray(array).reshape(array.shape)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return array if array.dtype.name in _WRITABLE else array[..., None].view(np.uint8)


def array_of(contents: memoryview, dtype: str, shape: tuple[int, ...]) -> Array:
    """The inverse of `stored`. The array shares the memory of `contents`."""
    return np.frombuffer(contents, np.dtype(getattr(ml_dtypes, dtype, dtype))).reshape(shape)


# --------------------------------------------------------------------------------------- writing


def write_file(path: PathLike, arrays: Mapping[str, Array], manifest: Digested) -> None:
    """Writes arrays, as `stored` returns them, and a manifest, with their digests, to a file.

    The file is written completely or not at all. Raises OSError if the file cannot be written, and
    RuntimeError if safetensors writes an unexpected header.
    """
    digests = digests_of({name: each.reshape(-1).view(np.uint8) for name, each in arrays.items()})
    digests = {**manifest.digests, **digests}
    text = msgspec.json.encode(msgspec.structs.replace(manifest, digests=digests))
    metadata = {"tracegrad": f"{FORMAT} {_BLANK.decode()} {text.decode()}"}
    with replacing(path) as partial:
        try:
            safetensors_numpy.save_file(dict(arrays), partial, metadata)
        except Exception as error:  # an error of safetensors, with the OS error number in its text
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), path) from error
        with open(partial, "r+b") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
            found = _HEAD.match(header)
            if found is None or found[2] != _BLANK:
                begin = repr(header[:99])
                raise RuntimeError(f"this version of safetensors writes an unknown header: {begin}")
            file.seek(8 + found.start(2))
            file.write(sha256(length + header).encode())


# --------------------------------------------------------------------------------------- reading


def open_file(path: PathLike) -> BufferedReader:
    """Raises ArtefactError for a folder, a pipe, or a device: reading a pipe could block
    forever."""
    if os.path.isdir(path):
        reason = "it is a folder: load_variables reads those of save_variables"
        raise ArtefactError("file", reason, path)
    no_wait = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | no_wait))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ArtefactError("file", "it is not a regular file", path)
    return file


def read_header(file: BufferedReader, kind: type[M]) -> tuple[int, M, dict[str, tuple[int, int]]]:
    """Returns the size of a file, its manifest, and the offsets where each array begins and ends.

    Raises ArtefactError if the header is damaged, if it does not agree with the file's size, or if
    `write_file` did not write the file, with a manifest of this kind.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    header = file.read(min(length, size))
    found = _HEAD.match(header)
    if found is None:
        reason = "it is damaged, or tracegrad did not write it"
        raise ArtefactError("file", reason if size else "it is empty", file.name)
    if (number := int(found[1])) != FORMAT:
        reason = f"it has format {number}, but this version of tracegrad reads format {FORMAT}"
        raise ArtefactError("file", reason, file.name)
    view = memoryview(header)
    digest = sha256(b"".join((start, view[: found.start(2)], _BLANK, view[found.end(2) :])))
    if digest.encode() != found[2] or length > len(header):
        raise ArtefactError(
            "header",
            f"it was changed or is incomplete: its SHA-256 is {digest}, but should be "
            f"{found[2].decode()}",
            file.name,
        )
    member = "header"
    try:
        entries = msgspec.json.decode(header)
        text = entries.pop("__metadata__")["tracegrad"][found.end() - len(_BEGIN) :]
        entries = msgspec.convert(entries, dict[str, _Entry])
        member = "manifest"
        manifest = msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise ArtefactError(member, str(error), file.name) from error
    begin = 8 + length
    spans = {
        name: (begin + each.data_offsets[0], begin + each.data_offsets[1])
        for name, each in entries.items()
    }
    last = max((end for _, end in spans.values()), default=begin)
    if last != size:
        reason = f"it has {size} bytes, but its header says {last}"
        raise ArtefactError("file", reason, file.name)
    return size, manifest, spans


def check_digests(
    found: Mapping[str, str], listed: Mapping[str, str], path: PathLike, where: str
) -> None:
    """Raises ArtefactError for a part of `path` that is missing, superfluous or changed. `where`
    names the list: the manifest, or the seal."""
    for name in sorted(found.keys() | listed.keys()):
        if name not in found:
            reason = f"the {where} lists it, but it is missing"
        elif name not in listed:
            reason = f"the {where} does not list it"
        elif found[name] != listed[name]:
            reason = f"its SHA-256 is {found[name]}, but the {where} has {listed[name]}"
            reason = f"its contents were changed: {reason}"
        else:
            continue
        raise ArtefactError(name or "manifest", reason, path)


def read_file(path: PathLike) -> Contents:
    """Reads a file and verifies its checksums.

    Raises:
      ArtefactError: the file is damaged, or `save` did not write it.
      OSError: the file does not exist or cannot be read.
    """
    with open_file(path) as file:
        _, manifest, spans = read_header(file, Manifest)
        arrays = {}
        for name, (first, end) in spans.items():
            file.seek(first)
            arrays[name] = _read_into_own_memory(file, end - first)
    check_digests(digests_of(arrays), manifest.digests, path, "manifest")
    return Contents(path, manifest, arrays)


def _read_into_own_memory(file: BufferedReader, size: int) -> memoryview:
    """Reads the next `size` bytes of a file into new memory pages, which JAX can use uncopied."""
    memory = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    file.readinto(memory)
    return memory.toreadonly()
