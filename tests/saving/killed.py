"""Kills processes while they write an artefact over another, and looks at what is there then.

``python killed.py kill FOLDER RANDOM STEPS SEED`` kills RANDOM writers at random moments and STEPS
more each at another line of the code that writes; ``python killed.py race FOLDER WRITERS TIMES``
lets several write over one file, so often or more, and reads it all the while. Both print what was
found as JSON.
They run in a process that does not import JAX, so that it can fork, and a kill costs milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]

# The package without what it imports, which is JAX: of it only the file is wanted.
if __name__ == "__main__":  # pytest imports the file too, to look for examples in it
    sys.modules["tracegrad"] = package = types.ModuleType("tracegrad")
    package.__path__ = [str(ROOT / "tracegrad")]
sys.path.insert(0, str(ROOT))

from tracegrad.saving.atomic import PREFIX, SUFFIX  # noqa: E402
from tracegrad.saving.file import read_file, write_file  # noqa: E402
from tracegrad.saving.manifest import Manifest  # noqa: E402

CONTENTS = {"old": (b"old", 3), "new": (b"newer", 5)}  # of different lengths


def write(path: Path, which: str) -> None:
    text, count = CONTENTS[which]
    arrays = {f"variable {i}": np.frombuffer(text * 5000, np.uint8) for i in range(count)}
    write_file(path, arrays, Manifest({"which": which}, {}, True, (), ()))


def which_is_read(path: Path) -> str:
    return read_file(path).manifest.versions["which"]


def forked(work: Callable[[], None]) -> int:
    """A process that does `work` and ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def over_and_over(path: Path) -> None:
    while True:
        write(path, "new")
        write(path, "old")


def write_by_lines(path: Path, which: str, before_line: Callable[[int], None]) -> int:
    """Writes, and calls `before_line` with the number of each line which that comes to; returns how
    many there were."""
    count = 0

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if ROOT / "tracegrad" not in Path(frame.f_code.co_filename).parents:
            return None
        if event == "line":
            count += 1
            before_line(count)
        return trace

    sys.settrace(trace)
    write(path, which)
    sys.settrace(None)
    return count


def until_line(path: Path, number: int) -> None:
    """Writes, and kills itself before the line of that number."""

    def kill_itself(line: int) -> None:
        if line == number:
            os.kill(os.getpid(), signal.SIGKILL)

    write_by_lines(path, "new", kill_itself)


def whole_files(path: Path) -> dict[bytes, str]:
    """The bytes of both files; equal contents make equal files, so others there are none."""
    whole = {}
    for which in CONTENTS:
        write(path, which)
        whole[path.read_bytes()] = which
    return whole


def kill(folder: Path, at_random: int, steps: int, seed: int) -> dict[str, Any]:
    path = folder / "model.tracegrad"
    whole = whole_files(path)
    lines = write_by_lines(path, "old", lambda line: None)
    begun = time.perf_counter()
    for _ in range(5):
        write(path, "old")
    duration = (time.perf_counter() - begun) / 5

    found: Counter[str] = Counter()
    wrong: list[str] = []

    def look(child: int, what: str) -> None:
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and not what.startswith("line"):
            wrong.append(f"{what}: ended by itself: {status}")
        data = path.read_bytes()
        found[whole.get(data, "neither")] += 1
        if data not in whole:
            wrong.append(f"{what}: {len(data)} bytes that are neither the old nor the new file")
        if whole.get(data) != which_is_read(path):
            wrong.append(f"{what}: reads as {which_is_read(path)}")
        for name in os.listdir(folder):
            if name != path.name:
                found["left behind"] += 1
                if not (name.startswith(PREFIX) and name.endswith(SUFFIX)):
                    wrong.append(f"{what}: left {name}")
                shutil.rmtree(folder / name)

    random_ = random.Random(seed)
    for number in range(at_random):
        child = forked(lambda: over_and_over(path))
        time.sleep(random_.uniform(0, 4 * duration))
        os.kill(child, signal.SIGKILL)
        look(child, f"random {number}")
    for number in range(steps):
        write(path, "old")
        line = 1 + number * lines // steps
        look(forked(lambda line=line: until_line(path, line)), f"line {line}")
    return {"found": found, "wrong": wrong, "lines": lines, "milliseconds": 1000 * duration}


def race(folder: Path, writers: int, times: int) -> dict[str, Any]:
    path = folder / "model.tracegrad"
    whole = whole_files(path)
    found: Counter[str] = Counter()

    seen = folder.with_name(f"{folder.name}-seen")  # both; on a busy machine that takes its time

    def some_times() -> None:
        number = 0
        while number < times or (number < 1000 * times and not seen.exists()):
            write(path, ("old", "new")[number % 2])
            number += 1

    children = [forked(some_times) for _ in range(writers)]
    while children:
        found[whole.get(path.read_bytes(), "neither")] += 1
        found[which_is_read(path)] += 1
        if found.keys() >= CONTENTS.keys():
            seen.touch()
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
    wrong = [what for what in found if what not in CONTENTS]
    return {"found": found, "wrong": wrong, "left": os.listdir(folder)}


if __name__ == "__main__":
    what = {"kill": kill, "race": race}[sys.argv[1]]
    print(json.dumps(what(Path(sys.argv[2]), *map(int, sys.argv[3:]))))
