"""`check_processes`: compares the programs of all processes, before they run."""

from __future__ import annotations

import base64
import hashlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad._jax.processes import agree
from tracegrad.tracing.graphs import function_name

_MOST_COMPARED = 1 << 20  # bytes of a compressed program; the service accepts four times as many
_MOST_SHOWN = 300  # characters of a line


def check_processes(
    fun: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any
) -> None:
    """Raises ValueError if two processes would run different programs for these arguments.

    Processes with different programs wait for one another in their collectives, mostly for ever.
    `check_processes` compares the StableHLO that each process would compile, with rules and plans
    applied, and runs nothing. Call it on all processes, before the first call of `fun`. It traces
    the function; the first call then uses that trace. With one process it does nothing.

    Arguments:
      fun: a traced, jitted or plain function.
      args, kwargs: the arguments of the coming call: arrays or `jax.ShapeDtypeStruct`s.
      timeout: how long to wait for the other processes, in seconds.

    Raises:
      ValueError: two processes have different programs. The message shows the first line that
        differs, of both programs.
      TimeoutError: some processes did not call `check_processes`. The message names them.

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
            f"{function_name(fun)} is not the same program on all processes, so they would wait "
            f"for one another: {difference}\nAll processes need the same shapes, static values, "
            "branches of Python code, rules, budgets, random seeds and versions"
        )


def _difference(said: Sequence[str]) -> str:
    """Returns, in words, the first line at which another process's program differs from that of
    process 0."""
    process = next(k for k, packed in enumerate(said) if packed != said[0])
    here, there = (
        zlib.decompressobj().decompress(base64.b64decode(packed)).decode(errors="replace")
        for packed in (said[0], said[process])
    )
    ours, theirs = here.splitlines(), there.splitlines()
    pairs = enumerate(itertools.zip_longest(ours, theirs, fillvalue="(none)"), 1)
    equal = len(ours), ("(equal)", "(equal)")  # as far as the programs were compared
    number, (our, their) = next((each for each in pairs if each[1][0] != each[1][1]), equal)
    return (
        f"line {number} of {len(ours)} and {len(theirs)} is\n"
        f"  on process 0: {our.strip()[:_MOST_SHOWN]}\n"
        f"  on process {process}: {their.strip()[:_MOST_SHOWN]}"
    )
