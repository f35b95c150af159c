"""Notes that this package adds to errors of JAX and of users: each of at most 300 characters."""

from __future__ import annotations

from tracegrad.ir.occurrence import Origin

NOTE = 300  # characters
_CODE = 30  # of the code of a line, at least


def add_note(error: Exception, text: str, origin: Origin | None = None) -> None:
    """Adds a note to an error; nothing if the error has the note already.

    Args:
      error: gets the note.
      text: at most 200 characters of it are never cut; of a longer text the middle is.
      origin: the user's line, which stands above the text: as much of it as there is room for.
    """
    note = _cut(text, NOTE) if origin is None else _below(origin, text)
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _below(origin: Origin, text: str) -> str:
    place = f"{origin.file}:{origin.line} in {origin.function}"
    room = NOTE - len(f"{place}: \n{text}")
    line = f"{place}: {origin.code}"
    if room < len(origin.code):
        line = f"{place}: {origin.code[: room - 3]}..." if room >= _CODE else place
    if len(f"{line}\n{text}") > NOTE:
        line = _cut(str(origin), 99)
    return f"{line}\n{_cut(text, NOTE - 1 - len(line))}"


def _cut(text: str, most: int) -> str:
    """The beginning and the end of a text."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 5]} ... {text[-end:]}"
