"""Values are in use as long as XLA's own dumps say, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys

# A process of its own: where XLA writes its dumps is read once.
PROGRAM = r"""
import pathlib, re, sys
import jax, jax.numpy as jnp
from tracegrad.insight.xla_buffers import bytes_in_use, read_assignment
from tracegrad.insight.value_flow import ValueFlow
from tracegrad.planning.hlo import Module, decoded, first

folder = pathlib.Path(sys.argv[1])
x, w = jnp.ones((256, 64)), jnp.ones((64, 64))
programs = {}

def program(f):
    programs[f.__name__] = f

@program
def kept_in_a_loop(x, w):
    def loss(w, x):
        def body(c, _):
            h, s = c
            return (jnp.sin(h @ w), s + h.sum()), jnp.tanh(h)
        (h, s), hs = jax.lax.scan(body, (x, 0.0), None, length=5)
        return (h * hs[2]).sum() + s
    return jax.grad(loss, argnums=(0, 1))(w, x)

@program
def early_in_a_turn(x, w):
    def body(_, s):
        xs, b = s
        xs = [jnp.sort(a, axis=0) for a in xs]
        t = sum(a[0, 0] for a in xs)
        return xs, jnp.sort(jnp.tile(b + t, (8, 1)), axis=0)[:256]
    xs, b = jax.lax.fori_loop(0, 9, body, ([jnp.sort(x + k) for k in range(5)], jnp.sort(x)))
    return sum(map(jnp.sum, xs)) + b.sum()

@program
def swapped(x, w):
    def body(_, s):
        a, b = s
        return b, a + 1
    a, b = jax.lax.fori_loop(0, 9, body, (jnp.sort(x), jnp.sort(x, axis=0)))
    return a @ w + b

@program
def branches(x, w):
    def a(x):
        r = jnp.sort(x, axis=0)
        return r, jnp.sort(jnp.tile(x + r[0, 0], (8, 1)), axis=0)[:256] + 0
    def b(x):
        return jnp.sort(x), x[::-1] * 2
    for _ in range(3):
        r, s = jax.lax.cond(x[0, 0] > 0, a, b, x)
        x = jnp.sort(r @ w) + s
    return x

@program
def drawn(x, w):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return jnp.sort(jnp.where(keep, x, 0.0) @ w) * jax.random.normal(jax.random.key(1), x.shape)

@program
def solved(x, w):
    return jnp.linalg.solve(w + 2 * jnp.eye(64), x.T) @ jnp.linalg.qr(x)[0]

@program
def recomputed(x, w):
    f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))
    return jax.grad(lambda x: f(f(f(x))).sum())(x)

for name, f in programs.items():
    compiled = jax.jit(f).lower(x, w).compile()
    message = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    names = {
        first(i, 35): first(i, 1).decode()
        for computation in map(decoded, decoded(message)[3])
        for i in map(decoded, computation[2])
    }
    (dump,) = folder.glob(f"*jit_{name}.*live-range.txt")
    text = dump.read_text()
    numbered = {n: int(k) for k, n in re.findall(r"^    (\d+):(\S+)$", text, re.M)}
    ranges = {}
    for n, part, start, end in re.findall(r"^    ([^\s{]+)\{([\d, ]*)\}:(\d+)-(\d+)$", text, re.M):
        ranges[n, tuple(map(int, re.findall(r"\d+", part)))] = int(start), int(end)
    analysis = compiled.memory_analysis()
    told = decoded(analysis.serialized_buffer_assignment_proto)
    ours = theirs = 0
    for values in read_assignment(ValueFlow(Module(message)), told)[0]["temporary"]:
        ours += max(bytes_in_use(0, values, len(names)), default=0)
        spans = [(v, ranges[names[v.part[0]], v.part[1]]) for v in values]
        xlas = [v._replace(first=start, last=end) for v, (start, end) in spans]
        theirs += max(bytes_in_use(0, xlas, max(numbered.values()) + 2), default=0)
    assert 0 < ours == theirs <= analysis.temp_size_in_bytes, (name, ours, theirs)
print("compared", len(programs))
"""


def test_values_are_in_use_as_long_as_xla_says(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path}"
    without_cache = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**without_cache, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "compared 7\n", done.stderr[-2000:]
