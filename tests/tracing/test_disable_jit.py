"""Under `jax.disable_jit` a traced function runs as plain Python, as a jitted one does, and under
`jax.debug_nans` it raises the error that a jitted one raises."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tracegrad import match, rules
from tracegrad.variables.variable import Variable

pytestmark = pytest.mark.both_jax


def is_traced(x):
    return isinstance(x, jax.core.Tracer)


@pytest.mark.parametrize("is_warm", [False, True])
def test_values_can_be_printed_and_branched_on(is_warm, capsys):
    @tg.trace
    def f(x):
        if is_traced(x):
            return x
        print(f"{float(x):.1f}")
        return 2 * x if x > 0 else np.abs(x)

    if is_warm:
        f(jnp.ones(())), f(jnp.ones(()))
    with jax.disable_jit():
        assert (f(jnp.float32(3.0)), f(jnp.float32(-5.0))) == (6.0, 5.0)
    assert capsys.readouterr().out == "3.0\n-5.0\n"
    assert f(jnp.ones(())) == 1.0


@pytest.mark.parametrize("is_warm", [False, True])
def test_variables_are_read_and_assigned_where_that_is_written(is_warm):
    v = Variable(1.0)
    seen = []

    @functools.partial(tg.trace, static_argnames="n", donate_argnums=0)
    def step(x, n):
        v.assign_add(x)
        if not is_traced(x):
            seen.append((float(v), n))
        v.assign(v * n)
        return v.value

    if is_warm:
        step(jnp.zeros(()), n=1), step(jnp.zeros(()), n=1)
    x = jnp.ones(())
    with jax.disable_jit():
        results = [step(x, n=2), step(x, n=3)]
    assert seen == [(2.0, 2), (5.0, 3)]
    assert results == [4.0, 15.0]
    assert (float(v), float(x)) == (15.0, 1.0)  # `x` was not donated
    assert step(jnp.ones(()), n=2) == 32.0


def test_a_variable_among_the_results_is_handed_out_as_its_value():
    v, w = Variable(1.0), Variable(2.0)
    f = tg.trace(lambda x: {"v": v.assign_add(x), "w": [w]})
    with jax.disable_jit():
        result = f(1.0)
        v.assign(100.0), w.assign(100.0)
    assert not any(isinstance(leaf, Variable) for leaf in (result["v"], *result["w"]))
    assert (result["v"], result["w"]) == (2.0, [2.0])


@pytest.mark.parametrize("is_warm", [False, True])
def test_arguments_that_are_no_arrays_are_what_they_are(is_warm):
    scale = eqx.nn.Lambda(lambda x: x if is_traced(x) else 2.0 * abs(x))
    apply = tg.trace(lambda fun, x: (fun(x), fun))
    ways = {"argument": apply, "itself": lambda fun, x: (tg.trace(fun)(x), fun)}
    for call in ways.values():
        if is_warm:
            assert call(scale, -1.0) == (-1.0, scale)
        with jax.disable_jit():
            assert call(scale, -1.0) == (2.0, scale)


def test_gradients_says_what_keeps_it_from_reading_a_traced_function():
    f = tg.trace(lambda x: tg.gradients(x * x, x))
    with jax.disable_jit(), pytest.raises(RuntimeError, match=r"Under `jax\.disable_jit`"):
        f(jnp.ones(()))


def test_it_can_be_differentiated_and_mapped_and_recorded():
    v = Variable(3.0)
    f = tg.trace(lambda x: v * x * x)
    f(1.0), f(1.0)
    with jax.disable_jit():
        assert jax.grad(f)(2.0) == 12.0
        np.testing.assert_array_equal(jax.vmap(f)(jnp.arange(3.0)), [0.0, 3.0, 12.0])
        with tg.GradientTape() as tape:
            y = f(2.0)
        assert tape.gradient(y, v) == 4.0


def test_a_recomputed_function_of_several_operations_is_recorded():
    x = jnp.float32(0.5)
    with jax.disable_jit(), tg.GradientTape() as outer:
        outer.watch(x)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.recompute_grad(lambda x: jnp.where(x > 0, jnp.sin(x) * 2, x))(x)
        slope = tape.gradient(y, x)
    np.testing.assert_allclose(slope, 2 * np.cos(0.5), rtol=1e-6)
    np.testing.assert_allclose(outer.gradient(slope, x), -2 * np.sin(0.5), rtol=1e-6)


def test_with_rules_it_is_traced_with_the_functions_that_the_rules_name():
    v = Variable(0.0)

    def f(x):
        v.assign(x)
        return jax.nn.relu(x)

    traced = tg.trace(f, rules=[rules.scale_gradient(match.call("relu"), 3.0)])
    x = jnp.float32(2.0)
    for _ in range(2):
        with jax.disable_jit():
            assert jax.grad(traced)(1.0) == 3.0
            assert traced(x) == 2.0
        assert float(v) == 2.0
        traced(x), traced(x)
    assert float(x) == 2.0  # was never taken for an array of the program's own


def test_programs_can_be_looked_at_all_the_same():
    v = Variable(3.0)
    f = tg.trace(lambda x: v * x)
    with jax.disable_jit():
        assert "multiply" in f.lower(1.0).as_text()
        assert f.eval_shape(1.0).shape == ()
        assert f.graph(1.0).variables == (v,)


RUNS = {
    "trace": tg.trace,
    "rewrite": lambda f: tg.rewrite(f, rules.scale_gradient(match.op("log"), 2.0, missing_ok=True)),
    "graph": lambda f: lambda x: tg.graph(f, x).to_callable()(x),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_nan_is_the_error_of_debug_nans(run):
    twice = jax.jit(lambda x: 2 * jnp.log(x))
    x = jnp.zeros(2)
    of_one_operation, of_a_call = RUNS[run](lambda x: jnp.log(x - 1)), RUNS[run](twice)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in log"):
            of_one_operation(x)
        with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in jit"):
            of_a_call(x - 1)
