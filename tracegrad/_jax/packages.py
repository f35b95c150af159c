"""Imports optional packages: matplotlib, and the packages of the extras."""

from __future__ import annotations

import importlib
from typing import Any


def require(name: str, otherwise: str) -> Any:
    """Imports a module by its name. Raises ImportError if it is missing, with the message
    `otherwise`, which says what needs the module and how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ImportError(otherwise) from None
