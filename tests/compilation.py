"""What XLA compiles, for tests: of a text, and with what JAX keeps of it on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jaxlib._hlo import hlo_module_from_text

from tracegrad.planning.hlo import Module


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def compiled_to(text: str) -> Module:
    """What XLA would say of a program that it writes as a text."""
    return Module(hlo_module_from_text(text).as_serialized_hlo_module_proto())


def temporary_bytes(step: Any, *args: Any) -> int:
    """What XLA needs for a compiled or traced function beside arguments and results."""
    return int(step.lower(*args).compile().memory_analysis().temp_size_in_bytes)


@contextmanager
def kept_on_disk(folder: Path) -> Iterator[None]:
    """A block in which JAX keeps all that is compiled in a folder."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
