"""Work that takes long has a bar of tqdm's, which goes to a terminal and leaves nothing there."""

from __future__ import annotations

import io
import sys

import jax.numpy as jnp
import pytest

import tracegrad as tg
from tracegrad._jax import progress


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


WEIGHTS, X = [jnp.eye(4)] * 4, jnp.ones((64, 4))


def plans():
    tg.plan_recompute(loss, WEIGHTS * 2, jnp.ones((1024, 4)), memory_budget="70%")


def checks():
    tg.check_grads(loss, (WEIGHTS[:2], X[:2]), order=1)


STEPS = {
    plans: ["plan_recompute: compiling with nothing recomputed", "compiling plan 1 of at most 2"],
    checks: ["check_grads: differences along weights.1", "check_grads: rev", "4/5"],
}


def written_by(work, monkeypatch, is_terminal=True):
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    work()
    return sys.stderr.getvalue()


@pytest.mark.parametrize("work", STEPS)
def test_a_bar_says_what_is_being_done_and_goes_away(work, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    written = written_by(work, monkeypatch)
    assert [step for step in STEPS[work] if step not in written] == []
    *_, erased, rest = written.split("\r")
    assert erased.isspace()
    assert not rest


def test_there_is_no_bar_for_short_work_nor_where_nobody_looks_nor_without_tqdm(
    monkeypatch,
):
    assert written_by(plans, monkeypatch) == ""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    assert written_by(checks, monkeypatch, is_terminal=False) == ""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert written_by(checks, monkeypatch) == ""


def test_a_block_that_fails_has_no_bar_left(monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", Stream(True))

    def fails():
        with progress.progress("work", 2) as begin:
            begin("first")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert "work: first |" in sys.stderr.getvalue()
    assert sys.stderr.getvalue().endswith("\r")
