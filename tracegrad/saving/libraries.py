"""The libraries that saving stands on; where one is missing, what to install."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracegrad._jax.packages import require

__all__ = ["msgspec", "needed", "safetensors_numpy"]


def needed(package: str) -> Any:
    """A package that saving needs. Raises ImportError where it is missing."""
    return require(package, f"saving needs the package {package}: pip install 'tracegrad[save]'")


if TYPE_CHECKING:
    import msgspec
    import safetensors.numpy as safetensors_numpy
else:
    msgspec, safetensors_numpy = needed("msgspec"), needed("safetensors.numpy")
