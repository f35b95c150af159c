"""The bytes of the container: which records of the ZIP format an artefact has, and what is in them.

An artefact is a ZIP file (PKWARE's APPNOTE 6.3) of which every byte is determined by the names and
the contents of its members: they lie one after another, uncompressed, each beginning at a multiple
of 64 bytes, without time stamps, comments or attributes. So a reader need not trust any field: it
compares all of them with those that it would have written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tracegrad.saving.errors import ArtefactError

ALIGNMENT = 64  # what XLA wants of a buffer that it shall use in place, and what suits SIMD loads
MOST_MEMBERS = 0xFFFE
LARGEST_32 = 0xFFFFFFFF  # says that the number stands in the ZIP64 field instead

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_SIZES_64 = struct.Struct("<2H2Q")
_OFFSET_64 = struct.Struct("<2HQ")

_PLAIN, _ZIP64 = 20, 45  # versions of the format: 2.0, and 4.5 for sizes beyond 4 GiB
_MADE_BY = 3 << 8 | _ZIP64  # Unix, so that the next one means permissions
_PERMISSIONS = 0o100644 << 16
_DATE = 1 << 5 | 1  # 1 January 1980, the first that there is: equal contents make equal files

# The extra field that `zipalign` uses for the same: an alignment, then zeros. APPNOTE 4.5.2.
_ALIGNMENT_FIELD = 0xD935
_ALIGNMENT_HEADER = struct.Struct("<3H")
_LEAST_EXTRA = _ALIGNMENT_HEADER.size + _SIZES_64.size  # so that sizes may turn out to be large

_SEAL = "tracegrad artefact {version:04d} {length:016x} {digest}"
_SEAL_PATTERN = re.compile(rb"tracegrad artefact (\d{4}) ([0-9a-f]{16}) ([0-9a-f]{64})")
SEAL_SIZE = len(_SEAL.format(version=0, length=0, digest="0" * 64))
END_SIZE = _END.size

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\-]*(/[A-Za-z0-9_][A-Za-z0-9_.+\-]*)*")
_LONGEST_NAME = 1024


@dataclass(frozen=True)
class Entry:
    """What the directory says of one member: name, length and offset of its header in bytes."""

    name: str
    length: int
    crc: int
    offset: int

    @property
    def start(self) -> int:
        """Where the contents begin."""
        return self.offset + _LOCAL.size + len(self.name) + extra_length(self.name, self.offset)

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Seal:
    """What the comment at the end of the file says: how much of it the checksum covers.

    That is the manifest, the directory and the end record: `length` bytes before the comment.
    """

    version: int
    length: int
    digest: str


def extra_length(name: str, offset: int) -> int:
    """How long the extra field is that puts the contents at a multiple of `ALIGNMENT`."""
    least = offset + _LOCAL.size + len(name) + _LEAST_EXTRA
    return _LEAST_EXTRA + -least % ALIGNMENT


def why_no_name(name: str) -> str | None:
    """Why a member may not be called `name`; None if it may.

    Only names that are the same on every system and stay below the folder that somebody unpacks
    the file into.
    """
    if len(name) > _LONGEST_NAME:
        return f"the name has {len(name)} characters, at most {_LONGEST_NAME} are allowed"
    if not _NAME.fullmatch(name):
        return (
            "the name is not made of ASCII letters, digits and _ . + -, with / between parts that "
            "begin with a letter, a digit or _: it could lead out of a folder"
        )
    return None


def local_header(entry: Entry) -> bytes:
    """The header in front of a member's contents."""
    size, needed, extra = entry.length, _PLAIN, b""
    if entry.length >= LARGEST_32:
        size, needed = LARGEST_32, _ZIP64
        extra = _SIZES_64.pack(1, _SIZES_64.size - 4, entry.length, entry.length)
    left = extra_length(entry.name, entry.offset) - len(extra)
    padding = _ALIGNMENT_HEADER.pack(_ALIGNMENT_FIELD, left - 4, ALIGNMENT).ljust(left, b"\0")
    name = entry.name.encode("ascii")
    fields = (needed, 0, 0, 0, _DATE, entry.crc, size, size, len(name), len(extra) + left)
    return _LOCAL.pack(b"PK\3\4", *fields) + name + extra + padding


def directory_record(entry: Entry) -> bytes:
    """The directory's record of a member."""
    size, offset, extra = entry.length, entry.offset, b""
    if entry.length >= LARGEST_32:
        size = LARGEST_32
        extra += struct.pack("<2Q", entry.length, entry.length)
    if entry.offset >= LARGEST_32:
        offset = LARGEST_32
        extra += struct.pack("<Q", entry.offset)
    if extra:
        extra = struct.pack("<2H", 1, len(extra)) + extra
    needed = _ZIP64 if extra else _PLAIN
    name = entry.name.encode("ascii")
    head = (_MADE_BY, needed, 0, 0, 0, _DATE, entry.crc, size, size, len(name), len(extra))
    return _CENTRAL.pack(b"PK\1\2", *head, 0, 0, 0, _PERMISSIONS, offset) + name + extra


def end_records(entries: Sequence[Entry], start: int, size: int) -> bytes:
    """What follows the directory of `size` bytes at `start`, up to where the comment begins."""
    count, records, shown = len(entries), b"", start
    if max(start, size) >= LARGEST_32:
        shown, size_shown = LARGEST_32, min(size, LARGEST_32)
        where = start + size
        numbers = (_END_64.size - 12, _MADE_BY, _ZIP64, 0, 0, count, count, size, start)
        records = _END_64.pack(b"PK\6\6", *numbers) + _LOCATOR.pack(b"PK\6\7", 0, where, 1)
        size = size_shown
    return records + _END.pack(b"PK\5\6", 0, 0, count, count, size, shown, SEAL_SIZE)


def seal_comment(seal: Seal) -> bytes:
    """The comment at the end of the file."""
    text = _SEAL.format(version=seal.version, length=seal.length, digest=seal.digest)
    return text.encode("ascii")


def read_seal(view: memoryview) -> Seal:
    """Reads the comment at the end of the file `view`; no other byte of it."""
    if len(view) < END_SIZE + SEAL_SIZE:
        raise ArtefactError(
            "file", f"it has {len(view)} bytes, fewer than any artefact: it is cut off or another's"
        )
    match = _SEAL_PATTERN.fullmatch(view[-SEAL_SIZE:])
    if match is None:
        raise ArtefactError(
            "end record",
            "the file does not end with the comment that tracegrad.save writes: it is cut off, "
            "something was appended or changed, or another program wrote it (a ZIP program that "
            "packs an artefact anew drops the checksums)",
        )
    version, length, digest = (group.decode("ascii") for group in match.groups())
    return Seal(int(version), int(length, 16), digest)


def read_directory(view: memoryview) -> list[Entry]:
    """The entries of the file's directory, after comparing all that is around the members.

    Args:
        view: the file.

    Returns:
        The members in their order, contiguous from the first byte of the file to the directory,
        each at a multiple of 64 bytes, not compressed, with different safe names.

    Raises:
        ArtefactError: any of this does not hold.
    """
    count, start, size = _read_end(view)
    if count > MOST_MEMBERS:
        raise ArtefactError("end record", f"{count} members are declared, {MOST_MEMBERS} at most")
    entries: list[Entry] = []
    names: set[str] = set()
    for entry in _read_records(view[start : start + size], count):
        expected = entries[-1].end if entries else 0
        if entry.name in names:
            raise ArtefactError(entry.name, "there are two members of this name")
        if entry.offset < expected:
            raise ArtefactError(entry.name, "it overlaps the member before it")
        if entry.offset > expected:
            gap = entry.offset - expected
            raise ArtefactError(entry.name, f"there are {gap} bytes before it of no member")
        if entry.end > start:
            raise ArtefactError(
                entry.name,
                f"it is declared to have {entry.length} bytes and would reach beyond the directory",
            )
        _compare_local(view, entry)
        entries.append(entry)
        names.add(entry.name)
    if not entries or entries[-1].end != start:
        raise ArtefactError("directory", "there are bytes before it of no member")
    if view[start + size :] != end_records(entries, start, size) + view[-SEAL_SIZE:].tobytes():
        raise ArtefactError("end record", "a field of it is not what the directory makes it")
    for name in names:
        folder, slash, _ = name.rpartition("/")
        while slash:
            if folder in names:
                raise ArtefactError(folder, f"it is a member and the folder of {name!r}")
            folder, slash, _ = folder.rpartition("/")
    return entries


def _read_end(view: memoryview) -> tuple[int, int, int]:
    """How many records the directory has, where it is and how long; nothing is believed yet."""
    position = len(view) - SEAL_SIZE - END_SIZE
    mark, disk, first, here, count, size, start, comment = _END.unpack_from(view, position)
    if mark != b"PK\5\6" or comment != SEAL_SIZE:
        raise ArtefactError("end record", "it is not where the end of a ZIP file has it")
    if disk or first or here != count:
        raise ArtefactError("end record", "it is that of a file in several parts")
    if start == LARGEST_32 or size == LARGEST_32:
        position -= _END_64.size + _LOCATOR.size
        if position < 0:
            raise ArtefactError("end record", "the one for large files is missing")
        numbers = _END_64.unpack_from(view, position)
        if numbers[0] != b"PK\6\6":
            raise ArtefactError("end record", "the one for large files is missing")
        size, start = numbers[-2:]
    if start + size != position:
        raise ArtefactError(
            "end record",
            f"the directory is declared to have {size} bytes at {start}, which is not where it "
            f"can be: it ends at {position}",
        )
    return count, start, size


def _read_records(directory: memoryview, count: int) -> Iterator[Entry]:
    """One entry after another: each is checked before the next is looked at."""
    position = 0
    for number in range(count):
        if position + _CENTRAL.size > len(directory):
            raise ArtefactError("directory", f"it has {number} records where {count} are declared")
        fields = _CENTRAL.unpack_from(directory, position)
        mark, _, _, flags, method, _, _, crc, packed, length, names, extras, comments, *rest = (
            fields
        )
        offset = rest[-1]
        if mark != b"PK\1\2":
            raise ArtefactError("directory", f"record {number} does not begin as one")
        end = position + _CENTRAL.size + names + extras + comments
        if end > len(directory):
            raise ArtefactError("directory", f"record {number} reaches beyond the directory")
        after_name = position + _CENTRAL.size + names
        raw = directory[position + _CENTRAL.size : after_name].tobytes()
        name = raw.decode("ascii", "backslashreplace")
        if (why := why_no_name(name)) is not None:
            raise ArtefactError(name or "directory", why)
        if flags & 1:
            raise ArtefactError(name, "it is encrypted")
        if method != 0 or packed != length:
            raise ArtefactError(
                name,
                f"it is compressed (method {method}, {packed} bytes for {length}); the members of "
                "an artefact never are",
            )
        extra = directory[after_name : after_name + extras]
        length, offset = _large_numbers(name, extra, length, offset)
        entry = Entry(name, length, crc, offset)
        if directory[position:end] != directory_record(entry):
            raise ArtefactError(
                name, "a field of its directory record is not what tracegrad.save writes"
            )
        yield entry
        position = end
    if position != len(directory):
        raise ArtefactError("directory", f"it has more than the {count} records declared")


def _large_numbers(name: str, extra: memoryview, length: int, offset: int) -> tuple[int, int]:
    """Length and offset, from the ZIP64 field if the record refers to it."""
    wanted = 2 * (length == LARGEST_32) + (offset == LARGEST_32)
    if not wanted:
        return length, offset
    if len(extra) != 4 + 8 * wanted:
        raise ArtefactError(name, "its sizes are missing from the directory's field for large ones")
    numbers = struct.unpack_from(f"<{wanted}Q", extra, 4)
    return (
        numbers[0] if length == LARGEST_32 else length,
        numbers[-1] if offset == LARGEST_32 else offset,
    )


def _compare_local(view: memoryview, entry: Entry) -> None:
    """The header in front of the contents says what the directory says; else some ZIP programs
    would unpack something else than was checked."""
    found = view[entry.offset : entry.start]
    expected = local_header(entry)
    if found == expected:
        return
    if found[:4].tobytes() != b"PK\3\4":
        raise ArtefactError(entry.name, "there is no header where the directory says that it is")
    there, ours = _LOCAL.unpack_from(found), _LOCAL.unpack_from(expected)
    what = ["mark", "version", "flags", "method", "time", "date", "CRC-32"]
    what += ["packed length", "length", "length of the name", "length of the extra field"]
    for field, here, wanted in zip(what, there, ours, strict=True):
        if here != wanted:
            reason = f"its header has the {field} {here}, by the directory it should be {wanted}"
            raise ArtefactError(entry.name, reason)
    if found[_LOCAL.size : _LOCAL.size + there[9]] != entry.name.encode("ascii"):
        raise ArtefactError(entry.name, "its header has another name than the directory")
    raise ArtefactError(entry.name, "the padding in front of it is not what tracegrad.save writes")
