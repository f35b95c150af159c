"""Shows a progress bar of tqdm for long work."""

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
    """A block for work of `steps` steps; call the yielded function when a step begins.

    The bar appears with the first step that begins after `DELAY`, and ends with the block. There is
    no bar without tqdm, and outside of terminals and notebooks.
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
    """None if tqdm is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets has no bar
            kind = importlib.import_module("tqdm.auto").tqdm
    except ImportError:
        return None
    # None disables a bar without a terminal; a notebook has none, but shows the bar.
    disable = False if "tqdm.notebook" in {base.__module__ for base in kind.__mro__} else None
    look = (
        "{desc} |{bar}| {n_fmt}/{total_fmt}"  # without a rate: the steps take very different times
    )
    # No argument `delay`: with it, tqdm does not erase a bar that had only descriptions.
    return kind(desc=text, initial=done, total=steps, leave=False, disable=disable, bar_format=look)
