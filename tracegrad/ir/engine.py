"""Functions of later rooms that earlier rooms need; the first call imports the later room."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def _late(file: str, name: str) -> Callable[..., Any]:
    return lambda *args: getattr(importlib.import_module(f"tracegrad.{file}"), name)(*args)


to_callable: Callable[[Any], Callable[..., Any]] = _late("tracing.callable", "to_callable")
fit_to_budget = _late("planning.plan_recompute", "recompute_to_fit")
derivatives_by_rules = _late("differentiation.jax_derivatives", "derivatives_by_rules")
