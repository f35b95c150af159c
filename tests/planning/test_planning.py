"""The planner against plans that were all tried, and its model against what JAX and XLA say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox.internal import while_loop

import tracegrad
from tests.compilation import f32
from tracegrad.planning import BudgetTooSmall, plan_recompute
from tracegrad.planning.cuts import Network, cheapest_save_sets, find_hulls
from tracegrad.planning.flatten import flatten
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model
from tracegrad.planning.options import budget_bytes
from tracegrad.planning.planner import Planner
from tracegrad.planning.simulation import Segment, keep_all, simulate

# -------------------------------------------------------------------------------- random programs


def random_model(seed: int, count: int) -> MemoryModel:
    """Each operation reads one or two of the four before it; its backward step some of those."""
    rng = np.random.default_rng(seed)
    args, needs = [], []
    for i in range(count):
        near = range(max(0, i - 4), i)
        chosen = rng.choice(near, size=min(len(near), rng.integers(1, 3)), replace=False)
        args.append(tuple(sorted(int(v) for v in chosen)))
        needs.append(tuple(v for v in (*args[i], i) if rng.random() < 0.7))
    sizes, flops, cotangents = (
        rng.integers(low, high, count) for low, high in ((1, 9), (1, 20), (1, 4))
    )
    extra = rng.integers(0, 4, count) * (rng.random(count) < 0.2)
    beside = rng.integers(0, 4, count) * (rng.random(count) < 0.2)
    cotangents += np.sort(rng.integers(0, 6, count))[::-1]  # more in the last steps
    return MemoryModel(
        sizes=sizes.tolist(),
        flops=flops.tolist(),
        args=args,
        needs=needs,
        cotangents=cotangents.tolist(),
        extra=extra.tolist(),
        beside=beside.tolist(),
        fusion=(),
    )


def runs_again(m: MemoryModel, s: Segment) -> set[int]:
    """What a segment runs again."""
    if not s.recompute:
        return set()
    inside = range(s.start, s.stop)
    saved = {v for v in s.saved if not m.extra[v]}
    wanted = {v for i in inside for v in m.needs[i] if v in inside and v not in saved}
    wanted |= {i for i in inside if m.extra[i]}
    run: set[int] = set()
    while wanted - run:
        run |= wanted
        wanted |= {v for i in run for v in m.args[i] if v in inside and v not in saved}
    return run


def waiting(m: MemoryModel, s: Segment) -> dict[int, list[int]]:
    """What a segment need not run again before the step back of an operation, if nothing but that
    step needs it, and operations that wait for it as well; and if steps before that read anything.
    """
    again, inside = runs_again(m, s), range(s.start, s.stop)
    found = {}
    for reader in {*inside} - again:
        if reader not in m.needs[reader] and any(m.needs[reader + 1 : s.stop]):
            wait = {v for v in again if not m.extra[v]}
            while few := {
                v for v in wait if not readers(m, v) - {v} or readers(m, v) - wait - {reader, v}
            }:
                wait -= few
            found[reader] = sorted(wait)
    return found


def readers(m: MemoryModel, v: int) -> set[int]:
    return {i for i in range(len(m)) if v in m.args[i] or v in m.needs[i]}


def replay(m: MemoryModel, plan: list[Segment]) -> tuple[int, int]:
    """The peak and the extra FLOPs of a plan, from the rules alone: at each moment all that is
    alive is counted anew."""
    count = len(m)
    segment_of = {i: k for k, s in enumerate(plan) for i in range(s.start, s.stop)}

    again = [runs_again(m, s) for s in plan]

    def kept(v: int) -> bool:
        """By its own segment for its own backward pass."""
        k = segment_of[v]
        own = range(plan[k].start, plan[k].stop)
        read = any(v in m.needs[i] for i in own) or any(v in m.args[i] for i in again[k])
        return read and v not in again[k]

    def outside(v: int) -> list[int]:
        return [segment_of[u] for u in sorted(readers(m, v)) if segment_of[u] != segment_of[v]]

    def kept_by(v: int) -> bool:
        """Whether what others read is kept beyond the forward pass: one alone may not need it."""
        k = outside(v)[0]
        if any(segment_of[u] != k for u in readers(m, v)):
            return True
        return read_back(v, k)

    def read_back(v: int, k: int) -> bool:
        """Whether the backward pass of another segment reads a value."""
        inside = range(plan[k].start, plan[k].stop)
        return any(v in m.needs[i] for i in inside) or any(v in m.args[i] for i in again[k])

    def alive_in(
        k: int, events: list[tuple[int | None, set[int], int]], late: dict[int, list[int]]
    ) -> list[int]:
        """Bytes alive at all that happens in a segment's backward pass: what is made, what is read,
        the step that it is for. First `events`, then its steps, before each what is late."""
        s, sizes = plan[k], []
        for i in reversed(range(s.start, s.stop)):
            events += [(v, {*m.args[v]}, i) for v in late.get(i, ())]
            events.append((None, {*m.needs[i]}, i))
        made_before = {v for v in range(s.start, s.stop) if kept(v)}
        for now, (made, _, step) in enumerate(events):
            made_before |= {made} - {None}
            read_later = set().union(*(reads for _, reads, _ in events[now:]))
            alive = {v for v in made_before if v in read_later or v == made}
            size = sum(m.sizes[v] for v in alive) + m.cotangents[step]
            is_left = made_before & again[k] if s.recompute else range(s.start, s.stop)
            size += sum(m.extra[i] for i in is_left if i <= step)
            sizes.append(size + sum(m.beside[i] for i in range(s.start, step + 1)))
        return sizes

    peak = 0
    for now in range(count):  # forward
        alive = [
            v
            for v in range(now + 1)
            if kept(v)
            or (
                outside(v)
                and (kept_by(v) or plan[segment_of[now]].start < plan[outside(v)[0]].stop)
            )
        ]
        alive += [
            v
            for v in range(plan[segment_of[now]].start, now + 1)
            if v not in alive
            and (v == now or any(v in m.args[i] and i >= now for i in range(count)))
        ]
        made = [i for i in range(now + 1) if not plan[segment_of[i]].recompute]
        extra = sum(m.extra[i] + m.beside[i] for i in made)
        peak = max(peak, sum(m.sizes[v] for v in alive) + extra)
    for k, s in reversed(list(enumerate(plan))):  # backward
        from_before = {
            v for v in range(s.start) if kept(v) or (any(u <= k for u in outside(v)) and kept_by(v))
        }
        base = sum(m.sizes[v] for v in from_before)
        before = [i for i in range(s.start) if not plan[segment_of[i]].recompute]
        base += sum(m.extra[i] + m.beside[i] for i in before)
        at_once = alive_in(k, [(i, {*m.args[i]}, s.stop - 1) for i in sorted(again[k])], {})
        late = waiting(m, s)
        first = again[k].difference(*late.values())
        in_turn = alive_in(k, [(i, {*m.args[i]}, s.stop - 1) for i in sorted(first)], late)
        peak = max(peak, base + min(max(at_once), max(in_turn)))
    flops = sum(m.flops[i] for run in again for i in run)
    return peak, flops


def all_plans(count: int) -> Iterator[list[Segment]]:
    """Every way to cut so many operations, with every save set in every segment."""
    for ends in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, end in enumerate(ends) if end), count]
        choices = []
        for start, stop in itertools.pairwise(edges):
            saves = itertools.product([False, True], repeat=stop - start)
            segments = [
                Segment(start, stop, True, frozenset(start + k for k, s in enumerate(save) if s))
                for save in saves
            ]
            choices.append([Segment(start, stop), *segments])
        yield from map(list, itertools.product(*choices))


# ------------------------------------------------------------------------------------- simulation


@pytest.mark.parametrize("seed", range(60))
def test_simulation_is_what_a_replay_from_the_rules_gives(seed: int):
    rng = np.random.default_rng(seed)
    m = random_model(seed, 12)
    edges = [0, *sorted(rng.choice(range(1, 12), size=2, replace=False).tolist()), 12]
    plan = []
    for a, b in itertools.pairwise(edges):
        recompute = bool(rng.random() < 0.8)
        saved = frozenset(v for v in range(a, b) if rng.random() < 0.4)
        plan.append(Segment(a, b, recompute, saved if recompute else frozenset()))
    found = simulate(m, plan)
    assert (found.peak, found.flops) == replay(m, plan)
    assert max((*found.forward, *found.backward)) == found.peak


# ---------------------------------------------------------------------------------------- planner


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_small_programs_are_near_the_best_of_all(seed: int):
    m = random_model(seed, 5)
    tried = [replay(m, plan) for plan in all_plans(5)]
    lowest, whole = min(peak for peak, _ in tried), keep_all(m).peak
    assert lowest <= Planner(m).lowest_peak() <= 1.2 * lowest
    for budget in range(lowest, whole + 1):
        best = min(flops for peak, flops in tried if peak <= budget)
        plan = Planner(m).find(budget)
        if plan is None:
            assert budget < Planner(m).lowest_peak()
            continue
        simulation = simulate(m, plan)
        assert replay(m, plan) == (simulation.peak, simulation.flops)
        assert simulation.peak <= budget
        assert simulation.flops <= best + 0.2 * m.total_flops


@pytest.mark.parametrize("count", [40, pytest.param(80, marks=pytest.mark.slow)])
def test_large_programs_keep_the_budget(count: int):
    m = random_model(3, count)
    planner, again = Planner(m), Planner(m)
    whole = keep_all(m).peak
    for share in (0.9, 0.7, 0.5):
        budget = int(share * whole)
        plan = planner.find(budget)
        assert plan is not None
        simulation = simulate(m, plan)
        assert simulation.peak <= budget
        assert simulation.flops <= m.total_flops
        assert again.find(budget) == plan  # the same every time


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("must_be", [(), (0, 3), (0, 1, 2)])
def test_minimum_cuts_are_the_cheapest_save_sets(seed: int, must_be: tuple[int, ...]):
    """`must_be`: saved, if they are read at all, since they cannot be run again."""
    m = random_model(seed, 8)
    needed = sorted({v for found in m.needs for v in found}.difference(must_be))
    flops = [math.inf if v in must_be else cost for v, cost in enumerate(m.flops)]
    network = Network(m.sizes, flops, m.args, needed)

    def cost(saved: frozenset[int]) -> tuple[int, float]:
        run, pending = set(), [v for v in needed if v not in saved]
        while pending:
            i = pending.pop()
            run.add(i)
            pending += [v for v in m.args[i] if v not in saved and v not in run]
        return sum(m.sizes[v] for v in saved), sum(flops[v] for v in run)

    sets = [frozenset(s) for k in range(9) for s in itertools.combinations(range(8), k)]
    for price in (0.1, 0.5, 1.5, 6.0):
        least = min(run + price * size for size, run in map(cost, sets))
        (cut,) = cheapest_save_sets([(network, price)])
        assert cost(cut.saved) == (cut.bytes, cut.flops)
        assert cut.flops + price * cut.bytes == pytest.approx(least)
    (cut,) = cheapest_save_sets([(network, math.inf)])
    assert cost(cut.saved) == min(each for each in map(cost, sets) if each[1] < math.inf)


def test_the_fewest_bytes_are_those_of_a_small_value_made_of_a_large_one_that_is_given():
    """Saved are 4 bytes from which the second value is made again, and the first, of 10: not the
    1,000 bytes of which that is made. By hand."""
    given_large, given_small, small, large = range(4)
    sizes, flops = [1000, 4, 10, 5000], [math.inf, math.inf, 1, 1]
    network = Network(sizes, flops, [(), (), (given_large,), (given_small,)], [small, large])
    (found,) = find_hulls([network], 7)
    assert (found[-1].saved, found[-1].bytes, found[-1].flops) == ({small, given_small}, 14, 1)


@pytest.mark.parametrize("seed", range(5))
def test_minimum_cuts_are_exact_beyond_32_bits(seed: int):
    """Of a value that is read by itself the cheaper is chosen, in a network with others that cost a
    billion times as much: to save it or to run it."""
    rng = np.random.default_rng(seed)
    sizes, flops = ((10 ** rng.uniform(0, 11, 50)).astype(int).tolist() for _ in range(2))
    network = Network(sizes, flops, [()] * 50, range(50))
    for price in (0.01, 1.0, 100.0):
        cheaper = {v for v in range(50) if price * sizes[v] < flops[v]}
        (cut,) = cheapest_save_sets([(network, price)])
        assert cut.saved == cheaper


# ------------------------------------------------------------------------------------------ model


def batch_norm(x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, 0)
    return centred / jnp.sqrt(jnp.var(x, 0) + 1e-5)  # which has its own mean


def batch_norm_by_hand(x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, 0)
    return centred / jnp.sqrt(jnp.mean(centred**2, 0) + 1e-5)


def test_what_a_library_computes_twice_is_computed_once_and_counts_once():
    """``keepdims`` broadcasts before it divides, which makes no difference."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)))
    flat = flatten(tracegrad.graph(batch_norm, x))
    flat.verify()
    made = [(node.op, *node.outputs[0].aval.shape) for node in flat.nodes]
    assert (made.count(("reduce_sum", 8)), made.count(("sub", 64, 8))) == (2, 1)
    np.testing.assert_array_equal(flat.to_callable()(x), batch_norm(x))
    cotangent = jnp.cos(jnp.arange(64 * 8.0)).reshape(64, 8)
    (gradient,) = jax.vjp(flat.to_callable(), x)[1](cotangent)
    (expected,) = jax.vjp(batch_norm_by_hand, x)[1](cotangent)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)

    def peak(norm: Callable[[jax.Array], jax.Array]) -> int:
        def fun(ws: list[jax.Array], x: jax.Array) -> jax.Array:
            for w in ws:
                x = jnp.tanh(norm(x @ w))
            return jnp.sum(x)

        return keep_all(model(flatten(tracegrad.graph(fun, [f32(32, 32)] * 4, f32(256, 32))))).peak

    assert peak(batch_norm) == pytest.approx(peak(batch_norm_by_hand), rel=0.02)


def test_what_is_not_the_same_is_computed_twice():
    def fun(x: jax.Array) -> jax.Array:
        first, again = jax.lax.optimization_barrier(x), jax.lax.optimization_barrier(x)
        sums = jnp.sum(x, 0), jnp.sum(x, 1), jnp.sum(x.astype(int), 0)
        with jax.default_matmul_precision("highest"):
            product = x @ x
        return first * again * 2.0 * (x * 2) * sums[0] * sums[1] * sums[2] @ (x @ x) @ product

    ops = [node.op for node in flatten(tracegrad.graph(fun, f32(8, 8))).nodes]
    wanted = {"optimization_barrier": 2, "reduce_sum": 3, "dot_general": 4}
    assert {op: ops.count(op) for op in wanted} == wanted


def test_numbers_that_print_alike_stay_apart():
    close, closer = np.array(0.1234567890123), np.array(0.1234567890124)
    with jax.enable_x64(True):
        x = jnp.asarray(3.0)
        flat = flatten(tracegrad.graph(lambda x: (x * close) - (x * closer), x))
        assert float(flat.to_callable()(x)) == float(x * close - x * closer) != 0.0


# ----------------------------------------------------------------------------------------- budgets


def test_budgets_are_bytes_units_or_shares():
    sizes = [
        budget_bytes(b, 1000) for b in (7, np.int64(7), "7B", "2 GiB", "1.5kB", "0.5KiB", "1e3 b")
    ]
    assert sizes == [7, 7, 7, 2 * 2**30, 1500, 512, 1000]
    assert [budget_bytes(b, 1000) for b in (0.3, 1.0, "30%", "100 %")] == [300, 1000, 300, 1000]


NOT_POSITIVE = [0, -5, "0B", "-2GiB", 0.0, -0.5, float("nan"), "0%"]
UNREADABLE = ["", "two GiB", "2GiBB", "2 G iB", "120%", 2.5e9, float("inf")]
OTHER_TYPES = [None, True, [1], 2j]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        *[(bad, ValueError, "not above zero") for bad in NOT_POSITIVE],
        *[(bad, ValueError, "a memory budget is bytes") for bad in UNREADABLE],
        *[(bad, TypeError, "a memory budget is bytes") for bad in OTHER_TYPES],
        ("50", ValueError, '\'50\' has no unit: write "50%", "50MiB" or, for bytes, "50B"'),
    ],
)
def test_other_budgets_are_refused(bad: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        plan_recompute(jnp.sin, f32(8), memory_budget=bad)


# --------------------------------------------------------------------------------------- bad input


def deep(x: jax.Array) -> jax.Array:
    for _ in range(20):
        x = jnp.tanh(jnp.sin(x))
    return jnp.sum(x)


def test_arguments_that_are_results_too_are_no_more_memory():
    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(jnp.sin(x @ w))
        return jnp.sum(x)

    def handing_on(weights: Any, x: Any) -> Any:  # as modules of flax.nnx do
        return loss(weights, x), weights

    weights, x = [f32(64, 64)] * 3, f32(8, 64)
    plan, alike = (plan_recompute(fun, weights, x, memory_budget=0.8) for fun in (loss, handing_on))
    assert (alike.peak_without, alike.peak) == (plan.peak_without, plan.peak)


def loops(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x)


@pytest.mark.parametrize(
    ("fun", "error", "words"),
    [
        (lambda x: jnp.argmax(x), ValueError, "no result of <lambda> is a float"),
        (lambda x: jax.lax.stop_gradient(x) * 1.0, ValueError, "no result of <lambda> is a float"),
        (loops, ValueError, r"while.*test_planning\.py.*no reverse-mode derivative"),
        (3, TypeError, "expected a function to plan for"),
    ],
)
def test_what_has_no_gradient_cannot_be_planned(fun: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        plan_recompute(fun, f32(8), memory_budget=100)


def test_the_loops_of_equinox_are_planned_under_vmap():
    # They count steps beside the result, and call a rule that has neither operands nor results.
    def root(w: jax.Array, x: jax.Array) -> jax.Array:
        _, y = while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, jnp.sin(w * c[1])),
            (0, x),
            max_steps=3,
            kind="checkpointed",
        )
        return y

    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        return jax.vmap(root, in_axes=(None, 0))(w, xs).sum()

    w, xs = jnp.float32(0.5), jnp.ones((4, 3))
    plan = plan_recompute(loss, w, xs, memory_budget=1.0, measure=False)
    planned, want = (jax.jit(jax.grad(f))(w, xs) for f in (plan.apply(), loss))
    np.testing.assert_allclose(planned, want, rtol=1e-6)
    assert tracegrad.memory(jax.grad(loss), w, xs).total > 0


def test_a_budget_that_is_too_small_says_for_which_there_is_a_plan():
    with pytest.raises(
        BudgetTooSmall, match="too small for the gradient of deep: the lowest"
    ) as error:
        plan_recompute(deep, f32(1024), memory_budget=100, measure=False)
    assert error.value.lowest > 100
    plan = plan_recompute(deep, f32(1024), memory_budget=error.value.lowest, measure=False)
    assert plan.peak <= error.value.lowest
