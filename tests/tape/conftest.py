"""What tests of tapes share."""

import jax
import pytest

from tracegrad.tape import computations


@pytest.fixture
def compilations():
    """Counts what XLA compiles."""
    count = [0]

    def listen(event, duration, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            count[0] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: count[0]
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def everything_saved(monkeypatch):
    """Has compiled functions save what their derivatives need, however little it is."""
    monkeypatch.setattr(computations, "_WORTH_KEEPING", 0)
    for _ in range(2):
        computations._clean_up()  # of what has been met before
