"""What is said of the gallery's bugs: by `explain`, and by what other libraries have for it.

`explain` and ``jax_debug_nans`` take tests/insight/gallery as it is; PyTorch's anomaly mode and
TensorFlow's ``check_numerics``, eagerly and in a ``tf.function``, take the same bugs as written for
them in bugs_in_torch.py and bugs_in_tensorflow.py, each in an environment of its own. Of each: what
was said, whether the line of the bug was among the lines named, and, where nothing was said, what
the gradient was.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
FINITE = ("nothing (finite)", "nothing (zero)")
Said = tuple[str, str]  # in a word, and all that was printed


# ---------------------------------------------------------------------- in the peers' environments


def kind(gradient: Any) -> str:
    """What the gradient is, where nobody complains."""
    import numpy as np

    if gradient is None:
        return "nothing (None)"
    values = np.asarray(gradient)
    if np.isnan(values).any():
        return "nothing (NaN)"
    if np.isinf(values).any():
        return "nothing (Inf)"
    return "nothing (finite)" if values.any() else "nothing (zero)"


def by_torch(bug: Callable[..., Any], x: Any) -> Said:
    import torch

    x = x.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                bug(x).backward()
        except Exception as error:
            found = re.search(r"Function '(\w+)' returned nan", str(error))
            words = found[1] if found else type(error).__name__
            return words, "\n".join([*(str(w.message) for w in caught), traceback.format_exc()])
    return kind(x.grad), ""


def by_tensorflow(bug: Callable[..., Any], x: Any, traced: bool = False) -> Said:
    import tensorflow as tf

    def gradient_of(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = bug(x)
        return tape.gradient(y, x)

    try:
        gradient = (tf.function(gradient_of) if traced else gradient_of)(x)
    except Exception as error:
        found = re.search(r"(?:executing|graph) op \"(\w+)\"", str(error))
        return found[1] if found else type(error).__name__, str(error) + traceback.format_exc()
    return kind(gradient), ""


# A bug by several ways: the first is written down, the others where they say something else.
WAYS: dict[str, list[tuple[str, Callable[..., Said]]]] = {
    "torch": [("anomaly mode", by_torch)],
    "tensorflow": [
        ("check_numerics", by_tensorflow),
        ("in a tf.function", partial(by_tensorflow, traced=True)),
    ],
}


def where(bug: Callable[..., Any], file: Path, text: str) -> str:
    """Whether the line of the bug is among those of the bugs' file that were named.

    A bug on no line has none marked.
    """
    source, first = inspect.getsourcelines(bug)
    marked = {first + i for i, line in enumerate(source) if line.endswith("# here\n")}
    named = re.findall(rf"{re.escape(file.name)}(?:\", line |:| \(L)(\d+)", text)
    lines = {int(line) for line in named}
    if not lines:
        return "no line"
    return "the line" if lines & marked else "another line" if marked else "a line of its use"


def peer(library: str, only: str) -> dict[str, Any]:
    """What the library says of each bug, and which version of it."""
    module = importlib.import_module(library)
    if library == "tensorflow":
        module.debugging.enable_check_numerics()
    bugs = importlib.import_module(f"bugs_in_{library}")
    said = {name: [why] for name, why in bugs.ABSENT.items()}
    for name, (bug, x) in bugs.BUGS.items():
        if only not in name:
            continue
        said[name] = []
        for way, said_by in WAYS[library]:
            words, text = said_by(bug, x)
            if only == name:  # asked for by its whole name
                print(way, text, sep="\n", file=sys.stderr)
            if text:
                words = f"{words}, {where(bug, Path(bugs.__file__), text)}"
            if words not in said[name]:
                said[name].append(words)
    return {"version": module.__version__, "said": said}


# --------------------------------------------------------------------------------------- in ours


def share(rows: list[list[str]], column: int, words: str) -> str:
    """How many complain in these words, of the rows where there is something to complain of."""
    cells = [row[column] for row in rows if not row[column].startswith(("no ", "JAX alone"))]
    return f"{sum(words in c and not c.startswith('nothing') for c in cells)} of {len(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensorflow", help="a Python where TensorFlow is installed")
    parser.add_argument("--torch", help="a Python where PyTorch is installed")
    parser.add_argument("--only", default="", help="bugs with this in their name")
    parser.add_argument("--peer", choices=list(NAMES), help="be the process of this library")
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(peer(options.peer, options.only)))
        return

    from explain import BUGS, said_of
    from report import print_table

    names = [name for name in sorted(BUGS) if options.only in name]
    header = ["bug", "explain", "jax_debug_nans"]
    rows = [[name.replace("_", " "), *said_of(name)] for name in names]
    title = "What is said of seeded bugs"
    for library, name in NAMES.items():
        python = getattr(options, library)
        if python is None:
            continue
        command = [python, __file__, "--peer", library, "--only", options.only]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        title += f", {name} {found['version']}"
        ways = [way for way, _ in WAYS[library]]
        header.append(f"{name}, {ways[0]}")
        for bug, row in zip(names, rows, strict=True):
            first, *others = found["said"][bug]
            if "in the reverse pass" in BUGS[bug].causes[0] and first in FINITE:
                first = f"no NaN there{first.removeprefix('nothing')}"
            row.append("; ".join([first, *(f"{ways[1]} {other}" for other in others)]))
    on_lines = [row for bug, row in zip(names, rows, strict=True) if BUGS[bug].line]
    columns = range(1, len(header))
    rows.append(["said something", *(share(rows, i, "") for i in columns)])
    rows.append(
        ["named the line, of those on one", *(share(on_lines, i, ", the line") for i in columns)]
    )
    print_table(title, header, rows)


if __name__ == "__main__":
    main()
