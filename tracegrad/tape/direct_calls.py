"""Wraps a jitted function, so that a tape calls the function at the speed of `jax.jit`.

Under the trace of a tape, JAX looks up the program of a jitted function in Python, which is slow.
So the tape wraps the function in a second jitted function, and calls this wrapper outside of the
trace: there JAX looks up the program in C++, by the types of the arguments and by all settings. The
wrapper also returns the residuals, which the tape's record keeps.
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
    """The recorder has to see the call itself: the function has effects, closes over arrays, or is
    not one cached program of all its arguments."""


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False, slots=True)
class DirectCall:
    """The computation of a direct call: a static result, which JAX caches with the wrapper.

    Attributes:
      computation: takes the leaves of the arguments.
      tree: the structure of the function's results.
    """

    computation: Computation
    tree: Any


def direct_form(
    jitted: Any, active: tuple[int, ...], orders: int
) -> Callable[..., tuple[Sequence[Any], DirectCall]]:
    """Wraps a jitted function in a second jitted function, to be called outside of the recorder.

    The wrapper takes the same arguments. It returns a pair: the results and residuals, as the entry
    of a record has them; and the `DirectCall`. It raises NotDirect if the recorder has to see the
    call.

    Args:
      jitted: a jitted function without options.
      active: the positions of the leaves that may be differentiated.
      orders: the highest order of derivative that may be taken.
    """

    def wrapper(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], DirectCall]:
        types = jax.tree.map(jax.typeof, (args, kwargs))
        with _jax.set_current_trace(_jax.current_trace(None).parent_trace):
            # Only fills JAX's cache of traces, as a call outside of the wrapper would.
            jitted.trace(*types[0], **types[1])
            program, shapes = jax.make_jaxpr(jitted, return_shape=True)(*types[0], **types[1])
            computation = _make_computation(program)
        leaves, tree = jax.tree.leaves((args, kwargs)), jax.tree.structure(shapes)
        if computation.saves:
            computation = computation.forward((active,), leaves, orders)
        return computation.run(*leaves), DirectCall(computation, tree)

    wrapper.__name__ = wrapper.__qualname__ = str(jitted.__name__)
    return jax.jit(wrapper)


def _make_computation(program: Any) -> Computation:
    """Makes the computation of a program that is one call of a jitted function, or raises."""
    jaxpr = _jax.opened(program)
    if len(jaxpr.eqns) != 1 or _jax.constants_of(program):
        raise NotDirect
    (call,) = jaxpr.eqns
    is_whole_program = call.invars == jaxpr.invars and call.outvars == jaxpr.outvars
    facts = _jax.facts_below(call.params)
    if not is_whole_program or facts.has_effects or facts.arrays or facts.numpy_arrays:
        raise NotDirect
    computation = computation_with_programs(call.primitive, call.params, (), facts)
    if not (computation.is_compiled and computation.is_kept):
        raise NotDirect
    return computation
