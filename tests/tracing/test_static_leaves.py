"""Leaves that are no arrays: static wherever a function takes them, None in gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad import match, rules

MODEL = eqx.filter_jit(eqx.nn.MLP)(3, "scalar", 4, 2, activation=jax.nn.gelu, key=jax.random.key(0))
X, Y = jnp.asarray(np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)), jnp.ones(5)
DOT = match.op("dot_general")


def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@functools.cache
def by_equinox():
    """Value and gradient."""
    return eqx.filter_jit(eqx.filter_value_and_grad(loss))(MODEL, X, Y)


def assert_same_tree(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


VALUES = {
    "trace": tg.trace(loss),
    "graph": lambda *args: tg.graph(loss, *args).to_callable()(*args),
    "rewrite": tg.rewrite(loss, rules.scale_gradient(DOT, 2.0)),
    "intermediates": lambda *args: tg.intermediates(loss, *args, where=DOT)[0],
    # By the model: of a few hundred bytes what XLA holds is its rounding.
    "plan_recompute": lambda *args: tg.plan_recompute(
        loss, *args, memory_budget="90%", measure=False
    ).apply()(*args),
}


@pytest.mark.parametrize("way", VALUES)
def test_a_model_with_functions_among_its_leaves_is_an_argument(way):
    np.testing.assert_allclose(VALUES[way](MODEL, X, Y), by_equinox()[0], rtol=1e-5)


GRADIENTS = {
    "grad": tg.grad(loss),
    "by name": tg.grad(loss, wrt="model"),
    "value_and_grad": lambda *args: tg.value_and_grad(loss)(*args)[1],
    "unconnected raise": tg.grad(loss, unconnected="raise"),
    "sparse": tg.grad(loss, sparse=True),
    "jacobian": tg.jacobian(loss),
    "of a rewritten function": tg.grad(tg.rewrite(loss, rules.scale_gradient(DOT, 1.0))),
    "traced": lambda *args: tg.trace(tg.grad(loss))(*args),
    "filter_grad traced": lambda *args: tg.trace(eqx.filter_grad(loss))(*args),
}


@pytest.mark.parametrize("way", GRADIENTS)
def test_a_gradient_has_the_tree_of_the_model_with_none_for_what_is_no_float(way):
    assert_same_tree(GRADIENTS[way](MODEL, X, Y), by_equinox()[1])


def small_model():
    build = eqx.filter_jit(eqx.nn.MLP)
    return build(1, "scalar", 1, 1, activation=jnp.tanh, key=jax.random.key(1))


def test_second_derivatives_have_none_there_too():
    small, x, y = small_model(), jnp.ones((1, 1)), jnp.ones(1)
    arrays, others = eqx.partition(small, eqx.is_inexact_array)
    direction = jax.tree.map(jnp.ones_like, arrays)

    @jax.jit
    def by_hand(arrays):
        def of_arrays(arrays):
            return loss(eqx.combine(arrays, others), x, y)

        product = jax.jvp(jax.grad(of_arrays), (arrays,), (direction,))[1]
        return jax.hessian(of_arrays)(arrays), product

    @tg.trace
    def both(small, x, y):
        return tg.hessian(loss)(small, x, y), tg.hvp(loss, (small, x, y), direction)

    hand, expected = by_hand(arrays)
    got, product = both(small, x, y)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(hand), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert_same_tree(product, expected)


def test_tangents_are_none_where_there_is_no_array_and_where_nothing_moves():
    small = small_model()
    direction = jax.tree.map(jnp.ones_like, eqx.filter(small, eqx.is_inexact_array))
    partly = eqx.tree_at(lambda tree: tree.layers[0].weight, direction, None)

    def value(model):
        return model(jnp.ones(1))

    for tangent in (direction, partly):
        _, expected = eqx.filter_jvp(value, (small,), (tangent,))
        np.testing.assert_allclose(tg.jvp(value, (small,), (tangent,))[1], expected, rtol=1e-6)
        with tg.ForwardAccumulator(small, tangent) as accumulator:
            result = value(small)
        np.testing.assert_allclose(accumulator.jvp(result), expected, rtol=1e-6)
    moved, tangents = tg.jvp(lambda model: (model, "name"), (small,), (direction,))
    assert moved[0].activation is small.activation
    assert jax.tree.structure(tangents) == jax.tree.structure((direction, None))
    wrong = eqx.tree_at(
        lambda tree: tree.activation, direction, jnp.ones(()), is_leaf=lambda x: x is None
    )
    with pytest.raises(TypeError, match=r"primals\.0\.activation is .* no array: its tangent is"):
        tg.jvp(value, (small,), (wrong,))


def test_a_setting_of_a_model_has_no_tangent_and_takes_none():
    model, direction = Scaled(jnp.float32(3.0), 0.5), jnp.float32(2.0)
    moved, tangent = tg.jvp(lambda m: m, (model,), (Scaled(direction, None),))
    assert (moved.scale, tangent.scale, float(tangent.weight)) == (0.5, None, 2.0)
    with pytest.raises(TypeError, match=r"primals\.0\.scale is 0\.5, which is no array"):
        tg.jvp(lambda m: m, (model,), (Scaled(direction, 1.0),))


def test_insight_takes_models():
    assert "nothing found" in str(tg.explain(loss, MODEL, X, Y))
    assert "dot_general" in str(tg.show(loss, MODEL, X, Y))
    assert not tg.check_grads(loss, (MODEL, X, Y), order=1).wrong
    with pytest.raises(TypeError, match=r"args is a tuple of arguments.*got MLP"):
        tg.check_grads(loss, MODEL, X)


def test_a_change_of_a_static_leaf_traces_again_and_an_equal_one_does_not():
    traced = []

    def scaled(how, x):
        traced.append(how["name"])
        return x * 2 if how["name"] == "double" else x

    program = tg.trace(scaled)
    for name, expected in (("double", 6.0), ("once", 3.0), ("dou" + "ble", 6.0)):
        assert program({"name": name}, 3.0) == expected
    assert traced == ["double", "once"]


def test_a_graph_is_for_the_static_leaves_that_it_was_made_for():
    run = tg.graph(lambda f, x: f(x), jnp.sin, 1.0).to_callable()
    np.testing.assert_allclose(run(jnp.sin, 2.0), jnp.sin(2.0))
    with pytest.raises(TypeError, match="was traced for arguments of the structure"):
        run(jnp.cos, 2.0)


@dataclasses.dataclass(eq=False)
class Scale:
    factor: object


@dataclasses.dataclass
class Rate:
    rate: object


class Scaled(eqx.Module):
    weight: jax.Array
    scale: float = 1.0

    def __call__(self, x, power=1):
        return (self.weight * x) ** power * self.scale

    def doubled(self, x):
        return 2 * self(x)


class StaticCall(eqx.Module):
    weight: jax.Array

    @staticmethod
    def __call__(x):
        return x + 1


def test_objects_without_equality_are_told_apart_and_not_kept():
    program = tg.trace(lambda scale, x: scale.factor * x)
    objects = [Scale(2.0), Scale(3.0)]
    assert [program(scale, 1.0) for scale in objects] == [2.0, 3.0]
    gone = list(map(weakref.ref, objects))
    objects.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    factor = jnp.float32(5.0)
    assert program(Scale(factor), 1.0) == 5.0
    kept = weakref.ref(factor)  # by the program, as a constant
    del program, factor
    gc.collect()
    assert kept() is None


def test_an_object_is_not_printed_at_each_call():
    class Printed:
        count = 0

        def __repr__(self):
            Printed.count += 1
            return "a thousand arrays"

    program = tg.trace(lambda settings, x: 2 * x)
    settings = Printed()
    program(settings, 1.0)
    before = Printed.count
    assert program(settings, 1.0) == 2.0
    assert Printed.count == before


class Unequal:
    def __eq__(self, other):
        return np.array([True, True])

    def __hash__(self):
        return 0


NO_STATIC_LEAVES = {
    "a dataclass": (Rate(2.0), "has no hash"),
    "a namespace": (types.SimpleNamespace(rate=2.0), "has no hash"),
    "a set": ({"a set"}, "has no hash"),
    "no equality": (Unequal(), "no equality"),
}


@pytest.mark.parametrize(("leaf", "words"), NO_STATIC_LEAVES.values(), ids=NO_STATIC_LEAVES)
@pytest.mark.parametrize("before", [False, True])
def test_what_has_no_hash_is_refused_by_its_path_as_by_jit(leaf, words, before):
    call = tg.trace(lambda x, *models: x)
    if before:
        call(1.0, 2.0, {"layers": ["a"]})
    path = rf"argument models\.1\.layers\.0: it is .* of type {type(leaf).__name__}"
    for way in (call, functools.partial(tg.graph, call)):
        with pytest.raises(TypeError, match=path) as found:
            way(1.0, 2.0, {"layers": [leaf]})
        assert words in str(found.value)
    assert call(1.0, 2.0, {"layers": ["a"]}) == 1.0


def test_what_cannot_be_compared_with_another_is_another():
    class Version:
        def __init__(self, number):
            self.number = number

        def __eq__(self, other):
            if other is self:
                return True
            raise NotImplementedError

        def __hash__(self):
            return 0

    call = tg.trace(lambda version, x: x * version.number)
    assert [call(Version(n), 2.0) for n in (1, 2, 3)] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("values", [[object(), 1.0], ["a", "b"]])
@pytest.mark.parametrize("beside", ["a string", 2.0])
def test_an_array_of_objects_is_refused_by_its_path(values, beside):
    call = tg.trace(lambda model: model["x"])
    call({"w": jnp.ones(2), "x": 1.0, "beside": beside})
    model = {"w": np.array(values, dtype=object), "x": 1.0, "beside": beside}
    for way in (call, functools.partial(tg.graph, call)):
        with pytest.raises(TypeError, match=r"at path model(\.w|\['w'\])"):
            way(model)


class Training:
    """A model and its optimiser, in a class of one's own."""

    def __init__(self, rate):
        self.rate, self.steps = rate, tg.Variable(0)
        self.weight = tg.Variable(jnp.ones(3))
        self.layers = [tg.Variable(2.0)]

    def step(self, x):
        variables = [self.weight, *self.layers]
        with tg.GradientTape() as tape:
            loss = jnp.sum(self.weight * x) * self.layers[0]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(self.rate * gradient)
        self.steps.assign_add(1)
        return loss


def test_an_object_of_ones_own_is_an_argument_and_its_variables_live():
    traced, x = tg.trace(Training.step), jnp.ones(3)
    one, two = Training(0.1), Training(0.1)
    for _ in range(3):
        np.testing.assert_allclose(traced(one, x), two.step(x), rtol=1e-6)
    assert one.steps.numpy() == 3
    np.testing.assert_allclose(one.weight.numpy(), two.weight.numpy(), rtol=1e-6)
    np.testing.assert_allclose(traced(two, x), one.step(x), rtol=1e-6)
    gone = [weakref.ref(held) for held in (one, one.weight)]
    del one
    gc.collect()
    assert [ref() for ref in gone] == [None] * 2


def test_what_is_no_array_comes_back_in_results_as_it_was():
    step = tg.trace(lambda model, x: (model, jax.vmap(model)(x), "text"))
    model = MODEL
    for _ in range(3):
        model, values, text = step(model, X)
        assert model.activation is MODEL.activation
        assert text == "text"
        np.testing.assert_allclose(values, jax.vmap(MODEL)(X), rtol=1e-6)


class Net(eqx.Module):
    size: int
    weight: jax.Array
    rate: float = 0.5
    inference: bool = False

    def __call__(self, x):
        scale = 1.0 if self.inference else self.rate
        return jnp.sum(jnp.zeros(self.size) + self.weight * x) * scale


NET = Net(3, jnp.ones(3))


def test_numbers_of_equinox_modules_are_settings_and_not_trained():
    def step(model, x):
        gradient = eqx.filter_grad(lambda model: model(x))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.5 * g, gradient))

    traced = tg.trace(step)
    for x in (1.0, 2.0):
        got, expected = traced(NET, x), eqx.filter_jit(step)(NET, x)
        assert (got.size, got.rate, got.inference) == (3, 0.5, False)
        assert [type(v) for v in (got.size, got.rate, got.inference)] == [int, float, bool]
        np.testing.assert_allclose(got.weight, expected.weight)


@pytest.mark.parametrize("before", [(2.0, 3.0), (Net(3, jnp.ones(3), jnp.array(0.5)), 1.0)])
def test_they_are_where_the_function_was_called_with_arrays_alone_before(before):
    call = tg.trace(lambda model, x: model(x) if callable(model) else model * x)
    for _ in range(2):
        call(*before)
    assert call(NET, 2.0) == 3.0
    assert call(Net(3, jnp.ones(3), 0.25), 2.0) == 1.5


AROUND = {
    "filter_grad": (eqx.filter_grad, lambda call: call(NET, 2.0).weight),
    "filter_jit": (eqx.filter_jit, lambda call: call(NET, jnp.float32(2.0))),
    "filter_vmap": (eqx.filter_vmap(in_axes=(None, 0)), lambda call: call(NET, jnp.arange(3.0))),
    "trace": (tg.trace, lambda call: call(NET, 2.0)),
    "grad": (tg.grad, lambda call: call(NET, 2.0).weight),
}


@pytest.mark.parametrize(("around", "of"), AROUND.values(), ids=AROUND)
def test_models_go_through_other_transformations_into_what_is_traced(around, of):
    inner = tg.trace(lambda model, x: model(x))
    expected = of(around(lambda model, x: model(x)))
    for _ in range(2):
        np.testing.assert_allclose(of(around(inner)), expected)


def test_the_arrays_of_a_module_that_is_traced_are_inputs_of_its_program():
    one, two = jnp.ones(3), jnp.full(3, 2.0, "float32")
    model, trained, other = Scaled(one), Scaled(two), Scaled(one, 3.0)
    results = [float(tg.trace(each)(2.0)[0]) for each in (model, trained, other)]
    assert results == [2.0, 4.0, 6.0]
    assert not tg.trace(trained).graph(2.0).constants
    assert tg.trace(model.doubled)(2.0)[0] == 4.0
    assert tg.trace(trained.doubled)(2.0)[0] == 8.0
    gradient = eqx.filter_grad(lambda model: jnp.sum(tg.trace(model)(2.0)))(model)
    np.testing.assert_array_equal(gradient.weight, 2.0)
    assert tg.trace(model).__wrapped__ is model


def test_options_count_the_arguments_of_the_module_that_is_traced():
    model = Scaled(jnp.ones(2))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    by_position = tg.trace(model, static_argnums=1, donate_argnums=0)
    by_name = tg.trace(model, static_argnames="power", donate_argnames="x")
    placed = tg.trace(model, static_argnums=1, donate_argnums=0, in_shardings=(device,))
    for call in (by_position, by_name, placed):
        x = jnp.full(2, 3.0)
        np.testing.assert_array_equal(call(x, 2), 9.0)
        assert x.is_deleted()
    np.testing.assert_array_equal(model.weight, 1.0)


@pytest.mark.both_jax
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_grad], ids=["plain", "filter_grad"])
def test_wrappers_of_one_function_share_a_program(wrap):
    traces = []

    def square(x):
        traces.append(x)
        return x**2

    for _ in range(2):
        assert tg.trace(wrap(square))(2.0) == 4.0  # x² and 2 x
    assert len(traces) == 1
    tg.trace(wrap(square), rules=[lambda graph: graph])(2.0)
    assert len(traces) == 2
    traces.clear()
    gone = weakref.ref(square)
    del square
    gc.collect()
    assert gone() is None


def test_paths_of_arrays_beside_integers_are_their_own():
    call = tg.trace(lambda model: model["net"].weight)
    bad = Net(0, np.array([object()], dtype=object), 1.0)
    call({"net": NET, "name": "a"})
    with pytest.raises(TypeError, match=r"at path model\.net\.weight"):
        call({"net": bad, "name": "a"})


def test_numbers_in_other_trees_are_traced():
    def doubled(tree):
        assert all(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
        return jax.tree.map(lambda leaf: 2 * leaf, tree)

    assert tg.trace(doubled)({"rate": 0.5, "sizes": [1, 2]}) == {"rate": 1.0, "sizes": [2, 4]}


def test_gradients_of_settings_are_none_and_selecting_one_is_refused():
    gradient = tg.grad(lambda model: model(2.0))(NET)
    assert (gradient.size, gradient.rate, gradient.inference) == (None, None, None)
    np.testing.assert_allclose(gradient.weight, eqx.filter_grad(lambda m: m(2.0))(NET).weight)
    of_weight = tg.grad(lambda model: model(2.0), wrt=lambda path, _: path == "weight")(NET)
    assert of_weight.rate is None
    with pytest.raises(
        TypeError, match=r"selects model.rate, the number 0\.5 of an equinox module"
    ):
        tg.grad(lambda model: model(2.0), wrt=lambda path, _: path == "rate")(NET)
    assert not tg.explain(lambda model: model(2.0), NET).problems
    assert not tg.check_grads(lambda model: model(2.0), (NET,), order=1).wrong


def test_zeros_of_both_signs_and_no_number_are_told_apart():
    runs = []
    call = tg.trace(lambda model: runs.append(1) or 1.0 / jnp.float32(model.rate))
    found = [call(Net(3, jnp.ones(3), rate)) for rate in (0.0, -0.0, float("nan"), -jnp.nan)]
    np.testing.assert_array_equal(found, [jnp.inf, -jnp.inf, jnp.nan, jnp.nan])
    assert len(runs) == 3


def apply(x, how, *, then=None):
    factor = {"double": 2.0}[how] if isinstance(how, str) else how
    y = how(x) if callable(how) else factor * x
    return y if then is None else then(y)


@pytest.mark.parametrize("by_name", [False, True])
def test_what_was_an_array_may_be_static_at_the_next_call_and_the_other_way_round(by_name):
    runs = []

    def counted(x, how, *, then=None):
        runs.append(how)
        return apply(x, how, then=then)

    call = tg.trace(counted)
    for how, expected in ((3.0, 6.0), ("double", 4.0), (5.0, 10.0), (jnp.square, 4.0), (3.0, 6.0)):
        assert (call(2.0, how=how) if by_name else call(2.0, how)) == expected
    assert call(2.0, 3.0, then=jnp.negative) == -6.0
    assert len(runs) == 4


def test_what_fails_after_calls_that_did_not_fails_with_its_own_error():
    call = tg.trace(apply)
    assert call(2.0, 3.0) == 6.0
    for how, error in (("other", KeyError), (jnp.ones((2, 3)), None), (object(), TypeError)):
        with pytest.raises(error) if error else contextlib.nullcontext():
            call(jnp.ones(3), how)
    with pytest.raises(TypeError, match="incompatible shapes") as found:
        call(jnp.ones(3), jnp.ones(2))
    assert any(entry.name == "apply" for entry in found.traceback)
    assert call(2.0, 3.0) == 6.0


def test_what_it_returns_may_be_static_for_some_arguments_alone():
    call = tg.trace(lambda x: (x, "a vector") if x.ndim else 2 * x)
    for _ in range(2):
        assert call(jnp.float32(3.0)) == 6.0
        vector, name = call(jnp.ones(2))
        assert (vector.shape, name) == ((2,), "a vector")
    shape, name = call.eval_shape(jnp.ones(2))
    assert (shape.shape, name) == ((2,), "a vector")


def test_a_dtype_is_a_setting():
    zeros = tg.trace(lambda options: jnp.zeros(2, options["dtype"]) + options["x"])
    assert zeros({"dtype": jnp.bfloat16, "x": 1}).dtype == jnp.bfloat16
    assert zeros({"dtype": jnp.dtype("float16"), "x": 1}).dtype == jnp.float16


@pytest.mark.both_jax
def test_arguments_with_statics_are_donated_and_sharded_as_others():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    step = tg.trace(lambda model, x: jnp.sum(model["w"]) * x, donate_argnums=0)
    weights = jnp.ones(3)
    assert step({"w": weights, "name": "a"}, jnp.ones(3))[0] == 3.0
    for shardings in ((device, device), ({"w": device, "name": None}, device)):
        moved = tg.trace(lambda model, x: (model["w"] * x, "b"), in_shardings=shardings)
        result, name = moved({"w": jnp.ones(3), "name": "a"}, jnp.ones(3))
        assert (result.devices(), name) == ({jax.devices()[1]}, "b")
    whole = tg.trace(lambda x: {"y": x, "n": "a"}, out_shardings={"y": device, "n": None})
    assert whole(jnp.ones(3))["y"].devices() == {jax.devices()[1]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """A tree that is made of arrays alone, and says so."""

    weight: jax.Array
    bias: jax.Array

    def __post_init__(self):
        for part in (self.weight, self.bias):
            assert isinstance(part, (jax.Array, tg.Variable)), part
            assert part.ndim == 1


def checked():
    return Checked(jnp.ones(2), jnp.zeros(2))


WITH_A_STRING = {"c": checked(), "name": "c"}
CALLS_WITH_CHECKED = {
    "alone": (lambda c: Checked(c.bias, c.weight), ()),
    "beside a function": (lambda c, act: Checked(act(c.bias), c.weight), (jnp.cos,)),
    "in a tree": (lambda c, tree: Checked(tree["c"].bias, c.weight), (WITH_A_STRING,)),
    "beside a Variable": (lambda c, v: Checked(c.bias + v, c.weight), (tg.Variable(1.0),)),
}


@pytest.mark.parametrize(("fun", "rest"), CALLS_WITH_CHECKED.values(), ids=CALLS_WITH_CHECKED)
def test_a_class_that_checks_its_parts_gets_arrays_alone(fun, rest):
    expected = fun(checked(), *rest)
    for run in (
        tg.trace(fun),
        tg.trace(lambda *args: (fun(*args), "text", jnp.sin)),
        tg.rewrite(fun, []),
        lambda *args: tg.graph(fun, *args).to_callable()(*args),
    ):
        for _ in range(2):
            got = run(checked(), *rest)
            got, *others = got if isinstance(got, tuple) else (got,)
            assert_same_tree(got, expected)
            assert others in ([], ["text", jnp.sin])


def test_a_class_that_checks_its_parts_may_hold_a_variable():
    total = tg.Variable(jnp.zeros(2))

    def add(c, how):
        return c.bias.assign_add(how(c.weight)).value

    step = tg.trace(add)
    for count in (1.0, 2.0):
        np.testing.assert_array_equal(step(Checked(jnp.ones(2), total), jnp.square), count)
    np.testing.assert_array_equal(total.value, 2.0)


def test_gradients_of_a_class_that_checks_its_parts():
    gradient = tg.grad(lambda c, act: jnp.sum(act(c.weight) * c.bias))
    got = tg.trace(gradient)(checked(), jnp.sin)
    np.testing.assert_allclose(got.bias, np.sin(np.ones(2)), rtol=1e-6)


def test_the_arguments_of_a_traced_gradient_are_named_as_those_of_its_function():
    graph = tg.trace(eqx.filter_grad(lambda net, x: net(x) ** 2)).graph(NET, 2.0)
    assert list(map(graph.names.get, graph.inputs)) == ["net.weight", "x"]


def test_a_module_whose_call_is_static_is_traced():
    call = tg.trace(StaticCall(jnp.ones(2)))
    assert (call(1.0), call(2.0)) == (2.0, 3.0)
