"""What tests of tapes share."""

import pytest

import tracegrad as tg
from tracegrad.tape import known_computations


@pytest.fixture
def everything_saved(monkeypatch):
    """Has compiled functions save what their derivatives need, however little it is."""
    tg.clear_caches()
    monkeypatch.setattr(known_computations, "_MAX_RECOMPUTED", 0)
    yield
    tg.clear_caches()
