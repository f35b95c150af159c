"""`Body`: the function that `jax.jit` compiles instead of the user's function."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.running import run_graph
from tracegrad.tracing.arguments import PackedCall
from tracegrad.tracing.jit_options import signature_behind
from tracegrad.tracing.uses import Use
from tracegrad.variables.modules import Snapshot, Update
from tracegrad.variables.nnx_objects import nnx
from tracegrad.variables.packed import Packed, unpack_arguments
from tracegrad.variables.results import has_nnx_objects
from tracegrad.variables.statics import has_equinox_modules, with_statics
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
    # The trace of a call that continues with a larger program. The program's body uses this trace
    # once, instead of tracing again.
    graph: Graph | None = None


traced = _Traced()


class NewValues(list[Any]):
    """The new values that a program returns before its result: of the Variables in `Use.assigned`,
    then of arrays in modules.

    Attributes:
      assigned: for each Variable, whether the program has assigned it.
      updates: the places of the new arrays in modules.
      has_nnx_objects: whether the result contains nodes that stand for nnx objects.
    """

    def __init__(
        self, about: tuple[tuple[bool, ...], tuple[Update, ...], bool], values: Sequence[Any]
    ):
        self.extend(values)
        self.about = about
        self.assigned, self.updates, self.has_nnx_objects = about


jax.tree_util.register_pytree_with_keys(
    NewValues,
    lambda new: ([(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(new)], new.about),
    NewValues,  # type: ignore[arg-type]
    lambda new: (tuple(new), new.about),
)


_ONE_ARRAY = jax.tree.structure(0)


class Body:
    """The function that `jax.jit` gets instead of the user's function: trace → rules → lower.

    Takes the values of the Variables in `Use.values`, then the arguments. Returns `NewValues` and
    the function's result; if the use is plain, the result alone. Refers to the pipeline weakly:
    JAX's caches keep the body, which must not keep the pipeline alive.

    Args:
      packs: whether to return a result of several arrays as `Packed`.
      is_staged: whether the body serves `lower` and the like, which return the result alone if
        there are no new values.
    """

    def __init__(self, pipeline: Pipeline, use: Use, *, packs: bool, is_staged: bool = False):
        self._pipeline = weakref.ref(pipeline)
        self.use = use
        self._packs = packs
        self._is_staged = is_staged
        self.__name__ = self.__qualname__ = pipeline.__name__
        self.__doc__ = pipeline.__doc__
        self.__module__ = pipeline.__module__
        self._text = pipeline.text
        if use.values:
            signature = signature_behind(pipeline.fun, use.values)
            if signature is not None:  # JAX names arguments by it, and checks static arguments
                self.__signature__ = signature

    @property
    def pipeline(self) -> Pipeline | None:
        """None after the pipeline is gone."""
        return self._pipeline()

    @property
    def __wrapped__(self) -> Callable[..., Any] | None:
        """The user's function, for JAX: its signature, name and source line."""
        pipeline = self._pipeline()
        return None if pipeline is None else pipeline.ref()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        pipeline, use = self._pipeline(), self.use
        assert pipeline is not None, "the traced function that is called holds it"
        if _jax.config.jax_disable_jit:  # then `jax.jit` calls this; warm calls of jit do not
            raise Outgrown(self, None)
        values, args = args[: len(use.values)], args[len(use.values) :]
        call = self._pack_call(pipeline, args, kwargs)
        flat, tree = jax.tree.flatten(call.dynamic)
        graph, traced.graph = traced.graph, None
        if graph is None or not _is_of(graph, flat, tree):
            graph = pipeline.trace_call(call)
        if not use.serves(graph, pipeline.packs_results):
            raise Outgrown(self, graph)
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
        about = tuple([i in new for i in variables]), graph.updates, has_nnx_objects(graph.out_tree)
        assigned = [new[i] if i in new else of_variable[i] for i in variables]
        return NewValues(about, [*assigned, *outs[last:]]), result

    def _pack_call(
        self, pipeline: Pipeline, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PackedCall:
        """Raises `Outgrown` if the arguments contain Variables, modules or other non-arrays that
        the pipeline has not looked for."""
        call = pipeline.pack_all(args, kwargs)
        if not pipeline.packs_arguments:
            found = call.variables or call.objects or has_equinox_modules((args, kwargs))
            if found or were_variables(jax.tree.leaves((args, kwargs))):
                pipeline.start_packing(call)
                raise Outgrown(self, None)
        elif pipeline.pack.looks_for_modules or nnx() is None:
            return call
        elif Snapshot(unpack_arguments(*call.dynamic)).objects:
            pipeline.pack.looks_for_modules = True
            raise Outgrown(self, None)
        return call

    def warn_of_merging(self) -> None:
        pipeline = self._pipeline()
        if pipeline is not None:
            pipeline.warn_of_merging()

    def __repr__(self) -> str:
        return self._text  # JAX's messages print it


def _is_of(graph: Graph, flat: Sequence[Any], tree: Any) -> bool:
    """Whether a graph was traced for arguments of these types and this structure."""
    types = list(map(_jax.type_of, flat))
    return bool(graph.in_tree == tree and graph.in_avals[: len(types)] == types)
