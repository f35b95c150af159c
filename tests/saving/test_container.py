"""An artefact's file: written whole or not at all, read back as written, by other programs too."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import resource
import shutil
import stat
import subprocess
import tempfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tracegrad.saving.atomic import PREFIX, SUFFIX, replacing
from tracegrad.saving.container import open_container, write_container
from tracegrad.saving.errors import ArtefactError

MEMBERS = {"programs/f.bin": b"program", "empty": b"", "variables.safetensors": bytes(range(200))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.tracegrad"


@pytest.fixture
def written(path: Path) -> Path:
    write_container(path, MEMBERS, {"who": "ö", "numbers": [1, 2.5, None, True]})
    return path


def contents(path: Path) -> dict[str, bytes]:
    with open_container(path) as container:
        return {name: bytes(container.member(name)) for name in container}


def test_members_and_manifest_come_back(written: Path):
    assert contents(written) == MEMBERS
    with open_container(written) as container:
        assert list(container) == list(MEMBERS)  # in their order
        assert container.manifest["who"] == "ö"
        assert container.manifest["numbers"] == [1, 2.5, None, True]
        assert container.manifest["format_version"] == 1
        assert container.size == written.stat().st_size
        assert container.length("programs/f.bin") == 7


def test_the_manifest_has_the_length_and_the_sha256_of_each_member(written: Path):
    with open_container(written) as container:
        assert container.manifest["members"] == {
            name: {"length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in MEMBERS.items()
        }


def test_other_programs_read_the_file(written: Path, tmp_path: Path):
    with zipfile.ZipFile(written) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [*MEMBERS, "manifest.json"]
        assert {name: archive.read(name) for name in MEMBERS} == MEMBERS
    if unzip := shutil.which("unzip"):
        subprocess.run([unzip, "-q", written, "-d", tmp_path / "out"], check=True)
        assert {name: (tmp_path / "out" / name).read_bytes() for name in MEMBERS} == MEMBERS


def test_equal_contents_make_equal_files(written: Path, tmp_path: Path):
    write_container(tmp_path / "again", MEMBERS, {"who": "ö", "numbers": [1, 2.5, None, True]})
    assert (tmp_path / "again").read_bytes() == written.read_bytes()


def test_members_begin_at_multiples_of_64_bytes_in_memory(written: Path):
    with open_container(written) as container:
        for name in container:
            address = np.frombuffer(container.member(name), np.uint8).ctypes.data
            assert address % 64 == 0 or not len(container.member(name))


def test_pieces_are_joined_and_need_no_memory_of_their_own(path: Path):
    piece = memoryview(np.arange(1 << 18, dtype=np.float32))  # 1 MiB
    tracemalloc.start()
    try:
        write_container(path, {"big": (piece for _ in range(32))}, {})
        with open_container(path) as container:
            assert len(container.member("big")) == 32 << 20
            assert container.member("big")[5 << 20 : 6 << 20] == piece.cast("B")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_contents_outlive_the_container_and_the_file(written: Path):
    with open_container(written) as container:
        view = container.member("variables.safetensors")
    write_container(written, {"other": b"x"}, {})
    written.unlink()
    assert bytes(view) == MEMBERS["variables.safetensors"]
    assert view.readonly


def test_without_a_check_at_first_each_member_is_checked_when_it_is_asked_for(written: Path):
    data = bytearray(written.read_bytes())
    data[data.index(b"program", 64)] ^= 1
    written.write_bytes(data)
    with pytest.raises(ArtefactError, match=r"programs/f\.bin: its contents were changed"):
        open_container(written).__enter__()
    with open_container(written, check=False) as container:
        assert bytes(container.member("empty")) == b""
        for _ in range(2):
            with pytest.raises(ArtefactError, match="SHA-256") as caught:
                container.member("programs/f.bin")
    assert caught.value.member == "programs/f.bin"
    assert caught.value.path == str(written)
    assert str(written) in str(caught.value)


def test_a_member_that_does_not_exist_is_named(written: Path):
    with open_container(written) as container, pytest.raises(ArtefactError, match="no such member"):
        container.member("missing")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "../a",
        "a/../b",
        "a//b",
        "a/",
        ".",
        "a\\b",
        "c:a",
        "ä",
        "a\0",
        "a b",
        "-a",
        "a" * 2000,
    ],
)
def test_names_that_could_lead_elsewhere_are_not_written(path: Path, name: str):
    with pytest.raises(ValueError, match="cannot be called"):
        write_container(path, {name: b""}, {})
    assert not path.exists()


@pytest.mark.parametrize(
    ("members", "manifest"),
    [
        ({"manifest.json": b""}, {}),
        ({}, {"members": {}}),
        ({}, {"format_version": 2}),
        ({}, {"x": float("nan")}),
        ({}, {"x": "\ud800"}),
        ({}, {"x": {1: "a", "1": "b"}}),
        ({}, {"x": [{}] * 100_000}),
    ],
)
def test_what_could_not_be_read_back_is_not_written(path: Path, members: dict, manifest: dict):
    with pytest.raises(ValueError):
        write_container(path, members, manifest)
    assert os.listdir(path.parent) == []


def test_an_error_can_be_pickled():
    error = ArtefactError("member", "reason", "path")
    again = pickle.loads(pickle.dumps(error))
    assert (again.member, again.reason, again.path) == ("member", "reason", "path")


def test_an_error_does_not_send_commands_to_the_terminal():
    assert "\x1b" not in str(ArtefactError("a\x1b[2J", "b\x9b2J"))


# What is no artefact at all


def test_what_is_not_there_is_an_error_of_the_operating_system(path: Path):
    with pytest.raises(FileNotFoundError, match=r"model\.tracegrad"):
        open_container(path).__enter__()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: path.touch(), "it is empty"),
        (lambda path: os.mkfifo(path), "no ordinary file"),
        (lambda path: path.write_bytes(b"x"), "it has 1 bytes"),
        (lambda path: path.write_bytes(b"x" * 1000), "does not end with the comment"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "fewer than any artefact"),
    ],
)
def test_other_files_are_refused(path: Path, make, reason: str):
    make(path)
    with pytest.raises(ArtefactError, match=reason):
        open_container(path).__enter__()


def test_a_file_packed_anew_by_another_program_is_refused(written: Path):
    with zipfile.ZipFile(written, "w") as archive:
        for name, data in MEMBERS.items():
            archive.writestr(name, data)
    with pytest.raises(ArtefactError, match="packs an artefact anew"):
        open_container(written).__enter__()


def test_a_newer_format_is_named(written: Path):
    data = written.read_bytes().replace(b"tracegrad artefact 0001", b"tracegrad artefact 0002")
    written.write_bytes(data)
    with pytest.raises(
        ArtefactError, match="version 2 of the format, this tracegrad reads version 1"
    ):
        open_container(written).__enter__()


# Replacing what is there


def assert_refused_and_nothing_left(path: Path, error: type[OSError], words: str):
    before = sorted(os.listdir(path.parent)) if path.parent.exists() else None
    with pytest.raises(error, match=words) as caught:
        write_container(path, MEMBERS, {})
    assert caught.value.filename == str(path)
    assert before is None or sorted(os.listdir(path.parent)) == before


def test_a_missing_folder_is_named(tmp_path: Path):
    assert_refused_and_nothing_left(tmp_path / "no" / "f", FileNotFoundError, "folder .* does not")


def test_a_folder_in_the_way_is_named(path: Path):
    path.mkdir()
    assert_refused_and_nothing_left(path, IsADirectoryError, "A folder is in the way")


def test_a_file_where_a_folder_should_be_is_named(written: Path):
    with pytest.raises(NotADirectoryError, match="nothing was written") as caught:
        write_container(written / "x", {}, {})
    assert caught.value.filename == str(written / "x")
    assert contents(written) == MEMBERS


def test_a_device_is_not_replaced(path: Path):
    os.mkfifo(path)
    assert_refused_and_nothing_left(path, OSError, "no ordinary file to replace")
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_too_long_a_name_is_an_error(tmp_path: Path):
    assert_refused_and_nothing_left(tmp_path / ("x" * 300), OSError, "name too long")


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Not as root, who may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_permission_is_named():
    folder = Path(tempfile.mkdtemp())  # not below pytest's, which only its owner may enter
    path = folder / "model"
    write_container(path, MEMBERS, {})
    folder.chmod(0o555)
    with nobody(), pytest.raises(PermissionError, match="nothing was written") as caught:
        write_container(path, {}, {})
    assert caught.value.filename == str(path)
    assert contents(path) == MEMBERS
    assert os.listdir(folder) == ["model"]
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(written: Path):
    before = written.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="nothing was written") as caught:
            write_container(written, {"big": bytes(1 << 20)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG  # what a limit answers in place of ENOSPC
    assert caught.value.filename == str(written)
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_an_error_of_the_contents_leaves_the_old_file_and_nothing_else(written: Path):
    before = written.read_bytes()

    def pieces() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_container(written, {"a": pieces()}, {})
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_permissions_and_links_stay(written: Path):
    written.chmod(0o640)
    link = written.with_name("link")
    link.symlink_to(written.name)
    write_container(link, {"new": b"1"}, {})
    assert link.is_symlink()
    assert contents(written) == {"new": b"1"}
    assert stat.S_IMODE(written.stat().st_mode) == 0o640


def test_a_new_file_gets_the_permissions_that_others_get(path: Path):
    before = os.umask(0o027)
    try:
        write_container(path, {}, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_the_unfinished_file_lies_beside_and_can_be_told(written: Path):
    with replacing(written) as file:
        file.write(b"half")
        (other,) = set(os.listdir(written.parent)) - {written.name}
        assert other.startswith(PREFIX)
        assert other.endswith(SUFFIX)
        assert contents(written) == MEMBERS
    assert os.listdir(written.parent) == [written.name]


def test_a_file_that_a_killed_writer_left_does_no_harm(written: Path):
    (written.parent / f"{PREFIX}0123456789abcdef{SUFFIX}").write_bytes(b"half")
    write_container(written, {"new": b"1"}, {})
    assert contents(written) == {"new": b"1"}


@pytest.mark.slow
def test_members_beyond_4_gib_are_written_and_read_by_others_too(path: Path):
    """Writes 4.3 GiB."""
    zeros = memoryview(bytes(1 << 24))
    write_container(path, {"big": (zeros for _ in range(257)), "after": b"last"}, {})
    with open_container(path) as container:
        assert len(container.member("big")) == 257 << 24
        assert bytes(container.member("after")) == b"last"
        container.check_crc()
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("big").file_size == 257 << 24
        assert archive.read("after") == b"last"
        with archive.open("big") as file:
            assert file.read(100) == bytes(100)
    path.unlink()
