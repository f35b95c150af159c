"""Where a node stands: the user's line and function, the full scope, at any depth of calls."""

import sys
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tracegrad as tg

pytestmark = pytest.mark.both_jax


def line_of(function, offset):
    return function.__code__.co_firstlineno + offset


def only(graph, op):
    (found,) = graph.find(lambda o: o.node.op == op)
    return found


def two_lines(x):
    y = jnp.sin(x)
    return jnp.cos(y)


def test_an_origin_is_the_users_file_line_and_function():
    origin = only(tg.graph(two_lines, 1.0), "cos").origin
    assert (origin.file, origin.function) == (__file__, "two_lines")
    assert origin.line == line_of(two_lines, 2)
    inner = only(tg.graph(lambda x: jax.jit(lambda x: two_lines(x))(x), 1.0), "cos")
    assert [line.function.split(".")[-1] for line in inner.lines] == ["<lambda>", "two_lines"]


@jax.jit
def shared(x):
    return jax.nn.relu(x)


def calls_it_twice(x):
    a = shared(x)
    return a + shared(a)


def twice(x):
    a = jax.nn.relu(x)
    return a + jax.nn.relu(a)


def scans(xs):
    def body(carry, x):
        return jnp.sin(carry) * x, None

    return jax.lax.scan(body, 0.0, xs)[0]


LINES = {
    "its own": (calls_it_twice, 1.0, "max", [line_of(shared.__wrapped__, 2)] * 2),
    "its callers'": (
        twice,
        1.0,
        "max",
        [line_of(twice, i) for i in (1, 2)],
    ),
    "its body's": (scans, jnp.ones(3), "sin", [line_of(scans, 2)]),
}


@pytest.mark.parametrize(("fun", "x", "op", "lines"), LINES.values(), ids=LINES)
def test_a_node_of_a_region_is_in_a_line_of_the_user(fun, x, op, lines):
    """Of a shared region its own, of a library's those of its callers."""
    found = tg.graph(fun, x).find(lambda o: o.node.op == op)
    assert [o.origin.line for o in found] == lines


@pytest.mark.parametrize(
    "model",
    [nnx.Linear(3, 2, rngs=nnx.Rngs(0)), eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))],
    ids=["flax", "equinox"],
)
def test_a_module_is_in_the_users_line(model):
    graph = tg.graph(lambda x: model(x), jnp.ones(3))
    assert {o.origin.file for o in graph.walk()} == {__file__}


def test_walk_goes_to_any_depth_in_the_order_of_execution():
    def f(x):
        y = jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)
        return jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c), y)

    ops = [o.node.op for o in tg.graph(f, 1.0).walk()]
    wanted = ["gt", "cond", "cos", "sin", "scan", "tanh"]
    assert [op for op in ops if op in wanted] == wanted


def test_a_function_of_a_notebook_is_told_by_its_cell(monkeypatch):
    compile = SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]"))
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=compile))
    monkeypatch.setitem(sys.modules, "IPython", ipython)

    @tg.custom_gradient
    def wrong(x):
        return x

    with pytest.raises(TypeError, match=r"'wrong' \(In\[3\]:\d+\) has a custom gradient"):
        wrong(1.0)


def test_a_graph_that_is_called_as_its_function_says_how_it_is_called():
    graph = tg.graph(lambda params, x: params["a"] * params["b"] * x, {"a": 1.0, "b": 2.0}, 3.0)
    assert graph(1.0, 2.0, 3.0) == [6.0]
    assert graph.to_callable()({"a": 1.0, "b": 2.0}, 3.0) == 6.0
    for arguments in [({"a": 1.0, "b": 2.0}, 3.0), (1.0, 2.0, 3.0, 4.0)]:
        with pytest.raises(TypeError, match=r"takes 3 arrays, . were given.*to_callable\(\)"):
            graph(*arguments)
    region = tg.graph(jax.jit(jnp.sin), jnp.ones(2)).nodes[0].region("jaxpr").to_callable()
    for arguments, says in [((), "takes 1 arrays, 0"), ((jnp.ones(3),), r"f32\[2\].*f32\[3\]")]:
        with pytest.raises(TypeError, match=says):
            region(*arguments)
