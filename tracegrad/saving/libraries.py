"""The libraries that saving stands on; where one is missing, what to install."""

from __future__ import annotations

try:
    import msgspec as msgspec
    import safetensors.numpy as safetensors_numpy
except ModuleNotFoundError as error:
    raise ImportError(
        f"saving needs the package {error.name}: pip install 'tracegrad[save]'"
    ) from None

__all__ = ["msgspec", "safetensors_numpy"]
