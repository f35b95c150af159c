"""`ForwardAccumulator`: derivatives along a direction, carried forward as a ``with`` block runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.gradient_types import as_inexact
from tracegrad.tape.leaves import Unconnected, UnconnectedGradients, require_arrays
from tracegrad.tape.recorders import Recording
from tracegrad.tape.tangents import Tangents
from tracegrad.variables.statics import is_none, is_variable
from tracegrad.variables.variable import Variable


class ForwardAccumulator(Recording):
    """Jacobian-vector products of whatever runs inside a ``with`` block.

    Each array has at most one tangent: the derivative of it along the direction in which the
    primals move. Where a tape costs one pass for each target, this costs one for each direction.
    Tangents are computed as the block runs, and one is freed with its array.

    Arrays are followed by identity, as by a `GradientTape`. Accumulators and tapes nest in any
    order: what stands outside sees the tangents that one further inside computes, never the other
    way, so higher derivatives are taken from the outer one. A Hessian-vector product is an
    accumulator around a tape.

    Args:
      primals: a tree of arrays or Variables of a float or complex dtype, the sources.
      tangents: a tree of the same structure: the direction, with an array of the shape and dtype
        of each primal (or a number, for a primal of shape ``[]``). An array that is not among the
        primals does not move, nor does one whose direction is None, as that of what is no array in
        a model.

    Raises:
      ValueError: a primal is listed twice, is no JAX array, or has no float dtype; the structure
        of the tangents is another, or the shape of one.
      TypeError: the dtype of a tangent is another than its primal's.
      RuntimeError: another thread uses it while its block runs.

    A Variable moves along its tangent at every read, whatever it is assigned. Not seen, so that
    the tangent is None, is what a tape does not see: see `GradientTape`.

    The semantics are those of ``tf.autodiff.ForwardAccumulator``; of complex numbers, those of
    `jax.jvp`. A custom gradient moves by the transpose of its gradient function, as in
    `tracegrad.jvp`.

    >>> import jax.numpy as jnp
    >>> from tracegrad import ForwardAccumulator, GradientTape
    >>> x = jnp.array([1.0, 2.0])
    >>> with ForwardAccumulator(x, jnp.array([1.0, 0.0])) as accumulator:
    ...     with GradientTape() as tape:
    ...         tape.watch(x)
    ...         y = (x**3).sum()
    ...     gradient = tape.gradient(y, x)
    >>> print(accumulator.jvp(y), gradient, accumulator.jvp(gradient))
    3.0 [ 3. 12.] [6. 0.]
    """

    _name = "accumulator"

    def __init__(self, primals: Any, tangents: Any):
        super().__init__()
        self._tangents = Tangents()
        self._variables: dict[int, tuple[Variable, Any]] = {}
        for primal, tangent in _paired(primals, tangents):
            if isinstance(primal, Variable):
                self._variables[id(primal)] = primal, tangent
            else:
                self._tangents.set(primal, tangent)

    def __repr__(self) -> str:
        return f"<ForwardAccumulator: {'recording' if self._recorder else 'not recording'}>"

    def __enter__(self) -> ForwardAccumulator:
        self._tangents.enter(self._begin())
        if self._variables:
            self._start_listening()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._recorder is None:
            return
        self._check_thread()
        self._recorder = None
        if self._variables:
            self._stop_listening()
        self._tangents.leave()

    def jvp(
        self,
        target: Any,
        unconnected_gradients: Unconnected = UnconnectedGradients.NONE,
    ) -> Any:
        """The tangents of arrays. Computes nothing, and may be called at any time.

        Args:
          target: a tree of arrays or Variables.
          unconnected_gradients: what stands for an array to which nothing connects a primal:
            ``NONE``, or ``ZERO`` for zeros of its shape and dtype; the enum or its value.

        Returns:
          A tree like `target`: of each array's shape and dtype, or None. Only what ran inside the
          block connects.

        Raises:
          TypeError: a target that is no array and no Variable.
          ValueError: an unknown `unconnected_gradients`, or a custom gradient on the way is not
            linear in its cotangent, and so has no transpose.
          Exception: whatever JAX raises for an operation on the way that has no forward mode.
        """
        unconnected = UnconnectedGradients(unconnected_gradients)
        self._check_thread()
        require_arrays("target", target, jax.tree.leaves(target, is_leaf=is_variable))

        def tangent(leaf: Any) -> Any:
            if isinstance(leaf, Variable):
                _, found = self._variables.get(id(leaf), (None, None))
            else:
                found = self._tangents.get(leaf)
            if isinstance(found, Exception):
                raise found.with_traceback(None)
            if found is None and unconnected is UnconnectedGradients.ZERO:
                return jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf))
            return found

        return jax.tree.map(tangent, target, is_leaf=is_variable)

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """Gives the tangent of a Variable to each value that is read of it. (A `Listener`.)"""
        if id(variable) not in self._variables:
            return outside()
        if variable not in self._has_read:
            self._has_read.add(variable)
            self._renew(variable)
        value = outside()
        self._tangents.set(value, self._variables[id(variable)][1])
        return value


# --------------------------------------------------------------------------------------- arguments


def _paired(primals: Any, tangents: Any) -> list[tuple[Any, Any]]:
    """Every primal with its tangent, an array of its type."""
    leaves, tree = jax.tree.flatten(primals, is_leaf=lambda n: n is None or is_variable(n))
    given: Any
    directions, given = jax.tree.flatten(tangents, is_leaf=is_none)
    if given != tree:
        raise ValueError(
            f"the tangents must have the structure of the primals, {tree}; they have {given}"
        )
    # What has no direction does not move: functions and settings of a model.
    pairs = [(p, t) for p, t in zip(leaves, directions, strict=True) if t is not None]
    leaves = [primal for primal, _ in pairs]
    if len({id(leaf) for leaf in leaves}) < len(leaves):
        twice = next(p for i, p in enumerate(leaves) if any(p is q for q in leaves[:i]))
        raise ValueError(
            f"an array ({_jax.type_text(twice.aval)}) is listed twice among the primals: list it "
            "once, with the sum of its tangents"
        )
    return [(primal, _direction(primal, tangent)) for primal, tangent in pairs]


def _direction(primal: Any, tangent: Any) -> Any:
    if not isinstance(primal, jax.Array | Variable):
        raise ValueError(
            f"a primal is a JAX array or a Variable; this one is {primal!r} of type "
            f"{type(primal).__name__}. Make it one by jnp.asarray, and use the result"
        )
    if not _jax.has_gradient(primal):
        raise ValueError(f"a primal has a float or complex dtype; this one is {primal.dtype}")
    if not isinstance(tangent, jax.Array):  # an array must stay the very object that it is
        tangent = jnp.asarray(as_inexact(tangent, primal.dtype))
    if tangent.shape != primal.shape:
        raise ValueError(f"a tangent has the shape {tangent.shape}, its primal {primal.shape}")
    if tangent.dtype != primal.dtype:
        raise TypeError(f"a tangent is {tangent.dtype}, its primal {primal.dtype}")
    return tangent
