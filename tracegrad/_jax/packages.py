"""Packages that only some users have: matplotlib, and those of the extras."""

from __future__ import annotations

import importlib
from typing import Any


def require(name: str, otherwise: str) -> Any:
    """A module by its name. Raises ImportError where it is missing, which says `otherwise`: what it
    is for, and how it is installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ImportError(otherwise) from None
