"""A saved function's file: written whole or not at all, read back as written, by others too."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import resource
import shutil
import stat
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tracegrad.saving.atomic import PREFIX, SUFFIX
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.file import read_file, stored, write_file
from tracegrad.saving.inspection import inspect
from tracegrad.saving.manifest import Manifest

ARRAYS = {
    "weights": np.arange(50, dtype=np.float32).reshape(5, 10),
    "programs/f": np.frombuffer(b"program", np.uint8),
    "empty": np.zeros(0, np.uint8),
    "ö": np.array(True),
}
MANIFEST = Manifest({"who": "ö"}, {}, True, (), ())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.tracegrad"


@pytest.fixture
def written(path: Path) -> Path:
    write_file(path, ARRAYS, MANIFEST)
    return path


def assert_holds(path: Path, wanted: dict[str, np.ndarray]) -> None:
    arrays = read_file(path).arrays
    assert {name: bytes(data) for name, data in arrays.items()} == {
        name: array.tobytes() for name, array in wanted.items()
    }


def test_arrays_and_manifest_come_back(written: Path):
    assert_holds(written, ARRAYS)
    contents = read_file(written)
    assert contents.manifest.versions == {"who": "ö"}
    digest = hashlib.sha256(b"program").hexdigest()
    assert contents.manifest.digests["programs/f"] == digest


def test_the_library_of_the_format_reads_the_file(written: Path):
    arrays = safetensors.numpy.load_file(written)
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array, strict=True)
    with safetensors.safe_open(written, "np") as file:
        assert file.metadata().keys() == {"tracegrad"}
        np.testing.assert_array_equal(file.get_slice("weights")[2:4], ARRAYS["weights"][2:4])


def test_strides_byte_orders_and_scalars_are_written_as_they_are_read(path: Path):
    big = np.arange(6, dtype=">f4").reshape(2, 3).T
    write_file(path, {"a": stored(big), "b": stored(np.float32(3))}, MANIFEST)
    arrays = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(arrays["a"], big)
    assert arrays["b"].shape == ()


def test_large_arrays_need_no_memory_to_be_written_and_their_own_to_be_read(path: Path):
    big = np.arange(8 << 20, dtype=np.float32)  # 32 MiB
    tracemalloc.start()
    try:
        write_file(path, {"big": big}, MANIFEST)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        assert read_file(path).arrays["big"] == big.data.cast("B")
        assert tracemalloc.get_traced_memory()[1] < big.nbytes + (1 << 20)
    finally:
        tracemalloc.stop()


def test_what_was_read_does_not_change_with_the_file(written: Path):
    arrays = read_file(written).arrays
    os.truncate(written, 8)
    assert bytes(arrays["weights"]) == ARRAYS["weights"].tobytes()
    written.unlink()
    assert bytes(arrays["weights"]) == ARRAYS["weights"].tobytes()
    assert arrays["weights"].readonly


def test_every_flipped_bit_is_found(written: Path):
    data = written.read_bytes()
    for place in range(len(data)):
        for bit in (0, 3, 7):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            written.write_bytes(flipped)
            with pytest.raises(ArtefactError):
                read_file(written)


def test_a_changed_array_is_named(written: Path):
    data = bytearray(written.read_bytes())
    data[data.rindex(b"program")] ^= 1
    written.write_bytes(data)
    inspect(written)  # the header is sound
    with pytest.raises(ArtefactError, match=r"programs/f: its contents .*SHA-256") as caught:
        read_file(written)
    assert (caught.value.member, caught.value.path) == ("programs/f", str(written))


def test_an_error_can_be_pickled():
    error = ArtefactError("member", "reason", "path")
    again = pickle.loads(pickle.dumps(error))
    assert (again.member, again.reason, again.path) == ("member", "reason", "path")


# What is no saved file at all


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: path.touch(), "it is empty"),
        (lambda path: os.mkfifo(path), "not a regular file"),
        (lambda path: path.write_bytes(b"x"), "it is damaged, or tracegrad did not write it"),
        (lambda path: path.write_bytes(b"x" * 1000), "tracegrad did not write it"),
        (
            lambda path: safetensors.numpy.save_file({"x": np.ones(3)}, path),
            "tracegrad did not write it",
        ),
    ],
)
def test_other_files_are_refused(path: Path, make, reason: str):
    make(path)
    with pytest.raises(ArtefactError, match=reason):
        read_file(path)


def test_a_newer_format_is_named(written: Path):
    data = written.read_bytes().replace(b'"tracegrad":"2 ', b'"tracegrad":"3 ')
    written.write_bytes(data)
    with pytest.raises(
        ArtefactError, match="format 3, but this version of tracegrad reads format 2"
    ):
        read_file(written)


# Replacing what is there


@pytest.mark.parametrize(
    ("name", "make", "error"),
    [
        ("no/f", lambda path: None, FileNotFoundError),
        ("f", lambda path: path.mkdir(), IsADirectoryError),
        ("f/x", lambda path: path.parent.touch(), NotADirectoryError),
        ("f", lambda path: os.mkfifo(path), OSError),
        ("x" * 300, lambda path: None, OSError),
    ],
    ids=["no folder", "a folder in the way", "a file for a folder", "a device", "too long a name"],
)
def test_where_no_file_can_be_written_nothing_is(tmp_path: Path, name, make, error):
    path = tmp_path / name
    make(path)
    before = [(each, each.stat().st_mode) for each in tmp_path.iterdir()]
    with pytest.raises(error):
        write_file(path, ARRAYS, MANIFEST)
    assert [(each, each.stat().st_mode) for each in tmp_path.iterdir()] == before


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


def test_without_permission_the_old_file_stays():
    folder = Path(tempfile.mkdtemp())  # not below pytest's, which only its owner may enter
    path = folder / "model"
    write_file(path, ARRAYS, MANIFEST)
    folder.chmod(0o555)
    with nobody(), pytest.raises(PermissionError):
        write_file(path, {}, MANIFEST)
    assert_holds(path, ARRAYS)
    assert os.listdir(folder) == ["model"]
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(written: Path):
    before = written.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=r"too large") as caught:
            write_file(written, {"big": np.zeros(1 << 20, np.uint8)}, MANIFEST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG  # what a limit answers in place of ENOSPC
    assert caught.value.filename == written
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_permissions_and_links_stay(written: Path):
    written.chmod(0o640)
    link = written.with_name("link")
    link.symlink_to(written.name)
    write_file(link, {"new": np.ones(1)}, MANIFEST)
    assert link.is_symlink()
    assert_holds(written, {"new": np.ones(1)})
    assert stat.S_IMODE(written.stat().st_mode) == 0o640


def test_a_new_file_gets_the_permissions_that_others_get(path: Path):
    before = os.umask(0o027)
    try:
        write_file(path, {}, MANIFEST)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_a_killed_writer_left_does_no_harm(written: Path):
    left = written.parent / f"{PREFIX}0123456789abcdef{SUFFIX}"
    left.mkdir()
    (left / "file").write_bytes(b"half")
    write_file(written, {"new": np.ones(1)}, MANIFEST)
    assert_holds(written, {"new": np.ones(1)})


@pytest.mark.slow
def test_arrays_beyond_4_gib_are_written_and_read_by_others_too(path: Path):
    """Writes 4.3 GiB."""
    write_file(path, {"big": np.zeros(257 << 24, np.uint8), "after": np.arange(3)}, MANIFEST)
    arrays = read_file(path).arrays
    assert len(arrays["big"]) == 257 << 24
    assert bytes(arrays["after"]) == np.arange(3).tobytes()
    with safetensors.safe_open(path, "np") as file:
        np.testing.assert_array_equal(file.get_tensor("after"), np.arange(3))
    path.unlink()
