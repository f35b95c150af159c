"""The colours of a gradient's flow, for pages, pictures and terminals."""

from __future__ import annotations

import os
import sys

from tracegrad.insight.gradient_flow import Flow

# The entries of a legend, in its order.
WORDS = {
    Flow.FLOWS: "the gradient flows",
    Flow.CHANGED: "a custom rule changes it",
    Flow.CUT: "it ends here",
    Flow.UNREACHED: "none arrives",
    Flow.NONE: "nothing to differentiate",
}
# HUES: lines beside the rows of a page, light or dark. FILLS: backgrounds of the text in a picture.
# STYLES: text in a terminal (SGR codes).
HUES = {
    Flow.FLOWS: "#2da44e",
    Flow.CHANGED: "#8250df",
    Flow.CUT: "#cf222e",
    Flow.UNREACHED: "#bf8700",
}
FILLS = {
    Flow.FLOWS: "#d8f0dd",
    Flow.CHANGED: "#e5d8fb",
    Flow.CUT: "#fbd3d0",
    Flow.UNREACHED: "#fbe9c3",
    Flow.NONE: "#f3f4f6",
    Flow.REPLACED: "#f3f4f6",
}
STYLES = {
    Flow.FLOWS: "32",
    Flow.CHANGED: "35",
    Flow.CUT: "31",
    Flow.UNREACHED: "33",
    Flow.NONE: "2",
    Flow.REPLACED: "2",
    Flow.UNKNOWN: "",
}


def painted(style: str, text: str) -> str:
    """Returns text in a style: the SGR codes between ``ESC [`` and ``m``, or "" for plain text."""
    return f"\033[{style}m{text}\033[0m" if style and text else text


def has_colours() -> bool:
    """Whether output goes to a terminal whose user has not asked for plain text
    (`NO_COLOR <https://no-color.org>`_)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(sys.stdout, "isatty", lambda: False)())
