"""Makes blocks of code of the examples in docstrings, which Markdown would take for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*\n?(?:^(?: *)\S.*\n?)*", re.M)
OPTION = re.compile(r" *# doctest: \S+")


class Doctests(griffe.Extension):
    """Puts a fence around each example of each docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_fences(obj.docstring.value)


def with_fences(text: str) -> str:
    """The docstring with its examples, from a prompt to the next empty line, in fences."""
    return EXAMPLE.sub(_fenced, text)


def _fenced(found: re.Match[str]) -> str:
    indent, example = found[1], OPTION.sub("", found[0]).rstrip("\n")
    return f"{indent}```pycon\n{example}\n{indent}```\n"
