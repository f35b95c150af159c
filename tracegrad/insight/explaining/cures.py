"""The known cure for an operation that makes NaN or Inf, by the operation's name.

The cures are common practice: the double ``where`` (JAX's FAQ, "gradients contain NaN where using
where"), a norm that is safe at zero, library functions that stay finite where the written-out
formula does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tracegrad.ir import operations

_DOUBLE_WHERE = (
    "choose twice: `safe = jnp.where(ok, x, 1.0)`, compute with `safe`, then "
    "`jnp.where(ok, result, 0.0)`; the side that `where` does not take has a gradient as well, and "
    "0 * inf is NaN"
)


def backward_cure(
    op: str, operands: Sequence[float], given: float, makers: Sequence[str], users: Sequence[str]
) -> str:
    """Returns the cure for an operation whose VJP is not finite; "" if none is known.

    Args:
      op: the operation's name.
      operands: the values of its operands at the first NaN or Inf (NaN: not known).
      given: the cotangent that came in there.
      makers: the operations that made the operands.
      users: the operations that use the result.
    """
    first = operands[0] if operands else float("nan")
    masked = given == 0
    if op in ("sqrt", "rsqrt", "cbrt", "pow"):
        if op == "sqrt" and operations.SQUARES.intersection(makers[:1]):
            return (
                "a safe norm: `jnp.sqrt(jnp.sum(x**2) + eps)`; or choose twice: "
                "`jnp.where(s > 0, jnp.sqrt(jnp.where(s > 0, s, 1.0)), 0.0)` for the sum s"
            )
        if op == "pow":
            return (
                "the derivative of x**y at x = 0 (log(0) for y, 0**(y - 1) for x) is not finite: "
                + _DOUBLE_WHERE
            )
        if masked:
            return _DOUBLE_WHERE
        return f"eps inside: `{op}(x + eps)`, or " + _DOUBLE_WHERE
    if op in operations.LOGARITHMS:
        if "softmax" in makers or "div" in makers[:1]:
            return "`jax.nn.log_softmax(logits)` in place of the log of a softmax"
        return f"eps inside: `jnp.{op}(x + eps)`, or " + _DOUBLE_WHERE
    if op in operations.EXPONENTIALS:
        return _cure_of_overflow(users)
    if op in _BACKWARD:
        return _BACKWARD[op].format(op=op)
    return _DOUBLE_WHERE if masked and not np.isfinite(first) else ""


def forward_cure(op: str, users: Sequence[str]) -> str:
    """Returns the cure for an operation that made a NaN or Inf of finite numbers; "" if none is
    known. `users`: the operations that use its result."""
    return (
        _cure_of_overflow(users)
        if op in operations.EXPONENTIALS
        else _FORWARD.get(op, "").format(op=op)
    )


def _by_name(cures: Mapping[str, str]) -> dict[str, str]:
    """Splits keys that name several operations: each operation gets the cure."""
    return {op: cure for ops, cure in cures.items() for op in ops.split()}


_BACKWARD = _by_name(
    {
        "div integer_pow reciprocal": "the divisor is (close to) zero: " + _DOUBLE_WHERE,
        " ".join(operations.INVERSES): "the derivative of {op} is infinite at the end of its "
        "domain: clip the argument a little inside, `jnp.clip(x, -1 + eps, 1 - eps)`",
        "atan2": "atan2(0, 0) has no derivative: " + _DOUBLE_WHERE,
        "eigh eig svd qr": "equal eigenvalues (singular values), or such that the difference (of "
        "their squares) underflows, have no derivative of their vectors: use the values alone, "
        "scale the matrix, or add a small distinct diagonal",
        "cholesky lu triangular_solve custom_linear_solve": "the matrix is singular: add "
        "`eps * jnp.eye(n)`",
        "mul square dot_general": "an operand is not finite (or the product overflows): see what "
        "made it; where a `where` masks it, " + _DOUBLE_WHERE,
    }
)
_FORWARD = _by_name(
    {
        " ".join(operations.LOGARITHMS): "the argument is not positive: `jnp.log1p(x)` for "
        "log(1 + x), `jax.nn.log_softmax` for the log of a softmax, `jnp.{op}(x + eps)`, or "
        + _DOUBLE_WHERE,
        "log1p": "the argument is not above -1: clip it, or " + _DOUBLE_WHERE,
        "sqrt rsqrt pow": "the argument is negative (or zero): `jnp.maximum(x, eps)` inside",
        "div rem integer_pow": "the divisor is zero: add eps to it, or " + _DOUBLE_WHERE,
        "sub": "inf - inf: in a softmax over a row that is masked as a whole, use a large negative "
        "number for -inf, or leave such rows out by `where`",
        "mul square dot_general reduce_sum add cumsum cumprod reduce_prod": "the numbers overflow "
        "(or an Inf meets a zero): normalise, or compute with logarithms",
        " ".join(operations.INVERSES): "the argument is outside of the domain: clip it",
        "cholesky eigh svd lu": "the matrix is not (positive) definite: add `eps * jnp.eye(n)`",
        "triangular_solve custom_linear_solve": "the matrix is singular: add `eps * jnp.eye(n)`",
        "convert_element_type": "the number does not fit the smaller dtype: scale it, or use "
        "bfloat16 or float32",
    }
)


def _cure_of_overflow(users: Sequence[str]) -> str:
    if {"add", "log1p", *operations.LOGARITHMS} & set(users[:1]):
        return (
            "exp overflows: `jax.nn.softplus(x)` for log(1 + exp(x)), "
            "`jax.nn.sigmoid(x)` for 1 / (1 + exp(-x)), `jax.nn.logsumexp` for log(sum(exp(x)))"
        )
    if {"reduce_sum", "div"} & set(users[:2]):
        return "exp overflows: `jax.nn.softmax`, `jax.nn.logsumexp` subtract the maximum first"
    return "exp overflows: bound its argument, or choose twice: " + _DOUBLE_WHERE
