"""Row ids as arrays of an opaque dtype, which can be moved but not computed with.

`IndexedSlices` are a pytree, so that they go into and out of compiled functions. If the row ids in
the tree were integers, a function that maps over trees could scale the ids, clip them, or count
them into a norm, and would silently return a gradient of other rows. So the tree holds arrays of an
opaque element type. JAX has such types for random keys, supports them in every transformation, and
lets libraries define more. Operations that move elements (indexing, concatenating, selecting,
loops, meshes) accept opaque types; operations that compute with elements raise. In compiled
programs the ids are integers.

JAX can still fill an array of this type with a number (``jnp.ones_like``). The fill must not be a
valid id. So an id is stored as an integer with its sign bit flipped: then a small number stands for
an id that no table has.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl


def _refuse(*args: Any) -> NoReturn:
    raise TypeError("the row ids of IndexedSlices are not random keys")


# The name of the type in JAX's errors: "multiply does not accept dtypes float32, key<row ids ...>".
_TAG = "row ids of IndexedSlices: use to_dense(), deduplicated() or apply_rows"
# Maps the number of 32-bit words of an id to its type.
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
    """Converts row ids ``int32[...]`` or ``int64[...]`` to an opaque array of the same shape."""
    words = ids.dtype.itemsize // 4
    bits = jax.lax.bitcast_convert_type(_flip_sign_bit(ids), jnp.uint32).reshape(*ids.shape, words)
    return jax.random.wrap_key_data(bits, impl=_KINDS[words])


def are_opaque(rows: Any) -> bool:
    """Whether `rows` is an array of row ids, or the type of such an array."""
    dtype: Any = getattr(rows, "dtype", None)
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def integers(rows: Any) -> Any:
    """Converts an opaque array, or the type of an opaque array, to integer row ids.

    A value that is not an array is returned unchanged, since JAX may put any object in the place of
    an array of a tree. Raises TypeError for an array that is not opaque, and so has no ids.
    """
    if not are_opaque(rows):
        if not hasattr(rows, "dtype"):
            return rows
        raise TypeError(
            f"an array of {rows.dtype} stands in the place of row ids of IndexedSlices: these "
            "slices were made by mapping over the leaves of slices, and are not valid. Before "
            "such a map, use to_dense(), deduplicated() or apply_rows"
        )
    if not isinstance(rows, jax.Array):  # flax, too, has a class for the type of an array
        kind: Any = jax.ShapeDtypeStruct
        return jax.eval_shape(integers, kind(rows.shape, rows.dtype))
    bits = jax.random.key_data(rows)
    if bits.shape[-1] == 1:
        return _flip_sign_bit(jax.lax.bitcast_convert_type(bits, jnp.int32).reshape(rows.shape))
    return _flip_sign_bit(jax.lax.bitcast_convert_type(bits, jnp.int64))


def _flip_sign_bit(ids: Any) -> Any:
    return ids ^ np.iinfo(ids.dtype).min


def are_filled(ids: Any) -> Any:
    """For each id, whether it comes from an opaque array that was filled with a number."""
    kind = np.iinfo(ids.dtype)
    return ids < kind.min + (1 << kind.bits - 16)
