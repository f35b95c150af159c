"""How a file is replaced so that at every moment the old one or the new one is there, whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

PREFIX, SUFFIX = ".tracegrad-", ".partial"
"""What the names of unfinished files begin and end with. One that lies about belongs to a writer
at work or to one that was killed; nothing reads them, and when nobody writes they can go."""

# What file systems answer that cannot flush a folder, or folders that may be written but not read.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends without an error.

    It is written under another name in the same folder, flushed to the disk, and renamed, which
    file systems do in one step (rename(2)); then the folder is flushed. Each writer has a name of
    its own, so two never mix: the last to finish stays. Permissions of a file that was there are
    kept, and a symbolic link stays one. If the block raises, its file is removed.

    Args:
        path: where the file shall be. The folder has to exist.

    Yields:
        The open file, writable and seekable.

    Raises:
        OSError: the folder is missing or may not be written, `path` is a folder or a device, the
            disk is full: an `OSError` of the fitting kind whose ``filename`` is `path`.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with replacing(os.path.join(folder, "greeting")) as file:
        ...     _ = file.write(b"hello")
        >>> os.listdir(folder)
        ['greeting']
    """
    given = os.fsdecode(path)
    with _named(given):
        target = os.path.realpath(given)
        mode = _mode_of_existing(target)
        folder = os.path.dirname(target)
        partial = os.path.join(folder, f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        descriptor = os.open(partial, flags, 0o666)
    try:
        # Inside of the names: closing flushes, and can find the disk full a second time.
        with _named(given, partial), os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            if mode is not None:
                os.chmod(partial, mode)
            os.fsync(file.fileno())
        with _named(given, partial):
            os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    _sync_folder(folder, given)


def _mode_of_existing(target: str) -> int | None:
    """The permissions of what is in place, if it is a file; None if there is nothing."""
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
        raise OSError(errno.EINVAL, "What is there is no ordinary file to replace", target)
    return stat.S_IMODE(existing.st_mode)


@contextlib.contextmanager
def _named(path: str, partial: str | None = None) -> Iterator[None]:
    """Names `path` in errors about the file of another name in its stead, or without a name."""
    try:
        yield
    except OSError as error:
        # Errors of the block that are about other files pass as they are.
        if error.errno is None or (partial and error.filename not in (None, partial)):
            raise
        words = error.strerror or "The file cannot be written"
        raise OSError(error.errno, f"{words}; nothing was written", path) from error


def _sync_folder(folder: str, path: str) -> None:
    """Makes the new name last through a loss of power, where a folder can be opened at all."""
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
