"""A function and its rules on the way to XLA: chooses the program of each call.

All wrappers of a function with the same rules and options share one `Pipeline`. If the function
uses no Variables and its arguments are arrays, a call is a call of an ordinary jit (`plain`).
Otherwise the pipeline packs the arguments (`arguments`) and calls the program of their key
(`programs`). A call for new types is traced, which makes its program, or a larger program if the
trace shows that the program is too small.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax

from tracegrad import _jax
from tracegrad._jax.caches import facts_of
from tracegrad.ir import Graph
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.wording import changes_lost
from tracegrad.tracing.arguments import CallPacker, PackedCall, StaticArguments, donated_by
from tracegrad.tracing.attempts import tracing_depth
from tracegrad.tracing.body import Untraced, traced
from tracegrad.tracing.callable import call_traced
from tracegrad.tracing.donation import refuse_sharing
from tracegrad.tracing.graphs import Rule, function_name, trace_to_graph
from tracegrad.tracing.in_force import trace_under_rules
from tracegrad.tracing.packed import Packed
from tracegrad.tracing.programs import JittedProgram
from tracegrad.tracing.retracing import CallTypes, TraceHistory
from tracegrad.tracing.shardings import (
    has_mapping,
    is_for_all,
    options_for_jit,
    shardings_of_arguments,
)
from tracegrad.tracing.signatures import varies_in_count
from tracegrad.tracing.user_errors import explain_error, explain_rule
from tracegrad.tracing.uses import Packs, Use
from tracegrad.variables.trees import without_variables

T = TypeVar("T")
Action = Callable[[JittedProgram, PackedCall], T]

_ATTEMPTS = 16
_KEPT = 64  # programs of a function
_MOST_PIPELINES = 256  # of one function
# Reentrant: freeing a pipeline may run finalizers, which may call any code.
_lock = threading.RLock()


class Pipeline:
    """A function with its rules and its options of `jax.jit`, and its programs.

    It refers to the function weakly: the table of pipelines must not keep the function alive.

    Attributes:
      static, donated: the static and the donated arguments.
      pack: packs a call, as far as the calls so far needed.
      pack_all: packs any call.
      packs_arguments: whether each call is packed; set by the first call with an argument that is
        not an array.
      packs_results: which results are packed.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        rules: tuple[Rule, ...],
        static: StaticArguments,
        options: dict[str, Any],
    ):
        self.ref = _weak_reference(fun)
        self.rules = rules
        self.static = static
        self.options = options_for_jit(options)
        self.out_shardings = options.get("out_shardings")
        self.history = TraceHistory(function_name(fun))
        self.__name__ = function_name(fun)
        self.__doc__ = fun.__doc__
        self.__module__ = getattr(fun, "__module__", __name__)
        self._programs: OrderedDict[Any, JittedProgram] = OrderedDict()
        self._lock = threading.RLock()
        # Shardings of the parts of an argument or of a result come in a tree of its structure.
        shardings = options.get("in_shardings")
        self._of_arguments = shardings if isinstance(shardings, tuple) else ()
        is_tree = not all(map(is_for_all, self._of_arguments or (shardings,)))
        self._shardings = shardings if is_tree else None
        # The user gave one sharding for all arguments. A program that also takes Variables needs a
        # sharding for each argument.
        is_one = shardings is not None and not isinstance(shardings, tuple)
        self._varies_in_count = is_one and varies_in_count(fun)
        self.donated = donated_by(fun, options)
        self.packs_results: Packs = "if it has non-arrays"
        if not is_for_all(self.out_shardings):  # a tree, like the result
            self.packs_results = "always" if has_mapping(self.out_shardings) else "never"
        self.pack = CallPacker(static, looks_for_modules=False)
        self.pack_all = CallPacker(static)
        self.packs_arguments = False
        self.plain: Callable[..., Any] | None = None  # the jit that serves every call so far
        self._warned = False

    @property
    def fun(self) -> Callable[..., Any]:
        fun = self.ref()
        assert fun is not None, "the traced function holds it"
        return fun

    # ---------------------------------------------------------------------------------- calls

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_new: bool) -> Any:
        """Calls the function through the program of the call's key, not through `plain`.

        `is_new`: see `search`.
        """
        if _jax.config.jax_disable_jit:
            return self.eagerly(args, kwargs)
        return self.search(args, kwargs, JittedProgram.__call__, is_new=is_new)

    @property
    def is_plain(self) -> bool:
        """Whether all calls so far had only arrays as arguments and results, and no Variables."""
        return not self.packs_arguments and all(p.use.is_plain for p in self._programs.values())

    def refuses_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the plain jit refuses these arguments but a program can take them; then all later
        calls are packed."""
        return not self.packs_arguments and self._starts_packing(self.pack_all(args, kwargs))

    def _starts_packing(self, call: PackedCall) -> bool:
        """Whether a call, packed by `pack_all`, contains more than `pack` has looked for; then all
        later calls are packed."""
        if self.packs_arguments:
            is_new = bool(call.objects) and not self.pack.looks_for_modules
        else:
            is_new = not call.is_of_arrays
        if is_new:
            self.packs_arguments, self.plain = True, None
            self.pack.looks_for_modules |= bool(call.objects)
        return is_new

    def search(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        action: Action[T],
        *,
        is_new: bool = False,
    ) -> T:
        """Runs `action` on the program of a call, and traces the call if no program serves it.

        `is_new`: whether the call is known to need a trace.
        """
        for _ in range(_ATTEMPTS):
            call = self.pack(args, kwargs) if self.packs_arguments else PackedCall(args, kwargs)
            key = self._key(call)
            program = self._programs.get(key)
            try:
                if is_new or program is None or program.use.is_over:
                    packed = self.pack_all(args, kwargs)
                    if self._starts_packing(packed):
                        continue
                    graph = self.trace_call(packed)
                    program = self._program_for(graph, call, key)
                    traced.use, traced.graph = program.use, graph
                return action(program, call)
            except Untraced:
                is_new = True
            except Exception as error:
                if isinstance(error, TypeError) and self.refuses_plain(args, kwargs):
                    continue
                explain_rule(error, lambda: self.graph(self.pack_all(args, kwargs)))
                raise
            finally:
                traced.graph = None
        raise RuntimeError(
            f"{self.__name__} uses other Variables each time it is traced. Create its "
            "Variables once, outside of it."
        )

    def _key(self, call: PackedCall) -> Any:
        """The Variables of a call, and its structures or the number of its arguments if shardings
        need them."""
        if call.objects and (self.donated.positions or self.donated.names):
            refuse_sharing(self.fun, call, self.donated)
        if self._varies_in_count:
            return len(call.args), *call.variables
        if self._shardings is None or not self.packs_arguments:
            return call.variables
        structures = [arg.structure if type(arg) is Packed else None for arg in call.args]
        return call.variables, *structures

    def _program_for(self, graph: Graph, call: PackedCall, key: Any) -> JittedProgram:
        """Returns a program of the call's key that serves the graph; makes the program if there is
        none."""
        use = Use.of(graph, self.packs_results)
        with self._lock:
            program = self._programs.get(key)
            if program is not None and not program.use.is_over:
                if program.use.serves(use):
                    return program
                use = program.use.joined(use)
            shardings = None
            if self._shardings is not None and self.packs_arguments:
                shardings = shardings_of_arguments(self._shardings, call.dynamic[0])
            program = self._programs[key] = JittedProgram(self, use, graph, shardings)
            while len(self._programs) > _KEPT:
                self._programs.popitem(last=False)
            if key == () and not self.packs_arguments:
                self.plain = program.direct or functools.partial(program.call_packed, ())
        return program

    def eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For `jax.disable_jit`: calls the function itself or, if there are rules, runs the graph
        one operation after the other."""
        if not self.rules:
            return without_variables(self.fun(*args, **kwargs))
        call = self.pack_all(args, kwargs)
        return call_traced(self.trace_call(call), call)

    # ---------------------------------------------------------------------------------- graphs

    def graph(self, call: PackedCall) -> Graph:
        """After the rules."""
        options = self.donated, self._of_arguments
        trace = functools.partial(trace_to_graph, self.fun, call, *options)
        with with_jit():  # so that rules find nested jitted functions by name
            return trace_under_rules(self.rules, trace)

    def trace_call(self, call: PackedCall) -> Graph:
        """Traces a call to compile it; records the call's types, unless the call is part of another
        program, so that this trace compiles nothing."""
        try:
            graph = self.graph(call)
            if graph.loses:
                warn_where_called(changes_lost(self.__name__, graph.loses), UserWarning)
        except Exception as error:
            raise explain_error(error)  # noqa: B904 (the same error)
        if _jax.staging_trace() is None:
            self.history.note(CallTypes.of(call, graph))
        return graph

    def warn_of_merging(self) -> None:
        """Warns once if XLA merges recomputed code of a call nested in a compiled function."""
        # An enclosing traced function sets the compiler options, or warns itself.
        if self._warned or tracing_depth() or not _jax.under_jit():
            return
        options = _jax.keep_recompute_options(jax.default_backend())
        self._warned = True
        warn_where_called(
            f"{self.__name__} recomputes, and is called inside another "
            "compiled function. On this JAX and backend XLA merges recomputed code with the "
            "original, which saves no memory, unless the outermost function is compiled with "
            f"an option that cannot be set from inside: make it a `tracegrad.trace`, or "
            f"`jax.jit(..., compiler_options={options})`.",
            UserWarning,
        )

    def clear_cache(self) -> None:
        with self._lock:
            for program in self._programs.values():
                program.clear_cache()
            self._programs.clear()
            self.plain = None


def shared_pipeline(
    fun: Callable[..., Any],
    rules: tuple[Rule, ...],
    static: StaticArguments,
    options: dict[str, Any],
) -> Pipeline:
    """All wrappers of a function with the same rules and options share a pipeline."""
    if isinstance(fun, types.MethodType):  # each access makes a new, short-lived method object
        return Pipeline(fun, rules, static, options)
    key = tuple(map(id, rules)), static, tuple(sorted(options.items()))
    with _lock:
        try:
            hash((fun, key))  # without a hash, a function or an option may change later
            # The key has the ids of the rules; the pipelines keep the rules alive.
            known: dict[Any, Pipeline] = facts_of(fun).setdefault(Pipeline, {})
        except TypeError:  # no hash, or no weak references
            return Pipeline(fun, rules, static, options)
        if key not in known:
            if len(known) >= _MOST_PIPELINES:
                known.clear()
            known[key] = Pipeline(fun, rules, static, options)
        return known[key]


def with_jit() -> AbstractContextManager[None]:
    """A block in which `jax.disable_jit` is off: tracing needs jit."""
    disabled = _jax.config.jax_disable_jit
    return jax.disable_jit(False) if disabled else nullcontext()


def _weak_reference(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    if isinstance(fun, types.MethodType):
        return lambda: fun
    try:
        return weakref.ref(fun)
    except TypeError:
        return lambda: fun
