"""Which calls of code outside of it a saved program may make: XLA's custom calls, by their names.

A custom call names a function that is registered in the process: a solver of LAPACK, but also
JAX's way back into Python, which takes an address from the program. `jax.export` lets those few be
written whose meaning stays the same from version to version. It looks when it writes and not when
it reads, where a program may come from anybody; so they are listed here, and asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable

# Factorisations on the CPU, each in four types, and the sets of names that GPUs have for them.
_LAPACK = (
    *("potrf", "geqrf", "gesdd", "getrf", "gehrd", "geev", "gees", "trsm", "gtsv"),
    *("syevd/heevd", "sytrd/hetrd", "orgqr/ungqr"),  # real/complex
)
_SOLVERS = ("getrf", "geqrf", "orgqr", "potrf", "syevd", "gesvd", "gesvdj", "sytrd")
_GPUS = {
    *(f"cusolver_{name}_ffi" for name in _SOLVERS),
    *(f"hipsolver_{name}_ffi" for name in (*_SOLVERS, "gesdd")),
    *("cusparse_gtsv2_ffi", "cu_threefry2x32_ffi", "hip_threefry2x32_ffi"),
    *("cu_lu_pivots_to_permutation", "hip_lu_pivots_to_permutation"),
}
_TPU = {"Eigh", "Qr", "ProductOfElementaryHouseholderReflectors", "LuDecomposition", "ApproxTopK"}
_KERNELS = {"tpu_custom_call", "mosaic_gpu_v2"}  # of Pallas: the kernel is in the program itself
_OF_XLA = {
    *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"),
    *("AllocateBuffer", "shape_assertion"),
    *("stablehlo.dynamic_approx_top_k", "stablehlo.dynamic_reduce_window"),
    *("stablehlo.dynamic_rng_bit_generator", "stablehlo.dynamic_top_k"),
}


def _lapack() -> set[str]:
    found = set()
    for routine in _LAPACK:
        real, _, complex_ = routine.partition("/")
        found |= {f"lapack_{kind}{real}_ffi" for kind in "sd"}
        found |= {f"lapack_{kind}{complex_ or real}_ffi" for kind in "cz"}
    return found


ALLOWED = frozenset(_lapack() | _GPUS | _TPU | _KERNELS | _OF_XLA)
"""The targets that a saved program may have: those of `jax.export`'s list that programs of JAX
alone can need. (It has one more, by which a program calls into TensorFlow.)"""


def unknown(targets: Iterable[str]) -> str | None:
    """The first target that is not among `ALLOWED`; None if all are."""
    return next((target for target in targets if target not in ALLOWED), None)
