"""`trace`: a Python function → Graph → rules → XLA, at the cost of `jax.jit`.

A `TracedFunction` is a wrapper: what is known of its function, and compiled for it, is in the
`Pipeline` that it shares with the others of that function. A call goes there, or directly to the
one `jax.jit` that is made for the function, as soon as that is known to be all.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload

import jax

from tracegrad.ir import Graph
from tracegrad.ir.engine import engine
from tracegrad.tracing.arguments import Call, TakingApart, resolve
from tracegrad.tracing.body import Outgrown
from tracegrad.tracing.graphs import Rule, as_rules, require_function
from tracegrad.tracing.jit_options import JitOptions, options_behind_module
from tracegrad.tracing.module_functions import taking_module
from tracegrad.tracing.pipeline import repr_of, with_jit
from tracegrad.tracing.programs import Program
from tracegrad.tracing.shardings import of_jit
from tracegrad.tracing.shared import shared_pipeline
from tracegrad.tracing.signatures import name_in_module
from tracegrad.tracing.stages import called_by
from tracegrad.tracing.user_errors import explain

_JIT_OPTIONS = inspect.signature(jax.jit).parameters.keys() - {"fun"}
P = ParamSpec("P")
Q = ParamSpec("Q")  # of a method, without ``self``
R = TypeVar("R")


class TracedFunction(Generic[P, R]):
    """A function compiled by way of its graph; made by `trace`.

    Call it as the original. Beside that:

      graph(*args, **kwargs): the `Graph` for these arguments, after the rules.
      lower(*args, **kwargs), trace(*args, **kwargs): `jax.stages.Lowered` and
        `jax.stages.Traced`, as of a jitted function; so `jax.export.export` takes it.
      eval_shape(*args, **kwargs): the types of the results, without computing them.
      clear_cache(): forgets compiled programs.
      plan: with ``memory_budget=`` what is computed again, and the bytes that were measured.
      __wrapped__: the original function.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> f = tg.trace(lambda x: jnp.sin(x) ** 2)
    >>> x = jax.ShapeDtypeStruct((3,), "float32")
    >>> [node.op for node in f.graph(x).nodes], f.eval_shape(x).shape
    (['sin', 'integer_pow'], (3,))
    """

    __wrapped__: Callable[P, R]
    _first: tuple[Any, ...]  # what a program takes before the arguments: the function, a module

    def __init__(
        self,
        fun: Callable[P, R],
        rules: Sequence[Rule] = (),
        jit_options: dict[str, Any] | None = None,
    ):
        options = dict(jit_options or {})
        jax.jit(fun, **of_jit(options))  # checks the function and the options, in jit's own words
        require_function(fun)
        functools.update_wrapper(self, fun, updated=())
        static = resolve(fun, options.get("static_argnums"), options.get("static_argnames"))
        called, self._first = taking_module(fun)
        if self._first:
            options, static = options_behind_module(fun, options, static)
        self._made_with = tuple(rules), dict(jit_options or {})
        self._to_budget: Any = next(
            (rule for rule in rules if hasattr(rule, "memory_budget")), None
        )
        self._called = called  # the pipeline holds it weakly
        self._pipeline = shared_pipeline(called, tuple(rules), static, options)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R
        pipeline: Any = self._pipeline
        graph = None
        given: tuple[Any, ...] = args
        try:
            if self._first:
                given = *self._first, *args
            elif pipeline.plain is not None:
                try:
                    result = pipeline.plain(*args, **kwargs)
                    return result
                except Outgrown as error:
                    if error.of.pipeline is not pipeline:
                        raise
                    graph = error.graph  # not the error, which has this frame
                except TypeError:
                    if not pipeline.refuses_plain(args, kwargs):
                        raise
            result = pipeline.call(given, kwargs, graph)
            return result
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: TracedFunction[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> BoundTracedFunction[Q, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else BoundTracedFunction(self, instance)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph for these arguments (arrays or `jax.ShapeDtypeStruct`s), after the rules."""
        try:
            call = TakingApart(self._pipeline.static)((*self._first, *args), kwargs)
            return self._pipeline.graph(call)
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As ``jax.jit(fun).lower``: StableHLO in `.as_text()`, XLA's in `.compile()`.

        The program of a function with Variables takes their values in front of the arguments:
        of those that it reads and assigns, which it writes over, then of those that it only reads.
        It returns a pair: a list of the assigned values, and the result. A Variable among the
        arguments is one of these. That of a module takes the module first, and so do `graph` and
        `trace`. What it is compiled to is called as the function is.
        """
        lowered: jax.stages.Lowered = self._staged("lower", args, kwargs)
        pipeline, first = self._pipeline, self._first

        def run(compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def action(program: Program, call: Call, _: Graph | None) -> Any:
                return program.called_compiled(compiled, call)

            return pipeline.search((*first, *args), kwargs, action)

        return lowered if pipeline.is_plain else called_by(run, lowered)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As ``jax.jit(fun).trace``; for a function with Variables see `lower`."""
        traced: jax.stages.Traced = self._staged("trace", args, kwargs)
        return traced

    def _staged(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with with_jit():
            return self._pipeline.search(
                (*self._first, *args),
                kwargs,
                lambda program, call, graph: program.staged(stage, call, graph),
            )

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The results as `jax.ShapeDtypeStruct`s. Assigns nothing."""
        return self._staged("eval_shape", args, kwargs)

    def clear_cache(self) -> None:
        """Forgets what was compiled: the next call traces again."""
        self._pipeline.clear_cache()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # as of any function: a model that holds one can be copied

    def __reduce__(self) -> str | tuple[Any, ...]:
        # By its name, as any function; else, as what `jax.jit` returns, by what it was made with.
        if (name := name_in_module(self)) is not None:
            return name
        return TracedFunction, (self.__wrapped__, *self._made_with)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the function: `inspect.getfullargspec` does not follow `__wrapped__`."""
        try:
            return inspect.signature(self.__wrapped__)
        except (TypeError, ValueError) as error:
            raise AttributeError("__signature__") from error

    @property
    def plan(self) -> Any:
        """What ``memory_budget=`` has it compute again: the `tracegrad.planning.StepPlan` of the
        latest trace, None before that. Without a budget it is the function's own attribute."""
        if self._to_budget is None:
            raise AttributeError("plan")  # `__getattr__` looks at the function
        return self._to_budget.latest

    def __repr__(self) -> str:
        return self._repr_with_plan(self.__wrapped__)

    def _repr_with_plan(self, fun: Callable[..., Any]) -> str:
        plan = getattr(self._to_budget, "latest", None)
        return f"<traced {repr_of(fun)}{f', {plan.line}' if plan else ''}>"

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the function."""
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "plan" and not hasattr(self.__wrapped__, name):
            raise AttributeError("nothing is planned without memory_budget=")
        return getattr(self.__wrapped__, name)


class BoundTracedFunction(Generic[P, R]):
    """A traced method of an instance: all of `TracedFunction`, with ``self`` filled in."""

    __wrapped__: Callable[P, R]

    def __init__(self, function: TracedFunction[..., R], instance: object):
        self.__func__ = function
        self.__self__ = instance
        self.__wrapped__ = types.MethodType(function.__wrapped__, instance)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the method, without ``self``."""
        return inspect.signature(self.__wrapped__)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__func__(self.__self__, *args, **kwargs)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        return self.__func__.graph(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:  # as of methods
        return getattr, (self.__self__, self.__func__.__name__)

    def __eq__(self, other: object) -> bool:  # as of methods: each access makes one
        return (
            isinstance(other, BoundTracedFunction)
            and self.__func__ is other.__func__
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return self.__func__._repr_with_plan(self.__wrapped__)


@overload
def trace(
    fun: Callable[P, R],
    *,
    rules: Rule | Sequence[Rule] = (),
    memory_budget: int | float | str | None = None,
    **jit_options: Unpack[JitOptions],
) -> TracedFunction[P, R]: ...
@overload
def trace(
    fun: None = None,
    *,
    rules: Rule | Sequence[Rule] = (),
    memory_budget: int | float | str | None = None,
    **jit_options: Unpack[JitOptions],
) -> Callable[[Callable[P, R]], TracedFunction[P, R]]: ...
def trace(
    fun: Callable[..., Any] | None = None,
    *,
    rules: Rule | Sequence[Rule] = (),
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
    Modules of `flax.nnx` among its arguments, optimisers, metrics and random streams are changed as
    under ``nnx.jit``, in about half the time; for each structure of them there is a program. One
    that the function closes over is a constant of the program, as under `jax.jit`. A module of
    flax.nnx or of equinox may be the function, or a method of one, or what `equinox.filter_grad`
    returns: its arrays are inputs of the program, which equal ones share.
    Usable bare (``@trace``), with arguments
    (``@trace(static_argnames="n")``), on methods, and under every JAX transformation.

    Args:
      fun: a function of arrays and pytrees of arrays, as for `jax.jit`.
      rules: functions ``Graph -> Graph``, applied in order, or one alone. They act where
        differentiation happens: on the program of `fun`, for who differentiates it, and on what is
        differentiated inside it, by `tracegrad.grad`, tapes, `tracegrad.gradients`, and by
        `jax.grad` and the like, which `nnx.grad` and `equinox.filter_grad` call. A rule that
        matches in neither raises, and so does one that matches what a `jax.grad` has differentiated
        that was imported by its name (``from jax import grad``) or made before.
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
    for name in jit_options.keys() - _JIT_OPTIONS:
        near = difflib.get_close_matches(name, ["rules", "memory_budget", *_JIT_OPTIONS], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"trace() and jax.jit have no keyword {name!r}{hint}")
    if fun is None:
        return functools.partial(trace, rules=rules, memory_budget=memory_budget, **jit_options)
    applied = as_rules(rules)
    if memory_budget is not None:
        applied = (*applied, engine.fit_to_budget(memory_budget, fun))
    return TracedFunction(fun, applied, jit_options)
