"""`ForwardAccumulator`: derivatives along a direction, computed while a ``with`` block runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.gradient_types import as_inexact
from tracegrad.ir import GraphError
from tracegrad.tape.leaves import Unconnected, UnconnectedGradients, cure_of, require_arrays
from tracegrad.tape.recorders import Recording
from tracegrad.tape.tangents import Tangents
from tracegrad.tracing.in_force import rules_in_force
from tracegrad.tracing.statics import is_none
from tracegrad.variables.trees import is_variable
from tracegrad.variables.variable import Variable


class ForwardAccumulator(Recording):
    """Computes Jacobian-vector products of the operations inside a ``with`` block.

    Each array has at most one tangent: its derivative along the direction in which the primals
    move. A tape costs one pass for each target, an accumulator one pass for each direction. The
    tangents are computed while the block runs, and each tangent is freed with its array.

    An accumulator follows arrays by identity, like a `GradientTape`. Accumulators and tapes nest in
    any order: an outer accumulator sees the tangents that an inner accumulator computes, never the
    reverse, so take higher derivatives from the outer accumulator. For a Hessian-vector product,
    put an accumulator around a tape.

    Args:
      primals: the sources: a tree of arrays or Variables of a float or complex dtype.
      tangents: the direction: a tree of the same structure, with an array of the shape and dtype
        of each primal (or a number, for a primal of shape ``[]``). Arrays that are not among the
        primals are constants, and so are primals whose tangent is None. Use None for functions
        and settings in a model.

    Raises:
      ValueError: a primal is listed twice, is no JAX array, or has no float dtype; or the
        structure of the tangents, or the shape of a tangent, differs from the primals'.
      TypeError: the dtype of a tangent differs from its primal's.
      RuntimeError: another thread uses the accumulator while its block runs.
      GraphError: the block is in a traced function with rules, which do not reach the tangents.

    An operation of the block raises JAX's error if it has no forward mode, or ValueError if its
    custom gradient is not linear in the cotangent, and so has no transpose. Apply `stop_gradient`
    to its operands.

    A Variable has its given tangent at every read: also after ``v.assign(2 * v.value)`` the tangent
    is not doubled. The tangent of a result is None if a tape would not see the operation: see
    `GradientTape`.

    The semantics are those of ``tf.autodiff.ForwardAccumulator``, and for complex numbers those of
    `jax.jvp`. The tangent of a function with a custom gradient is computed by the transpose of its
    gradient function, as in `tracegrad.jvp`.

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
        for primal, tangent in _pair_with_tangents(primals, tangents):
            if isinstance(primal, Variable):
                self._variables[id(primal)] = primal, tangent
            else:
                self._tangents.set(primal, tangent)

    def __repr__(self) -> str:
        return f"<ForwardAccumulator: {'recording' if self._recorder else 'not recording'}>"

    def __enter__(self) -> ForwardAccumulator:
        _refuse_rules()
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
        """Returns the tangents of arrays. Computes nothing, and may be called at any time.

        Args:
          target: a tree of arrays or Variables.
          unconnected_gradients: the result for an array that is not connected to a primal:
            ``NONE``, or ``ZERO`` for zeros of the array's shape and dtype; the enum or its value.

        Returns:
          A tree like `target`: for each array a tangent of its shape and dtype, or None. Only
          operations that ran inside the block connect arrays.

        Raises:
          TypeError: a target that is no array and no Variable.
          ValueError: an unknown `unconnected_gradients`.
        """
        unconnected = UnconnectedGradients(unconnected_gradients)
        self._check_thread()
        require_arrays("target", target, jax.tree.leaves(target, is_leaf=is_variable))

        def tangent(leaf: Any) -> Any:
            if isinstance(leaf, Variable):
                _, found = self._variables.get(id(leaf), (None, None))
            else:
                found = self._tangents.get(leaf)
            if found is None and unconnected is UnconnectedGradients.ZERO:
                return jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf))
            return found

        return jax.tree.map(tangent, target, is_leaf=is_variable)

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """Gives the value that is read the Variable's tangent. (See `Listener`.)"""
        if id(variable) not in self._variables:
            return outside()
        if variable not in self._has_read:
            self._has_read.add(variable)
            self._renew(variable)
        value = outside()
        self._tangents.set(value, self._variables[id(variable)][1])
        return value


_KEEP_TANGENTS = "recompute", "checkpointed_loop"  # the names of rules


def _refuse_rules() -> None:
    """Raises GraphError for a rule in force that may change tangents. Such a rule acts on a whole
    program, but an accumulator computes tangents operation by operation."""
    for rule in (r for each in rules_in_force() if not each.acts_everywhere for r in each.rules):
        if not (hasattr(rule, "memory_budget") or getattr(rule, "name", "") in _KEEP_TANGENTS):
            raise GraphError(
                f"{rule!r} does not reach the tangents of a ForwardAccumulator, which computes "
                "them as each operation runs. Use tracegrad.jvp of the function, to which rules "
                "apply, or apply the rule to the function itself: tracegrad.rewrite(fun, rule)"
            )


# --------------------------------------------------------------------------------------- arguments


def _pair_with_tangents(primals: Any, tangents: Any) -> list[tuple[Any, Any]]:
    """Returns (primal, tangent) for each tangent that is not None."""
    leaves, tree = jax.tree.flatten(primals, is_leaf=lambda n: n is None or is_variable(n))
    given: Any
    directions, given = jax.tree.flatten(tangents, is_leaf=is_none)
    if given != tree:
        raise ValueError(
            f"the tangents must have the structure of the primals, {tree}; they have {given}"
        )
    # A tangent of None makes its primal a constant: functions and settings of a model.
    pairs = [(p, t) for p, t in zip(leaves, directions, strict=True) if t is not None]
    leaves = [primal for primal, _ in pairs]
    if len({id(leaf) for leaf in leaves}) < len(leaves):
        twice = next(p for i, p in enumerate(leaves) if any(p is q for q in leaves[:i]))
        raise ValueError(
            f"an array ({_jax.type_text(twice.aval)}) is listed twice among the primals: list it "
            "once, with the sum of its tangents"
        )
    return [(primal, _check_tangent(primal, tangent)) for primal, tangent in pairs]


def _check_tangent(primal: Any, tangent: Any) -> Any:
    """Returns the tangent as an array; raises for another shape or dtype than the primal's."""
    if not isinstance(primal, jax.Array | Variable):
        raise ValueError(
            f"a primal is a JAX array or a Variable; this one is {primal!r} of type "
            f"{type(primal).__name__}. {cure_of(primal)}"
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
