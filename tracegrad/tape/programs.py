"""The programs that were made for what runs operation by operation, for the next like it.

Of tapes, of calls with overridden gradients, and what `explain` runs.
"""

from __future__ import annotations

from typing import Any

from tracegrad._jax.caches import Cache

# By all that they depend on; the first part of a key says what was made. They save all of a step
# but its last hundred microseconds: without them each would trace and compile its backward pass,
# and a jitted call with overrides would take 70 ms and not 1 ms.
PROGRAMS: Cache[Any, Any] = Cache(1024)
