"""What tests of tapes share."""

import jax
import pytest

import tracegrad as tg
from tracegrad.tape import known_computations


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
    tg.clear_caches()
    monkeypatch.setattr(known_computations, "_MOST_AGAIN", 0)
    yield
    tg.clear_caches()
