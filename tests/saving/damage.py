"""Damages artefacts in every way that was thought of, and reads them: a program and its parts.

``python damage.py FILE COUNT SEED`` reads COUNT damaged copies of FILE in this process and prints,
as JSON, how many of each kind there were and what went wrong. It runs in a process of its own, so
that a crash is seen, memory can be limited, and what it opens for writing can be watched.

Half of the damage is what disks and networks do: bytes are lost, changed, moved. The other half has
valid checksums, as a program would make that writes such files wrongly or means harm: for that,
`forge` writes the format a second time, after ``docs/artefact.md``, and any field can be wrong.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import struct
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.numpy

SEAL = "tracegrad/seal"
END = 97  # bytes at the end that hold no checksum of a part, but that of all checksums
PART_OF_ALL = {"file", "header", "manifest", SEAL}
SLACK = 256 << 10  # bytes that Python itself may use to read the smallest file
FOR_TEXT = 16 << 20  # bytes that the objects of a JSON text may take in a file that is smaller
ROOM = 256 << 20  # bytes of address space beyond twice the file's


@dataclass(frozen=True)
class Member:
    """An array to write. It has what the header should say of it: by default the bytes."""

    name: str
    data: bytes
    dtype: str = "U8"
    shape: tuple[int, ...] | None = None
    gap: int = 0  # bytes of nothing before it
    offsets: tuple[int, int] | None = None  # what is said of where it is, if it is not there

    def entry(self, position: int) -> dict[str, Any]:
        offsets = self.offsets or (position, position + len(self.data))
        shape = [len(self.data)] if self.shape is None else list(self.shape)
        return {"dtype": self.dtype, "shape": shape, "data_offsets": list(offsets)}


@dataclass(frozen=True)
class Artefact:
    """An undamaged file, taken apart by hand; the seal is no member."""

    raw: bytes
    members: tuple[Member, ...]
    manifest: dict[str, Any]

    def spans(self) -> dict[str, tuple[int, int]]:
        """Where the header, each member and the seal begin and end."""
        position = header_size(self.raw)
        found = {"header": (0, position)}
        for member in self.members:
            found[member.name] = position, position + len(member.data)
            position += len(member.data)
        return {**found, SEAL: (position, len(self.raw))}


def header_size(raw: bytes) -> int:
    return 8 + int(struct.unpack_from("<Q", raw)[0])


def header_in(raw: bytes) -> dict[str, Any]:
    return json.loads(raw[8 : header_size(raw)])


def take_apart(path: Path) -> Artefact:
    raw = path.read_bytes()
    header, begin = header_in(raw), header_size(raw)
    manifest = json.loads(header.pop("__metadata__")["tracegrad.manifest"])
    members = []
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        data = raw[begin + first : begin + last]
        members.append(Member(name, data, entry["dtype"], tuple(entry["shape"])))
    return Artefact(raw, tuple(members[:-1]), manifest)


# ------------------------------------------------------------------------- the format once more


def as_json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def forge(
    members: tuple[Member, ...],
    manifest: dict[str, Any] | bytes,
    *,
    change: Callable[[dict[str, Any]], Any] = lambda header: None,
    text: Callable[[bytes], bytes] = lambda text: text,
    length: int | None = None,
    seal: Member | None = None,
    count: int | None = None,
    swapped: tuple[int, int] | None = None,
    lead: bytes = b"",
) -> bytes:
    """A file of these members with valid checksums; right if nothing in the arguments is wrong.

    `change` changes the header, `text` its JSON, `length` what is said of its length; `seal` is
    what the header says of the seal, `count` what its end does; `swapped` are two checksums.
    """
    manifest_text = manifest if isinstance(manifest, bytes) else as_json(manifest)
    metadata = {"tracegrad.manifest": manifest_text.decode("utf-8", "surrogateescape")}
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for member in members:
        header[member.name] = member.entry(position + member.gap)
        position += member.gap + len(member.data)
    seal = seal or Member(SEAL, bytes(32 * (len(members) + 1) + END))
    header[seal.name] = seal.entry(position)
    change(header)
    head = text(as_json(header) if b"\\ud" not in manifest_text else json.dumps(header).encode())
    head += b" " * (-(8 + len(head)) % 64)
    head = struct.pack("<Q", len(head) if length is None else length) + head
    parts = [lead + head, *(bytes(member.gap) + member.data for member in members)]
    contents = (lead + head, *(member.data for member in members))
    checksums = [hashlib.sha256(each) for each in contents]
    if swapped is not None:
        a, b = swapped
        checksums[a], checksums[b] = checksums[b], checksums[a]
    table = b"".join(checksum.digest() for checksum in checksums)
    return sealed(b"".join(parts) + table, len(checksums) if count is None else count)


def sealed(data: bytes, count: int) -> bytes:
    """With the end that makes the last `count` checksums valid."""
    digest = hashlib.sha256(data[len(data) - 32 * count :]).hexdigest()
    return data + f"tracegrad artefact 0001 {count:08d} {digest}".encode()


def changed(artefact: Artefact, number: int, **what: Any) -> tuple[Member, ...]:
    members = list(artefact.members)
    if "data" in what:
        what.setdefault("shape", None)
    members[number] = replace(members[number], **what)
    return tuple(members)


def number_of(artefact: Artefact, end: str) -> int:
    """The first member whose name ends so."""
    return next(i for i, member in enumerate(artefact.members) if member.name.endswith(end))


# ------------------------------------------------------------------- what happens on disks

Damaged = tuple[bytes, set[str]]
"""A file, and which members the error may name; empty if any."""
Damage = Callable[[random.Random, Artefact], Damaged]


def span(random: random.Random, raw: bytes) -> tuple[int, int]:
    first, last = sorted(random.sample(range(len(raw) + 1), 2))
    return first, min(last, first + random.choice([1, 8, 64, 512, len(raw)]))


def truncated(random: random.Random, artefact: Artefact) -> Damaged:
    near = random.randrange(min(300, len(artefact.raw)))
    keep = random.choice([random.randrange(len(artefact.raw)), near, len(artefact.raw) - near - 1])
    return artefact.raw[:keep], PART_OF_ALL


def bits_flipped(random: random.Random, artefact: Artefact) -> Damaged:
    data, spans = bytearray(artefact.raw), artefact.spans()
    names: set[str] = set()
    for bit in random.sample(range(8), random.choice([1, 1, 1, 2, 3])):
        name = random.choice([name for name, (first, last) in spans.items() if first < last])
        first, last = spans[name]
        data[random.choice([random.randrange(first, last), min(first + bit, last - 1)])] ^= 1 << bit
        names |= PART_OF_ALL if name in ("header", SEAL) else {name}
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
    if random.random() < 0.5:  # in front of a whole file: what is first is taken for its header
        return more + artefact.raw, set() if more == artefact.raw else PART_OF_ALL
    return artefact.raw + more, set() if more == artefact.raw else PART_OF_ALL


def written_anew(random: random.Random, artefact: Artefact) -> Damaged:
    """By the library of the format, which orders the arrays in its own way."""
    arrays = safetensors.numpy.load(artefact.raw)
    if random.random() < 0.5:
        del arrays[random.choice(list(arrays))]
    metadata = header_in(artefact.raw)["__metadata__"]
    return safetensors.numpy.save(arrays, metadata), set()


def seal_changed(random: random.Random, artefact: Artefact) -> Damaged:
    data = bytearray(artefact.raw)
    at = len(data) - random.randrange(1, artefact.spans()[SEAL][1] - artefact.spans()[SEAL][0])
    data[at : at + 16] = random.choice([b"0", b"f", b" ", b"-", b"\0"]) * 16
    return bytes(data[: len(artefact.raw)]), PART_OF_ALL


# ------------------------------------------------------------ with valid checksums nevertheless


def checksums_swapped(random: random.Random, artefact: Artefact) -> Damaged:
    a, b = random.sample(range(len(artefact.members) + 1), 2)
    names = ["header", *(member.name for member in artefact.members)]
    return forge(artefact.members, artefact.manifest, swapped=(a, b)), {names[a], names[b]}


def member_twice(random: random.Random, artefact: Artefact) -> Damaged:
    name = random.choice([member.name for member in artefact.members] + ["__metadata__", SEAL])
    entry = random.choice([b"{}", b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'])
    again = b"{" + as_json(name) + b":" + entry + b","
    return forge(artefact.members, artefact.manifest, text=lambda t: again + t[1:]), {"header"}


def member_missing(random: random.Random, artefact: Artefact) -> Damaged:
    gone = random.choice(artefact.members)
    rest = tuple(member for member in artefact.members if member is not gone)
    return forge(rest, artefact.manifest), {gone.name}


def member_too_many(random: random.Random, artefact: Artefact) -> Damaged:
    names = ["extra", "__init__.py", "tracegrad/score/program_9", "tracegrad/graph", "a/b"]
    extra = Member(random.choice(names), random.randbytes(random.choice([0, 9])))
    members = list(artefact.members)
    members.insert(random.randrange(len(members) + 1), extra)
    return forge(tuple(members), artefact.manifest), {extra.name}


def renamed(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(len(artefact.members))
    old = artefact.members[number].name
    names = ["../" + old, "/tmp/" + old, "..", "", old + "/", old + "\0", "\x1b[2J", old[:-1]]
    names += [old.upper() + "x", "x" * 5000, "con\n", SEAL + "/x", "tracegrad/" + old]
    new = random.choice(names)
    members = changed(artefact, number, name=new)
    return forge(members, artefact.manifest), {old, new, "header", "manifest"}


def key_of_another(random: random.Random, artefact: Artefact) -> Damaged:
    """A Variable is called as a program, or as another one, or as the seal."""
    manifest = copy.deepcopy(artefact.manifest)
    names = [member.name for member in artefact.members] + [SEAL, "__metadata__", ""]
    record = random.choice(manifest["variables"])
    record["key"] = random.choice([name for name in names if name != record["key"]])
    return forge(artefact.members, manifest), set()


def bomb(random: random.Random, artefact: Artefact) -> Damaged:
    """A few bytes of which the header says that they are a terabyte."""
    number = random.randrange(len(artefact.members))
    shape = random.choice([(1 << 40,), (1 << 31, 1 << 31), (0, 1 << 62, 1 << 62), (1 << 62,)])
    return forge(changed(artefact, number, shape=shape), artefact.manifest), {"header"}


def bomb_of_text(random: random.Random, artefact: Artefact) -> Damaged:
    """JSON of few bytes and many objects, or deeper than any reader can follow."""
    unit, opened = random.choice(
        [(b"{},", b"["), (b"[],", b"["), (b'{"a":{}},', b"["), (b"[", b"")]
    )
    count = random.choice([10, 1000, 50_000, 100_000])
    text = b'{"x":' + opened + unit * count + b"0]}"
    if random.random() < 0.5:
        return forge(artefact.members, text), {"manifest", "header"}
    return forge(artefact.members, {}, text=lambda _: text), {"header"}


def lengths_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """What is said of the length of the header, or of the number of checksums."""
    right, number = header_size(artefact.raw) - 8, len(artefact.members) + 1
    if random.random() < 0.5:
        wrong = [0, 1, right - 1, right - 64, right + 1, right + 64, 2**32, 2**63, 2**64 - 1]
        return forge(artefact.members, artefact.manifest, length=random.choice(wrong)), PART_OF_ALL
    count = random.choice([0, 1, number - 1, number + 1, 10**7, 10**8 - 1])
    return forge(artefact.members, artefact.manifest, count=count), PART_OF_ALL


def overlapping(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(1, len(artefact.members))
    size = len(artefact.members[number].data)
    first = random.choice([0, 1, 64])
    members = changed(artefact, number, offsets=(first, first + size))
    return forge(members, artefact.manifest), {"header"}


def gap_between(random: random.Random, artefact: Artefact) -> Damaged:
    number = random.randrange(len(artefact.members))
    members = changed(artefact, number, gap=random.choice([1, 64, 4096]))
    return forge(members, artefact.manifest), {"header"}


def leading_bytes(random: random.Random, artefact: Artefact) -> Damaged:
    lead = random.choice([b"#!/bin/sh\n", b"MZ" + bytes(62), random.randbytes(64)])
    # Read as the header's length, ``MZ`` is about that of the file: none is left for the seal.
    return forge(artefact.members, artefact.manifest, lead=lead), {"header", SEAL}


def seal_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """The header says something else of the seal."""
    seal = Member(SEAL, bytes(32 * (len(artefact.members) + 1) + END))
    size = len(seal.data)
    wrong = [{"name": "seal"}, {"dtype": "I8"}, {"shape": (size, 1)}, {"shape": (1, size)}]
    wrong += [{"shape": (size + 1,)}, {"data": bytes(size - 1)}, {"data": bytes(size + 32)}]
    seal = replace(seal, **random.choice(wrong))
    return forge(artefact.members, artefact.manifest, seal=seal), {"header", SEAL}


def metadata_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    name = artefact.members[0].name
    wrong: list[Any] = [None, [], "x", {}, {"a": 1}, {"tracegrad.manifest": {}}]
    wrong += [{"tracegrad.manifest": text} for text in ("", "[]", "null", "{}", "{", "\ufeff{}")]
    kept = {"tracegrad.manifest": as_json(artefact.manifest).decode()}
    dtypes = [{name: "object"}, {"no": "int4"}, {name: 1}, {name: "complex128"}]
    texts = ["", "[]", "{", *(as_json(each).decode() for each in dtypes)]
    wrong += [{**kept, "tracegrad.dtypes": text} for text in texts]
    chosen = random.choice(wrong)

    def change(header: dict[str, Any]) -> None:
        header["__metadata__"] = chosen

    return forge(artefact.members, artefact.manifest, change=change), set()


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
    manifest = copy.deepcopy(artefact.manifest)
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
    manifest = copy.deepcopy(artefact.manifest)
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
    """The manifest, or the header, is not the JSON that it should be."""
    text = as_json(artefact.manifest)
    if random.random() < 0.5:
        texts = [b"", b"{}", b"[]", b"null", b"\xef\xbb\xbf" + text, text[:-2], text + b"}"]
        texts += [b"[" * 10_000, b'{"a":' * 10_000, b"\0" * 100, text.replace(b'"', b"'")]
        texts += [text[:-1] + b', "x": NaN}', text[:-1] + b', "x": 1e999}']
        texts += [text[:-1] + b', "x": %s}' % (b"9" * 5000), text[:-1] + b', "single": true}']
        return forge(artefact.members, random.choice(texts)), {"manifest", "header"}
    head = as_json(header_in(artefact.raw))
    heads = [b"", b"{}", b"[]", b"null", b"\xef\xbb\xbf" + head, head[:-2], head + b"}", b"\xff"]
    heads += [head.decode().encode("utf-16"), b"[" * 10_000, b'{"a":' * 10_000, b"\0" * 100]
    heads += [head[:-1] + rb', "\ud800": 1}', head.replace(b'"', b"'"), head[:-1] + b', "x": NaN}']
    wrong = random.choice(heads)
    return forge(artefact.members, artefact.manifest, text=lambda _: wrong), {"header", SEAL}


def tensors_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """What the header says of an array is not true."""
    key = random.choice([member.name for member in artefact.members if len(member.data)])
    entry = header_in(artefact.raw)[key]
    how = random.randrange(4)
    if how == 0:
        wrong = [[2**31, 2**31], [2**40], [2**63 - 1] * 3, [0, 2**62, 2**62], [10**30], [-1]]
        wrong += [[1.5], [True], "x", None, [1] * 100, [*entry["shape"], 2], {}]
        new = {"shape": random.choice(wrong)}
    elif how == 1:
        wrong = [[0, 2**62], [-1, 3], [8, 0], [1, 2, 3], [], "x", [0.5, 1], [2**64, 2**64 + 4]]
        new = {"data_offsets": random.choice(wrong)}
    elif how == 2:
        sizes = {"F8_E4M3": 1, "U8": 1, "I16": 2, "F32": 4, "I32": 4, "F64": 8, "C64": 8}
        kinds = [kind for kind in sizes if sizes[kind] != sizes[entry["dtype"]]]
        new = {"dtype": random.choice([*kinds, "O", "F128", 5, None, "../x"])}
    else:
        new = random.choice([{"code": "x"}, {"dtype": None}, {"shape": []}])

    def change(header: dict[str, Any]) -> None:
        header[key] = {**entry, **new}

    return forge(artefact.members, artefact.manifest, change=change), {"header"}


TEXTS = {"bomb_of_text", "text_wrong"}
ON_DISKS: list[Damage] = [truncated, bits_flipped, bits_flipped, overwritten, cut_out, doubled]
ON_DISKS += [moved, more_bytes, written_anew, seal_changed]
FORGED: list[Damage] = [checksums_swapped, member_twice, member_missing, member_too_many, renamed]
FORGED += [key_of_another, bomb, bomb_of_text, lengths_wrong, overlapping, gap_between]
FORGED += [leading_bytes, seal_wrong, metadata_wrong, types_wrong, types_wrong, keys_wrong]
FORGED += [text_wrong, tensors_wrong, tensors_wrong]


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
    from tracegrad import ArtefactError, load
    from tracegrad.saving import documents
    from tracegrad.saving.placement import Placement

    load(original)  # warm, and proof that undamaged it can be read
    # The types of a record's fields are compiled, from this package's own text, when one is first
    # read; the undamaged file has no record of this kind.
    documents.parse(Placement, {"mesh": [], "spec": []}, "manifest", "placement")
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
