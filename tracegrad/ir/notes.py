"""Notes that this package adds to errors of JAX and of users."""

from __future__ import annotations

from tracegrad.ir.occurrence import Origin

NOTE = 300  # characters of text


def add_note(error: Exception, text: str, origin: Origin | None = None) -> None:
    """Adds a note to an error, unless the error has the same note already. A text longer than
    `NOTE` loses its middle. `origin` is the user's line, which stands above the text."""
    if len(text) > NOTE:
        text = f"{text[: NOTE - 105]} ... {text[-100:]}"
    if origin is not None:
        text = f"{origin.file}:{origin.line} in {origin.function}: {origin.code}\n{text}"
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)
