"""Which operations are alike: by what they do to the elements of arrays, by name of the primitive.

One table for whoever asks: what a derivative is cut by, what is linear, what costs nothing. What is
told by shapes or parameters, and not by the name alone, is asked of the node.
"""

from __future__ import annotations

from collections.abc import Mapping

Names = frozenset[str]


def _names(text: str, *others: Names) -> Names:
    return frozenset(text.split()).union(*others)


# ------------------------------------------------------------------- the same elements, elsewhere

# In the same order in memory.
RESHAPES = _names("reshape squeeze expand_dims")
COPIES = _names("copy copy_p name")
# Maybe in another order, or of another precision.
REARRANGES = RESHAPES | COPIES | _names("transpose rev convert_element_type")
# Nothing is computed: XLA writes no array for it, or reads the one that is there.
VIEWS = REARRANGES | _names(
    "broadcast_in_dim slice split stop_gradient assigned optimization_barrier sharding_constraint"
)

# -------------------------------------------------------------------------- element by element

COMPARISONS = _names("eq ne lt le gt ge is_finite")
# Constant almost everywhere.
ROUNDINGS = _names("floor ceil round sign nextafter")
# Of an instruction or two.
CHEAP = _names(
    "add add_any sub mul neg max min select_n abs integer_pow square clamp one_minus_square "
    "polynomial and or xor not shift_left shift_right_logical shift_right_arithmetic "
    "real imag conj complex reduce_precision iota",
    *(COMPARISONS, ROUNDINGS),
)
EXPONENTIALS = _names("exp exp2 expm1 sinh cosh")  # which overflow
LOGARITHMS = _names("log log2")
INVERSES = _names("asin acos acosh atanh erf_inv")  # with an end of their domain
# Of many instructions.
COSTLY = _names(
    "log1p tanh logistic erf erfc sin cos tan atan atan2 asinh "
    "sqrt rsqrt cbrt pow div rem lgamma digamma",
    *(EXPONENTIALS, INVERSES, LOGARITHMS),
)
BY_ELEMENT = _names(
    "copy copy_p convert_element_type igamma igammac random_gamma_grad polygamma zeta "
    "bessel_i0e bessel_i1e regularized_incomplete_beta",
    *(CHEAP - {"iota"}, COSTLY),
)
# Whose result is linear in the first operand, and multiplies that by a function of the other one.
FACTORS = _names("mul div")
# The derivative is finite even where the operands are not.
BOUNDED = _names("max min clamp select_n sign")

# ------------------------------------------------------------------------ of many elements one

REDUCTIONS = _names(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin reduce"
)
CHOICES = _names("argmax argmin sort top_k approx_top_k")
SQUARES = _names("reduce_sum square integer_pow dot_general")  # what a norm is the root of
CONTRACTIONS = _names("dot_general conv_general_dilated")
# Decompositions and solutions of systems.
MATRIX_KERNELS = _names("cholesky lu qr eigh eig svd triangular_solve custom_linear_solve")
# XLA runs each by itself: done again, it is not fused into what reads it.
KERNELS = _names(
    "scan while cond sort top_k fft pallas_call gather scatter scatter-add random_bits",
    *(CONTRACTIONS, MATRIX_KERNELS),
)
CALLBACKS = _names("pure_callback io_callback debug_callback")

# --------------------------------------------------------------------------- linear and analytic

# By the positions of the operands of which the result is a sum, or is put together; None: all.
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
# In the first operand, and nothing else is added.
LINEAR = REARRANGES | _names(
    "neg broadcast_in_dim slice dynamic_slice gather reduce_sum cumsum real imag conj "
    "reduce_precision"
)
# Samples of a distribution: their derivative is that of its quantiles (implicit), and not that of
# how they are drawn (by rejection).
IMPLICIT = _names("random_gamma")
# Of each of these a complex number differs from a real one by its derivative alone.
ANALYTIC = RESHAPES | _names(
    "add add_any sub mul div neg square integer_pow sqrt exp expm1 log log1p logistic sin cos tan "
    "sinh cosh tanh dot_general reduce_sum cumsum broadcast_in_dim transpose rev slice pad "
    "concatenate copy jit"
)
# Differentiable in each operand, whatever their parameters are: none of the derivatives is zero by
# structure.
CONNECTING = ANALYTIC - {"integer_pow", "jit"}
