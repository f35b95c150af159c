"""Edits inside of regions: they act under every transformation, and no edit gets lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad.ir import CustomGradient, Occurrence
from tracegrad.ir.editing import around_each

pytestmark = pytest.mark.both_jax


def multiply(graph, occurrence, by):
    """The graph with ``v * sum(by)`` behind a node; `by` may be a tracer."""
    return multiply_all(graph, [occurrence], by)


def multiply_all(graph, occurrences, by):
    return around_each(
        graph, occurrences, lambda op, *operands: [y * jnp.sum(by) for y in op.results(*operands)]
    ).graph


THREE = jnp.array([1.0, 2.0])  # in sum; a scalar would be a number in the program


def sine_inside(graph):
    return next(o for o in graph.walk() if o.node.op == "sin" and o.path)


# Each program of a sine: as it is, or as a person would have written the edited one.
PROGRAMS = {
    "jit": lambda sine, x: jax.jit(sine)(x),
    "scan": lambda sine, x: jax.lax.scan(lambda c, y: (sine(c) * y, c), x, jnp.arange(1.0, 4)),
    "scan reversed": lambda sine, x: jax.lax.scan(
        lambda c, y: (sine(c) + y * x, y), x, jnp.arange(3.0), reverse=True, unroll=2
    ),
    "cond": lambda sine, x: jax.lax.cond(x > 0, sine, jnp.cos, x),
    "switch": lambda sine, x: jax.lax.switch(1, [jnp.cos, sine, jnp.tanh], x),
    "fori": lambda sine, x: jax.lax.fori_loop(0, 3, lambda i, c: sine(c) + i, x),
    "checkpoint": lambda sine, x: jax.checkpoint(lambda v: jnp.sin(sine(v)))(x),
    "nested": lambda sine, x: jax.lax.scan(lambda c, _: (jax.jit(sine)(c), c), x, None, length=3),
}


RUNS = {
    "run": lambda f: f(0.7, 3.0),
    "jit": lambda f: jax.jit(f)(0.7, 3.0),
    "grad": lambda f: jax.grad(lambda x, by: jax.tree.leaves(f(x, by))[0], (0, 1))(0.7, 3.0),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x, by: jax.tree.leaves(f(x, by))[0], (0, 1)))(
        0.7, 3.0
    ),
    "jvp": lambda f: jax.jvp(f, (0.7, 3.0), (1.0, 2.0)),
    "vmap": lambda f: jax.vmap(f)(jnp.arange(2.0) + 1, jnp.arange(2.0) + 3),
}


@pytest.mark.parametrize("factor", ["a constant", "an outer tracer"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_edit_in_a_region_acts_under_every_transformation(name, run, factor):
    program = PROGRAMS[name]

    def by_edit(x, by):
        graph = tg.graph(lambda x: program(lambda v: jnp.sin(v), x), x)
        graph = multiply(graph, sine_inside(graph), THREE if factor == "a constant" else by)
        if factor == "a constant":
            graph.verify()
        return graph.to_callable()(x)

    def by_hand(x, by):
        by = 3.0 if factor == "a constant" else by
        return program(lambda v: jnp.sin(v) * by, x)

    close(RUNS[run](by_edit), RUNS[run](by_hand))


def test_a_jit_with_settings_of_its_own_takes_a_capture_as_an_operand_without_any():
    inner = jax.jit(jnp.sin, donate_argnums=0)

    def by_edit(x, by):
        graph = tg.graph(lambda x: inner(x), x)
        graph = multiply(graph, sine_inside(graph), by)
        assert sum(graph.nodes[0].params["donated_invars"]) == 1
        return graph.to_callable()(x)

    close(jax.grad(by_edit, (0, 1))(0.7, 3.0), (3 * np.cos(0.7), np.sin(0.7)))


def test_a_while_loop_that_captures_an_outer_tracer_keeps_its_tangent():
    def fun(x):
        return jax.lax.while_loop(lambda c: c < 5.0, lambda c: jnp.sin(c) + 4.2, x)

    def edited(by):
        return jax.lax.while_loop(lambda c: c < 5.0, lambda c: jnp.sin(c) * by + 4.2, 0.7)

    def by_edit(by):
        graph = tg.graph(fun, 0.7)
        graph = multiply(graph, sine_inside(graph), by)
        return graph.to_callable()(0.7)

    close(jax.jvp(by_edit, (1.3,), (1.0,)), jax.jvp(edited, (1.3,), (1.0,)))


def test_captures_of_a_condition_and_of_a_body_reach_their_regions_in_any_order_of_matches():
    def loop(x, of_condition=1.0, of_body=1.0):
        return jax.lax.while_loop(
            lambda c: jnp.abs(c) * of_condition < 5.0, lambda c: c + jnp.exp2(c) * of_body, x
        )

    @jax.jit
    def edited(x, factors):
        graph = tg.graph(lambda x: loop(x), x)
        backwards = graph.find(tg.match.op("abs", "exp2"))[::-1]
        return around_each(graph, backwards, lambda op, c: op(c) * factors[op.name]).graph(x)

    (result,) = edited(0.5, {"abs": 2.0, "exp2": 3.0})
    np.testing.assert_allclose(result, loop(0.5, 2.0, 3.0), rtol=1e-6)


def test_a_capture_that_no_public_function_can_make_an_operand_is_refused():
    def fun(x):
        return jax.lax.custom_linear_solve(
            lambda v: 2 * v, x, lambda _, b: jnp.sin(b), symmetric=True
        )

    def by_edit(by):
        graph = tg.graph(fun, 1.0)
        graph = multiply(graph, sine_inside(graph), by)
        return graph.to_callable()(1.0)

    with pytest.raises(tg.GraphError, match=r"custom_linear_solve.*silently be zero"):
        jax.grad(by_edit)(3.0)


def test_an_edit_in_a_function_with_a_vmap_rule_acts_where_it_is_mapped():
    @jax.custom_batching.custom_vmap
    def sine(x):
        return jnp.sin(x)

    sine.def_vmap(lambda size, mapped, x: (jnp.sin(x), True))
    edited = tg.rewrite(sine, tg.rules.scale_gradient(tg.match.op("sin"), 3.0))
    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.vmap(edited)(x), np.sin(x), 1e-6)
    gradient = jax.grad(lambda x: jnp.sum(jax.vmap(edited)(x)))(x)
    np.testing.assert_allclose(gradient, 3 * np.cos(x), 1e-6)


def test_an_edit_in_a_linear_call_acts_where_it_is_transposed():
    def doubled(x):
        return jax.custom_derivatives.linear_call(lambda _, x: 2 * x, lambda _, ct: 2 * ct, None, x)

    edited = tg.rewrite(doubled, tg.rules.scale_gradient(tg.match.op("mul"), 3.0))
    assert (edited(1.0), jax.grad(doubled)(1.0), jax.grad(edited)(1.0)) == (2.0, 2.0, 6.0)


def test_how_a_scatter_combines_is_no_operation_that_a_rule_could_match():
    def f(x):
        return jnp.sum(x.at[0].add(1.0) ** 2)

    assert not any(o.path for o in tg.graph(f, jnp.ones(2)).find(tg.match.op("*")))
    with pytest.raises(tg.NoMatchError, match="'scatter-add'"):
        tg.rewrite(f, tg.rules.scale_gradient(tg.match.op("add"), 2.0))(jnp.ones(2))


def test_a_shard_map_in_a_shard_map_is_edited_and_checked_in_both_meshes():
    spec, everywhere = jax.sharding.PartitionSpec, jax.sharding.PartitionSpec()
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=types)

    def fun(w, x):
        def local(w, x):
            return jax.lax.psum(jnp.sum(jnp.sin(x @ w)), "b")

        def outer(w, x):
            specs = {"in_specs": (everywhere, spec("b")), "out_specs": everywhere}
            inner = jax.shard_map(local, axis_names={"b"}, **specs)
            return jax.lax.psum(jnp.cos(inner(w, x)), "a")

        specs = {"in_specs": (everywhere, spec("a")), "out_specs": everywhere}
        return jax.shard_map(outer, mesh=mesh, axis_names={"a"}, **specs)(w, x)

    w, x = jnp.ones((2, 3)), jnp.arange(8.0).reshape(4, 2)
    graph = tg.graph(fun, w, x)
    graph.verify()
    edited = tg.rewrite(fun, tg.rules.scale_gradient(tg.match.op("sin"), 2.0))
    tg.graph(edited, w, x).verify()
    tangents = (jnp.ones_like(w), jnp.zeros_like(x))
    value, tangent = jax.jit(lambda w, x: jax.jvp(fun, (w, x), tangents))(w, x)
    found = jax.jit(lambda w, x: jax.jvp(edited, (w, x), tangents))(w, x)
    close(found, (value, 2 * tangent))


# ------------------------------------------------------------------------------------ custom rules


@jax.custom_vjp
def sevenfold(x):
    return jnp.sin(x) * 2


sevenfold.defvjp(lambda x: (jnp.sin(x) * 2, x), lambda x, ct: (7.0 * ct * x,))


@jax.custom_jvp
def ninefold(x):
    return jnp.sin(x) * 2


ninefold.defjvp(lambda p, t: (jnp.sin(p[0]) * 2, 9.0 * t[0] * p[0]))


def rule_of(graph):
    (found,) = graph.find(lambda o: isinstance(o.node, CustomGradient))
    return found


def inside(rule, region, op):
    """The first operation of a kind in a face of a rule."""
    node = next(n for n in rule.node.region(region).nodes if n.op == op)
    return Occurrence(rule.into(region), node)


@pytest.mark.parametrize(
    ("rule", "face"),
    [(sevenfold, "call_jaxpr"), (ninefold, "call_jaxpr"), (sevenfold, "forward")],
)
def test_an_edit_of_one_face_alone_is_refused(rule, face):
    graph = tg.graph(lambda x: rule(x), 2.0)
    with pytest.raises(tg.GraphError, match="would return one thing, and another"):
        multiply(graph, inside(rule_of(graph), face, "sin"), 10.0)


def test_an_edit_of_the_backward_face_changes_the_gradient_alone():
    graph = tg.graph(lambda x: sevenfold(x), 2.0)
    graph = multiply(graph, inside(rule_of(graph), "backward", "mul"), 10.0)
    value, gradient = jax.jit(jax.value_and_grad(graph.to_callable()))(2.0)
    close(value, 2 * np.sin(2.0))
    close(gradient, 140.0)


@pytest.mark.parametrize(
    ("rule", "faces", "gradient"),
    [(sevenfold, ("call_jaxpr", "forward"), 14.0), (ninefold, ("call_jaxpr", "jvp"), 18.0)],
)
def test_an_edit_of_all_faces_is_seen_with_and_without_differentiation(rule, faces, gradient):
    graph = tg.graph(lambda x: rule(x), 2.0)
    places = [inside(rule_of(graph), face, "sin") for face in faces]
    graph = multiply_all(graph, places, 10.0)
    graph.verify()
    f = graph.to_callable()
    close(f(2.0), 20 * np.sin(2.0))
    close(jax.value_and_grad(f)(2.0), (20 * np.sin(2.0), gradient))
    close(jax.vmap(jax.value_and_grad(f))(jnp.full(2, 2.0))[1], np.full(2, gradient))


@pytest.mark.parametrize(
    ("rule", "faces"),
    [(sevenfold, ("call_jaxpr", "forward")), (ninefold, ("call_jaxpr", "jvp"))],
    ids=["vjp", "jvp"],
)
def test_an_edit_of_faces_that_closes_over_what_is_differentiated_is_refused(rule, faces):
    def edited(scale, x):
        graph = tg.graph(lambda x: rule(x), x)
        places = [inside(rule_of(graph), face, "sin") for face in faces]
        return multiply_all(graph, places, scale).to_callable()(x)

    close(edited(3.0, 2.0), 6 * np.sin(2.0))
    for arguments in (0, (0, 1)):
        with pytest.raises((tg.GraphError, ValueError), match=rf"{rule.__name__} closes over a va"):
            jax.grad(edited, arguments)(3.0, 2.0)
    stopped = jax.grad(lambda scale, x: edited(jax.lax.stop_gradient(scale), x), (0, 1))(3.0, 2.0)
    close(stopped, (0.0, jax.grad(rule)(2.0)))


def close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), got, expected)


def test_an_edited_rule_refuses_to_be_differentiated_by_what_it_closes_over():
    def scaled(c, x):
        @jax.custom_vjp
        def f(x):
            return c * x

        f.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (3.0 * ct,))
        return f(x)

    def tenfold_backward(graph):
        return multiply(graph, inside(rule_of(graph), "backward", "mul"), 10.0)

    edited = tg.trace(scaled, rules=[tenfold_backward])
    assert jax.grad(edited, 1)(2.0, 3.0) == 30.0
    with pytest.raises(ValueError, match="f closes over a value that is being differentiated"):
        jax.grad(edited, 0)(2.0, 3.0)
