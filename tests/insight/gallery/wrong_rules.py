"""Custom rules whose gradient is not that of their function."""

import jax
import jax.numpy as jnp

import tracegrad as tg

from .bug import Bug, bug


@bug
def jvp_rule_without_a_tangent():
    """A custom JVP that leaves out the tangent of its second argument."""

    @jax.custom_jvp
    def product(x, y):
        return x * y

    @product.defjvp
    def product_jvp(primals, tangents):
        x, y = primals
        return x * y, tangents[0] * y

    def loss(y, x):
        return jnp.sum(product(x, y))  # cause: custom rule

    def repaired(y, x):
        return jnp.sum(x * y)

    return Bug(loss, (jnp.ones(3), jnp.arange(3.0)), repaired=repaired)


@bug
def rule_that_clips():
    """Gradients are clipped at every layer, where only large ones were to be."""

    @jax.custom_vjp
    def clip_gradient(x):
        return x

    clip_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.01, 0.01),))

    def loss(w, x):
        h = clip_gradient(x @ w)  # cause: changed by a rule
        return jnp.sum(h**2)

    def repaired(w, x):
        return jnp.sum((x @ w) ** 2)

    return Bug(loss, (jnp.ones(3), jnp.ones((2, 3))), repaired=repaired)


@bug
def rule_that_returns_none():
    """The backward pass of a custom rule forgets the scale."""

    @jax.custom_vjp
    def scaled(x, scale):
        return x * scale

    def forward(x, scale):
        return scaled(x, scale), scale

    def backward(scale, ct):
        return ct * scale, None

    scaled.defvjp(forward, backward)

    def loss(params, x):
        y = scaled(x, params["scale"])  # cause: custom rule
        return jnp.sum(y**2)

    def repaired(params, x):
        return jnp.sum((x * params["scale"]) ** 2)

    return Bug(loss, ({"scale": jnp.float32(2.0)}, jnp.ones(3)), repaired=repaired)


@bug
def rule_that_returns_zeros():
    """A placeholder of zeros was left in the backward pass of a rule."""

    @tg.custom_gradient
    def affine(x, w):
        def gradient(dy):
            return dy * w, jnp.zeros_like(w)

        return x * w, gradient

    def loss(w, x):
        return jnp.sum(affine(x, w))  # cause: custom rule

    def repaired(w, x):
        return jnp.sum(x * w)

    return Bug(loss, (jnp.ones(3), jnp.arange(3.0)), repaired=repaired)


@bug
def rule_with_a_wrong_factor():
    """The gradient of x**2 without its 2."""

    @tg.custom_gradient
    def square(x):
        return x**2, lambda dy: dy * x

    def loss(w, x):
        return jnp.sum(square(x @ w))  # cause: changed by a rule

    def repaired(w, x):
        return jnp.sum((x @ w) ** 2)

    return Bug(loss, (jnp.ones(3), jnp.ones((2, 3))), repaired=repaired)
