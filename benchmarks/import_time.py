"""What importing costs: `import tracegrad` against `import jax`, which it imports.

Each in a process of its own, in turn, after a first round that compiles Python's source; CPU time
of the process. To stay below a ratio of 1.15.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from report import print_table

CODE = "import time; begun = time.process_time(); import {}; print(time.process_time() - begun)"


def seconds(package: str) -> float:
    """CPU seconds of one import, in a process of its own."""
    command = [sys.executable, "-c", CODE.format(package)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    packages = "jax", "tracegrad"
    for package in packages:
        seconds(package)
    taken: dict[str, list[float]] = {package: [] for package in packages}
    for _ in range(rounds):
        for package in packages:
            taken[package].append(seconds(package))
    of_jax, of_tracegrad = (statistics.median(taken[package]) for package in packages)
    ratio = statistics.median(b / a for a, b in zip(*taken.values(), strict=True))
    print_table(
        "Importing, in CPU seconds",
        ["import jax", "import tracegrad", "ratio"],
        [[f"{of_jax:.2f} s", f"{of_tracegrad:.2f} s", f"{ratio:.3f}"]],
    )


if __name__ == "__main__":
    main()
