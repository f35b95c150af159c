"""Lists the custom calls of XLA that a saved program may contain, by their names.

A custom call names a function that is registered in the process: a solver of LAPACK, but also
JAX's callback into Python, which takes an address from the program. `jax.export` writes only those
custom calls whose meaning is stable between versions. It does not check when it reads a program,
which may come from anybody; so the names are listed here, and `load` checks them.
"""

from __future__ import annotations

from collections.abc import Iterable

# Factorisations on the CPU, each in four types; then the names for GPUs.
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
_KERNELS = {"tpu_custom_call", "mosaic_gpu_v2"}  # Pallas: the program contains the kernel
_OF_XLA = {
    *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"),
    *("AllocateBuffer", "shape_assertion"),
    *("stablehlo.dynamic_approx_top_k", "stablehlo.dynamic_reduce_window"),
    *("stablehlo.dynamic_rng_bit_generator", "stablehlo.dynamic_top_k"),
}


def _lapack_names() -> set[str]:
    found = set()
    for routine in _LAPACK:
        real, _, complex_ = routine.partition("/")
        found |= {f"lapack_{kind}{real}_ffi" for kind in "sd"}
        found |= {f"lapack_{kind}{complex_ or real}_ffi" for kind in "cz"}
    return found


ALLOWED = frozenset(_lapack_names() | _GPUS | _TPU | _KERNELS | _OF_XLA)
"""The targets that a saved program may call: the list of `jax.export` without the target for calls
of TensorFlow."""


def unknown(targets: Iterable[str]) -> str | None:
    """The first target that is not in `ALLOWED`."""
    return next((target for target in targets if target not in ALLOWED), None)
