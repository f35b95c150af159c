"""Parameters by name: rules act on their gradients, where `match.param` selects them by path."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.flatten_util import ravel_pytree

import tracegrad as tg
from tests.derivatives import by_tape

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
KEY = jax.random.key(0)


def clipped(max_norm):
    """The reference: a gradient by hand, scaled down to a norm."""

    def clip(g):
        return g * min(1.0, max_norm / float(jnp.linalg.norm(g)))

    return clip


def assert_trees_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def paths_of(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]


def changed_where(gradient, is_meant, change):
    """A gradient in which those leaves are changed whose paths are meant."""
    leaves, structure = jax.tree.flatten(gradient)
    pairs = zip(paths_of(gradient), leaves, strict=True)
    return jax.tree.unflatten(structure, [change(g) if is_meant(p) else g for p, g in pairs])


# --------------------------------------------------------------------- modules of three libraries


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(x)


def loss_of_net(model, x):
    return jnp.sum(model(x) ** 2)


def state_of(model):
    return nnx.state(model, nnx.Param)


RULES = [
    tg.rules.stop_gradient(tg.match.param("head.*")),
    tg.rules.clip_gradient(tg.match.param("layers.*.kernel"), max_norm=0.01),
]
WAYS = {
    "trace": lambda m, x: nnx.grad(tg.trace(loss_of_net, rules=RULES))(m, x),
    "rewrite": lambda m, x: nnx.grad(tg.rewrite(loss_of_net, RULES))(m, x),
    "nnx.grad in a trace": lambda m, x: tg.trace(
        lambda m, x: nnx.grad(loss_of_net)(m, x), rules=RULES
    )(m, x),
    "tg.grad": lambda m, x: state_of(tg.grad(tg.rewrite(loss_of_net, RULES))(m, x)),
    "tg.grad in a trace": lambda m, x: state_of(
        tg.trace(lambda m, x: tg.grad(loss_of_net)(m, x), rules=RULES)(m, x)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_layer_of_nnx_is_frozen_and_the_others_clipped(way):
    model = Net(nnx.Rngs(0))
    expected = changed_where(
        nnx.grad(loss_of_net)(model, X), lambda p: p.startswith("head"), jnp.zeros_like
    )
    expected = changed_where(expected, lambda p: "s.0.k" in p or "s.1.k" in p, clipped(0.01))
    assert_trees_close(jax.tree.leaves(WAYS[way](model, X)), jax.tree.leaves(expected))


def test_a_model_that_is_traced_knows_its_own_parameters():
    rule = tg.rules.stop_gradient(tg.match.param("head.bias"))
    graph = tg.trace(Net(nnx.Rngs(0)), rules=[rule]).graph(X)
    stopped = [node for node in graph.nodes if isinstance(node, tg.ir.StopGradient)]
    assert graph.names[stopped[0].inputs[0]] == "self.head.bias"


def test_parameters_of_linen_are_known_in_a_train_state():
    model = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(1)])
    params = model.init(KEY, X)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1.0))

    def loss(params, apply=model.apply):
        return jnp.sum(apply({"params": params}, X) ** 2)

    @tg.trace(rules=[tg.rules.clip_gradient(tg.match.param("layers_0.*"), max_norm=0.1)])
    def train_step(state):
        return state.apply_gradients(grads=jax.grad(loss)(state.params, state.apply_fn))

    gradient = changed_where(jax.grad(loss)(params), lambda p: "layers_0" in p, clipped(0.1))
    expected = jax.tree.map(lambda w, g: w - g, params, gradient)
    assert_trees_close(train_step(state).params, expected)


def test_parameters_of_equinox_are_known_in_filter_grad():
    model = eqx.nn.MLP(3, 1, 4, 2, key=KEY)

    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    rule = tg.rules.scale_gradient(tg.match.param("layers.[02].weight"), -2)
    expected = changed_where(
        eqx.filter_grad(loss)(model, X),
        ("layers.0.weight", "layers.2.weight").__contains__,
        lambda g: -2 * g,
    )
    for gradient in (
        eqx.filter_jit(eqx.filter_grad(tg.rewrite(loss, rule))),
        tg.trace(lambda model, x: eqx.filter_grad(loss)(model, x), rules=[rule]),
    ):
        found = gradient(model, X)
        assert_trees_close(jax.tree.leaves(found), jax.tree.leaves(expected))


# ------------------------------------------------------------------------------------- trees, paths

PARAMS = {"a": {"w": jnp.array([3.0, 4.0]), "b": jnp.array(2.0)}, "c": [jnp.array([1.0, 1.0])]}


def quadratic(params, x):
    total = params["a"]["b"] * jnp.sum(params["a"]["w"] ** 2) + jnp.sum(params["c"][0] * x)
    return total + jnp.sum(params["a"]["w"])


ONES = jnp.ones(2)
EXPECTED = jax.grad(quadratic)(PARAMS, ONES)


def tripled(*paths):
    """The gradient of `quadratic`, with what these paths name three times as large."""
    return changed_where(EXPECTED, paths.__contains__, lambda g: 3.0 * g)


GLOBS = {
    "params.a.w": ["a.w"],
    "a.w": ["a.w"],
    "a": ["a.w", "a.b"],
    "a.*": ["a.w", "a.b"],
    "*.w": ["a.w"],
    "c.0": ["c.0"],
    "params": ["a.w", "a.b", "c.0"],
    "*": ["a.w", "a.b", "c.0"],
    "[ac].[0b]": ["a.b", "c.0"],
}


@pytest.mark.parametrize("glob", GLOBS)
def test_a_glob_is_for_a_path_or_for_what_holds_it(glob):
    triple = tg.rules.scale_gradient(tg.match.param(glob), 3.0)
    found = jax.grad(tg.rewrite(quadratic, triple))(PARAMS, ONES)
    assert_trees_close(found, tripled(*GLOBS[glob]))


def test_all_uses_of_a_parameter_are_added_up_before_they_are_clipped():
    rule = tg.rules.clip_gradient(tg.match.param("a.w"), max_norm=1.0)
    found = jax.grad(tg.rewrite(quadratic, rule))(PARAMS, ONES)["a"]["w"]
    total = 2 * PARAMS["a"]["b"] * PARAMS["a"]["w"] + 1  # both uses
    np.testing.assert_allclose(found, total / jnp.linalg.norm(total), rtol=1e-6)


def test_a_stopped_parameter_is_unconnected():
    rule = tg.rules.stop_gradient(tg.match.param("a.*"))
    found = tg.grad(tg.rewrite(quadratic, rule), unconnected="none")(PARAMS, ONES)
    assert found["a"] == {"w": None, "b": None}
    np.testing.assert_allclose(found["c"][0], 1.0)
    with pytest.raises(tg.UnconnectedError, match=r"params\.a\.b: "):
        tg.grad(tg.rewrite(quadratic, rule), unconnected="raise")(PARAMS, ONES)


def test_a_result_that_is_a_parameter_carries_its_rule():
    rule = tg.rules.scale_gradient(tg.match.param("x"), 5.0)
    assert jax.grad(tg.rewrite(lambda x: x, rule))(2.0) == 5.0
    assert tg.rewrite(lambda x: x, rule)(2.0) == 2.0


def test_values_and_what_compiles_stay_as_they_are():
    rule = tg.rules.clip_gradient(tg.match.param("a.*"), max_norm=1.0)
    assert tg.trace(quadratic, rules=[rule])(PARAMS, ONES) == quadratic(PARAMS, ONES)
    text = jax.jit(quadratic).lower(PARAMS, ONES).as_text()
    edited = jax.jit(tg.rewrite(quadratic, rule)).lower(PARAMS, ONES).as_text()
    assert edited.count("stablehlo.") == text.count("stablehlo.")


# ------------------------------------------------------------------------- tapes, Variables, orders


def test_variables_are_known_by_their_names():
    w, b = tg.Variable(jnp.array([3.0, 4.0]), name="kernel"), tg.Variable(1.0, name="bias")

    def loss(x):
        return jnp.sum(w * x) + b

    rule = tg.rules.clip_gradient(tg.match.param("kernel"), max_norm=1.0)
    x = jnp.array([3.0, 4.0])
    f = tg.trace(loss, rules=[rule])
    step = tg.trace(lambda x: by_tape(loss, x, sources=[w, b]), rules=[rule])
    for dw, db in (by_tape(f, x, sources=[w, b]), step(x)):
        np.testing.assert_allclose(dw, [0.6, 0.8], rtol=1e-6)
        assert db == 1.0


@pytest.mark.both_jax
@pytest.mark.parametrize("glob", ["model.weight", "weight"])
def test_in_a_jitted_function_parameters_of_equinox_have_the_names_of_the_loss(glob):
    def loss(model, x):
        return jnp.sum(model(x))

    @eqx.filter_jit
    def gradients(model, x):
        return eqx.filter_grad(loss)(model, x)

    rule = tg.rules.scale_gradient(tg.match.param(glob), 3.0)
    model, x = eqx.nn.Linear(2, 1, key=KEY), jnp.array([3.0, 4.0])
    found = tg.trace(lambda m, x: gradients(m, x), rules=[rule])(model, x)
    np.testing.assert_allclose(found.weight, [[9.0, 12.0]], rtol=1e-6)
    np.testing.assert_allclose(found.bias, [1.0], rtol=1e-6)


@pytest.mark.both_jax
@pytest.mark.parametrize("glob", ["params.w", "q.w"])
def test_parameters_of_an_ensemble_that_vmap_maps_have_the_paths_of_the_step(glob):
    def gradients(params):
        return jax.vmap(jax.grad(lambda q: jnp.sum(q["w"] ** 2) / 2))(params)

    rule = tg.rules.clip_gradient(tg.match.param(glob), max_norm=1.0)
    params = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
    found = tg.trace(lambda params: gradients(params), rules=[rule])(params)
    np.testing.assert_allclose(found["w"], [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)


def test_a_call_may_take_numbers_beside_a_parameter():
    def of_loop(w):
        return jax.lax.fori_loop(0, 3, lambda _, carry: carry * w, 1.0)

    def of_jit(w):
        return jax.jit(lambda three, w: three * w)(3.0, w)

    def of_branch(w):
        return jax.lax.cond(w > 0, lambda three, w: three * w, lambda three, w: three, 3.0, w)

    rule = tg.rules.scale_gradient(tg.match.param("w"), 2.0)
    for f, expected in [(of_loop, 3 * 2.0**2), (of_jit, 3.0), (of_branch, 3.0)]:
        assert jax.grad(tg.rewrite(f, rule))(2.0) == 2 * expected


# ---------------------------------------------------------------------------------- what is refused


def test_a_glob_that_fits_nothing_is_told_near_paths():
    rule = tg.rules.clip_gradient(tg.match.param("a.ww"), max_norm=1.0)
    expected = r"clip_gradient\(match.param\('a.ww'\).*nearest paths: 'params\.a\.w'"
    with pytest.raises(tg.ir.NoMatchError, match=expected):
        tg.rewrite(quadratic, rule)(PARAMS, ONES)
    with pytest.raises(tg.ir.NoMatchError, match=expected):
        tg.trace(lambda params, x: jax.grad(quadratic)(params, x), rules=[rule])(
            PARAMS, jnp.ones(2)
        )
    may = tg.rules.clip_gradient(tg.match.param("a.ww"), max_norm=1.0, missing_ok=True)
    tg.rewrite(quadratic, may)(PARAMS, ONES)


def test_integers_are_no_parameters():
    rule = tg.rules.stop_gradient(tg.match.param("n"))
    with pytest.raises(tg.ir.NoMatchError, match="nearest paths: 'x'"):
        tg.rewrite(lambda x, n: x * n, rule)(1.0, jnp.array(2))


A, SIN = tg.match.param("a.*"), tg.match.op("sin")
FOR_GRADIENTS = "which parameters, for rules that act on their gradients"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SIN & A, "only with another selector"),
        (lambda: tg.rules.override_gradient(A, lambda op, dy: dy), FOR_GRADIENTS),
        (lambda: tg.rules.recompute(A), FOR_GRADIENTS),
        (lambda: tg.rules.straight_through(A), FOR_GRADIENTS),
        (lambda: tg.edit(A, lambda op, x: x), FOR_GRADIENTS),
        (lambda: tg.rules.stop_gradient(A, inputs=0), "positions of the inputs of an operation"),
    ],
)
def test_what_a_selector_of_parameters_does_not_go_with_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_the_cure_for_a_solver_that_differentiates_scales_the_gradient_of_its_parameters():
    from jax import jvp

    def root(params, x):  # as `optimistix.root_find` computes it, without its rule
        y = jnp.ones(())
        for _ in range(8):
            residual, slope = jvp(lambda y: y**3 + params["a"] * y - x, (y,), (jnp.ones(()),))
            y = y - residual / slope
        return y

    params, rule = {"a": jnp.float32(2.0)}, tg.rules.scale_gradient(tg.match.param("params.a"), 3.0)
    with pytest.raises(tg.ir.GraphError, match=r"rewrite\(lambda params: params, rule\)\(params"):
        jax.grad(tg.rewrite(root, rule))(params, 5.0)

    def cured(params, x):
        return root(tg.rewrite(lambda params: params, rule)(params), x)

    y = root(params, 5.0)  # dy/da = -y / (3 y² + a)
    expected = -3 * y / (3 * y**2 + 2.0)
    np.testing.assert_allclose(jax.grad(cured)(params, 5.0)["a"], expected, rtol=1e-5)


def test_rules_of_equal_parts_are_equal_selections():
    assert tg.match.param("a", "b") == tg.match.param("a", "b") != tg.match.param("a")
    assert repr(tg.match.param("a", "b")) == "match.param('a', 'b')"


def of_a_list_of_leaves(p, x):
    leaves, structure = jax.tree.flatten(p)
    gradient = jax.grad(lambda leaves: quadratic(jax.tree.unflatten(structure, leaves), x))
    return jax.tree.unflatten(structure, gradient(leaves))


GRADIENTS = {
    "its own name": lambda p, x: jax.grad(quadratic)(p, x),
    "another name": lambda p, x: jax.grad(lambda q: quadratic(q, x))(p),
    "tg.grad": lambda p, x: tg.grad(lambda q: quadratic(q, x))(p),
    "a list of leaves": of_a_list_of_leaves,
    "a gradient of a gradient": lambda p, x: jax.grad(
        lambda p: 1.0 * jnp.sum(jax.grad(quadratic)(p, x)["c"][0])
    )(p),
    "a tape": lambda p, x: by_tape(lambda p: quadratic(p, x), p),
    "a tape and one source": lambda p, x: {
        "a": {"w": by_tape(lambda p: quadratic(p, x), p, sources=p["a"]["w"])}
    },
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_in_a_traced_step_parameters_have_the_paths_of_its_arguments(name):
    """A tap shows them."""
    seen = {}
    tap = tg.rules.tap_gradient(tg.match.param("params.*"), seen.__setitem__)
    triple = tg.rules.scale_gradient(tg.match.param("params.a.w"), 3.0)
    step = tg.trace(lambda params, x: GRADIENTS[name](params, x), rules=[tap, triple])
    found, expected = step(PARAMS, ONES), GRADIENTS[name](PARAMS, ONES)
    assert_trees_close(found, changed_where(expected, "a.w".__eq__, lambda g: 3.0 * g))
    jax.effects_barrier()
    assert seen.keys() == {f"params.{path}" for path in paths_of(found)}


def by_computed_leaves(params, x):
    doubled, structure = [2 * leaf for leaf in jax.tree.leaves(params)], jax.tree.structure(params)
    return jax.grad(lambda flat: quadratic(jax.tree.unflatten(structure, flat), x))(doubled)[1]


def by_ravelling(params, x, ravel=lambda tree: ravel_pytree(tree)[0]):
    unravel = ravel_pytree(params)[1]
    return jax.grad(lambda flat: quadratic(unravel(flat), x))(ravel(params))


def by_jitted_ravelling(params, x):
    return by_ravelling(params, x, jax.jit(lambda tree: ravel_pytree(tree)[0]))


@pytest.mark.parametrize("step", [by_computed_leaves, by_ravelling, by_jitted_ravelling])
def test_a_parameter_that_is_differentiated_under_no_path_is_not_passed_by_in_silence(step):
    rule = tg.rules.clip_gradient(tg.match.param("params.a.w"), max_norm=1.0)
    with pytest.raises(tg.ir.NoMatchError, match=r"nearest paths: .*'flat"):
        tg.trace(step, rules=[rule])(PARAMS, ONES)
    under = tg.match.param("flat.1" if step is by_computed_leaves else "flat")
    found = tg.trace(step, rules=[tg.rules.scale_gradient(under, 3.0)])(PARAMS, ONES)
    np.testing.assert_allclose(found, 3 * step(PARAMS, ONES), rtol=1e-6)


def sharpness_aware(params, x):
    first = jax.grad(lambda q: quadratic(q, x))(params)
    moved = jax.tree.map(lambda w, g: w + 0.1 * g, params, first)
    return jax.grad(lambda q: quadratic(q, x))(moved)


def in_jit(params, x):
    inner = jax.jit(lambda q: jax.grad(lambda r: quadratic(r, x))(q))
    return jax.tree.map(jnp.add, inner(params), jax.grad(quadratic)(params, x))


def on_a_tape(params, x):
    doubled = jax.tree.map(lambda w: 2 * w, params)
    with tg.GradientTape() as tape:
        tape.watch(doubled)
        value = quadratic(doubled, x)
    return tape.gradient(value, doubled), jax.grad(quadratic)(params, x)


@pytest.mark.parametrize("step", [sharpness_aware, in_jit, on_a_tape])
def test_a_second_gradient_under_another_path_is_told(step):
    rule = tg.rules.scale_gradient(tg.match.param("params.a.w"), 1.0)
    with pytest.warns(
        UserWarning, match=r"does not reach a gradient at test_param.* [qrs]\w*\.a\.w,"
    ):
        found = tg.trace(step, rules=[rule])(PARAMS, ONES)
    assert_trees_close(found, step(PARAMS, ONES))


def test_another_parameter_that_an_inner_function_calls_by_the_path_is_told():
    @jax.jit
    def inner(other, params):
        return jax.grad(lambda params: jnp.sum(params["w"] * other["w"]))(params)

    step = tg.trace(
        lambda params, other: inner(params, other),
        rules=[tg.rules.scale_gradient(tg.match.param("params.w"), 3.0)],
    )
    with pytest.warns(UserWarning, match=r"acts on a gradient .* not the parameter that has this"):
        found = step({"w": jnp.ones(2)}, {"w": jnp.full(2, 5.0)})
    np.testing.assert_array_equal(found["w"], [3.0, 3.0])


@pytest.mark.parametrize("glob", ["params.a.w", "q.a.w", "a.w", "state.params.a.w"])
def test_both_the_step_s_path_and_the_loss_s_own_name_a_parameter(glob):
    @tg.trace(rules=[tg.rules.scale_gradient(tg.match.param(glob), 3.0)])
    def step(state, x):
        return jax.grad(lambda q: quadratic(q, x))(state["params"])

    assert_trees_close(step({"params": PARAMS, "count": 1}, ONES), tripled("a.w"))


@pytest.mark.parametrize("called_before", ["alone", "for another shape", "not at all"])
def test_parameters_have_the_paths_of_the_step_in_a_traced_function_that_has_programs(
    called_before,
):
    gradient = tg.trace(lambda w, x: jax.grad(lambda w: jnp.sum(w * x))(w))
    rule = tg.rules.scale_gradient(tg.match.param("params"), 2.0)
    step = tg.trace(lambda params, x: gradient(params, x), rules=rule)
    if called_before == "alone":
        gradient(jnp.ones(3), jnp.arange(3.0))
    if called_before == "for another shape":
        step(jnp.ones(2), jnp.arange(2.0))
    np.testing.assert_array_equal(step(jnp.ones(3), jnp.arange(3.0)), 2 * np.arange(3.0))


def test_a_function_that_is_called_twice_by_one_that_is_called_twice_is_looked_at_once():
    def of_parameter(w):
        return jnp.sin(w)

    for _ in range(40):  # a trillion calls
        of_parameter = jax.jit(lambda w, inner=of_parameter: inner(w) + inner(w))
    edited = tg.rewrite(
        lambda p: of_parameter(p["w"]), tg.rules.clip_gradient(tg.match.param("p.w"), max_norm=1.0)
    )
    assert len(edited.graph({"w": 1.0}).nodes) == 2  # the rule, and the call
