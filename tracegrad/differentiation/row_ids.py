"""Row ids as the leaf of a tree that no arithmetic takes.

`IndexedSlices` are a tree, so that they go into and out of compiled functions. Whoever maps over
trees would find integers in them, and scale them, clip them, or count them into a norm: a gradient
of other rows, without an error. So what stands in the tree is an array of an opaque element type.
JAX has them for random keys, in every transformation, and lets others be made: all that moves
elements takes them (indexing, concatenating, selecting, loops, meshes), all that computes with them
raises. In compiled programs they are integers.

One thing JAX does to them as to any array: it makes others of their type, filled with a number
(``jnp.ones_like``). Those would be ids. So the sign of an id is flipped in the integer that stands
for it, by which a small number stands for an id that no table has.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl


def _refuse(*args: Any) -> NoReturn:
    raise TypeError("the row ids of IndexedSlices are no random keys")


# By which JAX's errors call the type: "multiply does not accept dtypes float32, key<row ids ...>".
_TAG = "row ids of IndexedSlices: use to_dense(), deduplicated() or apply_rows, or sparse_adam"
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
    bits = jax.lax.bitcast_convert_type(_flipped(ids), jnp.uint32).reshape(*ids.shape, words)
    return jax.random.wrap_key_data(bits, impl=_KINDS[words])


def are_opaque(rows: Any) -> bool:
    """Whether something is an array of row ids, or its type."""
    dtype: Any = getattr(rows, "dtype", None)
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def integers(rows: Any) -> Any:
    """The row ids of an opaque array, and of its type their type.

    Anything that is no array is returned as it is, since a tree may hold anything in the places of
    arrays. Raises TypeError for an array of another type, which has been put into the place of ids.
    """
    if not are_opaque(rows):
        if not hasattr(rows, "dtype"):
            return rows
        raise TypeError(
            f"an array of {rows.dtype} stands in the place of row ids of IndexedSlices: these were "
            "made by mapping over the leaves of slices, and are none. Before that, use to_dense(), "
            "deduplicated() or apply_rows"
        )
    if isinstance(rows, jax.ShapeDtypeStruct):
        return jax.eval_shape(integers, rows)
    bits = jax.random.key_data(rows)
    if bits.shape[-1] == 1:
        return _flipped(jax.lax.bitcast_convert_type(bits, jnp.int32).reshape(rows.shape))
    return _flipped(jax.lax.bitcast_convert_type(bits, jnp.int64))


def _flipped(ids: Any) -> Any:
    return ids ^ np.iinfo(ids.dtype).min


def are_of_a_fill(ids: Any) -> Any:
    """For each id whether it is none, but a number with which an opaque array has been filled."""
    kind = np.iinfo(ids.dtype)
    return ids < kind.min + (1 << kind.bits - 16)
