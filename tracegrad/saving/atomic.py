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
            the disk is full. The error is of the matching subclass.

    Example:
        >>> import os, pathlib, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with replacing(os.path.join(folder, "greeting")) as partial:
        ...     _ = pathlib.Path(partial).write_bytes(b"hello")
        >>> os.listdir(folder)
        ['greeting']
    """
    target = os.path.realpath(os.fsdecode(path))
    is_there = os.path.exists(target)
    if is_there and not os.path.isfile(target):
        number = errno.EISDIR if os.path.isdir(target) else errno.EINVAL
        raise OSError(number, "The path exists, but is not a regular file", target)
    folder = os.path.dirname(target)
    own = os.path.join(folder, f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
    os.mkdir(own)
    try:
        partial = os.path.join(own, "file")
        with open(partial, "xb"):  # the block may replace it by a file with other permissions
            mode = stat.S_IMODE(os.stat(target if is_there else partial).st_mode)
        yield partial
        os.chmod(partial, mode)
        with open(partial, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
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
            raise
