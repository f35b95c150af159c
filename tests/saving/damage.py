"""Damages saved files in every way that was thought of, and reads them: a program and its parts.

``python damage.py FILE COUNT SEED`` reads COUNT damaged copies of FILE in this process and prints,
as JSON, how many of each kind there were and what went wrong. It runs in a process of its own, so
that a crash is seen, memory can be limited, and what it opens for writing can be watched.

Most of the damage is what disks and networks do: bytes are lost, changed, moved. The rest has valid
checksums, as a program would make that writes such files wrongly: for that, `forge` writes the
format a second time, after ``docs/artefact.md``.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

SLACK = 512 << 10  # bytes that Python itself may use to read the smallest file
ROOM = 256 << 20  # bytes of address space beyond twice the file's
BLANK = "0" * 64


@dataclass(frozen=True)
class Artefact:
    """An undamaged file, taken apart by hand."""

    raw: bytes
    arrays: dict[str, np.ndarray]
    manifest: dict[str, Any]

    def spans(self) -> dict[str, tuple[int, int]]:
        """Where the header and each array begin and end."""
        begin = header_size(self.raw)
        entries = header_in(self.raw)
        del entries["__metadata__"]
        found = {name: entry["data_offsets"] for name, entry in entries.items()}
        spans = {name: (begin + first, begin + last) for name, (first, last) in found.items()}
        return {"header": (0, begin), **spans}


def header_size(raw: bytes) -> int:
    return 8 + int(struct.unpack_from("<Q", raw)[0])


def header_in(raw: bytes) -> dict[str, Any]:
    return json.loads(raw[8 : header_size(raw)])


def take_apart(path: Path) -> Artefact:
    raw = path.read_bytes()
    text = header_in(raw)["__metadata__"]["tracegrad"]
    return Artefact(raw, safetensors.numpy.load(raw), json.loads(text[2 + 64 + 1 :]))


def forge(
    arrays: dict[str, np.ndarray], manifest: dict[str, Any] | str, *, digests: bool = True
) -> bytes:
    """A file with valid checksums; `digests`: those of the arrays, which are in the manifest."""
    if isinstance(manifest, dict):
        if digests and isinstance(manifest.get("digests"), dict):
            found = {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in arrays.items()}
            manifest = {**manifest, "digests": {n: found[n] for n in order(manifest, found)}}
        manifest = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False)
    raw = safetensors.numpy.save(arrays, {"tracegrad": f"2 {BLANK} {manifest}"})
    head = raw[: header_size(raw)]
    digest = hashlib.sha256(head).hexdigest().encode()
    return head.replace(BLANK.encode(), digest, 1) + raw[len(head) :]


def order(manifest: dict[str, Any], found: dict[str, str]) -> list[str]:
    """The names of arrays as the manifest has them, and others behind."""
    known = [name for name in manifest["digests"] if name in found]
    return known + [name for name in found if name not in known]


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
    return artefact.raw[:keep], {"file", "header"}


def bits_flipped(random: random.Random, artefact: Artefact) -> Damaged:
    data, spans = bytearray(artefact.raw), artefact.spans()
    names: set[str] = set()
    for bit in random.sample(range(8), random.choice([1, 1, 1, 2, 3])):
        name = random.choice([name for name, (first, last) in spans.items() if first < last])
        first, last = spans[name]
        data[random.choice([random.randrange(first, last), min(first + bit, last - 1)])] ^= 1 << bit
        names |= {"header", "file"} if name == "header" else {name}
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
        return more + artefact.raw, set() if more == artefact.raw else {"file", "header"}
    return artefact.raw + more, set() if more == artefact.raw else {"file", "header"}


def written_anew(random: random.Random, artefact: Artefact) -> Damaged:
    """By the library of the format, with one array less."""
    arrays = dict(artefact.arrays)
    del arrays[random.choice(list(arrays))]
    return safetensors.numpy.save(arrays, header_in(artefact.raw)["__metadata__"]), set()


# ------------------------------------------------------------ with valid checksums nevertheless


def array_missing(random: random.Random, artefact: Artefact) -> Damaged:
    gone = random.choice(list(artefact.arrays))
    rest = {name: array for name, array in artefact.arrays.items() if name != gone}
    return forge(rest, artefact.manifest, digests=False), {gone}


def array_too_many(random: random.Random, artefact: Artefact) -> Damaged:
    name = random.choice(["extra", "__init__.py", "tracegrad/program/9", "a/b", "\x1b[2J"])
    extra = np.frombuffer(random.randbytes(random.choice([1, 9])), np.uint8)
    return forge({**artefact.arrays, name: extra}, artefact.manifest, digests=False), {name}


def array_changed(random: random.Random, artefact: Artefact) -> Damaged:
    name = random.choice(list(artefact.arrays))
    array = artefact.arrays[name].copy()
    array.reshape(-1).view(np.uint8)[random.randrange(array.nbytes)] ^= 1
    return forge({**artefact.arrays, name: array}, artefact.manifest, digests=False), {name}


def digests_swapped(random: random.Random, artefact: Artefact) -> Damaged:
    a, b = random.sample(list(artefact.arrays), 2)
    digests = dict(artefact.manifest["digests"])
    digests[a], digests[b] = digests[b], digests[a]
    manifest = {**artefact.manifest, "digests": digests}
    return forge(artefact.arrays, manifest, digests=False), {a, b}


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
    parent, key = random.choice(places(manifest))
    old = parent[key]
    values = ["x", 7, -1, 2.5, True, [], {}, [[]], {"a": {}}, 1e300, 10**30, ""]
    parent[key] = random.choice([value for value in values if type(value) is not type(old)])
    return forge(artefact.arrays, manifest, digests=False), {"manifest"}


def places(manifest: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each value in a manifest, as an object and a key."""
    found = []
    for path in paths_in(manifest)[1:]:
        parent: Any = manifest
        for key in path[:-1]:
            parent = parent[key]
        found.append((parent, path[-1]))
    return found


OPTIONAL = {"key_type", "gradients", "value", "may_add"}


def keys_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """A field of the manifest is missing, or one is there that nobody knows."""
    manifest = copy.deepcopy(artefact.manifest)
    maps = {"versions", "digests", "calls"}  # whose keys are names, not fields
    parents = [(p[k], k) for p, k in places(manifest) if isinstance(p[k], dict) and p[k]]
    where, _ = random.choice([(manifest, ""), *(pair for pair in parents if pair[1] not in maps)])
    needed = [key for key in where if key not in OPTIONAL]
    if needed and random.random() < 0.5:
        del where[random.choice(needed)]
    else:
        where["unknown"] = random.choice([1, "x", {}, None])
    return forge(artefact.arrays, manifest, digests=False), {"manifest"}


def text_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """The manifest is not the JSON that it should be."""
    text = json.dumps(artefact.manifest, separators=(",", ":"))
    texts = ["", "{}", "[]", "null", "\ufeff" + text, text[:-2], text + "}", "[" * 10_000]
    texts += ['{"a":' * 10_000, "\0" * 100, text.replace('"', "'"), text[:-1] + ', "x": NaN}']
    texts += ["{},[" * 100_000, text[:-1] + ', "x": %s}' % ("9" * 5000)]
    return forge(artefact.arrays, random.choice(texts)), {"manifest"}


def program_wrong(random: random.Random, artefact: Artefact) -> Damaged:
    """What should be a program is none, or another."""
    programs = [name for name in artefact.arrays if "/program/" in name]
    name, other = random.sample(programs, 2)
    data = artefact.arrays[name]
    wrong = random.choice([data[:500], data[:0], artefact.arrays[other][::-1].copy()])
    return forge({**artefact.arrays, name: wrong}, artefact.manifest), {name}


TEXTS = {"text_wrong"}
ON_DISKS: list[Damage] = [truncated, bits_flipped, bits_flipped, overwritten, cut_out, doubled]
ON_DISKS += [moved, more_bytes, written_anew]
FORGED: list[Damage] = [array_missing, array_too_many, array_changed, digests_swapped]
FORGED += [types_wrong, types_wrong, keys_wrong, text_wrong, program_wrong]


def damaged(random: random.Random, artefact: Artefact) -> tuple[str, Damaged]:
    """A damaged copy, which is never equal to the original, and how it was damaged."""
    while True:
        damage = random.choice(random.choice([ON_DISKS, ON_DISKS, FORGED]))
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

    load(original)  # warm, and proof that undamaged it can be read
    artefact = take_apart(original)
    assert forge(artefact.arrays, artefact.manifest) == artefact.raw
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
        if used > 2 * size + SLACK:
            problem = f"{problem} uses {used} bytes for {size}"
        if problem:
            wrong.append(f"{number} {kind} {problem}"[:400])
    path.unlink()
    left = [entry.name for entry in folder.iterdir()]
    folder.rmdir()
    return {"kinds": kinds, "wrong": wrong, "written": written, "left": left, "most": most}


if __name__ == "__main__":
    print(json.dumps(fuzz(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]))))
