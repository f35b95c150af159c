"""A damaged file is refused, with member and reason; little is allocated and nothing written."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import FORGED, ON_DISKS, forge, take_apart
from hypothesis import settings

from tracegrad import ArtefactError, load

DAMAGE = Path(__file__).with_name("damage.py")

# A profile that searches longer reads more, and others every time.
THOROUGH = settings.get_current_profile_name() != "steady"
COUNT = 10_000 if THOROUGH else 400


def test_damaged_files_are_refused(example: Path):
    """In a process of its own, with little memory; see ``damage.py``."""
    seed = int.from_bytes(os.urandom(4), "big") if THOROUGH else 0
    command = [sys.executable, str(DAMAGE), str(example), str(COUNT), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(DAMAGE.parents[2])}
    environment["MALLOC_ARENA_MAX"] = "1"  # or each thread takes 64 MiB of the room, for nothing
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-2000:]}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["wrong"] == [], f"seed {seed}"
    assert report["written"] == []
    assert report["left"] == []
    assert report["kinds"].keys() == {damage.__name__ for damage in ON_DISKS + FORGED}


def test_the_format_as_documented_is_what_is_written(example: Path):
    artefact = take_apart(example)
    assert forge(artefact.arrays, artefact.manifest) == artefact.raw


# A fault of each kind, to see that the reasons are the right ones.


def refusal(path: Path, data: bytes) -> ArtefactError:
    path.write_bytes(data)
    with pytest.raises(ArtefactError) as caught:
        load(path)
    assert caught.value.path == str(path)
    return caught.value


def test_each_array_is_needed_and_none_is_too_many(example: Path, tmp_path: Path):
    artefact, path = take_apart(example), tmp_path / "bad"
    more = {**artefact.arrays, "extra": np.ones(1, np.uint8)}
    found = refusal(path, forge(more, artefact.manifest, digests=False))
    assert (found.member, found.reason) == ("extra", "the manifest does not list it")
    less = {name: array for name, array in artefact.arrays.items() if name != "weights"}
    found = refusal(path, forge(less, artefact.manifest, digests=False))
    reason = "the manifest lists it, but it is missing"
    assert (found.member, found.reason) == ("weights", reason)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("functions.0.program.array", 3, r"functions\[(0\]\.program\.array|\.\.\.\])"),
        ("functions", [], "it lists no functions"),
        ("functions.0.reads", [7], "the function 'score' is inconsistent"),
        ("variables.0.key_type", "xy", "Variable 'weights' cannot have random keys of 'xy': unrec"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused(example, tmp_path, place, value, reason):
    artefact = take_apart(example)
    manifest = json.loads(json.dumps(artefact.manifest))
    *parents, key = [int(key) if key.isdecimal() else key for key in place.split(".")]
    functools.reduce(operator.getitem, parents, manifest)[key] = value
    found = refusal(tmp_path / "bad", forge(artefact.arrays, manifest))
    assert found.member == "manifest"
    assert re.search(reason, found.reason)


def test_a_variable_of_other_bytes_than_the_manifest_says(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    arrays = {**artefact.arrays, "weights": artefact.arrays["weights"].astype(np.float64)}
    found = refusal(tmp_path / "bad", forge(arrays, artefact.manifest))
    assert found.member == "weights"
    assert "it is not an array float32[16, 4]" in found.reason
