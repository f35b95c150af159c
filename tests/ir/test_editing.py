"""Editing a graph: what changes, what stays, and what is refused."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.ir import CustomGradient, Graph, Literal, Occurrence, Recompute
from tracegrad.ir.nodes import copied


def multiply_result(graph, occurrence, fun=lambda v: v * 10.0):
    """Writes `fun` behind a node, in regions that only this occurrence enters."""
    here = graph.own(occurrence)
    (value,) = here.node.outputs
    (new,) = here.graph.insert(fun, [value], after=here.node)
    here.graph.replace_uses(value, new)
    graph.verify()


@jax.jit
def inner(x):
    return jnp.sin(x)


def calls_twice(x):
    return inner(x) + 2 * inner(x)


def sines(graph):
    return graph.find(lambda o: o.node.op == "sin")


def test_editing_one_call_of_a_shared_region_leaves_the_other_alone():
    graph = tg.graph(calls_twice)(1.0)
    first, _ = sines(graph)
    multiply_result(graph, first)
    np.testing.assert_allclose(graph.to_callable()(1.0), 12 * np.sin(1.0), rtol=1e-6)


def test_occurrences_found_before_an_edit_are_good_after_it():
    graph = tg.graph(calls_twice)(1.0)
    for occurrence in sines(graph):
        multiply_result(graph, occurrence)
    np.testing.assert_allclose(graph.to_callable()(1.0), 30 * np.sin(1.0), rtol=1e-6)


@pytest.mark.parametrize("made", [Graph.copy, copy.copy, copy.deepcopy])
def test_an_edit_of_a_copy_leaves_the_original_clean(made):
    graph = tg.graph(calls_twice)(1.0)
    edited = made(graph)
    for occurrence in sines(graph):  # found in the original
        multiply_result(edited, occurrence)
    assert (graph.is_clean, edited.is_clean) == (True, False)
    np.testing.assert_allclose(graph.to_callable()(1.0), 3 * np.sin(1.0), rtol=1e-6)
    again = made(edited)
    multiply_result(again, sines(graph)[0])
    np.testing.assert_allclose(again.to_callable()(1.0), 120 * np.sin(1.0), rtol=1e-6)


def test_an_edit_that_would_reach_other_calls_is_refused():
    graph = tg.graph(calls_twice)(1.0)
    region = sines(graph)[0].graph
    with pytest.raises(tg.GraphError, match=r"inner is entered .* `graph.own\(occurrence\)`"):
        region.insert(lambda v: v * 10.0, region.outputs)
    assert graph.is_clean

    inside_a_copy = graph.copy()
    with pytest.raises(tg.GraphError, match="more than one place"):
        inside_a_copy.nodes[0].region("jaxpr").set_outputs([Literal(0.0, region.outputs[0].aval)])


def test_an_edit_that_is_refused_leaves_nothing_behind():
    @jax.jit
    def outer(x):
        return jax.jit(jnp.sin)(x) * 2

    graph = tg.graph(lambda x: outer(x) + outer(x))(1.0)
    region = graph.nodes[0].region("jaxpr")
    call = region.nodes[0]
    with pytest.raises(tg.GraphError, match="more than one place"):
        region.append(copied(call, region.inputs), [call.outputs[0].aval])
    with pytest.raises(tg.GraphError, match="more than one place"):
        region.group([call])
    assert region.inputs[0].users == (call,)
    assert not call.region("jaxpr").is_shared


def test_the_faces_of_a_rule_in_a_shared_region_are_shared_too():
    @jax.custom_vjp
    def rule(x):
        return jnp.sin(x)

    rule.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (ct,))

    @jax.jit
    def shared(x):
        return rule(x)

    graph = tg.graph(lambda x: shared(x) + 2 * shared(x))(1.0)
    _, second = graph.find(lambda o: isinstance(o.node, CustomGradient))
    backward = second.node.face("backward")
    with pytest.raises(tg.GraphError, match="more than one place"):
        backward.set_outputs(backward.insert(lambda ct: 10 * ct, backward.outputs))

    backward = graph.own(second).node.face("backward")
    backward.set_outputs(backward.insert(lambda ct: 10 * ct, backward.outputs))
    assert jax.grad(graph.to_callable())(1.0) == 21.0


def test_regions_that_no_edit_touches_stay_shared():
    graph = tg.graph(lambda x: calls_twice(jnp.cos(x)))(1.0)
    region = next(n for n in graph.nodes if n.regions).regions["jaxpr"]
    multiply_result(graph, graph.find(lambda o: o.node.op == "cos")[0])
    assert {n.regions["jaxpr"] for n in graph.nodes if n.regions} == {region}


def test_deeply_shared_regions_are_copied_along_the_path_only():
    @jax.jit
    def middle(x):
        return inner(x) + inner(x)

    graph = tg.graph(lambda x: middle(x) + middle(x))(1.0)
    found = sines(graph)
    assert len(found) == 4
    multiply_result(graph, found[2])
    np.testing.assert_allclose(graph.to_callable()(1.0), 13 * np.sin(1.0), rtol=1e-6)


def test_outputs_and_literals_can_be_replaced():
    graph = tg.graph(lambda x: (x + 1.0, x))(jnp.float32(1))
    two = Literal(np.float32(2), jax.typeof(np.float32(2)))
    graph.replace_uses(graph.inputs[0], two)
    graph.verify()
    assert graph.to_callable()(jnp.float32(5)) == (3.0, 2.0)


def test_a_value_of_another_graph_or_type_is_refused():
    a, b = (tg.graph(lambda x: jnp.sum(jnp.sin(x)))(jnp.ones(3)) for _ in range(2))
    with pytest.raises(tg.GraphError, match="not a value of this graph"):
        a.replace_uses(a.inputs[0], b.inputs[0])
    with pytest.raises(tg.GraphError, match=r"f32\[3\], f32\[\]"):
        a.replace_uses(a.inputs[0], a.nodes[-1].outputs[0])
    assert a.is_clean


def test_what_computes_the_new_value_goes_on_taking_the_old_one():
    graph = tg.graph(lambda x: jnp.cos(x) + x)(0.5)
    (new,) = graph.insert(lambda v: jnp.sin(v) * v + v, graph.inputs, before=graph.nodes[0])
    graph.replace_uses(graph.inputs[0], new)
    graph.verify()
    y = np.sin(0.5) * 0.5 + 0.5
    np.testing.assert_allclose(graph.to_callable()(0.5), np.cos(y) + y, rtol=1e-6)


def test_a_refused_edit_leaves_the_graph_as_it_was():
    graph, other = tg.graph(jnp.sin)(1.0), tg.graph(jnp.sin)(1.0)
    with pytest.raises(tg.GraphError, match="of another one"):
        graph.set_inputs(graph.nodes[0], other.inputs)
    assert graph.is_clean
    graph.verify()


def test_insert_refuses_a_wrong_number_or_type_of_inputs():
    graph = tg.graph(jnp.sin)(jnp.ones(3))
    program = tg.graph(lambda x, y: x + y)(jnp.ones(3), jnp.ones(3))
    with pytest.raises(tg.GraphError, match="takes 2 inputs, 1 were given"):
        graph.insert(program, graph.inputs)
    scalar = Literal(np.float32(2), jax.typeof(np.float32(2)))
    with pytest.raises(tg.GraphError, match=r"takes y: f32\[3\]"):
        graph.insert(program, [graph.inputs[0], scalar])
    with pytest.raises(ValueError, match="not both"):
        graph.insert(program, graph.inputs, before=graph.nodes[0], after=graph.nodes[0])


def test_a_node_is_replaced_by_a_program_of_the_same_results_and_effects():
    def f(x):
        jax.debug.print("here")
        return 2 * jnp.sin(x)

    graph = tg.graph(f)(1.0)
    sin = next(node for node in graph.nodes if node.op == "sin")
    with pytest.raises(tg.GraphError, match="gives other values than"):
        graph.replace(sin, lambda x: (x, x))
    graph.replace(sin, jnp.cos)
    graph.verify()
    assert graph.to_callable()(0.0) == 2
    shown = next(node for node in graph.nodes if node.effects)
    with pytest.raises(tg.GraphError, match="an edit must not drop"):
        graph.replace(shown, lambda: ())
    graph.replace(shown, lambda: jax.debug.print("there") or ())
    assert graph.effects


def test_nodes_that_use_each_other_are_erased_together():
    graph = tg.graph(lambda x: (jnp.sin(x), jnp.cos(jnp.exp(x))))(1.0)
    exp, cos = (n for n in graph.nodes if n.op != "sin")
    with pytest.raises(tg.GraphError, match="cos still uses it"):
        graph.erase(exp)
    with pytest.raises(tg.GraphError, match="the graph's outputs still uses it"):
        graph.erase(exp, cos)
    graph.set_outputs([graph.outputs[0]] * 2)
    graph.erase(exp, cos)
    graph.verify()
    assert [n.op for n in graph.nodes] == ["sin"]


def test_erase_refuses_what_is_used_and_what_has_effects():
    def f(x):
        jax.debug.print("here")
        return jnp.sin(x) + 0 * jnp.cos(x)

    graph = tg.graph(f)(1.0)
    by_op = {n.op: n for n in graph.nodes}
    with pytest.raises(tg.GraphError, match="mul still uses it"):
        graph.erase(by_op["cos"])
    with pytest.raises(tg.GraphError, match="an edit must not drop"):
        graph.erase(by_op["debug_print"])
    graph.replace_uses(by_op["add"].outputs[0], by_op["sin"].outputs[0])
    for op in ("add", "mul", "cos"):
        graph.erase(by_op[op])
    graph.verify()
    assert [n.op for n in graph.nodes] == ["debug_print", "sin"]
    with pytest.raises(tg.GraphError, match="not a node of f"):
        graph.own(Occurrence((), by_op["cos"]))


def net(x, w):
    a = jnp.sin(x)
    b = a @ w
    c = jnp.tanh(b)
    return jnp.sum((c + a) ** 2)


ARGUMENTS = (jnp.linspace(0, 1, 9).reshape(3, 3), jnp.eye(3) * 0.5)


def nodes_of(graph, *ops):
    return [n for n in graph.nodes if n.op in ops]


def test_a_call_has_the_effects_that_an_edit_puts_into_its_region():
    graph = tg.graph(calls_twice)(1.0)
    first, _ = sines(graph)
    here = graph.own(first)

    def shown(v):
        jax.debug.print("sine {}", v)

    here.graph.insert(shown, here.node.outputs)
    call, other = (node for node in graph.nodes if node.op == "jit")
    assert call.effects
    assert graph.effects
    assert not other.effects
    (replacement,) = graph.insert(jnp.cos, graph.inputs)
    graph.replace_uses(call.outputs[0], replacement)
    with pytest.raises(tg.GraphError, match="has effects"):
        graph.erase(call)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_group_is_a_region_that_computes_the_same(recompute):
    graph = tg.graph(net)(*ARGUMENTS)
    node = graph.group(nodes_of(graph, "sin", "dot_general", "tanh"), recompute=recompute)
    graph.verify()
    assert isinstance(node, Recompute) == recompute
    assert [n.op for n in node.regions["jaxpr"].nodes] == ["sin", "dot_general", "tanh"]
    f = graph.to_callable()
    np.testing.assert_array_equal(f(*ARGUMENTS), net(*ARGUMENTS))
    for got, expected in zip(
        jax.grad(f, (0, 1))(*ARGUMENTS), jax.grad(net, (0, 1))(*ARGUMENTS), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert ("remat" in str(jax.make_jaxpr(f)(*ARGUMENTS))) == recompute


@pytest.mark.parametrize("recompute", [False, True])
def test_a_group_may_have_copies_of_what_stands_before_it(recompute):
    graph = tg.graph(net)(*ARGUMENTS)
    (sin,), (product,) = nodes_of(graph, "sin"), nodes_of(graph, "dot_general")
    node = graph.group([product], recompute=recompute, copies=[sin])
    graph.verify()
    assert [n.op for n in node.regions["jaxpr"].nodes] == ["sin", "dot_general"]
    assert node.inputs == graph.inputs
    assert sin in graph.nodes
    f = graph.to_callable()
    for got, expected in zip(
        jax.grad(f, (0, 1))(*ARGUMENTS), jax.grad(net, (0, 1))(*ARGUMENTS), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_recompute_group_saves_only_its_inputs():
    graph = tg.graph(net)(*ARGUMENTS)
    graph.group(graph.nodes[:3], recompute=True)

    def residual_bytes(f):
        leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *ARGUMENTS))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    assert residual_bytes(graph.to_callable()) < residual_bytes(net)


def test_a_set_that_is_not_convex_is_refused_by_the_names_of_its_nodes():
    graph = tg.graph(net)(*ARGUMENTS)
    with pytest.raises(tg.GraphError, match=r"dot_general.*tanh.*not convex"):
        graph.group(nodes_of(graph, "sin", "tanh"))
    with pytest.raises(tg.GraphError, match="no nodes to group"):
        graph.group([])
    assert graph.is_clean


def prints(x):
    a = jnp.sin(x)
    jax.debug.print("first {}", a)
    b = jnp.cos(a)
    jax.debug.print("second {}", x)
    c = jnp.tanh(b)
    jax.debug.print("third {}", c)
    return c


def test_grouping_never_reorders_effects(capfd):
    graph = tg.graph(prints)(1.0)
    first, _, third = nodes_of(graph, "debug_print")
    with pytest.raises(tg.GraphError, match=r"effect before|not convex"):
        graph.group([first, third])
    with pytest.raises(tg.GraphError, match=r"cannot copy .*would happen twice"):
        graph.group([third], copies=[first])
    graph.group(nodes_of(graph, "sin", "cos", "tanh"))
    graph.verify()
    graph.to_callable()(1.0)
    jax.effects_barrier()
    words = [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert words == ["first", "second", "third"]


def test_an_effect_inside_a_group_stays_in_its_place(capfd):
    graph = tg.graph(prints)(1.0)
    first, second, _ = nodes_of(graph, "debug_print")
    between = graph.nodes[graph.nodes.index(first) : graph.nodes.index(second) + 1]
    graph.group(between)
    graph.verify()
    jax.jit(graph.to_callable())(1.0)
    jax.effects_barrier()
    words = [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert sorted(words) == ["first", "second", "third"]
    assert len(words) == 3


# ------------------------------------------------------- print, lowering and verify tell the same


@jax.jit
def halved(x):
    return jnp.sin(x) * 0.5


@jax.jit
def in_between(x):
    return halved(x) + 1.0


OFFSET = np.float32([0.25, 0.5])


def three_deep(x):
    return in_between(x) * jax.lax.cumsum(x + OFFSET, axis=0)


POINT = jnp.array([0.3, 0.7], jnp.float32)


def innermost(graph):
    """The region of `halved` in a graph of `three_deep`, and the two nodes around it."""
    outer = next(node for node in graph.nodes if node.name == "in_between")
    inner = next(node for node in outer.regions["jaxpr"].nodes if node.name == "halved")
    return inner.regions["jaxpr"], inner, outer


def region_of(function, *arguments):
    return tg.graph(lambda *a: [function(*a)])(*arguments)


def insert_and_replace(graph):
    region, _, _ = innermost(graph)
    (sine,) = (node for node in region.nodes if node.op == "sin")
    (new,) = region.insert(lambda v: v * 3.0, sine.outputs, after=sine)
    region.replace_uses(sine.outputs[0], new)
    return lambda x: (1.5 * np.sin(x) + 1) * np.cumsum(x + OFFSET)


def give_other_inputs(graph):
    region, _, _ = innermost(graph)
    product = region.nodes[-1]
    region.set_inputs(product, [region.inputs[0], product.inputs[1]])
    return lambda x: (0.5 * x + 1) * np.cumsum(x + OFFSET)


def give_other_outputs(graph):
    region, _, _ = innermost(graph)
    region.set_outputs([region.inputs[0]])
    return lambda x: (x + 1) * np.cumsum(x + OFFSET)


def give_a_clean_region(graph):
    _, inner, outer = innermost(graph)
    outer.regions["jaxpr"].set_region(inner, "jaxpr", region_of(jnp.cos, POINT))
    return lambda x: (np.cos(x) + 1) * np.cumsum(x + OFFSET)


def give_a_clean_region_with_regions(graph):
    _, _, outer = innermost(graph)
    graph.set_region(outer, "jaxpr", region_of(lambda x: halved(jnp.cos(x)), POINT))
    return lambda x: 0.5 * np.sin(np.cos(x)) * np.cumsum(x + OFFSET)


def give_other_parameters(graph):
    (node,) = (node for node in graph.nodes if node.op == "cumsum")
    graph.set_params(node, {**node.params, "reverse": True})
    return lambda x: (0.5 * np.sin(x) + 1) * np.cumsum((x + OFFSET)[::-1])[::-1]


def make_it_another_operation(graph):
    region, _, _ = innermost(graph)
    (sine,) = (node for node in region.nodes if node.op == "sin")
    region.set_params(sine, {"accuracy": None}, primitive=jax.lax.cos_p)
    return lambda x: (0.5 * np.cos(x) + 1) * np.cumsum(x + OFFSET)


def close_over_another_array(graph):
    (value,) = graph.constants
    graph.set_constant(value, np.float32([4.0, 5.0]))
    return lambda x: (0.5 * np.sin(x) + 1) * np.cumsum(x + np.float32([4.0, 5.0]))


def erase_what_nothing_uses(graph):
    region, _, _ = innermost(graph)
    region.set_outputs([region.inputs[0]])
    for node in reversed(region.nodes):
        region.erase(node)
    assert not region.nodes
    return lambda x: (x + 1) * np.cumsum(x + OFFSET)


def group_all(graph):
    region, _, _ = innermost(graph)
    region.group(region.nodes, name="everything")
    return lambda x: (0.5 * np.sin(x) + 1) * np.cumsum(x + OFFSET)


def own_without_an_edit(graph):
    (sine,) = sines(graph)
    graph.own(sine)
    return lambda x: (0.5 * np.sin(x) + 1) * np.cumsum(x + OFFSET)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(
    "edit",
    [
        insert_and_replace,
        give_other_inputs,
        give_other_outputs,
        give_a_clean_region,
        give_a_clean_region_with_regions,
        give_other_parameters,
        make_it_another_operation,
        close_over_another_array,
        erase_what_nothing_uses,
        group_all,
        own_without_an_edit,
    ],
)
def test_what_an_edited_graph_prints_computes_and_verifies_is_one_program(edit, copied):
    graph = tg.graph(three_deep)(POINT)
    before = str(graph)
    expected = edit(graph)
    if copied:
        graph = graph.copy()
    graph.verify()
    (value, slope) = jax.jvp(graph.to_callable(), (POINT,), (jnp.ones(2),))
    np.testing.assert_allclose(value, expected(np.asarray(POINT)), rtol=1e-6)
    step = 1e-3
    far, near = (expected(np.float64(POINT) + by) for by in (step, -step))
    np.testing.assert_allclose(slope, (far - near) / (2 * step), rtol=1e-3)
    # Traced anew, the program prints as it did.
    assert ops(tg.graph(graph.to_callable())(POINT)) == ops(graph)
    changes = edit not in (own_without_an_edit, close_over_another_array)
    assert (str(graph) != before) == changes
    assert graph.is_clean == (edit is own_without_an_edit)
    assert (graph.program is None) == (edit is not own_without_an_edit)


def ops(graph):
    return [
        (occurrence.node.op, occurrence.node.params.get("reverse"))
        for occurrence in graph.walk()
        if not occurrence.node.regions
    ]


def test_a_branch_can_be_replaced_by_a_clean_one():
    graph = tg.graph(lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x))(True, 1.0)
    (node,) = (node for node in graph.nodes if node.op == "cond")
    graph.set_region(node, "branches[0]", region_of(jnp.tanh, 1.0))
    graph.verify()
    f = graph.to_callable()
    expected = [np.tanh(1.0), np.sin(1.0)]
    np.testing.assert_allclose([f(False, 1.0), f(True, 1.0)], expected, rtol=1e-6)


def test_an_edit_in_a_face_of_a_rule_is_an_edit_of_the_graphs_around_it():
    graph = tg.graph(lambda x: jax.jit(jax.nn.relu)(x))(jnp.ones(2))
    (found,) = graph.find(lambda o: isinstance(o.node, CustomGradient))
    face = graph.own(found).node.face("jvp")
    face.set_outputs([face.outputs[0], face.insert(lambda t: 5 * t, [face.outputs[1]])[0]])
    assert not graph.is_clean
    np.testing.assert_array_equal(jax.grad(lambda x: graph.to_callable()(x).sum())(POINT), [5, 5])


def test_a_graph_and_its_nodes_are_changed_by_the_graph_alone():
    graph = tg.graph(calls_twice)(1.0)
    node = graph.nodes[0]
    for thing, name in [
        (graph, "inputs"),
        (graph, "nodes"),
        (graph, "outputs"),
        (graph, "constants"),
        (graph, "program"),
        (node, "params"),
        (node, "inputs"),
        (node, "outputs"),
        (node, "primitive"),
        (node, "effects"),
        (node, "regions"),
    ]:
        with pytest.raises(AttributeError):
            setattr(thing, name, getattr(thing, name))
        with pytest.raises((AttributeError, TypeError)):
            getattr(thing, name)[0] = None
    assert graph.is_clean


def test_a_node_that_was_erased_shares_its_region_with_nobody():
    graph = tg.graph(calls_twice)(1.0)
    first, second = (node for node in graph.nodes if node.op == "jit")
    graph.replace_uses(second.outputs[0], first.outputs[0])
    graph.erase(second)
    region = first.regions["jaxpr"]
    assert not region.is_shared
    region.set_outputs(region.inputs)
    np.testing.assert_allclose(graph.to_callable()(2.0), 6.0)


def test_the_effects_of_a_replaced_region_follow():
    @jax.jit
    def shown(x):
        jax.debug.print("here")
        return jnp.sin(x)

    graph = tg.graph(lambda x: shown(x) + 1)(1.0)
    (call,) = (node for node in graph.nodes if node.op == "jit")
    assert graph.effects
    printing = call.regions["jaxpr"]
    graph.set_region(call, "jaxpr", region_of(jnp.cos, 1.0))
    assert not graph.effects
    graph.set_region(call, "jaxpr", printing)
    assert graph.effects
