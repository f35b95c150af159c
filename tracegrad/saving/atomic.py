"""Replaces a file atomically: at every moment, either the complete old or new file exists."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator

PREFIX, SUFFIX = ".tracegrad-", ".partial"
"""How the names of the folders of unfinished files begin and end. Such a folder belongs to a writer
that is at work or was killed. No code reads these folders; if no writer is at work, delete them."""

# Errors of file systems that cannot flush a folder, and of folders without permission to read.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields a new file, which replaces `path` if the block does not raise.

    The new file is in a new folder beside `path`. After the block, the file is flushed to the disk
    and renamed, which file systems do atomically (rename(2)); then the parent folder is flushed.
    Each writer has its own folder, so two writers never mix: the file of the last writer stays. The
    permissions of an existing file are kept, and a symbolic link stays a symbolic link. If the
    block raises, the new file is removed.

    Args:
        path: the file to write or to replace. Its folder has to exist.

    Yields:
        The path to write to, at which there is an empty file.

    Raises:
        OSError: the folder does not exist or is not writable, `path` is a folder or a device, or
            the disk is full. The error is of the matching subclass; its ``filename`` is `path`.

    Example:
        >>> import os, pathlib, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with replacing(os.path.join(folder, "greeting")) as partial:
        ...     _ = pathlib.Path(partial).write_bytes(b"hello")
        >>> os.listdir(folder)
        ['greeting']
    """
    given = os.fsdecode(path)
    with _name_file_in_errors(given):
        target = os.path.realpath(given)
        mode = _read_mode(target)
        folder = os.path.dirname(target)
        own = os.path.join(folder, f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
        os.mkdir(own)
    try:
        with _name_file_in_errors(given, own):
            partial = os.path.join(own, "file")
            with open(partial, "xb"):  # the block may replace it by a file with other permissions
                mode = mode or stat.S_IMODE(os.stat(partial).st_mode)
            yield partial
            os.chmod(partial, mode)
            with open(partial, "r+b") as file:
                os.fsync(file.fileno())
            os.replace(partial, target)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    _sync_folder(folder, given)


def _read_mode(target: str) -> int | None:
    """Raises OSError if `target` is not a regular file, or if its folder does not exist."""
    try:
        existing = os.stat(target)
    except FileNotFoundError:
        folder = os.path.dirname(target)
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                errno.ENOENT, f"The folder {folder!r} does not exist", target
            ) from None
        return None
    if stat.S_ISDIR(existing.st_mode):
        raise IsADirectoryError(errno.EISDIR, "A folder is in the way", target)
    if not stat.S_ISREG(existing.st_mode):
        raise OSError(errno.EINVAL, "The path exists, but is not a regular file", target)
    return stat.S_IMODE(existing.st_mode)


@contextlib.contextmanager
def _name_file_in_errors(path: str, own: str | None = None) -> Iterator[None]:
    """Makes `path` the file name of an OSError that has no file name, or the name of a file in the
    folder `own`; without `own`, of every OSError."""
    try:
        yield
    except OSError as error:
        # An error of the block about another file is raised unchanged.
        name = error.filename
        if error.errno is None or (own and name and not os.fsdecode(name).startswith(own)):
            raise
        words = error.strerror or "The file cannot be written"
        raise OSError(error.errno, f"{words}; nothing was written", path) from error


def _sync_folder(folder: str, path: str) -> None:
    """Flushes a folder, so that a new name in it survives a loss of power."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            words = f"{error.strerror}; the file is in place, but a loss of power may undo that"
            raise OSError(error.errno, words, path) from error
