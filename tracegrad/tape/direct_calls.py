"""A jitted function called under a tape at the cost of a jitted function called without one.

Under a trace that is not its own JAX finds in Python what a jitted function computes. A second
jitted function around it, called outside of the trace, is found by JAX's compiled code, by the
types of the arguments and all settings: it returns what the record keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.tape.computations import Computation
from tracegrad.tape.known_computations import computation_with_programs


class NotDirect(Exception):
    """The trace has to see a call of this function: it has effects, or closes over arrays."""


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False, slots=True)
class DirectCall:
    """How results came about: a part of their structure, which JAX keeps beside the program.

    Attributes:
      computation: what has run; its operands are the leaves of the arguments.
      tree: the structure of the function's own results.
    """

    computation: Computation
    tree: Any


def direct_form(
    jitted: Any, active: tuple[int, ...], orders: int
) -> Callable[..., tuple[Sequence[Any], DirectCall]]:
    """A jitted function of the same arguments, to be called outside of the recorder.

    It returns the results of a record's entry, and how they came about. It raises NotDirect for a
    function that the recorder has to see.

    Args:
      jitted: a jitted function without options.
      active: the positions of the leaves of which derivatives may be wanted.
      orders: how many derivatives of one another may be taken.
    """

    def form(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], DirectCall]:
        types = jax.tree.map(jax.typeof, (args, kwargs))
        with _jax.set_current_trace(_jax.current_trace(None).parent_trace):
            # Traced as if it were called, not as a part of this one: so JAX knows it afterwards.
            jitted.trace(*types[0], **types[1])
            program, shapes = jax.make_jaxpr(jitted, return_shape=True)(*types[0], **types[1])
            computation = _computation(program)
        leaves, tree = jax.tree.leaves((args, kwargs)), jax.tree.structure(shapes)
        if computation.saves:
            computation = computation.forward((active,), leaves, orders)
        return computation.run(*leaves), DirectCall(computation, tree)

    form.__name__ = form.__qualname__ = str(jitted.__name__)
    return jax.jit(form)


def _computation(program: Any) -> Computation:
    """What a program computes that is one call of a jitted function."""
    open_form = _jax.opened(program)
    if len(open_form.eqns) != 1 or _jax.constants_of(program):
        raise NotDirect
    (call,) = open_form.eqns
    same = call.invars == open_form.invars and call.outvars == open_form.outvars
    facts = _jax.facts_below(call.params)
    if not same or facts.has_effects or facts.arrays or facts.numpy_arrays:
        raise NotDirect
    computation = computation_with_programs(call.primitive, call.params, ())
    if not (computation.is_compiled and computation.is_kept):
        raise NotDirect
    return computation
