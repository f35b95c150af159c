"""Lets the processes of one program agree on a text, within a time limit.

JAX's public functions, `jax.experimental.multihost_utils`, run a program on all devices, and wait
forever if a process does not take part. This module uses the key-value service by which the
processes found each other, and can name missing processes.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_SLICE = 1.0  # seconds of one wait: Python handles Ctrl-C between two waits
_LATE = 10.0  # seconds, at most, that other processes wait longer than process 0 for its answer


def _service() -> Any:
    """JAX's client of the key-value service; None if this is the only process.

    The client has no public name; Orbax uses it too. Can be removed when JAX has a barrier with a
    time limit.
    """
    # `vars`, because type checkers do not see names that the module imports.
    return vars(multihost_utils)["distributed"].global_state.client


def in_numpy(array: Any) -> np.ndarray[Any, Any]:
    """If the array is sharded over several processes, all of these processes have to call this
    function, and each gets the whole array."""
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def agree(topic: str, said: str, timeout: float, decide: Callable[[Sequence[str]], str]) -> str:
    """Returns, on every process, the text that process 0 decides on, given a text of each process.

    Args:
        topic: the same on all processes, for one agreement at a time.
        said: the text of this process.
        timeout: how long to wait for the other processes, in seconds.
        decide: called on process 0 only, with the texts of all processes in their order. If it
            raises, process 0 raises that error, and the others raise a RuntimeError.

    Raises:
        TimeoutError: some processes did not call this function in time; the message names them.
        RuntimeError: `decide` raised on process 0.
    """
    service = _service()
    if service is None:
        return decide([said])
    place, count = jax.process_index(), jax.process_count()
    root = f"tracegrad/{topic}"
    ours, until = f"{root}/said/{place}", time.monotonic() + timeout
    # The key of the answer contains it, so that no answer to an earlier call is read.
    ticket = secrets.token_hex(8)
    service.key_value_set(ours, f"{ticket} {said}", allow_overwrite=True)
    if place:
        told = _get(service, f"{root}/heard/{ticket}", until + min(timeout, _LATE))
        if told is None:
            here = {int(key.rpartition("/")[2]) for key, _ in service.key_value_dir_get(root)}
            service.key_value_delete(ours)
            raise _missing(topic, timeout, {0, *range(count)} - (here - {0}), count)
        service.key_value_delete(f"{root}/heard/{ticket}")
        kind, text = json.loads(told)
        if kind == "missing":
            raise _missing(topic, timeout, text, count)
        if kind == "failed":
            raise RuntimeError(f"on process 0: {text}")
        return str(text)
    found = {k: _get(service, f"{root}/said/{k}", until) for k in range(count)}
    heard = {k: each.partition(" ") for k, each in found.items() if each is not None}
    missing = sorted(set(range(count)) - heard.keys())
    for k in heard:
        service.key_value_delete(f"{root}/said/{k}")

    def tell(kind: str, what: Any) -> None:
        for k, (their_ticket, _, _) in heard.items():
            if k:
                service.key_value_set(f"{root}/heard/{their_ticket}", json.dumps([kind, what]))

    if missing:
        tell("missing", missing)
        raise _missing(topic, timeout, missing, count)
    try:
        decided = decide([heard[k][2] for k in range(count)])
    except BaseException as error:
        tell("failed", f"{type(error).__name__}: {error}")
        raise
    tell("decided", decided)
    return decided


def _get(service: Any, key: str, until: float) -> str | None:
    """Waits for the value of a key until the time `until`; then returns None."""
    while True:
        left = until - time.monotonic()
        try:
            found: str = service.blocking_key_value_get(
                key, int(1000 * max(min(left, _SLICE), 0.01))
            )
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        else:
            return found
        if left <= 0:
            return None


def _missing(topic: str, timeout: float, missing: Iterable[int], count: int) -> TimeoutError:
    names = sorted(missing)
    shown = ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
    which = f"process {shown}" if len(names) == 1 else f"processes {shown}"
    return TimeoutError(
        f"{topic}: {which} of {count} did not come within {timeout:g} seconds (all processes have "
        "to call this: if only some of them do, they wait for the others)"
    )
