"""``python -m tracegrad``: what is in a file; errors in one line. What a program may call."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from damage import damaged, forge, take_apart

from tracegrad import ArtefactError, load, save
from tracegrad.__main__ import main
from tracegrad.saving.inspection import inspect
from tracegrad.saving.outside_calls import ALLOWED

ROOT = Path(__file__).parents[2]


def test_inspect_shows_functions_variables_calls_and_sizes(example: Path, capsys):
    assert main(["inspect", str(example)]) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    found, artefact = json.loads(shown), take_apart(example)
    assert (found["format"], found["size"]) == (2, len(artefact.raw))
    assert found["versions"] == artefact.manifest["versions"]
    signatures = ["score(x: f32[batch,16]) -> {'loss': f32[]}"]
    signatures += ["step(x: f32[batch,16], rate: f32[]) -> f32[16,4]"]
    assert [each["signature"] for each in found["functions"]] == signatures
    calls = [call for each in found["functions"] for call in each["calls"].values()]
    assert ["shape_assertion"] in calls
    assert {v["key"]: v["size"] for v in found["variables"]} == {"weights": 256, "count": 4}
    assert found["digests"] == artefact.manifest["digests"]


def test_inspect_loads_no_program(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    broken = {
        name: np.zeros(9, np.uint8) if "/program/" in name else array
        for name, array in artefact.arrays.items()
    }
    path = tmp_path / "broken"
    path.write_bytes(forge(broken, artefact.manifest))
    assert [each["name"] for each in inspect(path)["functions"]] == ["score", "step"]
    with pytest.raises(ArtefactError, match="cannot read it"):
        load(path)


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


def test_it_goes_on_after_a_file_that_is_refused(example: Path, tmp_path: Path):
    bad, missing = tmp_path / "bad", tmp_path / "missing"
    bad.write_bytes(b"not ours" * 100)
    command = [sys.executable, "-m", "tracegrad", "inspect", bad, tmp_path, missing, example]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert json.loads(done.stdout)["path"] == str(example)
    first, second, third = done.stderr.splitlines()
    assert first.startswith(f"{bad}: file: it is damaged, or tracegrad did not write it")
    assert (
        second == f"{tmp_path}: file: it is a folder: load_variables reads those of save_variables"
    )
    assert third == f"{missing}: No such file or directory"


# ------------------------------------------------------------------- what a program may call


def test_a_program_that_calls_other_code_of_the_process_is_refused(example: Path, tmp_path: Path):
    """jax.export asks for no names when it reads, and the process may have any of them."""
    artefact = take_apart(example)
    name = artefact.manifest["functions"][0]["program"]["array"]
    one = jax.ShapeDtypeStruct((), "float32")
    evil = jax.export.export(
        jax.jit(jax.ffi.ffi_call("xla_ffi_python_cpu_callback", one)),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("xla_ffi_python_cpu_callback")],
    )(one)
    path = tmp_path / "bad"
    arrays = {**artefact.arrays, name: np.frombuffer(evil.serialize(), np.uint8)}
    path.write_bytes(forge(arrays, artefact.manifest))
    reason = "calls 'xla_ffi_python_cpu_callback' by a custom call"
    with pytest.raises(ArtefactError, match=reason) as refused:
        load(path)
    assert refused.value.member == name


def test_a_manifest_that_does_not_say_what_is_called_is_refused(example: Path, tmp_path: Path):
    artefact = take_apart(example)
    manifest = json.loads(json.dumps(artefact.manifest))
    calls = manifest["functions"][0]["calls"]
    calls[next(iter(calls))] = []
    path = tmp_path / "bad"
    path.write_bytes(forge(artefact.arrays, manifest))
    with pytest.raises(
        ArtefactError, match=r"it calls \['shape_assertion'\], .* manifest lists \[\]"
    ):
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
        return (
            jax.tree.leaves(factors),
            jax.scipy.linalg.lu(x),
            jax.random.normal(jax.random.key(0), (3,)),
        )

    path, x = tmp_path / "f", jax.ShapeDtypeStruct((3, 3), "float32")
    save(solved, path, [x], gradient_order=0, platforms=[platform])
    assert load(path).platforms == (platform,)
    (function,) = inspect(path)["functions"]
    (calls,) = function["calls"].values()
    assert len(calls) > 2
