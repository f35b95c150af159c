"""How a terminal shows text in colours, if its user wants any."""

from __future__ import annotations

import os
import sys


def painted(style: str, text: str) -> str:
    """A text in a style: SGR codes, the numbers between ``ESC [`` and ``m``; "" is plain."""
    return f"\033[{style}m{text}\033[0m" if style and text else text


def has_colours() -> bool:
    """Whether what is printed goes to a terminal whose user has not asked for plain text
    (`NO_COLOR <https://no-color.org>`_)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(sys.stdout, "isatty", lambda: False)())
