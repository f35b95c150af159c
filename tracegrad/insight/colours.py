"""The colours of a gradient's flow, for pages, pictures and terminals."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from tracegrad.insight.gradient_flow import Flow


class Look(NamedTuple):
    """How a kind of flow is shown.

    Attributes:
      words: its entry in a legend; "" for none.
      style: text in a terminal (SGR codes).
      hue: the line beside a row of a page, light or dark.
      fill: the background of the text in a picture.
    """

    words: str
    style: str
    hue: str
    fill: str


LOOKS = {  # in the order of a legend
    Flow.FLOWS: Look("the gradient flows", "32", "#2da44e", "#d8f0dd"),
    Flow.CHANGED: Look("a custom rule changes it", "35", "#8250df", "#e5d8fb"),
    Flow.CUT: Look("it ends here", "31", "#cf222e", "#fbd3d0"),
    Flow.UNREACHED: Look("none arrives", "33", "#bf8700", "#fbe9c3"),
    Flow.NONE: Look("nothing to differentiate", "2", "", "#f3f4f6"),
    Flow.REPLACED: Look("", "2", "", "#f3f4f6"),
    Flow.UNKNOWN: Look("", "", "", ""),
}
WORDS = {kind: look.words for kind, look in LOOKS.items() if look.words}


def painted(style: str, text: str) -> str:
    """Returns text in a style: the SGR codes between ``ESC [`` and ``m``, or "" for plain text."""
    return f"\033[{style}m{text}\033[0m" if style and text else text


def has_colours() -> bool:
    """Whether output goes to a terminal whose user has not asked for plain text
    (`NO_COLOR <https://no-color.org>`_)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(sys.stdout, "isatty", lambda: False)())
