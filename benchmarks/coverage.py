"""How much of JAX goes through a Graph unchanged: JAX's own test programs, group by group.

Each program of `jax._src.internal_test_util.test_harnesses` that JAX runs on the CPU, and its VJP
where JAX has one, compared bit by bit with every region rebuilt (see `tests/harnesses.py`).
``--sample 5`` takes what the tests take.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

import jax
from report import print_table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from harnesses import check, harnesses, sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="at most so many programs of each group")
    parser.add_argument("--groups", action="store_true", help="a line for every group")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # some programs bind primitives in ways that JAX warns about

    kinds = ("same", "no floats", "jax cannot", "differs")
    rows, total = [], Counter[str]()
    with jax.enable_x64(True):
        for name, group in harnesses().items():
            programs = sample(group, options.sample or len(group))
            counts = Counter[str]()
            for harness in programs:
                try:
                    counts[check(harness)] += 1
                except Exception as error:
                    counts["differs"] += 1
                    print(f"{harness.fullname}: {error}", file=sys.stderr)
            rows.append([name, str(len(programs)), *(str(counts[kind]) for kind in kinds)])
            total += counts
            jax.clear_caches()  # thousands of compiled programs use up a process's memory maps
    groups, programs = len(rows), sum(total.values())
    last = [f"all {groups} groups", str(programs), *(str(total[kind]) for kind in kinds)]
    print_table(
        "JAX's test programs through a Graph with every region rebuilt, bit by bit",
        [
            "group",
            "programs",
            "same, VJP too",
            "same, no floats",
            "same, no VJP in JAX",
            "differ",
        ],
        [*(rows if options.groups else []), last],
    )
    sys.exit(total["differs"] > 0)


if __name__ == "__main__":
    main()
