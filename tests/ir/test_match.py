"""What each selector finds, and in what order."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg
from tracegrad import match

X = jnp.ones(3)
SQUARE, HALF = jnp.ones((3, 3)), jnp.ones((3, 3), jnp.bfloat16)


def ops(found):
    return [[node.op for node in m.nodes] for m in found]


def found(fun, selector, *args):
    return tg.graph(fun, *(args or (X,))).find(selector)


def line(fun, text):
    """Where a piece of code stands in this file."""
    lines, start = inspect.getsourcelines(fun)
    return start + next(i for i, source in enumerate(lines) if text in source)


# ------------------------------------------------------------------------------------------- op


def test_op_finds_single_operations_at_any_depth():
    def f(x):
        x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)
        x = jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
        return jax.jit(jnp.sin)(x)

    assert [len(m.path) for m in found(f, match.op("sin"))] == [1, 1, 1]
    assert sorted(ops(found(f, match.op("sin", "cos")))) == [["cos"], *[["sin"]] * 3]
    assert sorted(ops(found(f, match.op("s*n")))) == [["scan"], *[["sin"]] * 3]


# ----------------------------------------------------------------------------------------- call


def test_call_finds_what_jax_keeps_by_name():
    @jax.jit
    def inner(x):
        return jnp.sin(x)

    def f(x):
        return jax.nn.relu(inner(x)) + inner(x)

    assert [type(m.node) for m in found(f, match.call("inner"))] == [tg.ir.Call] * 2
    assert [type(m.node) for m in found(f, match.call("relu"))] == [tg.ir.CustomGradient]


@pytest.mark.parametrize("function", [jax.nn.softmax, jax.nn.gelu, jax.nn.log_softmax])
def test_call_finds_an_inlined_function_as_one_match(function):
    def f(x):
        return jnp.sin(function(jnp.cos(x)))

    (whole,) = found(f, match.call(function.__name__))
    everything = [node.op for node in tg.graph(f, X).nodes]
    assert ["cos", *(node.op for node in whole.nodes), "sin"] == everything


def test_calls_on_one_line_and_in_a_loop_are_told_apart():
    def on_a_line(x):
        return jax.nn.softmax(jax.nn.softmax(x))

    def in_a_loop(x):
        for _ in range(3):
            x = jax.nn.softmax(x)
        return x

    def beside_each_other(x):
        return [jax.nn.softmax(i * x) for i in range(3)]

    (once,) = found(jax.nn.softmax, match.op("exp"))
    assert once.node.op == "exp"
    for fun, count in ((on_a_line, 2), (in_a_loop, 3), (beside_each_other, 3)):
        matches = found(fun, match.call("softmax"))
        assert len(matches) == count
        assert all([n.op for n in m.nodes].count("exp") == 1 for m in matches)


def layers(x):
    for _ in range(3):
        x = jnp.sin(x) * 2
    return x


class Layer:
    def __call__(self, x):
        return jnp.sin(x) * 2

    def scaled(self, x):
        return jnp.cos(x) * 3


class Around:
    def __call__(self, x):
        return Layer()(x) + 1


LAYER = Layer()
WAVES, JITTED = (lambda x: LAYER.scaled(LAYER(x))), (lambda x: jax.jit(Around().__call__)(x))
CALLS = {
    "a function with a loop": (lambda x: jnp.cos(layers(x)), "layers", [["sin", "mul"] * 3]),
    "a class": (WAVES, "Layer", [["sin", "mul"]]),
    "a method": (WAVES, "Layer.scaled", [["cos", "mul"]]),
    "a glob": (WAVES, "scal*", [["cos", "mul"]]),
    "a jitted method": (JITTED, "Around", [["sin", "mul", "add"]]),
    "one of the same name inside": (JITTED, "Layer", [["sin", "mul"]]),
}


@pytest.mark.parametrize(("fun", "name", "expected"), CALLS.values(), ids=CALLS)
def test_call_finds(fun, name, expected):
    assert ops(found(fun, match.call(name))) == expected


def test_a_method_has_the_name_of_its_class():
    assert [m.name for m in found(WAVES, match.call("Layer*"))] == ["Layer", "Layer.scaled"]


def test_a_loop_in_a_loop_is_ambiguous():
    def f(x):
        for _ in range(2):
            x = layers(x)
        return x

    with pytest.raises(tg.GraphError, match="a loop and has a loop of its own"):
        found(f, match.call("layers"))

    def told_apart(x):
        for i in range(2):
            with jax.named_scope(f"round_{i}"):
                x = layers(x)
        return x

    assert ops(found(told_apart, match.scope("round_*"))) == [["sin", "mul"] * 3] * 2


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_call_is_found_between_calls_of_one_function_that_calls_itself(transform):
    """As a `Sequential` in a `Sequential`."""

    def both(one, other, x):
        return other(one(x))

    def block(x):
        return both(jnp.sin, jnp.tanh, x)

    def f(x):
        return both(block, jnp.exp, x)

    assert ops(found(transform(f), match.call("block"))) == [["sin", "tanh"]]
    of_itself = transform(functools.partial(both, block, jnp.exp))
    assert ops(found(lambda x: both(jnp.cos, of_itself, x), match.call("block"))) == [
        ["sin", "tanh"]
    ]


def test_who_traces_is_no_call_in_the_program():
    def outermost(x):
        return found(lambda x: jnp.sin(x), match.call("outermost"), x)

    assert outermost(X) == []


# ---------------------------------------------------------------------------------------- scope


def scoped(x):
    for i in range(2):
        with jax.named_scope(f"block_{i}"):
            with jax.named_scope("attention"):
                x = jnp.sin(x) * 2
            with jax.named_scope("mlp"):
                x = jnp.cos(x)
        x = x + 1
    return x


def in_scan(x):
    with jax.named_scope("outer"):
        return jax.lax.scan(lambda c, _: (scoped(c), None), x, None, length=2)[0]


@jax.vmap
def two_names(x):
    with jax.named_scope("outer/inner"):
        return jnp.sin(x)


BLOCK = ["sin", "mul", "cos"]


@pytest.mark.parametrize(
    ("fun", "glob", "expected"),
    [
        (scoped, "block_*", [BLOCK] * 2),
        (scoped, "block_1", [BLOCK]),
        (scoped, "attention", [["sin", "mul"]] * 2),
        (scoped, "block_*/mlp", [["cos"]] * 2),
        (scoped, "block_0/*", [["sin", "mul"], ["cos"]]),
        (scoped, "block", []),
        (jax.vmap(scoped), "block_0", [BLOCK]),
        (in_scan, "outer", [["scan"]]),
        (in_scan, "outer/block_1", [BLOCK]),
        (two_names, "outer", [["sin"]]),
        (two_names, "inner", [["sin"]]),
        (two_names, "outer/inner", [["sin"]]),
    ],
)
def test_scope_takes_globs_over_the_components(fun, glob, expected):
    assert ops(found(fun, match.scope(glob))) == expected


@pytest.mark.parametrize("glob", ["block_0/**/mlp", "/block_0", "**"])
def test_scope_refuses_patterns_for_any_depth(glob):
    with pytest.raises(ValueError, match=r"one pattern for each depth"):
        match.scope(glob)


@pytest.mark.parametrize("sum", ["bi,ij->bj", "b i, i j -> b j", "...i,ij->...j", "bi,ij->"])
def test_a_sum_of_einsum_is_no_scope(sum):
    def fun(w, x):
        with jax.named_scope("block"):
            return jnp.tanh(jnp.einsum(sum, x, w))

    graph = tg.graph(fun, jnp.ones((3, 2)), jnp.ones((4, 3)))
    assert {place.scope for place in graph.walk()} == {"block"}
    assert "->" not in str(graph).partition("\n")[2]
    assert graph.find(tg.match.scope("block") & tg.match.op("dot_general"))


# --------------------------------------------------------------------------------------- source


def test_source_finds_lines_functions_and_files():
    def g(x):
        y = jnp.sin(x) * 2  # the line
        return y + 1

    def f(x):
        for _ in range(2):
            x = g(x)
        return x

    place = f"test_match.py:{line(g, '# the line')}"
    assert ops(found(f, match.source(place))) == [["sin", "mul"]] * 2
    assert ops(found(f, match.source("g"))) == [["sin", "mul", "add"]] * 2
    assert found(f, match.source("other.py")) == []
    assert sum(map(len, ops(found(f, match.source("test_match.py"))))) == 6


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("step", "last"),
    [
        (lambda x: x * HALF, "mul"),
        (lambda x: X + x, "add"),
        (lambda x: x + jnp.mean(x, keepdims=True), "add"),
        (functools.partial(jnp.mean, axis=0, keepdims=True), "div"),
    ],
    ids=["converted", "broadcast", "two calls", "inlined"],
)
def test_what_one_call_of_jax_computes_on_a_line_is_one_match(step, last, times):
    """JAX gives the frames of the call to all operations that it inlines."""

    def f(x):
        for _ in range(times):
            x = step(x)  # the line
        return x

    graph = tg.graph(f, SQUARE)
    place = f"test_match.py:{line(f, '# the line')}"
    matches = graph.find(match.source(place, "<lambda>"))
    assert [m.nodes[-1].op for m in matches] == [last] * times
    assert sum(len(m.nodes) for m in matches) == len(graph.nodes)


# ---------------------------------------------------------------------------- where, composition


def test_where_is_given_occurrences():
    def f(x):
        return jax.jit(jnp.outer)(jnp.sin(x), x)

    big = match.where(lambda o: o.path and o.node.outputs[0].aval.size == 9)
    assert ops(found(f, big)) == [["mul"]]


def both_ways(x):
    return jnp.exp(x) * jax.nn.softmax(x)


def test_and_or_not():
    exp, softmax = match.op("exp"), match.call("softmax")
    everything = tg.graph(both_ways, X)
    ((first,), (second,)) = (everything.find(s) for s in (exp & ~softmax, exp & softmax))
    assert first.node.inputs[0] in everything.inputs
    assert second.node.inputs[0] in everything.producers
    either = found(both_ways, exp | softmax)
    assert [len(m.nodes) > 1 for m in either] == [False, True, False]


def test_a_call_in_a_scope_is_still_the_call():
    def f(x):
        with jax.named_scope("head"):
            y = jax.nn.softmax(x)
        return jax.nn.softmax(y)

    (match_,) = found(f, match.call("softmax") & match.scope("head"))
    assert len(match_.nodes) > 1
    assert len(found(f, match.call("softmax") & ~match.scope("head"))) == 1


# ---------------------------------------------------------------------------------- what it says


def test_matches_print_one_a_line_with_scope_and_source():
    printed = repr(found(scoped, match.op("cos")))
    place = f"test_match.py:{line(scoped, 'jnp.cos')}"
    assert len(printed.splitlines()) == 2
    for i, text in enumerate(printed.splitlines()):
        assert place in text
        assert f"[block_{i}/mlp]" in text
    assert repr(found(scoped, match.op("tan"))) == "(no matches)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: match.op(), "nothing"),
        (lambda: match.call(jnp.sin), "takes names"),
        (lambda: match.scope(""), "takes names"),
        (lambda: match.where("sin"), "expected a selector or a function"),
        (lambda: match.op("sin") & "cos", "combined only with another"),
    ],
)
def test_what_is_no_selector_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_the_repr_of_a_selector_has_the_parentheses_that_python_needs_and_no_others():
    a, b, c = match.op("a"), match.call("b"), match.scope("c")
    for selector in (a & b & c, a & (b & c), a & (b | c), (a | b) & c, a | b & c, a | (b | c)):
        assert eval(repr(selector), {"match": match}) == selector
        assert eval(repr(~selector), {"match": match}) == ~selector
    assert repr(a & b & c) == "match.op('a') & match.call('b') & match.scope('c')"
    assert repr(a | ~(b & c)) == "match.op('a') | ~(match.call('b') & match.scope('c'))"
