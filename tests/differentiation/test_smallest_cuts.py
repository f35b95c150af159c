"""What cuts an input off: nothing but what alone stands in the way, whatever else cuts."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from test_connectivity import doubled

import tracegrad as tg
from tracegrad.differentiation.connectivity import connections
from tracegrad.differentiation.smallest_cuts import explain_unconnected, smallest_cuts

X = jnp.array([0.3, -1.2, 2.0])


def lightest(fun, *args):
    """For each input the way with the fewest cuts: the operations there; None if there is none."""
    return [
        None if cuts is None else [cut.occurrence.node.op for cut in cuts]
        for cuts in smallest_cuts(tg.graph(fun, *args), [0])
    ]


def in_a_limit(x):
    return lax.while_loop(lambda c: c[0] < x[0], lambda c: (c[0] + 1, c[1] * 2), (0.0, 1.0))[1]


def round_the_loop(x):
    """The second carry gets what the first had one step before, and the third what that had."""
    step = lambda c, _: ((c[0], jnp.round(c[0]), c[1]), c[2])  # noqa: E731
    return jnp.sum(lax.scan(step, (x[0], 0.0, 0.0), None, 4)[1])


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        # Softmax stops its maximum, which leaves another way open.
        (lambda x: jnp.sum(jnp.round(jax.nn.softmax(x))), ["round"]),
        (lambda x: jnp.sum(jax.nn.softmax(x) ** 2), []),
        (lambda x: jnp.sum(X), None),
        # Cuts in a row, in the order of the data.
        (lambda x: jnp.sum(lax.stop_gradient(2 * jnp.floor(x))), ["floor", "stop_gradient"]),
        # The way with fewer cuts.
        (lambda x: jnp.sum(lax.stop_gradient(jnp.floor(x) * 2) * jnp.sign(x)), ["sign"]),
        # Integers are cut once.
        (lambda x: jnp.sum(X[(x.astype(int) + 1) * 2 % 3] + lax.stop_gradient(jnp.floor(x))),
         ["convert_element_type"]),
        # The user's own come before a library's, and masks last.
        (lambda x: jnp.sum(jnp.where(x > 0, jnp.round(x), 1.0)), ["round"]),
        (lambda x: jnp.sum(jnp.round(x) * jnp.where(x > 0, 2.0, 1.0)), ["round"]),
        # A number of steps is a way, too.
        (in_a_limit, ["lt"]),
        (round_the_loop, ["round"]),
    ],
)  # fmt: skip
def test_the_way_with_the_fewest_cuts_is_the_cause(fun, expected):
    assert lightest(fun, X) == [expected]


def test_the_users_own_come_before_a_librarys():
    def library_first(x):
        peak = x - jnp.max(jax.nn.softmax(x), initial=-jnp.inf)
        return jnp.sum(lax.stop_gradient(peak))

    (cut,) = smallest_cuts(tg.graph(library_first, X), [0])[0]
    assert cut.occurrence.node.op == "stop_gradient"
    assert cut.occurrence.origin.line == library_first.__code__.co_firstlineno + 2


stopped = jax.jit(lambda x: lax.stop_gradient(jnp.sin(x)))


@pytest.mark.parametrize(
    ("through", "region"),
    [
        (lambda x: stopped(x), "jit"),
        (lambda x: jax.checkpoint(lambda x: lax.stop_gradient(jnp.sin(x)))(x), "remat2"),
        (lambda x: lax.scan(lambda c, _: (lax.stop_gradient(c), None), x, None, 3)[0], "scan"),
        (lambda x: lax.scan(lambda c, y: (c, lax.stop_gradient(y)), 0.0, x)[1], "scan"),
        (lambda x: lax.while_loop(jnp.any, lambda c: lax.stop_gradient(x) * 0, X), "while"),
        (lambda x: lax.cond(X[0] > 0, stopped, lambda x: lax.stop_gradient(x) * 2, x), "cond"),
        (lambda x: jax.vmap(lax.stop_gradient)(x), ""),
    ],
)
def test_a_cut_inside_of_a_region_is_told_with_the_calls_that_lead_there(through, region):
    def f(x):
        return jnp.sum(jnp.exp(through(jnp.cos(x))) * jax.nn.softmax(X))

    (cut,) = smallest_cuts(tg.graph(f, X), [0])[0]
    assert cut.occurrence.node.op == "stop_gradient"
    path = [node.op for node, _ in cut.occurrence.path]
    assert path[:1] == ([region] if region else []) or region == "remat2"
    assert "stop_gradient at test_smallest_cuts.py" in str(cut)


def test_of_custom_rules_the_inputs_without_a_gradient_are_cut():
    @tg.custom_gradient
    def first_only(x, y):
        return x * y, lambda dy: (dy, None)

    uncut, (cut,) = smallest_cuts(tg.graph(lambda x, y: jnp.sum(first_only(x, y)), X, X), [0])
    assert uncut == ()
    assert cut.occurrence.node.op == "custom_vjp_call"
    assert "the custom gradient first_only" in str(cut)


def test_of_several_targets_the_nearest_counts():
    def f(x):
        return jnp.round(jnp.floor(x)), jnp.floor(x), x > 0

    program = tg.graph(f, X)
    for targets, ops in ([0], ["floor", "round"]), ([1], ["floor"]), ([0, 1], ["floor"]):
        cuts = smallest_cuts(program, targets)[0]
        assert [cut.occurrence.node.op for cut in cuts] == ops


def test_a_function_called_from_everywhere_is_searched_once():
    """2**40 calls; where they are cut is one line."""
    program = tg.graph(doubled(40), 1.0, 2.0)
    free, cuts = smallest_cuts(program, [0])
    assert free == ()
    (cut,) = cuts
    assert "round at test_connectivity.py" in str(cut)
    assert explain_unconnected(program, 1, cuts).startswith("cut by round at test_connectivity.py")


# ------------------------------------------------------------------------------ by exhaustive trial


@st.composite
def stopped_programs(draw):
    """Straight-line programs, each operation of which may be stopped, as data."""
    count = draw(st.integers(2, 7))
    lines = []
    for k in range(count):
        operands = draw(st.lists(st.integers(0, k), min_size=1, max_size=2))
        lines.append((operands, draw(st.booleans()), draw(st.sampled_from(["", "jit", "scan"]))))
    return lines


def run(lines, opened, x):
    """Runs a program without the stops of the lines that are opened."""
    values = [x]
    for k, (operands, stops, region) in enumerate(lines):

        def line(*given, stops=stops and k not in opened):
            total = jnp.sin(sum(given))
            return lax.stop_gradient(total) if stops else total

        given = [values[i] for i in operands]
        if region == "jit":
            values.append(jax.jit(line)(*given))
        elif region == "scan":
            values.append(lax.scan(lambda c, _, f=line, g=given: (f(c, *g), None), 0.1, None, 2)[0])
        else:
            values.append(line(*given))
    return values[-1]


@given(stopped_programs())
def test_no_smaller_set_of_stops_would_do(lines):
    stops = [k for k, (_, stops, _) in enumerate(lines) if stops]

    def is_connected(opened):
        program = tg.graph(lambda x: run(lines, opened, x), 0.5)
        return connections(program) == [frozenset({0})]

    (cuts,) = smallest_cuts(tg.graph(lambda x: run(lines, set(), x), 0.5), [0])
    fewest = next(
        (
            n
            for n in range(len(stops) + 1)
            if any(is_connected(set(opened)) for opened in itertools.combinations(stops, n))
        ),
        None,
    )
    assert (None if cuts is None else len(cuts)) == fewest
