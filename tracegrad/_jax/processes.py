"""How the processes of one program agree on something: by name, and within a time limit.

What JAX has for that in public, `jax.experimental.multihost_utils`, runs a program on all devices,
which waits for ever where a process does not come. This goes by the service through which the
processes found one another, and knows who is missing.
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

_SLICE = 1.0  # seconds that are waited at a time: between them Python sees Ctrl-C
_LATE = 10.0  # seconds at most that the others give process 0 for telling who is missing


def _service() -> Any:
    """JAX's client of that service, which has no public name; None where this is all processes.

    Orbax uses the same. Can go when JAX has a barrier with a time limit.
    """
    # By `vars`, as the module does not declare what it imports.
    return vars(multihost_utils)["distributed"].global_state.client


def in_numpy(array: Any) -> np.ndarray[Any, Any]:
    """An array in NumPy; of one that is spread over processes the whole, which they all ask for."""
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def agree(topic: str, said: str, timeout: float, decide: Callable[[Sequence[str]], str]) -> str:
    """What process 0 decides of what all processes say: the same on each of them.

    Args:
        topic: what it is about, the same on all processes; one thing at a time.
        said: what this process says.
        timeout: how long to wait for the others, in seconds.
        decide: called on process 0 alone, with what was said in the order of the processes. What
            it raises is raised there as it is, and on the others as a RuntimeError.

    Raises:
        TimeoutError: some processes did not say anything in time; it names them.
        RuntimeError: `decide` raised on process 0.
    """
    service = _service()
    if service is None:
        return decide([said])
    place, count = jax.process_index(), jax.process_count()
    root = f"tracegrad/{topic}"
    ours, until = f"{root}/said/{place}", time.monotonic() + timeout
    # By this the answer is found, which so is never one to an earlier question.
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
    """What is said under a key, as soon as it is; None if it is not in time."""
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
        "to: what only some of them call waits for the others)"
    )
