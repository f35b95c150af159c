"""The error for a file that `tracegrad.save` did not write, or that is damaged."""

from __future__ import annotations

import os


class ArtefactError(ValueError):
    """A file is damaged, or `tracegrad.save` did not write it; no part of it was used.

    Args:
        member: the part of the file that has the fault: the name of an array, or ``header``,
            ``manifest`` or ``file``; in a checkpoint, the name of a file.
        reason: what was expected, what was found, and, if possible, what to do.
        path: the file, or the folder of the checkpoint.

    Example:
        >>> error = ArtefactError("manifest", "it is not JSON", "model.tracegrad")
        >>> error.member, error.reason
        ('manifest', 'it is not JSON')
        >>> print(error)
        model.tracegrad: manifest: it is not JSON
    """

    def __init__(self, member: str, reason: str, path: str | os.PathLike[str]):
        super().__init__(member, reason, path)  # all arguments, so that the error can be pickled
        self.member = member
        self.reason = reason
        self.path = os.fspath(path)

    def __str__(self) -> str:
        return f"{self.path}: {self.member}: {self.reason}"
