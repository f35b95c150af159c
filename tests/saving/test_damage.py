"""A damaged file is refused, with member and reason; little is allocated and nothing written."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artefacts import write_example
from damage import FORGED, ON_DISKS, Member, changed, forge, number_of, take_apart
from hypothesis import settings

from tracegrad import ArtefactError, load

DAMAGE = Path(__file__).with_name("damage.py")

# A profile that searches longer reads more, and others every time.
THOROUGH = settings.get_current_profile_name() != "steady"
COUNT = 10_000 if THOROUGH else 400


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefact") / "example.tracegrad"
    write_example(path)
    return path


def test_damaged_files_are_refused(example: Path):
    """In a process of its own, with little memory; see ``damage.py``."""
    seed = int.from_bytes(os.urandom(4), "big") if THOROUGH else 0
    command = [sys.executable, str(DAMAGE), str(example), str(COUNT), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(DAMAGE.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-2000:]}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["wrong"] == [], f"seed {seed}"
    assert report["written"] == []
    assert report["left"] == []
    assert report["kinds"].keys() == {damage.__name__ for damage in ON_DISKS + FORGED}


def test_the_format_as_documented_is_what_is_written(example: Path):
    artefact = take_apart(example)
    assert forge(artefact.members, artefact.manifest) == artefact.raw


# A fault of each kind, to see that the reasons are the right ones.


def refusal(path: Path, data: bytes) -> ArtefactError:
    path.write_bytes(data)
    with pytest.raises(ArtefactError) as caught:
        load(path)
    assert caught.value.path == str(path)
    return caught.value


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"gap": 64}, "leaves a gap before it"),
        ({"offsets": (0, 256)}, "overlaps the one before it"),
        ({"shape": (1 << 40,)}, "bytes, uint8[1099511627776] needs 1099511627776"),
        ({"shape": (1 << 62, 8)}, "a shape beyond every memory"),
        ({"dtype": "F32"}, "needs"),
        ({"dtype": "O"}, "and is 'O'"),
    ],
)
def test_an_array_that_is_not_what_the_header_says(
    example: Path, tmp_path: Path, what: dict[str, Any], reason: str
):
    artefact = take_apart(example)
    number = number_of(artefact, "score/program_0")
    members = changed(artefact, number, **what)
    found = refusal(tmp_path / "bad", forge(members, artefact.manifest))
    assert found.member == "header"
    assert reason in found.reason


def test_checksums_that_are_not_those_of_the_arrays(example: Path, tmp_path: Path):
    artefact, path = take_apart(example), tmp_path / "bad"
    first, second = artefact.members[:2]
    found = refusal(path, forge(artefact.members, artefact.manifest, swapped=(1, 2)))
    assert found.member == first.name
    digests = [hashlib.sha256(member.data).hexdigest() for member in (first, second)]
    assert f"their SHA-256 is {digests[0]}, the seal says {digests[1]}" in found.reason
    found = refusal(path, forge(artefact.members, artefact.manifest, swapped=(0, 1)))
    assert found.member == "header"


@pytest.mark.parametrize("number", [0, 1, -1])
def test_each_array_is_needed_and_none_is_too_many(example: Path, tmp_path: Path, number: int):
    artefact, path = take_apart(example), tmp_path / "bad"
    members = list(artefact.members)
    extra = Member("extra", b"x")
    found = refusal(path, forge((*members, extra), artefact.manifest))
    assert (found.member, found.reason) == ("extra", "the manifest does not refer to it")
    gone = members.pop(number)
    found = refusal(path, forge(tuple(members), artefact.manifest))
    assert found.member == gone.name
    assert "the file has no such array" in found.reason


def test_a_variable_of_another_dtype_than_the_manifest_says(example: Path, tmp_path: Path):
    """JAX would convert 64 bits to 32 without a word."""
    artefact, path = take_apart(example), tmp_path / "bad"
    number = number_of(artefact, "weights")
    wide = np.frombuffer(artefact.members[number].data, np.float32).astype(np.float64)
    members = changed(artefact, number, data=wide.tobytes(), dtype="F64", shape=(16, 4))
    found = refusal(path, forge(members, artefact.manifest))
    assert found.member == "weights"
    assert found.reason == "it is float64[16, 4], the manifest says float32[16, 4]"
