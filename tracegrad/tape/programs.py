"""The programs that tapes have traced and compiled, for the next operation or record like it."""

from __future__ import annotations

from typing import Any

from tracegrad._jax.caches import Cache

# By all that they depend on; the first part of a key says what was made. They save all of a step
# but its last hundred microseconds: without them each would trace and compile its backward pass.
PROGRAMS: Cache[Any, Any] = Cache(1024)
