"""Whenever a writer is killed, and however many write: there is one whole file, old or new."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import settings

KILLED = Path(__file__).with_name("killed.py")

# A profile that searches longer kills more: every night 500 writers, and at every line.
THOROUGH = settings.get_current_profile_name() != "steady"
AT_RANDOM, AT_LINES = (500, 300) if THOROUGH else (20, 40)


def run(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(KILLED), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_killed_writer_leaves_the_old_or_the_new_file_whole(tmp_path: Path):
    report = run("kill", tmp_path, AT_RANDOM, AT_LINES, 0)
    assert report["wrong"] == []
    found = report["found"]
    assert found.get("old", 0) + found.get("new", 0) == AT_RANDOM + AT_LINES
    assert found["left behind"] > 0  # or none was killed at work
    # How far a writer comes depends on the machine: of few, all may be killed before the end.
    assert found["old"] > 0
    assert found.get("new", 0) > 0 or not THOROUGH


def test_writers_at_once_never_mix(tmp_path: Path):
    report = run("race", tmp_path, 4, 200 if THOROUGH else 30)
    assert report["wrong"] == []
    assert report["left"] == ["model.tracegrad"]
    assert report["found"].keys() == {"old", "new"}
