"""Makes primitives that return an operand unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir  # noqa: TID251 (see `identity_primitive`)


def identity_primitive(
    name: str,
    differentiated: Callable[..., Exception | None] = lambda **params: None,
    exported: Callable[..., Exception | None] = lambda **params: None,
    batched: Callable[..., Exception | None] = lambda **params: None,
) -> Any:
    """Makes a primitive that returns its one operand, and in forward mode the operand's tangent.

    `differentiated`, `exported` and `batched` are called with the primitive's parameters when the
    primitive is differentiated, exported, or under `jax.vmap`; each returns an error to raise, or
    None.

    JAX's documentation of new primitives registers rules in the same tables of `jax.interpreters`;
    JAX removes other contents of these modules release by release. The flag that distinguishes an
    export from other lowerings is undocumented.
    """
    primitive: Any = jex.Primitive(name)

    def batch(args: Any, axes: Any, **params: Any) -> Any:
        error = batched(**params)
        if error is not None:
            raise error
        return primitive.bind(args[0], **params), axes[0]

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        error = differentiated(**params)  # JAX does not call this rule if all tangents are zero
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


CHANGED_COTANGENT: Any = jex.Primitive("changed_cotangent")


def with_cotangent_alone(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns an identity function that maps its cotangent by ``change(cotangent)``, but not its
    tangent. (The functions of `with_cotangent` refuse forward mode.)"""
    return lambda value: CHANGED_COTANGENT.bind(value, change=change)


def _map_cotangents(args: Any, axes: Any, *, change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """For `jax.vmap`: each element changes its own cotangent."""
    (axis,) = axes
    mapped = jax.vmap(change, in_axes=axis, out_axes=axis)
    return CHANGED_COTANGENT.bind(*args, change=mapped), axis


def _change_cotangent(cotangent: Any, _: Any, *, change: Callable[[Any], Any]) -> list[Any]:
    return [cotangent if type(cotangent) is ad.Zero else change(cotangent)]


CHANGED_COTANGENT.def_impl(lambda value, **_: value)
CHANGED_COTANGENT.def_abstract_eval(lambda aval, **_: aval)
batching.primitive_batchers[CHANGED_COTANGENT] = _map_cotangents
# A second derivative sees a plain identity, as in `with_cotangent`.
ad.primitive_jvps[CHANGED_COTANGENT] = lambda primals, tangents, **params: (
    primals[0],
    CHANGED_COTANGENT.bind(*tangents, **params),
)
ad.primitive_transposes[CHANGED_COTANGENT] = _change_cotangent
mlir.register_lowering(CHANGED_COTANGENT, lambda context, value, **_: [value])


def mapped_alike(args: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Moves the mapped axis of each operand of a mapped primitive to the front; broadcasts operands
    without a mapped axis."""
    size = next(a.shape[i] for a, i in zip(args, axes, strict=True) if i is not None)
    return [
        # (A literal of a program has no shape.)
        jnp.broadcast_to(a, (size, *jnp.shape(a))) if i is None else jnp.moveaxis(a, i, 0)
        for a, i in zip(args, axes, strict=True)
    ]


def standing_in_primitive(name: str, lost: Callable[..., None]) -> Any:
    """Makes a primitive of two operands of one type: its value is the first operand, its tangent
    the tangent of the second operand. Lowered programs do not contain the primitive. (For the
    tables see `identity_primitive`.)

    `lost`: called with the primitive's parameters if only the first operand has a tangent.
    """
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
