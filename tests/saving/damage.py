"""Damages artefacts in every way that was thought of, and reads them: a program and its parts.

``python damage.py FILE COUNT SEED`` reads COUNT damaged copies of FILE in this process and prints,
as JSON, how many of each kind there were and what went wrong. It runs in a process of its own, so
that a crash is seen, memory can be limited, and what it opens for writing can be watched.

Half of the damage is what disks and networks do: bytes are lost, changed, moved. The other half has
valid checksums, as a program would make that writes such files wrongly or means harm: for that,
`forge` writes the format a second time, after ``docs/artefact.md``, and any field can be wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import struct
import sys
import tempfile
import tracemalloc
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SEAL = 105  # bytes of the comment at the end
PART_OF_ALL = {"file", "end record", "directory", "manifest.json"}
SLACK = 256 << 10  # bytes that Python itself may use to read the smallest file
FOR_TEXT = 16 << 20  # bytes that the objects of a JSON text may take in a file that is smaller
ROOM = 256 << 20  # bytes of address space beyond twice the file's


@dataclass(frozen=True)
class Member:
    """A member to write; `local` and `central` are fields of its records that shall be wrong."""

    name: bytes
    data: bytes
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)
    gap: int = 0  # bytes of nothing before it
    at: int | None = None  # the number of the member whose place in the file it has


@dataclass(frozen=True)
class Artefact:
    """An undamaged file, taken apart by `zipfile`."""

    raw: bytes
    members: tuple[Member, ...]
    manifest: dict[str, Any]

    def offsets(self) -> dict[str, tuple[int, int, int]]:
        """Where each member's header, contents and end are; of the manifest too."""
        found = {}
        offset = 0
        for member in (*self.members, Member(b"manifest.json", as_json(self.manifest))):
            start = offset + 30 + len(member.name) + extra_length(member.name, offset)
            found[member.name.decode()] = (offset, start, start + len(member.data))
            offset = start + len(member.data)
        return found


def take_apart(path: Path) -> Artefact:
    with zipfile.ZipFile(path) as archive:
        *names, manifest = archive.namelist()
        members = tuple(Member(name.encode(), archive.read(name)) for name in names)
        return Artefact(path.read_bytes(), members, json.loads(archive.read(manifest)))


# ------------------------------------------------------------------------- the format once more


def as_json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, indent=2).encode()


def extra_length(name: bytes, offset: int) -> int:
    return 26 + -(offset + 30 + len(name) + 26) % 64


def local_header(member: Member, offset: int) -> bytes:
    extra = extra_length(member.name, offset)
    known = {"mark": b"PK\3\4", "version": 20, "flags": 0, "method": 0, "time": 0, "date": 33}
    known |= {"crc": zlib.crc32(member.data), "packed": len(member.data)}
    known |= {"length": len(member.data), "names": len(member.name), "extras": extra}
    known |= {"name": member.name, "padding": 0} | member.local
    *numbers, name, padding = known.values()
    header = struct.pack("<4s5H3L2H", *numbers) + name
    field_ = struct.pack("<3H", 0xD935, extra - 4, 64).ljust(extra, bytes([padding]))
    return header + field_


def central_record(member: Member, offset: int) -> bytes:
    known = {"mark": b"PK\1\2", "made": 0x32D, "version": 20, "flags": 0, "method": 0, "time": 0}
    known |= {"date": 33, "crc": zlib.crc32(member.data), "packed": len(member.data)}
    known |= {"length": len(member.data), "names": len(member.name), "extras": 0, "comments": 0}
    known |= {"disk": 0, "internal": 0, "external": 0o100644 << 16, "offset": offset}
    known |= {"name": member.name, "extra": b""} | member.central
    *numbers, name, extra = known.values()
    return struct.pack("<4s6H3L5H2L", *numbers) + name + extra


def listed(members: tuple[Member, ...]) -> dict[str, dict[str, Any]]:
    return {
        member.name.decode("utf-8", "replace"): {
            "length": len(member.data),
            "sha256": hashlib.sha256(member.data).hexdigest(),
        }
        for member in members
    }


def forge(
    members: tuple[Member, ...],
    manifest: dict[str, Any] | bytes | Member,
    *,
    end: dict[str, Any] | None = None,
    lead: bytes = b"",
) -> bytes:
    """A file of these members with a valid seal; right if nothing in the arguments is wrong."""
    if isinstance(manifest, dict):
        manifest = as_json(manifest)
    if isinstance(manifest, bytes):
        manifest = Member(b"manifest.json", manifest)
    out, central, offsets = bytearray(lead), b"", []
    for member in (*members, manifest):
        if member.at is None:
            out += bytes(member.gap)
            offsets.append(len(out))
            out += local_header(member, len(out)) + member.data
        else:
            offsets.append(offsets[member.at])
        central += central_record(member, offsets[-1])
    start = len(out)
    known = {"mark": b"PK\5\6", "disk": 0, "first": 0, "here": len(offsets)}
    known |= {"count": len(offsets), "size": len(central), "start": start, "comment": SEAL}
    out += central + struct.pack("<4s4H2LH", *(known | (end or {})).values())
    return sealed(bytes(out), len(out) - offsets[-1])


def sealed(data: bytes, length: int) -> bytes:
    digest = hashlib.sha256(data[-length:]).hexdigest()
    return data + f"tracegrad artefact 0001 {length:016x} {digest}".encode()


def sealed_again(raw: bytes) -> bytes:
    """With the seal that the changed manifest, directory and end record ought to have."""
    length = int(raw[-SEAL:][24:40], 16)
    return sealed(raw[:-SEAL], length)


def with_members(artefact: Artefact, *members: Member, **more: Any) -> bytes:
    """Of these members instead, in the manifest too, so that no checksum tells."""
    return forge(members, artefact.manifest | {"members": listed(members)}, **more)


def changed(artefact: Artefact, number: int, **what: Any) -> tuple[Member, ...]:
    members = list(artefact.members)
    members[number] = replace(members[number], **what)
    return tuple(members)


# ------------------------------------------------------------------- what happens on disks

Damaged = tuple[bytes, set[str]]
"""A file, and which members the error may name; empty if any."""
Damage = Callable[[random.Random, Artefact], Damaged]


def span(random: random.Random, raw: bytes) -> tuple[int, int]:
    first, last = sorted(random.sample(range(len(raw) + 1), 2))
    return first, min(last, first + random.choice([1, 8, 64, 512, len(raw)]))


def named_at(artefact: Artefact, position: int) -> set[str]:
    """Whose byte it is."""
    for name, (offset, _, end) in artefact.offsets().items():
        if offset <= position < end and name != "manifest.json":
            return {name}
    return PART_OF_ALL


def truncated(random: random.Random, artefact: Artefact) -> Damaged:
    near = random.randrange(min(300, len(artefact.raw)))
    keep = random.choice([random.randrange(len(artefact.raw)), near, len(artefact.raw) - near - 1])
    return artefact.raw[:keep], PART_OF_ALL


def bits_flipped(random: random.Random, artefact: Artefact) -> Damaged:
    data = bytearray(artefact.raw)
    places = [at for span in artefact.offsets().values() for at in range(span[0], span[1])]
    tail = range(artefact.offsets()["manifest.json"][0], len(data))
    names: set[str] = set()
    for bit in random.sample(range(8), random.choice([1, 1, 1, 2, 3])):
        at = random.choice(
            [random.randrange(len(data)), random.choice(places), random.choice(tail)]
        )
        data[at] ^= 1 << bit
        names |= named_at(artefact, at)
    return bytes(data), names


def overwritten(random: random.Random, artefact: Artefact) -> Damaged:
    first, last = span(random, artefact.raw)
    new = random.choice([bytes, random.randbytes, lambda n: b"\xff" * n])(last - first)
    return artefact.raw[:first] + new + artefact.raw[last:], set()


def cut_out(random: random.Random, artefact: Artefact) -> Damaged:
    first, last = span(random, artefact.raw)
    return artefact.raw[:first] + artefact.raw[last:], set()


def doubled(random: random.Random, artefact: Artefact) -> Damaged:
    first, last = span(random, artefact.raw)
    return artefact.raw[:last] + artefact.raw[first:], set()


def moved(random: random.Random, artefact: Artefact) -> Damaged:
    a, b, c = sorted(random.sample(range(len(artefact.raw) + 1), 3))
    raw = artefact.raw
    return raw[:a] + raw[b:c] + raw[a:b] + raw[c:], set()


def more_bytes(random: random.Random, artefact: Artefact) -> Damaged:
    more = random.choice([random.randbytes(random.randrange(1, 400)), artefact.raw, b"\n", b"\0"])
    return random.choice([more + artefact.raw, artefact.raw + more]), PART_OF_ALL


def packed_anew(random: random.Random, artefact: Artefact) -> Damaged:
    path = Path(f"anew-{random.random()}")
    compression = random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(path, "w", compression) as archive:
        for member in artefact.members:
            archive.writestr(member.name.decode(), member.data)
        archive.writestr("manifest.json", as_json(artefact.manifest))
        if random.random() < 0.5:
            archive.comment = artefact.raw[-SEAL:]
    data = path.read_bytes()
    path.unlink()
    return data, set()


def field_of_header_changed(random: random.Random, artefact: Artefact) -> Damaged:
    name, (offset, start, _) = random.choice(list(artefact.offsets().items()))
    at = random.randrange(offset, start)
    data = bytearray(artefact.raw)
    data[at : at + 4] = random.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", random.randbytes(4)])
    return sealed_again(bytes(data)), {name} if at + 4 <= start else set()


def field_of_directory_changed(random: random.Random, artefact: Artefact) -> Damaged:
    first = artefact.offsets()["manifest.json"][2]
    at = random.randrange(first, len(artefact.raw) - SEAL - 4)
    data = bytearray(artefact.raw)
    size = random.choice([1, 2, 4])
    data[at : at + size] = random.choice([bytes(size), b"\xff" * size, random.randbytes(size)])
    return sealed_again(bytes(data)), set()


def seal_changed(random: random.Random, artefact: Artefact) -> Damaged:
    data = bytearray(artefact.raw)
    at = len(data) - random.randrange(1, SEAL + 1)
    data[at : at + 16] = random.choice([b"0", b"f", b" ", b"-", b"\0"]) * 16
    return bytes(data[: len(artefact.raw)]), PART_OF_ALL


# ------------------------------------------------------------ with valid checksums nevertheless


def members_swapped(random: random.Random, artefact: Artefact) -> Damaged:
    a, b = random.sample(range(len(artefact.members)), 2)
    members = list(artefact.members)
    if random.random() < 0.5:  # their contents
        one, other = members[a], members[b]
        members[a], members[b] = replace(one, data=other.data), replace(other, data=one.data)
        return forge(tuple(members), artefact.manifest), {one.name.decode(), other.name.decode()}
    members[a], members[b] = members[b], members[a]  # their places
    return forge(tuple(members), artefact.manifest), {"manifest.json"}


def member_twice(random: random.Random, artefact: Artefact) -> Damaged:
    twice = random.choice(artefact.members)
    if random.random() < 0.5:
        twice = replace(twice, data=random.randbytes(len(twice.data)))
    members = list(artefact.members)
    members.insert(random.randrange(len(members) + 1), twice)
    manifest = artefact.manifest
    if random.random() < 0.3:  # the manifest twice
        return forge((*artefact.members, Member(b"manifest.json", b"{}")), manifest), set()
    return forge(tuple(members), manifest), {twice.name.decode()}


def member_missing(random: random.Random, artefact: Artefact) -> Damaged:
    gone = random.choice(artefact.members)
    rest = tuple(member for member in artefact.members if member is not gone)
    if random.random() < 0.3:  # from the manifest's list too
        return with_members(artefact, *rest), {gone.name.decode(), "manifest.json"}
    return forge(rest, artefact.manifest), {gone.name.decode()}


def member_too_many(random: random.Random, artefact: Artefact) -> Damaged:
    extra = Member(random.choice([b"extra", b"__init__.py", b"a/b/c"]), random.randbytes(9))
    return forge((*artefact.members, extra), artefact.manifest), {extra.name.decode()}


def renamed(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(len(artefact.members))
    old = artefact.members[number].name
    names = [b"../" + old, b"/tmp/" + old, b"..", b"a/../../" + old, b"..\\" + old, b"C:\\" + old]
    names += [b"./" + old, b"", old + b"/", old + b"\0.txt", old + b"\xff", b"~/" + old]
    names += [b"//host/" + old, b"con\n", b"\x1b[2J", old[:-1], old.upper(), b"x" * 5000]
    new = random.choice(names)
    return with_members(artefact, *changed(artefact, number, name=new)), set()


def names_differ(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(len(artefact.members))
    name = artefact.members[number].name
    other = random.choice([b"../" + name[3:], name[:-1] + b"_", name.swapcase()])
    where = random.choice(["local", "central"])
    members = changed(artefact, number, **{where: {"name": other}})
    return with_members(artefact, *members), set()


def bomb(random: random.Random, artefact: Artefact) -> Damaged:
    """A megabyte of file that would be a gigabyte in memory, or a few bytes that declare it."""
    number = random.randrange(len(artefact.members))
    size = random.choice([1 << 16, 1 << 20, 1 << 24])
    packer = zlib.compressobj(wbits=-15)
    data = packer.compress(bytes(size)) + packer.flush()
    fields = {
        "method": 8,
        "packed": len(data),
        "length": random.choice([size, 1 << 30, 0xFFFFFFFE]),
    }
    fields["crc"] = zlib.crc32(bytes(size))
    name = artefact.members[number].name.decode()
    members = changed(artefact, number, data=data, local=fields, central=fields)
    return with_members(artefact, *members), {name}


def bomb_of_text(random: random.Random, artefact: Artefact) -> Damaged:
    """JSON of few bytes and many objects, or deeper than any reader can follow."""
    unit, opened = random.choice(
        [(b"{},", b"["), (b"[],", b"["), (b'{"a":{}},', b"["), (b"[", b"")]
    )
    count = random.choice([10, 1000, 50_000, 100_000])
    text = b'{"members":{},"x":' + opened + unit * count + b"0]}"
    return forge(artefact.members, text), {"manifest.json"}


def lengths_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(len(artefact.members))
    name, right = artefact.members[number].name.decode(), len(artefact.members[number].data)
    wrong = random.choice([right + 1, right - 1, 0, right + 64, 2**31, 2**32 - 2, 2**32 - 1])
    wrong = max(0, wrong) if wrong != right else right + 1
    how = random.randrange(4)
    if how == 0:
        manifest = json.loads(as_json(artefact.manifest))
        manifest["members"][name]["length"] = random.choice([wrong, 2**63, 2**80, -1])
        return forge(artefact.members, manifest), {name, "manifest.json"}
    fields = {"length": wrong, "packed": wrong}
    both = [{"central": fields}, {"local": fields}, {"central": fields, "local": fields}][how - 1]
    return with_members(artefact, *changed(artefact, number, **both)), set()


def overlapping(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(1, len(artefact.members))
    members = changed(artefact, number, at=random.randrange(number))
    return with_members(artefact, *members), set()


def gap_between(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(len(artefact.members))
    size = random.choice([1, 64, 4096])
    return with_members(artefact, *changed(artefact, number, gap=size)), set()


def leading_bytes(random: random.Random, artefact: Artefact) -> Damaged:
    lead = random.choice([b"#!/bin/sh\n", b"MZ" + bytes(62), random.randbytes(64)])
    return with_members(artefact, *artefact.members, lead=lead), set()


def field_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(len(artefact.members))
    fields = {"flags": [1, 8, 0x800, 0xFFFF], "method": [1, 8, 12, 14, 99], "version": [0, 45, 63]}
    fields |= {"time": [1], "date": [0, 0xFFFF], "crc": [0, 0xFFFFFFFF], "mark": [b"PK\7\x08"]}
    what = random.choice(list(fields))
    value = {what: random.choice(fields[what])}
    where = random.choice(
        [{"local": value}, {"central": value}, {"local": value, "central": value}]
    )
    if what == "crc" and len(where) == 2:  # equal in both: only other ZIP programs would notice
        where = {"local": value}
    return with_members(artefact, *changed(artefact, number, **where)), set()


def attribute_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(len(artefact.members))
    name = artefact.members[number].name.decode()
    beyond = struct.pack("<2H2Q", 1, 16, 2**62, 2**62)
    values: list[dict[str, Any]] = [{"external": 0o120777 << 16}]  # a link
    values += [{"made": 0}, {"internal": 1}, {"disk": 1}, {"comments": 1}, {"padding": 1}]
    values += [{"extras": len(beyond), "extra": beyond}, {"offset": 0xFFFFFFFF}, {"offset": 2**31}]
    value = random.choice(values)
    if "padding" in value:
        return with_members(artefact, *changed(artefact, number, local=value)), {name}
    return with_members(artefact, *changed(artefact, number, central=value)), set()


def end_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    count = len(artefact.members) + 1
    values = {"count": [0, 1, 0xFFFF], "here": [0, 0xFFFF], "size": [0, 1, 2**32 - 1], "disk": [1]}
    values |= {"start": [0, 1, 2**31, 2**32 - 1], "first": [1], "comment": [0, 0xFFFF]}
    what = random.choice(list(values))
    end = {what: random.choice(values[what])}
    if what in ("count", "here") and random.random() < 0.5:
        end = {"count": count + 1, "here": count + 1}
    return with_members(artefact, *artefact.members, end=end), PART_OF_ALL


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a document each value stands."""
    found = [path]
    if isinstance(value, dict):
        found += [place for key, item in value.items() for place in paths_in(item, (*path, key))]
    if isinstance(value, list):
        found += [place for i, item in enumerate(value) for place in paths_in(item, (*path, i))]
    return found


def types_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """One value of the manifest is of another type."""
    manifest = json.loads(as_json(artefact.manifest))
    paths = paths_in(manifest)[1:]
    # Two types are right, and mean different things, for the key of a dictionary (a string, an
    # integer) and for the program that is run when another is differentiated (null: that one).
    path = random.choice([p for p in paths if p[-3::2] != ("dict", 0) and p[-1] != "value"])
    parent = manifest
    for key in path[:-1]:
        parent = parent[key]
    old = parent[path[-1]]
    values = ["x", 7, -1, 2.5, True, None, [], {}, [[]], {"a": {}}, 1e300, 10**30, ""]
    parent[path[-1]] = random.choice([value for value in values if type(value) is not type(old)])
    return forge(artefact.members, manifest), set()


def keys_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """A key of the manifest is missing, or one is there that nobody knows."""
    manifest = json.loads(as_json(artefact.manifest))
    objects = [manifest]
    for path in paths_in(manifest)[1:]:
        value: Any = manifest
        for key in path:
            value = value[key]
        if isinstance(value, dict) and value:
            objects.append(value)
    where = random.choice(objects)
    if random.random() < 0.5:
        del where[random.choice(list(where))]
    else:
        where["unknown"] = random.choice([1, "x", {}, None])
    return forge(artefact.members, manifest), set()


def text_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """The manifest is not the JSON that it should be."""
    text = as_json(artefact.manifest)
    texts = [b"", b"{}", b"[]", b"null", b"\xef\xbb\xbf" + text, text[:-2], text + b"}", b"\xff"]
    texts += [text.decode().encode("utf-16"), b"[" * 10_000, b'{"a":' * 10_000]
    texts += [text[:-1] + b', "x": NaN}', text[:-1] + b', "x": 1e999}']
    texts += [text[:-1] + rb', "\ud800": 1}', text[:-1] + b', "x": %s}' % (b"9" * 5000)]
    texts += [text[:-1] + b', "members": {}}', text.replace(b'"', b"'"), b"\0" * 100]
    return forge(artefact.members, random.choice(texts)), {"manifest.json"}


def tensors_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """The header in front of the Variables is not true."""
    names = [member.name for member in artefact.members]
    number = names.index(b"variables.safetensors")
    data = artefact.members[number].data
    (length,) = struct.unpack_from("<Q", data)
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    key = random.choice([key for key in header if key != "__metadata__"])
    entry = header[key]
    how = random.randrange(6)
    if how == 0:
        wrong = [[2**31, 2**31], [2**40], [2**63 - 1] * 3, [0, 2**62, 2**62], [10**30], [-1]]
        wrong += [[1.5], [True], "x", None, [1] * 100, [*entry["shape"], 2], {}]
        entry["shape"] = random.choice(wrong)
    elif how == 1:
        wrong = [[0, 2**62], [-1, 3], [8, 0], [1, 2, 3], [], "x", [0.5, 1], [2**64, 2**64 + 4]]
        entry["data_offsets"] = random.choice(wrong)
    elif how == 2:
        others = {"F8_E4M3", "I16", "F32", "F64", "C64"} - {entry["dtype"]}
        sizes = {"F8_E4M3": 1, "I16": 2, "F32": 4, "F64": 8, "C64": 8}
        same = sizes.get(entry["dtype"])
        kinds = [kind for kind in sorted(others) if sizes[kind] != same]
        entry["dtype"] = random.choice([*kinds, "O", "F128", 5, None, "../x"])
    elif how == 3:
        header = random.choice([{}, {"x": entry}, {**header, "more": entry}])
    elif how == 4:
        header["__metadata__"] = random.choice([{key: "object"}, {"no": "int4"}, {"a": 1}, [], 3])
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    size = len(text)
    if how == 5:
        size = random.choice([0, 1, size - 1, size + 64, 2**32, 2**63, 2**64 - 1, len(data)])
    new = struct.pack("<Q", size) + text + rest
    members = changed(artefact, number, data=new)
    return with_members(artefact, *members), {"variables.safetensors"}


TEXTS = {"bomb_of_text", "text_wrong"}
ON_DISKS: list[Damage] = [truncated, bits_flipped, bits_flipped, overwritten, cut_out, doubled]
ON_DISKS += [moved, more_bytes, packed_anew, seal_changed]
FORGED: list[Damage] = [field_of_header_changed, field_of_directory_changed, members_swapped]
FORGED += [member_twice, member_missing, member_too_many, renamed, names_differ, bomb]
FORGED += [bomb_of_text, lengths_wrong, overlapping, gap_between, leading_bytes, field_wrong]
FORGED += [attribute_wrong, end_wrong, types_wrong, types_wrong, keys_wrong, text_wrong]
FORGED += [tensors_wrong, tensors_wrong]


def damaged(random: random.Random, artefact: Artefact) -> tuple[str, Damaged]:
    """A damaged copy, which is never equal to the original, and how it was damaged."""
    while True:
        damage = random.choice(random.choice([ON_DISKS, FORGED]))
        found = damage(random, artefact)
        if found[0] != artefact.raw:
            return damage.__name__, found


# --------------------------------------------------------------------------------- the program


def allow_memory(room: int) -> None:
    """Limits the address space to what is in use and `room` bytes, where a system can."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def difference(path: Path, artefact: Artefact) -> str:
    """Where the manifest of a damaged file that was read differs."""
    new = take_apart(path).manifest
    return f"{set(flat(new)) ^ set(flat(artefact.manifest))}"


def flat(value: Any, where: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in flat(item, f"{where}.{key}")]
    if isinstance(value, list):
        return [pair for i, item in enumerate(value) for pair in flat(item, f"{where}[{i}]")]
    return [(where, repr(value))]


def fuzz(original: Path, count: int, seed: int) -> dict[str, Any]:
    """Reads `count` damaged copies; what is said of them, ready for JSON."""
    from tracegrad.saving import ArtefactError, load

    load(original)  # warm, and proof that undamaged it can be read
    artefact = take_apart(original)
    assert forge(artefact.members, artefact.manifest) == artefact.raw
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    written: list[str] = []
    most = 0
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    path = folder / "damaged"
    reading = False

    def watch(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        changes = event.startswith(("os.", "shutil.", "subprocess.", "socket.", "exec", "compile"))
        if reading and (writes or (changes and event not in ("os.listdir", "os.scandir"))):
            written.append(f"{event} {args!r:.200}")

    sys.addaudithook(watch)
    random_ = random.Random(seed)
    allow_memory(2 * len(artefact.raw) + ROOM)
    tracemalloc.start()
    for number in range(count):
        kind, (data, members) = damaged(random_, artefact)
        path.write_bytes(data)
        size = len(data)
        del data
        kinds[kind] += 1
        tracemalloc.clear_traces()
        before = tracemalloc.get_traced_memory()[0]
        reading = True
        try:
            load(path)
            problem = f"was read: {difference(path, artefact)}"
        except ArtefactError as error:
            problem = ""
            if error.path != str(path) or not error.member.strip():
                problem = f"is refused without member or path: {error!r}"
            elif not error.reason or (members and error.member not in members):
                problem = f"is refused, but for {error.member!r}: {error.reason}"
        except BaseException as error:
            problem = f"raises {type(error).__name__}: {error}"
        reading = False
        used = tracemalloc.get_traced_memory()[1] - before
        if kind not in TEXTS:
            most = max(most, used - 2 * size)
        if used > 2 * size + (FOR_TEXT if kind in TEXTS else SLACK):
            problem = f"{problem} uses {used} bytes for {size}"
        if problem:
            wrong.append(f"{number} {kind} {problem}"[:400])
    path.unlink()
    left = [entry.name for entry in folder.iterdir()]
    folder.rmdir()
    return {"kinds": kinds, "wrong": wrong, "written": written, "left": left, "most": most}


if __name__ == "__main__":
    print(json.dumps(fuzz(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]))))
