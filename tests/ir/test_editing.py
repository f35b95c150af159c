"""Editing a graph: what changes, what stays, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.ir import Fragment, Recompute
from tracegrad.ir.editing import around_each, behind_each
from tracegrad.ir.scopes_in_scans import add_scope_in_scans


def edited(graph, matches, around):
    """The graph with code around matches, which is a program."""
    new = around_each(graph, matches, around).graph
    new.verify()
    return new


def tenfold(op, *operands):
    return [10.0 * result for result in op.results(*operands)]


@jax.jit
def inner(x):
    return jnp.sin(x)


def calls_twice(x):
    return inner(x) + 2 * inner(x)


def sines(graph):
    return graph.find(tg.match.op("sin"))


def regions_of(graph):
    return [region for node in graph.nodes for region in node.regions.values()]


# ------------------------------------------------------------------------------- what is shared


def test_editing_one_call_of_a_shared_region_leaves_the_other_alone():
    graph = tg.graph(calls_twice, 1.0)
    first, _ = sines(graph)
    new = edited(graph, [first], tenfold)
    np.testing.assert_allclose(new.to_callable()(1.0), 12 * np.sin(1.0), rtol=1e-6)
    one, two = regions_of(new)
    assert two is regions_of(graph)[0]
    assert one is not two


def test_calls_that_are_edited_alike_share_one_region():
    graph = tg.graph(calls_twice, 1.0)
    new = edited(graph, sines(graph), tenfold)
    np.testing.assert_allclose(new.to_callable()(1.0), 30 * np.sin(1.0), rtol=1e-6)
    assert len(set(regions_of(new))) == 1
    text = jax.jit(new.to_callable()).lower(1.0).as_text()
    assert text.count("func.func") == 2


def test_a_match_found_before_an_edit_is_good_after_it():
    graph = new = tg.graph(calls_twice, 1.0)
    for match in sines(graph):
        new = edited(new, [match], tenfold)
    np.testing.assert_allclose(new.to_callable()(1.0), 30 * np.sin(1.0), rtol=1e-6)


def test_an_edit_leaves_the_graph_that_it_was_made_from_as_it_was():
    graph = tg.graph(calls_twice, 1.0)
    program, text, nodes = graph.program, str(graph), graph.nodes
    edited(graph, sines(graph), tenfold)
    assert (graph.program, str(graph), graph.nodes) == (program, text, nodes)
    np.testing.assert_allclose(graph.to_callable()(1.0), 3 * np.sin(1.0), rtol=1e-6)
    with pytest.raises(AttributeError, match="cannot assign"):
        graph.nodes = ()
    with pytest.raises(AttributeError, match="cannot assign"):
        graph.nodes[0].key = None


def test_regions_that_no_edit_touches_are_the_very_same():
    graph = tg.graph(lambda x: calls_twice(jnp.cos(x)), 1.0)
    new = edited(graph, graph.find(tg.match.op("cos")), tenfold)
    assert set(regions_of(new)) == set(regions_of(graph))


def nested(depth):
    def level(k):
        if k == 0:
            return jax.jit(jnp.sin)
        below = level(k - 1)
        return jax.jit(lambda x: below(below(x)))

    return level(depth)


def test_functions_that_are_called_twice_by_functions_that_are_called_twice():
    with pytest.raises(tg.GraphError, match=r"each counted with every path of calls to it"):
        tg.graph(nested(25), 1.0).find(tg.match.op("sin"))
    graph = tg.graph(nested(20), 1.0)
    assert len(graph.regions_below) == 22
    path, here = [], graph
    while here.nodes[0].regions:  # the first of a million
        path.append((here.nodes[0], "jaxpr"))
        here = here.nodes[0].region("jaxpr")
    first = tg.ir.Occurrence(tuple(path), here.nodes[0])
    new = around_each(graph, [first], tenfold).graph
    assert len(new.regions_below) == 22 + 20  # a copy of each on the path
    graph.verify()
    new.verify()
    assert graph.operations == {"jit", "sin"}


@pytest.mark.parametrize("in_scan", [False, True])
def test_a_scope_in_scans_leaves_one_region_of_each_function_that_is_called_twice(in_scan):
    deep = nested(20)

    def loop(x):
        return jax.lax.scan(lambda c, _: (deep(c) if in_scan else jnp.sin(c), None), x, length=2)[0]

    graph = tg.graph(lambda x: loop(deep(x)), 1.0)
    marked = add_scope_in_scans(graph, "mark")
    assert len(marked.regions_below) <= 2 * len(graph.regions_below)
    marked.verify()


# ------------------------------------------------------------------------------- what is written


def test_what_stood_there_may_be_called_again_or_left_out():
    graph = tg.graph(lambda x: jnp.cos(jnp.sin(x)), 1.0)
    twice = edited(graph, sines(graph), lambda op, x: op(op(x)))
    np.testing.assert_allclose(twice.to_callable()(0.7), np.cos(np.sin(np.sin(0.7))), rtol=1e-6)
    without = edited(graph, sines(graph), lambda op, x: x)
    np.testing.assert_allclose(without.to_callable()(0.7), np.cos(0.7), rtol=1e-6)
    constant = edited(graph, sines(graph), lambda op, x: 0.25)
    assert float(constant.to_callable()(0.7)) == pytest.approx(np.cos(0.25))


def test_what_is_written_stands_in_the_scope_of_what_was_there():
    def f(x):
        with jax.named_scope("block"):
            return jax.nn.relu(jnp.sin(x))

    def halved(op, dy):
        return dy / 2

    override = tg.rules.override_gradient(tg.match.call("relu"), halved)
    graph = override(tg.graph(f, 1.0))
    (block,) = graph.find(tg.match.scope("block"))
    assert [node.op for node in block.nodes] == ["sin", "custom_vjp_call"]
    # So a rule for the scope is one for all of it.
    stopped = tg.rewrite(f, [override, tg.rules.stop_gradient(tg.match.scope("block"))])
    assert jax.grad(stopped)(1.0) == 0.0


def net(x, w):
    a = jnp.sin(x)
    b = a @ w
    c = jnp.tanh(b)
    return jnp.sum((c + a) ** 2)


ARGUMENTS = (jnp.linspace(0, 1, 9).reshape(3, 3), jnp.eye(3) * 0.5)


def stretch(graph, *ops):
    """Some nodes of a graph as one match."""
    nodes = tuple(node for node in graph.nodes if node.op in ops)
    return Fragment((), nodes[0], nodes, "stretch")


def test_several_operations_are_one_with_what_enters_and_leaves_them():
    graph = tg.graph(net, *ARGUMENTS)
    match = stretch(graph, "sin", "dot_general", "tanh")

    def around(op, x, w):
        assert [(v.shape, v.dtype) for v in (x, w)] == [((3, 3), jnp.float32)] * 2
        return jax.checkpoint(op.results)(x, w)

    new = edited(graph, [match], around)
    (region,) = [node for node in new.nodes if isinstance(node, Recompute)]
    assert [n.op for n in region.regions["jaxpr"].nodes] == ["sin", "dot_general", "tanh"]
    f = new.to_callable()
    np.testing.assert_array_equal(f(*ARGUMENTS), net(*ARGUMENTS))
    pairs = zip(jax.grad(f, (0, 1))(*ARGUMENTS), jax.grad(net, (0, 1))(*ARGUMENTS), strict=True)
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_what_is_behind_a_value_is_for_all_but_the_match():
    graph = tg.graph(net, *ARGUMENTS)
    match = stretch(graph, "sin", "dot_general", "tanh")
    new = behind_each(graph, [match], lambda match: lambda value: 2 * value).graph
    new.verify()

    def by_hand(x, w):
        a = jnp.sin(x)
        return jnp.sum((2 * jnp.tanh(a @ w) + 2 * a) ** 2)

    np.testing.assert_allclose(new.to_callable()(*ARGUMENTS), by_hand(*ARGUMENTS), rtol=1e-6)


# --------------------------------------------------------------------------------------- effects


def prints(x):
    a = jnp.sin(x)
    jax.debug.print("first {}", a)
    b = jnp.cos(a)
    jax.debug.print("second {}", x)
    c = jnp.tanh(b)
    jax.debug.print("third {}", c)
    return c


def printed(graph, capfd):
    graph.to_callable()(1.0)
    jax.effects_barrier()
    return [line.split()[0] for line in capfd.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "ops", [("sin",), ("sin", "cos", "tanh"), ("debug_print", "sin", "cos", "tanh")]
)
def test_effects_keep_their_order_and_happen_once(ops, capfd):
    graph = tg.graph(prints, 1.0)
    match = stretch(graph, *ops)
    new = edited(graph, [match], lambda op, *operands: op(*operands))
    assert printed(new, capfd) == ["first", "second", "third"]


def test_a_stretch_that_would_change_their_order_is_refused():
    graph = tg.graph(prints, 1.0)
    first, _, third = graph.find(tg.match.op("debug_print"))
    match = Fragment((), first.node, (first.node, third.node), "prints")
    with pytest.raises(tg.GraphError, match=r"effect before|not convex"):
        around_each(graph, [match], lambda op, *operands: op(*operands))


def test_a_call_has_the_effects_that_an_edit_puts_into_its_region(capfd):
    graph = tg.graph(calls_twice, 1.0)
    first, _ = sines(graph)

    def shown(op, x):
        jax.debug.print("sine {}", x)
        return op(x)

    new = edited(graph, [first], shown)
    call, other = (node for node in new.nodes if node.op == "jit")
    assert call.effects
    assert new.effects
    assert not other.effects
    assert printed(new, capfd) == ["sine"]


# ------------------------------------------------------------------------------ what is refused


def test_a_wrong_number_or_type_of_results_is_refused_with_the_line():
    def f(x):
        return jnp.sin(x)

    graph = tg.graph(f, jnp.ones(3))
    line = f.__code__.co_firstlineno + 1
    for around, words in [
        (lambda op, x: [x, x], r"expected 1 results \(f32\[3\]\).*gave 2"),
        (lambda op, x: x[0], r"expected f32\[3\].*gave f32\[\]"),
        (lambda op, x: x.astype(int), r"expected f32\[3\].*gave i32\[3\]"),
    ]:
        with pytest.raises(tg.GraphError, match=words) as caught:
            around_each(graph, sines(graph), around)
        assert f"test_editing.py:{line}" in str(caught.value)


def test_a_match_of_another_graph_is_refused():
    graph, other = tg.graph(jnp.sin, 1.0), tg.graph(lambda x: jnp.sin(x), 2.0)
    with pytest.raises(tg.GraphError, match="is not in sin"):
        around_each(graph, sines(other), tenfold)
    gone = edited(other, sines(other), lambda op, x: jnp.cos(x))
    with pytest.raises(tg.GraphError, match="is not in <lambda>"):
        around_each(gone, sines(other), tenfold)


OVERLAPPING = [("sin", "dot_general"), ("dot_general", "tanh")]


@pytest.mark.parametrize(
    ("stretches", "message"),
    [
        (OVERLAPPING, r"in common.*Narrow the selector"),
        ([("sin", "tanh")], r"dot_general.*tanh.*not convex"),
    ],
)
def test_stretches_that_are_no_single_operations_are_refused(stretches, message):
    graph = tg.graph(net, *ARGUMENTS)
    matches = [stretch(graph, *ops) for ops in stretches]
    with pytest.raises(tg.GraphError, match=message):
        around_each(graph, matches, lambda op, *operands: op(*operands))
