"""A damaged file is refused, with member and reason; little is allocated and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from artefacts import write_example
from damage import FORGED, ON_DISKS, Member, changed, forge, listed, take_apart, with_members
from hypothesis import settings

from tracegrad.saving import ArtefactError, load
from tracegrad.saving.container import open_container

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


# A member of each kind of fault, to see that the reasons are the right ones.


def bomb() -> dict[str, Any]:
    packer = zlib.compressobj(wbits=-15)
    data = packer.compress(bytes(1 << 16)) + packer.flush()
    fields = {
        "method": 8,
        "packed": len(data),
        "length": 1 << 16,
        "crc": zlib.crc32(bytes(1 << 16)),
    }
    return {"data": data, "local": fields, "central": fields}


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"name": b"../evil"}, "could lead out of a folder"),
        ({"name": b"/evil"}, "could lead out of a folder"),
        ({"name": b"functions\\1"}, "could lead out of a folder"),
        (bomb(), "is compressed .method 8, .* bytes for 65536."),
        ({"central": {"flags": 1}}, "is encrypted"),
        (
            {"local": {"name": b"x" * len("functions/0/program_0.jax")}},
            "another name than the directory",
        ),
        ({"local": {"crc": 7}}, "header has the CRC-32 7"),
        ({"local": {"padding": 1}}, "the padding in front of it"),
        ({"central": {"length": 2**31, "packed": 2**31}}, "would reach beyond the directory"),
        ({"central": {"offset": 4096}}, "bytes before it of no member"),
        ({"gap": 64}, "64 bytes before it of no member"),
        ({"central": {"external": 0o120777 << 16}}, "a field of its directory record"),
    ],
)
def test_a_member_is_named_with(example: Path, tmp_path: Path, what: dict[str, Any], reason: str):
    artefact = take_apart(example)
    path = tmp_path / "bad"
    path.write_bytes(with_members(artefact, *changed(artefact, 0, **what)))
    with pytest.raises(ArtefactError, match=reason) as caught:
        load(path)
    assert caught.value.member == what.get("name", artefact.members[0].name).decode()
    assert caught.value.path == str(path)


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ArtefactError) as caught:
        load(path)
    return f"{caught.value.member}: {caught.value.reason}"


def test_members_that_the_manifest_does_not_have_as_they_are(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    members, manifest, path = artefact.members, artefact.manifest, tmp_path / "bad"
    first, second, *rest = members
    extra = Member(b"extra", b"x")
    assert "extra: the manifest does not list it" in refusal(
        path, forge((*members, extra), manifest)
    )
    assert "does not have it" in refusal(path, forge(members[1:], manifest))
    assert "two members of this name" in refusal(path, forge((first, *members), manifest))
    swapped = (Member(first.name, second.data), Member(second.name, first.data), *rest)
    assert "the manifest says" in refusal(path, forge(swapped, manifest))
    assert "another order" in refusal(path, forge((second, first, *rest), manifest))
    assert "overlaps" in refusal(path, forge(changed(artefact, 1, at=0), manifest))
    nested = (*members, Member(b"extra", b""), Member(b"extra/x", b""))
    with_both = manifest | {"members": listed(nested)}
    assert "is a member and the folder" in refusal(path, forge(nested, with_both))


def test_a_wrong_crc_32_is_found_when_asked_for(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    wrong = {"crc": 12345}
    path = tmp_path / "bad"
    path.write_bytes(with_members(artefact, *changed(artefact, 0, local=wrong, central=wrong)))
    with open_container(path) as container, pytest.raises(ArtefactError, match="CRC-32"):
        container.check_crc()
