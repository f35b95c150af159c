"""Notes that this package adds to errors of JAX and of users: each of at most 300 characters."""

from __future__ import annotations

from tracegrad.ir.occurrence import Origin

NOTE = 300  # characters
_CODE = 30  # characters; a line's code is left out if there is room for less of it


def add_note(error: Exception, text: str, origin: Origin | None = None) -> None:
    """Adds a note to an error, unless the error has the same note already. A longer text than 200
    characters loses its middle. `origin`, the user's line, stands above the text, and is cut if
    there is no room for it."""
    note = _shorten_middle(text, NOTE) if origin is None else _note_below_line(origin, text)
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _note_below_line(origin: Origin, text: str) -> str:
    place = f"{origin.file}:{origin.line} in {origin.function}"
    room = NOTE - len(f"{place}: \n{text}")
    line = f"{place}: {origin.code}"
    if room < len(origin.code):
        line = f"{place}: {origin.code[: room - 3]}..." if room >= _CODE else place
    if len(f"{line}\n{text}") > NOTE:
        line = _shorten_middle(str(origin), 99)
    return f"{line}\n{_shorten_middle(text, NOTE - 1 - len(line))}"


def _shorten_middle(text: str, most: int) -> str:
    """Returns a text, or its beginning and end if it is longer than `most`."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 5]} ... {text[-end:]}"
