"""Starts a function of a file in several processes that are one program of JAX, on this machine.

``started(file, "name", argument, ..., count=2, devices=2)`` calls ``name(argument, ...)`` in each,
after `jax.distributed.initialize`, and gives what it returns there, or yields last: JSON, in the
order of the processes. A process that fails or hangs ends all of them, and the test, with what
they printed.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEVICES = "--xla_force_host_platform_device_count"
STARTING = 120  # seconds, until all processes have found each other
MOST_SHOWN = 6000  # characters of what a process printed


class ProcessesFailed(AssertionError):
    """What went wrong, and what each process printed."""


@dataclass
class Running:
    """Processes that were started; `outputs` are files of what they print."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[Path]
    results: list[Path]

    def result(self, timeout: float, ends: Sequence[int]) -> list[Any]:
        """What each returned, once all have ended with these exit statuses; raises ProcessesFailed
        if one did not."""
        until = time.monotonic() + timeout
        while None in (codes := [process.poll() for process in self.processes]):
            if any(code not in (None, end) for code, end in zip(codes, ends, strict=True)):
                # The others wait for it, some for minutes; give them the time to say why.
                time.sleep(1)
                raise self.failed("one failed, and the others were ended")
            if time.monotonic() > until:
                raise self.failed(f"they did not end within {timeout:g} seconds")
            time.sleep(0.02)
        if codes != list(ends):
            raise self.failed(f"they ended with the exit statuses {codes}")
        return [json.loads(each.read_text()) for each in self.results]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def failed(self, what: str) -> ProcessesFailed:
        self.end()
        texts = [each.read_text(errors="replace")[-MOST_SHOWN:] for each in self.outputs]
        shown = (f"--- process {k} printed:\n{text}" for k, text in enumerate(texts))
        return ProcessesFailed("\n".join([f"{len(texts)} processes: {what}", *shown]))


def start(
    folder: Path,
    file: str | Path,
    function: str,
    *arguments: Any,
    count: int = 2,
    devices: int = 2,
    timeout: float = 120,
) -> Running:
    """Starts them. One whose function takes more than `timeout` seconds prints where it is, and
    exits."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(DEVICES)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "NPROC": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "XLA_FLAGS": " ".join([*flags, f"{DEVICES}={devices}"]),
    }
    running = Running([], [], [])
    for place in range(count):
        output, result = (folder / f"{what}-{place}" for what in ("output", "result"))
        given = json.dumps([str(file), function, arguments, port, place, count, timeout])
        with open(output, "wb") as file_of_output:
            process = subprocess.Popen(
                [sys.executable, __file__, given, str(result)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file_of_output,
                stderr=subprocess.STDOUT,
            )
        running.processes.append(process)
        running.outputs.append(output)
        running.results.append(result)
    return running


def started(
    file: str | Path,
    function: str,
    *arguments: Any,
    timeout: float = 120,
    ends: Sequence[int] | None = None,
    **options: Any,
) -> list[Any]:
    """Starts them and waits for what they return.

    Args:
        ends: the exit statuses with which they shall end; default: 0. One that is killed gives
            what it yielded before.
        options: as of `start`.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = start(Path(folder), file, function, *arguments, timeout=timeout, **options)
        try:
            return running.result(timeout + STARTING + 10, ends or [0] * len(running.processes))
        finally:
            running.end()


def _main(given: str, result: str) -> None:
    file, function, arguments, port, place, count, timeout = json.loads(given)
    faulthandler.enable()
    faulthandler.dump_traceback_later(STARTING, exit=True)
    import jax

    code = 1
    try:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, place)
        sys.path.insert(0, str(Path(file).parent))
        called = getattr(importlib.import_module(Path(file).stem), function)
        faulthandler.dump_traceback_later(timeout, exit=True)  # in the place of the first
        returned = called(*arguments)
        for each in returned if isinstance(returned, types.GeneratorType) else [returned]:
            Path(result).write_text(json.dumps(each))
        if not isinstance(returned, types.GeneratorType):  # of these one may be dead by now
            jax.distributed.shutdown()
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for who has died


if __name__ == "__main__":
    _main(*sys.argv[1:])
