"""One variant of a traced function: what it does with what is outside of it, and its one program.

A `Variant` belongs to a `Use`: the Variables that are read and assigned, whether code on the host
is called, whether something is recomputed. It owns the jit that is made for that: the values of the
Variables go in before the arguments, the new ones come out before the result. The use is known when
the function was traced, not before; so a call takes the variant that fitted last time, and where
JAX has to trace, and the function turns out to be of another variant, the trace is left
(`attempts`), and the call goes on with that one (`pipeline`). State of other kinds is one more
field of a use.

A program that assigns a Variable which it also reads writes the new value over the old one, at
top level, where nobody else can have the old array; see `variables.lending`. One that calls the
host (`Graph.calls_host`) does not: what runs there may read the Variable, or raise, and by then the
old value would be gone and the new one never come. Such a program keeps the old value until it is
over, and is waited for: it may fail long after it was started, and a value that it never computed
is not assigned.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.running import run_graph
from tracegrad.tracing.attempts import AnotherVariant, attempt_at
from tracegrad.tracing.jit_options import options_behind, signature_behind
from tracegrad.tracing.user_errors import explain
from tracegrad.variables.inside import hands_out, put_together
from tracegrad.variables.lending import free, hold, lend, peek, settle, show, take_back
from tracegrad.variables.listening import listeners
from tracegrad.variables.modules import Modules, held_leaves, modules_in
from tracegrad.variables.overriding import ForwardingTrace
from tracegrad.variables.packed import Packed, unpacked
from tracegrad.variables.statics import has_modules, has_statics, with_statics
from tracegrad.variables.trees import given_before
from tracegrad.variables.variable import Variable

if TYPE_CHECKING:
    from tracegrad.tracing.pipeline import Pipeline

Variables = tuple[Sequence[Variable], Sequence[Variable], Sequence[Variable]]  # as of a `Use`


class Use:
    """What a program does with what is outside of it.

    Attributes:
      updated, read, written: the Variables that it reads and assigns, only reads, only assigns;
        held weakly.
      updates: which arrays of the modules of flax.nnx among the arguments it returns: those with
        new values, and those that would be gone after the call.
      settings: attributes of these modules that get another value.
      calls_host: whether it calls code that XLA did not compile, where it has state.
      recomputes: whether it recomputes, and must be compiled with options that keep that.
      has_statics: whether some of its result is no array.
      returns_statics: whether that is put back after the call.
      returns_modules: whether modules of flax.nnx in its result are put in their places then.
      is_plain: whether it is arguments in, result out.
      puts_back: whether modules and results are put together after the call.
      is_over: a Variable is gone, and with it the use of the program.
      identity: equal for uses of the same Variables in the same way.
    """

    def __init__(self, graph: Graph, *, donated: Iterable[int] = (), packs: bool = True):
        """The use of a traced program.

        Args:
          donated: which arrays of the modules among the arguments are donated.
          packs: whether results that are not all arrays may be packed.
        """
        read = {id(v): v for v in graph.variables}
        assigned = {id(v): v for v in graph.assigned}
        self.is_over = False
        self.updated, self.read, self.written = self._weakly(
            [v for key, v in assigned.items() if key in read],
            [v for key, v in read.items() if key not in assigned],
            [v for key, v in assigned.items() if key not in read],
        )
        self.values = (*self.updated, *self.read)  # of these the program takes the values
        self.updates = tuple(sorted({*donated, *graph.updates}))
        self.settings = graph.settings
        self.returns_modules = hands_out(graph.out_tree)
        self.has_statics = has_statics(graph.out_tree)
        of_modules = self.updates, self.settings, self.returns_modules
        self.has_state = bool(read or assigned or any(of_modules))
        self.calls_host = self.has_state and graph.calls_host
        needed = _jax.keep_recompute_options(jax.default_backend())
        self.recomputes = needed is not None and graph.recomputes
        self.returns_statics = packs and self.has_statics
        self.is_plain = not self.has_state and not self.returns_statics
        self.puts_back = self.returns_statics or any(of_modules)
        self.identity = (
            frozenset(read),
            frozenset(assigned),
            self.updates,
            self.settings,
            self.returns_modules,
            self.calls_host,
            self.returns_statics,
        )

    def _weakly(self, *groups: Sequence[Any]) -> list[list[weakref.ref[Any]]]:
        """References to all of them; the use is over with the first that is gone."""
        me = weakref.ref(self)

        def over(_: object) -> None:
            use = me()
            if use is not None:
                use.is_over = True

        return [[weakref.ref(each, over) for each in group] for group in groups]

    def serves(self, other: Use) -> bool:
        """Whether a program of this use may be made for that one."""
        return self.identity == other.identity and (self.recomputes or not other.recomputes)


class Body:
    """What `jax.jit` sees in the place of the user's function: trace → rules → lower.

    Takes the values of the Variables that the use says, then the arguments. Returns the new values,
    of those updated and those only written, then of arrays of modules, and the function's result;
    of a plain use the result alone. It holds the pipeline weakly, because JAX's caches live as long
    as it does.

    `packs`: whether a result that is not all arrays is `Packed`, for whoever puts it together.
    """

    def __init__(self, pipeline: Pipeline, use: Use, *, packs: bool = True):
        self._pipeline = weakref.ref(pipeline)
        self.use = use
        self._packs = use.returns_statics and packs
        self.__name__ = self.__qualname__ = pipeline.__name__
        self.__doc__ = pipeline.__doc__
        self.__module__ = pipeline.__module__
        self._text = pipeline.text
        if use.values:
            signature = signature_behind(pipeline.fun, use.values)
            if signature is not None:  # argument names, and checks of static ones
                self.__signature__ = signature

    @property
    def __wrapped__(self) -> Callable[..., Any] | None:
        """The user's function: signature, name and source line of messages come from it."""
        pipeline = self._pipeline()
        return None if pipeline is None else pipeline.ref()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        pipeline, use = self._pipeline(), self.use
        assert pipeline is not None, "the traced function that is called holds it"
        if _jax.config.jax_disable_jit:
            # No warm call asks. Nothing was called yet, and the pipeline has the call's arguments.
            if not use.is_plain or pipeline.takes_apart:
                raise AnotherVariant(pipeline, None)
            return pipeline.eagerly(args, kwargs)
        values, args = args[: len(use.values)], args[len(use.values) :]
        args, kwargs = unpacked(args, kwargs)
        dynamic, *_ = pipeline.static.apart(args, kwargs)
        flat, tree = jax.tree.flatten(dynamic)
        known = pipeline.known(flat, tree)
        if known is None:
            args, kwargs = self._looked_through(pipeline, args, kwargs)
            dynamic, *_ = pipeline.static.apart(args, kwargs)
            flat, tree = jax.tree.flatten(dynamic)
            known = pipeline.known(flat, tree) or pipeline.traced(args, kwargs, in_jit=True)
        graph, found = known
        if not use.serves(found):
            raise AnotherVariant(pipeline, (graph, found))
        of_variable = dict(zip([id(ref()) for ref in use.values], values, strict=True))
        flat += [of_variable[id(variable)] for variable in graph.variables]
        of_modules = [i for i, _ in held_leaves(dynamic)] if use.updates else []
        outs = run_graph(graph, flat)
        count, last = graph.result_count, len(outs) - len(graph.updates)
        if self._packs:  # JAX has no fast path to a result that is not all arrays
            result = Packed(outs[:count], graph.out_tree)
        else:
            result = jax.tree.unflatten(graph.out_tree, outs[:count])
            result = with_statics(result) if found.has_statics else result
        if not use.has_state:
            return ((), result) if self._packs else result
        new = dict(zip(map(id, graph.assigned), outs[count:last], strict=True))
        of_variables = [new[id(ref())] for ref in (*use.updated, *use.written)]
        arrays = dict(zip(graph.updates, outs[last:], strict=True))
        return [*of_variables, *(arrays.get(i, flat[of_modules[i]]) for i in use.updates)], result

    def _looked_through(
        self, pipeline: Pipeline, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call that has come to jit without a look at what is in them."""
        (args, kwargs), given = pipeline.static.given(args, kwargs, given_before)
        if given:
            pipeline.take_apart()
            if modules_in((args, kwargs)) is not None:  # copies
                pipeline.holds_modules = True
                raise AnotherVariant(pipeline, None)
        if (
            not pipeline.takes_apart
            and attempt_at(pipeline) is None
            and has_modules((args, kwargs))
        ):
            raise AnotherVariant(pipeline, None)  # it does not show here which of it are settings
        return args, kwargs

    def warn_of_merging(self) -> None:
        """See there."""
        pipeline = self._pipeline()
        if pipeline is not None:
            pipeline.warn_of_merging()

    def __repr__(self) -> str:
        return self._text  # what JAX's messages name


class Variant:
    """A function compiled for one use.

    Attributes:
      nested: its jit, for calls with transformations around them; made when it is asked for.
      outermost: the one for calls with none: where XLA merges recomputed code away unless told not
        to, it is told so there (JAX refuses compiler options on a nested jit), and what is updated
        is written over.
      direct: what a call is, where its use is plain; else None.
    """

    def __init__(self, pipeline: Pipeline, use: Use):
        self.use = use
        body = Body(pipeline, use)
        options = pipeline.options
        if not use.is_plain:
            options = options_behind(pipeline.fun, options, pipeline.static, use.values)
        self._make_nested = functools.partial(jax.jit, body, **options)
        self._has_options = any(options.values())
        if use.recomputes:
            extra = _jax.keep_recompute_options(jax.default_backend())
            options = _jax.with_compiler_options(options, extra or {})
        if use.has_state:
            written_over = () if use.calls_host else range(len(use.updated))
            donated = (*written_over, *options["donate_argnums"])
            options = {**options, "donate_argnums": donated}
        is_other = use.has_state or use.recomputes
        self.outermost: Any = jax.jit(body, **options) if is_other else self.nested
        self._warn = body.warn_of_merging
        self._unpacked: Any = None
        if use.returns_statics:
            self._unpacked = jax.jit(Body(pipeline, use, packs=False), **options)
        self.direct: Callable[..., Any] | None = None
        if use.is_plain:
            self.direct = self._direct(lambda jitted: jitted)

    @functools.cached_property
    def nested(self) -> Any:
        return self._make_nested()

    def handling_misses(self, handle: _jax.Handle) -> Callable[..., Any]:
        """`direct`, for calls that come from nowhere else; see `_jax.handling_misses`."""
        return self._direct(lambda jitted: _jax.handling_misses(jitted, handle, explain))

    def _direct(self, called: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
        """What a call is, where a jit is what `called` makes of it."""
        nested = called(self.nested)
        if not self.use.recomputes:
            return nested
        outermost = called(self.outermost)
        # A warm call costs as little more than the jit's as Python allows, hence the local names.
        warn, current, top_level = self._warn, _jax.current_trace, _jax.TopLevelTrace

        def run(*args: Any, **kwargs: Any) -> Any:
            if type(current(None)) is top_level:
                return outermost(*args, **kwargs)
            result = nested(*args, **kwargs)
            warn()
            return result

        return run

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], modules: Modules | None = None
    ) -> Any:
        """Calls it; `modules`: those among the arguments."""
        if self.direct is not None:
            return self.direct(*args, **kwargs)
        use = self.use
        updated: Any = [ref() for ref in use.updated] if use.updated else ()
        read: Any = [ref() for ref in use.read] if use.read else ()
        written: Any = [ref() for ref in use.written] if use.written else ()
        if listeners() or type(_jax.current_trace(None)) is not _jax.TopLevelTrace:
            call = self._watched
        else:
            call = self._held if use.calls_host else self._lent
        new, result = call((updated, read, written), args, kwargs)
        return self._put_back(new, result, modules) if use.puts_back else result

    def _put_back(self, new: Sequence[Any], result: Any, modules: Modules | None) -> Any:
        """What is left to do after a call of which not all is arrays and Variables."""
        use = self.use
        if use.updates or use.settings:
            assert modules is not None, "the program was made for such"
            # The new values of their arrays are the last ones.
            modules.assign(use.updates, new[len(new) - len(use.updates) :])
            modules.set(use.settings)
        if use.returns_statics:
            result = result.argument()
        return put_together(result, modules) if use.returns_modules else result

    def _lent(
        self, variables: Variables, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], Any]:
        """A call that writes over what it updates, with nobody around."""
        updated, read, written = variables
        constants = peek(read) if read else ()
        if not updated and not written:
            new, result = self.outermost(*constants, *args, **kwargs)
            return new, result
        if written:
            free(written)
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
    ) -> tuple[Sequence[Any], Any]:
        """A call of what calls the host, with nobody around."""
        updated, read, written = variables
        constants = [variable.value for variable in read]  # the host may run what writes over them
        assigned = (*updated, *written)
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
    ) -> tuple[Sequence[Any], Any]:
        """A call where others look on."""
        updated, read, written = variables
        trace = _jax.current_trace(None)
        is_shown = isinstance(trace, ForwardingTrace) and not self._has_options and trace.gives_back
        values = (
            show([*updated, *read])
            if is_shown
            else [variable.value for variable in (*updated, *read)]
        )
        new, result = self.nested(*values, *args, **kwargs)
        if self.use.calls_host:
            _jax.wait_for(new)
        for variable, value in zip((*updated, *written), new, strict=False):
            variable.assign(value)
        if self.use.recomputes:
            self._warn()
        return new, result

    def staged(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`lower`, `trace` or `eval_shape` of the compiled function of values."""
        jitted = self._unpacked or (self.nested if stage == "eval_shape" else self.outermost)
        variables: list[Any] = [ref() for ref in self.use.values]
        values = [variable.value for variable in variables]
        result = getattr(jitted, stage)(*values, *args, **kwargs)
        return result[1] if stage == "eval_shape" and self.use.has_state else result

    def clear_cache(self) -> None:
        """Forgets what is compiled."""
        if "nested" in vars(self):
            self.nested.clear_cache()
        self.outermost.clear_cache()
