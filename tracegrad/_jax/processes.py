"""Arrays that are sharded over several processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def in_numpy(array: Any) -> np.ndarray[Any, Any]:
    """If the array is sharded over several processes, all of these processes have to call this
    function, and each gets the whole array."""
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
