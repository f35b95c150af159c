"""Two processes of two devices compute what one does, and save what one can load."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import ProcessesFailed, start, started
from rows import ROWS, W, X, mesh_of, put_together
from states import here, variables

import tracegrad as tg
from tracegrad import ArtefactError

HERE = Path(__file__).parent
KILLS = 100
PATIENCE = 600  # seconds until two processes have to have saved, on a machine that does much else


def whole(factor=0.0):
    """The Variables of `states`, on one device."""
    values = {"both": X, "one": W, "none": W[0], "step": np.int32(1)}
    found = {name: tg.Variable(value * value.dtype.type(factor)) for name, value in values.items()}
    return found | {"keys": tg.Variable(jax.random.split(jax.random.key(1), 4))}


@pytest.fixture(scope="module")
def expected():
    return {
        name: [np.asarray(each) for each in jax.tree.leaves(jax.jit(row.expected)(W, X))]
        for name, row in ROWS.items()
    }


def assert_expected(processes, expected):
    for name in ROWS:
        found = put_together([told[name] for told in processes])
        for ours, theirs in zip(found, expected[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=name)


def test_two_processes_of_two_devices_do_all_that_one_does(expected, tmp_path):
    tg.save_variables(variables(mesh_of("Auto")), tmp_path / "one")
    told = started(
        HERE / "states.py",
        "all_of_it",
        ["Auto", "Explicit"],
        str(tmp_path),
        ends=[-signal.SIGKILL, -signal.SIGKILL],
        timeout=240,
    )
    for kind in told[0]["rows"]:
        assert_expected([each["rows"][kind] for each in told], expected)

    for each in told:
        assert each["loads what one process wrote"]
        assert each["split as it was"] == "P('data', 'model')"
        assert each["files"] == ["tracegrad-1"]  # the first time is gone
        assert each["afterwards"] == each["files"]
        assert "process_allgather" in each["numpy"]
        assert "the processes want to save different Variables" in each["different"]
    # What they were writing when they died was given up.
    found = whole()
    tg.load_variables(found, tmp_path / "two")
    assert here(found, 1.0)
    longer = jax.make_mesh((4,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(longer, jax.P("all"))
    found["both"].assign(jax.device_put(found["both"].value * 0, rows))
    tg.load_variables(found, tmp_path / "two")
    assert found["both"].value.sharding == rows
    assert here(found, 1.0)

    file = max(
        (tmp_path / "two" / "tracegrad-1").rglob("ocdbt.process_1/d/*"),
        key=lambda f: f.stat().st_size,
    )
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(ArtefactError, match=rf"{file.name}: its contents were changed"):
        tg.load_variables(whole(), tmp_path / "two")


def test_if_one_process_fails_every_process_says_which_and_why(tmp_path):
    """And the old state stays, and can be replaced."""
    told = started(HERE / "states.py", "each_fails", str(tmp_path), timeout=300)
    assert told[0].pop("the old state") is told[1].pop("the old state") is True
    assert told[0].pop("files") == told[1].pop("files") == ["tracegrad-0"]
    assert len(told[0]) == 39
    for name in told[0]:
        failing = int(name[-1])
        own, other = told[failing][name], told[1 - failing][name]
        assert own != "nothing", name
        assert other == f"RuntimeError: process {failing} failed: {own}", name
        assert own.endswith("broken") or "(" not in name, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_four_devices_compute_the_same_however_many_processes_have_them(count, kind, expected):
    told = started(HERE / "states.py", "rows_on", kind, count=count, devices=4 // count)
    assert_expected(told, expected)


def test_a_process_that_fails_or_hangs_ends_the_others_with_what_they_printed():
    with pytest.raises(ProcessesFailed, match=r"(?s)process 1 printed:.*this one fails"):
        started(HERE / "states.py", "one_fails")
    with pytest.raises(ProcessesFailed, match=r"(?s)Timeout.*in they_hang"):
        started(HERE / "states.py", "they_hang", timeout=1)


@pytest.mark.slow
def test_whichever_process_is_killed_while_they_save_there_is_one_whole_state(tmp_path):
    choose = random.Random(0)
    path, log = tmp_path / "state", tmp_path / "saved"
    saved = 0
    for kill in range(KILLS):
        folder = tmp_path / f"run-{kill}"
        folder.mkdir()
        script, work = HERE / "states.py", (str(tmp_path), saved)
        running = start(folder, script, "over_and_over", *work, timeout=PATIENCE)
        try:
            until = time.monotonic() + PATIENCE
            while not (log.exists() and int(log.read_text().split()[-1]) > saved):
                if time.monotonic() > until or any(p.poll() for p in running.processes):
                    raise running.failed(f"after {kill} kills they do not save")
                time.sleep(0.005)
            time.sleep(choose.uniform(0, 0.1))
            os.kill(running.processes[kill % 2].pid, signal.SIGKILL)
            time.sleep(0.05)
        finally:
            running.end()
        told = int(log.read_text().split()[-1])
        tree = whole()
        tg.load_variables(tree, path)
        saved = int(tree["step"])
        assert saved in (told, told + 1)
        assert here(tree, float(saved)), f"after kill {kill} the state {saved} is not whole"
        log.write_text(f"{saved}\n")
