"""What tracegrad does on the device that JAX finds, an accelerator or the CPU, in one table.

Every row runs in a process of its own, so that a row that fails or hangs ends no other, and so that
the peaks of memory of two rows are apart. A line of the table is printed, and ``--out`` written
anew, as soon as it is measured. The most valuable rows come first; what does not fit into
``--minutes`` is said not to have run. ``--small`` has sizes that a CPU runs in a minute.

A new row is a function below that yields lines (what was measured, the result, the numbers), and an
entry in `ROWS`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
MARK = "a line of the table: "
LEAST = 10  # seconds without which no row begins
MOST = 0.4  # of all the time, which one row may take where others come after it
_WAITS = "so far: "  # a line that is printed only if none takes its place
MIB = 2**20

Line = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """Of the transformer (a batch of `tokens`), of the one to explain, and of the table."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: tuple[int, int]
    rounds: int
    explained: tuple[int, int, int, int]  # layers, width, batch, tokens
    table: tuple[int, int]


SIZES = {
    False: Sizes(12, 768, 12, 16384, (8, 1024), 15, (12, 256, 4, 128), (1_000_000, 128)),
    True: Sizes(4, 32, 2, 64, (4, 32), 3, (2, 16, 2, 8), (2_000, 16)),
}

# ---------------------------------------------------------------------------- what is measured


def seconds(run: Callable[[], Any]) -> float:
    import jax

    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def transformer(sizes: Sizes, recompute: Any = None) -> tuple[Any, Any]:
    """The loss in bf16 of parameters in f32, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    from transformer import block, init, loss_with

    one = functools.partial(block, heads=sizes.heads)
    of_block = loss_with(recompute(one) if recompute else one)

    def loss(params: Any, tokens: Any) -> Any:
        return of_block(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), tokens)

    params = jax.eval_shape(lambda: init(sizes.layers, sizes.width, sizes.vocabulary))
    batch, length = sizes.tokens
    return loss, (params, jax.ShapeDtypeStruct((batch, length + 1), jnp.int32))


def arrays(shapes: Any) -> Any:
    """Small normal numbers for floats, and for integers the first hundreds."""
    import jax
    import jax.numpy as jnp

    def array(shape: Any) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jnp.arange(shape.size, dtype=shape.dtype).reshape(shape.shape) % 61
        return 0.02 * jax.random.normal(jax.random.key(0), shape.shape, shape.dtype)

    return jax.block_until_ready(jax.tree.map(array, shapes))


def run_and_weigh(compiled: Any, shapes: Any) -> tuple[str, dict[str, Any]]:
    """What the device holds beside the arguments while a compiled gradient runs, and its time."""
    import jax

    account = compiled.memory_analysis()
    by_xla = account.temp_size_in_bytes + account.output_size_in_bytes
    args = arrays(shapes)
    before = jax.devices()[0].memory_stats()
    times = [seconds(lambda: compiled(*args)) for _ in range(6)][1:]
    numbers = {
        "xla_temporary_bytes": account.temp_size_in_bytes,
        "xla_temporary_and_result_bytes": by_xla,
        "step_seconds": statistics.median(times),
    }
    after = jax.devices()[0].memory_stats()
    if before is None or after is None:  # on a CPU
        numbers["peak_bytes"] = None
        told = f"no memory_stats() here: by XLA {by_xla / MIB:,.1f} MiB"
    else:
        numbers["peak_bytes"] = after["peak_bytes_in_use"]
        numbers["peak_beside_arguments_bytes"] = after["peak_bytes_in_use"] - before["bytes_in_use"]
        # What was held earlier, while XLA tried kernels, may have been more.
        numbers["peak_is_of_the_step"] = after["peak_bytes_in_use"] > before["peak_bytes_in_use"]
        told = (
            f"peak {after['peak_bytes_in_use'] / MIB:,.0f} MiB, beside arguments "
            f"{numbers['peak_beside_arguments_bytes'] / MIB:,.0f} (by XLA {by_xla / MIB:,.0f})"
        )
        if not numbers["peak_is_of_the_step"]:
            told += ", at most: more was held while compiling"
    return f"{told}; {1000 * numbers['step_seconds']:.2f} ms", numbers


# ------------------------------------------------------------------------------------ the rows


def same_hlo(sizes: Sizes) -> Iterator[Line]:
    """The optimised HLO, without metadata, of what `trace` and `jax.jit` compile."""
    import jax
    from programs import PROGRAMS
    from test_hlo_identical import first_difference, optimised

    import tracegrad as tg

    names = (
        "nnx_transformer_adamw_step",
        "value_and_grad_equinox_conv_net",
        "clipped_scheduled_step",
        "value_and_grad_scan_rnn",
        "value_and_grad_custom_rules",
        "value_and_grad_checkpointed_blocks",
    )
    programs = {program.name: program for program in PROGRAMS}
    jax.config.update("jax_enable_compilation_cache", False)
    same = 0
    for name in names:
        fun, args = programs[name].build()
        traced = tg.trace(fun).lower(*args)
        options = dict(traced._lowering._compiler_options_kvs)
        jitted = jax.jit(fun, compiler_options=options or None).lower(*args)
        theirs, ours = optimised(jitted), optimised(traced)
        same += ours == theirs
        if ours != theirs:
            told = "differs at " + " ".join(first_difference(ours, theirs).split())
            if optimised(jitted) != theirs:
                told = f"jit's differs from jit's own of another time; {told}"
            if jitted.as_text() == traced.as_text():
                told = f"XLA got the same StableHLO; {told}"
            yield name, told, {}
    yield "identical to jax.jit's", f"{same} of {len(names)}", {"same": same, "of": len(names)}


def train_step(sizes: Sizes) -> Iterator[Line]:
    """A step of adamw: what compiles it, what it takes, and until its call returns."""
    import jax
    import jax.numpy as jnp
    import optax

    import tracegrad as tg

    jax.config.update("jax_enable_compilation_cache", False)
    loss, (params, tokens) = transformer(sizes)
    optimiser = optax.adamw(1e-3)

    def new_step() -> Callable[..., Any]:  # one that no cache knows
        def step(params: Any, state: Any, tokens: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, state = optimiser.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    params, tokens = arrays((params, tokens))
    state = jax.block_until_ready(jax.jit(optimiser.init)(params))
    args = (params, state, tokens)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    cold = seconds(lambda: jax.jit(new_step())(*args))
    yield "the very first call, jit's", f"{cold:.1f} s", {"seconds": cold}
    steps: dict[str, Callable[..., Any]] = {}
    first: dict[str, float] = {}
    for name, compiler in (("jit", jax.jit), ("traced", tg.trace)):
        steps[name] = compiler(new_step())
        first[name] = seconds(lambda name=name: steps[name](*args))
    ratio = first["traced"] / first["jit"]
    yield (
        f"first call ({count / 1e6:.1f} M parameters)",
        f"jit {first['jit']:.1f} s, traced {first['traced']:.1f} s, ratio {ratio:.3f}",
        {"parameters": count, "first_seconds": first, "ratio": ratio},
    )
    whole: dict[str, list[float]] = {name: [] for name in steps}
    call: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(2 * sizes.rounds):
        for name in list(steps)[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            result = steps[name](*args)
            call[name].append(time.perf_counter() - start)
            jax.block_until_ready(result)
            whole[name].append(time.perf_counter() - start)
            del result
    for what, times in (("step", whole), ("call returns", call)):
        medians = {name: statistics.median(samples) for name, samples in times.items()}
        ratio = medians["traced"] / medians["jit"]
        yield (
            what,
            f"jit {1000 * medians['jit']:.3f} ms, traced {1000 * medians['traced']:.3f} ms, "
            f"ratio {ratio:.3f}",
            {"seconds": times, "median_seconds": medians, "ratio": ratio},
        )
    scalars = {"jit": jax.jit(lambda x: x + 1), "traced": tg.trace(lambda x: x + 1)}
    x, times = jnp.float32(1), {name: [] for name in scalars}
    for i in range(10 * sizes.rounds):
        for name in list(scalars)[:: 1 if i % 2 else -1]:
            jax.block_until_ready(scalars[name](x))
            start = time.perf_counter()
            for _ in range(100):
                result = scalars[name](x)
            times[name].append((time.perf_counter() - start) / 100)
            jax.block_until_ready(result)
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    ratio = medians["traced"] / medians["jit"]
    yield (
        "a call of a scalar returns",
        f"jit {1e6 * medians['jit']:.2f} µs, traced {1e6 * medians['traced']:.2f} µs, "
        f"ratio {ratio:.3f}",
        {"median_seconds": medians, "ratio": ratio},
    )


def recompute(sizes: Sizes, how: str) -> Iterator[Line]:
    """The gradient of the loss: its peak, beside what was planned, and its time."""
    import jax

    import tracegrad as tg
    from tracegrad.planning import BudgetTooSmall

    loss, shapes = transformer(sizes, tg.recompute_grad if how == "recompute_grad" else None)
    is_budget = how.endswith("%")
    options = {"memory_budget": how} if is_budget else {}
    start = time.perf_counter()
    # A budget is for gradients that are taken while the function runs.
    gradient = tg.trace(lambda *args: jax.value_and_grad(loss)(*args), **options)
    try:
        compiled = gradient.lower(*shapes).compile()
    except BudgetTooSmall as error:
        yield how, f"no plan: {str(error).partition('. ')[0]}", {"has_plan": False}
        return
    took = time.perf_counter() - start
    told, numbers = run_and_weigh(compiled, shapes)
    yield how, told, {**numbers, "compiled_seconds": took}
    if is_budget:
        plan = tg.plan_recompute(loss, *shapes, memory_budget=how, wrt=0)
        assert plan.held is not None
        temporary = numbers["xla_temporary_bytes"]
        yield (
            f"{how}: the plan",
            f"holds {plan.held / MIB:,.1f} MiB of a budget of {plan.budget / MIB:,.1f} (all kept: "
            f"{plan.held_without / MIB:,.1f}), run: {temporary / MIB:,.1f}; "
            f"{plan.flops / plan.forward_flops:.1%} more FLOPs than a forward pass; "
            f"{took:.1f} s to plan and compile",
            {"held": plan.held, "budget": plan.budget, "held_without": plan.held_without},
        )


def memory_lines(sizes: Sizes) -> Iterator[Line]:
    """The share of the peak that the lines of `memory` explain."""
    import jax

    import tracegrad as tg

    loss, shapes = transformer(sizes)
    report = tg.memory(jax.value_and_grad(loss), *shapes)
    named = sum(line.size for line in report.lines if line.line)
    rest = report.total - sum(line.size for line in report.lines if not line.line)
    yield (
        "bytes in lines",
        f"{report.listed / report.total:.1%} of the {report.total / MIB:,.1f} MiB that XLA holds, "
        f"by line; lines of the program are {named / rest:.1%} of what is no argument",
        {"listed": report.listed, "total": report.total, "named": named},
    )
    compiled = tg.trace(jax.value_and_grad(loss)).lower(*shapes).compile()
    _, numbers = run_and_weigh(compiled, shapes)
    peak = numbers["peak_bytes"]
    told = "no memory_stats() here" if peak is None else f"{report.listed / peak:.1%}"
    if not numbers.get("peak_is_of_the_step", True):
        told += ", at least: more was held while compiling"
    yield "bytes in lines, of the device's peak", told, {"peak_bytes": peak}


def explained(sizes: Sizes) -> Iterator[Line]:
    """The first and the second call of `explain`, beside compiling the gradient."""
    import jax
    from transformer import block, init, loss_with

    from tracegrad.insight import explain

    jax.config.update("jax_enable_compilation_cache", False)
    layers, width, batch, length = sizes.explained
    params = init(layers, width, 1000)
    tokens = arrays(jax.ShapeDtypeStruct((batch, length + 1), "int32"))
    loss = loss_with(block)
    backward = jax.jit(jax.value_and_grad(loss))
    compiling = seconds(lambda: backward(params, tokens))
    running = statistics.median(seconds(lambda: backward(params, tokens)) for _ in range(5))
    yield (
        f"the gradient ({layers} layers of {width}, {batch} × {length} tokens)",
        f"first call {compiling:.1f} s, later {1000 * running:.2f} ms",
        {"first_seconds": compiling, "seconds": running},
    )
    times = []
    for which in ("first", "second"):
        times.append(seconds(lambda: explain(loss, params, tokens)))
        yield (
            f"explain, {which} call",
            f"{times[-1]:.2f} s, {times[-1] / compiling:.2f} × compiling",
            {"seconds": times[-1], "of_compiling": times[-1] / compiling},
        )


def sparse_rows(sizes: Sizes) -> Iterator[Line]:
    """A step of gradient descent on a large table, dense and by slices."""
    import jax
    import jax.numpy as jnp
    from sparse_gradients import dense, measure, sparse

    import tracegrad as tg

    rows, width = sizes.table
    keys = jax.random.split(jax.random.key(0), 8)
    batches = [
        (jax.random.randint(k, (1024,), 0, rows), jax.random.normal(k, (1024, width))) for k in keys
    ]
    state = (jnp.zeros((rows, width)),)
    found = {}
    steps = {
        "dense, jax.jit": (jax.jit(dense, donate_argnums=0), 1),
        "sparse, traced": (tg.trace(sparse, donate_argnums=0), 4),
    }
    for name, (step, times) in steps.items():
        ms, mib, _ = measure(step, state, batches, times * sizes.rounds)
        found[name] = ms
        more = "" if len(found) == 1 else f", {found['dense, jax.jit'] / ms:.1f} × faster"
        yield (
            f"{name} ({rows:,} × {width})",
            f"{ms:.3f} ms, {mib:,.2f} MiB of temporary buffers{more}",
            {"milliseconds": ms, "temporary_mib": mib},
        )


def marked_tests(sizes: Sizes) -> Iterator[Line]:
    """The tests that are marked for accelerators, on what there is.

    In full precision, which NVIDIA's GPUs do not have for products of f32 unless they are told.
    Warnings, which are failures elsewhere, may be of packages that nobody has tried here."""
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.accelerator" in p.read_text()]
    if sizes == SIZES[True]:
        files = [path for path in files if path.name == "test_recompute_memory.py"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    workers = 0 if len(files) == 1 else min(6, max(2, (os.cpu_count() or 1) - 2))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "accelerator and not slow",
        "-v",
        "--tb=short",
        "-rfE",
    ]
    command += ["-W", "default", "-p", "no:benchmark"]
    # In this order, so that what takes longest is what there may be no time for.
    files.sort(key=lambda path: ("gallery" in path.name, path))
    command += ["-n", str(workers), "--dist=load", *map(str, files)]
    counts = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0)
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, errors="replace", stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        for text in run.stdout:
            last = text.strip(" =\n") or last
            print(text, end="", file=sys.stderr, flush=True)
            if why := re.match(r"(?:FAILED|ERROR) (\S+)(?: - (.*))?", text):
                yield _test(why[1]), f"failed: {why[2] or ''}", {"test": why[1]}
                continue
            word = re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", text)
            test = re.search(r"\S+\.py::\S.*?(?= PASSED| FAILED| ERROR| SKIPPED|$)", text)
            if word and test:
                counts[word[1]] += 1
                yield _WAITS + "all", _counted(counts), counts
                if word[1] in ("FAILED", "ERROR"):
                    yield _WAITS + _test(test[0]), "failed", {"test": test[0]}
    yield "all", f"{_counted(counts)}; pytest: {last}", {**counts, "rc": run.returncode}


def _test(name: str) -> str:
    return name.strip().rpartition("/")[2]


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.lower()}" for name, count in counts.items())


ROWS: dict[str, Callable[[Sizes], Iterator[Line]]] = {
    "optimised HLO": same_hlo,
    "train step, bf16": train_step,
    "gradient, all kept": functools.partial(recompute, how="all kept"),
    "gradient, recompute_grad": functools.partial(recompute, how="recompute_grad"),
    "gradient, memory_budget=60%": functools.partial(recompute, how="60%"),
    "gradient, memory_budget=40%": functools.partial(recompute, how="40%"),
    "gradient, memory_budget=25%": functools.partial(recompute, how="25%"),
    "memory": memory_lines,
    "explain": explained,
    "sparse step": sparse_rows,
    "tests marked accelerator": marked_tests,
}

# ----------------------------------------------------------------------------------- the table


def device() -> dict[str, Any]:
    """What the table is of."""
    import jax
    import jaxlib

    first = jax.devices()[0]
    version = first.client.platform_version
    kind = "cuda" if "cuda" in version.lower() else "rocm" if "rocm" in version.lower() else None
    driver = ""
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, text=True, stdout=subprocess.PIPE).stdout.strip()
    return {
        "device": f"{first.device_kind} ({first.platform}, {len(jax.devices())})",
        "driver": driver,
        "platforms": f"{kind},cpu" if kind else first.platform,
        "platform_version": version,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "has_memory_stats": first.memory_stats() is not None,
    }


def child(row: str, sizes: Sizes) -> None:
    """Measures one row, and writes its lines for the process that has started this one."""

    def say(**what: Any) -> None:
        print(MARK + json.dumps(what), flush=True)

    try:
        if row == "device":
            say(what="device", told="", numbers=device())
            return
        for what, told, numbers in ROWS[row](sizes):
            say(what=what, told=told, numbers=numbers)
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().partition("\n")[0]
        say(what="failed", told=f"{type(error).__name__}: {said:.300}", numbers={"failed": True})


class Table:
    """Prints lines, and writes all of them anew, as they come."""

    def __init__(self, out: Path | None, about: dict[str, Any]):
        self._out = out
        self.all = {**about, "rows": []}

    def begin(self) -> None:
        self._write()
        about = self.all
        print(
            f"\n{about['device']}, driver {about['driver'] or '-'}, JAX {about['jax']}, Python "
            f"{about['python']}, {about['cores']} cores{', small sizes' * about['small']}\n"
        )
        print(f"| {'row':<28} | {'what':<44} | result | seconds |\n| --- | --- | --- | ---: |")

    def add(self, row: str, status: str, lines: dict[str, Any], took: float) -> None:
        """A row as it is so far, in the place of what was said of it before."""
        found = {"row": row, "status": status, "seconds": round(took, 1), "lines": lines}
        self.all["rows"] = [one for one in self.all["rows"] if one["row"] != row] + [found]
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            beside = self._out.with_name(self._out.name + ".new")
            beside.write_text(json.dumps(self.all, indent=1, ensure_ascii=False) + "\n")
            beside.replace(self._out)

    def print(self, row: str, what: str, told: str, took: float) -> None:
        cells = [f"{row:<28}", f"{what:<44}", told.replace("|", "\\|"), f"{took:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def lines_of(row: str, options: list[str], environment: Any, limit: float) -> Iterator[Any]:
    """The lines of a row as a process of its own writes them; at last a text, how that ended."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", row, *options]
    run = subprocess.Popen(
        command,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert run.stdout is not None
        for text in run.stdout:
            lines.put(text)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    end = time.monotonic() + limit
    try:
        while True:
            text = lines.get(timeout=max(0.0, end - time.monotonic()))
            if text is None:
                status = run.wait()
                yield "" if status == 0 else f"the process ended with {status}"
                return
            if text.startswith(MARK):
                yield json.loads(text.removeprefix(MARK))
            else:
                print(text, end="", file=sys.stderr)
    except queue.Empty:
        yield f"stopped after {limit:.0f} s: no time left"
    finally:  # pytest's and its workers' processes too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def run_row(
    table: Table, row: str, options: list[str], environment: dict[str, str], limit: float
) -> None:
    begun, printed, lines, failed = time.monotonic(), time.monotonic(), {}, False
    for line in lines_of(row, options, environment, limit):
        now = time.monotonic()
        if isinstance(line, str):
            if line:
                failed = True
                line = {"what": "failed", "told": line, "numbers": {"failed": True}}
            else:
                break
        what, waits = line["what"].removeprefix(_WAITS), line["what"].startswith(_WAITS)
        failed |= bool(line["numbers"].get("failed"))
        if what == "failed":  # what waited for better is all that there is
            for earlier, known in lines.items():
                if known["waits"]:
                    table.print(row, earlier, known["told"], 0.0)
        lines[what] = {"told": line["told"], "numbers": line["numbers"], "waits": waits}
        if not waits:
            table.print(row, what, line["told"], now - printed)
            printed = now
        table.add(row, "running", lines, now - begun)
    table.add(row, "failed" if failed else "done", lines, time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--out", type=Path, help="a file to write as JSON")
    parser.add_argument("--only", action="append", help="rows whose names have this in them")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, SIZES[options.small])
        return
    end = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    handed_on = ["--small"] * options.small
    with tempfile.TemporaryDirectory(prefix="compiled") as kept:
        environment = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # else a peak is of what was reserved
            "JAX_COMPILATION_CACHE_DIR": kept,  # one gradient is in several rows
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        said = list(lines_of("device", [], environment, max(60, 60 * options.minutes)))
        if said[-1] or said[0]["what"] == "failed":
            sys.exit(f"No device: {said[-1] or said[0]['told']}")
        about = {**said[0]["numbers"], "small": options.small}
        environment.setdefault("JAX_PLATFORMS", about["platforms"])
        table = Table(options.out, about)
        table.begin()
        asked = [r for r in ROWS if not options.only or any(o in r for o in options.only)]
        for row in asked:
            left = end - time.monotonic()
            if left < LEAST:
                table.print(row, "", "not run: no time left", 0.0)
                table.add(row, "not run", {}, 0.0)
                continue
            most = 60 * options.minutes * MOST
            run_row(
                table, row, handed_on, environment, left if row == asked[-1] else min(left, most)
            )


if __name__ == "__main__":
    main()
