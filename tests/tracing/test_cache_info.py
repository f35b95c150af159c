"""What a traced function tells of its cache: which signatures, when, and why the last was new."""

from datetime import datetime

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg

pytestmark = pytest.mark.both_jax


def fresh_function(**options):
    def step(x, y=None, n=None):
        return x

    return tg.trace(step, **options)


def test_nothing_is_told_of_a_function_that_nobody_called():
    info = fresh_function().cache_info()
    assert (info.count, info.signatures) == (0, ())
    assert str(info) == "step was not traced yet"


def test_each_signature_is_told_once_with_what_changed():
    step = fresh_function(static_argnames="n")
    for x, n in ((jnp.ones(3), 1), (jnp.ones(3), 1), (jnp.ones((4, 2)), 1), (jnp.ones((4, 2)), 2)):
        step(x, n=n)
    step(1.0, n=2)
    info = step.cache_info()
    assert info.count == 4
    assert [(s.arguments, s.reason, s.times) for s in info.signatures] == [
        ("x: float32[3], n=1 (static)", "the first", 1),
        (
            "x: float32[4, 2], n=1 (static)",
            "the shape of `x` changed from [3] to [4, 2]",
            1,
        ),
        ("x: float32[4, 2], n=2 (static)", "the static value of `n` changed from 1 to 2", 1),
        (
            "x: weak float32[], n=2 (static)",
            "the shape of `x` changed from [4, 2] to []; "
            "the weak type of `x` changed from an array's to a Python number's",
            1,
        ),
    ]
    assert info.causes[("`x`", "shape")] == 2


def test_leaves_are_told_by_their_path():
    step = fresh_function()
    step({"w": [np.float32(1)]})
    (signature,) = step.cache_info().signatures
    assert signature.arguments == "x['w'][0]: float32[]"


def test_the_leaves_of_a_large_argument_are_counted():
    step = tg.trace(lambda params, x: x)
    step({"layers": [np.float32(1)] * 40}, np.ones(3, "float32"))
    (signature,) = step.cache_info().signatures
    assert signature.arguments == "params: 40 leaves, x: float32[3]"
    inputs = 40 * [np.float32(1)]
    assert "and 32 more" in repr(tg.graph(lambda params: params)(inputs))


def test_the_time_is_that_of_the_trace():
    step = fresh_function()
    before = datetime.now()
    step(1.0)
    after = datetime.now()
    step(1.0)
    (signature,) = step.cache_info().signatures
    assert before <= signature.first == signature.last <= after


def test_a_cleared_cache_shows_as_one_more_trace_of_the_same_signature():
    step = fresh_function()
    step(1.0)
    step.clear_cache()
    step(1.0)
    (signature,) = step.cache_info().signatures
    assert signature.times == 2
    assert ", 2 times, the last at" in str(signature)


def test_only_the_last_signatures_are_kept_and_the_others_counted():
    step = fresh_function()

    def retrace(times):
        for n in range(times):
            step.lower(jax.ShapeDtypeStruct((n,), "float32"))

    with pytest.warns(tg.RetraceWarning):
        retrace(70)
    info = step.cache_info()
    assert (info.count, len(info.signatures)) == (70, 64)
    assert info.signatures[0].reason == "the shape of `x` changed from [5] to [6]"
    assert "... 6 before these" in str(info)
    assert "69 times the shape of `x` changed: pad it to a few fixed sizes" in str(info)


def test_wrappers_share_what_they_share_programs_by():
    def fun(x):
        return x

    first, second = tg.trace(fun), tg.trace(fun, donate_argnums=0)
    first(1.0)
    assert second.cache_info().count == 1
    assert tg.trace(fun, rules=[lambda graph: graph]).cache_info().count == 0


def test_a_function_with_variables_tells_its_arguments():
    weight = tg.Variable(2.0)

    @tg.trace
    def scaled(x):
        return x * weight

    scaled(1.0)
    scaled(1.0)
    info = scaled.cache_info()
    assert [(s.arguments, s.times) for s in info.signatures] == [("x: weak float32[]", 1)]


def test_a_method_tells_what_its_function_does():
    class Model:
        @tg.trace
        def double(self, x):
            return 2 * x

    jax.tree_util.register_static(Model)
    model = Model()
    model.double(jnp.ones(3))
    info = model.double.cache_info()
    assert info.count == Model.double.cache_info().count == 1
    assert info.signatures[0].arguments == "x: float32[3]"


def test_a_part_of_another_program_is_not_counted():
    step = fresh_function()
    jax.jit(step)(1.0)
    assert step.cache_info().count == 0
    step(2.0 * jnp.ones(2))
    assert step.cache_info().count == 1
