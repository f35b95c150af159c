"""What an installed copy is to a type checker: mypy and pyright read this where it is installed.

Lines that are wrong say so: both complain of a `type: ignore` that nothing needs.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax
import jax.numpy as jnp

import tracegrad as tg
from tracegrad.planning import RecomputePlan


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.relu(x @ w) ** 2)


w, x = jnp.ones((8, 2)), jnp.ones((4, 8))
assert_type(tg.graph(loss, w, x), tg.Graph)
assert_type(tg.plan_recompute(loss, w, x, memory_budget="2GiB", measure=False), RecomputePlan)
assert_type(tg.stop_gradient(w), jax.Array)
relu = tg.match.call("relu")
rule = tg.rules.stop_gradient(relu)
gradient = jax.grad(tg.rewrite(loss, rule))(w, x)
findings = tg.explain(loss, w, x).findings
assert_type(tg.intermediate_gradients(loss, w, x, where=relu)[1].keys().isdisjoint([]), bool)
assert_type(tg.Variable(w).shape, tuple[int, ...])

tg.plan_recompute(loss, w, x)  # type: ignore[call-arg]
tg.rewrite(loss, rule, rule)  # type: ignore[arg-type]
tg.grad(loss, unconnected="none")
tg.grad(loss, unconnected="nothing")  # type: ignore[arg-type]
tg.check_grads(loss, (w, x), modes=["rev"])
tg.check_grads(loss, (w, x), modes=["backward"])  # type: ignore[list-item]


# A traced function has the signature of the function.
@tg.trace(static_argnames="power", donate_argnums=0)
def powers(x: jax.Array, power: int) -> list[jax.Array]:
    return [x**n for n in range(power)]


class Scale:
    @tg.trace
    def scaled(self, x: float, by: float = 2.0) -> float:
        return x * by


assert_type(powers(x, power=2), list[jax.Array])
assert_type(Scale().scaled(1.0), float)
assert_type(tg.trace(len, rules=rule)("abc"), int)
powers(x, power="2")  # type: ignore[arg-type]
powers(x, 2, 3)  # type: ignore[call-arg]
Scale().scaled("1.0")  # type: ignore[arg-type]
