"""A compiled function called under a tape on the way that JAX takes where there is none.

Under a trace that is not its own JAX looks up by slow ways what a call of a jitted function
computes, only for the trace to run it as it likes. Who knows the function can do without: a second
jitted function around it, called outside of the trace, gives beside the results whatever the
derivative needs, and tells which computation it was. So JAX's own cache finds the right one, by the
types of the arguments and all settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.tape.computations import (
    Computation,
    jitted_call,
    new_jitted_call,
    sole_equation,
)
from tracegrad.tape.linearised import linearised


class NotDirect(Exception):
    """A call of this function must be seen by the trace: it has effects, or closes over arrays."""


class Origin:
    """Which computation gave results: it takes the leaves of the arguments.

    Attributes:
      computation: as a record has it.
      count: how many results are the function's own.
      tree: the structure of those.
    """

    __slots__ = ("computation", "count", "tree")

    def __init__(self, computation: Computation, count: int, tree: Any):
        self.computation = computation
        self.count = count
        self.tree = tree


@jax.tree_util.register_pytree_node_class
class Told:
    """Results with their origin: a part of their structure, which JAX keeps beside the program."""

    __slots__ = ("origin", "results")

    def __init__(self, origin: Origin, results: Sequence[Any]):
        self.origin = origin
        self.results = results

    def tree_flatten(self) -> tuple[Sequence[Any], Origin]:
        return self.results, self.origin

    @classmethod
    def tree_unflatten(cls, origin: Origin, results: Sequence[Any]) -> Told:
        return cls(origin, results)


def direct_form(jitted: Any, active: tuple[int, ...]) -> Callable[..., Told]:
    """A jitted function, to be called outside of the recorder; `jitted` is one without options.

    It raises NotDirect where that cannot be. `active`: the positions of the leaves of which
    derivatives may be wanted.
    """

    def form(*args: Any, **kwargs: Any) -> Told:
        outside = _jax.current_trace(None).parent_trace
        types = jax.tree.map(jax.typeof, (args, kwargs))
        with _jax.set_current_trace(outside):
            # Traced as if it were called, and not as a part of this one; then it is known.
            jitted.trace(*types[0], **types[1])
            program, shapes = jax.make_jaxpr(jitted, return_shape=True)(*types[0], **types[1])
            computation = _computation(program)
            saving = linearised(computation, active) if computation.saves else None
        leaves = jax.tree.leaves((args, kwargs))
        tree: Any = jax.tree.structure(shapes)
        if saving is not None:
            return Told(Origin(saving, saving.count, tree), saving.forward(*leaves))
        if computation.run is None:
            raise NotDirect
        return Told(Origin(computation, tree.num_leaves, tree), computation.run(*leaves))

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
