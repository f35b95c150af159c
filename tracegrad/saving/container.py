"""The file that an artefact is: arrays in safetensors, a manifest in their header, a seal behind.

The layout, byte by byte, is in ``docs/artefact.md``. Each byte of the file is covered by a SHA-256
that is compared before anything looks at that byte, but for the few at the end that hold the
checksums, and have one form only. Any program that knows safetensors reads the file all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np

from tracegrad.saving import documents
from tracegrad.saving.atomic import replacing
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.tensors import (
    HEADER,
    Array,
    Header,
    Tensor,
    bytes_of,
    header_of,
    header_size,
    read_header,
    read_tensor,
)

FORMAT_VERSION = 1
MANIFEST = "manifest"
"""What the manifest is called in errors."""
SEAL = "tracegrad/seal"
"""The last array: a SHA-256 of the header and of each array before it, and their own."""

_KEY = "tracegrad.manifest"  # in the header's metadata
_END = "tracegrad artefact {version:04d} {count:08d} {digest}"
_END_PATTERN = re.compile(rb"tracegrad artefact (\d{4}) (\d{8}) ([0-9a-f]{64})")
_END_SIZE = len(_END.format(version=0, count=0, digest="0" * 64))
_DIGEST = hashlib.sha256().digest_size
# Bytes at a time: few enough to be in the processor's cache still when they are summed a second
# time and written. (16 MiB at a time cost nearly twice the CPU time.)
_PIECE = 1 << 20
# Of files of this size the checksums of several arrays are compared at a time.
_LARGE, _AT_ONCE = 16 << 20, 4  # bytes


def write_container(
    path: str | os.PathLike[str], arrays: Mapping[str, Array], manifest: Any
) -> None:
    """Writes arrays and a manifest into one file, which is there whole or not at all.

    Args:
        path: where; what is there is replaced in one step (`atomic.replacing`).
        arrays: by name, in the order in which they shall lie in the file.
        manifest: what is to be known of them: an object of JSON, or a dataclass of what JSON has.

    Raises:
        ValueError: a name or a dtype that an array may not have, a manifest that is no JSON, or
            one that is too large for so small a file to be read. Nothing is left behind.
        OSError: the file cannot be written. Its ``filename`` is `path`, and nothing is left behind.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "greeting")
        >>> write_container(path, {"x": np.arange(3)}, {"language": "en"})
        >>> with open_container(path) as container:
        ...     print(container.array("x"), container.manifest["language"])
        [0 1 2] en
    """
    if SEAL in arrays:
        raise ValueError(f"an array cannot be called {SEAL!r}: that is the one at the end")
    text = documents.write(manifest)
    seal = np.zeros(_DIGEST * (len(arrays) + 1) + _END_SIZE, np.uint8)
    head = header_of({**arrays, SEAL: seal}, {_KEY: text})
    # What is written can be read: it is not too large, and no keys became equal.
    size = len(head) + seal.nbytes + sum(array.nbytes for array in arrays.values())
    documents.read(text.encode("utf-8"), MANIFEST, most=2 * size)
    with replacing(path) as file, ThreadPoolExecutor(1) as beside:
        table = _write(file, memoryview(head), beside)
        for array in arrays.values():
            table += _write(file, bytes_of(array), beside)
        digest = hashlib.sha256(table).hexdigest()
        end = _END.format(version=FORMAT_VERSION, count=len(arrays) + 1, digest=digest)
        file.write(table + end.encode("ascii"))


def _write(file: BinaryIO, contents: memoryview, beside: Executor) -> bytes:
    """Writes a part of the file; its checksum, which takes as long, is made at the same time."""
    digest = hashlib.sha256()
    for i in range(0, len(contents), _PIECE):
        piece = contents[i : i + _PIECE]
        hashed = beside.submit(digest.update, piece)
        file.write(piece)
        hashed.result()
    return digest.digest()


class Container:
    """The arrays of an open file, each checked before it is handed out; made by `open_container`.

    The contents are those of the file, mapped into memory: nothing is copied. A file that is
    replaced (`write_container`, ``mv``) does not touch an open one; whoever writes *into* an open
    file changes what was checked, and shortening one ends the process (SIGBUS).

    Attributes:
        path: the file.
        size: its bytes.
        tensors: what arrays there are, in their order, without the seal.
        manifest: as it was read.
    """

    def __init__(self, path: str, descriptor: int | None = None):
        self.path = path
        self._view = view = map_file(path if descriptor is None else descriptor)
        self.size = len(view)
        self._checked: set[str] = set()
        header, table = _read(view)
        self.tensors: dict[str, Tensor] = header.tensors
        del self.tensors[SEAL]
        checksums = (table[i : i + _DIGEST] for i in range(_DIGEST, len(table), _DIGEST))
        self._table = dict(zip(self.tensors, checksums, strict=True))
        if _KEY not in header.metadata:
            raise ArtefactError(HEADER, f"it lacks the manifest, {_KEY!r} in its metadata")
        text = header.metadata[_KEY].encode("utf-8")
        self.manifest = documents.read(text, MANIFEST, most=2 * len(view))

    def bytes(self, name: str) -> memoryview:
        """The bytes of an array, read-only; readable for as long as anything refers to them.

        Raises:
            ArtefactError: there is no such array, or its SHA-256 is not that of the seal.
        """
        if name not in self.tensors:
            raise ArtefactError(name, "the file has no such array")
        contents = self._view[self.tensors[name].start : self.tensors[name].end]
        if name not in self._checked:
            _compare(name, contents, self._table[name])
            self._checked.add(name)
        return contents

    def array(self, name: str) -> Array:
        """An array, read-only; its bytes are those of the file."""
        self.bytes(name)
        return read_tensor(self._view, name, self.tensors[name])

    def sha256(self, name: str) -> str:
        """What the SHA-256 of an array should be, in hexadecimal digits; it is not compared."""
        return self._table[name].hex()

    def check(self) -> None:
        """Compares the SHA-256 of every array, once; raises ArtefactError if one differs."""
        if self.size < _LARGE:
            for name in self.tensors:
                self.bytes(name)
            return
        with ThreadPoolExecutor(_AT_ONCE) as several:  # most of the time that loading takes
            for _ in several.map(self.bytes, self.tensors):
                pass


@contextlib.contextmanager
def open_container(
    path: str | os.PathLike[str], *, check: bool = True, descriptor: int | None = None
) -> Iterator[Container]:
    """Opens a file that `write_container` wrote, and checks that it is what was written.

    Args:
        path: the file.
        check: whether to compare the checksums of all arrays now. Otherwise those of an array are
            compared when it is asked for.
        descriptor: the file, if it is open: then `path` is not opened, but names it in errors.

    Yields:
        The `Container`. An `ArtefactError` that the block raises gets the path of the file.

    Raises:
        ArtefactError: the file is damaged, or none of ours.
        OSError: it is not there or may not be read.
    """
    shown = os.fspath(path)
    with naming(shown):
        container = Container(shown, descriptor)
        if check:
            container.check()
        yield container


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Adds the path of a file to errors of what is in it."""
    try:
        yield
    except ArtefactError as error:
        if error.path is not None:
            raise
        raise ArtefactError(error.member, error.reason, path) from error.__cause__


def open_file(path: str | os.PathLike[str]) -> int:
    """A descriptor of the file, to read; of a pipe too, without waiting for who writes to it."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))


def map_file(path: str | int) -> memoryview:
    """The file's bytes in memory; of nothing but an ordinary file, which a pipe is not.

    Args:
        path: the file, or the descriptor of an open one, which stays open.
    """
    descriptor = os.dup(path) if isinstance(path, int) else open_file(path)
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


def _read(view: memoryview) -> tuple[Header, bytes]:
    """The header of a file and its table of checksums, after checking both."""
    match = _END_PATTERN.fullmatch(view[-_END_SIZE:])
    if match is None:
        raise ArtefactError(
            "file",
            "it does not end with the seal that tracegrad.save writes: it is cut off, something "
            "was appended or changed, or another program wrote it (one that writes an artefact "
            "anew drops the checksums; of arrays alone load_variables reads any file)",
        )
    version, count, digest = int(match[1]), int(match[2]), match[3].decode("ascii")
    if version != FORMAT_VERSION:
        raise ArtefactError(
            "file",
            f"it has version {version} of the format, this tracegrad reads version "
            f"{FORMAT_VERSION}: read it with a newer one",
        )
    length, begin = header_size(view), len(view) - _END_SIZE - _DIGEST * count
    if begin < length:
        raise ArtefactError(
            SEAL,
            f"it is declared to have {count} checksums, for which there is no room in {len(view)} "
            "bytes: the file is cut off, or the number was changed",
        )
    table = view[begin:-_END_SIZE].tobytes()
    if hashlib.sha256(table).hexdigest() != digest:
        raise ArtefactError(
            SEAL,
            "the checksums at the end of the file were changed, or bytes among them are missing",
        )
    _compare(HEADER, view[:length], table[:_DIGEST])
    header = read_header(view)
    last = Tensor(np.dtype(np.uint8), (len(view) - begin,), begin, len(view))
    if header.tensors.get(SEAL) != last or len(header.tensors) != count:
        raise ArtefactError(SEAL, "it is not the array that the header says, one for each before")
    return header, table


def _compare(member: str, contents: memoryview, expected: bytes) -> None:
    digest = hashlib.sha256(contents)
    if digest.digest() != expected:
        raise ArtefactError(
            member,
            "its contents were changed, or bytes are missing or were added: their SHA-256 is "
            f"{digest.hexdigest()}, the seal says {expected.hex()}",
        )
