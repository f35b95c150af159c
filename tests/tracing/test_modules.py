"""Modules of flax.nnx as arguments: what a traced function assigns in them is there afterwards."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tracegrad as tg
from tracegrad import match, rules

X = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)
ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1, momentum=0.9)
DOUBLE = rules.scale_gradient(match.op("tanh"), 2.0)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Noisy(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(super().__call__(x)))


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(3))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def train_step(model, optimizer, x):
    value, gradient = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, gradient)
    return value


def adam(model):
    return nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def arrays_of(*modules):
    leaves = jax.tree.leaves(nnx.state(modules))
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [jax.random.key_data(x) if key else x for key, x in zip(is_key, leaves, strict=True)]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def rewritten(fun):
    return tg.rewrite(fun, [])


def seen_as_graph(fun):
    return functools.partial(tg.graph, fun)


COMPILED = {
    "alone": tg.trace,
    "donated": tg.trace(donate_argnums=(0, 1)),
    "donated by name": tg.trace(donate_argnames=("model",)),
    "in nnx.jit": lambda f: nnx.jit(tg.trace(f)),
    "in another trace": lambda f: tg.trace(lambda *args: tg.trace(f)(*args)),
    "under a rule that matches nothing": tg.trace(
        rules=[rules.scale_gradient(match.op("sin"), 2.0, missing_ok=True)]
    ),
    "rewritten": rewritten,
    "as a graph": lambda f: lambda *args: tg.graph(f, *args).to_callable()(*args),
}


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("kind", [Plain, Noisy])
def test_training_goes_as_under_nnx_jit(compiled, kind):
    model, expected = kind(nnx.Rngs(0)), kind(nnx.Rngs(0))
    optimizer, other = (nnx.Optimizer(m, SGD, wrt=nnx.Param) for m in (model, expected))
    step, reference = COMPILED[compiled](train_step), nnx.jit(train_step)
    for _ in range(3):
        np.testing.assert_allclose(
            step(model, optimizer, X), reference(expected, other, X), rtol=1e-5
        )
    assert_same(arrays_of(model, optimizer), arrays_of(expected, other))


def test_metrics_random_streams_and_trees_of_modules_are_state_too():
    def step(models, rngs, metrics, x):
        noise = jax.random.normal(rngs.noise(), x.shape)
        value = jnp.mean(models["student"](x + noise) - models["teacher"][0](x))
        metrics.update(loss=value)
        return value

    def run(compile):
        models = {"student": Noisy(nnx.Rngs(0)), "teacher": [Noisy(nnx.Rngs(1))]}
        rngs = nnx.Rngs(noise=7)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
        compiled = compile(step)
        values = [compiled(models, rngs, metrics, X) for _ in range(3)]
        state = arrays_of(models["student"], models["teacher"], rngs, metrics)
        return [*values, metrics.compute()["loss"], *state]

    assert_same(run(tg.trace), run(nnx.jit))


class Fields(NamedTuple):
    """Of which flax takes the last first."""

    second: Any
    first: Any


def test_fields_of_a_named_tuple_in_an_order_that_is_not_flax_s():
    # As the states of optax.MultiSteps and of schedule-free optimisers are.
    class Holder(nnx.Module):
        def __init__(self, one):
            self.fields = nnx.data(Fields(nnx.Param(one), Fields(one, nnx.Param(one))))

    def step(holder):
        inner = holder.fields.first
        holder.fields.second[...] *= inner.second
        inner.first[...] += 10

    holder = Holder(jnp.float32(2.0))  # one array, three times
    stepping = tg.trace(step)
    stepping(holder)
    stepping(holder)
    fields = holder.fields
    assert (fields.second[...], fields.first.second, fields.first.first[...]) == (8.0, 2.0, 22.0)
    ends = ("second", "first.second", "first.first")
    assert list(tg.graph(step, holder).hints) == [f"holder.fields.{end}" for end in ends]


def test_what_is_one_object_is_one_inside_and_a_circle_ends():
    class Circle(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)
            self.tied = nnx.Dict(again=self.linear, weight=self.linear.kernel)
            self.itself = self

    @tg.trace
    def step(a, b, x):
        assert a is b.itself
        assert a.linear is b.tied["again"]
        assert a.linear.kernel is b.tied["weight"]
        a.linear.kernel[...] += 1.0
        b.tied["weight"][...] *= 2.0
        return b.itself.itself.linear(x)

    model = Circle(nnx.Rngs(0))
    linear, kernel, before = model.linear, model.linear.kernel, model.linear.kernel[...]
    result = step(model, model, X)
    assert model.linear is linear is model.tied["again"]
    assert model.linear.kernel is kernel is model.tied["weight"]
    np.testing.assert_allclose(kernel[...], 2 * (before + 1), rtol=1e-6)
    np.testing.assert_allclose(result, X @ kernel[...], rtol=1e-5)


def test_other_references_are_another_program():
    @tg.trace
    def step(a, b):
        a.scale[...] += 1.0
        b.scale[...] *= 3.0

    def scaled(value):
        module = Scaled()
        module.scale[...] = value * jnp.ones(3)
        return module

    one, other, both = scaled(1.0), scaled(2.0), scaled(1.0)
    step(one, other)
    step(both, both)
    step(one, other)
    assert [float(m.scale[0]) for m in (one, other, both)] == [3.0, 18.0, 6.0]


def test_variables_alone_those_of_trees_and_plain_arrays_are_state():
    class Mixed(nnx.Module):
        def __init__(self):
            self.array = jnp.ones(2)
            self.tree = nnx.Variable({"a": jnp.zeros(2), "b": jnp.ones(())})

    @tg.trace
    def step(variable, mixed):
        variable[...] += 1.0
        mixed.array = mixed.array + 2.0
        mixed.tree.set_value({**mixed.tree.get_value(), "b": mixed.array[0]})

    variable, mixed = nnx.Param(jnp.zeros(3)), Mixed()
    assert {"mixed.tree.a", "mixed.tree.b"} < set(step.graph(variable, mixed).hints)
    for _ in range(2):
        step(variable, mixed)
    assert_same([variable[...], mixed.array], [[2, 2, 2], [5, 5]])
    assert_same([mixed.tree["a"], mixed.tree["b"]], [[0, 0], 5])


def test_what_changes_outside_is_seen_and_named():
    model = Noisy(nnx.Rngs(0))
    runs = []
    predict = tg.trace(lambda model, x: runs.append(1) or model(x))

    def check():
        twin = nnx.clone(model)
        np.testing.assert_allclose(predict(model, X), twin(X), rtol=1e-4, atol=1e-5)

    check()
    model.eval()
    check()
    model.linear.bias.set_value(jnp.ones(4, jnp.bfloat16))
    check()
    model.linear = nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(1))
    check()
    check()
    assert len(runs) == 4


def test_after_an_error_inside_a_module_is_as_it_was():
    def fail(model, x):
        model(x)
        model.linear.bias[...] += 1.0
        raise KeyError("mine")

    model = Noisy(nnx.Rngs(0))
    before = arrays_of(model)
    with pytest.raises(KeyError, match="mine"):
        tg.trace(fail)(model, X)
    assert_same(arrays_of(model), before)


def new_variable(model, x):
    model.extra = nnx.Variable(x)


def test_an_array_of_two_modules_is_not_donated():
    def step(model, *, target, x):
        return loss(model, x) - loss(target, x)

    model = Plain(nnx.Rngs(0))
    twin = nnx.clone(model)  # of the same arrays
    for names in (("model", "target"), ("model",), "target"):
        donating = tg.trace(step, donate_argnames=names)
        shared = (
            r"`\w+\.linear\.bias`, and `model\.linear\.bias` and `target\.linear\.bias` are one"
        )
        with pytest.raises(ValueError, match=f"step donates {shared}.*Copy it first"):
            donating(model, target=twin, x=X)
    nnx.update(twin, jax.tree.map(jnp.copy, nnx.state(model)))
    assert float(tg.trace(step, donate_argnames=("model", "target"))(model, target=twin, x=X)) == 0
    assert float(tg.trace(step)(model, target=model, x=X)) == 0


def test_the_first_argument_that_a_partial_leaves_open_is_donated():
    """An argument that is donated, and not returned in full, would be a warning of JAX's."""

    def step(scale, model, x):
        model.bias[...] += 1.0
        return scale * model(x)

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    kernel, was = np.array(model.kernel[...]), model.kernel[...]
    run = tg.trace(functools.partial(step, 2.0), donate_argnums=0)
    for count in (1, 2):
        np.testing.assert_allclose(run(model, jnp.ones((1, 2))), [2 * (kernel.sum(0) + count)])
    assert was.is_deleted()
    np.testing.assert_array_equal(model.kernel[...], kernel)


def test_one_module_twice_is_donated_once():
    def step(a, b, x):
        a.linear.bias[...] += 1.0
        b.linear.bias[...] += 1.0
        return a(x)

    model = Plain(nnx.Rngs(0))
    donating = tg.trace(step, donate_argnums=(0, 1))
    for _ in range(2):
        donating(model, model, X)
    np.testing.assert_allclose(model.linear.bias[...], 4 * jnp.ones(4))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(model)))


class Shared(nnx.Module):
    """In which one layer is met twice, and the module itself again."""

    def __init__(self):
        self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.layers = nnx.List([self.first, self.first])
        self.itself = self


@pytest.mark.parametrize("run", [tg.trace, rewritten], ids=["trace", "rewrite"])
def test_modules_come_back_as_what_they_are(run):
    model = Noisy(nnx.Rngs(0))

    def returned(model, x):
        model(x)
        return {"model": model, "parts": [model.linear, model.linear.kernel], "x": x, "name": "me"}

    for _ in range(2):
        result = run(returned)(model, X)
        assert result["model"] is model
        assert result["parts"][0] is model.linear
        assert result["parts"][1] is model.linear.kernel
        assert result["name"] == "me"
    assert int(model.dropout.rngs.count[...]) == 2

    @run
    def created(x):
        return Noisy(nnx.Rngs(1)), Shared(), x

    for _ in range(2):
        noisy, shared, _ = created(X)
        assert shared.itself is shared
        assert shared.layers[0] is shared.layers[1] is shared.first
        assert_same(arrays_of(noisy, shared), arrays_of(Noisy(nnx.Rngs(1)), Shared()))
        noisy(X)  # they are the caller's
        shared.first.bias[...] += 1.0

    def wrapped(model, x):
        model(x)
        return nnx.List([model]), model.linear.kernel[...]

    for count in (3, 4):
        held, kernel = run(wrapped)(model, X)
        assert held[0] is model
        np.testing.assert_array_equal(kernel, model.linear.kernel[...])
        assert int(model.dropout.rngs.count[...]) == count


def made_on_the_first_call(model, x):
    if not hasattr(model, "extra"):
        model.extra = nnx.BatchNorm(3, rngs=nnx.Rngs(5))
    return model(model.extra(x))


def another_value(model, x):
    model.linear.bias.set_value((x, 2 * x))


def another_layer(model, x):
    model.linear = nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(2))
    return model(x)


def a_layer_twice(model, x):
    model.again = model.linear
    return model.again(x), model.again


def without_a_layer(model, x):
    if hasattr(model, "norm"):
        del model.norm
    return model.linear(x)


def a_setting(model, x):
    model.width = x.shape[0]
    return model.linear(x)


def in_two_modes(model, x):
    model.train()
    trained = model(x)
    model.eval()
    return trained + model(x)


CHANGES = [
    new_variable,
    made_on_the_first_call,
    another_value,
    another_layer,
    a_layer_twice,
    without_a_layer,
    a_setting,
    in_two_modes,
]
RUNS = {
    "trace": tg.trace,
    "nested": COMPILED["in another trace"],
    "rewrite": rewritten,
    "graph": COMPILED["as a graph"],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_change_of_structure_inside_is_there_after_the_call(run, change):
    model, expected = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0))
    linear, calls = model.linear, run(change)
    for _ in range(2):
        got, by_hand = calls(model, X), change(expected, X)
        assert nnx.graphdef(model) == nnx.graphdef(expected)
        assert_same(arrays_of(model), arrays_of(expected))
        if isinstance(got, tuple):
            assert got[1] is model.linear is model.again
            got, by_hand = got[0], by_hand[0]
        if got is not None:
            np.testing.assert_allclose(got, by_hand, rtol=1e-4, atol=1e-5)
    if change is not another_layer:
        assert model.linear is linear


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["kept", "donated"])
def test_parts_that_change_places_inside_have_changed_places(options):
    @tg.trace(**options)
    def exchange(models):
        a, b = models["a"].linear, models["b"].linear
        models["a"].linear, models["b"].linear = b, a
        a.bias[...] += 1.0
        return a

    models = {name: Plain(nnx.Rngs(seed)) for seed, name in enumerate("ab")}
    a, b = models["a"].linear, models["b"].linear
    bias = jnp.copy(a.bias[...])
    assert exchange(models) is a
    assert models["a"].linear is b
    assert models["b"].linear is a
    np.testing.assert_array_equal(a.bias[...], bias + 1.0)


def test_calls_with_arrays_and_then_with_a_module_lose_nothing():
    @tg.trace
    def apply(f, x):
        return f(x) if isinstance(f, nnx.Module) else f * x

    assert float(apply(2.0, 3.0)) == 6.0
    model = Noisy(nnx.Rngs(0))
    apply(model, X)
    apply(model, X)
    assert float(apply(2.0, 3.0)) == 6.0
    assert int(model.dropout.rngs.count[...]) == 2


def test_tools_show_new_values_among_the_results_and_leave_a_module_as_it_is():
    model = Noisy(nnx.Rngs(0))
    before = arrays_of(nnx.clone(model))
    graph, plan = tg.graph(loss, model, X), tg.plan_recompute(loss, model, X, memory_budget="1MiB")
    assert len(graph.outputs) == 4  # the loss, two statistics, the count of random numbers
    assert "model.norm.mean: f32[4]" in str(graph)
    assert "loss" in str(plan)
    assert "self.linear.kernel" in tg.graph(model, X).hints
    assert "self.linear.kernel" in str(tg.show(model, X))
    assert tg.memory(model.__call__, X).total > 0
    assert_same(arrays_of(model), before)
    planned = nnx.clone(model)  # what is run is seen
    np.testing.assert_allclose(plan.apply()(planned, X), loss(nnx.clone(model), X), rtol=1e-5)
    values = tg.intermediates(loss, model, X, where=match.op("tanh"))[1]
    np.testing.assert_allclose(values["Noisy/tanh"], jnp.tanh(model.linear(X)), rtol=1e-5)
    assert [int(each.dropout.rngs.count[...]) for each in (planned, model)] == [1, 1]


def test_modules_are_themselves_where_nothing_is_compiled():
    model = Noisy(nnx.Rngs(0))
    with jax.disable_jit():
        for options in ({}, {"rules": [DOUBLE]}):
            tg.trace(lambda model, x: loss(model, x), **options)(model, X)
    assert int(model.dropout.rngs.count[...]) == 2


def test_modules_go_with_variables_and_static_arguments():
    @tg.trace(static_argnums=0)
    def step(number, variable, model, x):
        model(x)
        variable.assign_add(1.0)
        total.assign_add(variable)
        return number * x

    model, variable = Noisy(nnx.Rngs(0)), tg.Variable(0.0)
    total = tg.Variable(0.0)
    for number in (2, 2, 3, 3):
        np.testing.assert_allclose(step(number, variable, model, X), number * X)
    assert int(model.dropout.rngs.count[...]) == 4
    assert (float(variable), float(total)) == (4.0, 10.0)


def test_threads_train_their_own_modules():
    step = tg.trace(train_step)
    models = [Noisy(nnx.Rngs(0)) for _ in range(4)]

    def train(model):
        optimizer = adam(model)
        for _ in range(3):
            step(model, optimizer, X)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, models))
    for model in models[1:]:
        assert_same(arrays_of(model), arrays_of(models[0]))


def test_state_that_is_returned_trains_as_nnx_jit_does():
    model = Plain(nnx.Rngs(0))
    optimizer = adam(model)
    graphdef, state = nnx.split((model, optimizer))

    @tg.trace
    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        value = train_step(model, optimizer, x)
        return value, nnx.state((model, optimizer))

    expected = nnx.jit(train_step)
    for _ in range(3):
        value, state = step(state, X)
        np.testing.assert_allclose(value, expected(model, optimizer, X), rtol=1e-5)


@pytest.mark.parametrize("run", [tg.trace, rewritten], ids=["trace", "rewrite"])
def test_a_change_of_a_state_that_is_not_returned_is_dropped_with_a_warning(run):
    graphdef, state = nnx.split(Noisy(nnx.Rngs(0)))
    paths = r"state\.dropout\.rngs\.count and 2 more"
    with pytest.warns(UserWarning, match=rf"changes {paths} of an nnx\.State"):
        run(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)


# -------------------------------------------------------------------------- what is not an argument


def closing_over():
    model = Noisy(nnx.Rngs(0))
    return lambda x: model(x)


def training():
    model = Plain(nnx.Rngs(0))
    optimizer = adam(model)
    return lambda x: train_step(model, optimizer, x)


def within_a_loop(x):
    model = Noisy(nnx.Rngs(0))

    def body(carry, _):
        model.linear.bias[...] += 1.0
        return carry, ()

    return jax.lax.scan(body, x, length=2)


CHANGING = {"closed over": closing_over(), "trained": training(), "in a loop": within_a_loop}


@pytest.mark.parametrize("fun", CHANGING.values(), ids=CHANGING)
@pytest.mark.parametrize("run", [tg.trace, seen_as_graph, rewritten, tg.grad])
def test_a_module_that_is_changed_and_no_argument_is_to_be_one(run, fun):
    with pytest.raises((flax.errors.TraceContextError, ValueError), match="trace level") as raised:
        run(fun)(X)
    (note,) = (note for note in raised.value.__notes__ if "changes a module" in note)
    assert "as an argument" in note
    assert "in test_modules" in note or "test_modules.py" in note


class NoTree(nnx.Module, pytree=False):
    pass


def test_a_module_whose_class_is_no_pytree_is_refused_by_its_path():
    add, make = tg.trace(lambda x, models: x), tg.trace(lambda x: {"made": NoTree()})
    for _ in range(2):
        with pytest.raises(TypeError, match=r"argument models\.0: it is a NoTree.*pytree=False"):
            add(X, [NoTree(), NoTree()])
        with pytest.raises(TypeError, match=r"result\.made: it is a NoTree"):
            make(X)
        add(X, [X])


def hijax_watched(model):
    with tg.GradientTape() as tape:
        tape.watch(model)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: tg.trace(model_sum)(model),
        lambda model: tg.grad(model_sum)(model),
        lambda model: tg.explain(model_sum, model),
        hijax_watched,
    ],
    ids=["trace", "grad", "explain", "watch"],
)
def test_a_model_of_hijax_variables_is_refused_with_what_to_do(use):
    with nnx.var_defaults(hijax=True):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"nnx\.with_vars\(model, hijax=False\)"):
        use(model)
    use(nnx.with_vars(model, hijax=False))


def model_sum(model):
    return jnp.sum(model(jnp.ones(2)))


class WithATracedMethod(Noisy):
    @tg.trace
    def traced(self, x):
        return self(x)


PRODUCT = match.op("dot_general")
SAME = rules.scale_gradient(PRODUCT, 1.0)
CALLS = {
    "the module": tg.trace,
    "a method": lambda model: tg.trace(model.__call__),
    "a traced method": lambda model: model.traced,
    "a rewritten module": lambda model: tg.rewrite(model, SAME),
    "a rewritten method": lambda model: tg.rewrite(model.__call__, SAME),
    "intermediates": lambda model: lambda x: tg.intermediates(model, x, where=PRODUCT)[0],
}


@pytest.mark.parametrize("call_of", CALLS.values(), ids=CALLS)
def test_a_module_or_a_method_of_it_is_traced_and_its_updates_are_seen(call_of):
    model = WithATracedMethod(nnx.Rngs(0))
    call, twin = call_of(model), nnx.clone(model)
    for _ in range(3):
        np.testing.assert_allclose(call(X), twin(X), rtol=1e-4, atol=1e-5)
        model.linear.bias[...] += 1.0
        twin.linear.bias[...] += 1.0
    assert_same(arrays_of(model), arrays_of(twin))  # statistics and random counts too
    model.eval()
    twin.eval()
    np.testing.assert_allclose(call(X), twin(X), rtol=1e-4, atol=1e-5)


def test_a_module_that_is_closed_over_is_a_constant_as_under_jit():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    compiled = [wrap(lambda x: model(x)) for wrap in (tg.trace, jax.jit, nnx.jit)]
    first = [call(X) for call in compiled]
    model.bias[...] += 1.0
    for call, before in zip(compiled, first, strict=True):
        np.testing.assert_array_equal(call(X), before)


def test_a_state_beside_the_module_that_it_is_of_is_a_copy():
    @tg.trace
    def step(state, model, x):
        model.linear.bias[...] += 1.0
        return model.linear(x) + jnp.sum(jax.tree.leaves(state)[0])

    model = Plain(nnx.Rngs(0))
    state = nnx.state(model)  # of the same variables
    for count in (1, 2):
        step(state, model, X)
        np.testing.assert_array_equal(model.linear.bias[...], jnp.full(4, count))


# --------------------------------------------------------------------------------------- shardings


def layouts():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    across, along = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        for spec in ((None, "x"), ("x",))
    )
    state = nnx.StateSharding({nnx.PathContains("kernel"): across, nnx.PathContains("bias"): along})
    return across, along, state


def test_shardings_of_flax_lay_out_what_goes_in_what_is_assigned_and_what_comes_out():
    across, along, state = layouts()

    def step(model, factor):
        model.linear.kernel[...] *= factor
        return jnp.sum(model.linear(X))

    model, expected = Plain(nnx.Rngs(0)), Plain(nnx.Rngs(0))
    value = tg.trace(step, in_shardings=(state, None))(model, 2.0)
    np.testing.assert_allclose(value, step(expected, 2.0), rtol=1e-5)
    assert (model.linear.kernel.sharding, model.linear.bias.sharding) == (across, along)

    def fill(model, number):  # XLA sees no array there whose layout it could take over
        model.linear.kernel[...] = jnp.full(model.linear.kernel.shape, number)

    for compiled in (tg.trace, nnx.jit):
        compiled(fill, in_shardings=(state, None))(model, 3.0)
        assert model.linear.kernel.sharding == across
    made = tg.trace(lambda x: {"model": Plain(nnx.Rngs(0)), "x": x}, out_shardings=state)
    result = tg.trace(lambda x: (Plain(nnx.Rngs(0)), x), out_shardings=(state, along))(jnp.ones(4))
    assert (result[0].linear.kernel.sharding, result[1].sharding) == (across, along)
    assert_same(arrays_of(result[0]), arrays_of(Plain(nnx.Rngs(0))))
    assert made(X)["model"].linear.bias.sharding == along
    model = Plain(nnx.Rngs(0))
    of_kernels = nnx.StateSharding({nnx.PathContains("kernel"): across, ...: None})
    tg.trace(Plain.__call__, in_shardings=(of_kernels, None))(model, X)
    assert model.linear.bias.sharding.device_set == across.device_set  # it is on all devices


@pytest.mark.parametrize("graph", [True, False])
def test_shardings_that_flax_makes_along_a_module_lay_it_out(graph):
    across, along, _ = layouts()
    layout = {nnx.PathContains("bias"): along, ...: across}
    of_module = nnx.prefix(Plain(nnx.Rngs(0)), layout, graph=graph)
    made = tg.trace(lambda: Plain(nnx.Rngs(0)), out_shardings=of_module)()
    assert (made.linear.kernel.sharding, made.linear.bias.sharding) == (across, along)
    assert_same(arrays_of(made), arrays_of(Plain(nnx.Rngs(0))))
    of_kernel = nnx.prefix(made.linear.kernel, layout, graph=graph)
    layer = tg.trace(lambda w, model, x: model(x) @ w.T, in_shardings=(of_kernel, of_module, None))
    kernel, model = nnx.Param(jnp.ones((3, 4))), Plain(nnx.Rngs(0))
    np.testing.assert_allclose(layer(kernel, model, X), model(X) @ jnp.ones((4, 3)), rtol=1e-5)
    compiled = layer.lower(kernel, model, X).compile()
    assert [*jax.tree.leaves(compiled.input_shardings)[:3]] == [across, along, across]


class Round(Plain):
    """Refers to itself and, by two names, to one layer; holds a setting and a Variable of ours."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.itself, self.again, self.count = self, self.linear, nnx.Param(3)
        self.total = nnx.data(tg.Variable(1.0))


def replaced(model, layout):
    model.linear.kernel = nnx.Param(jax.lax.with_sharding_constraint(2 * X.T[:, :4], layout))


def assigned(model, layout):
    model.linear.bias[...] = jax.lax.with_sharding_constraint(X[:4, 0], layout)


def nothing(model, layout):
    pass


@pytest.mark.parametrize("change", [replaced, assigned, nothing])
@pytest.mark.parametrize("kind", [Plain, Round])
def test_a_module_comes_back_in_the_layout_that_is_said_whatever_is_changed(kind, change):
    across, along, _ = layouts()
    layout = [(nnx.PathContains("kernel"), across), (nnx.PathContains("bias"), along), (..., None)]
    within = jax.sharding.NamedSharding(across.mesh, jax.sharding.PartitionSpec())
    model, expected = kind(nnx.Rngs(0)), kind(nnx.Rngs(0))
    step = tg.trace(change, static_argnums=1, in_shardings=(nnx.StateSharding(layout),))
    for _ in range(2):
        step(model, within)
        assert (model.linear.kernel.sharding, model.linear.bias.sharding) == (across, along)
    change(expected, within)
    assert_same(arrays_of(model.linear), arrays_of(expected.linear))


def test_one_module_may_be_given_one_sharding_in_two_ways_and_no_two():
    _, along, state = layouts()
    model = Plain(nnx.Rngs(0))
    for again in (nnx.StateSharding({...: along}), along):
        add = tg.trace(lambda a, b: a.linear.bias + b, in_shardings=(state, again))
        np.testing.assert_array_equal(add(model, model.linear.bias), jnp.zeros(4))
    add = tg.trace(lambda a, b: a.linear.bias + b.linear.bias, in_shardings=(None, along))
    with pytest.raises(ValueError, match=r"Inconsistent aliasing.*arguments 0 and 1"):
        add(model, model)


def test_a_partial_of_flax_that_caches_its_modules_trains_them():
    @tg.trace
    def steps(cached, optimizer, model, x):
        assert cached is not model
        assert cached.linear.kernel is model.linear.kernel
        return train_step(cached, optimizer, x), cached

    model, expected = Plain(nnx.Rngs(0)), Plain(nnx.Rngs(0))
    cached, optimizer = nnx.compat.cached_partial(steps, model, adam(model)), adam(expected)
    found = set()
    for _ in range(2):
        value, module = cached(model, X)
        np.testing.assert_allclose(value, train_step(expected, optimizer, X), rtol=1e-5)
        assert module.linear.kernel is model.linear.kernel
        found.add(module)
    assert len(found) == 1
    assert_same(arrays_of(model), arrays_of(expected))


class Holder(nnx.Module):
    """Which holds a Variable of ours, and an array that is in no variable of flax."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))
        self.calls = nnx.data(jnp.zeros(()))
        self.total = nnx.data(tg.Variable(3.0))


def test_a_variable_that_a_module_holds_is_that_variable_before_inside_and_after():
    @tg.trace
    def step(module, x):
        if not hasattr(module, "extra"):
            module.extra = nnx.Param(x)
        return module.total.assign_add(jnp.sum(module.extra[...]))

    module = Holder()
    total = module.total
    for count in (1, 2, 3):
        assert float(step(module, jnp.ones(2))) == 3.0 + 2 * count
        assert module.total is total
    np.testing.assert_array_equal(module.extra[...], jnp.ones(2))


def test_an_array_of_numpy_may_take_the_place_of_one_of_jax():
    @tg.trace
    def reset(module):
        module.calls = np.ones(())

    @tg.trace
    def count(module):
        module.calls = module.calls + 1

    module = Holder()
    for _ in range(2):
        reset(module)
        count(module)
        assert float(module.calls) == 2.0


@pytest.mark.parametrize("layer_is_traced", [False, True])
def test_what_is_sown_in_a_capture_comes_out(layer_is_traced):
    def called(self, x):
        hidden = Plain.__call__(self, x)
        self.sow(nnx.Intermediate, "hidden", 3 * hidden)
        return hidden

    class Sowing(Plain):
        __call__ = tg.trace(called) if layer_is_traced else called

    captured = tg.trace(lambda model, x: nnx.capture(model, nnx.Intermediate)(x))
    model = Sowing(nnx.Rngs(0))
    for _ in range(2):
        result, state = captured(model, X)
        np.testing.assert_array_equal(jax.tree.leaves(state)[0], 3 * result)
