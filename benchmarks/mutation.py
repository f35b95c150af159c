"""Which small faults, put into the package one at a time, do the tests notice?

    python benchmarks/mutation.py cover FILE               the tests, and which functions each runs
    python benchmarks/mutation.py run FILE --cover FILE    mutants, and the first test that fails
    python benchmarks/mutation.py run FILE --cover FILE --again FILE    those of an earlier run
    python benchmarks/mutation.py compare BEFORE AFTER

A mutant is one changed operator, constant, condition, returned value or left-out call in one
function. Tests that run the function are tried until one fails, those of its subpackage first, and
of these the quickest. Run again on a later checkout, the test that killed a mutant is tried first;
a mutant whose function has been rewritten since is left out. So two versions of the tests are
compared on the same faults.

It needs Python 3.12 or newer (`sys.monitoring`) and POSIX (each mutant is tried in a fork of a
process that has imported everything but the package).
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "ir": 36,
    "rewriting": 34,
    "differentiation": 32,
    "tape": 34,
    "tracing": 34,
    "variables": 10,
}
_FIRST = 8  # tests that are tried before the modules of all others are collected
IMPORTED_ONCE = ["numpy", "jax", "jax.numpy", "flax.nnx", "flax.linen", "optax", "equinox"]
IMPORTED_ONCE += ["hypothesis", "hypothesis.strategies", "pytest", "nbclient", "sklearn.datasets"]


# --------------------------------------------------------------------------------------- coverage


class Coverage:
    """A pytest plugin: of each test, how long it takes and which functions of the package run."""

    def __init__(self, to: Path):
        self.to = to
        self.package = str(ROOT / "tracegrad") + os.sep
        self.seen: set[str] = set()
        self.tests: dict[str, Any] = {}
        self.seconds: Counter[str] = Counter()
        self.monitoring = sys.monitoring
        self.monitoring.use_tool_id(self.monitoring.COVERAGE_ID, "mutation")
        started = self.monitoring.events.PY_START
        self.monitoring.register_callback(self.monitoring.COVERAGE_ID, started, self.note)
        self.monitoring.set_events(self.monitoring.COVERAGE_ID, started)

    def note(self, code: Any, offset: int) -> Any:
        if code.co_filename.startswith(self.package):
            path = code.co_filename.removeprefix(self.package)
            self.seen.add(f"{path}:{code.co_qualname}")
        return self.monitoring.DISABLE

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seen = set()
        self.monitoring.restart_events()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            seconds = round(self.seconds[report.nodeid], 3)
            self.tests[report.nodeid] = {"seconds": seconds, "runs": sorted(self.seen)}

    def pytest_sessionfinish(self) -> None:
        if self.tests:
            self.to.mkdir(parents=True, exist_ok=True)
            (self.to / f"{os.getpid()}.json").write_text(json.dumps(self.tests))


def pytest_configure(config: Any) -> None:
    """In each worker: `cover` names this module as a plugin."""
    if "MUTATION_COVERAGE" in os.environ:
        config.pluginmanager.register(Coverage(Path(os.environ["MUTATION_COVERAGE"])))


def cover(file: Path, arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as parts:
        environment = {
            **os.environ,
            "MUTATION_COVERAGE": parts,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-p", "mutation"]
        subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False)
        tests: dict[str, Any] = {}
        for part in Path(parts).iterdir():
            for name, found in json.loads(part.read_text()).items():
                if (
                    found["runs"] or name not in tests
                ):  # the process that starts the workers saw none
                    tests[name] = found
    file.write_text(json.dumps(tests))
    print(f"{len(tests)} tests, {sum(t['seconds'] for t in tests.values()):.0f} s")


# ---------------------------------------------------------------------------------------- mutants


class Mutant(NamedTuple):
    file: str  # below tracegrad/
    function: str  # its qualified name
    source: str  # a hash of the function's text
    start: int  # in bytes, from the start of the function
    old: str
    new: str

    def name(self) -> str:
        return f"{self.file}:{self.function}: {self.old!r} -> {self.new!r}"


_SWAPPED: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node of the syntax tree could have been instead."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in _SWAPPED:
            yield ast.Compare(left, [_SWAPPED[type(op)]()], right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(_SWAPPED[type(op)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(left, op, right) if type(op) in _SWAPPED:
            yield ast.BinOp(left, _SWAPPED[type(op)](), right)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, other):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, other)
        case ast.Return(value) if value is not None and not _is_none(value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module by qualified name, those within others too."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(tree, "")


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function that run when it does: no inner function, annotation or message."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda | ast.Raise | ast.Assert):
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            pending += [node.value] if node.value else []
        else:
            pending += ast.iter_child_nodes(node)


class _Text:
    """A file's bytes, with the places of syntax nodes in them."""

    def __init__(self, path: Path):
        self.bytes = path.read_bytes()
        self.tree = ast.parse(self.bytes)
        self._lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def mutants(seed: int) -> list[Mutant]:
    """A sample: of each room its number, of each function at most one."""
    rng = random.Random(seed)
    chosen: list[Mutant] = []
    for room, count in ROOMS.items():
        candidates = []
        for path in sorted((ROOT / "tracegrad" / room).rglob("*.py")):
            file = str(path.relative_to(ROOT / "tracegrad"))
            text = _Text(path)
            for name, function in functions(text.tree):
                begin, end = text.span(function)
                found = []
                for node in _own(function):
                    for other in changes(node):
                        first, last = text.span(node)
                        old, new = text.bytes[first:last].decode(), ast.unparse(other)
                        if isinstance(other, ast.expr):
                            new = f"({new})"
                        source = _hash(text.bytes[begin:end])
                        found.append(Mutant(file, name, source, first - begin, old, new))
                if found:
                    candidates.append((rng.choice(found), len(found)))
        # Long functions are drawn more often: a fault is as likely in each of their lines.
        order = sorted(candidates, key=lambda c: rng.random() ** (1 / c[1]), reverse=True)
        chosen += [mutant for mutant, _ in order[:count]]
    return chosen


def mutated(mutant: Mutant, root: Path) -> bytes | None:
    """The text of its file with the fault in it; None if the function has changed since."""
    path = root / "tracegrad" / mutant.file
    if not path.exists():
        return None
    text = _Text(path)
    for name, function in functions(text.tree):
        begin, end = text.span(function)
        if name == mutant.function and _hash(text.bytes[begin:end]) == mutant.source:
            first = begin + mutant.start
            old = mutant.old.encode()
            assert text.bytes[first : first + len(old)] == old
            return text.bytes[:first] + mutant.new.encode() + text.bytes[first + len(old) :]
    return None


# -------------------------------------------------------------------------------------------- run


class Chosen:
    """A pytest plugin: runs some tests, in order, and remembers the first that fails."""

    def __init__(self, order: list[str]):
        self.order = {name: i for i, name in enumerate(order)}
        self.failed: str | None = None
        self.ran = 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order),
            key=lambda item: self.order[item.nodeid],
        )

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = f"{report.nodeid} (collecting)"


def attempt(order: list[str], tree: Path, seconds: float) -> dict[str, Any]:
    """Runs tests in a fork until one fails."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.setsid()
        status = 1
        with contextlib.suppress(BaseException):
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            os.chdir(tree)
            sys.path[:0] = [str(tree)]
            os.environ["PYTHONPATH"] = str(tree)
            import pytest

            plugin = Chosen(order)
            files = sorted({name.partition("::")[0] for name in order})
            options = ["-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", ""]
            options += ["-W", "ignore:Module already imported"]
            code = pytest.main([*options, *files], plugins=[plugin])
            failed = plugin.failed
            if failed is None and code not in (0, 5):
                failed = f"(pytest ended with {int(code)})"
            os.write(writing, json.dumps({"killed by": failed, "ran": plugin.ran}).encode())
            status = 0
        os._exit(status)
    os.close(writing)
    ending = time.monotonic() + seconds
    while time.monotonic() < ending:
        ended, _ = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, 9)
        os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    return json.loads(answer) if answer else {"killed by": "(hung, or the process ended)", "ran": 0}


def serve(tree: Path) -> None:
    """Reads tasks from standard input, a JSON line each, and answers each by one."""
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(tree), str(tree / "tests")]
    os.chdir(tree)
    importlib.import_module("conftest")  # sets the environment, before JAX is imported
    for name in IMPORTED_ONCE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del sys.modules["conftest"]
    assert not any(name.partition(".")[0] == "tracegrad" for name in sys.modules)
    import warnings

    warnings.simplefilter("ignore")  # JAX warns of forks; no thread of it has been started yet
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(attempt(task["order"], tree, task["seconds"])), flush=True)


def _copy(to: Path) -> Path:
    leave = shutil.ignore_patterns(".git", "__pycache__", ".*cache", ".venv*", "notebooks")
    shutil.copytree(ROOT, to, ignore=leave)
    compileall.compile_dir(to / "tracegrad", quiet=1)
    return to


def try_mutant(
    mutant: Mutant, first: list[str], tests: dict[str, Any], tree: Path, server: Any, most: float
) -> dict[str, Any]:
    text = mutated(mutant, tree)
    if text is None:
        return {"killed by": "(the function has changed)", "ran": 0}
    runs = f"{mutant.file}:{mutant.function}"
    room = f"/{mutant.file.partition('/')[0]}/"
    covering = sorted(
        (room not in name, t["seconds"], name) for name, t in tests.items() if runs in t["runs"]
    )
    order, total = [name for name in first if name in tests], 0.0
    for _, seconds, name in covering:
        total += seconds
        if total > most and len(order) >= 5:
            break
        order.append(name)
    path = tree / "tracegrad" / mutant.file
    original = path.read_bytes()
    path.write_bytes(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    order = list(dict.fromkeys(order))
    result: dict[str, Any] = {"killed by": None, "ran": 0}
    try:
        for part in (order[:_FIRST], order[_FIRST:]):
            if part and result["killed by"] is None:
                task = {"order": part, "seconds": 120 + 4 * most}
                server.stdin.write(json.dumps(task) + "\n")
                server.stdin.flush()
                found = json.loads(server.stdout.readline())
                result = {**found, "ran": result["ran"] + found["ran"]}
    finally:
        path.write_bytes(original)
    return {**result, "covering": len(covering), "tried": len(order)}


def run(file: Path, arguments: argparse.Namespace) -> None:
    tests = json.loads(arguments.cover.read_text())
    before = json.loads(arguments.again.read_text()) if arguments.again else []
    if before:
        tasks = [(Mutant(*found["mutant"]), found["killed by"]) for found in before]
    else:
        tasks = [(mutant, None) for mutant in mutants(arguments.seed)]
    done = json.loads(file.read_text()) if file.exists() else []  # an interrupted run goes on
    known = {tuple(found["mutant"]) for found in done}
    tasks = [task for task in tasks if tuple(task[0]) not in known]
    with tempfile.TemporaryDirectory() as work:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        trees, servers = [], []
        for k in range(arguments.jobs):
            trees.append(_copy(Path(work) / str(k)))
            servers.append(
                subprocess.Popen(
                    [sys.executable, __file__, "serve", str(trees[k])],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )

        def work_off(k: int) -> None:
            while tasks:
                mutant, killer = tasks.pop(0)
                begun = time.monotonic()
                first = [killer] if killer else []
                result = try_mutant(mutant, first, tests, trees[k], servers[k], arguments.most)
                done.append({"mutant": list(mutant), **result})
                file.write_text(json.dumps(done, indent=1))
                by = result["killed by"] or f"SURVIVED {result['ran']} tests"
                print(f"{time.monotonic() - begun:5.1f} s  {mutant.name()}  {by}", flush=True)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(work_off, range(arguments.jobs)))
        for server in servers:
            server.stdin.close()
            server.wait()
    tell(done)


def _outcome(found: dict[str, Any]) -> str:
    if found["killed by"] == "(the function has changed)":
        return "changed"
    return "killed" if found["killed by"] else "survived"


def tell(done: list[dict[str, Any]]) -> None:
    for room in (*ROOMS, ""):
        counts = Counter(_outcome(d) for d in done if d["mutant"][0].startswith(room))
        print(f"{room or 'all':16s}", *(f"{k} {v}" for k, v in sorted(counts.items())), sep="  ")


def compare(before: Path, after: Path) -> None:
    old = {tuple(d["mutant"]): d for d in json.loads(before.read_text())}
    new = {tuple(d["mutant"]): d for d in json.loads(after.read_text())}
    both = [m for m in old if m in new and "changed" not in (_outcome(old[m]), _outcome(new[m]))]
    pairs = Counter((_outcome(old[m]), _outcome(new[m])) for m in both)
    print(f"{len(both)} mutants in functions that are the same in both")
    for (was, now), count in sorted(pairs.items()):
        print(f"  before {was}, after {now}: {count}")
    for m in both:
        if (_outcome(old[m]), _outcome(new[m])) == ("killed", "survived"):
            print(f"    {Mutant(*m).name()}\n      before: {old[m]['killed by']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    covering = commands.add_parser("cover")
    covering.add_argument("file", type=Path)
    running = commands.add_parser("run")
    running.add_argument("file", type=Path)
    running.add_argument("--cover", type=Path, required=True)
    running.add_argument("--again", type=Path, help="the file of an earlier run")
    running.add_argument("--jobs", type=int, default=1)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--most", type=float, default=60, help="seconds of tests for a mutant")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    commands.add_parser("serve").add_argument("tree", type=Path)
    given, rest = parser.parse_known_args()
    if given.command == "cover":
        cover(given.file, rest)
    elif given.command == "serve":
        serve(given.tree)
    elif given.command == "run":
        run(given.file, given)
    else:
        compare(given.before, given.after)
