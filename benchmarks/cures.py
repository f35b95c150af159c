"""Which of the gallery's bugs a rule cures, and what it costs to keep zeros zero.

The first table is of the seeded bugs of tests/insight/gallery: the rule that `explain` offers, and
whether the gradient is that of the repaired program then. The second is of `rules.strong_zero` on
the gradient of a transformer, which needs none: CPU seconds of a step, in turns with and without,
temporary bytes, and whether it is the same to the last bit. ``--healthy`` compares the bits of the
programs of tests/insight/healthy.py, too.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import print_table
from transformer import block, init, loss_with

import tracegrad as tg
from tracegrad.insight import explain

sys.path.append(str(Path(__file__).parents[1] / "tests" / "insight"))
from gallery import BUGS
from healthy import PROGRAMS

ROUNDS = 15


def cure_of(name: str) -> list[str]:
    """The rule that is offered first, its effect, and the problems that are left."""
    bug = BUGS[name].build()
    explanation = explain(bug.loss, *bug.arguments, wrt=bug.wrt)
    worst = explanation.findings[0]
    row = [name.replace("_", " "), worst.cause]
    if bug.repaired is None:
        by = "an edit" if bug.is_curable else "nothing: the program is as it should be"
        return [*row, by, "", ""]
    pairs = zip(*map(jax.tree.leaves, bug.gradients(worst.rule)), strict=True)
    same = all(np.allclose(cured, right, rtol=1e-5, atol=1e-30) for cured, right in pairs)
    after = explain(tg.rewrite(bug.loss, worst.rule), *bug.arguments, wrt=bug.wrt)
    left = ", ".join(finding.cause for finding in after.problems)
    offered = "changing=True" if worst.changes else "unasked"
    if worst.changes and not worst.problem:
        offered = "Finding.rule alone"
    return [*row, f"{worst.rule.name}{'' if same else ', and is another'}", offered, left]


def cpu_seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def is_same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def cost_of_strong_zero(layers: int, width: int, batch: int, length: int) -> list[str]:
    params = init(layers, width, 1000)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 1000, (batch, length + 1)))
    loss = loss_with(block)
    compiled, traced = [], []
    for function in (loss, tg.rewrite(loss, tg.rules.strong_zero())):
        jax.clear_caches()
        start = time.process_time()
        lowered = jax.jit(jax.value_and_grad(function)).lower(params, tokens)
        traced.append(time.process_time() - start)
        compiled.append(lowered.compile())
    plain, strong = compiled
    same = is_same(plain(params, tokens), strong(params, tokens))
    ratios = []
    for _ in range(ROUNDS):
        one, other = (cpu_seconds(lambda run=run: run(params, tokens)) for run in compiled)
        ratios.append(other / one)
    plain_bytes, strong_bytes = (c.memory_analysis().temp_size_in_bytes for c in compiled)
    return [
        f"{layers} layers of {width}, {batch} x {length} tokens",
        f"{statistics.median(ratios):.3f}",
        f"{strong_bytes / plain_bytes:.3f}",
        "the same" if same else "others",
        f"{traced[0]:.2f} s, {traced[1]:.2f} s",
    ]


def gradient(fun: Callable[..., Any], wrt: Any, args: Any) -> Any:
    return jax.jit(lambda: tg.grad(fun, wrt=wrt)(*args))()  # models are no arguments of jit


def changed_bits() -> list[str]:
    """The healthy programs whose gradient has other bits with `strong_zero`."""
    changed = []
    for name, (fun, build, wrt) in PROGRAMS.items():
        args = build()
        functions = fun, tg.rewrite(fun, tg.rules.strong_zero())
        try:
            plain, strong = (gradient(f, wrt, args) for f in functions)
        except Exception as error:
            changed.append(f"{name} ({type(error).__name__})")
            continue
        if not is_same(plain, strong):
            changed.append(name)
    return changed


def main() -> None:
    rows = [cure_of(name) for name in sorted(BUGS)]
    header = ["bug", "finding", "cured by", "offered", "problems left"]
    print_table("The seeded bugs and what cures them", header, rows)
    counted = Counter("a rule" if row[3] else row[2].partition(":")[0] for row in rows)
    print("\n" + ", ".join(f"{count} by {by}" for by, count in counted.most_common()) + "\n")
    header = ["transformer", "time of a step", "temporary bytes", "bits", "tracing"]
    sizes = [(4, 128, 4, 64), (6, 256, 4, 128)]
    print_table("rules.strong_zero", header, [cost_of_strong_zero(*size) for size in sizes])
    if "--healthy" in sys.argv:
        for how, context in (
            ("compiled", contextlib.nullcontext()),
            ("operation by operation", jax.disable_jit()),
        ):
            with context:
                found = changed_bits()
            same = len(PROGRAMS) - len(found)
            print(f"\n{how}, {same} of {len(PROGRAMS)} healthy programs have the same bits")
            print("others:", ", ".join(found) or "none")


if __name__ == "__main__":
    main()
