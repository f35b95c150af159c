"""Calls a jitted function under a tape as fast as without a tape.

Under a custom trace, JAX looks up the program of a jitted function in Python, which is slow. So the
tape wraps the function in a second jitted function, and calls the second function outside of the
trace: JAX's compiled code looks up its program, by the types of the arguments and all settings. The
second function returns everything that the record keeps.
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
    """The recorder has to see the call of a function with effects or closed-over arrays."""


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False, slots=True)
class DirectCall:
    """The computation of a direct call; static, so that JAX caches it with the program.

    Attributes:
      computation: its operands are the leaves of the arguments.
      tree: the structure of the function's own results.
    """

    computation: Computation
    tree: Any


def direct_form(
    jitted: Any, active: tuple[int, ...], orders: int
) -> Callable[..., tuple[Sequence[Any], DirectCall]]:
    """Wraps a jitted function in a second jitted function, to be called outside of the recorder.

    The wrapper takes the same arguments, and returns the results of the record's entry, with
    residuals, and the `DirectCall`. It raises NotDirect if the recorder has to see the call.

    Args:
      jitted: a jitted function without options.
      active: the positions of the leaves that may be differentiated.
      orders: the highest order of derivative that may be taken.
    """

    def form(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], DirectCall]:
        types = jax.tree.map(jax.typeof, (args, kwargs))
        with _jax.set_current_trace(_jax.current_trace(None).parent_trace):
            # Traced like a call, not as a part of `form`: so JAX caches the trace.
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
    """`program`: one call of a jitted function."""
    open_form = _jax.opened(program)
    if len(open_form.eqns) != 1 or _jax.constants_of(program):
        raise NotDirect
    (call,) = open_form.eqns
    same = call.invars == open_form.invars and call.outvars == open_form.outvars
    facts = _jax.facts_below(call.params)
    if not same or facts.has_effects or facts.arrays or facts.numpy_arrays:
        raise NotDirect
    computation = computation_with_programs(call.primitive, call.params, (), facts)
    if not (computation.is_compiled and computation.is_kept):
        raise NotDirect
    return computation
