"""Errors of JAX at custom rules name the rule, its line and what to write."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tracegrad.ir.notes import NOTE

pytestmark = pytest.mark.both_jax  # whose errors differ


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(x, c, kernel):
    return jnp.sum(c * kernel(x))


spread.defvjp(
    lambda x, c, kernel: (spread(x, c, kernel), (x, c)), lambda kernel, kept, g: (g * kept[1], None)
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def take(x, index):
    return 3.0 * x[index]


take.defjvp(lambda index, primals, tangents: (take(*primals, index), take(*tangents, index)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def pick(x, index):
    return 3.0 * x[index]


pick.defvjp(
    lambda x, index: (pick(x, index), x.shape),
    lambda index, shape, g: (jnp.zeros(shape).at[index].set(3 * g),),
)

POINTS, COEFFICIENTS = jnp.linspace(-1, 1, 5), jnp.arange(5.0)
X, INDEX = jnp.arange(10.0), jnp.array([1, 3, 5])


def scaled(y, a):
    @jax.custom_vjp
    def scale(y):
        return a * y

    scale.defvjp(lambda y: (scale(y), None), lambda _, g: (a * g,))
    return scale(y)


def by_argument(sigma):
    return spread(POINTS, COEFFICIENTS, lambda t: jnp.exp(-(t**2) / sigma))


def by_closure(p):
    return jnp.sum(scaled(jnp.tanh(POINTS * p["w"]), p["a"]) ** 2)


def taking(x, index):
    return jnp.sum(jnp.sin(take(x, index)))


def picking(x, index):
    return jnp.sum(jnp.sin(pick(x, index)))


CLOSING_OVER = {
    "spread": (by_argument, (jnp.float32(1.5),)),
    "scale": (by_closure, ({"w": jnp.float32(0.5), "a": jnp.float32(2.0)},)),
}
WITHOUT_RULES = {
    "spread": lambda sigma: jnp.sum(COEFFICIENTS * jnp.exp(-(POINTS**2) / sigma)),
    "scale": lambda p: jnp.sum((p["a"] * jnp.tanh(POINTS * p["w"])) ** 2),
}
NOTHING = tg.rules.scale_gradient(tg.match.op("no such operation"), 2.0, missing_ok=True)


def on_a_tape(fun, *args):
    with tg.GradientTape() as tape:
        tape.watch(args)
        result = jax.jit(fun)(*args)
    return tape.gradient(result, args)


WAYS = {
    "a tape": on_a_tape,
    "tg.grad": lambda f, *args: tg.grad(f)(*args),
    "a step": lambda f, *args: tg.trace(jax.grad(f))(*args),
    "a traced loss": lambda f, *args: jax.grad(tg.trace(f))(*args),
    "rewrite": lambda f, *args: jax.grad(tg.rewrite(f, NOTHING))(*args),
    "recompute": lambda f, *args: jax.grad(tg.recompute_grad(f))(*args),
}


def note_of(error):
    texts = [note.split("\n")[-1] for note in error.__notes__ if "JAX has removed" not in note]
    assert all(len(text) <= NOTE for text in texts)
    (note,) = [note for note in error.__notes__ if "nondiff_argnums" in note]
    return note


@pytest.mark.parametrize("name", CLOSING_OVER)
@pytest.mark.parametrize("way", WAYS)
def test_a_rule_that_closes_over_what_is_differentiated_is_named(name, way):
    fun, args = CLOSING_OVER[name]
    with pytest.raises(Exception, match=r"tracer|closed-over value") as caught:
        WAYS[way](fun, *args)
    note = note_of(caught.value)
    assert "test_rule_errors.py:" in note
    assert f"`{name}` may not close over a traced array" in note
    assert f"own_derivative(tracegrad.match.call({name!r}))" in note


@pytest.mark.parametrize("name", CLOSING_OVER)
def test_explain_names_it_and_its_rule_cures(name):
    fun, args = CLOSING_OVER[name]
    (finding,) = tg.explain(fun, *args).problems
    assert finding.cause == "closed over by a rule"
    assert finding.operation == name
    assert finding.origin.file == __file__
    expected = jax.grad(WITHOUT_RULES[name])(*args)
    cured = jax.grad(tg.rewrite(fun, finding.rule))(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), cured, expected)


@pytest.mark.parametrize("name", CLOSING_OVER)
def test_check_grads_names_it(name):
    fun, args = CLOSING_OVER[name]
    with pytest.raises(tg.insight.GradientError, match=rf"{name}.* closes over a value that is"):
        tg.check_grads(fun, args, order=1)


def test_what_only_a_constant_is_for_the_rule_is_explained_as_before():
    def loss(w):
        return jnp.sum(scaled(w * POINTS, lax.stop_gradient(jnp.sin(w))))

    np.testing.assert_allclose(
        jax.grad(loss)(0.5), np.sum(np.sin(0.5) * np.asarray(POINTS)), atol=1e-6
    )
    causes = [finding.cause for finding in tg.explain(by_argument, 1.5, wrt=0).problems]
    assert causes == ["closed over by a rule"]
    found = tg.explain(lambda a: jnp.sum(scaled(a * POINTS, 2.0) * POINTS), jnp.float32(0.5))
    assert not found.problems


@pytest.mark.parametrize("way", ["a traced loss", "rewrite", "recompute"])
def test_an_array_among_the_arguments_that_are_not_differentiated_is_named(way):
    want = jnp.zeros(10).at[INDEX].set(3 * jnp.cos(3.0 * INDEX))
    np.testing.assert_allclose(tg.grad(taking)(X, INDEX), want, rtol=1e-5)
    with pytest.raises(TypeError) as caught:
        WAYS[way](taking, X, INDEX)
    note = note_of(caught.value)
    assert "`take` may not close over a traced array" in note
    cured = jax.grad(tg.rewrite(taking, tg.rules.own_derivative(tg.match.call("take"))))
    np.testing.assert_allclose(cured(X, INDEX), want, rtol=1e-5)


@pytest.mark.parametrize("way", ["a step", "a traced loss", "rewrite", "recompute"])
def test_an_array_that_a_vjp_has_there_is_an_error_with_the_line(way):
    np.testing.assert_allclose(tg.grad(picking)(X, INDEX), jax.grad(picking)(X, INDEX), rtol=1e-6)
    with pytest.raises(TypeError, match="nondiff_argnums") as caught:
        WAYS[way](picking, X, INDEX)
    note = note_of(caught.value)
    assert f"test_rule_errors.py:{picking.__code__.co_firstlineno + 1} in picking" in note
    assert "make it an argument" in note


def test_the_gradient_of_such_a_rule_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"`take` may not .* nondiff_argnums"):
        tg.save(taking, tmp_path / "taking", (X, INDEX))
    tg.save(taking, tmp_path / "taking", (X, INDEX), gradient_order=0)
    loaded = tg.load(tmp_path / "taking")
    np.testing.assert_allclose(loaded(X, INDEX), taking(X, INDEX), rtol=1e-6)


def test_a_value_that_has_leaked_is_not_said_to_be_closed_over_by_a_rule():
    kept = []
    jax.jit(lambda x: kept.append(x))(1.0)

    def loss(x):
        return x * kept[0]

    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        tg.trace(jax.grad(loss))(1.0)
    assert not any("nondiff_argnums" in note for note in getattr(caught.value, "__notes__", ()))


# --------------------------------------------------------------------------------------- dtypes


@jax.custom_vjp
def times(c, w):
    return c * w


times.defvjp(
    lambda c, w: (c * w, (c, w)),
    lambda kept, g: tuple((g * x).astype(jnp.float32) for x in reversed(kept)),
)


def in_the_carry(c, w):
    last, _ = lax.scan(lambda c, _: (times(c, w), None), c, None, length=3)
    return jnp.sum(last.astype(jnp.float32))


def of_what_is_scanned(c, w):
    _, stacked = lax.scan(lambda c, x: (c, times(x, c)), c[0], w)
    return jnp.sum(stacked.astype(jnp.float32))


@pytest.mark.parametrize("fun", [in_the_carry, of_what_is_scanned])
def test_explain_names_the_rule_of_another_dtype(fun):
    args = jnp.ones(3, jnp.bfloat16), jnp.full(3, 2, jnp.bfloat16)
    found = [f for f in tg.explain(fun, *args, wrt=(0, 1)).problems if f.operation]
    assert any("times returned a gradient float32 for an input bfloat16" in f.what for f in found)


def test_a_rule_of_another_dtype_that_jax_takes_is_no_problem():
    def loss(c, w):
        return jnp.sum(times(c, w).astype(jnp.float32))

    args = jnp.ones(3, jnp.bfloat16), jnp.full(3, 2, jnp.bfloat16)
    assert jax.grad(loss)(*args).dtype == jnp.float32
    assert not tg.explain(loss, *args).problems
