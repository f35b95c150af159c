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
from typing import Any

import ml_dtypes
import numpy as np

from tracegrad.saving.atomic import replacing
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.libraries import msgspec, safetensors_numpy
from tracegrad.saving.manifest import FORMAT, Manifest, encode

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
    """What is in a file: the bytes of each array, mapped into memory.

    Whoever replaces the file does not touch them. Whoever writes *into* the file changes what was
    checked, and shortening it ends the process (SIGBUS).
    """

    size: int
    manifest: Manifest
    arrays: dict[str, memoryview]

    def check(self) -> None:
        """Compares the SHA-256 of every array with the manifest; raises ArtefactError."""
        for name, found in digests_of(self.arrays).items():
            expected = self.manifest.digests[name]
            if found != expected:
                reason = f"its SHA-256 is {found}, and {expected} by the manifest"
                raise ArtefactError(name, f"its contents were changed: {reason}")


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
    text = encode(msgspec.structs.replace(manifest, digests=digests))
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


def map_file(path: str | os.PathLike[str]) -> memoryview:
    """The bytes of an ordinary file, mapped into memory. (Of a pipe one would wait for ever.)"""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ArtefactError("file", "it is a folder")
        if not stat.S_ISREG(status.st_mode):
            raise ArtefactError("file", "it is no ordinary file")
        if status.st_size == 0:
            raise ArtefactError("file", "it is empty")
        return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def read_file(path: str | os.PathLike[str]) -> Contents:
    """What is in a file. The header was compared with its SHA-256, the arrays were not: see
    `Contents.check`.

    Raises:
      ArtefactError: the file is damaged, or none that `save` wrote.
      OSError: it is not there, or may not be read.
    """
    view = map_file(path)
    begin = 8 + int.from_bytes(view[:8], "little")
    header = bytes(view[8 : min(begin, len(view))])
    found = _HEAD.match(header)
    if found is None:
        reason = "it does not begin as what tracegrad.save writes: another program wrote it, or it"
        raise ArtefactError("file", f"{reason} is damaged")
    if (number := int(found[1])) != FORMAT:
        reason = f"it is of format {number}, and this tracegrad reads format {FORMAT}"
        raise ArtefactError("file", reason)
    at = 8 + found.start(2)
    digest = sha256(b"".join((view[:at], _BLANK, view[at + len(_BLANK) : begin])))
    if digest.encode() != found[2] or begin > len(view):
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
    ends = {name: entry.data_offsets for name, entry in entries.items()}
    last = begin + max((end for _, end in ends.values()), default=0)
    if last != len(view):
        raise ArtefactError("file", f"it has {len(view)} bytes, and {last} by its header")
    for name in sorted(ends.keys() ^ manifest.digests.keys()):
        reason = "the manifest does not refer to it" if name in ends else "there is no such array"
        raise ArtefactError(name or "manifest", reason)
    arrays = {name: view[begin + first : begin + end] for name, (first, end) in ends.items()}
    return Contents(len(view), manifest, arrays)
