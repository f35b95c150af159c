"""A traced function compiled for one key: one jit, with all Variables that its traces have met.

A key is the Variables among a call's arguments. For each key a function has one `Program`, which
takes the values of its Variables before the arguments, and returns the new values before the
result. Which Variables these are shows only while JAX traces. So a program begins *plain*, as an
ordinary jit. If a trace meets a new Variable, or a result that is not all arrays, `Body` raises
`Outgrown` after the user's function is over: only JAX's code sees the exception. The call goes on
with a larger program, made of what was traced.

A program that assigns a Variable which it also reads writes the new value over the old one, at
top level, where nobody else can have the old array; see `variables.lending`. One that calls the
host (`Graph.calls_host`) does not: what runs there may read the Variable, or raise, and by then the
old value would be gone and the new one never come. Such a program keeps the old value until it is
over, and is waited for: it may fail long after it was started, and a value that it never computed
is not assigned.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.running import run_graph
from tracegrad.tracing.jit_options import options_behind, signature_behind
from tracegrad.tracing.static import Call, TakingApart
from tracegrad.tracing.uses import Use
from tracegrad.variables.inside import hands_out, put_together
from tracegrad.variables.lending import dispatching, free, hold, lend, peek, settle, show, take_back
from tracegrad.variables.listening import listeners
from tracegrad.variables.modules import Contents, Update
from tracegrad.variables.nnx_objects import nnx
from tracegrad.variables.overriding import ForwardingTrace
from tracegrad.variables.packed import Packed, unpacked
from tracegrad.variables.statics import has_modules, has_statics, with_statics
from tracegrad.variables.trees import was_a_variable
from tracegrad.variables.variable import Variable

if TYPE_CHECKING:
    from tracegrad.tracing.pipeline import Pipeline

Variables = tuple[Sequence[Variable], Sequence[Variable], Sequence[Variable]]  # as of a `Use`


class Outgrown(BaseException):
    """A call needs a larger program. `Body` raises it to the call of that program.

    Attributes:
      of: the body.
      graph: what was traced; None where that shows before the user's function is called.
    """

    def __init__(self, of: Body, graph: Graph | None):
        super().__init__("nothing catches this but tracegrad")
        self.of = of
        self.graph = graph


class _Traced(threading.local):
    graph: Graph | None = None  # of the call that goes on with a larger program; for one use


_traced = _Traced()


class NewValues(list[Any]):
    """The new values that a program returns before its result: of its Variables, in the order of
    its use, then of arrays of modules.

    Attributes:
      assigned: for each Variable, whether the program has assigned it.
      updates: where in the modules of the call the values behind those go.
      hands_out: whether modules of flax.nnx in the result are put in their places.
    """

    def __init__(
        self, about: tuple[tuple[bool, ...], tuple[Update, ...], bool], values: Sequence[Any]
    ):
        self.extend(values)
        self.about = about
        self.assigned, self.updates, self.hands_out = about


jax.tree_util.register_pytree_with_keys(
    NewValues,
    lambda new: ([(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(new)], new.about),
    NewValues,  # type: ignore[arg-type]
    lambda new: (tuple(new), new.about),
)


class Body:
    """What `jax.jit` sees in the place of the user's function: trace → rules → lower.

    Takes the values of the Variables that the use says, then the arguments. Returns `NewValues` and
    the function's result; of a plain use the result alone. It holds the pipeline weakly, because
    JAX's caches live as long as it does.

    Args:
      packs: whether a result that is not all arrays is `Packed`, for whoever puts it together.
      is_staged: whether it is for `lower` and the like: then a result with nothing new comes alone.
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
            if signature is not None:  # argument names, and checks of static ones
                self.__signature__ = signature

    @property
    def pipeline(self) -> Pipeline | None:
        """Whose it is, while that is there."""
        return self._pipeline()

    @property
    def __wrapped__(self) -> Callable[..., Any] | None:
        """The user's function: signature, name and source line of messages come from it."""
        pipeline = self._pipeline()
        return None if pipeline is None else pipeline.ref()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        pipeline, use = self._pipeline(), self.use
        assert pipeline is not None, "the traced function that is called holds it"
        if _jax.config.jax_disable_jit:  # no warm call asks; nothing was called yet
            raise Outgrown(self, None)
        values, args = args[: len(use.values)], args[len(use.values) :]
        call = self._taken_apart(pipeline, args, kwargs)
        dynamic, *_ = pipeline.static.apart(call.args, call.kwargs)
        flat, tree = jax.tree.flatten(dynamic)
        graph, _traced.graph = _traced.graph, None
        if graph is None or not _is_of(graph, flat, tree):
            graph = pipeline.traced(call)
        if not use.serves(graph, pipeline.packs_results):
            raise Outgrown(self, graph)
        of_variable = dict(zip([id(ref()) for ref in use.values], values, strict=True))
        flat += [of_variable[id(variable)] for variable in graph.variables]
        outs = run_graph(graph, flat)
        count, last = graph.result_count, len(outs) - len(graph.updates)
        if self._packs and not use.is_plain:
            result = Packed(outs[:count], graph.out_tree)
        else:
            result = jax.tree.unflatten(graph.out_tree, outs[:count])
            result = with_statics(result) if has_statics(graph.out_tree) else result
        if use.is_plain or (self._is_staged and not use.has_variables and not graph.updates):
            return result
        new = dict(zip(map(id, graph.assigned), outs[count:last], strict=True))
        variables = [id(ref()) for ref in (*use.updated, *use.written)]
        about = tuple([i in new for i in variables]), graph.updates, hands_out(graph.out_tree)
        assigned = [new[i] if i in new else of_variable[i] for i in variables]
        return NewValues(about, [*assigned, *outs[last:]]), result

    def _taken_apart(
        self, pipeline: Pipeline, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """The arguments, packed. Raises `Outgrown` where there is what nobody has looked for."""
        call = TakingApart(pipeline.static)(args, kwargs)
        if not pipeline.takes_apart:
            found = call.variables or call.objects or has_modules((args, kwargs))
            if found or any(map(was_a_variable, jax.tree.leaves((args, kwargs)))):
                pipeline.take_apart(call)
                raise Outgrown(self, None)
        elif not pipeline.take.looks_for_modules and nnx() is not None:
            dynamic, *_ = pipeline.static.apart(*unpacked(call.args, call.kwargs))
            if Contents(dynamic).objects:
                pipeline.take.looks_for_modules = True
                raise Outgrown(self, None)
        return call

    def warn_of_merging(self) -> None:
        """See there."""
        pipeline = self._pipeline()
        if pipeline is not None:
            pipeline.warn_of_merging()

    def __repr__(self) -> str:
        return self._text  # what JAX's messages name


def _is_of(graph: Graph, flat: Sequence[Any], tree: Any) -> bool:
    """Whether a graph was traced for such arguments."""
    types = list(map(_jax.type_of, flat))
    return bool(graph.in_tree == tree and graph.in_avals[: len(types)] == types)


class Program:
    """A function compiled for one use; immutable: one that is outgrown makes a larger one.

    Attributes:
      nested: its jit, for calls with transformations around them; made when it is asked for.
      outermost: its jit for calls at top level. This one writes over the Variables that it updates,
        and tells XLA to keep recomputed code (JAX refuses compiler options on a nested jit).
      direct: what a call is, where its use is plain; else None.
    """

    def __init__(self, pipeline: Pipeline, use: Use, shardings: Any = None):
        """Makes the program.

        Args:
          shardings: of the arguments, where the user said them along their trees.
        """
        self.use = use
        self._pipeline = weakref.ref(pipeline)
        body = Body(pipeline, use, packs=pipeline.packs_results)
        options = pipeline.options
        self._shardings = shardings
        if shardings is not None:
            options = {**options, "in_shardings": shardings}
        if not use.is_plain:
            options = options_behind(pipeline.fun, options, pipeline.static, use.values)
        self._make_nested = functools.partial(jax.jit, body, **options)
        self._has_options = any(options.values())
        self._forms: dict[Any, Any] = {}  # of a trace that calls it
        if use.recomputes:
            extra = _jax.keep_recompute_options(jax.default_backend())
            options = _jax.with_compiler_options(options, extra or {})
        if use.has_variables:
            written_over = () if use.calls_host else range(len(use.updated))
            donated = (*written_over, *options["donate_argnums"])
            options = {**options, "donate_argnums": donated}
        self.options = options
        self._warn = body.warn_of_merging  # `direct` has it: it does not hold this
        is_other = use.has_variables or use.recomputes
        self.outermost: Any = jax.jit(body, **options) if is_other else self.nested
        self.direct: Callable[..., Any] | None = None
        if use.is_plain:
            self.direct = self._recomputing() if use.recomputes else self.nested

    @functools.cached_property
    def nested(self) -> Any:
        return self._make_nested()

    def is_outgrown_by(self, outgrown: Outgrown) -> bool:
        """Whether this is what a call has outgrown."""
        return outgrown.of.use is self.use

    def grown(self, graph: Graph) -> Program:
        """The same, with a place for what a graph does."""
        pipeline = self._pipeline()
        assert pipeline is not None, "the traced function that is called holds it"
        use = Use(self.use, graph, packs=pipeline.packs_results)
        return Program(pipeline, use, self._shardings)

    def _recomputing(self) -> Callable[..., Any]:
        """What a call is, where XLA is to be told to keep what is recomputed."""
        # A warm call costs as little more than the jit's as Python allows, hence the local names.
        nested, outermost, warn = self.nested, self.outermost, self._warn
        current, top_level = _jax.current_trace, _jax.TopLevelTrace

        def run(*args: Any, **kwargs: Any) -> Any:
            if type(current(None)) is top_level:
                return outermost(*args, **kwargs)
            result = nested(*args, **kwargs)
            warn()
            return result

        return run

    def __call__(self, call: Call, graph: Graph | None = None) -> Any:
        """Calls it.

        Args:
          graph: what was traced for this call.
        """
        if graph is not None:
            _traced.graph = graph
            try:
                return self(call)
            finally:
                _traced.graph = None
        args, kwargs, _, objects = call
        if self.direct is not None:
            return self.direct(*args, **kwargs)
        use = self.use
        updated: Any = [ref() for ref in use.updated] if use.updated else ()
        read: Any = [ref() for ref in use.read] if use.read else ()
        written: Any = [ref() for ref in use.written] if use.written else ()
        if listeners() or type(_jax.current_trace(None)) is not _jax.TopLevelTrace:
            run = self._watched
        else:
            run = self._held if use.calls_host else self._lent
        new, result = run((updated, read, written), args, kwargs)
        if new.updates:  # their values are the last ones
            for update, value in zip(new.updates, new[len(new) - len(new.updates) :], strict=True):
                update.assign(objects, value)
        if type(result) is Packed:
            result = result.argument()
        return put_together(result, objects) if new.hands_out else result

    def _lent(
        self, variables: Variables, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[NewValues, Any]:
        """A call that writes over what it updates, with nobody around."""
        updated, read, written = variables
        free((*updated, *read, *written))  # waits, which nobody may who holds the lock
        with dispatching:  # no other thread lends what is read here before the program has it
            constants = peek(read) if read else ()
            if not updated and not written:
                new, result = self.outermost(*constants, *args, **kwargs)
                return new, result
            values = lend(updated)
            try:
                new, result = self.outermost(*values, *constants, *args, **kwargs)
            except BaseException:
                take_back(updated)
                raise
            settle([*updated, *written] if written else updated, new)
            return new, result

    def _held(
        self, variables: Variables, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[NewValues, Any]:
        """A call of what calls the host, with nobody around."""
        updated, read, written = variables
        constants = [variable.value for variable in read]  # the host may run what writes over them
        assigned = (*updated, *written)
        free(assigned)
        with dispatching:
            values = hold(assigned)[: len(updated)]
        try:
            new, result = self.outermost(*values, *constants, *args, **kwargs)
            _jax.wait_for(new)
        except BaseException:
            take_back(assigned)
            raise
        settle(assigned, new)
        return new, result

    def _watched(
        self, variables: Variables, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[NewValues, Any]:
        """A call where others look on."""
        updated, read, written = variables
        trace = _jax.current_trace(None)
        if isinstance(trace, ForwardingTrace) and not self._has_options and trace.gives_back:
            values = (*show([*updated, *read]), *args)
            new, result = trace.call_jitted(self.nested, self._forms, values, kwargs)
        else:
            values = tuple([variable.value for variable in (*updated, *read)])
            new, result = self.nested(*values, *args, **kwargs)
        if self.use.calls_host:
            _jax.wait_for(new)
        for variable, value, is_new in zip((*updated, *written), new, new.assigned, strict=False):
            if is_new:
                variable.assign(value)
        if self.use.recomputes:
            self._warn()
        return new, result

    def staged(self, stage: str, call: Call, graph: Graph | None) -> Any:
        """`lower`, `trace` or `eval_shape` of the compiled function of values."""
        variables: list[Any] = [ref() for ref in self.use.values]
        values = [variable.value for variable in variables]
        args, kwargs = call.of_trees()
        _traced.graph = graph
        try:
            result = getattr(self._unpacked(stage), stage)(*values, *args, **kwargs)
        finally:
            _traced.graph = None
        is_pair = isinstance(result, tuple) and bool(result) and isinstance(result[0], NewValues)
        return result[1] if stage == "eval_shape" and is_pair else result

    def _unpacked(self, stage: str) -> Any:
        """The jit with the result in its own tree."""
        pipeline = self._pipeline()
        assert pipeline is not None, "the traced function holds it"
        if self.use.is_plain or not pipeline.packs_results:
            return self.nested if stage == "eval_shape" else self.outermost
        if self._staged is None:
            self._staged = jax.jit(
                Body(pipeline, self.use, packs=False, is_staged=True), **self.options
            )
        return self._staged

    _staged: Any = None

    def clear_cache(self) -> None:
        """Forgets what is compiled."""
        if "nested" in vars(self):
            self.nested.clear_cache()
        self.outermost.clear_cache()
