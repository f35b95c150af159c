"""A damaged file is refused, with member and reason; little is allocated and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artefacts import write_example
from damage import FORGED, ON_DISKS, forge, take_apart
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
    assert (found.member, found.reason) == ("extra", "the manifest does not refer to it")
    less = {name: array for name, array in artefact.arrays.items() if name != "weights"}
    found = refusal(path, forge(less, artefact.manifest, digests=False))
    assert (found.member, found.reason) == ("weights", "there is no such array")


def test_a_field_of_another_type_is_named(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    manifest = json.loads(json.dumps(artefact.manifest))
    manifest["functions"][0]["program"]["array"] = 3
    found = refusal(tmp_path / "bad", forge(artefact.arrays, manifest))
    assert found.member == "manifest"
    assert "functions[0].program.array" in found.reason or "functions[...]" in found.reason


def test_a_variable_of_other_bytes_than_the_manifest_says(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    arrays = {**artefact.arrays, "weights": artefact.arrays["weights"].astype(np.float64)}
    found = refusal(tmp_path / "bad", forge(arrays, artefact.manifest))
    assert found.member == "weights"
    assert "it is no array float32[16, 4]" in found.reason


def test_a_manifest_that_does_not_fit_together_is_refused(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    manifest = json.loads(json.dumps(artefact.manifest))
    manifest["functions"][0]["reads"] = [7]
    found = refusal(tmp_path / "bad", forge(artefact.arrays, manifest))
    assert found.member == "manifest"
    assert "'score' does not fit together" in found.reason


def test_random_keys_of_a_generator_that_does_not_exist_are_refused(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    manifest = json.loads(json.dumps(artefact.manifest))
    manifest["variables"][0]["key_type"] = "nobody's"
    found = refusal(tmp_path / "bad", forge(artefact.arrays, manifest))
    assert found.member == "manifest"
    assert """the Variable 'weights' can have no random keys of "nobody's": unrec""" in found.reason
