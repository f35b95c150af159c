"""A traced function compiled for one key: one jit, with all Variables that its traces have met.

The key of a call is the tuple of the Variables among its arguments. For each key a function has one
`JittedProgram`, which takes the values of its Variables before the arguments, and returns the new
values before the result. Only tracing finds these Variables. So a call is traced before its program
is called, and a trace that meets a new Variable, or a result that is not all arrays, gets a larger
program. JAX tells whether a call must be traced: if it has no compiled program for the types of the
arguments, it calls `Body`, which raises `Untraced`. The next call of the program finds the trace.

At top level, a program that reads and assigns a Variable overwrites the old array by the new
value (by donation), if nobody else can have the old array; see `variables.lending`. A program that
calls the host (`Graph.calls_host`) overwrites nothing: the host code may read the Variable, or
raise after the old value is gone. The call waits for such a program, which may fail long after its
start, and assigns the new values only after success.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.tracing.arguments import PackedCall
from tracegrad.tracing.body import Body, Untraced, changes_of
from tracegrad.tracing.jit_options import options_behind
from tracegrad.tracing.overriding import ForwardingTrace
from tracegrad.tracing.packed import Packed, finish_result
from tracegrad.tracing.shardings import shardings_of_result
from tracegrad.tracing.uses import Use
from tracegrad.variables import kept_programs
from tracegrad.variables.lending import (
    hold,
    lend,
    settle,
    show_values,
    take_back,
)
from tracegrad.variables.listening import listeners

if TYPE_CHECKING:
    from tracegrad.tracing.pipeline import Pipeline


class JittedProgram:
    """A function compiled for one `Use`. Immutable: if a call needs more, a larger program replaces
    it.

    Attributes:
      nested: the jit for calls inside transformations; made at its first use.
      outermost: the jit for calls at top level, which overwrites the arrays of Variables, and tells
        XLA to keep recomputed code (JAX refuses compiler options on a nested jit).
      direct: the function to call with the arguments, if the use is plain; else None.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        use: Use,
        graph: Graph,
        shardings: Any,
    ):
        """Args:
        graph: one of the graphs that the program serves.
        shardings: the shardings of the arguments, if the user gave them as trees; else None.
        """
        self.use = use
        self._body = body = Body(pipeline, use)
        options = pipeline.options
        self._shardings = shardings
        if shardings is not None:
            options = {**options, "in_shardings": shardings}
        if pipeline.packs_results == "always":
            of_result = shardings_of_result(pipeline.out_shardings, graph)
            options = {**options, "out_shardings": of_result}
        if not use.is_plain:
            arguments, _ = graph.in_tree.children()
            count = len(arguments.children())
            options = options_behind(pipeline, options, use.values, count)
        self._make_nested = functools.partial(jax.jit, body, **options)
        self._has_options = any(options.values())
        self._forms: dict[Any, Any] = {}  # see `ForwardingTrace.call_jitted`
        if use.recomputes:
            extra = _jax.keep_recompute_options(jax.default_backend())
            options = _jax.with_compiler_options(options, extra or {})
        if use.has_variables:
            written_over = () if use.calls_host else range(len(use.updated))
            donated = (*written_over, *options["donate_argnums"])
            options = {**options, "donate_argnums": donated}
        self.options = options
        self._warn = body.warn_of_merging  # `direct` keeps the body alive, but not this program
        is_other = use.has_variables or use.recomputes
        self.outermost: Any = jax.jit(body, **options) if is_other else self.nested
        self.direct: Callable[..., Any] | None = None
        if use.is_plain:
            self.direct = self._make_direct() if use.recomputes else self.nested

    @functools.cached_property
    def nested(self) -> Any:
        return self._make_nested()

    def _make_direct(self) -> Callable[..., Any]:
        """Makes `direct` for a program that recomputes: the current trace decides on the jit."""
        # Warm calls run this for each call, hence the local names.
        nested, outermost, warn = self.nested, self.outermost, self._warn
        current, top_level = _jax.current_trace, _jax.TopLevelTrace

        def run(*args: Any, **kwargs: Any) -> Any:
            if type(current(None)) is top_level:
                return outermost(*args, **kwargs)
            result = nested(*args, **kwargs)
            warn()
            return result

        return run

    def __call__(self, call: PackedCall) -> Any:
        if self.direct is not None:
            return self.direct(*call.args, **call.kwargs)
        return self.call_packed(call.objects, *call.args, **call.kwargs)

    def call_packed(self, objects: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls the program with packed arguments, and assigns the new values. `objects`: the nnx
        objects in the arguments."""
        use = self.use
        if use.is_over:
            raise Untraced
        if listeners() or type(_jax.current_trace(None)) is not _jax.TopLevelTrace:
            new, result = self._call_watched(args, kwargs)
        elif use.calls_host:
            new, result = self._call_holding(self.outermost, args, kwargs)
        else:
            new, result = self._call_lending(self.outermost, args, kwargs)
        changes = new[-1]
        is_over = not changes.updates and not changes.has_nnx_objects and type(result) is not Packed
        return result if is_over else _finish_result((new, result), objects)

    def _call_lending(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call at top level, without listeners."""
        use = self.use
        updated: list[Any] = [ref() for ref in use.updated]
        written: list[Any] = [ref() for ref in use.written]
        read: list[Any] = [ref() for ref in use.read]
        assigned = updated + written
        values = lend(updated, written, read)
        try:
            outcome = run(*values, *args, **kwargs)
        except BaseException:
            take_back(assigned, read)
            raise
        settle(assigned, outcome[0] if assigned else (), read)
        return outcome

    def _call_holding(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of a program that calls the host, at top level, without listeners."""
        use = self.use
        assigned: list[Any] = [ref() for ref in use.assigned]
        # `.value`, not the stored array: the host may run a program that overwrites that array.
        constants = [ref().value for ref in use.read]  # type: ignore[union-attr]
        values = hold(assigned)[: len(use.updated)]
        try:
            new, result = run(*values, *constants, *args, **kwargs)
            _jax.wait_for(new)
        except BaseException:
            take_back(assigned)
            raise
        settle(assigned, new)
        return new, result

    def _call_watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call inside a transformation, inside a tape, or while listeners listen."""
        use = self.use
        values: Any = [ref() for ref in use.values]
        trace = _jax.current_trace(None)
        if isinstance(trace, ForwardingTrace) and not self._has_options and trace.gives_back:
            values = (*show_values(values), *args)
            new, result = trace.call_jitted(self.nested, self._forms, values, kwargs)
        else:
            values = [variable.value for variable in values]
            with kept_programs.without_key():
                new, result = self.nested(*values, *args, **kwargs)
        if use.calls_host:
            _jax.wait_for(new)
        for ref, value, is_new in zip(use.assigned, new, new[-1].assigned, strict=False):
            if is_new:
                ref().assign(value)  # type: ignore[union-attr]
        if use.recomputes:
            self._warn()
        return new, result

    def call_compiled(self, compiled: Callable[..., Any], call: PackedCall) -> Any:
        """Runs a call by a compiled result of `lower`."""
        args, kwargs = self._unpack_for_stage(call)
        if self.use.calls_host:
            outcome = self._call_holding(compiled, args, kwargs)
        else:
            with _jax.at_top_level():  # no tape records a call of a compiled program
                outcome = self._call_lending(compiled, args, kwargs)
        is_alone = changes_of(outcome) is None
        return outcome if is_alone else _finish_result(outcome, call.objects)

    def call_stage(self, stage: str, call: PackedCall) -> Any:
        """Calls `lower`, `trace` or `eval_shape` of the jit."""
        variables: list[Any] = [ref() for ref in self.use.values]
        values = [variable.value for variable in variables]
        args, kwargs = self._unpack_for_stage(call)
        result = getattr(self._jit_for_stage(stage), stage)(*values, *args, **kwargs)
        has_changes = stage == "eval_shape" and changes_of(result) is not None
        return result[1] if has_changes else result

    def _unpack_for_stage(self, call: PackedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) for `call_stage`: trees, unless the user's shardings are packed."""
        return call.of_trees() if self._shardings is None else (call.args, call.kwargs)

    def _jit_for_stage(self, stage: str) -> Any:
        """The jit whose result is not packed, but has its own tree."""
        pipeline = self._body.pipeline()
        assert pipeline is not None, "the traced function holds it"
        if self.use.is_plain or pipeline.packs_results != "if it has non-arrays":
            return self.nested if stage == "eval_shape" else self.outermost
        if self._staged is None:
            self._staged = jax.jit(Body(pipeline, self.use, is_staged=True), **self.options)
        return self._staged

    _staged: Any = None

    def clear_cache(self) -> None:
        if "nested" in vars(self):
            self.nested.clear_cache()
        self.outermost.clear_cache()


def _finish_result(outcome: tuple[list[Any], Any], objects: Sequence[Any]) -> Any:
    """Assigns the new arrays in the call's nnx `objects`; returns the user's result."""
    new, result = outcome
    if type(result) is Packed:
        result = result.argument()
    changes = new[-1]
    values = new[-1 - len(changes.updates) : -1]
    return finish_result(
        result, objects, changes.updates, values, has_objects=changes.has_nnx_objects
    )
