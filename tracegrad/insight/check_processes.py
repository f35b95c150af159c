"""`check_processes`: whether all processes are about to run the same program, before they do."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad._jax.processes import agree
from tracegrad.tracing.graphs import function_name

_MOST_COMPARED = 1 << 20  # bytes of a program, compressed; the service takes four times as many
_MOST_SHOWN = 300  # characters of a line


def check_processes(
    fun: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any
) -> None:
    """Raises where the processes of a program would not run the same for these arguments.

    Programs that differ wait for one another in their collectives, mostly for ever. This compares
    what they would be compiled from (StableHLO, with rules and plans at work), and runs nothing.
    Call it on all processes, before the first call; it traces the function, which that call then
    need not do again. With one process it does nothing.

    Arguments:
      fun: a traced, jitted or plain function.
      args, kwargs: what it is going to be called with: arrays or `jax.ShapeDtypeStruct`s.
      timeout: how long to wait for the other processes, in seconds.

    Raises:
      ValueError: two processes have different programs; the message shows the first line of each
        that is another.
      TimeoutError: some processes did not call this; it names them.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> step = tg.trace(lambda w, x: w - 0.1 * x)
    >>> tg.check_processes(step, jnp.ones(3), jnp.ones(3))
    """
    if jax.process_count() == 1:
        return
    compiled: Any = fun if hasattr(fun, "lower") else jax.jit(fun)
    text = compiled.lower(*args, **kwargs).as_text()
    topic = f"check_processes({function_name(fun)})"
    digest = hashlib.sha256(text.encode()).hexdigest()
    outcome = agree(topic, digest, timeout, lambda said: "" if len({*said}) == 1 else "other")
    if outcome:
        packed = base64.b64encode(zlib.compress(text.encode(), 9)[:_MOST_COMPARED]).decode()
        difference = agree(f"{topic}, where they differ", packed, timeout, _difference)
        raise ValueError(
            f"{function_name(fun)} is not the same program on all processes, which would wait for "
            f"one another: {difference}\nWhat it depends on has to be the same on all of them: "
            "shapes, static values, Python's branches, rules, budgets, random seeds, versions"
        )


def _difference(said: Sequence[str]) -> str:
    """Where the program of process 0 and the first that is another begin to differ."""
    process = next(k for k, packed in enumerate(said) if packed != said[0])
    here, there = (
        zlib.decompressobj().decompress(base64.b64decode(packed)).decode(errors="replace")
        for packed in (said[0], said[process])
    )
    ours, theirs = here.splitlines(), there.splitlines()
    pairs = zip(ours, theirs, strict=False)
    line = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    told = [f"line {line + 1} of {len(ours)} and {len(theirs)} is"]
    for k, lines in ((0, ours), (process, theirs)):
        shown = lines[line].strip()[:_MOST_SHOWN] if line < len(lines) else "(none)"
        told.append(f"  on process {k}: {shown}")
    return "\n".join(told)
