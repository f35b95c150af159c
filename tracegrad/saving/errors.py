"""The error that every file gets that is not an artefact, or no longer a whole one."""

from __future__ import annotations

import os


class ArtefactError(ValueError):
    """A file cannot be trusted to be what `tracegrad.save` wrote, so nothing of it was used.

    Args:
        member: the part of the file that the fault is in: an array, by its name, or ``header``,
            ``manifest``, ``tracegrad/seal``, or ``file``.
        reason: what was expected, what came, and what to do where something can be done.
        path: the file.

    Example:
        >>> error = ArtefactError("manifest", "it is no JSON", "model.tracegrad")
        >>> error.member, error.reason
        ('manifest', 'it is no JSON')
        >>> print(error)
        model.tracegrad: manifest: it is no JSON
    """

    def __init__(self, member: str, reason: str, path: str | os.PathLike[str] | None = None):
        super().__init__(member, reason, path)  # the arguments, so that it can be pickled
        self.member = member
        self.reason = reason
        self.path = None if path is None else os.fspath(path)

    def __str__(self) -> str:
        where = "" if self.path is None else f"{self.path}: "
        return printable(f"{where}{self.member}: {self.reason}")


def printable(text: str) -> str:
    """A text from a file, without what a terminal would take for commands.

    Example:
        >>> print(printable("weights" + chr(27) + "[2J"))
        weights\\x1b[2J
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
