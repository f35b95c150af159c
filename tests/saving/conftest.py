"""The saved file that is damaged, inspected and verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from artefacts import write_example


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefact") / "example.tracegrad"
    write_example(path)
    return path
