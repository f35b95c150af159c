"""`Body`: the function that `jax.jit` compiles instead of the user's function."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.running import run_graph
from tracegrad.tracing.arguments import PackedCall
from tracegrad.tracing.jit_options import signature_behind
from tracegrad.tracing.modules import Update
from tracegrad.tracing.packed import Packed, has_nnx_objects
from tracegrad.tracing.statics import with_statics
from tracegrad.tracing.uses import Use

if TYPE_CHECKING:
    from tracegrad.tracing.pipeline import Pipeline


class Untraced(BaseException):
    """The call of a program was not traced yet. `Body` raises it through code of JAX alone, before
    the user's function has run; the pipeline catches it, and traces the call."""


class _Traced(threading.local):
    """The trace of the call that `Pipeline.search` is about to run, for the body of its program to
    use once; and the use of this program."""

    use: Use | None = None
    graph: Graph | None = None


traced = _Traced()


@jax.tree_util.register_static
@dataclass(frozen=True)
class Changes:
    """What a program changes besides its result: the last item, without arrays, of the list of new
    values that the program returns.

    The new values are those of the Variables in `Use.assigned`, then those of arrays in modules.

    Attributes:
      assigned: for each Variable, whether the program has assigned it.
      updates: the places of the new arrays in modules.
      has_nnx_objects: whether the result contains nodes that stand for nnx objects.
    """

    assigned: tuple[bool, ...]
    updates: tuple[Update, ...]
    has_nnx_objects: bool


def changes_of(outcome: Any) -> Changes | None:
    """None if a program has returned the result alone."""
    is_pair = type(outcome) is tuple and len(outcome) == 2 and type(outcome[0]) is list
    last = outcome[0][-1] if is_pair and outcome[0] else None
    return last if isinstance(last, Changes) else None


_ONE_ARRAY = jax.tree.structure(0)


class Body:
    """The function that `jax.jit` gets instead of the user's function: runs the graph of the call.

    Takes the values of the Variables in `Use.values`, then the arguments. Returns the new values,
    with `Changes`, and the function's result; if the use is plain, the result alone. Refers to the
    pipeline weakly: JAX's caches keep the body, which must not keep the pipeline alive.

    Args:
      is_staged: whether the body serves `lower` and the like, which return the result in its own
        tree, and alone if there are no new values.

    Attributes:
      pipeline: returns the pipeline; None after the pipeline is gone.
    """

    def __init__(self, pipeline: Pipeline, use: Use, *, is_staged: bool = False):
        self.pipeline = weakref.ref(pipeline)
        self.use = use
        self._packs = pipeline.packs_results != "never" and not is_staged
        self._is_staged = is_staged
        self._static = pipeline.static
        self.__name__ = self.__qualname__ = pipeline.__name__
        self.__doc__ = pipeline.__doc__
        self.__module__ = pipeline.__module__
        signature = signature_behind(pipeline.fun, use.values)
        if signature is not None:  # JAX names arguments by it, and checks static arguments
            self.__signature__ = signature

    @property
    def __wrapped__(self) -> Callable[..., Any] | None:
        """The user's function, for JAX: its signature, name and source line."""
        pipeline = self.pipeline()
        return None if pipeline is None else pipeline.ref()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        use, graph = self.use, traced.graph
        values, args = args[: len(use.values)], args[len(use.values) :]
        flat = jax.tree.leaves(PackedCall(args, kwargs, self._static).dynamic)
        if graph is None or traced.use is not use:  # new types, or `jax.disable_jit`
            raise Untraced
        types = list(graph.program.in_avals)
        del types[len(types) - len(graph.variables) :]
        # If the numbers differ, an argument is a part of a reference, which the graph refuses.
        if len(types) == len(flat) and types != list(map(_jax.type_of, flat)):
            raise Untraced  # the trace is of a call around this one
        traced.graph = None
        of_variable = dict(zip([id(ref()) for ref in use.values], values, strict=True))
        flat += [of_variable[id(variable)] for variable in graph.variables]
        count = graph.result_count
        outs = run_graph(graph, flat, as_call=True)
        last = len(outs) - len(graph.updates)
        if self._packs and not use.is_plain and graph.out_tree != _ONE_ARRAY:
            result = Packed(outs[:count], graph.out_tree)
        else:
            result = jax.tree.unflatten(graph.out_tree, outs[:count])
            result = result if self._packs else with_statics(result)
        if use.is_plain or (self._is_staged and not use.has_variables and not graph.updates):
            return result
        new = dict(zip(map(id, graph.assigned), outs[count:last], strict=True))
        variables = [id(ref()) for ref in use.assigned]
        assigned = [new[i] if i in new else of_variable[i] for i in variables]
        is_new = tuple([i in new for i in variables])
        changes = Changes(is_new, graph.updates, has_nnx_objects(graph.out_tree))
        return [*assigned, *outs[last:], changes], result

    def warn_of_merging(self) -> None:
        pipeline = self.pipeline()
        if pipeline is not None:
            pipeline.warn_of_merging()

    def __repr__(self) -> str:
        return repr(self.__wrapped__)  # JAX's messages print it
