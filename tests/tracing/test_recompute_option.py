"""Where XLA would merge recomputed code away, `trace` tells it not to, or says that it cannot."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg
from tracegrad import _jax

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("compiled_fully")]

needs_option = _jax.keep_recompute_options("cpu") is not None


def recomputing():
    def f(x):
        return jax.checkpoint(lambda v: jnp.sin(jnp.sin(v)))(x)

    return tg.trace(f)


def messages_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_inside_another_compiled_function_the_option_is_shown_once():
    f = recomputing()
    outer = jax.jit(lambda x: f(x))
    messages = messages_of(lambda: (outer(1.0), outer(jnp.ones(3))))
    assert len(messages) == (1 if needs_option else 0)
    assert all("compiler_options={'xla_disable_hlo_passes'" in text for text in messages)


@pytest.mark.skipif(not needs_option, reason="this JAX keeps what is recomputed by itself")
def test_the_warning_is_at_the_line_of_the_call():
    f = recomputing()
    with pytest.warns(UserWarning, match="recomputes") as caught:
        jax.jit(lambda x: f(x))(1.0)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(1.0),
        lambda f: jax.grad(f)(1.0),
        lambda f: jax.vmap(f)(jnp.ones(3)),
        lambda f: tg.trace(lambda x: f(x) + 1)(1.0),
        lambda f: f.graph(1.0),
    ],
)
def test_elsewhere_nothing_needs_to_be_said(call):
    assert messages_of(lambda: call(recomputing())) == []


def test_a_function_that_recomputes_nothing_never_says_anything():
    f = tg.trace(jnp.sin)
    assert messages_of(lambda: jax.jit(lambda x: f(x))(1.0)) == []


def test_options_of_the_user_are_kept_beside_ours():
    own = {"xla_disable_hlo_passes": "algsimp"}
    f = tg.trace(lambda x: x * 1.0 + 0.0, compiler_options=own)
    assert f(2.0) == 2.0
