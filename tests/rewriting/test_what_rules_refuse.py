"""Rules whose match is no place for them say so."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad import match, rules

A = jnp.arange(12.0).reshape(3, 4) / 7 + jnp.eye(3, 4)
X = jnp.arange(3.0)


def singular_values(a):
    return jnp.sum(jnp.linalg.svd(a, compute_uv=False))


@pytest.mark.parametrize("rule", [rules.strong_zero, rules.finite_derivative])
def test_what_is_there_and_not_concerned_is_not_said_to_be_missing(rule):
    assert tg.graph(singular_values, A).find(match.op("svd"))
    with pytest.raises(tg.NoMatchError, match=r"concerns nothing .*<Apply svd.* matches"):
        tg.rewrite(singular_values, rule(match.op("svd")))(A)
    with pytest.raises(tg.NoMatchError, match="matches nothing"):
        tg.rewrite(singular_values, rule(match.op("qr")))(A)
    allowed = tg.rewrite(singular_values, rule(match.op("svd"), missing_ok=True))
    np.testing.assert_array_equal(jax.grad(allowed)(A), jax.grad(singular_values)(A))


@pytest.mark.parametrize(
    "rule",
    [
        lambda **more: rules.stop_gradient(match.op("mul"), inputs=0, **more),
        lambda **more: rules.scale_gradient(match.op("mul"), -1.0, inputs=[0], **more),
    ],
)
def test_inputs_through_which_no_gradient_leaves_are_not_passed_by_in_silence(rule):
    def doubled(x):
        return jnp.sum(2.0 * jnp.sin(x))

    def weighted(w, x):
        return jnp.sum(w * jnp.sin(x))

    with pytest.raises(tg.NoMatchError, match=r"inputs=.*mul.*\(2.0, sin: f32\[3\]\).*another"):
        jax.grad(tg.rewrite(doubled, rule()))(X)
    allowed = tg.rewrite(doubled, rule(missing_ok=True))
    np.testing.assert_array_equal(jax.grad(allowed)(X), jax.grad(doubled)(X))

    # It is enough that a gradient leaves through the input in one match, or in one loss of a step.
    def both(w, x):
        return doubled(x) + weighted(w, x)

    def step(w, x):
        return jax.grad(doubled)(x), jax.grad(weighted)(w, x)

    assert not jnp.allclose(jax.grad(tg.rewrite(both, rule()))(X, X), jax.grad(both)(X, X))
    first, second = tg.trace(step, rules=rule())(X, X)
    np.testing.assert_allclose(first, 2 * np.cos(X), rtol=1e-6)
    assert not jnp.allclose(second, jax.grad(weighted)(X, X))


def test_a_function_in_a_loop_with_its_own_backward_takes_the_edit_itself():
    """A checkpointed loop of equinox, as in the solvers of diffrax."""

    def integrated(field, x):
        def step(state):
            return state[0] + 1, state[1] + 0.1 * field(state[1])

        start, limit = (0, x), {"kind": "checkpointed", "max_steps": 4}
        return jnp.sum(eqxi.while_loop(lambda state: state[0] < 4, step, start, **limit)[1])

    double = rules.scale_gradient(match.op("sin"), 2.0)
    with pytest.raises(tg.GraphError, match=r"give it rewrite\(function, rule\) instead"):
        tg.rewrite(lambda x: integrated(jnp.sin, x), double)(X)
    x, expected = np.asarray(X, np.float64), np.ones(X.shape)
    for _ in range(4):
        x, expected = x + 0.1 * np.sin(x), expected * (1 + 0.2 * np.cos(x))
    gradient = jax.grad(lambda x: integrated(tg.rewrite(jnp.sin, double), x))(X)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@jax.jit
def block(x):
    return jnp.sin(x) * x


def of_block(x):
    return jnp.sum(block(x))


def override(where, by):
    return rules.override_gradient(where, lambda op, dy: by * dy)


OUTER, INNER = match.call("block"), match.op("sin")


def test_of_an_inner_and_an_outer_rule_the_outer_one_is_taken():
    for taken in (
        [override(INNER, 5.0), override(OUTER, 3.0)],
        [override(OUTER | INNER, 3.0)],
    ):
        got = jax.grad(tg.rewrite(of_block, taken))(X)
        np.testing.assert_array_equal(got, jnp.full(3, 3.0))


def squared_sine(x):
    return jnp.sum(jnp.sin(x) ** 2)


def test_gradients_in_a_step_that_is_differentiated_already_are_those_of_its_loss():
    def step(x):
        return jax.value_and_grad(squared_sine)(x)

    with pytest.raises(tg.GraphError, match=r"Call it with the function .* \(the loss\)"):
        tg.intermediate_gradients(step, X, where=INNER, has_aux=True)
    with pytest.raises(TypeError, match="Call it with the loss, not with the train step"):
        tg.intermediate_gradients(step, X, where=INNER)

    def penalised(x):  # the rule reaches the loss that `tg.grad` differentiates
        return squared_sine(x) + jnp.sum(tg.grad(squared_sine)(x))

    tripled = tg.rewrite(penalised, rules.scale_gradient(INNER, 3.0))
    _, found = tg.intermediate_gradients(tripled, X, where=INNER)
    np.testing.assert_allclose(found["sin"], 3 * 2 * jnp.sin(X), rtol=1e-6)


def test_a_callback_under_vmap_is_called_for_each_example():
    met = []
    tap = rules.tap_gradient(INNER, lambda place, array: met.append((place, array)))
    jax.vmap(jax.grad(tg.rewrite(squared_sine, tap)))(X)
    jax.effects_barrier()
    assert {place for place, _ in met} == {"sin"}
    np.testing.assert_allclose(sorted(float(a) for _, a in met), sorted(2 * np.sin(X)), rtol=1e-6)


def linear(w, x):
    with jax.named_scope("linear"):
        return jnp.tanh(x @ w)


def test_an_error_in_the_code_of_an_edit_names_the_place_and_its_operands():
    forgetful = tg.edit(match.scope("linear"), lambda op, x: op(x))  # not the weights
    with pytest.raises(TypeError, match="positional") as raised:
        tg.rewrite(linear, forgetful)(jnp.ones((3, 2)), jnp.ones((4, 3)))
    (note,) = [note for note in raised.value.__notes__ if "replaces <linear" in note]
    assert "test_what_rules_refuse.py" in note
    assert note.endswith("f32[4,3], f32[3,2]")
    nothing = tg.edit(match.op("tanh"), lambda op, x: None)
    with pytest.raises(tg.GraphError, match=r"tanh.*expected f32\[4,2\]; the edit gave None"):
        tg.rewrite(linear, nothing)(jnp.ones((3, 2)), jnp.ones((4, 3)))


def guided(op, dy):
    return dy


def test_a_rule_shows_all_that_it_was_made_with():
    either, sin = match.op("sin") | match.op("cos"), "match.op('sin')"
    shown = {
        rules.clip_gradient(INNER, 1.0, 2): (
            f"rules.clip_gradient({sin}, max_norm=1.0, max_value=2)"
        ),
        rules.scale_gradient(either, jnp.float32(2.0)): (
            f"rules.scale_gradient({sin} | match.op('cos'), factor=an array float32[])"
        ),
        rules.stop_gradient(INNER, inputs=[0], missing_ok=True): (
            f"rules.stop_gradient({sin}, inputs=[0], missing_ok=True)"
        ),
        rules.strong_zero(): "rules.strong_zero()",
        tg.edit(INNER, guided): f"edit({sin}, function=guided)",
    }
    assert [repr(rule) for rule in shown] == list(shown.values())
    with pytest.raises(tg.NoMatchError, match=r"clip_gradient\(match.op\('cosh'\), max_norm=2.0\)"):
        tg.rewrite(squared_sine, rules.clip_gradient(match.op("cosh"), max_norm=2.0))(X)


@pytest.mark.parametrize("tool", [tg.intermediates, tg.intermediate_gradients])
def test_values_of_a_loss_are_not_taken_from_the_step_that_differentiates_it(tool):
    def loss(w, x):
        with jax.named_scope("block"):
            hidden = jnp.sin(x @ w)
        return jnp.sum(hidden**2)

    def step(w, x):
        return jnp.sum(w - 0.1 * jax.grad(loss)(w, x))

    w, x = jnp.ones((2, 3)), jnp.ones((4, 2))
    with pytest.raises(tg.GraphError, match="has differentiated already"):
        tool(step, w, x, where=tg.match.scope("block"))
