"""Programs that differ have other fingerprints, and one program has one in every process."""

import os
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import tracegrad as tg
from tracegrad.differentiation.fingerprint import fingerprint

pytestmark = pytest.mark.both_jax

X = jnp.ones((4, 4))
saving = jax.checkpoint_policies.save_only_these_names


def of(fun, *args):
    return fingerprint(tg.graph(fun)(*args or (X,)))


def scanned(body, **options):
    return lambda x: jax.lax.scan(lambda c, y: (body(c, y), c), x[0], x, **options)


def scanned_twice(body):
    return lambda x: jax.lax.scan(lambda c, _: (scanned(body)(c)[1], None), x, None, 3)


def chosen(first, second):
    return lambda x: jax.lax.cond(x[0, 0] > 0, first, second, x)


def repeated(least):
    return lambda x: jax.lax.while_loop(lambda c: c[0, 0] < least, lambda c: c + 1, x)


def ruled(slope):
    @tg.custom_gradient
    def f(x):
        return jnp.sin(x), lambda dy: slope(dy)

    return f


def ruled_forwards(factor):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), factor * tangents[0]))
    return f


def called_back(factor):
    return lambda x: jax.pure_callback(lambda v: factor * v, x, x)


def named(name, policy):
    return jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.sin(x), name)), policy=policy)


def closing_over(array):
    return lambda x: x + array


DIFFERENT = {
    "axis": [lambda x: jnp.cumsum(x, 0), lambda x: jnp.cumsum(x, 1)],
    "reduced axis": [lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1)],
    "contraction": [lambda x: x @ x, lambda x: x @ x.T, lambda x: jnp.einsum("ij,ik->jk", x, x)],
    "precision": [lambda x: x @ x, lambda x: jnp.matmul(x, x, precision="highest")],
    "body": [scanned(jnp.add), scanned(jnp.multiply), scanned(lambda c, y: y)],
    "body of a body": [scanned_twice(jnp.add), scanned_twice(jnp.multiply)],
    "unrolled": [scanned(jnp.add, unroll=n) for n in (1, 2)],
    "direction": [scanned(jnp.add, reverse=r) for r in (False, True)],
    "branches": [chosen(jnp.sin, jnp.cos), chosen(jnp.cos, jnp.sin)],
    "condition": [repeated(3.0), repeated(4.0)],
    "literal": [lambda x: x * 2.0, lambda x: x * 3.0],
    "operands": [lambda x: x - x.T, lambda x: x.T - x],
    "results": [lambda x: (x, jnp.sin(x)), lambda x: (jnp.sin(x), x), lambda x: jnp.sin(x)],
    "rule": [ruled(lambda dy: dy), ruled(lambda dy: 2 * dy), ruled(jnp.sin)],
    "rule forwards": [ruled_forwards(1.0), ruled_forwards(2.0)],
    "policy": [named("a", saving("a")), named("a", saving("b")), named("a", None)],
    "name of a value": [named("a", saving("a")), named("b", saving("a"))],
    "type closed over": [closing_over(np.ones(4)), closing_over(np.ones((4, 4)))],
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_programs_that_differ_have_other_fingerprints(what):
    prints = [of(fun) for fun in DIFFERENT[what]]
    assert len(set(prints)) == len(prints)
    assert prints == [of(lambda x, fun=fun: fun(x)) for fun in DIFFERENT[what]]  # traced again


def test_types_of_arguments_count():
    avals = [(4, "float32"), (5, "float32"), (4, "float16")]
    prints = [of(jnp.sin, jax.ShapeDtypeStruct((n,), dtype)) for n, dtype in avals]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (closing_over(np.ones(4)), closing_over(np.zeros(4))),
        (ruled(lambda dy: 3 * dy), ruled(lambda dy: 3 * dy)),
        (named("a", saving("a", "b", "c")), named("a", saving("a", "b", "c"))),
        (called_back(2.0), called_back(3.0)),
    ],
    ids=["values closed over", "rule", "policy", "host function"],
)
def test_a_program_that_is_written_twice_has_one_fingerprint(one, other):
    assert of(one) == of(other)


def test_an_edit_of_a_region_counts():
    graph = tg.graph(scanned(jnp.add))(X)
    other = tg.edit(tg.match.op("add"), lambda op, *operands: jnp.multiply(*operands))(graph)
    assert fingerprint(other) != fingerprint(graph)
    same = tg.edit(tg.match.op("add"), lambda op, *operands: op(*operands))(graph)
    assert fingerprint(same) == fingerprint(graph)


def test_a_rule_that_uses_itself_has_a_fingerprint():
    def rewritten(slope):
        rule = tg.rules.override_gradient(tg.match.op("sin"), lambda op, dy: slope * dy)
        return tg.rewrite(jnp.sin, rule)

    assert len({of(jnp.sin), of(rewritten(1.0)), of(rewritten(2.0))}) == 3
    assert of(rewritten(1.0)) == of(rewritten(1.0))


PROGRAM = """
import jax, jax.numpy as jnp
import tracegrad as tg
from tracegrad.differentiation.fingerprint import fingerprint

names = tuple(f"name {i}" for i in range(20))

@tg.custom_gradient
def ruled(x):
    return jnp.sin(x), lambda dy: 2 * dy

def f(x):
    x = jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.save_only_these_names(*names))(x)
    x = jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda x: jax.nn.relu(ruled(x)), x)
    x = jax.pure_callback(lambda v: v if "a" in {"a", "b", "c"} else 2 * v, x, x)
    mesh = jax.sharding.AbstractMesh((1, 1, 1), ("rows", "columns", "layers"))
    spec = jax.sharding.PartitionSpec()
    x = jax.shard_map(jnp.cos, mesh=mesh, in_specs=spec, out_specs=spec)(x)
    key = jax.random.key(0)
    return jnp.take(x, 1, axis=0) @ jnp.linalg.solve(x, x) + jax.random.normal(key, x.shape[1:])

found = fingerprint(tg.graph(f)(jnp.ones((4, 4))))
if __name__ == "__main__":
    print(found)
"""


def test_another_process_finds_the_same(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    here = runpy.run_path(str(script))["found"]
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    there = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here
