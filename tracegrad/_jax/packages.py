"""Imports optional packages: matplotlib, and the packages of the extras."""

from __future__ import annotations

import importlib
from typing import Any


def require(name: str, otherwise: str) -> Any:
    """Imports a module. Raises ImportError with the message `otherwise` (the purpose of the module,
    and how to install it) if the module is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ImportError(otherwise) from None
