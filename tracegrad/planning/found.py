"""What planning has found out before, for the next time that the same is asked."""

from __future__ import annotations

from typing import Any

from tracegrad._jax.caches import Cache

# By all that it depends on; the first part of a key says what it is: bytes that XLA holds, FLOPs of
# a transfer, the rule that a budget is. Saves seconds of compiling and planning: a function that is
# traced again, or planned for another budget, is compiled again as it is with nothing recomputed,
# and often as it was planned; and functions of one budget share their programs.
FOUND: Cache[Any, Any] = Cache(512)
