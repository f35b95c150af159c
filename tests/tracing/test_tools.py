"""What looks at a function for given arguments is called ``tool(fun, *args, **options)``."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg

W, X = jnp.ones((3, 2)), jnp.ones((4, 3))
SIN = tg.match.op("sin")


def loss(w, x, shift=None):
    return jnp.sum(jnp.sin(x @ w if shift is None else x @ w + shift))


TOOLS = {
    "graph": {},
    "memory": {},
    "explain": {},
    "show": {},
    "plan_recompute": {"memory_budget": "100%"},
    "intermediates": {"where": SIN},
    "intermediate_gradients": {"where": SIN},
}


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_takes_the_function_then_its_arguments_by_position_or_by_name(name):
    tool = functools.partial(getattr(tg, name), **TOOLS[name])
    for look in (
        lambda: tool(loss, W, X),
        lambda: tool(loss, W, x=X),
        lambda: tool(loss, w=W, x=X),
    ):
        assert type(look()) is type(tool(loss, W, X))
    assert str(tool(loss, W, X, shift=jnp.ones((4, 2)))) != str(tool(loss, W, X))


def powers(x, n):
    return sum(jnp.sum(jnp.sin(x) ** k) for k in range(n))


POWERS = {
    "jit": jax.jit(powers, static_argnums=1),
    "trace": tg.trace(powers, static_argnames="n"),
    "plain": powers,
}
TAKES_PYTHON_VALUES = {"explain": POWERS, "memory": ["jit", "trace"], "show": ["trace"]}


@pytest.mark.parametrize("kind", POWERS)
@pytest.mark.parametrize("name", TOOLS)
def test_a_python_value_is_bound_and_the_error_says_so(name, kind):
    tool, f = functools.partial(getattr(tg, name), **TOOLS[name]), POWERS[kind]
    tool(functools.partial(f, n=2), X)
    if kind in TAKES_PYTHON_VALUES.get(name, ()):
        tool(f, X, 2)
    else:
        kinds = (ValueError, jax.errors.TracerIntegerConversionError)
        with pytest.raises(kinds) as caught:
            tool(f, X, 2)
        assert "functools.partial" in "".join(caught.value.__notes__)


def test_a_function_that_needs_no_arguments_is_given_none():
    assert tg.graph(lambda: jnp.sin(1.0)).name == "<lambda>"
    assert tg.graph(lambda x=1.0: jnp.sin(x)).name == "<lambda>"
    assert tg.memory(lambda: jnp.ones((64, 64)) + 1).total > 0


def test_several_rules_in_a_row_are_shown_as_a_list():
    rule, other = tg.rules.stop_gradient(SIN), tg.rules.scale_gradient(SIN, 2.0)
    with pytest.raises(
        TypeError, match=re.escape(f"tracegrad.rewrite(loss, [{rule!r}, {other!r}])")
    ):
        tg.rewrite(loss, rule, other)


def of_own_options(x, wrt=1.0, *, has_aux=2.0):
    return jnp.sum(jnp.sin(x) * wrt * has_aux)


def test_a_keyword_that_may_be_the_functions_or_an_option_is_refused_with_the_way_out():
    x = jnp.ones(3)
    for option in ("wrt", "has_aux"):
        cure = re.escape(f"functools.partial(of_own_options, {option}=...)")
        with pytest.raises(TypeError, match=rf"'of_own_options' \(.*, and it is not clear.*{cure}"):
            tg.explain(of_own_options, x, **{option: True})
        tg.explain(of_own_options, x)  # neither is meant
    # The way out, and an argument that is given by position.
    bound = functools.partial(of_own_options, wrt=3.0)
    by_hand = float(jnp.linalg.norm(6 * jnp.cos(x)))
    assert tg.explain(bound, x, wrt=0)["x"].norm == pytest.approx(by_hand)
    assert tg.explain(of_own_options, x, 3.0, wrt=0)["x"].norm == pytest.approx(by_hand)


def test_all_other_keywords_are_the_functions():
    def fun(x, *, fun, static_argnums):
        return jnp.sin(x) * fun * static_argnums

    _, values = tg.intermediates(fun, 1.0, where=SIN, fun=2.0, static_argnums=1)
    assert values["sin"] == pytest.approx(float(jnp.sin(1.0)))
    assert tg.graph(lambda x, *, fun: x * fun, 1.0, fun=2.0).in_avals[0].shape == ()
