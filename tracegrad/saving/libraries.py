"""Imports the optional libraries of saving; says what to install if one is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracegrad._jax.packages import require

__all__ = ["msgspec", "needed", "safetensors_numpy"]


def needed(package: str) -> Any:
    return require(package, f"saving needs the package {package}: pip install 'tracegrad[save]'")


if TYPE_CHECKING:
    import msgspec
    import safetensors.numpy as safetensors_numpy
else:
    msgspec, safetensors_numpy = needed("msgspec"), needed("safetensors.numpy")
