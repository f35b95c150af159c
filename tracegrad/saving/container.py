"""The file that an artefact is: members in a ZIP file, and a manifest with the SHA-256 of each.

The layout, byte by byte, is in ``docs/artefact.md``. The reader is our own and not `zipfile`,
which is lenient where this promises not to be: it finds an archive behind other bytes, takes the
last of two members of one name, believes lengths that members declare, and unpacks what is
compressed. Here each byte of the file is either covered by a checksum that has been compared
before anything looks at that byte, or has to be what the writer would have written there. Any ZIP
program reads the file all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO, Self

from tracegrad.saving import documents, records
from tracegrad.saving.atomic import replacing
from tracegrad.saving.errors import ArtefactError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MOST_MANIFEST = 64 << 20  # bytes

Contents = bytes | memoryview | Iterable[memoryview]

_MEMBERS = {str: {"length": documents.natural, "sha256": documents.sha256}}
# Bytes at a time: few enough to be in the processor's cache still when they are summed a second
# time and written. (16 MiB at a time cost nearly twice the CPU time.)
_PIECE = 1 << 20


def write_container(
    path: str | os.PathLike[str], members: Mapping[str, Contents], manifest: Mapping[str, Any]
) -> None:
    """Writes members and manifest into one file, which is there whole or not at all.

    Args:
        path: where; what is there is replaced in one step (`atomic.replacing`).
        members: the contents by name, in the order in which they shall lie in the file. An
            iterable of `memoryview` is written piece by piece, so that large contents need not be
            in memory a second time. Names are ASCII letters, digits and ``_ . + -``, with ``/``
            between parts.
        manifest: what is to be known of the members, with values that JSON has. It is written as
            the member ``manifest.json``, with the ``format_version`` and, as ``members``, each
            member's length in bytes and SHA-256.

    Raises:
        ValueError: a name that a member may not have, too many members, a manifest that is no
            JSON, or one that is too large for so small a file to be read. Nothing is left behind.
        OSError: the file cannot be written. Its ``filename`` is `path`, and nothing is left behind.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "greeting")
        >>> write_container(path, {"words.txt": b"hello"}, {"language": "en"})
        >>> with open_container(path) as container:
        ...     print(bytes(container.member("words.txt")), container.manifest["language"])
        b'hello' en
    """
    _check_before_writing(members, manifest)
    with replacing(path) as file:
        entries: list[records.Entry] = []
        listed: dict[str, dict[str, Any]] = {}
        for name, contents in members.items():
            digest = hashlib.sha256()
            entries.append(_write_member(file, name, contents, digest))
            listed[name] = {"length": entries[-1].length, "sha256": digest.hexdigest()}
        text = documents.write({"format_version": FORMAT_VERSION, **manifest, "members": listed})
        sealed = file.tell()
        # What is written can be read: it is not too large, and no keys became equal.
        documents.read(memoryview(text), MANIFEST, most=2 * sealed)
        entries.append(_write_member(file, MANIFEST, text, hashlib.sha256()))
        start = file.tell()
        directory = b"".join(map(records.directory_record, entries))
        end = records.end_records(entries, start, len(directory))
        seal = hashlib.sha256(records.local_header(entries[-1]))
        for part in (text, directory, end):
            seal.update(part)
        length = start - sealed + len(directory) + len(end)
        comment = records.Seal(FORMAT_VERSION, length, seal.hexdigest())
        file.write(directory + end + records.seal_comment(comment))


@contextlib.contextmanager
def open_container(
    path: str | os.PathLike[str], *, check: bool = True, descriptor: int | None = None
) -> Iterator[Container]:
    """Opens a file that `write_container` wrote, and checks that it is what was written.

    Args:
        path: the file.
        check: whether to compare the checksums of all members now. Otherwise those of a member are
            compared when it is asked for.
        descriptor: the file, if it is open: then `path` is not opened, but names it in errors.

    Yields:
        The `Container`. An `ArtefactError` that the block raises gets the path of the file.

    Raises:
        ArtefactError: the file is damaged, or none of ours.
        OSError: it is not there or may not be read.
    """
    with Container(path, descriptor) as container, _named(container.path):
        if check:
            container.check()
        yield container


class Container:
    """The members of an open file, each checked before it is handed out.

    The contents are those of the file, mapped into memory: nothing is copied. A file that is
    replaced (`write_container`, ``mv``) does not touch an open one; whoever writes *into* an open
    file changes what was checked, and shortening one ends the process (SIGBUS).

    Attributes:
        path: the file.
        manifest: the document ``manifest.json``. The members are checked to be those it lists;
            the rest is as it was read.
        size: bytes of the file.
    """

    def __init__(self, path: str | os.PathLike[str], descriptor: int | None = None):
        self.path = os.fspath(path)
        self._checked: set[str] = set()
        self._view = memoryview(b"")
        self._map: mmap.mmap | None = None
        with _named(self.path):
            self._map, self._view = map_file(self.path if descriptor is None else descriptor)
            self.size = len(self._view)
            try:
                self._entries, self.manifest = _read(self._view)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        """The names of the members, without the manifest, in their order in the file."""
        return (name for name in self._entries if name != MANIFEST)

    def member(self, name: str) -> memoryview:
        """The contents of a member, u8[length], read-only; beginning at a multiple of 64 bytes.

        They stay readable for as long as anything refers to them, also after `close`.

        Raises:
            ArtefactError: there is no such member, or its SHA-256 is not that of the manifest.
        """
        with _named(self.path):
            if name not in self._entries:
                raise ArtefactError(name, "the file has no such member")
            entry = self._entries[name]
            contents = self._view[entry.start : entry.end]
            if name not in self._checked and name != MANIFEST:
                found, listed = _digest(contents), self.manifest["members"][name]["sha256"]
                if found != listed:
                    raise ArtefactError(
                        name,
                        f"its contents were changed: their SHA-256 is {found}, the manifest "
                        f"says {listed}",
                    )
                self._checked.add(name)
            return contents

    def length(self, name: str) -> int:
        """How many bytes a member has; it need not have been checked."""
        return self._entries[name].length

    def check(self) -> None:
        """Compares the SHA-256 of every member, once.

        Raises:
            ArtefactError: one differs.
        """
        for name in self:
            self.member(name)

    def check_crc(self) -> None:
        """Compares the CRC-32 of every member, which other ZIP programs go by.

        Raises:
            ArtefactError: one differs: such a program would call the file damaged.
        """
        with _named(self.path):
            for name, entry in self._entries.items():
                if _crc(self._view[entry.start : entry.end]) != entry.crc:
                    raise ArtefactError(name, "its CRC-32 in the directory is wrong")

    def close(self) -> None:
        """Lets go of the file; contents that were handed out keep their part in memory."""
        self._view = memoryview(b"")
        self._entries = {}
        if self._map is not None:
            with contextlib.suppress(BufferError):  # somebody has contents: then they do
                self._map.close()
            self._map = None


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Adds the path to errors."""
    try:
        yield
    except ArtefactError as error:
        if error.path is not None:
            raise
        raise ArtefactError(error.member, error.reason, path) from None


def _check_before_writing(members: Mapping[str, Contents], manifest: Mapping[str, Any]) -> None:
    for name in members:
        if (why := records.why_no_name(name)) is not None:
            raise ValueError(f"a member cannot be called {name!r}: {why}")
    if MANIFEST in members:
        raise ValueError(f"{MANIFEST!r} is written from `manifest`, it cannot be a member too")
    if len(members) >= records.MOST_MEMBERS:
        raise ValueError(f"{len(members)} members; at most {records.MOST_MEMBERS - 1} fit")
    if "members" in manifest or manifest.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise ValueError("`members` and `format_version` of the manifest are not the caller's")
    documents.write(dict(manifest))


def _write_member(
    file: BinaryIO, name: str, contents: Contents, digest: hashlib._Hash
) -> records.Entry:
    """Writes a member at the end of the file; its header last, when its length is known."""
    offset = file.tell()
    blank = records.Entry(name, 0, 0, offset)
    file.write(bytes(blank.start - offset))
    length = crc = 0
    with ThreadPoolExecutor(1) as beside:  # the checksum takes as long as all the rest
        for piece in (contents,) if isinstance(contents, bytes | memoryview) else contents:
            view = memoryview(piece)
            if view.nbytes == 0:  # which `cast` does not take
                continue
            flat = view.cast("B")
            for part in _pieces(flat):
                hashed = beside.submit(digest.update, part)
                crc = zlib.crc32(part, crc)
                file.write(part)
                hashed.result()
            length += len(flat)
    end = file.tell()
    entry = records.Entry(name, length, crc, offset)
    file.seek(offset)
    file.write(records.local_header(entry))
    file.seek(end)
    return entry


def open_file(path: str | os.PathLike[str]) -> int:
    """A descriptor of the file, to read; of a pipe too, without waiting for who writes to it."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))


def map_file(path: str | int) -> tuple[mmap.mmap, memoryview]:
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
        mapped = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    return mapped, memoryview(mapped)


def _read(view: memoryview) -> tuple[dict[str, records.Entry], dict[str, Any]]:
    """The members and the manifest of a file, after checking both."""
    seal = records.read_seal(view)
    if seal.version != FORMAT_VERSION:
        raise ArtefactError(
            "file",
            f"it has version {seal.version} of the format, this tracegrad reads version "
            f"{FORMAT_VERSION}: read it with a newer one",
        )
    sealed = len(view) - records.SEAL_SIZE - seal.length
    if sealed < 0 or seal.length < records.END_SIZE:
        raise ArtefactError(
            "end record",
            f"manifest and directory are declared to have {seal.length} bytes of the file's "
            f"{len(view)}: it is cut off, or the number was changed",
        )
    found = _digest(view[sealed : -records.SEAL_SIZE])
    if found != seal.digest:
        raise ArtefactError(
            "directory",
            "manifest and directory were changed, or bytes are missing or were added: their "
            f"SHA-256 is {found}, the end of the file says {seal.digest}",
        )
    entries = {entry.name: entry for entry in records.read_directory(view)}
    *others, last = entries.values()
    if last.name != MANIFEST or last.offset != sealed:
        raise ArtefactError(MANIFEST, "it is missing, or not the last member of the file")
    if last.length > MOST_MANIFEST:
        raise ArtefactError(MANIFEST, f"it has {last.length} bytes, at most {MOST_MANIFEST} may be")
    manifest = documents.read(view[last.start : last.end], MANIFEST, most=2 * len(view))
    _compare_members(others, manifest)
    return entries, manifest


def _compare_members(entries: list[records.Entry], manifest: dict[str, Any]) -> None:
    """The members of the file are those of the manifest, in its order and of its lengths."""
    for key in ("format_version", "members"):
        if key not in manifest:
            raise ArtefactError(MANIFEST, f"it lacks the key {key!r}")
    version = documents.one_of(FORMAT_VERSION)
    documents.check(manifest["format_version"], version, MANIFEST, "format_version")
    listed = manifest["members"]
    documents.check(listed, _MEMBERS, MANIFEST, "members")
    for name in listed.keys() - {entry.name for entry in entries}:
        raise ArtefactError(name, "the manifest lists it, the file does not have it")
    for entry in entries:
        if entry.name not in listed:
            raise ArtefactError(entry.name, "the manifest does not list it")
        if entry.length != listed[entry.name]["length"]:
            raise ArtefactError(
                entry.name,
                f"it has {entry.length} bytes, the manifest says {listed[entry.name]['length']}",
            )
    if list(listed) != [entry.name for entry in entries]:
        raise ArtefactError(MANIFEST, "it lists the members in another order than the file's")


def _pieces(view: memoryview) -> Iterator[memoryview]:
    return (view[i : i + _PIECE] for i in range(0, len(view), _PIECE))


def _digest(view: memoryview) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(view):
        digest.update(piece)
    return digest.hexdigest()


def _crc(view: memoryview) -> int:
    crc = 0
    for piece in _pieces(view):
        crc = zlib.crc32(piece, crc)
    return crc
