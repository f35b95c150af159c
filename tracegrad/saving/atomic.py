"""How a file is replaced so that at every moment the old one or the new one is there, whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator

PREFIX, SUFFIX = ".tracegrad-", ".partial"
"""What the names of the folders of unfinished files begin and end with. One that lies about belongs
to a writer at work or to one that was killed; nothing reads them, and when nobody writes they can
go."""

# What file systems answer that cannot flush a folder, or folders that may be written but not read.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A new file that takes the place of `path` when the block ends without an error.

    It is written in a folder of its own in the same folder, flushed to the disk, and renamed, which
    file systems do in one step (rename(2)); then the folder is flushed. Each writer has a folder of
    its own, so two never mix: the last to finish stays. Permissions of a file that was there are
    kept, and a symbolic link stays one. If the block raises, what it wrote is removed.

    Args:
        path: where the file shall be. The folder has to exist.

    Yields:
        The path to write to, at which there is an empty file.

    Raises:
        OSError: the folder is missing or may not be written, `path` is a folder or a device, the
            disk is full: an `OSError` of the fitting kind whose ``filename`` is `path`.

    Example:
        >>> import os, pathlib, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with replacing(os.path.join(folder, "greeting")) as partial:
        ...     _ = pathlib.Path(partial).write_bytes(b"hello")
        >>> os.listdir(folder)
        ['greeting']
    """
    given = os.fsdecode(path)
    with _named(given):
        target = os.path.realpath(given)
        mode = _mode_of_existing(target)
        folder = os.path.dirname(target)
        own = os.path.join(folder, f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
        os.mkdir(own)
    try:
        with _named(given, own):
            partial = os.path.join(own, "file")
            with open(partial, "xb"):  # whoever writes may take its place by a file of other rights
                mode = mode or stat.S_IMODE(os.stat(partial).st_mode)
            yield partial
            os.chmod(partial, mode)
            with open(partial, "r+b") as file:
                os.fsync(file.fileno())
            os.replace(partial, target)
    finally:
        shutil.rmtree(own, ignore_errors=True)
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
def _named(path: str, own: str | None = None) -> Iterator[None]:
    """Names `path` in errors about what is in the folder of its writer, or without a name."""
    try:
        yield
    except OSError as error:
        # Errors of the block that are about other files pass as they are.
        name = error.filename
        if error.errno is None or (own and name and not os.fsdecode(name).startswith(own)):
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
