"""Scopes of models whose frameworks give none: the path of each module that is called."""

from __future__ import annotations

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tracegrad as tg
from tracegrad import match, rules

pytestmark = pytest.mark.both_jax

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Attention(eqx.Module):
    query: eqx.nn.Linear

    def __init__(self, key):
        self.query = eqx.nn.Linear(3, 3, key=key)

    def __call__(self, x):
        return jnp.tanh(self.query(x))


class Block(eqx.Module):
    attention: Attention
    scale: jax.Array

    def __init__(self, key):
        self.attention, self.scale = Attention(key), jnp.ones(3)

    def __call__(self, x):
        return x + self.scale * self.attention(x)


class Transformer(eqx.Module):
    blocks: list

    def __init__(self, key):
        self.blocks = [Block(each) for each in jax.random.split(key, 2)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.query = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.query(x))


class Residual(NnxBlock):
    def __call__(self, x):
        return x + super().__call__(x)


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Residual(rngs), Residual(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


MODEL = Transformer(jax.random.key(0))


def loss(model, x):
    return jnp.sum(jax.vmap(model)(x) ** 2)


def scopes_of(graph):
    found = ("/".join(occurrence.scopes) for occurrence in graph.walk())
    return list(dict.fromkeys(filter(None, found)))


def test_calls_of_equinox_modules_are_scopes_named_by_their_paths():
    scopes = scopes_of(tg.graph(loss, MODEL, X))
    block = "Transformer/blocks.{}"
    assert scopes == [
        name.format(i)
        for i in (0, 1)
        for name in (
            f"{block}/attention/query/eqx.nn.Linear",
            f"{block}/attention",
            block,
        )
    ]


def test_calls_of_nnx_modules_are_scopes_named_by_their_paths():
    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    model = NnxTransformer(nnx.Rngs(0))
    block = "NnxTransformer/blocks.{}"
    expected = [name.format(i) for i in (0, 1) for name in (f"{block}/query", block)]
    assert scopes_of(tg.graph(loss, model, X)) == expected
    assert scopes_of(tg.graph(lambda x: model(x), X)) == expected  # closed over
    graphdef, state = nnx.split(model)
    assert scopes_of(tg.graph(lambda s, x: nnx.merge(graphdef, s)(x), state, X)) == expected


def test_modules_that_a_transformed_method_calls_have_their_paths():
    # It is given a copy of the module.
    class Recomputed(NnxBlock):
        __call__ = nnx.remat(NnxBlock.__call__)

    class Half(NnxBlock):
        def __call__(self, x):
            return x + self.inner(x)

        @nnx.remat
        def inner(self, x):
            return jnp.tanh(self.query(x))

    class Two(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Recomputed(rngs), Half(rngs)])

        def __call__(self, x):
            return self.blocks[1](self.blocks[0](x))

    scopes = scopes_of(tg.graph(lambda model, x: jnp.sum(model(x)), Two(nnx.Rngs(0)), X))
    names = [f"Two/blocks.{i}{inner}" for i in (0, 1) for inner in ("", "/query")]
    assert sorted(scopes) == sorted(names)


def test_rules_values_and_plans_go_by_them_through_the_frameworks_own_gradients():
    def step(model, x):
        value, gradient = eqx.filter_value_and_grad(loss)(model, x)
        return value, gradient

    attention = match.scope("blocks.1/attention")
    _, plain = step(MODEL, X)
    value, stopped = tg.trace(step, rules=[rules.stop_gradient(attention)])(MODEL, X)
    np.testing.assert_allclose(value, loss(MODEL, X), rtol=1e-6)
    first, second = (block.attention.query.weight for block in stopped.blocks)
    assert not second.any()
    assert first.any()
    assert not np.allclose(first, plain.blocks[0].attention.query.weight)
    shown = tg.intermediates(loss, MODEL, X, where=match.scope("blocks.*/attention"))[1]
    assert list(shown) == [f"Transformer/blocks.{i}/attention" for i in (0, 1)]
    np.testing.assert_allclose(
        shown["Transformer/blocks.0/attention"],
        jax.vmap(MODEL.blocks[0].attention)(X),
        rtol=1e-5,
    )
    assert "blocks.1/attention" in str(tg.show(loss, MODEL, X))


def test_a_function_of_the_frameworks_that_was_called_before_has_them_too():
    jitted = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    jitted(MODEL, X)
    assert "Transformer/blocks.0/attention" in scopes_of(tg.graph(jitted, MODEL, X))


def test_modules_of_one_class_are_told_apart_where_they_are_called():
    first, second = (eqx.nn.Linear(3, 3, key=jax.random.key(i)) for i in range(2))

    def both(x):
        return second(first(second(x)))

    names = [scope.split("/")[0] for scope in scopes_of(tg.graph(both, X[0]))]
    assert names == ["Linear", "Linear_1"]
    assert len(tg.graph(both, X[0]).find(match.scope("Linear"))) == 2


def test_nothing_of_a_trace_is_held_on_to():
    def step(x):
        return jax.grad(lambda x: jnp.sum(eqx.combine(MODEL, MODEL)(x)))(x)

    with jax.checking_leaks():
        assert "Transformer/blocks.0" in scopes_of(tg.graph(step, X[0]))


def test_a_module_that_is_made_inside_has_its_class():
    def of_a_copy(model, x):
        return eqx.filter_vmap(model.blocks[0])(x)

    assert scopes_of(tg.graph(of_a_copy, MODEL, X))[0].startswith("Block/attention/query")


def test_classes_are_as_they_were_after_a_trace_and_other_threads_see_no_scopes():
    own = Attention.__dict__["__call__"]
    elsewhere = []

    def seen_from_elsewhere(x):
        def trace():
            elsewhere.append(str(jax.make_jaxpr(MODEL)(X[0]).eqns[-1].source_info.name_stack))

        thread = threading.Thread(target=trace)
        thread.start()
        thread.join()
        return MODEL(x)

    def failing(x):
        MODEL(x)
        raise KeyError("mine")

    assert "Transformer/blocks.1" in scopes_of(tg.graph(seen_from_elsewhere, X[0]))
    assert elsewhere == [""]
    with pytest.raises(KeyError, match="mine"):
        tg.graph(failing, X[0])
    assert Attention.__dict__["__call__"] is own
    text = str(jax.make_jaxpr(MODEL)(X[0]).eqns[-1].source_info.name_stack)
    assert text == ""


def test_the_compiled_program_is_that_of_jax():
    traced = tg.trace(loss).lower(MODEL, X).as_text()
    assert traced == jax.jit(loss).lower(MODEL, X).as_text()


def test_calls_are_still_found_by_their_names_and_lines():
    graph = tg.graph(loss, MODEL, X)
    assert len(graph.find(match.call("Attention.__call__"))) == 2
    assert len(graph.find(match.call("Attention"))) == 2
    assert {o.origin.function for o in graph.find(match.op("tanh"))} == {"Attention.__call__"}
