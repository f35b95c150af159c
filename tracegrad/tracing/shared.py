"""Which wrappers of a function share a pipeline, and with it what is compiled."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

from tracegrad._jax.caches import facts_of
from tracegrad.tracing.arguments import StaticArguments
from tracegrad.tracing.graphs import Rule
from tracegrad.tracing.pipeline import Pipeline

_MOST_PIPELINES = 256  # of one function
_lock = threading.RLock()  # a pipeline that is let go of here may run anything


def shared_pipeline(
    fun: Callable[..., Any],
    rules: tuple[Rule, ...],
    static: StaticArguments,
    options: dict[str, Any],
) -> Pipeline:
    """One pipeline for all wrappers of a function with the same rules and options: they share its
    programs. Those with the same rules share the history."""
    if isinstance(fun, types.MethodType):  # each access makes one, which is gone after its use
        return Pipeline(fun, rules, static, options)
    key = tuple(map(id, rules)), static, tuple(sorted(options.items()))
    with _lock:
        try:
            hash((fun, key))  # what has none may change, and be traced again for that
            # By the identity of rules, which the pipelines hold, and the rest.
            known: dict[Any, Pipeline] = facts_of(fun).setdefault(Pipeline, {})
        except TypeError:  # or cannot be held weakly
            return Pipeline(fun, rules, static, options)
        if key not in known:
            if len(known) >= _MOST_PIPELINES:
                known.clear()
            history = next((p.history for k, p in known.items() if k[:2] == key[:2]), None)
            known[key] = Pipeline(fun, rules, static, options, history)
        return known[key]
