"""A compiled function called under a tape on the way that JAX takes where there is none.

Under a trace that is not its own JAX looks up by slow ways what a call of a jitted function
computes, only for the trace to run it as it likes. Who knows the function can do without: a second
jitted function around it, called outside of the trace, gives beside the results whatever the
derivative needs, and tells which computation it was. So JAX's own cache finds the right one, by the
types of the arguments and all settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.tape.computations import Computation, jitted_call, new_jitted_call, sole_equation
from tracegrad.tape.linearised import linearised


class NotDirect(Exception):
    """A call of this function must be seen by the trace: it has effects, or closes over arrays."""


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False, slots=True)
class DirectCall:
    """How results came about: a part of their structure, which JAX keeps beside the program.

    Attributes:
      computation: what has run, as a record has it: it takes the leaves of the arguments.
      tree: the structure of the function's own results.
    """

    computation: Computation
    tree: Any


def direct_form(
    jitted: Any, active: tuple[int, ...]
) -> Callable[..., tuple[Sequence[Any], DirectCall]]:
    """A jitted function, to be called outside of the recorder; `jitted` is one without options.

    Its results are those of the function, flat, then what the derivative needs; and how they came
    about. It raises NotDirect where that cannot be. `active`: the positions of the leaves of which
    derivatives may be wanted.
    """

    def form(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], DirectCall]:
        outside = _jax.current_trace(None).parent_trace
        types = jax.tree.map(jax.typeof, (args, kwargs))
        with _jax.set_current_trace(outside):
            # Traced as if it were called, and not as a part of this one; then it is known.
            jitted.trace(*types[0], **types[1])
            program, shapes = jax.make_jaxpr(jitted, return_shape=True)(*types[0], **types[1])
            computation = _computation(program)
            saving = linearised(computation, active) if computation.saves else None
        leaves = jax.tree.leaves((args, kwargs))
        tree = jax.tree.structure(shapes)
        if saving is not None:
            return saving.forward(*leaves), DirectCall(saving, tree)
        if computation.run is None:
            raise NotDirect
        return computation.run(*leaves), DirectCall(computation, tree)

    form.__name__ = form.__qualname__ = str(jitted.__name__)
    return jax.jit(form)


def _computation(program: Any) -> Computation:
    equation = sole_equation(program)
    if equation is None or equation.primitive is not _jax.JIT or _jax.constants_of(program):
        raise NotDirect
    call = jitted_call(equation.params) or new_jitted_call(equation.params)
    if call.constants or call.computation.has_effects or not call.computation.is_shared:
        raise NotDirect
    return call.computation
