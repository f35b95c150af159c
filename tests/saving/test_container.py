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
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tracegrad.saving.atomic import PREFIX, SUFFIX, replacing
from tracegrad.saving.container import SEAL, open_container, write_container
from tracegrad.saving.errors import ArtefactError

ARRAYS = {
    "weights": np.arange(50, dtype=np.float32).reshape(5, 10),
    "programs/f": np.frombuffer(b"program", np.uint8),
    "empty": np.zeros(0, np.uint8),
    "ö": np.array(True),
}
DOCUMENT = {"who": "ö", "numbers": [1, 2.5, None, True]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.tracegrad"


@pytest.fixture
def written(path: Path) -> Path:
    write_container(path, ARRAYS, DOCUMENT)
    return path


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], strict=True)


def contents(path: Path) -> dict[str, np.ndarray]:
    with open_container(path) as container:
        return {name: container.array(name) for name in container.tensors}


def test_arrays_and_manifest_come_back(written: Path):
    assert_equal(contents(written), ARRAYS)  # in their order
    with open_container(written) as container:
        assert container.manifest == DOCUMENT
        assert container.size == written.stat().st_size
        assert container.sha256("programs/f") == hashlib.sha256(b"program").hexdigest()


def test_the_library_of_the_format_reads_the_file(written: Path):
    arrays = safetensors.numpy.load_file(written)
    seal = arrays.pop(SEAL).tobytes()
    assert_equal({name: arrays[name] for name in ARRAYS}, ARRAYS)
    assert arrays.keys() == ARRAYS.keys()
    assert written.read_bytes().endswith(seal)
    with safetensors.safe_open(written, "np") as file:
        assert file.metadata().keys() == {"tracegrad.manifest"}
        np.testing.assert_array_equal(file.get_slice("weights")[2:4], ARRAYS["weights"][2:4])


def test_the_seal_has_a_sha256_of_the_header_and_of_each_array(written: Path):
    seal = safetensors.numpy.load_file(written)[SEAL].tobytes()
    raw = written.read_bytes()
    header = raw[: 8 + int.from_bytes(raw[:8], "little")]
    parts = [header, *(array.tobytes() for array in ARRAYS.values())]
    table = b"".join(hashlib.sha256(part).digest() for part in parts)
    digest = hashlib.sha256(table).hexdigest()
    assert seal == table + b"tracegrad artefact 0001 00000005 " + digest.encode()


def test_equal_contents_make_equal_files(written: Path, tmp_path: Path):
    write_container(tmp_path / "again", ARRAYS, DOCUMENT)
    assert (tmp_path / "again").read_bytes() == written.read_bytes()


def test_the_first_array_begins_at_a_multiple_of_64_bytes_in_memory(written: Path):
    assert contents(written)["weights"].ctypes.data % 64 == 0


def test_large_arrays_need_no_memory_of_their_own(path: Path):
    big = np.arange(8 << 20, dtype=np.float32)  # 32 MiB
    tracemalloc.start()
    try:
        write_container(path, {"big": big}, {})
        with open_container(path) as container:
            assert len(container.bytes("big")) == 32 << 20
            assert (
                container.bytes("big")[5 << 20 : 6 << 20] == big.data.cast("B")[5 << 20 : 6 << 20]
            )
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_contents_outlive_the_container_and_the_file(written: Path):
    with open_container(written) as container:
        array = container.array("weights")
    write_container(written, {"other": np.ones(1)}, {})
    written.unlink()
    np.testing.assert_array_equal(array, ARRAYS["weights"])
    assert not array.flags.writeable


def test_without_a_check_at_first_each_array_is_checked_when_it_is_asked_for(written: Path):
    data = bytearray(written.read_bytes())
    data[data.rindex(b"program")] ^= 1
    written.write_bytes(data)
    with pytest.raises(ArtefactError, match=r"programs/f: its contents were changed"):
        open_container(written).__enter__()
    with open_container(written, check=False) as container:
        assert bytes(container.bytes("empty")) == b""
        for _ in range(2):
            with pytest.raises(ArtefactError, match="SHA-256") as caught:
                container.array("programs/f")
    assert caught.value.member == "programs/f"
    with pytest.raises(ArtefactError) as caught, open_container(written, check=False) as container:
        container.bytes("programs/f")
    assert caught.value.path == str(written)
    assert str(written) in str(caught.value)


def test_of_a_large_file_each_array_is_checked_too(path: Path):
    """Several at a time, which one sees of nothing but the time."""
    write_container(path, {name: np.zeros(5 << 20, np.uint8) for name in "abcdef"}, {})
    with open(path, "r+b") as file:
        file.seek(26 << 20)
        file.write(b"x")
    with pytest.raises(ArtefactError) as caught:
        open_container(path).__enter__()
    assert (caught.value.member, caught.value.path) == ("f", str(path))


def test_an_array_that_does_not_exist_is_named(written: Path):
    with open_container(written) as container, pytest.raises(ArtefactError, match="no such array"):
        container.array("missing")


@pytest.mark.parametrize(
    ("arrays", "manifest"),
    [
        ({SEAL: np.ones(1)}, {}),
        ({"__metadata__": np.ones(1)}, {}),
        ({"\ud800": np.ones(1)}, {}),
        ({"text": np.array(["text"])}, {}),
        ({}, {"x": float("nan")}),
        ({}, {"x": "\ud800"}),
        ({}, {"x": {1: "a", "1": "b"}}),
        ({}, {"x": [{}] * 100_000}),
    ],
)
def test_what_could_not_be_read_back_is_not_written(path: Path, arrays: dict, manifest: dict):
    with pytest.raises(ValueError):
        write_container(path, arrays, manifest)
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
        (lambda path: path.write_bytes(b"x"), "does not end with the seal"),
        (lambda path: path.write_bytes(b"x" * 1000), "does not end with the seal"),
        (
            lambda path: safetensors.numpy.save_file({"x": np.ones(3)}, path),
            "does not end with the seal .* load_variables reads any file",
        ),
    ],
)
def test_other_files_are_refused(path: Path, make, reason: str):
    make(path)
    with pytest.raises(ArtefactError, match=reason):
        open_container(path).__enter__()


def test_a_file_written_anew_by_another_program_is_refused(written: Path):
    with safetensors.safe_open(written, "np") as file:
        metadata = file.metadata()
    safetensors.numpy.save_file(safetensors.numpy.load_file(written), written, metadata)
    with pytest.raises(ArtefactError, match=r"file: it does not end|tracegrad/seal: "):
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
        write_container(path, ARRAYS, {})
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
    assert_equal(contents(written), ARRAYS)


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
    write_container(path, ARRAYS, {})
    folder.chmod(0o555)
    with nobody(), pytest.raises(PermissionError, match="nothing was written") as caught:
        write_container(path, {}, {})
    assert caught.value.filename == str(path)
    assert_equal(contents(path), ARRAYS)
    assert os.listdir(folder) == ["model"]
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(written: Path):
    before = written.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="nothing was written") as caught:
            write_container(written, {"big": np.zeros(1 << 20, np.uint8)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG  # what a limit answers in place of ENOSPC
    assert caught.value.filename == str(written)
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_an_error_while_it_is_written_leaves_the_old_file_and_nothing_else(written: Path):
    before = written.read_bytes()

    def interrupted() -> None:
        with replacing(written) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_permissions_and_links_stay(written: Path):
    written.chmod(0o640)
    link = written.with_name("link")
    link.symlink_to(written.name)
    write_container(link, {"new": np.ones(1)}, {})
    assert link.is_symlink()
    assert_equal(contents(written), {"new": np.ones(1)})
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
        assert_equal(contents(written), ARRAYS)
    assert os.listdir(written.parent) == [written.name]


def test_a_file_that_a_killed_writer_left_does_no_harm(written: Path):
    (written.parent / f"{PREFIX}0123456789abcdef{SUFFIX}").write_bytes(b"half")
    write_container(written, {"new": np.ones(1)}, {})
    assert_equal(contents(written), {"new": np.ones(1)})


@pytest.mark.slow
def test_arrays_beyond_4_gib_are_written_and_read_by_others_too(path: Path):
    """Writes 4.3 GiB."""
    write_container(path, {"big": np.zeros(257 << 24, np.uint8), "after": np.arange(3)}, {})
    with open_container(path) as container:
        assert len(container.bytes("big")) == 257 << 24
        np.testing.assert_array_equal(container.array("after"), np.arange(3))
    with safetensors.safe_open(path, "np") as file:
        np.testing.assert_array_equal(file.get_tensor("after"), np.arange(3))
        np.testing.assert_array_equal(
            file.get_slice("big")[(257 << 24) - 100 :], np.zeros(100, np.uint8)
        )
    path.unlink()
