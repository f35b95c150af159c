"""`trace`: a Python function → Graph → rules → XLA, at the cost of `jax.jit`.

One `jax.jit` does the caching and the dispatch, so that a warm call costs what it costs there. The
function under it is a `Pipeline`: while `jit` traces it, it traces the user's function itself,
imports the program into a graph, applies the rules and lowers the result into jit's own trace.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar, overload

import jax

from tracegrad import _jax
from tracegrad._jax.caches import WeakCache
from tracegrad.ir import Graph
from tracegrad.ir.engine import engine
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.lowering import Lowering, evaluate
from tracegrad.tracing.graphs import Rule, function_name, trace_to_graph, tracing_depth
from tracegrad.tracing.in_force import Force, in_force
from tracegrad.tracing.retracing import CacheInfo, Signature, TraceHistory
from tracegrad.tracing.stateful import (
    Expecting,
    Program,
    StatefulCalls,
    VariablesFound,
    evaluate_once,
    is_expected,
    run_eagerly,
)
from tracegrad.tracing.static import StaticArguments, resolve
from tracegrad.tracing.user_errors import explain
from tracegrad.variables.trees import Given, given, given_before, taken, without_variables

T = TypeVar("T")


class RecomputeFound(BaseException):
    """A program recomputes that is being compiled without the options which keep that.

    No Exception, so that it passes through the user's handlers.
    """


class Pipeline:
    """What `jax.jit` sees in place of the user's function: trace → rules → lower.

    It holds the function weakly, because JAX's caches, and ours below, live as long as it does.
    """

    def __init__(self, fun: Callable[..., Any], rules: tuple[Rule, ...], static: StaticArguments):
        self._fun = _weak(fun)
        self.rules = rules
        self.static = static
        self.history = TraceHistory(function_name(fun))
        self.recomputes = False  # whether any program of it held a Recompute
        self.has_variables = False  # whether any program of it used some
        self.takes_variables = False  # whether any call had some among its arguments
        self.functions: weakref.WeakSet[TracedFunction] = weakref.WeakSet()
        self._warned = False
        self.__name__ = self.__qualname__ = function_name(fun)
        self.__doc__ = fun.__doc__
        self.__module__ = getattr(fun, "__module__", __name__)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The user's function: signature, name and source line of messages come from it."""
        fun = self._fun()
        assert fun is not None, "the traced function holds it"
        return fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _jax.config.jax_disable_jit:
            return self.eagerly(args, kwargs)
        known = self.recomputes
        args, kwargs = self.given_before(args, kwargs)
        graph = self.traced(args, kwargs)
        flat, _ = self.flatten(args, kwargs)
        if not graph.variables and not graph.assigned:
            needed = _jax.keep_recompute_options(jax.default_backend()) is not None
            if needed and self.recomputes and not known:
                raise RecomputeFound
            return jax.tree.unflatten(graph.out_tree, evaluate(graph, flat, Lowering()))
        if is_expected(self):
            raise VariablesFound(self, graph)
        # A warm function went to jit directly, and finds Variables for the first time.
        self.meet_variables()
        return evaluate_once(graph, flat)

    def eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call does under `jax.disable_jit`: it is one of the function as it is, or, where
        rules are to change that, it runs the graph, one operation after the other."""
        if not self.rules:
            args, kwargs = taken((args, kwargs))
            return without_variables(self.__wrapped__(*args, **kwargs))
        args, kwargs = given((args, kwargs))[0]
        return run_eagerly(self.traced(args, kwargs), self.flatten(args, kwargs)[0])

    def __repr__(self) -> str:
        return repr(self._fun())  # what JAX's messages name

    def graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        force = Force(self.rules)
        with in_force(force), _with_jit():  # with jit, so that rules find the functions
            traced = trace_to_graph(self.__wrapped__, args, kwargs, self.static)
        graph = force.finish(traced)
        if not graph.variables and not graph.assigned:  # a rule may make a new graph
            graph.variables, graph.assigned = traced.variables, traced.assigned
        return graph

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        """The graph of a call that is about to be compiled."""
        try:
            graph = self.graph(args, kwargs)
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)
        if not _jax.is_part_of_a_program():  # else nothing is compiled for it
            self._note(args, kwargs, self.static.within(args))
        self.recomputes = self.recomputes or graph.recomputes
        return graph

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """The leaves and the tree of the arguments that are not static."""
        positions = self.static.within(args)
        dynamic = tuple(a for i, a in enumerate(args) if i not in positions)
        names = self.static.named(kwargs)
        flat, tree = jax.tree.flatten(
            (dynamic, {k: v for k, v in kwargs.items() if k not in names})
        )
        return flat, tree

    def meet_variables(self) -> None:
        """Has every wrapper of the function go the way of functions with Variables."""
        self.has_variables = True
        for function in list(self.functions):
            function.use_variables()

    def take_variables(self) -> None:
        """Has every wrapper of the function look for Variables among its arguments."""
        self.takes_variables = True
        for function in list(self.functions):
            function.take_variables()

    def given_before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call as JAX hands them on, with the Variables that were among them."""
        arguments = args, kwargs
        found = given_before(arguments)
        if found is not arguments:
            self.take_variables()
        return found

    def warn_of_merging(self) -> None:
        """Warns, once, where XLA undoes what a call nested in a compiled function recomputes."""
        # Inside another traced function that one sees to it, or warns itself.
        if not self.recomputes or self._warned or tracing_depth() or not _jax.under_jit():
            return
        options = _jax.keep_recompute_options(jax.default_backend())
        if options is None:
            return
        self._warned = True
        warn_where_called(
            f"{self.__name__} recomputes, and is called inside another "
            "compiled function. On this JAX and backend XLA merges recomputed code with the "
            "original, which saves no memory, unless the outermost function is compiled with "
            f"an option that cannot be set from inside: make it a `tracegrad.trace`, or "
            f"`jax.jit(..., compiler_options={options})`.",
            UserWarning,
        )

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: Sequence[int]) -> None:
        names = _argument_names(self.__wrapped__, len(args))
        named = {**dict(zip(names, args, strict=True)), **kwargs}
        fixed = {names[i] for i in static} | set(self.static.named(kwargs))
        self.history.note(
            Signature.of(
                {name: v for name, v in named.items() if name not in fixed},
                {name: v for name, v in named.items() if name in fixed},
            )
        )


class Jits:
    """The jits of a traced function without Variables.

    They know nothing of it, so that it and what it holds are gone with the last reference to it.
    """

    def __init__(self, pipeline: Pipeline, options: dict[str, Any]):
        self._pipeline = pipeline
        self._options = options
        self.nested: Any = jax.jit(pipeline, **options)

    @functools.cached_property
    def outermost(self) -> Any:
        """The jit for calls with no transformation around them, of a function that recomputes.

        Where XLA merges recomputed code away unless told not to, it is told so there; JAX refuses
        compiler options on a nested jit.
        """
        extra = _jax.keep_recompute_options(jax.default_backend())
        if extra is None:
            return self.nested
        return jax.jit(self._pipeline, **_jax.with_compiler_options(self._options, extra))

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """What a call of the function is."""
        # Not in `__init__`: asking for the backend starts it.
        needed = _jax.keep_recompute_options(jax.default_backend()) is not None
        return self._keeping_recompute() if needed else self.nested

    def _keeping_recompute(self) -> Callable[..., Any]:
        """The calls where XLA must be told to keep what is recomputed: of a function that does
        recompute (which shows when it is traced), with no transformation around them. A warm call
        costs as little more than the jit's as Python allows, hence the local names."""
        nested, pipeline, options = self.nested, self._pipeline, self._options
        current, top_level = _jax.current_trace, _jax.TopLevelTrace
        jits = weakref.ref(self)  # which hold what is returned here

        def run(*args: Any, **kwargs: Any) -> Any:
            if not pipeline.recomputes:
                try:
                    return nested(*args, **kwargs)
                except RecomputeFound:
                    pass
            if isinstance(current(None), top_level):
                return (jits() or Jits(pipeline, options)).outermost(*args, **kwargs)
            result = nested(*args, **kwargs)
            pipeline.warn_of_merging()
            return result

        return run

    def clear_cache(self) -> None:
        """Forgets every program."""
        self.nested.clear_cache()
        self.outermost.clear_cache()


class TracedFunction:
    """A function compiled by way of its graph; made by `trace`.

    Call it as the original. Beside that:

      graph(*args, **kwargs): the `Graph` for these arguments, after the rules.
      lower(*args, **kwargs), trace(*args, **kwargs): `jax.stages.Lowered` and
        `jax.stages.Traced`, as of a jitted function; so `jax.export.export` takes it.
      eval_shape(*args, **kwargs): the types of the results, without computing them.
      cache_info(): the signatures for which it was traced, when, and why each was a new one.
      clear_cache(): forgets compiled programs.
      __wrapped__: the original function.
    """

    # Python finds `__call__` on the type; as a slot of the type it holds jit's own callable, and
    # the way from a call to jit's fast path is in C. A method here costs a tenth of a warm call.
    __slots__ = ("__call__", "__dict__", "__weakref__")
    __call__: Callable[..., Any]
    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fun: Callable[..., Any],
        rules: Sequence[Rule] = (),
        jit_options: dict[str, Any] | None = None,
    ):
        options = dict(jit_options or {})
        jax.jit(fun, **options)  # checks the function and the options, in jit's own words
        functools.update_wrapper(self, fun, updated=())
        static = resolve(fun, options.get("static_argnums"), options.get("static_argnames"))
        self._pipeline = _shared_pipeline(fun, tuple(rules), static)
        self._options = options
        self._jits = Jits(self._pipeline, options)
        self._stateful = StatefulCalls(self._pipeline, options)
        # The same for each combination of Variables that it was given.
        self._by_given: dict[tuple[Given, ...], StatefulCalls] = {}
        self._pipeline.functions.add(self)
        self.__call__ = self._first_call

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        if _jax.config.jax_disable_jit:
            return self._pipeline.eagerly(args, kwargs)
        if not self._pipeline.has_variables:
            self.__call__ = self._jits.call
        arguments = args, kwargs
        found = given(arguments)[0]
        if self._pipeline.takes_variables or found is not arguments:
            self._pipeline.take_variables()
        try:
            return self._any_call(*found)
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)

    def _with_given(self, *args: Any, **kwargs: Any) -> Any:
        """The call of a function that is given Variables."""
        if _jax.config.jax_disable_jit:
            return self._pipeline.eagerly(args, kwargs)
        (args, kwargs), variables = given((args, kwargs))
        try:
            if self._pipeline.has_variables:
                return self._calls_of(variables)(*args, **kwargs)
            return self._any_call(args, kwargs)
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)

    def _calls_of(self, variables: tuple[Given, ...]) -> StatefulCalls:
        """The calls that are given these Variables."""
        if not variables:
            return self._stateful
        calls = self._by_given.get(variables)
        if calls is None:
            for old in [key for key in self._by_given if any(each.is_gone for each in key)]:
                self._by_given.pop(old, None)
            calls = self._by_given[variables] = StatefulCalls(self._pipeline, self._options)
        return calls

    def _any_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._either(
            lambda: self._jits.call(*args, **kwargs), lambda p: p(args, kwargs), args, kwargs
        )

    def _either(
        self,
        plain: Callable[[], T],
        stateful: Callable[[Program], T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> T:
        """One way for functions without Variables, another for those with; which it is shows when
        the function is traced."""
        found = None
        if not self._pipeline.has_variables:
            with Expecting(self._pipeline) as expecting:
                return plain()
            found = expecting.found
            self._pipeline.meet_variables()
        self.use_variables()
        calls = self._calls_of(given((args, kwargs))[1])
        return calls.search(args, kwargs, stateful, found)

    def use_variables(self) -> None:
        """From now on calls pass the values of Variables."""
        self.__call__ = self._with_given if self._pipeline.takes_variables else self._stateful

    def take_variables(self) -> None:
        """From now on calls look for Variables among their arguments."""
        self.__call__ = self._with_given

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else BoundTracedFunction(self, instance)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph for these arguments (arrays or `jax.ShapeDtypeStruct`s), after the rules."""
        try:
            return self._pipeline.graph(*given((args, kwargs))[0])
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As ``jax.jit(fun).lower``: StableHLO in `.as_text()`, XLA's in `.compile()`.

        The program of a function with Variables takes their values in front of the arguments:
        of those that it reads and assigns, which it writes over, then of those that it only reads.
        It returns a pair: a list of the assigned values, and the result. A Variable among the
        arguments is one of these; for a compiled program that is to be called, pass its `.value`.
        """
        lowered: jax.stages.Lowered = self._staged("lower", args, kwargs)
        return lowered

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As ``jax.jit(fun).trace``; for a function with Variables see `lower`."""
        traced: jax.stages.Traced = self._staged("trace", args, kwargs)
        return traced

    def _staged(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = given((args, kwargs))[0]

        def plain() -> Any:
            if not self._pipeline.recomputes:
                with suppress(RecomputeFound):
                    return getattr(self._jits.nested, stage)(*args, **kwargs)
            return getattr(self._jits.outermost, stage)(*args, **kwargs)

        with _with_jit():
            return self._either(
                plain, lambda program: program.staged(stage, args, kwargs), args, kwargs
            )

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The results as `jax.ShapeDtypeStruct`s. Assigns nothing."""
        args, kwargs = given((args, kwargs))[0]

        def plain() -> Any:
            with suppress(RecomputeFound):
                return self._jits.nested.eval_shape(*args, **kwargs)
            return self._jits.nested.eval_shape(*args, **kwargs)

        with _with_jit():
            return self._either(
                plain,
                lambda program: program.staged("eval_shape", args, kwargs)[1],
                args,
                kwargs,
            )

    def cache_info(self) -> CacheInfo:
        """The signatures for which the function was traced, when, and why each was a new one.

        All wrappers of a function with the same rules share them, as they share its programs.
        Calls inside another compiled function are not counted: nothing is compiled for them (nor
        are those for which JAX goes on with what it traced there). A function that recomputes may
        be traced twice for its first signature.

        >>> import jax.numpy as jnp, tracegrad as tg
        >>> @tg.trace
        ... def double(x):
        ...     return 2 * x
        >>> for n in (3, 4, 4, 4):
        ...     _ = double(jnp.ones(n))
        >>> double.cache_info()  # doctest: +ELLIPSIS
        double was traced for 2 signatures
          1. ...  x: float32[3]
            the first
          2. ...  x: float32[4]
            the shape of `x` changed from [3] to [4]
        """
        return self._pipeline.history.info()

    def clear_cache(self) -> None:
        """Forgets what was compiled: the next call traces again."""
        self._jits.clear_cache()
        self._stateful.clear_cache()
        self._by_given.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedFunction:
        return self  # as of any function: a model that holds one can be copied

    def __repr__(self) -> str:
        return f"<traced {self.__wrapped__!r}>"


class BoundTracedFunction:
    """A traced method of an instance: all of `TracedFunction`, with ``self`` filled in."""

    def __init__(self, function: TracedFunction, instance: object):
        self.__func__ = function
        self.__self__ = instance
        self.__wrapped__ = types.MethodType(function.__wrapped__, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        return self.__func__.graph(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<traced {self.__wrapped__!r}>"


@overload
def trace(
    fun: Callable[..., Any],
    *,
    rules: Sequence[Rule] = (),
    memory_budget: int | float | str | None = None,
    **jit_options: Any,
) -> TracedFunction: ...
@overload
def trace(
    fun: None = None,
    *,
    rules: Sequence[Rule] = (),
    memory_budget: int | float | str | None = None,
    **jit_options: Any,
) -> Callable[[Callable[..., Any]], TracedFunction]: ...
def trace(
    fun: Callable[..., Any] | None = None,
    *,
    rules: Sequence[Rule] = (),
    memory_budget: int | float | str | None = None,
    **jit_options: Any,
) -> Any:
    """Compiles a function by way of its `Graph`, where its gradient annotations are nodes.

    Takes whatever `jax.jit` takes, compiles to the same optimised program and costs the same per
    call; only what was annotated or rewritten differs. The `Variable`s that it reads, itself or in
    functions that it calls, are inputs of the program, and those that it assigns outputs: each
    call uses the values of that moment. A Variable among its arguments, static ones and those in
    trees too, is that Variable inside, and may be watched and assigned there; for each there is a
    program. One among its results is handed out as an array, its value at the end of the call.
    Usable bare (``@trace``), with arguments
    (``@trace(static_argnames="n")``), on methods, and under every JAX transformation.

    Args:
      fun: a function of arrays and pytrees of arrays, as for `jax.jit`.
      rules: functions ``Graph -> Graph``, applied in order. They act where differentiation
        happens: on the program of `fun`, for who differentiates it, and on what is differentiated
        inside it, by `tracegrad.grad`, tapes, `tracegrad.gradients`, and by `jax.grad` and the
        like, which `nnx.grad` and `equinox.filter_grad` call. A rule that matches in neither
        raises, and so does one that matches what a `jax.grad` has differentiated that was imported
        by its name (``from jax import grad``) or made before.
        That is decided for each signature by itself, whatever was called before: a rule for what
        only some static values lead to is given ``missing_ok=True``.
      memory_budget: the bytes that may be live at once in a gradient (``"2GiB"``, an int), or a
        share of those without recompute (``0.4``, ``"40%"``): what has to is recomputed, at the
        least cost that is found; see `tracegrad.plan_recompute`. A rule after the others.
      **jit_options: every keyword of `jax.jit`: ``static_argnums``, ``donate_argnums``,
        ``in_shardings``, ``compiler_options``, ...

    Returns:
      A `TracedFunction`.

    Raises:
      TypeError, ValueError: as `jax.jit`, for what is not a function and for wrong options.

    Warns:
      RetraceWarning: one argument changes its shape, dtype, weak type, static value or tree again
        and again, so that the function is compiled again and again.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> @tg.trace
    ... def f(x):
    ...     return x * tg.stop_gradient(x)
    >>> float(jax.grad(f)(3.0))
    3.0
    >>> print(f.graph(jax.ShapeDtypeStruct((2,), "float32")))  # doctest: +ELLIPSIS
    f(x: f32[2]) -> f32[2]
      stop_gradient = ■ stop_gradient(x)      f32[2]  ...
      mul           = mul(x, stop_gradient)   f32[2]  ...
      return mul
    """
    if fun is None:
        return functools.partial(trace, rules=rules, memory_budget=memory_budget, **jit_options)
    if callable(rules) or not all(map(callable, rules)):
        raise TypeError(f"rules is a sequence of functions Graph -> Graph; it was given {rules!r}")
    if memory_budget is not None:
        rules = (*rules, engine.fit_to_budget(memory_budget))
    return TracedFunction(fun, rules, jit_options)


# ------------------------------------------------------------------------------------------ caches

# Of functions; then by the identity of rules, which the pipelines hold.
_pipelines: WeakCache[dict[Any, Pipeline]] = WeakCache()
_MOST_RULES = 256  # that one function is traced with
_lock = threading.RLock()  # a pipeline that is let go of here may run anything


def _shared_pipeline(
    fun: Callable[..., Any], rules: tuple[Rule, ...], static: StaticArguments
) -> Pipeline:
    """One pipeline for all wrappers of a function with the same rules: they share its programs."""
    if isinstance(fun, types.MethodType):  # each access makes one, which is gone after its use
        return Pipeline(fun, rules, static)
    key = tuple(map(id, rules)), static
    with _lock:
        try:
            hash(fun)  # what has none may change, and be traced again for that
            known = _pipelines.get(fun) or _pipelines.put(fun, {})
        except TypeError:  # or cannot be held weakly
            return Pipeline(fun, rules, static)
        if key not in known:
            if len(known) >= _MOST_RULES:
                known.clear()
            known[key] = Pipeline(fun, rules, static)
        return known[key]


def _with_jit() -> AbstractContextManager[None]:
    """Undoes `jax.disable_jit`, for what is traced."""
    disabled = _jax.config.jax_disable_jit
    return jax.disable_jit(False) if disabled else nullcontext()


def _weak(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    if isinstance(fun, types.MethodType):
        return lambda: fun
    try:
        return weakref.ref(fun)
    except TypeError:
        return lambda: fun


def _argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional arguments."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):
        return [f"args[{i}]" for i in range(count)]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(count)]
