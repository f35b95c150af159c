"""`trace`: takes what `jax.jit` takes, rejects what it rejects, and shares its programs."""

import copy
import dataclasses
import functools
import gc
import inspect
import operator
import pickle
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tracegrad as tg
from tracegrad import match, rules

pytestmark = pytest.mark.both_jax


def scaled_sum(x, *, scale=1.0):
    """Documentation."""
    return jnp.sum(x) * scale


def test_bare_with_arguments_and_as_a_function_it_is_the_same():
    decorated = tg.trace(scaled_sum)
    with_arguments = tg.trace(keep_unused=True)(scaled_sum)
    x = jnp.arange(3.0)
    assert decorated(x, scale=2.0) == with_arguments(x, scale=2.0) == 6.0


def test_it_has_the_signature_and_the_attributes_of_the_function():
    def scaled(x: float, factor: float = 2.0, *, offset=0.0) -> float:
        """Documentation."""
        return factor * x + offset

    scaled.some_value, scaled.lower = 4, "the user's"
    traced = tg.trace(scaled)
    assert traced.__wrapped__ is scaled
    assert callable(traced)
    assert "scaled" in repr(traced)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(traced, name) == getattr(scaled, name)
    assert inspect.signature(traced) == inspect.signature(scaled)
    assert inspect.getfullargspec(traced) == inspect.getfullargspec(scaled)
    assert inspect.signature(tg.graph(scaled, 1.0).to_callable()) == inspect.signature(scaled)
    assert str(inspect.signature(Doubling().doubled)) == "(x)"
    assert traced.some_value == 4
    assert "multiply" in traced.lower(1.0).as_text()  # attributes hide no methods
    with pytest.raises(AttributeError, match="another_value"):
        _ = traced.another_value


def test_every_call_goes_through_the_graph_and_its_rules():
    seen = []

    def rule(graph):
        seen.append(repr(graph))
        return graph

    traced = tg.trace(jnp.sin, rules=[rule])
    traced(jnp.ones(3))
    traced(jnp.ones(3))
    assert seen == ["<Graph sin(f32[3]) -> (f32[3]), 1 nodes>"]


def test_a_rule_changes_what_is_compiled():
    doubled = tg.edit(tg.match.op("sin"), lambda op, x: 2 * op(x))
    np.testing.assert_allclose(tg.trace(jnp.sin, rules=[doubled, doubled])(1.0), 4 * np.sin(1.0))


def test_it_runs_at_once_where_a_trace_is_told_to():
    half = tg.trace(lambda x: x / 2)

    @jax.jit
    def f(x):
        with jax.ensure_compile_time_eval():
            return x * float(half(jnp.float32(3.0)))

    assert f(2.0) == 3.0


def test_pytrees_and_keywords_come_and_go():
    @tg.trace
    def f(tree, *rest, **named):
        return {"tree": tree, "rest": rest, "named": named, "none": None}

    given = ({"a": 1.0, "b": [2.0, (3.0,)]}, 4.0)
    result = f(*given, k=5.0)
    assert jax.tree.map(float, result) == {
        "tree": {"a": 1.0, "b": [2.0, (3.0,)]},
        "rest": (4.0,),
        "named": {"k": 5.0},
        "none": None,
    }


@pytest.mark.parametrize(
    ("options", "args", "kwargs"),
    [
        ({"static_argnums": 1}, (3.0, 2), {}),
        ({"static_argnums": -1}, (3.0, 2), {}),
        ({"static_argnums": (1,)}, (3.0,), {"n": 2}),
        ({"static_argnames": "n"}, (3.0, 2), {}),
        ({"static_argnames": ("n",)}, (3.0,), {"n": 2}),
        ({"static_argnums": 1, "static_argnames": "n"}, (3.0,), {"n": 2}),
    ],
)
def test_static_arguments_by_position_and_by_name(options, args, kwargs):
    def power(x, n):
        assert isinstance(n, int)
        return functools.reduce(lambda a, b: a * b, [x] * n)

    assert tg.trace(power, **options)(*args, **kwargs) == 9.0
    graph = tg.trace(power, **options).graph(*args, **kwargs)
    assert list(map(graph.names.get, graph.inputs)) == ["x"]


def test_a_method_of_one_object_is_one_function_to_jax():
    class Model:
        @functools.partial(tg.trace, static_argnums=0)
        def twice(self, x):
            return x * 2

    traced_for = []

    @functools.partial(jax.jit, static_argnums=0)
    def apply(f, x):
        traced_for.append(f)
        return f(x)

    model, other = Model(), Model()
    assert [apply(m.twice, 1.0) for m in (model, model, other)] == [2.0] * 3
    assert traced_for == [model.twice, other.twice]
    assert tg.graph(model.twice, 3.0).name == Model.twice.graph(model, 3.0).name == "twice"
    assert "stablehlo" in Model.twice.lower(model, 3.0).as_text()


def test_partials_and_their_names():
    traced = tg.trace(functools.partial(scaled_sum, scale=3.0))
    assert traced(jnp.ones(2)) == 6.0
    assert "@jit_scaled_sum" in traced.lower(jnp.ones(2)).as_text()


def test_compiler_options_reach_the_compiler():
    with pytest.raises(Exception, match="no_such_option"):
        tg.trace(jnp.sin, compiler_options={"xla_no_such_option": True})(1.0)


TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(f)(2.0),
    "jit": lambda f: jax.jit(f)(2.0),
    "vmap": lambda f: jax.vmap(f)(jnp.arange(3.0)),
    "jvp": lambda f: jax.jvp(f, (2.0,), (1.0,)),
    "linearize": lambda f: jax.linearize(f, 2.0)[1](1.0),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c), f(x)), 1.0, jnp.arange(3.0)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(2.0),
    "hessian": lambda f: jax.hessian(f)(2.0),
    "make_jaxpr": lambda f: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(f)(2.0))(2.0),
    "eval_shape": lambda f: jnp.ones((), jax.eval_shape(f, 2.0).dtype),
    "export": lambda f: jax.export.export(f)(2.0).call(2.0),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_it_runs_under_every_transformation(name):
    def f(x):
        return jax.nn.relu(jnp.sin(x)) * tg.stop_gradient(x)

    apply = TRANSFORMATIONS[name]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, apply(tg.trace(f)), apply(jax.jit(f)))


def test_it_closes_over_values_that_are_being_traced():
    def outer(y):
        return tg.trace(lambda x: x * y)(2.0)

    assert jax.grad(outer)(3.0) == 2.0
    np.testing.assert_array_equal(jax.vmap(outer)(jnp.arange(3.0)), [0.0, 2.0, 4.0])
    assert jax.jit(jax.grad(outer))(3.0) == 2.0


def test_symbolic_shapes_are_exported():
    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3"), "float32")
    exported = jax.export.export(tg.trace(lambda x: jax.nn.softmax(x)))(spec)
    x = np.ones((5, 3), "float32")
    np.testing.assert_allclose(exported.call(x), x / 3, rtol=1e-6)


# ------------------------------------------------------------------------------------------ caches


class Equal:
    """Functions of one hash, all of which are equal."""

    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1

    def __call__(self, x):
        return self.factor * x


def test_functions_that_are_equal_have_programs_of_their_own():
    first, second = tg.trace(Equal(2.0)), tg.trace(Equal(3.0))
    assert (first(1.0), second(1.0)) == (2.0, 3.0)
    del first
    gc.collect()
    assert float(second(jnp.float16(1.0))) == 3.0
    third = tg.trace(Equal(4.0))
    assert (second(1.0), third(1.0)) == (3.0, 4.0)


def test_a_callable_that_has_no_hash_is_traced_as_it_is_now():
    @dataclasses.dataclass
    class Times:
        factor: float

        def __call__(self, x):
            return self.factor * x

    times = Times(2.0)
    assert tg.trace(times)(1.0) == 2.0
    times.factor = 3.0
    assert tg.trace(times)(1.0) == 3.0


def test_rules_that_are_equal_are_two_rules():
    class Scaled(Equal):
        def __call__(self, graph):
            return rules.scale_gradient(match.op("sin"), self.factor)(graph)

    f = jnp.sin
    gradients = [jax.grad(tg.trace(f, rules=[Scaled(n)]))(0.0) for n in (2.0, 3.0)]
    assert gradients == [2.0, 3.0]


def assigning(v, x):
    def f():
        v.assign(x * v)

    return f


def by_shape(v, x):
    def f(y):
        return x + y * v if y.ndim else x + y

    return f


HOLDING = {
    "called": (lambda v, x: lambda: x, lambda f: f()),
    "compiled": (lambda v, x: lambda: x, lambda f: f.lower().compile()),
    "reads": (lambda v, x: lambda: x * v, lambda f: f()),
    "assigns": (assigning, lambda f: f()),
    "given": (lambda v, x: lambda u: x * u, lambda f: f(tg.Variable(1.0))),
    "recomputes": (
        lambda v, x: lambda y: jnp.sum(jax.checkpoint(jnp.sin)(x * y)),
        lambda f: f(1.0),
    ),
    "differentiated": (lambda v, x: lambda y: jnp.sum(x * y), lambda f: jax.grad(f)(1.0)),
    "varies": (by_shape, lambda f: (f(1.0), f(np.ones(10, np.float32)))),
}


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize(("make", "call"), HOLDING.values(), ids=HOLDING)
def test_what_it_held_is_gone_with_the_last_reference_to_it(make, call, count):
    variable, x = tg.Variable(np.ones(10, np.float32)), jnp.full(10, 3.0)
    held, also_held = weakref.ref(x), weakref.ref(variable)
    fun = make(variable, x)
    traced = tg.trace(fun)
    del variable, x
    gc.disable()
    try:
        for _ in range(count):
            call(traced)
        del fun
        assert held() is not None
        if count:
            call(traced)
        del traced
        assert held() is also_held() is None
    finally:
        gc.enable()


def test_it_may_be_called_from_many_threads():
    traced = tg.trace(lambda x: jnp.sin(x) * 2)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(traced, np.ones(8, np.float32)))
    np.testing.assert_allclose(results, 2 * np.sin(1.0), rtol=1e-6)


def test_a_global_changed_between_two_graphs_is_seen():
    scale = [2.0]

    def f(x):
        return x * scale[0]

    assert tg.graph(f, 1.0).to_callable()(1.0) == 2.0
    scale[0] = 3.0
    assert tg.graph(f, 1.0).to_callable()(1.0) == 3.0


# ---------------------------------------------------------------------------------------- bad input


OBJECTS = np.array([None])


def branches(x):
    if x > 0:
        return x
    return -x


BAD_VALUES = {
    "if x > 0:": (branches, jax.errors.TracerBoolConversionError, "jnp.where"),
    "sum(range(n))": (
        lambda n: sum(range(n)),
        jax.errors.TracerIntegerConversionError,
        "fori_loop",
    ),
    "np.sin(x)": (lambda x: np.sin(x), jax.errors.TracerArrayConversionError, "jax.numpy"),
    "float(x)": (lambda x: float(x), jax.errors.ConcretizationTypeError, "static_argn"),
}


def seen_as_graph(fun):
    return functools.partial(tg.graph, fun)


@pytest.mark.parametrize("line", BAD_VALUES)
@pytest.mark.parametrize("wrap", [tg.trace, seen_as_graph])
def test_python_on_a_traced_value_names_the_line_and_the_way_out(line, wrap):
    fun, error, advice = BAD_VALUES[line]
    with pytest.raises(error) as caught:
        wrap(fun)(1)
    notes = "\n".join(caught.value.__notes__)
    for words in ("test_trace.py", line, advice):
        assert words in notes


REJECTED = {
    "not callable": (lambda wrap: wrap(3), TypeError),
    "generator": (lambda wrap: wrap(lambda x: (yield x)), TypeError),
    "no such position": (lambda wrap: wrap(lambda x: x, static_argnums=3), ValueError),
    "an array of objects": (lambda wrap: wrap(lambda x: x)(OBJECTS), TypeError),
    "unhashable": (lambda wrap: wrap(lambda x, n: x, static_argnums=1)(1.0, [1]), ValueError),
    "result of objects": (lambda wrap: wrap(lambda x: OBJECTS)(1.0), TypeError),
    "too many arguments": (lambda wrap: wrap(branches)(1.0, 2.0), TypeError),
}


@pytest.mark.parametrize("case", REJECTED)
def test_it_rejects_what_jit_rejects_in_the_same_words(case):
    build, error = REJECTED[case]

    def message(wrap):
        with pytest.raises(error) as caught:
            build(wrap)
        text = str(caught.value)
        return " ".join(word for word in text.split() if "0x" not in word)

    assert message(tg.trace) == message(jax.jit)


def test_a_part_of_a_reference_is_named():
    refused = TypeError, NotImplementedError  # the latter by JAX before 0.12, without words
    with pytest.raises(refused, match=r"^$|is a part of a reference"):
        tg.trace(lambda part: part[...])(jax.new_ref(jnp.zeros(2)).at[0])


def test_graph_rejects_it_too():
    with pytest.raises(TypeError, match="expected a function to trace, got 3 of type int"):
        tg.graph(3)
    with pytest.raises(TypeError, match=r"numpy.ndarray.*path x"):
        tg.graph(lambda x: x, OBJECTS)


@pytest.mark.parametrize("rules", [3, [3], None])
@pytest.mark.parametrize("takes_rules", [tg.trace, tg.rewrite])
def test_rules_that_are_no_functions_are_named(takes_rules, rules):
    with pytest.raises(TypeError, match=f"one or a list; got {re.escape(repr(rules))}"):
        takes_rules(jnp.sin, rules=rules)


@pytest.mark.parametrize("takes_rules", [tg.trace, tg.rewrite])
def test_one_rule_needs_no_list(takes_rules):
    rule = tg.rules.scale_gradient(tg.match.op("sin"), 2.0)
    for given in (rule, [rule], (rule,)):
        assert jax.grad(takes_rules(jnp.sin, rules=given))(0.0) == 2.0


def test_what_is_over_before_it_has_run_is_refused():
    async def fetched(x):
        return x

    def each(x):
        yield x

    for ask in (lambda fun, _: tg.trace(fun), tg.graph, tg.explain):
        with pytest.raises(TypeError, match="which is async"):
            ask(fetched, 1.0)
        with pytest.raises(TypeError, match="generator"):
            ask(each, 1.0)


RULE = rules.strong_zero()
RIGHT_CALLS = [
    (lambda f: tg.rewrite(f, RULE, RULE), "tracegrad.rewrite(f, [rules.strong_zero()"),
    (lambda f: tg.trace(RULE)(f), "tracegrad.trace(fun, rules=rule)"),
    (lambda f: tg.rewrite(RULE, f)(jnp.ones(2)), "tracegrad.rewrite(fun, rule)"),
]


@pytest.mark.parametrize(("call", "shown"), RIGHT_CALLS)
def test_what_does_not_belong_by_position_is_shown_the_right_call(call, shown):
    def f(x):
        return 2 * x

    with pytest.raises(TypeError, match=re.escape(shown)):
        call(f)


class Doubling:
    @tg.trace
    def doubled(self, x):
        return 2 * x


def test_a_traced_function_is_copied_as_any_function():
    assert copy.deepcopy({"apply": tg.trace(jnp.sin)})["apply"](0.0) == 0.0
    assert copy.copy(Doubling().doubled)(2.0) == 4.0


@pytest.mark.parametrize("of", [seen_as_graph, tg.trace])
def test_what_a_jit_inside_takes_as_static_is_to_be_static_outside(of):
    f = jax.jit(lambda x, n: x * n, static_argnums=1)
    with pytest.raises(ValueError, match="Non-hashable static") as caught:
        of(f)(jnp.ones(3), 2)
    assert "static_argnums=1" in "".join(caught.value.__notes__)
    assert tg.trace(f, static_argnums=1)(jnp.ones(3), 2).tolist() == [2, 2, 2]


@tg.custom_gradient
def annotated(x):
    return 3 * x, lambda dy: dy


def test_an_annotated_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(annotated)) is annotated
    assert jax.grad(copy.deepcopy({"f": tg.recompute_grad(jnp.sin)})["f"])(0.0) == 1.0
    passed = pickle.loads(pickle.dumps(tg.grad_pass_through(operator.neg)))
    assert jax.grad(passed)(0.4) == 1.0


def test_an_exception_of_the_user_comes_with_the_users_frames_and_none_of_ours():
    def loss(x):
        return helper(x)

    def helper(x):
        raise RuntimeError("out of cheese")

    with pytest.raises(RuntimeError, match="out of cheese") as caught:
        tg.trace(loss)(1.0)
    frames = [(entry.path.name, entry.name) for entry in caught.traceback]
    here = "test_trace.py"
    assert frames[0][0] == here
    assert frames[-2:] == [(here, "loss"), (here, "helper")]
    assert [frame for frame in frames if frame[0] != here] == [("traced.py", "__call__")]


@pytest.mark.filterwarnings("ignore:Python iterable type")
def test_a_generator_as_a_result_is_refused_by_its_path():
    for result in (lambda x: (i * x for i in range(3)), lambda x: {"y": iter([x])}):
        with pytest.raises(
            TypeError, match=r"result.*would compute after the function is over.*Return a list"
        ):
            tg.trace(result)(1.0)


def test_an_error_about_a_graph_comes_without_our_frames():
    stop = tg.rules.stop_gradient(tg.match.op("sine"))
    calls = [tg.trace(jnp.sin, rules=[stop]), tg.rewrite(jnp.sin, stop)]
    for call in calls:
        with pytest.raises(tg.NoMatchError) as caught:
            call(1.0)
        assert len(caught.traceback) <= 3  # this line, and the way in


def test_a_graphs_function_rejects_other_types_and_trees():
    f = tg.graph(lambda x: x * 2, jnp.ones(3)).to_callable()
    np.testing.assert_array_equal(f(np.ones(3, "float32")), [2, 2, 2])
    with pytest.raises(TypeError, match=r"traced for x: f32\[3\].*f32\[4\]"):
        f(jnp.ones(4))
    with pytest.raises(TypeError, match="structure"):
        f([jnp.ones(3)])


def test_what_is_compiled_ahead_is_called_as_the_function_is():
    class Counting(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.count[...] += 1
            return 2 * x

    module, total, x = Counting(), tg.Variable(1.0), jnp.float32(3.0)
    of_module = tg.trace(lambda module, x: module(x)).lower(module, x).compile()
    assert isinstance(of_module, jax.stages.Compiled)
    assert [float(of_module(module, x)), float(of_module(module, x))] == [6.0, 6.0]
    assert float(tg.trace(module).lower(x).compile()(x)) == 6.0
    assert int(module.count[...]) == 3
    tree = {"act": jnp.sin, "name": "a"}
    of_statics = tg.trace(lambda tree, x: (tree["act"](x), tree["name"])).lower(tree, x).compile()
    assert of_statics(tree, x) == (jnp.sin(x), "a")
    one, two = tg.Variable(10.0), tg.Variable(20.0)
    of_variables = tg.trace(lambda v, x: v.assign_add(x) + total.assign_add(x))
    add = of_variables.lower(one, x).compile()
    assert [float(add(one, x)), float(add(one, x))] == [17.0, 23.0]
    for wrong in ((two, x), (one, jnp.ones(2))):
        with pytest.raises(TypeError):
            add(*wrong)
    assert (float(one), float(two), float(total)) == (16.0, 20.0, 7.0)
