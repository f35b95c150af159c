"""Derivatives that many tests ask for in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import tracegrad as tg


def value_by_tape(fun: Callable[..., Any], *args: Any, sources: Any = None) -> tuple[Any, Any]:
    """What a function returns, and its gradient on a tape: for its argument, for each of several,
    or for other `sources`, which are Variables."""
    with tg.GradientTape() as tape:
        tape.watch(args)
        value = fun(*args)
    if sources is None:
        sources = args if len(args) > 1 else args[0]
    return value, tape.gradient(value, sources)


def by_tape(fun: Callable[..., Any], *args: Any, sources: Any = None) -> Any:
    """The gradient alone."""
    return value_by_tape(fun, *args, sources=sources)[1]


@tg.custom_gradient
def log1pexp(x: Any) -> Any:
    """Its gradient takes a value from the middle, and is right where the naive form is NaN."""
    e = jnp.exp(x)
    return jnp.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))


def with_text(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: (fun(x), ("text", x))


def along_each(derivative: Callable[[Any], Any], x: Any) -> Any:
    """A gradient by its products with unit vectors."""
    return jax.vmap(derivative)(jnp.eye(len(x)))


# Every way to the gradient of a loss of one vector.
GRADIENTS: dict[str, Callable[..., Any]] = {
    "tg.grad": lambda f, x: tg.grad(f)(x),
    "tg.value_and_grad with aux": lambda f, x: tg.value_and_grad(with_text(f), has_aux=True)(x)[1],
    "tg.jacobian": lambda f, x: tg.jacobian(f)(x),
    "tg.grad, unconnected": lambda f, x: tg.grad(f, unconnected="raise")(x),
    "tg.grad of a traced loss": lambda f, x: tg.grad(tg.trace(f))(x),
    "tg.grad of a jitted loss": lambda f, x: tg.grad(jax.jit(f))(x),
    "tg.jvp": lambda f, x: along_each(lambda v: tg.jvp(f, (x,), (v,))[1], x),
    "a tape": by_tape,
    "a tape over a jitted loss": lambda f, x: by_tape(jax.jit(f), x),
    "a tape over a traced loss": lambda f, x: by_tape(tg.trace(f), x),
    "tg.gradients": lambda f, x: tg.trace(lambda x: tg.gradients(f(x), [x])[0])(x),
    "tg.grad in a jitted function": lambda f, x: jax.jit(lambda x: tg.grad(f)(x))(x),
    "tg.grad in a traced function": lambda f, x: tg.trace(lambda x: tg.grad(f)(x))(x),
    "tg.grad in a scan": lambda f, x: lax.scan(lambda c, _: (tg.grad(f)(c), None), x, None, 1)[0],
    "jax.grad": lambda f, x: jax.grad(f)(x),
    "jax.value_and_grad with aux": lambda f, x: jax.value_and_grad(with_text(f), has_aux=True)(x)[
        1
    ],
    "jax.vjp": lambda f, x: jax.vjp(f, x)[1](1.0)[0],
    "jax.linearize": lambda f, x: along_each(jax.linearize(f, x)[1], x),
    "jax.jacrev": lambda f, x: jax.jacrev(f)(x),
    "jax.jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jax.grad of a jitted loss, vmapped": lambda f, x: jax.vmap(jax.grad(jax.jit(f)))(x[None])[0],
    "jax.grad in a scan": lambda f, x: lax.scan(lambda c, _: (jax.grad(f)(c), None), x, None, 1)[0],
    "equinox.filter_grad": lambda f, x: eqx.filter_grad(f)(x),
    "equinox.filter_vjp": lambda f, x: eqx.filter_vjp(f, x)[1](1.0)[0],
    "equinox.filter_jvp": lambda f, x: along_each(lambda v: eqx.filter_jvp(f, (x,), (v,))[1], x),
    "nnx.grad": lambda f, x: nnx.grad(lambda w: f(w[...]))(nnx.Param(x))[...],
}


@jax.custom_vjp
def refuses_second(x, y):
    """A product whose rule refuses one operand, as rules of equinox and diffrax do. JAX cannot use
    a rule any more in a program in which it has refused."""
    return x * y


def _forward_of_product(x, y):
    if y.perturbed:
        raise RuntimeError("the second operand has no gradient")
    return x.value * y.value, y.value


refuses_second.defvjp(
    _forward_of_product, lambda y, dz: (dz * y, jnp.zeros_like(y)), symbolic_zeros=True
)


@jax.custom_vjp
def root(x, scale):
    """A root whose derivative at 0 is infinite, and whose rule refuses a gradient of the scale."""
    return jnp.sqrt(x) * scale


def _forward_of_root(x, scale):
    if scale.perturbed:
        raise NotImplementedError("the scale has no gradient")
    return root(x.value, scale.value), (x.value, scale.value)


def _backward_of_root(kept, dy):
    x, scale = kept
    return dy * scale * 0.5 / jnp.sqrt(x), None


root.defvjp(_forward_of_root, _backward_of_root, symbolic_zeros=True)
