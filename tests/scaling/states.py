"""What is saved by several processes, and what goes wrong there."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rows import W, X, compute, mesh_of, on

import tracegrad as tg


def variables(mesh: Mesh, factor: float = 1.0) -> dict[str, tg.Variable]:
    """Split along both axes of a mesh, along one, not at all; keys; and one for each process."""
    keys = jax.device_put(jax.random.split(jax.random.key(0), 4))
    words = on(mesh, np.asarray(jax.random.key_data(keys)), "data", None)
    return {
        "both": tg.Variable(on(mesh, X * factor, "data", "model"), name="both"),
        "one": tg.Variable(on(mesh, W * factor, None, "model"), name="one"),
        "none": tg.Variable(on(mesh, W[0] * factor, None), name="none"),
        "keys": tg.Variable(jax.random.wrap_key_data(words), name="keys"),
        "step": tg.Variable(np.int32(factor), name="step"),
    }


def here(tree: dict[str, tg.Variable], factor: float) -> bool:
    """Whether what this process has of Variables is what it should be."""
    expected = {"both": X * factor, "one": W * factor, "none": W[0] * factor, "step": factor}
    for name, whole in expected.items():
        for shard in tree[name].value.addressable_shards:
            if not np.array_equal(np.asarray(shard.data), np.asarray(whole)[shard.index]):
                return False
    return True


def refused(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def all_of_it(kinds: list[str], folder: str) -> Iterator[dict[str, Any]]:
    """All rows, then what is saved; at last the processes die while they save."""
    me, path, mesh = jax.process_index(), os.path.join(folder, "two"), mesh_of("Auto")
    told: dict[str, Any] = {"rows": {kind: compute(mesh_of(kind)) for kind in kinds}}

    tree = variables(mesh, 2.0)
    tg.load_variables(tree, os.path.join(folder, "one"))
    told["loads what one process wrote"] = here(tree, 1.0)
    told["split as it was"] = str(tree["both"].value.sharding.spec)
    tg.save_variables(variables(mesh, 3.0), path)
    tg.save_variables(tree, path)
    told["files"] = sorted(os.listdir(path))

    told["numpy"] = refused(tree["both"].numpy)
    tree["step"].assign(me)
    told["different"] = refused(lambda: tg.save_variables(tree, path))
    told["afterwards"] = sorted(os.listdir(path))

    yield told
    newer = variables(mesh, 4.0)
    _before("_on_first(finish)", lambda: os.kill(os.getpid(), signal.SIGKILL))
    tg.save_variables(newer, path)


# Lines of each step of saving and of loading, and which processes come to them.
SAVING = {
    **dict.fromkeys(["not_while_tracing(", "_require_variables(", "folder.mkdir("], (0, 1)),
    **dict.fromkeys(["next_step(folder)", "of_types.is_dir()", "handler.save("], (0, 1)),
    **dict.fromkeys(["of_types.mkdir(", "handler.finalize(", "seal(new, "], (0,)),
}
LOADING = dict.fromkeys(["_require_variables(", "last_sealed(", "read_seal(", "restore("], (0, 1))


def each_fails(folder: str) -> dict[str, Any]:
    """What each process raises where one fails; it ends with a state that is saved and loaded."""
    me, path, told = jax.process_index(), os.path.join(folder, "state"), {}
    tree, other = variables(mesh_of("Auto"), 2.0), variables(mesh_of("Auto"), 3.0)
    file = os.path.join(folder, "file")
    Path(file).touch()
    tg.save_variables(tree, path)
    actions = {"save": (tg.save_variables, SAVING), "load": (tg.load_variables, LOADING)}

    def attempt(name: str, failing: int, action: Any, *mine: Any) -> None:
        """The failing process calls with `mine`; the other process with what is right."""
        told[f"{name}, {failing}"] = refused(lambda: action(*(mine if me == failing else right)))

    right = other, path
    for name, (action, places) in actions.items():
        for text, processes in places.items():
            for failing in processes:
                if me == failing:
                    _before(text, _raise_broken)
                attempt(f"{name}: {text}", failing, action, *right)
                sys.settrace(None)
        for failing in (0, 1):
            attempt(f"{name}: no Variable", failing, action, {}, path)
            attempt(f"{name}: a file", failing, action, other, file)
            attempt(f"{name}: no folder", failing, action, other, f"{path}/no/folder")
    for failing in (0, 1):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if me == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        attempt("save: a full disk", failing, tg.save_variables, *right)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    attempt("save: another folder", 1, tg.save_variables, other, path + " of this process")
    narrow = {**other, "step": tg.Variable(np.int8(1))}
    attempt("load: another dtype", 1, tg.load_variables, narrow, path)

    multihost_utils.sync_global_devices("all have failed")
    told["files"] = sorted(os.listdir(path))
    tg.load_variables(other, path)
    told["the old state"] = here(other, 2.0)
    tg.save_variables(tree, path)
    return told


def _raise_broken() -> None:
    raise OSError("broken")


def _before(text: str, act: Callable[[], None]) -> None:
    """Acts before the first line of the package that has this text."""

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        if f"{os.sep}tracegrad{os.sep}saving{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            line = Path(frame.f_code.co_filename).read_text().splitlines()[frame.f_lineno - 1]
            if text in line and "def " not in line:
                act()
        return trace

    sys.settrace(trace)


def over_and_over(folder: str, started_at: int) -> None:
    """Saves states until it is killed; process 0 writes down which were saved."""
    mesh, path = mesh_of("Auto"), os.path.join(folder, "state")
    step = started_at
    if os.path.exists(path):
        tree = variables(mesh, 0.0)
        tg.load_variables(tree, path)
        step = int(tree["step"])
        assert here(tree, float(step)), "what was left is not whole"
    while True:
        step += 1
        tg.save_variables(variables(mesh, float(step)), path)
        if jax.process_index() == 0:
            with open(os.path.join(folder, "saved"), "a") as log:
                log.write(f"{step}\n")
        time.sleep(0.001)


def rows_on(kind: str) -> dict[str, Any]:
    return compute(mesh_of(kind))


def one_fails() -> None:
    if jax.process_index() == 1:
        raise ValueError("this one fails")
    time.sleep(60)


def they_hang() -> None:
    time.sleep(60)
