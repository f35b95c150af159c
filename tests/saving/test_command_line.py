"""``python -m tracegrad``: what is in a file, and whether it is sound; errors in one line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import pytest
from artefacts import write_example
from damage import changed, damaged, forge, number_of, take_apart

from tracegrad import ArtefactError, load, save
from tracegrad.__main__ import main
from tracegrad.saving.inspection import inspect
from tracegrad.saving.outside_calls import ALLOWED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefact") / "example.tracegrad"
    write_example(path)
    return path


@pytest.fixture
def flipped(example: Path, tmp_path: Path) -> Path:
    data = bytearray(example.read_bytes())
    data[data.index(b"clip(arg")] ^= 1  # in the graph of `score`
    path = tmp_path / "flipped.tracegrad"
    path.write_bytes(data)
    return path


def test_inspect_shows_functions_variables_arrays_and_graphs(example: Path, capsys):
    assert main(["inspect", str(example)]) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    assert shown.startswith(f"{example}: {example.stat().st_size:,} bytes, version 1")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    score = "score(x: f32[batch,16]) -> {'loss': f32[]} to order 1 cpu weights - shape_assertion"
    assert score in lines
    assert any(
        line.startswith("step(x: f32[batch,16], rate: f32[]) -> f32[16,4]") for line in lines
    )
    assert "weights f32[16,4] yes 256" in lines
    assert "count i32[] no 4" in lines
    for member in take_apart(example).members:
        digest = hashlib.sha256(member.data).hexdigest()
        assert f"{member.name} {len(member.data):,} {digest}" in lines
    assert "graph of score" in lines
    assert "custom_gradient[vjp] clip(tanh)" in shown


def test_inspect_gives_the_same_as_json(example: Path, capsys):
    assert main(["inspect", "--json", str(example)]) == 0
    found = json.loads(capsys.readouterr().out)
    artefact = take_apart(example)
    assert found["size"] == len(artefact.raw)
    assert found["versions"] == artefact.manifest["versions"]
    assert [each["name"] for each in found["functions"]] == ["score", "step"]
    assert {each["key"]: each["size"] for each in found["variables"]} == {
        "weights": 256,
        "count": 4,
    }
    assert [each["name"] for each in found["arrays"]] == [m.name for m in artefact.members]
    graphs = {f["graph"].encode() for f in found["functions"]}
    assert graphs <= {member.data for member in artefact.members}


def test_inspect_draws_tables_in_a_terminal(example: Path, monkeypatch: pytest.MonkeyPatch):
    """rich, which draws them, is among the packages that the tests need."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    terminal, ours = pty.openpty()
    data = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # how a terminal's end shows on Linux
            while piece := os.read(terminal, 65536):
                data.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with open(ours, "w") as output, contextlib.redirect_stdout(output):
        assert main(["inspect", str(example)]) == 0
    reader.join()
    os.close(terminal)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", data.decode())
    assert "┃ Variable" in shown
    assert "│ weights  │ f32[16,4] │" in shown  # no markup was made of the shape


def test_inspect_compares_what_it_shows_with_its_checksum(flipped: Path, capsys):
    assert main(["inspect", str(flipped)]) == 1
    shown, errors = capsys.readouterr()
    assert shown == ""
    assert errors.startswith(f"{flipped}: tracegrad/score/graph: its contents were changed")
    assert errors.count("\n") == 1


def test_inspect_never_fails_otherwise(example: Path, tmp_path: Path, capsys):
    artefact = take_apart(example)
    path = tmp_path / "bad"
    for seed in range(100):
        _, (data, _) = damaged(random.Random(seed), artefact)
        path.write_bytes(data)
        status = main(["inspect", str(path)])
        errors = capsys.readouterr().err
        # What it does not read may be damaged.
        assert (status, errors.count("\n")) in {(0, 0), (1, 1)}, (seed, errors)


def test_names_send_no_commands_to_the_terminal(example: Path, tmp_path: Path, capsys):
    artefact = take_apart(example)
    members = changed(artefact, number_of(artefact, "/graph"), data=b"\x1b[2J[red]x")
    path = tmp_path / "bad"
    path.write_bytes(forge(members, artefact.manifest))
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"\x1b[2J[red]x" in shown


def test_verify_goes_on_after_a_file_that_is_refused(example: Path, flipped: Path):
    missing = flipped.with_name("missing")
    command = [sys.executable, "-m", "tracegrad", "verify", flipped, missing, example]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert re.fullmatch(
        rf"{example}: sound: 2 functions in \d programs, 2 Variables\n", done.stdout
    )
    first, second = done.stderr.splitlines()
    assert first.startswith(f"{flipped}: tracegrad/score/graph: its contents were changed")
    assert second == f"{missing}: No such file or directory"


@pytest.mark.parametrize("what", ["no program", "the program of another function"])
def test_verify_refuses_programs_with_right_checksums_that_are_wrong(
    example: Path, tmp_path: Path, capsys, what: str
):
    artefact = take_apart(example)
    score, step = (number_of(artefact, f"{name}/program_0") for name in ("score", "step"))
    first, other = artefact.members[score], artefact.members[step]
    data = first.data[:500] if what == "no program" else other.data
    path = tmp_path / "bad"
    path.write_bytes(forge(changed(artefact, score, data=data), artefact.manifest))
    assert main(["verify", str(path)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"{path}: {first.name}: ")
    assert errors.count("\n") == 1


def test_verify_reports_the_death_of_the_process_that_parses(
    example: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    """Which bytes kill XLA's parser changes with its version; here something else does."""
    deadly = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    (tmp_path / "sitecustomize.py").write_text(deadly)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["verify", str(example)]) == 1
    reported = f"{example}: file: parsing it ended the process (SIGSEGV)\n"
    assert capsys.readouterr().err == reported


@pytest.mark.parametrize("command", ["load", "verify"])
def test_a_program_that_calls_other_code_of_the_process_is_refused(
    command: str, example: Path, tmp_path: Path, capsys
):
    """jax.export asks for no names when it reads, and the process may have any of them."""
    artefact = take_apart(example)
    number = number_of(artefact, "program_0")
    name, one = artefact.members[number].name, jax.ShapeDtypeStruct((), "float32")
    evil = jax.export.export(
        jax.jit(jax.ffi.ffi_call("xla_ffi_python_cpu_callback", one)),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("xla_ffi_python_cpu_callback")],
    )(one)
    path = tmp_path / "bad"
    members = changed(artefact, number, data=bytes(evil.serialize()))
    path.write_bytes(forge(members, artefact.manifest))
    reason = "calls 'xla_ffi_python_cpu_callback' by a custom call"
    if command == "load":
        with pytest.raises(ArtefactError, match=reason) as refused:
            load(path)
        assert refused.value.member == name
    else:
        assert main(["verify", str(path)]) == 1
        errors = capsys.readouterr().err
        assert errors.startswith(f"{path}: {name}: it {reason}")


def test_a_manifest_that_does_not_say_what_is_called_is_refused(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    manifest = json.loads(json.dumps(artefact.manifest))
    manifest["functions"][0]["calls"][0] = []
    path = tmp_path / "bad"
    path.write_bytes(forge(artefact.members, manifest))
    with pytest.raises(ArtefactError, match=r"it calls \['shape_assertion'\], .* manifest \[\]"):
        load(path)


def test_every_call_that_is_let_through_jax_lets_through_too():
    one = jax.ShapeDtypeStruct((), "float32")
    for target in ALLOWED:
        exported = jax.export.export(jax.jit(jax.ffi.ffi_call(target, one)))(one)
        assert target in exported.mlir_module()
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        jax.export.export(jax.jit(jax.ffi.ffi_call("another", one)))(one)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_what_the_solvers_of_jax_call_is_let_through(platform: str, tmp_path: Path):
    def solved(x):
        factors = [jnp.linalg.qr(x), jnp.linalg.eigh(x), jnp.linalg.svd(x), jnp.linalg.cholesky(x)]
        return factors, jax.scipy.linalg.lu(x), jax.random.normal(jax.random.key(0), (3,))

    path, x = tmp_path / "f", jax.ShapeDtypeStruct((3, 3), "float32")
    save(solved, path, [x], gradient_order=0, platforms=[platform])
    assert load(path).platforms == (platform,)
    (function,) = inspect(path)["functions"]
    assert len(function["calls"]) > 2


def test_verify_checks_the_file_that_it_opened(
    example: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    """The process that parses puts another file in its place before it looks."""
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(example.read_bytes())
    other.write_bytes(b"none")
    swap = f"import os; os.replace({str(other)!r}, {str(path)!r})"
    (tmp_path / "sitecustomize.py").write_text(swap)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["verify", str(path)]) == 0
    assert path.read_bytes() == b"none"


def test_wrong_usage_is_explained(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["verify"])
    assert caught.value.code == 2
    assert "the following arguments are required: FILE" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_that_is_none_is_refused_in_one_line(command: str, tmp_path: Path, capsys):
    (tmp_path / "x").write_bytes(b"not ours" * 100)
    assert main([command, str(tmp_path / "x")]) == 1
    assert main([command, str(tmp_path)]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "x: file: it does not end with the seal" in first
    assert second == f"{tmp_path}: file: it is a folder"
