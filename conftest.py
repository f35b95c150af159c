"""What every test and every docstring example runs under; at the root, because both are below it.

JAX reads most of this once, when it starts, so it is set before anything imports JAX; and in the
environment, so that a process which a test starts has it too.

JAX's own settings stay as users have them: type promotion is not strict, ranks are promoted, x64
is off. The promise is that whatever ``jax.jit`` takes is taken, and users' programs, flax and
optax mix dtypes and ranks: tests that ran under stricter rules would not see such programs fail.
"""

import gc
import os
import re
import shutil
import sys
import zlib
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


# Of many of a kind, those that take seconds: the README's command leaves the long to .ci/run, and
# both leave the slow to .ci/nightly.
LONG = (
    r"test_a_fresh_process_finds_the_same_results_and_gradients",
    r"test_a_model_is_saved_by_its_arrays_or_closed_over",
    r"test_damage.*damaged_files_are_refused",
    r"test_hlo_identical.*\[nnx_transformer\]",
    r"test_load_fresh.*rules_themselves",
    r"test_measured_plans.*(of_one_device|the_gradient_that_it_takes\[by_tape\])",
    r"test_planned_regions.*saves_all_that_it_computes",
    r"test_planning_lowering.*(draws_itself|function_fit|leave_room|other_budgets|every_time)",
    r"test_planning_lowering.*(of_the_outermost|complex_values_are_saved\[fourier)",
    r"test_planning_scans.*(what_others_compute_again|everything\[layers of steps\])",
    r"test_rules_at_second_order.*(called_twice|\[scale\])",
    r"test_rules_in_force.*memory_budget.*\[tg\]",
    r"test_second_derivatives_keep_zeros_too",
    r"test_two_processes_of_two_devices_do_all_that_one_does",
    r"test_two_thousand_tapes_leave_nothing_alive",
    r"test_zeros_stay_zeros_whatever_the_derivative_is",
)
SLOW = (
    r"test_a_healthy_program_has_the_very_same_gradient",
    r"test_a_module_in_train_mode_has.*\[a cell in a scan, with random carries-nnx.jit\]",
    r"test_a_process_that_fails_or_hangs_ends_the_others",
    r"test_a_program_of_nnx\[lora\]",
    r"test_an_example_refuses_before_it_trains.*epochs=0",
    r"test_answer_is_that_of_jax_in_x64",
    r"test_(linen|haiku|equinox)_programs.*\[(cnn_with_batch_stats|mlp_with_batch_norm|ensemble)\]",
    r"test_examples.*says_when_it_misses_its_goal",
    r"test_forward\.py.*its_own_jvp\[in_scan\]",
    r"test_forward_programs.*\[linen_mlp\]",
    r"test_hlo_identical.*(nnx_transformer_adamw_step|equinox_conv_net)\]",
    r"test_hlo_identical.*value_and_grad_nnx_transformer\]",
    r"test_measured_plans.*no_more_than_the_budget\[attention\]",
    r"test_measured_plans.*the_gradient_that_it_takes\[(grad|<lambda>)\]",
    r"test_models_on_tapes.*of_nnx\[statistics and dropout-eager\]",
    r"test_planned_regions.*recurrent_network",
    r"test_planning_lowering.*\[(residual blocks|recurrent|convolutions)\]",
    r"test_planning_lowering.*(goes_piece_by_piece|other_budgets\[mlp)",
    r"test_planning_scans.*inside_scans.*\[layers\]",
    r"test_random_loops",
    r"test_random_programs.*\[(jit|vmap|trace|scan|cond|loop|gather)\]",
    r"test_random_programs.*\[(checkpoint|recompute|custom_gradient_of_inputs|custom_vjp)\]",
    r"test_rules_in_force.*memory_budget.*\[jax\]",
    r"test_save_random.*same_after_loading",
    r"test_surgery_on_models.*(guided_relu|product_stopped|recompute_by_block)\[(linen|equinox)\]",
    r"test_surgery_on_models.*(jax_inlines|at_the_blocks)\[(nnx|equinox)\]",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what takes long, and deals the cases of a test that has several out to two runs.

    What the oldest JAX runs of them in .ci/run, the newest does not, so that each case runs there
    once; the README's command takes the newest's. By turns, in an order that mixes the parameters.
    Where a file or a test is asked for, all of its cases run.

    Of the tests that have one case half run on the newest alone; but what the library knows of JAX
    itself is looked at on both.
    """
    for mark, patterns in ((pytest.mark.long, LONG), (pytest.mark.slow, SLOW)):
        chosen = re.compile("|".join(patterns))
        for item in items:
            if chosen.search(item.nodeid):
                item.add_marker(mark)
    for item in items:
        if isinstance(item, pytest.DoctestItem):  # what it shows has tests of its own
            item.add_marker(pytest.mark.any_jax)
    if config.args != config.getini("testpaths"):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("long") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        cases.sort(key=_mixed)
        for turn, case in enumerate(cases if len(cases) > 1 else ()):
            case.add_marker(pytest.mark.oldest if turn % 2 else pytest.mark.newest)
        if len(cases) == 1 and cases[0].path.name != "test_jax.py" and _mixed(cases[0]) % 2:
            cases[0].add_marker(pytest.mark.any_jax)


def _mixed(item: pytest.Item) -> int:
    """A number that stays that of a test whatever tests there are beside it."""
    return zlib.crc32(item.nodeid.encode())


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


# These hold what XLA optimises: its programs, its bytes and operations, or results to the last bit.
# For all others it leaves out what it can, since compiling is most of their time.
COMPILED_FULLY = {
    "test_gradients",
    "test_hlo_identical",
    "test_jax",
    "test_linearised",
    "test_load_fresh",
    "test_load_kept_files",
    "test_planned_regions",
    "test_planning_lowering",
    "test_planning_scans",
    "test_recompute_memory",
    "test_recompute_option",
}


@pytest.fixture(autouse=True, scope="module")
def compilation(request: pytest.FixtureRequest) -> None:
    """Leaves out what XLA optimises, but in the modules above.

    Modules share what was compiled, unless it was compiled in the other way; or is so much that it
    uses up a process's memory maps, as some thousand programs do. What earlier modules left is
    not searched for garbage again, which takes half a second where a test asks for it.
    """
    gc.freeze()
    import jax  # noqa: PLC0415 (the settings above come first)

    plainly = request.node.name.removesuffix(".py").rpartition("/")[2] not in COMPILED_FULLY
    if plainly != jax.config.read("jax_disable_most_optimizations") or memory_maps() > MOST_MAPS:
        jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", plainly)
