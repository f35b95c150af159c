"""Says what is being done, as a bar of tqdm's, where the work takes long."""

from __future__ import annotations

import importlib
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DELAY = 2.0  # seconds of work before there is a bar


@contextmanager
def progress(name: str, steps: int) -> Iterator[Callable[[str], None]]:
    """A block of so many steps: a function to be told which of them begins.

    There is a bar from the first step that begins after `DELAY`, until the block ends. There is
    none where tqdm is not installed, nor where there is neither a terminal nor a notebook.
    """
    since, done = time.monotonic() if sys.stderr else math.inf, -1
    bar: Any = None

    def begin(step: str) -> None:
        nonlocal since, done, bar
        done += 1
        if bar is None and time.monotonic() - since >= DELAY:
            since, bar = math.inf, _bar(f"{name}: {step}", done, steps)
        elif bar is not None:
            bar.n = done
            bar.set_description_str(f"{name}: {step}")

    try:
        yield begin
    finally:
        if bar is not None:
            bar.close()


def _bar(text: str, done: int, steps: int) -> Any:
    """None where there is no tqdm."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets: it has no bar then
            kind = importlib.import_module("tqdm.auto").tqdm
    except ImportError:
        return None
    # What a notebook shows is no terminal, for which None would disable it there.
    disable = False if "tqdm.notebook" in {base.__module__ for base in kind.__mro__} else None
    look = "{desc} |{bar}| {n_fmt}/{total_fmt}"  # and no rate: one step may be a hundred others
    # With its `delay` tqdm would not erase a bar that shows nothing but descriptions.
    return kind(desc=text, initial=done, total=steps, leave=False, disable=disable, bar_format=look)
