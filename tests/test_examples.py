"""Every example runs as a user runs it, and the main one does what it says."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAIN = ROOT / "examples" / "train_digits.py"
WORDS = ROOT / "examples" / "word_vectors.py"
PLAN = ROOT / "examples" / "plan_recompute.py"
OTHERS = sorted(
    set((ROOT / "examples").glob("*.py"))
    - {MAIN, WORDS, PLAN, ROOT / "examples" / "recompute_models.py"}
)

SLOW = {"checkpoint_training", "gradient_reversal", "through_a_solver", "train_sharded"}


def run(example: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a folder for what it writes, with this checkout; warnings are errors.

    But for one: JAX compiles where an entry of its cache is still being written by another process.
    """
    unreadable = "ignore:Error reading persistent compilation cache entry"
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", unreadable, str(example), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, marks=[pytest.mark.slow] * (example.stem in SLOW), id=example.stem)
        for example in OTHERS
    ],
)
def test_an_example_runs(example: Path, tmp_path: Path):
    done = run(example, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_main_example_reaches_its_goal(tmp_path: Path):
    done = run(MAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    graph, report = done.stdout.split("\n\n\n")
    for node in (
        "◆ custom_gradient[vjp] quantise",
        "◆ custom_gradient[vjp] limit_each_image",
        "↻ recompute residual_block",
        "■ stop_gradient",
    ):
        assert node in graph
    assert re.search(r"^  stem +none: frozen$", report, re.M)
    assert not re.search(r"^  (block_0|block_1|head) +none", report, re.M)
    (percent,) = re.findall(r"^Test accuracy: (.*)%$", report, re.M)
    assert float(percent) > 95
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "epoch/s" in done.stderr  # the progress bar


def run_here(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments
) -> tuple[object, str, str]:
    """Code, output and errors of an example that exits, in this process: one of its own would
    import all libraries again."""
    monkeypatch.syspath_prepend(example.parent)
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(example.stem).main()
    return exit.value.code, *capsys.readouterr()


@pytest.mark.slow
def test_the_main_example_says_when_it_misses_its_goal_and_what_it_replaces(
    tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "curve.svg"
    picture.write_text("another one")
    arguments = ("--epochs=1", "--seed=1", "--out=curve.svg", "--no-progress")
    said, output, errors = run_here(MAIN, monkeypatch, capsys, *arguments)
    assert str(said).startswith("That is below the goal of 95%")  # a text is the exit status 1
    assert errors == ""  # no progress bar
    assert "curve.svg (in place of the one that was there)" in output
    assert "</svg>" in picture.read_text()


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--epochs=0", "--epochs must be at least 1, not 0"),
        ("--out=no/such/curve.png", "there is no folder no/such"),
        ("--out=curve.txt", "must end in .png, .pdf or .svg, not curve.txt"),
    ],
)
@pytest.mark.parametrize("example", [MAIN, WORDS], ids=lambda example: example.stem)
def test_an_example_refuses_before_it_trains(
    example: Path, argument: str, complaint: str, monkeypatch, capsys
):
    code, output, errors = run_here(example, monkeypatch, capsys, argument)
    assert code == 2
    assert complaint in errors
    assert output == ""


@pytest.mark.slow
def test_word_vectors_find_words_that_are_used_alike(tmp_path: Path):
    done = run(WORDS, tmp_path, "--no-progress")
    assert done.returncode == 0, done.stderr
    ((pairs, found),) = re.findall(r"^Of (\d+) expected pairs (\d+) are", done.stdout, re.M)
    assert 7 <= int(found) <= int(pairs)
    assert re.search(r"^  true .*\bfalse\b", done.stdout, re.M)
    assert (tmp_path / "word_vectors.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""


@pytest.mark.slow
def test_the_plan_of_a_gru_keeps_its_promises(tmp_path: Path):
    done = run(PLAN, tmp_path, "--model=gru", "--budget=40%", "--out=plan.png")
    assert done.returncode == 0, done.stderr
    ((of_xla, of_plan),) = re.findall(r"^XLA needs (.*)%, the plan said (.*)%$", done.stdout, re.M)
    assert float(of_plan) <= 40
    assert float(of_xla) == pytest.approx(float(of_plan), rel=0.15)
    (difference,) = re.findall(r"^Largest relative difference .*: (.*)$", done.stdout, re.M)
    assert float(difference) < 1e-5
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
