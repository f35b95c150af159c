"""Variables in traced functions: inputs and outputs of the program, on the first and on every call.

Each numeric claim is checked against plain Python, or against the function that one would write by
hand for `jax.jit`, which takes and returns the values.
"""

import functools
import gc
import inspect
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

import tracegrad as tg
from tracegrad.variables import lending
from tracegrad.variables.listening import listening
from tracegrad.variables.variable import Variable

pytestmark = pytest.mark.both_jax


def address(v):
    return v._value.unsafe_buffer_pointer()  # not `v.value`, which would be handed out


def at_once(calls):
    """Runs each on a new thread, all beginning together; raises what one of them raises."""
    barrier = threading.Barrier(len(calls))

    def begin(call):
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(begin, calls))


# ------------------------------------------------------------------------------------- reading

v = Variable(3.0, name="v")  # at module level, as functions whose programs JAX keeps find it


@pytest.fixture(autouse=True)
def _three():
    v.assign(3.0)


@jax.jit
def jitted(x):
    return v * x


def body(c, x):
    return c + v * x, v * c


def checkpointed(x):
    return jnp.sin(v * x)


def through_vmap(x):
    return jax.vmap(lambda y: v * y)(x * jnp.ones(3)).sum()


@tg.trace
def traced(x):
    return v * x


READS = {
    "at top level": lambda x: v * x,
    "in a nested jit": lambda x: jitted(x),
    "in a scan": lambda x: lax.scan(body, x, jnp.arange(3.0))[0],
    "in a map": lambda x: lax.map(lambda y: v * y, x * jnp.arange(3.0)).sum(),
    "in a while loop": lambda x: lax.while_loop(lambda c: c < 30 * v, lambda c: c * v, x),
    "in a fori loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c + v, x),
    "in a cond": lambda x: lax.cond(x > 0, lambda x: v * x, lambda x: -v, x),
    "in a switch": lambda x: lax.switch(1, [jnp.sin, lambda x: v * x, jnp.cos], x),
    "in a checkpoint": lambda x: jax.checkpoint(checkpointed)(x),
    "in a recomputed function": lambda x: tg.recompute_grad(checkpointed)(x),
    "in a vmap": through_vmap,
    "in a nested traced function": lambda x: traced(x),
    "in a gradient": lambda x: jax.grad(lambda y: jitted(y) * v * y)(x),
    "in a gradient of a scan": lambda x: jax.grad(lambda y: lax.scan(body, y, x * jnp.ones(2))[0])(
        x
    ),
    "in a jit in a scan": lambda x: lax.scan(lambda c, _: (jitted(c), None), x, None, length=2)[0],
    "in a traced function in a scan": lambda x: lax.scan(
        lambda c, _: (traced(c), None), x, None, length=2
    )[0],
}


def test_a_variable_is_one_input_wherever_it_is_read_beside_references_and_arrays():
    """All are constants of the program that JAX makes; of these two stay what they are."""
    state, array, unused = jax.new_ref(jnp.float32(10)), jnp.arange(3.0), Variable(7.0)

    def step(x):
        unused.read_value()
        state[...] += v * jnp.sum(array)
        summed, _ = lax.scan(body, x * v, array)
        return summed + state[...]

    graph = tg.graph(step, 2.0)
    graph.verify()
    assert len(graph.inputs) == 1 + len(graph.variables)
    assert {id(each) for each in graph.variables} == {id(unused), id(v)}
    assert sorted(jnp.shape(c) for c in graph.constants.values()) == [(), (3,)]
    traced = tg.trace(step)
    for value in (3.0, 5.0):  # the second time nothing is traced
        v.assign(value)
        before = float(state[...])
        assert traced(2.0) == 2 * value + value * 3 + before + value * 3
        assert state[...] == before + value * 3


@pytest.mark.parametrize("fun", READS.values(), ids=READS)
def test_the_current_value_is_read_on_the_first_and_on_every_later_call(fun):
    def expected(x, value):
        """With the number in place of the Variable, in the same Python functions."""

        class Number:
            def on_read(self, variable, outside):
                return jnp.float32(value)

        # Other functions, since JAX would keep the programs of these.
        jax.clear_caches()
        with listening(Number()):
            result = fun(x)
        jax.clear_caches()
        return float(result)

    wanted = [expected(2.0, 3.0), expected(2.0, 5.0), expected(2.0, 3.0)]
    first, second = tg.trace(fun), tg.trace(lambda x: fun(x))
    got = []
    for value in (3.0, 5.0, 3.0):
        v.assign(value)
        got.append(
            [float(first(2.0)), float(second(2.0)), float(tg.graph(fun, 2.0).to_callable()(2.0))]
        )
    np.testing.assert_allclose(got, np.array([wanted] * 3).T, rtol=1e-6)


def test_a_traced_method_has_the_variables_of_its_instance():
    class Layer:
        def __init__(self, value):
            self.w = Variable(value)

        @functools.partial(tg.trace, static_argnums=0)
        def __call__(self, x):
            return self.w * x

        @tg.trace
        def double(self):
            self.w.assign(self.w * 2)

    one, two = Layer(1.0), Layer(2.0)
    for factor in (1, 2, 4):
        assert (one(3.0), two(3.0), one(3.0)) == (3 * factor, 6 * factor, 3 * factor)
        one.double(), two.double()


def stepping(w, x=1.0):
    """A step as with TensorFlow: of an argument that is watched and assigned."""
    with tg.GradientTape() as tape:
        loss = jnp.sum(w * w) * x
    gradient = tape.gradient(loss, w)
    w.assign_sub(gradient / 4)
    return gradient


def in_a_tree(w, x):
    return tg.trace(lambda tree: stepping(tree["w"][0], tree["x"]))({"w": [w], "x": x, "name": "w"})


def without_jit(step):
    def call(w, x):
        with jax.disable_jit():
            return step(w, x)

    return call


WITH_A_VARIABLE = {
    "plain": tg.trace(stepping),
    "static": tg.trace(stepping, static_argnums=0),
    "static name": tg.trace(stepping, static_argnames="w"),
    "donated": tg.trace(stepping, donate_argnums=0),
    "budget": tg.trace(stepping, memory_budget="1GiB"),
    "tree": in_a_tree,
    "nested": lambda w, x: tg.trace(lambda w, x: tg.trace(stepping)(w, x))(w, x),
    "keyword": lambda w, x: tg.trace(stepping)(x=x, w=w),
    "partial": lambda w, x: tg.trace(functools.partial(stepping, x=x))(w),
    "without jit": without_jit(tg.trace(stepping)),
    "without jit, with rules": without_jit(tg.trace(stepping, rules=[lambda graph: graph])),
}


@pytest.mark.parametrize("call", WITH_A_VARIABLE.values(), ids=WITH_A_VARIABLE)
def test_a_variable_given_as_an_argument_is_that_variable_inside(call):
    a, b = Variable([4.0, 2.0], name="a"), Variable([8.0, 0.0], name="b")
    for w, expected in ((a, [8.0, 4.0]), (b, [16.0, 0.0]), (a, [4.0, 2.0]), (b, [8.0, 0.0])):
        assert call(w, 1.0).tolist() == expected
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([1.0, 0.5], [2.0, 0.0])


@pytest.mark.parametrize("has_others", [False, True])
def test_a_function_may_be_given_variables_after_arrays_and_arrays_after_variables(has_others):
    count = Variable(0.0)

    @tg.trace
    def f(w):
        if has_others:
            count.assign_add(1.0)
        return stepping(w) if isinstance(w, Variable) else 3 * w

    a, b, array = Variable([4.0]), Variable([8.0]), jnp.ones(1)
    given = (array, array, a, b, a, array, b)
    got = [f(w).tolist() for w in given]
    assert got == [[3.0], [3.0], [8.0], [16.0], [4.0], [3.0], [8.0]]
    assert (float(a[0]), float(b[0])) == (1.0, 2.0)
    assert float(count) == (len(given) if has_others else 0)


def test_variables_that_are_the_same_or_are_read_besides_are_told_apart_by_each_call():
    a, b = Variable(1.0, name="a"), Variable(10.0, name="b")

    @tg.trace
    def f(u, w):
        u.assign_add(1.0)
        return w + a

    given = [(a, a), (a, b), (b, a), (b, b), (a, a)]
    eager, traced = [], []
    for call, results in ((f.__wrapped__, eager), (f, traced)):
        a.assign(1.0), b.assign(10.0)
        results += [(float(call(*pair)), float(a), float(b)) for pair in given]
    assert traced == eager


def test_functions_of_jax_and_gradients_take_the_value_of_a_variable_that_they_are_given():
    v = Variable(3.0)
    seen = []

    @tg.trace
    def f(w):
        seen.append(isinstance(w, Variable))
        return w * w

    assert [transform(f)(v) for transform in (jax.grad, tg.grad)] == [6.0, 6.0]
    assert jax.jit(f)(v) == 9.0
    assert not any(seen)
    assert f(v) == 9.0
    assert seen[-1]
    assert jax.jit(f)(v) == 9.0
    assert jax.grad(f)(v) == 6.0


def test_graphs_and_programs_of_a_function_have_its_variables_behind_the_arguments():
    a, b = Variable(3.0, name="a"), Variable(4.0, name="b")
    f = tg.trace(lambda w, x: w * x)
    for graph in (f.graph(a, 2.0), tg.graph(f.__wrapped__, a, 2.0)):
        assert list(graph.hints) == ["x", "a"]
        assert graph.variables == (a,)
        assert graph.to_callable()(a, 5.0) == 15.0
        with pytest.raises(TypeError, match=r"(?s)structure.*Variable a.*called with.*Variable b"):
            graph.to_callable()(b, 5.0)
    assert len(jax.tree.leaves(f.lower(a, 2.0).in_avals)) == 2
    assert f.eval_shape(a, 2.0).shape == ()


def test_variables_have_names_in_the_text_of_a_graph():
    count = Variable(0, name="count", trainable=False)

    @tg.trace
    def f(x):
        count.assign_add(1)
        return v * x

    graph = f.graph(jax.ShapeDtypeStruct((2,), "float32"))
    graph.verify()
    assert list(map(graph.names.get, graph.inputs)) == ["x", "count", "v"]
    assert str(graph).startswith("f(x: f32[2], count: i32[], v: f32[]) -> f32[2], i32[]\n")
    assert (graph.variables, graph.assigned) == ((count, v), (count,))
    assert graph.replace(nodes=graph.nodes).variables == graph.variables


def test_a_graph_as_a_function_reads_and_assigns_when_it_is_called():
    w = Variable(1.0)

    def f(x):
        w.assign_add(x)
        return w * v

    call = tg.graph(f, 2.0).to_callable()
    rebuilt = tg.edit(tg.match.op("mul"), lambda op, a, b: op(a, b))(tg.graph(f, 2.0)).to_callable()
    assert float(w) == 1.0
    assert (call(2.0), rebuilt(2.0), call(1.0)) == (9.0, 15.0, 18.0)
    v.assign(1.0)
    assert call(1.0) == 7.0


def test_what_lowering_and_tracing_and_exporting_show():
    f = tg.trace(lambda x: v * x)
    f_and_count = tg.trace(lambda x: (v.assign_add(1.0), v * x)[1])
    assert f.eval_shape(jnp.ones(3)).shape == (3,)
    assert f_and_count.eval_shape(jnp.ones(3)).shape == (3,)
    assert float(v) == 3.0
    text = f.lower(jnp.ones(3)).as_text()
    assert "tensor<f32>" in text
    assert "tensor<3xf32>" in text
    assert "dense<3.0" not in text  # no constant
    compiled = f.lower(jnp.ones(3)).compile()
    np.testing.assert_array_equal(compiled(jnp.ones(3)), [3.0, 3.0, 3.0])
    assert [t.shape for t in f.trace(jnp.ones(3)).jaxpr.in_avals] == [(), (3,)]
    exported = jax.export.export(f)(jax.ShapeDtypeStruct((3,), "float32"))
    np.testing.assert_array_equal(exported.call(jnp.float32(2), jnp.ones(3))[1], [2.0, 2.0, 2.0])


def test_jax_transformations_of_a_traced_function_with_variables():
    f = tg.trace(lambda x: v * x * x)
    assert jax.grad(f)(2.0) == 12.0
    np.testing.assert_array_equal(jax.vmap(f)(jnp.arange(3.0)), [0.0, 3.0, 12.0])
    assert jax.jvp(f, (2.0,), (1.0,)) == (12.0, 12.0)
    assert tg.hessian(f)(2.0) == 6.0
    assert tg.jvp(lambda x: v * x, (2.0,), (1.0,)) == (6.0, 3.0)
    v.assign(1.0)
    assert jax.grad(f)(2.0) == 4.0


@pytest.mark.parametrize("outside", [jax.jit(lambda x: traced(x)), jitted], ids=["jit", "kept"])
def test_in_a_program_of_jax_its_value_would_be_a_constant_and_that_is_refused(outside):
    assert tg.trace(lambda x: traced(x) + jitted(x))(2.0) == 12.0
    with pytest.raises(RuntimeError, match=r"Variable 'v' is read inside .*tracegrad\.trace"):
        outside(2.0)


def test_a_value_that_was_kept_by_a_side_effect_is_refused():
    kept = []
    tg.trace(lambda x: (kept.append(v.value), x)[1])(1.0)
    with pytest.raises(RuntimeError, match="after the function was traced"):
        kept[0] + 1


def test_a_value_that_an_inner_function_closes_over_is_not_mixed_up_with_a_later_one():
    @tg.trace
    def f(x):
        old = v.value
        v.assign(10.0)
        return tg.trace(lambda y: old * y + v)(x)

    assert f(2.0) == 3.0 * 2 + 10
    assert f(2.0) == 10.0 * 2 + 10


def test_a_variable_on_which_a_custom_gradient_depends_is_named_by_who_differentiates_it():
    @tg.trace
    def f(x):
        slope = v.value
        return tg.custom_gradient(lambda x: (slope * x, lambda dy: slope * dy))(x)

    assert f(2.0) == 6.0
    with tg.GradientTape() as tape:
        y = f(2.0)
    with pytest.raises(ValueError, match=r"depends on the Variable 'v' \(f32\[\]\)"):
        tape.gradient(y, v)


def test_inner_functions_that_read_no_variables_are_traced_once_for_all_traced_functions():
    traced, other = [], Variable(2.0)

    @jax.jit
    def reads_none(x):
        traced.append(x)
        return 2 * x

    for value in (3.0, 5.0):
        v.assign(value)
        fun = tg.trace(lambda x: reads_none(x) * v + reads_none(x) * other)
        assert fun(1.0) == 2 * value + 4
    assert len(traced) == 1


def test_a_nested_traced_function_is_traced_once_whatever_is_assigned_around_it():
    traces = []

    @tg.trace
    def nested(x):
        traces.append(x)
        return jitted(x)

    @tg.trace
    def step(x):
        before = nested(x)
        v.assign(before + x)
        return before, nested(x), jitted(x)

    assert step(2.0) == (6.0, 16.0, 16.0)
    assert step(2.0) == (16.0, 36.0, 36.0)
    assert tg.trace(lambda x: nested(x) * 1.0)(1.0) == 18.0
    assert len(traces) == 1


@pytest.mark.parametrize("fails", ["never", "for vectors", "always"])
def test_what_a_nested_traced_function_reads_is_read_again_by_the_one_around_it(fails):
    @tg.trace
    def nested(x):
        y = jitted(x)
        if fails == "always" or (fails == "for vectors" and x.ndim):
            raise ValueError("on purpose")
        return y

    @tg.trace
    def step(x):
        try:
            return nested(x) + jitted(x)
        except ValueError:
            return 2 * jitted(x)

    if fails != "always":
        assert nested(1.0) == 3.0  # from now on it has a program that takes the Variable
    for value in (3.0, 5.0):
        v.assign(value)
        np.testing.assert_array_equal(step(jnp.ones(2)), [2 * value, 2 * value])


def test_threads_that_trace_at_once_have_their_own_reads_of_inner_functions():
    def work(other):
        both = [tg.trace(lambda x: jitted(x) + jax.jit(lambda y: y * other)(x)) for _ in range(5)]
        return [float(fun(2.0)) for fun in both]

    others = [Variable(float(i)) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, others)) == [[6.0 + 2 * i] * 5 for i in range(4)]


# ----------------------------------------------------------------------------------- assignment


def test_each_read_has_the_value_of_its_moment_and_no_new_value_is_traced_for():
    traces = []

    @tg.trace
    def f(x):
        traces.append(x)
        before = v * 1
        v.assign(x)
        between = v * 1
        v.assign_add(1.0)
        return before, between, v.value

    assert f(5.0) == (3.0, 5.0, 6.0)
    assert f(7.0) == (6.0, 7.0, 8.0)
    assert float(v) == 8.0
    assert len(traces) == 1


def test_functions_that_jax_keeps_see_a_value_that_was_assigned_before():
    def sums(xs):
        results = [lax.scan(body, 0.0, xs)[0], jitted(1.0)]
        for _ in range(2):
            v.assign_add(1.0)
            results += [lax.scan(body, 0.0, xs)[0], jitted(1.0)]
        return results

    f, g = tg.trace(sums), tg.trace(lambda xs: sums(xs))
    for start in (3.0, 6.0):
        v.assign(start)
        expected = [t for i in range(3) for t in (2 * (start + i), start + i)]
        assert [float(t) for t in f(jnp.ones(2))] == expected
        v.assign(start)
        assert [float(t) for t in g(jnp.ones(2))] == expected


def test_a_backward_pass_after_an_assignment_uses_the_value_of_the_forward_pass():
    @tg.trace
    def f(x):
        def loss(y):
            total = lax.scan(body, y, jnp.ones(2))[0] + jitted(y)
            v.assign_add(100.0)
            return total

        return jax.grad(loss)(x)

    # d/dy of y + 2v + vy, and the scan's second result is not used.
    assert f(1.0) == 4.0
    assert f(1.0) == 104.0


def test_a_random_key_is_carried_from_call_to_call():
    key = Variable(jax.random.key(0))

    @tg.trace
    def draw():
        new, use = jax.random.split(key.value)
        key.assign(new)
        return jax.random.normal(use)

    expected, state = [], jax.random.key(0)
    for _ in range(3):
        state, use = jax.random.split(state)
        expected.append(float(jax.random.normal(use)))
    assert [float(draw()) for _ in range(3)] == expected
    assert "key" in repr(key)


def test_a_nested_traced_step_assigns_through_the_outer_one():
    @tg.trace
    def inner(x):
        v.assign_add(x)
        return v * 2

    @tg.trace
    def outer(x):
        return inner(x), inner(x), v.value

    assert outer(1.0) == (8.0, 10.0, 5.0)
    assert outer(1.0) == (12.0, 14.0, 7.0)
    assert float(v) == 7.0


LOST = {
    "scan": lambda: lax.scan(lambda c, x: (v.assign(c).value, x), 1.0, None, length=2),
    "cond": lambda: lax.cond(True, lambda: v.assign(1.0).value, lambda: 0.0),
    "while": lambda: lax.while_loop(lambda c: c < 2, lambda c: v.assign(c).value + 1, 1.0),
    "checkpoint": lambda: jax.checkpoint(lambda x: v.assign(x).value)(1.0),
    "jit": lambda: jax.jit(lambda x: v.assign(x).value)(1.0),
    "traced function in a scan": lambda: lax.scan(
        lambda c, x: (tg.trace(lambda: v.assign(c).value)(), x), 1.0, None, length=2
    ),
}


@pytest.mark.parametrize("assigns", LOST.values(), ids=LOST)
def test_assigning_inside_a_body_is_refused_and_shows_how_to_carry(assigns):
    with pytest.raises(RuntimeError, match=r"'v' is assigned .*Carry the value.*v\.assign\(w\)"):
        tg.trace(assigns)()
    assert float(v) == 3.0


def test_assigning_inside_a_vmap_is_refused():
    with pytest.raises(RuntimeError, match=r"'v' is assigned inside a jax\.vmap"):
        tg.trace(lambda x: jax.vmap(lambda y: v.assign(y).value)(x))(jnp.ones(3))


def test_an_exception_assigns_nothing():
    @tg.trace
    def f(x):
        v.assign(x)
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            f(1.0)
    assert float(v) == 3.0


def test_a_variable_created_while_tracing_is_one_from_then_on():
    class Lazy:
        w = None

        def __call__(self, x):
            if self.w is None:
                self.w = Variable(np.float32(2), name="w")
            return self.w * x

    lazy = Lazy()
    f = tg.trace(lambda x: lazy(x))
    assert f(3.0) == 6.0
    lazy.w.assign(5.0)
    assert f(3.0) == 15.0


# ---------------------------------------------------------------------- Variables among the results


def test_a_variable_among_the_results_is_its_value_at_the_end():
    c, d = Variable(1.0, name="c"), Variable(5.0, name="d")
    count = tg.trace(lambda: c.assign_add(1.0))
    first, second = count(), count()
    assert isinstance(first, jax.Array)
    assert (float(first), float(second), float(c)) == (2.0, 3.0, 3.0)

    @tg.trace
    def several(x):
        c.assign(x)
        return {"c": (c, c.assign_add(1.0)), "d": d, "product": c * d}

    for results in (several(4.0), tg.trace(lambda x: several(x))(4.0)):
        assert jax.tree.map(float, results) == {"c": (5.0, 5.0), "d": 5.0, "product": 25.0}
    assert [o.aval.shape for o in several.graph(4.0).outputs] == [()] * 5  # the last: c, assigned
    assert several.eval_shape(4.0)["d"].shape == ()


AROUND = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "trace": tg.trace,
    "recompute": tg.recompute_grad,
    "custom": tg.custom_gradient,
    "cond": lambda f: lambda x: lax.cond(x > 0, f, f, x),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(x), None), x, length=1)[0],
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_functions_inside_a_traced_one_may_return_variables(around):
    v = Variable(1.0)

    def returns_it(x):
        return (v, lambda dy, variables: (dy, [dy])) if around is tg.custom_gradient else v

    @tg.trace
    def f(x):
        v.assign(2 * x)
        return around(returns_it)(x)

    assert [float(f(x)) for x in (3.0, 4.0)] == [6.0, 8.0]


def test_a_loss_may_be_a_variable():
    total = Variable(0.0)
    with pytest.warns(
        UserWarning, match="read after it was assigned a value that is being differentiated"
    ):
        assert tg.value_and_grad(lambda x: total.assign(x * x))(3.0) == (9.0, 0.0)


# ------------------------------------------------------------------------------ which Variables


CALLED = {
    "by itself": lambda f: f,
    "differentiated": jax.grad,
    "in a traced function": tg.trace(static_argnums=1),
}


@pytest.mark.parametrize("around", CALLED.values(), ids=CALLED)
def test_variables_that_turn_up_after_calls_with_none_or_others(around):
    a, b = Variable(1.0), Variable(2.0)

    @tg.trace(static_argnums=1)
    def f(x, which):
        if which == "a":
            a.assign_add(1.0)
            return a * x
        return x * b if which == "b" else x * 3

    f(1.0, None), f(1.0, None)
    call = around(f)
    for i in range(3):
        b.assign(i)
        assert [call(1.0, which) for which in ("a", "b", None)] == [2 + i, i, 3]
        assert float(a) == 2 + i
    assert f(jnp.ones(2), "b").tolist() == [2.0, 2.0]


def test_jit_options_mean_the_users_arguments():
    f = tg.trace(
        lambda x, n, *, flag: v * x * n if flag else x,
        static_argnums=1,
        static_argnames="flag",
        donate_argnums=0,
    )
    x = jnp.ones(2)
    np.testing.assert_array_equal(f(x, 2, flag=True), [6.0, 6.0])
    assert x.is_deleted()
    np.testing.assert_array_equal(f(jnp.ones(2), 3, flag=True), [9.0, 9.0])
    assert tg.trace(lambda x, n: v * x * n, static_argnums=-1)(1.0, 2) == 6.0
    assert tg.trace(lambda x, n: v * x * n, static_argnames="n")(1.0, 2) == 6.0
    assert tg.trace(lambda x: v * x, keep_unused=True)(1.0) == 3.0


# ------------------------------------------------------------------------------------- buffers


def counter():
    w = Variable(np.zeros(1 << 16, np.float32))

    @tg.trace
    def step():
        w.assign_add(1.0)

    return w, step


@pytest.mark.parametrize("drops_a_leaf", [False, True], ids=["", "after the copy for a leaf"])
def test_a_step_writes_over_the_buffer_that_it_made(drops_a_leaf):
    w, step = counter()
    step()
    if drops_a_leaf:
        jax.tree.leaves(w)
        step()
    place = address(w)
    for _ in range(3):
        step()
        assert address(w) == place
    assert float(w[0]) == 4.0 + drops_a_leaf


# JAX gives the buffers of a leaf to new arrays, which do not hold the leaf.
HANDED = {
    "the value": lambda w: w.value,
    "a leaf": lambda w: jax.tree.leaves(w)[0],
    "of NumPy": lambda w: w.numpy(),
    "a leaf, on its device": lambda w: jax.device_put(jax.tree.leaves(w)[0], jax.devices()[0]),
    "data of a leaf": lambda w: jax.tree.leaves(w)[0].addressable_data(0),
    "a leaf, of NumPy": lambda w: np.asarray(jax.tree.leaves(w)[0]),
}


@pytest.mark.parametrize("handed", HANDED.values(), ids=HANDED)
def test_an_array_that_somebody_was_handed_lives_on(handed):
    w, step = counter()
    step()
    kept = handed(w)
    step(), step()
    assert (float(kept[0]), float(w[0])) == (1.0, 3.0)


def test_the_users_own_array_never_dies():
    mine = jnp.zeros(1 << 16)
    w = Variable(mine)
    step = tg.trace(lambda: w.assign_add(1.0) * 0)
    step()
    step()
    other = jnp.full(1 << 16, 5.0)
    w.assign(other)
    step()
    assert (float(mine[0]), float(other[0]), float(w[0])) == (0.0, 5.0, 6.0)


def test_what_a_step_is_given_and_returns_is_not_written_over():
    n = Variable(np.arange(4))
    put = tg.trace(lambda x: (n.assign(x), n.value, x)[1:])
    add = tg.trace(lambda: n.assign_add(1).value)
    given = jnp.arange(4) + 10
    returned = put(given)
    results = [add(), add()]
    np.testing.assert_array_equal(given, np.arange(4) + 10)
    np.testing.assert_array_equal(returned[0], given)
    np.testing.assert_array_equal(returned[1], given)
    np.testing.assert_array_equal(results[0], np.arange(4) + 11)
    np.testing.assert_array_equal(results[1], np.arange(4) + 12)


def test_two_variables_never_share_a_buffer_that_is_written_over():
    a, b = Variable(1.0), Variable(2.0)
    swap = tg.trace(lambda: (a.value, a.assign(b), b.value)[0])

    @tg.trace
    def exchange():
        old = a.value
        a.assign(b)
        b.assign(old)

    both = tg.trace(lambda: (a.assign_add(1.0), b.assign(a))[1] * 0)
    exchange()
    assert (float(a), float(b)) == (2.0, 1.0)
    exchange()
    swap()
    both()
    both()
    assert (float(a), float(b)) == (4.0, 4.0)
    exchange()
    assert (float(a), float(b)) == (4.0, 4.0)


def test_a_value_that_is_also_an_argument_is_given_as_it_was():
    w, _ = counter()
    add = tg.trace(lambda x: (w.assign_add(1.0), x[0])[1])
    assert [float(add(w.value)) for _ in range(3)] == [0.0, 1.0, 2.0]
    assert float(w[0]) == 3.0


def test_a_variable_that_is_only_read_keeps_its_buffer(monkeypatch):
    monkeypatch.setattr(lending, "_lenders", set())  # where others lend too, it is handed out
    w, step = counter()
    look = tg.trace(lambda: w.sum())
    step()
    place = address(w)
    assert float(look()) == float(look()) == 1 << 16
    step()
    assert address(w) == place


@pytest.mark.parametrize("around", [lambda f: f, tg.trace], ids=["eagerly", "traced"])
def test_sharded_variables_stay_sharded(around):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    w = Variable(jax.device_put(jnp.arange(8.0), sharding))
    step = around(lambda: w.assign_add(1.0) * 0)
    for _ in range(3):
        step()
    assert w.value.sharding == sharding
    np.testing.assert_array_equal(w.value, np.arange(8.0) + 3)


def test_a_variable_that_is_split_otherwise_is_traced_as_it_is():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (["d"], [None, "d"]))
    w = Variable(jax.device_put(jnp.ones((4, 4)), rows))

    @tg.trace
    def add(x):
        return w.assign_add(jax.jit(lambda x: x * w)(x)).value

    with jax.set_mesh(mesh):
        assert add(w.value).sharding.is_equivalent_to(rows, 2)
        w.assign(jax.device_put(w.value, columns))
        assert w.aval == jax.typeof(w.value)
        assert add(w.value).sharding.is_equivalent_to(columns, 2)
    np.testing.assert_array_equal(np.asarray(w.value), np.full((4, 4), 6))


def test_shardings_are_those_of_the_users_arguments():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("d"))
    scale = Variable(3.0)
    for given in (split, (split,)):
        f = tg.trace(lambda x: scale * x, in_shardings=given, out_shardings=split)
        assert f(np.ones(8, "float32")).sharding == split
    ones = np.ones(8, "float32")
    several = tg.trace(lambda *xs, y=2.0: scale * sum(xs) * y, in_shardings=split)
    optional = tg.trace(lambda x, y=2.0: scale * x * y, in_shardings=split)
    for _ in range(2):  # one sharding is for any number of arguments
        assert [several(ones)[0], several(ones, ones)[0]] == [6, 12]
        assert [optional(ones)[0], optional(ones, ones)[0]] == [6, 3]


def test_what_several_threads_add_is_all_there():
    v, ours = tg.Variable(0.0), jnp.float32(1.0)

    def work():
        for _ in range(50):
            v.assign_add(1.0)
            v.assign_sub(ours)
            v.assign_add(ours)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        at_once(3 * [work])
    finally:
        sys.setswitchinterval(before)
    assert float(v) == 150
    with pytest.raises(ValueError, match="shape"):
        v.assign_add(jnp.ones(2))
    tg.trace(lambda: v.assign_add(1.0))()  # it is nobody's after that
    assert (float(v), float(ours)) == (151, 1)


def test_threads_that_train_lose_nothing_and_disturb_none_that_look():
    w, step = counter()
    look = tg.trace(lambda: w.max() - w.min())
    step(), look()

    def train():
        for _ in range(10):
            step()
            float(w[0])

    def watch():
        for _ in range(20):
            assert float(look()) == 0.0

    for _ in range(10):  # each on new threads, with the first loan of each
        at_once([train, train, watch, watch])
    assert float(w[0]) == 201.0


# ---------------------------------------------------------------------------------- host calls


def through_host(kind, host, x):
    """`x`, handed to a function of the host on one of the ways that there are."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    if kind == "pure":
        return jax.pure_callback(host, like, x)
    if kind == "numpy_function":
        return tg.numpy_function(host, [x], like)
    if kind in ("io", "ordered io"):
        return io_callback(host, like, x, ordered="ordered" in kind)
    jax.debug.callback(lambda y: (host(y), None)[1], x, ordered="ordered" in kind)
    return x


HOST_CALLS = ["pure", "io", "ordered io", "debug", "ordered debug", "numpy_function"]


@pytest.mark.parametrize("kind", HOST_CALLS)
def test_a_step_that_fails_on_the_host_leaves_the_old_value(kind):
    w = Variable(np.ones(3, np.float32))
    fails = False

    def host(x):
        if fails:
            raise ValueError("the host fails")
        return np.asarray(x)

    @tg.trace
    def step(x):
        w.assign(through_host(kind, host, w * x))

    step(2.0), step(2.0)
    fails = True
    with pytest.raises(Exception, match="the host fails"):
        step(2.0)
    np.testing.assert_array_equal(w.value, [4.0, 4.0, 4.0])
    fails = False
    step(2.0)
    np.testing.assert_array_equal(w.value, [8.0, 8.0, 8.0])


def test_a_host_function_in_a_solver_may_read_the_variable():
    """On JAX 0.12 the program of the solver is in an object, and no parameter of its operation."""
    v, seen = Variable(np.ones(3, np.float32)), []

    def root(a):
        def equation(y):
            jax.debug.callback(lambda _: seen.append(v.numpy()), y)
            return 2 * y - a

        return lax.custom_root(equation, 0.0, lambda f, y: -f(y) / 2, lambda g, y: y / g(1.0))

    step = tg.trace(lambda x: (v.assign_add(root(x) * jnp.ones(3)), None)[1])
    for _ in range(3):
        step(4.0)
    jax.effects_barrier()
    np.testing.assert_allclose(v.numpy(), 7.0)
    assert seen


@pytest.mark.parametrize("kind", HOST_CALLS)
def test_a_host_function_reads_the_value_from_before_the_step(kind):
    w = Variable(np.ones(3, np.float32))
    seen = []

    def host(x):
        seen.append(float(w.value[0]))
        read = threading.Thread(target=lambda: seen.append(float(w.numpy()[0])), daemon=True)
        read.start()
        read.join(20)
        return np.asarray(x)

    @tg.trace
    def step(x):
        w.assign(through_host(kind, host, w * x))

    for _ in range(3):
        step(2.0)
    assert seen == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert float(w[0]) == 8.0


def test_a_host_function_may_run_a_step_of_its_own():
    w = Variable(np.ones(3, np.float32))
    inner = tg.trace(lambda: w.assign_add(10.0).value[0])
    inner(), inner()
    look = tg.trace(
        lambda x: jax.debug.callback(lambda y: (inner(), None)[1], x) or jnp.sum(w.value) * x
    )
    assert (float(look(1.0)), float(w[0])) == (63.0, 31.0)
    assert (float(look(1.0)), float(w[0])) == (93.0, 41.0)


@pytest.mark.parametrize("size", [3, 300_000])  # large ones run on a thread of XLA's
@pytest.mark.parametrize("how", ["assign", "step", "step that only assigns"])
@pytest.mark.parametrize("kind", ["pure", "io", "debug"])
def test_what_a_step_assigns_is_not_assigned_by_the_host_too(kind, how, size):
    w = Variable(np.ones(size, np.float32))
    assigns = {
        "assign": lambda: w.assign(np.zeros(size, np.float32)),
        "step": tg.trace(lambda: w.assign_add(w)),
        "step that only assigns": tg.trace(lambda: (w.assign(jnp.zeros(size)), None)[1]),
    }[how]
    assigns(), assigns()  # what it compiles it has compiled
    w.assign(np.ones(size, np.float32))

    def host(x):
        assigns()
        return np.asarray(x)

    @tg.trace
    def step(x):
        w.assign(through_host(kind, host, w * x))

    with pytest.raises(Exception, match="one of the two values would be lost"):
        step(2.0)
    seen = []
    read = threading.Thread(target=lambda: seen.append(w.numpy()), daemon=True)
    read.start()
    read.join(20)
    np.testing.assert_array_equal(seen[0], np.ones(size))  # and nobody waits for ever
    assigns()  # outside of the step it may


def test_whether_the_host_is_called_may_depend_on_the_arguments():
    w = Variable(np.zeros(1 << 16, np.float32))
    seen = []

    @tg.trace(static_argnames="tells")
    def step(tells):
        w.assign_add(1.0)
        if tells:
            jax.debug.callback(lambda _: seen.append(float(w.value[0])), 0)

    for tells in (False, True, False, True, True, False):
        step(tells=tells)
    assert seen == [1.0, 3.0, 4.0]
    assert float(w[0]) == 6.0


@pytest.mark.parametrize("other", ["reads", "assigns"])
def test_a_trace_may_wait_for_another_thread_that_calls_a_program_of_other_variables(other):
    a, b = Variable(0.0), Variable(1.0)
    calls = {"reads": lambda: b.value * 2, "assigns": lambda: b.assign_add(1.0).value}
    program = tg.trace(calls[other])
    program()

    with ThreadPoolExecutor(1) as pool:

        @tg.trace
        def step(x):
            k = float(pool.submit(program).result(timeout=30))
            a.assign_add(jnp.sum(x) * k)

        step(jnp.ones(2))
        before, k = float(a), 2.0 if other == "reads" else float(b) + 1
        step(jnp.ones(3))  # traced again, with the Variable lent
        assert float(a) == before + 3 * k


def test_a_program_that_fails_gives_back_what_it_has_borrowed():
    read, assigned = Variable(2.0), Variable(1.0)

    @tg.trace
    def step(x):
        assigned.assign(jnp.log(x) * read)

    with jax.debug_nans(True):
        step(1.0), step(1.0)
        with pytest.raises(FloatingPointError):
            step(-1.0)
    for variable in (read, assigned):  # another thread would wait for a Variable that is lent
        other = threading.Thread(target=variable.assign, args=(3.0,), daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive()
    step(1.0)
    assert (float(read), float(assigned)) == (3.0, 0.0)


def test_a_program_sees_variables_of_one_moment():
    a, b, both = (Variable(jnp.full(8, x)) for x in (100, 0, 100))

    @tg.trace
    def move(k):
        a.assign_sub(k)
        b.assign_add(k)

    @tg.trace
    def swap():
        old = a.value
        a.assign(b.value)
        b.assign(old)

    add_up = tg.trace(lambda: both.assign(a.value + b.value).value)
    move(1), swap(), add_up()

    def watch():
        for _ in range(50):
            assert int(add_up()[0]) == 100

    at_once(
        [
            lambda: [move(k % 5) for k in range(50)],
            lambda: [swap() for _ in range(50)],
            watch,
            watch,
        ]
    )
    assert int(add_up()[0]) == 100


@pytest.mark.parametrize("otherwise", ["returns", "raises"])
def test_a_function_that_catches_everything_gets_the_branch_that_it_would_run(otherwise):
    v = Variable(1.0)
    inner = jax.jit(lambda x: x * v.value)

    @tg.trace
    def f(x):
        v.assign(5.0)
        try:
            return inner(x)
        except BaseException:
            if otherwise == "raises":
                raise ValueError("caught") from None
            return -x

    assert f(2.0) == f(2.0) == 10.0


CUT = {
    "eager": jax.grad,
    "eager, of tracegrad": tg.grad,
    "traced": lambda f: tg.trace(jax.grad(f)),
    "traced, with the value": lambda f: tg.trace(lambda x: jax.value_and_grad(f)(x)[1]),
    "of a traced function": lambda f: jax.grad(tg.trace(f)),
    "of a traced function, of tracegrad": lambda f: tg.grad(tg.trace(f)),
    "of a traced function, a VJP": lambda f: lambda x: jax.vjp(tg.trace(f), x)[1](1.0)[0],
}


@pytest.mark.parametrize("slope", CUT.values(), ids=CUT)
def test_a_gradient_that_an_assignment_cuts_is_warned_of(slope):
    v = Variable(1.0, name="scale")

    def loss(x):
        v.assign(x * x)
        return v.value * x

    line = f"test_variable_capture.py:{inspect.getsourcelines(loss)[1] + 1}"
    told = rf"'scale' is read after it was assigned .*being differentiated \(.*{line}\)"
    with pytest.warns(UserWarning, match=told):
        assert float(slope(loss)(3.0)) == 9.0  # and not 27: x * x has no gradient
    assert float(v) == 9.0


@pytest.mark.parametrize("slope", CUT.values(), ids=CUT)
def test_a_state_that_is_assigned_and_not_read_again_is_healthy(slope):
    mean, x = Variable(1.0), 3.0

    def loss(x):
        y = x * mean.value
        mean.assign(0.5 * (mean.value + y))
        return y

    for _ in range(2):
        slope(loss)(x)
        mean.value
    stopped, frozen, replaced = Variable(1.0), Variable(1.0, trainable=False), Variable(1.0)

    def with_others(x):
        stopped.assign(jax.lax.stop_gradient(x * x))
        frozen.assign(x * x)
        replaced.assign(x * x).assign(2.0)
        return (stopped.value + frozen.value + replaced.value) * x

    assert float(slope(with_others)(x)) == 20.0


# ------------------------------------------------------------------------------------- lifetime


def test_a_program_of_a_variable_that_is_gone_is_not_used():
    class Holder:
        w = None

    @tg.trace
    def f(x):
        return Holder.w * x

    for value in (1.0, 2.0):
        Holder.w = Variable(value)
        assert f(3.0) == 3 * value
        Holder.w = None
        gc.collect()


def test_a_function_that_makes_a_new_variable_at_each_trace_gives_right_results_all_the_same():
    f = tg.trace(lambda x: Variable(2.0) * x)
    assert [float(f(x)) for x in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
