"""The script that measures on an accelerator runs on a CPU, all rows of it, and says so in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def table(tmp_path: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What is printed, and what is written."""
    out = tmp_path / "table.json"
    script = str(ROOT / "benchmarks" / "on_accelerator.py")
    command = [sys.executable, script, "--small", "--out", str(out), *options]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return printed, json.loads(out.read_text())


@pytest.mark.slow
def test_all_rows_are_there_and_none_has_failed(tmp_path: Path) -> None:
    printed, found = table(tmp_path, "--minutes", "30")
    rows = {row["row"]: row for row in found["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "done")
    assert len(rows) == 11
    assert all(f"| {name}" in printed for name in rows)
    hlo = rows["optimised HLO"]["lines"]["identical to jax.jit's"]["numbers"]
    assert hlo["same"] == hlo["of"] == 6
    for share in (60, 40):
        lines = rows[f"gradient, memory_budget={share}%"]["lines"]
        plan = lines[f"{share}%: the plan"]["numbers"]
        assert plan["held"] <= plan["budget"] < plan["held_without"]
    tests = rows["tests marked accelerator"]["lines"]["all"]["numbers"]
    assert tests["rc"] == tests["FAILED"] == tests["ERROR"] == 0 < tests["PASSED"]


@pytest.mark.slow
def test_what_does_not_fit_into_the_minutes_is_said_not_to_have_run(tmp_path: Path) -> None:
    printed, found = table(tmp_path, "--minutes", "0.15")
    (status,) = {row["status"] for row in found["rows"]}
    assert status == "not run"
    assert printed.count("not run: no time left") == len(found["rows"]) == 11
