"""Every notebook runs from top to bottom, and is stored as somebody wants to read it."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

QUICK = {"autodiff", "quickstart"}  # those that everybody reads

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem not in QUICK), id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # This checkout, not an installed one; and the examples, which are beside the notebooks.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "examples"))))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # nobody's own settings
    # They compile a good deal, and what they say, bytes and FLOPs too, does not depend on it.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    notebook = nbformat.read(path, as_version=4)
    # Raises CellExecutionError, with the cell and its traceback.
    NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()


@each_notebook
def test_a_notebook_is_stored_with_its_outputs_and_small(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    types = {output.output_type for output in outputs}
    assert types <= {"stream", "display_data", "execute_result"}  # no errors
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert path.stat().st_size < 300_000  # bytes
