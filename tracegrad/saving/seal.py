"""The seal of a checkpoint: the SHA-256 of each file in its folder. Only sealed folders are loaded.

The folder of the user contains folders ``tracegrad-0``, ``tracegrad-1`` and so on. Each save writes
the next one, and seals it when all its files are written. The sealed folder with the highest number
is the state. So if a process is killed at any time, a complete state remains. Orbax loads damaged
arrays without an error: so the files are compared with the seal first.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tracegrad import _jax
from tracegrad._version import __version__
from tracegrad.saving.file import check_digests, digests_of, open_file, read_header, write_file
from tracegrad.saving.manifest import ArrayRecord, Seal

SEAL = "tracegrad.seal"
_STEP = re.compile(r"tracegrad-(\d+)")


def _steps(folder: Path) -> dict[int, Path]:
    """Returns the folders of steps, sealed or not, by their numbers."""
    found = ((_STEP.fullmatch(each.name), each) for each in folder.iterdir())
    return {int(match[1]): each for match, each in found if match}


def next_step(folder: Path) -> int:
    return 1 + max(_steps(folder), default=-1)


def last_sealed(folder: Path) -> int:
    """Raises OSError if there is no sealed folder."""
    sealed = [number for number, step in _steps(folder).items() if (step / SEAL).is_file()]
    if not sealed:
        raise FileNotFoundError(
            f"there is no complete checkpoint of save_variables in {str(folder)!r}"
        )
    return max(sealed)


def step_folder(folder: Path, number: int) -> Path:
    return folder / f"tracegrad-{number}"


def files_of(step: Path) -> list[str]:
    """Without the seal and hidden files of the file system."""
    found = (file for file in step.rglob("*") if file.is_file())
    names = (file.relative_to(step).as_posix() for file in found if not file.name.startswith("."))
    return sorted(name for name in names if name != SEAL)


def digests_of_files(step: Path, files: Sequence[str]) -> dict[str, str]:
    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return digests_of({name: step / name for name in files}, digest)


def seal(step: Path, arrays: Mapping[str, ArrayRecord], files: Mapping[str, str]) -> None:
    """Also removes the checkpoints with lower numbers: those with higher ones are by newer saves.
    The files of this checkpoint must be written."""
    versions = {"tracegrad": __version__, **_jax.versions()}
    write_file(step / SEAL, {}, Seal(versions, dict(files), dict(arrays)))
    own = int(step.name.removeprefix("tracegrad-"))
    remove(each for number, each in _steps(step.parent).items() if number < own)


def remove(steps: Iterable[Path]) -> None:
    """Removes checkpoints, the seal first, so that a partly removed checkpoint is never loaded."""
    for step in steps:
        (step / SEAL).unlink(missing_ok=True)
        shutil.rmtree(step, ignore_errors=True)


def read_seal(step: Path) -> Seal:
    """Reads the seal of a checkpoint, and compares every file of the checkpoint with the seal.

    Raises ArtefactError if the seal is damaged or a file differs from the seal.
    """
    with open_file(step / SEAL) as file:
        _, found, _ = read_header(file, Seal)
    check_digests(digests_of_files(step, files_of(step)), found.digests, step, "seal")
    return found
