"""Finds the pipeline, with its compiled programs, that wrappers of a function share."""

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
# Reentrant: freeing a pipeline may run finalizers, which may call any code.
_lock = threading.RLock()


def shared_pipeline(
    fun: Callable[..., Any],
    rules: tuple[Rule, ...],
    static: StaticArguments,
    options: dict[str, Any],
) -> Pipeline:
    """All wrappers of a function with the same rules and options share a pipeline."""
    if isinstance(fun, types.MethodType):  # each access makes a new, short-lived method object
        return Pipeline(fun, rules, static, options)
    key = tuple(map(id, rules)), static, tuple(sorted(options.items()))
    with _lock:
        try:
            hash((fun, key))  # without a hash, a function or an option may change later
            # The key has the ids of the rules; the pipelines keep the rules alive.
            known: dict[Any, Pipeline] = facts_of(fun).setdefault(Pipeline, {})
        except TypeError:  # no hash, or no weak references
            return Pipeline(fun, rules, static, options)
        if key not in known:
            if len(known) >= _MOST_PIPELINES:
                known.clear()
            known[key] = Pipeline(fun, rules, static, options)
        return known[key]
