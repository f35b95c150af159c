"""The colours of a gradient's flow, for pages and pictures."""

from __future__ import annotations

from typing import NamedTuple

from tracegrad.insight.gradient_flow import Flow


class Look(NamedTuple):
    """How a kind of flow is shown.

    Attributes:
      words: its entry in a legend; "" for none.
      hue: the line beside a row of a page, light or dark.
      fill: the background of the text in a picture.
    """

    words: str
    hue: str
    fill: str


LOOKS = {  # in the order of a legend
    Flow.FLOWS: Look("the gradient flows", "#2da44e", "#d8f0dd"),
    Flow.CHANGED: Look("a custom rule changes it", "#8250df", "#e5d8fb"),
    Flow.CUT: Look("it ends here", "#cf222e", "#fbd3d0"),
    Flow.UNREACHED: Look("none arrives", "#bf8700", "#fbe9c3"),
    Flow.NONE: Look("nothing to differentiate", "", "#f3f4f6"),
    Flow.REPLACED: Look("", "", "#f3f4f6"),
    Flow.UNKNOWN: Look("", "", ""),
}
WORDS = {kind: look.words for kind, look in LOOKS.items() if look.words}
