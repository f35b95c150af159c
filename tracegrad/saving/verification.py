"""Whether a file can be loaded, found out without danger to the process that asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tracegrad import _jax
from tracegrad.saving import program
from tracegrad.saving.container import open_container
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.load import LoadedFunction, load
from tracegrad.saving.manifest import VARIABLES, Manifest, from_json
from tracegrad.saving.tensors import read_header

_LONGEST = 600  # seconds that parsing may take
_CHILD = "import sys; from tracegrad.saving.verification import parse; parse(sys.argv[1])"


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Checks all of a file, and has its programs parsed and loaded in a process of its own.

    Checksums show damage. They show no malice: whoever writes a file can write right checksums of
    anything, and bytes that no JAX wrote can end the process in which XLA parses them. Here that
    process is another one, and its death is an error like others. So a file that passes can be
    loaded; what its functions then compute, nobody can know but who wrote it.

    Args:
        path: the file.

    Returns:
        What the manifest says.

    Raises:
        ArtefactError: a checksum is wrong, SHA-256 or CRC-32; the manifest or the header of the
            Variables is; a program cannot be parsed, or is another than the manifest says.
        OSError: the file is not there, or may not be read.
        ImportError: a package is missing: ``pip install 'tracegrad[save]'``.
    """
    program.check_installed()
    with open_container(path) as container:
        container.check_crc()
        manifest = from_json(container.manifest)
        if manifest.variables:
            read_header(container.member(VARIABLES), VARIABLES)
        _parse_elsewhere(container.path)
    return manifest


def _parse_elsewhere(path: str) -> None:
    """Runs `parse` in a process of its own."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # 64 bits, as the functions may have them; no accelerator is taken away from anybody.
    settings = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    # Isolated from the current folder: a file beside an artefact is no module of ours (-P).
    command = [sys.executable, "-P", "-c", _CHILD, os.path.abspath(path)]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
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


def parse(path: str) -> None:
    """What the other process does: parses each program, then loads the file.

    It tells on the standard output what it begins with, in JSON: who reads that knows what it died
    of.
    """

    def tell(member: str, **more: str) -> None:
        sys.stdout.write(json.dumps({"member": member, **more}) + "\n")
        sys.stdout.flush()

    try:
        with open_container(path) as container:
            manifest = from_json(container.manifest)
            for record in manifest.functions:
                for each in record.programs:
                    tell(each.member)
                    _parse_program(each.member, bytes(container.member(each.member)), manifest)
        tell("file")
        functions = load(path)
        for function in (
            [functions] if isinstance(functions, LoadedFunction) else functions.values()
        ):
            str(function.signature)
    except ArtefactError as error:
        tell(error.member, reason=error.reason)
    else:
        tell("done")


def _parse_program(member: str, contents: bytes, manifest: Manifest) -> None:
    try:
        program.parse(program.read(contents))
    except Exception as error:  # whatever XLA and flatbuffers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ArtefactError(
            member,
            f"it was written by {manifest.written_by}, and JAX {_jax.versions()['jax']} cannot "
            f"parse it: {reason}",
        ) from None
