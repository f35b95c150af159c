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
from tracegrad.tracing.modules import Snapshot, Update
from tracegrad.tracing.nnx_objects import nnx
from tracegrad.tracing.packed import Packed, has_nnx_objects, unpack_arguments
from tracegrad.tracing.statics import with_statics
from tracegrad.tracing.uses import Use
from tracegrad.variables.trees import were_variables

if TYPE_CHECKING:
    from tracegrad.tracing.pipeline import Pipeline


class Outgrown(BaseException):
    """Raised by `Body` if a call needs a larger program; caught by the pipeline.

    Attributes:
      of: the body.
      graph: the trace of this call; None if the user's function was not called yet.
    """

    def __init__(self, of: Body, graph: Graph | None):
        super().__init__("nothing catches this but tracegrad")
        self.of = of
        self.graph = graph


class _Traced(threading.local):
    """The trace of a call that a program is about to run, and the program's use. The program's body
    uses this trace once, instead of tracing again."""

    use: Use | None = None
    graph: Graph | None = None

    def take(self, use: Use) -> Graph | None:
        graph, self.graph = self.graph, None
        return graph if self.use is use else None


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
    """The function that `jax.jit` gets instead of the user's function: trace → rules → lower.

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
        pipeline, use = self.pipeline(), self.use
        assert pipeline is not None, "the traced function that is called holds it"
        if _jax.config.jax_disable_jit:  # then `jax.jit` calls this; warm calls of jit do not
            raise Outgrown(self, None)
        values, args = args[: len(use.values)], args[len(use.values) :]
        flat = jax.tree.leaves(PackedCall(args, kwargs, pipeline.static).dynamic)
        graph = traced.take(use)
        if graph is None or graph.in_avals[: len(flat)] != list(map(_jax.type_of, flat)):
            graph = self._trace(pipeline, args, kwargs)
        of_variable = dict(zip([id(ref()) for ref in use.values], values, strict=True))
        flat += [of_variable[id(variable)] for variable in graph.variables]
        outs = run_graph(graph, flat, as_call=True)
        count, last = graph.result_count, len(outs) - len(graph.updates)
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

    def _trace(self, pipeline: Pipeline, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        """Raises `Outgrown` if the program does not serve the trace, or if the arguments contain
        Variables, modules or other non-arrays that the pipeline has not looked for."""
        call = pipeline.pack_all(args, kwargs)
        if not pipeline.packs_arguments:
            if not call.is_of_arrays or were_variables():
                pipeline.start_packing(looks_for_modules=bool(call.objects))
                raise Outgrown(self, None)
        elif (
            not pipeline.pack.looks_for_modules
            and nnx() is not None
            and Snapshot(unpack_arguments(*call.dynamic)).objects
        ):
            pipeline.start_packing(looks_for_modules=True)
            raise Outgrown(self, None)
        graph = pipeline.trace_call(call, is_nested=_jax.is_part_of_a_program())
        if not self.use.serves(Use.of(graph, pipeline.packs_results)):
            raise Outgrown(self, graph)
        return graph

    def warn_of_merging(self) -> None:
        pipeline = self.pipeline()
        if pipeline is not None:
            pipeline.warn_of_merging()

    def __repr__(self) -> str:
        return repr(self.__wrapped__)  # JAX's messages print it
