"""Sets of names of primitives, grouped by what a primitive does to the elements of arrays.

All modules look up here which operations stop a derivative, are linear, or cost nothing. A property
that depends on shapes or parameters, and not on the name alone, is computed from the node.
"""

from __future__ import annotations

from collections.abc import Mapping

Names = frozenset[str]


def _name_set(text: str, *others: Names) -> Names:
    return frozenset(text.split()).union(*others)


# ------------------------------------------------------------------ operations that move elements

# These keep the order of the elements in memory.
RESHAPES = _name_set("reshape squeeze expand_dims")
COPIES = _name_set("copy copy_p name")
# These may change the order of the elements, or their dtype.
REARRANGES = RESHAPES | COPIES | _name_set("transpose rev convert_element_type")
# JAX writes these in front of an operation whose operands have different types.
PROMOTIONS = _name_set("broadcast_in_dim convert_element_type")
# These compute nothing: XLA writes no array for the result, or reads the operand's array instead.
VIEWS = REARRANGES | _name_set(
    "broadcast_in_dim slice split stop_gradient assigned optimization_barrier sharding_constraint "
    "changed_cotangent"
)

# -------------------------------------------------------------------------- element by element

COMPARISONS = _name_set("eq ne lt le gt ge eq_to lt_to le_to is_finite")
# Each element of a result equals some element of an operand, by order.
EXTREMES = _name_set(
    "max min reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min "
    "sort top_k approx_top_k"
)
# JAX defines their derivatives as zero.
ROUNDINGS = _name_set("floor ceil round sign nextafter")
# One or two instructions per element.
CHEAP = _name_set(
    "add add_any sub mul neg max min select_n abs integer_pow square clamp one_minus_square "
    "polynomial and or xor not shift_left shift_right_logical shift_right_arithmetic "
    "real imag conj complex reduce_precision iota",
    *(COMPARISONS, ROUNDINGS),
)
EXPONENTIALS = _name_set("exp exp2 expm1 sinh cosh")  # overflow for large operands
LOGARITHMS = _name_set("log log2")
INVERSES = _name_set("asin acos acosh atanh erf_inv")  # undefined outside of an interval
# Many instructions per element.
COSTLY = _name_set(
    "log1p tanh logistic erf erfc sin cos tan atan atan2 asinh "
    "sqrt rsqrt cbrt pow div rem lgamma digamma",
    *(EXPONENTIALS, INVERSES, LOGARITHMS),
)
BY_ELEMENT = _name_set(
    "copy copy_p convert_element_type igamma igammac random_gamma_grad polygamma zeta "
    "bessel_i0e bessel_i1e regularized_incomplete_beta",
    *(CHEAP - {"iota"}, COSTLY),
)
# Their derivatives are finite even if an operand is infinite or NaN.
BOUNDED = _name_set("max min clamp select_n sign")

# ------------------------------------------------------------- reductions, contractions, kernels

REDUCTIONS = _name_set(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin reduce"
)
CHOICES = _name_set("argmax argmin sort top_k approx_top_k")
# A norm is the root of one of these.
SQUARES = _name_set("reduce_sum square integer_pow dot_general")
CONTRACTIONS = _name_set("dot_general conv_general_dilated")
# Matrix decompositions and solvers of linear systems.
MATRIX_KERNELS = _name_set("cholesky lu qr eigh eig svd triangular_solve custom_linear_solve")
# XLA runs each as a kernel of its own, and does not fuse a recomputed kernel into its readers.
KERNELS = _name_set(
    "scan while cond sort top_k fft pallas_call gather scatter scatter-add random_bits",
    *(CONTRACTIONS, MATRIX_KERNELS),
)
CALLBACKS = _name_set("pure_callback io_callback debug_callback")

# --------------------------------------------------------------------------- linear and analytic

# Maps a name to the positions of the operands that are added or joined; None: all operands.
ADDITIVE: Mapping[str, tuple[int, ...] | None] = {
    "add": None,
    "add_any": None,
    "sub": None,
    "concatenate": None,
    "pad": None,
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
}
PRODUCTS = CONTRACTIONS | {"mul"}
FACTORS = PRODUCTS | {"div"}  # products of the first operand and a function of the second
# The result is linear in the first operand, with no other term.
LINEAR = REARRANGES | _name_set(
    "neg broadcast_in_dim slice dynamic_slice gather reduce_sum cumsum real imag conj "
    "reduce_precision"
)
# Samples of a distribution. Their derivative is the implicit derivative, with a constant quantile,
# and not the derivative of the rejection sampler that draws them.
IMPLICIT = _name_set("random_gamma")
# Differentiable in each operand, for all parameters. No derivative is identically zero.
CONNECTING = RESHAPES | _name_set(
    "add add_any sub mul div neg square sqrt exp expm1 log log1p logistic sin cos tan sinh cosh "
    "tanh dot_general reduce_sum cumsum broadcast_in_dim transpose rev slice pad concatenate copy"
)
