"""Row ids as the leaf of a tree that no arithmetic takes.

`IndexedSlices` are a tree, so that they go into and out of compiled functions. Whoever maps over
trees would find integers in them, and scale them, clip them, or count them into a norm: a gradient
of other rows, without an error. So what stands in the tree is an array of an opaque element type.
JAX has them for random keys, in every transformation, and lets others be made: all that moves
elements takes them (indexing, concatenating, selecting, loops, meshes), all that computes with them
raises. In compiled programs they are the integers that they hold.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl


def _refuse(*args: Any) -> NoReturn:
    raise TypeError("the row ids of IndexedSlices are no random keys")


# By which JAX's errors call the type: "multiply does not accept dtypes float32, key<row ids ...>".
_TAG = "row ids of IndexedSlices: use to_dense(), deduplicated() or apply_rows"
# By the words of 32 bits that an id has.
_KINDS = {
    words: define_prng_impl(
        key_shape=(words,),
        seed=_refuse,
        split=_refuse,
        random_bits=_refuse,
        fold_in=_refuse,
        name=f"tracegrad_row_ids_{32 * words}",
        tag=_TAG if words == 1 else f"64-bit {_TAG}",
    )
    for words in (1, 2)
}


def opaque(ids: Any) -> Any:
    """Row ids ``int32[...]`` or ``int64[...]`` as an array of the same shape that only moves."""
    words = ids.dtype.itemsize // 4
    bits = jax.lax.bitcast_convert_type(ids, jnp.uint32).reshape(*ids.shape, words)
    return jax.random.wrap_key_data(bits, impl=_KINDS[words])


def integers(rows: Any) -> Any:
    """The row ids of an opaque array; of its type their type, and anything else as it is, since a
    tree may hold anything in the places of arrays."""
    dtype: Any = getattr(rows, "dtype", None)
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return rows
    if isinstance(rows, jax.ShapeDtypeStruct):
        return jax.eval_shape(integers, rows)
    bits = jax.random.key_data(rows)
    if bits.shape[-1] == 1:
        return jax.lax.bitcast_convert_type(bits, jnp.int32).reshape(rows.shape)
    return jax.lax.bitcast_convert_type(bits, jnp.int64)
