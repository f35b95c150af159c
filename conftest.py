"""What every test and every docstring example runs under; at the root, because both are below it.

JAX reads most of this once, when it starts, so it is set before anything imports JAX; and in the
environment, so that a process which a test starts has it too.

JAX's own settings stay as users have them: type promotion is not strict, ranks are promoted, x64
is off. The promise is that whatever ``jax.jit`` takes is taken, and users' programs, flax and
optax mix dtypes and ranks: tests that ran under stricter rules would not see such programs fail.
"""

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

DEVICES = 4  # enough for a 2 × 2 mesh
MOST_WORKERS = 8  # each holds a JAX of its own: about a gigabyte at its peak
MOST_KEPT = 2**29  # bytes of compiled programs that stay from one run to the next
MOST_MAPS = 2**13  # of memory, an eighth of what Linux lets a process have; one module needs less


def usable_cores() -> int:
    """The cores this process may run on: in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_environment() -> None:
    """Four CPU devices, pictures without windows, threads shared out between the workers."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("MPLBACKEND", "agg")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags += f" --xla_force_host_platform_device_count={DEVICES}"
        os.environ["XLA_FLAGS"] = flags.strip()
    # Processes that tests start by the dozen would each compile the package's source anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # NumPy's and scikit-learn's own threads would spin against XLA's.
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(threads, "1")
    # The size of XLA's thread pools, which XLA raises to the number of devices. Only in a worker:
    # workers inherit the environment of the process that starts them.
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if workers is not None:
        os.environ.setdefault("NPROC", str(max(1, usable_cores() // int(workers))))
    else:
        # glibc reads this when a process starts: no fast bins, which it empties again whenever
        # something large is freed. LLVM does that all the time, and a compilation takes less.
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.mxfast=0")


set_environment()

# Nothing is timed in tests, so none may fail for slowness. ``--hypothesis-profile=thorough``
# searches anew each time, and longer.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("thorough", deadline=None, derandomize=False, max_examples=1000)
# Every night, for the random programs, of which each profile takes four times its number and more.
settings.register_profile("nightly", deadline=None, derandomize=False, max_examples=200)
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what XLA compiles, for all processes of this run and for the next run.

    JAX's own cache, by the program, its options and the version: what was kept is what would be
    compiled. It is beside what pytest keeps, so that ``--cache-clear`` starts anew.
    """
    cache = getattr(config, "cache", None)  # none with `-p no:cacheprovider`
    if cache is None or "PYTEST_XDIST_WORKER" in os.environ:  # a worker inherits the environment
        return
    folder = cache.mkdir("jax")
    if sum(file.stat().st_size for file in folder.iterdir()) > MOST_KEPT:
        shutil.rmtree(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means: one worker a core, as far as memory goes."""
    return min(MOST_WORKERS, usable_cores())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--most-seconds", type=float, default=float("inf"), help="see `brief`")


@pytest.fixture(autouse=True)
def brief(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--most-seconds=10``, as .ci/nightly has it: what is not marked slow fails if it takes
    more. Seconds of a core, by this process and by those it starts: neighbours do not count."""
    begun = sum(os.times()[:4])
    yield
    took = sum(os.times()[:4]) - begun
    is_slow = request.node.get_closest_marker("slow") is not None
    if took > request.config.getoption("--most-seconds") and not is_slow:
        pytest.fail(f"It took {took:.0f} s: make it smaller, or mark it slow.", pytrace=False)


gc.disable()  # until all is imported, most of which stays


def pytest_collection_finish() -> None:
    """What was imported stays: no later search for garbage looks at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def memory_maps() -> int:
    """How many this process has; more than it may have where nobody says."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else sys.maxsize


@pytest.fixture(scope="session", autouse=True)
def compiled_plainly() -> None:
    """Leaves out what XLA optimises, where it can: compiling is most of the tests' time."""
    import jax  # noqa: PLC0415 (the settings above come first)

    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def compiled_fully(compiled_plainly: None) -> Iterator[None]:
    """For a module that holds what XLA optimises: its programs, its bytes and operations, or
    results to the last bit. It asks by ``pytestmark = pytest.mark.usefixtures("compiled_fully")``.
    """
    import jax  # noqa: PLC0415

    jax.clear_caches()  # what was compiled in the other way
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> None:
    """Modules share what was compiled, unless that uses up a process's memory maps, as some
    thousand programs do. What earlier modules left is not searched for garbage again, which takes
    half a second where a test asks for it."""
    gc.freeze()
    if memory_maps() > MOST_MAPS:
        import jax  # noqa: PLC0415

        jax.clear_caches()


@pytest.fixture
def compilations() -> Iterator[Callable[[], int]]:
    """Counts what XLA compiles."""
    import jax  # noqa: PLC0415

    count = [0]

    def listen(event: str, duration: float, **more: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            count[0] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: count[0]
    jax.monitoring.unregister_event_duration_listener(listen)
