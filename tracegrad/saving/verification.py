"""Whether a file can be loaded, found out by a process that may die of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tracegrad.saving import program
from tracegrad.saving.container import open_container, open_file
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.load import load_container, read_program
from tracegrad.saving.manifest import Manifest, manifest_of

_LONGEST = 600  # seconds that parsing may take
_CHILD = "from tracegrad.saving.verification import parse; parse()"


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Checks all of a file, and has its programs parsed and loaded in a process of its own.

    Checksums show damage. They show no malice: whoever writes a file can write right checksums of
    anything, and bytes that no JAX wrote can end the process in which XLA parses them. Here that
    process is another one, with the rights of this one, and its death is an error like others. A
    file that passes can be loaded, and its programs call no code of the process but what JAX needs
    itself (`outside_calls.ALLOWED`); what they compute, nobody can know but who wrote them.

    What is checked is one open file: nobody can put another in its place meanwhile.

    Args:
        path: the file.

    Returns:
        What the manifest says.

    Raises:
        ArtefactError: a checksum is wrong, the header, or the manifest; a program cannot be
            parsed, is another than the manifest says, or calls what is none of its business.
        OSError: the file is not there, or may not be read.
        ImportError: a package is missing: ``pip install 'tracegrad[save]'``.
    """
    program.check_installed()
    descriptor = open_file(path)
    try:
        with open_container(path, descriptor=descriptor) as container:
            manifest = manifest_of(container)
            _parse_elsewhere(descriptor, container.path)
    finally:
        os.close(descriptor)
    return manifest


def _parse_elsewhere(descriptor: int, path: str) -> None:
    """Runs `parse` in a process of its own, whose standard input is the file."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # 64 bits, as the functions may have them; no accelerator is taken away from anybody.
    settings = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    # Isolated from the current folder: a file beside an artefact is no module of ours (-P).
    command = [sys.executable, "-P", "-c", _CHILD]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=descriptor,
            capture_output=True,
            check=False,
            timeout=_LONGEST,
        )
        output, code = done.stdout, done.returncode
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    except subprocess.TimeoutExpired as error:
        output, code, said = error.stdout or b"", None, []
    # One line for each thing begun, and one for what was wrong with it.
    lines = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    last = lines[-1] if lines else {}
    member = last.get("member", "file")
    if "reason" in last:
        raise ArtefactError(member, last["reason"], path)
    if code is None:
        raise ArtefactError(member, f"parsing it took longer than {_LONGEST} s", path)
    if code != 0 or last != {"member": "done"}:
        what = f": {said[-1][:200]}" if said else ""
        raise ArtefactError(member, f"parsing it ended the process ({_death(code)}{what})", path)


def _death(code: int) -> str:
    """``SIGSEGV`` or ``exit status 3``."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def parse() -> None:
    """What the other process does: parses each program in its standard input, then loads it all.

    It tells on the standard output what it begins with, in JSON: who reads that knows what it died
    of.
    """

    def tell(member: str, **more: str) -> None:
        sys.stdout.write(json.dumps({"member": member, **more}) + "\n")
        sys.stdout.flush()

    try:
        with open_container("standard input", descriptor=0) as container:
            manifest = manifest_of(container)
            for record in manifest.functions:
                for k, name in enumerate(record.programs):
                    tell(name)
                    read_program(record, k, bytes(container.bytes(name)), manifest)
            tell("file")
            load_container(container)
    except ArtefactError as error:
        tell(error.member, reason=error.reason)
    else:
        tell("done")
