"""Primitives of ours that hand on an operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir  # noqa: TID251 (see `identity_primitive`)


def identity_primitive(
    name: str,
    differentiated: Callable[..., Exception | None] = lambda **params: None,
    exported: Callable[..., Exception | None] = lambda **params: None,
    batched: Callable[..., Exception | None] = lambda **params: None,
) -> Any:
    """A primitive that hands on its one operand, and in forward mode the tangent past itself.

    What is raised when it is `differentiated`, `exported` or `batched` (under `jax.vmap`) these
    make of its parameters; None: nothing. The tables of
    rules are those that JAX's documentation of new primitives uses, of `jax.interpreters`, whose
    other contents JAX takes away release by release; what tells an export from other lowerings has
    no documentation.
    """
    primitive: Any = jex.Primitive(name)

    def batch(args: Any, axes: Any, **params: Any) -> Any:
        error = batched(**params)
        if error is not None:
            raise error
        return primitive.bind(args[0], **params), axes[0]

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        error = differentiated(**params)  # JAX does not come here where all tangents are zeros
        if error is not None:
            raise error
        return primitive.bind(*primals, **params), *tangents

    def lower(context: Any, operand: Any, **params: Any) -> Any:
        is_export = context.module_context.lowering_parameters.for_export
        error = exported(**params) if is_export else None
        if error is not None:
            raise error
        return [operand]

    primitive.def_impl(lambda operand, **params: operand)
    primitive.def_abstract_eval(lambda aval, **params: aval)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    mlir.register_lowering(primitive, lower)
    return primitive


def mapped_alike(args: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """The operands of what `jax.vmap` maps over some axis of some of them: all along the first."""
    size = next(a.shape[i] for a, i in zip(args, axes, strict=True) if i is not None)
    return [
        # (A literal of a program has no shape.)
        jnp.broadcast_to(a, (size, *jnp.shape(a))) if i is None else jnp.moveaxis(a, i, 0)
        for a, i in zip(args, axes, strict=True)
    ]


def standing_in_primitive(name: str, lost: Callable[..., None]) -> Any:
    """A primitive of two operands of one type, which hands on the first; its derivative is that of
    the second. Programs contain nothing of it. (For the tables see `identity_primitive`.)

    `lost`: is called with the primitive's parameters if the first operand alone has a tangent."""
    primitive: Any = jex.Primitive(name)

    def batch(args: Any, axes: Any, **params: Any) -> Any:
        return primitive.bind(*mapped_alike(args, axes), **params), 0

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        if isinstance(tangents[1], ad.Zero) and not isinstance(tangents[0], ad.Zero):
            lost(**params)
        return primitive.bind(*primals, **params), tangents[1]

    primitive.def_impl(lambda value, other, **_: value)
    primitive.def_abstract_eval(lambda value, other, **_: value)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    mlir.register_lowering(primitive, lambda context, value, other, **_: [value])
    return primitive
