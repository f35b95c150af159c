"""What importing costs: `import tracegrad` against `import jax`, which it imports.

Each in a process of its own, in turn, after a first round that compiles Python's source; CPU time
of the process. To stay below a ratio of 1.15. Then the same of all rooms, with those that wait
until one of their names is asked for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from report import print_table

CODE = "import time; begun = time.process_time(); {}; print(time.process_time() - begun)"
IMPORTS = {
    "import jax": "import jax",
    "import tracegrad": "import tracegrad",
    "with all rooms": "import tracegrad as tg; [getattr(tg, name) for name in dir(tg)]",
}


def seconds(code: str) -> float:
    """CPU seconds of one import, in a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each round would compile the source
    command = [sys.executable, "-c", CODE.format(code)]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    taken: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for code in IMPORTS.values():
        seconds(code)
    for _ in range(rounds):
        for name, code in IMPORTS.items():
            taken[name].append(seconds(code))
    of_jax, *_ = taken.values()
    rows = []
    for name, each in taken.items():
        ratio = statistics.median(b / a for a, b in zip(of_jax, each, strict=True))
        least = min(each) / min(of_jax)
        rows.append([name, f"{statistics.median(each):.2f} s", f"{ratio:.3f}", f"{least:.3f}"])
    headings = ["", "CPU", "ratio", "of the least"]
    print_table("Importing, in CPU seconds", headings, rows)


if __name__ == "__main__":
    main()
