"""`trace`: a Python function → Graph → rules → XLA, at the cost of `jax.jit`.

A `TracedFunction` is a wrapper. Its `Pipeline` holds the compiled programs, and is shared by all
wrappers of one function with the same rules and options. A call goes through the pipeline. If the
function turns out to be plain (arrays in, arrays out, no Variables), its calls go directly to one
`jax.jit`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import jax

from tracegrad.ir import Graph, engine
from tracegrad.tracing.arguments import resolve_static
from tracegrad.tracing.body import Untraced
from tracegrad.tracing.graphs import Rule, as_rules, require_function
from tracegrad.tracing.jit_options import options_behind_module
from tracegrad.tracing.module_functions import function_taking_module
from tracegrad.tracing.pipeline import shared_pipeline, with_jit
from tracegrad.tracing.shardings import options_for_jit, with_mappings
from tracegrad.tracing.stages import call_by
from tracegrad.tracing.user_errors import explain_error

P = ParamSpec("P")
Q = ParamSpec("Q")  # the parameters of a method, without ``self``
R = TypeVar("R")


class TracedFunction(Generic[P, R]):
    """A function compiled by way of its graph; made by `trace`.

    Call it like the original function. It also has:

      graph(*args, **kwargs): the `Graph` for these arguments, after the rules.
      lower(*args, **kwargs), trace(*args, **kwargs): return `jax.stages.Lowered` and
        `jax.stages.Traced`, as a jitted function does; so `jax.export.export` accepts it.
      eval_shape(*args, **kwargs): the types of the results, without computing them.
      clear_cache(): drops the compiled programs.
      __wrapped__: the original function.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> f = tg.trace(lambda x: jnp.sin(x) ** 2)
    >>> x = jax.ShapeDtypeStruct((3,), "float32")
    >>> [node.op for node in f.graph(x).nodes], f.eval_shape(x).shape
    (['sin', 'integer_pow'], (3,))
    """

    __wrapped__: Callable[P, R]
    _first: tuple[Any, ...]  # (module,) or (); see `function_taking_module`

    def __init__(
        self,
        fun: Callable[P, R],
        rules: Sequence[Rule] = (),
        jit_options: dict[str, Any] | None = None,
    ):
        options = with_mappings(jit_options or {})
        jax.jit(
            fun, **options_for_jit(options)
        )  # raises jit's own errors for a wrong function or option
        require_function(fun)
        if inspect.isfunction(fun):  # a model's attributes change
            kept = {n: value for n, value in vars(fun).items() if not hasattr(type(self), n)}
            self.__dict__.update(kept)
        functools.update_wrapper(self, fun, updated=())
        static = resolve_static(fun, options.get("static_argnums"), options.get("static_argnames"))
        called, self._first = function_taking_module(fun)
        if self._first:
            options, static = options_behind_module(fun, called, options, static)
        self._made_with = tuple(rules), dict(jit_options or {})
        self._called = called  # the pipeline holds it weakly
        self._pipeline = shared_pipeline(called, tuple(rules), static, options)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R
        pipeline: Any = self._pipeline
        is_new = False
        given: tuple[Any, ...] = args
        try:
            if self._first:
                given = *self._first, *args
            elif pipeline.plain is not None:
                try:
                    result = pipeline.plain(*args, **kwargs)
                    return result
                except Untraced:
                    is_new = True
                except TypeError:
                    if not pipeline.refuses_plain(args, kwargs):
                        raise
            result = pipeline.call(given, kwargs, is_new=is_new)
            return result
        except Exception as error:
            raise explain_error(error)  # noqa: B904 (the same error)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: TracedFunction[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """Returns the graph for these arguments (arrays or `jax.ShapeDtypeStruct`s), after the
        rules."""
        try:
            call = self._pipeline.pack_all((*self._first, *args), kwargs)
            return self._pipeline.graph(call)
        except Exception as error:
            raise explain_error(error)  # noqa: B904 (the same error)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function as ``jax.jit(fun).lower`` does: `.as_text()` is the StableHLO text,
        `.compile()` compiles it with XLA.

        If the function uses Variables (also Variables among its arguments), the program takes
        their values before the arguments: first the Variables that it reads and assigns, whose
        old arrays it overwrites, then the Variables that it only reads. The program returns a
        pair: the list of the assigned values, and the result. If the function is a module, the
        program takes the module first, also in `graph` and `trace`. Call the compiled program with
        the arguments of the function.
        """
        lowered: jax.stages.Lowered = self._call_stage("lower", args, kwargs)
        pipeline, first = self._pipeline, self._first

        def run(compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return pipeline.search(
                (*first, *args), kwargs, lambda program, call: program.call_compiled(compiled, call)
            )

        return lowered if pipeline.is_plain else call_by(run, lowered)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the function as ``jax.jit(fun).trace`` does; for Variables see `lower`."""
        traced: jax.stages.Traced = self._call_stage("trace", args, kwargs)
        return traced

    def _call_stage(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with with_jit():
            return self._pipeline.search(
                (*self._first, *args),
                kwargs,
                lambda program, call: program.call_stage(stage, call),
            )

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the results as `jax.ShapeDtypeStruct`s. Assigns no Variable."""
        return self._call_stage("eval_shape", args, kwargs)

    def clear_cache(self) -> None:
        """Drops the compiled programs: the next call traces again."""
        self._pipeline.clear_cache()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # as for any function, so that a model that holds it can be copied

    @property
    def __signature__(self) -> inspect.Signature:
        """The function's signature: `inspect.getfullargspec` does not follow `__wrapped__`."""
        try:
            return inspect.signature(self.__wrapped__)
        except (TypeError, ValueError) as error:
            raise AttributeError("__signature__") from error

    def __repr__(self) -> str:
        return f"<traced {self.__wrapped__!r}>"


def find_traced(fun: Any) -> tuple[TracedFunction[..., Any] | None, tuple[Any, ...]]:
    """Returns (traced function, (object,)) for a traced method of an object, (traced function, ())
    for another traced function, and (None, ()) otherwise."""
    if isinstance(fun, types.MethodType) and isinstance(fun.__func__, TracedFunction):
        return fun.__func__, (fun.__self__,)
    return (fun if isinstance(fun, TracedFunction) else None), ()


@overload
def trace(
    fun: Callable[P, R],
    *,
    rules: Rule | Sequence[Rule] = (),
    memory_budget: int | float | str | None = None,
    **jit_options: Any,
) -> TracedFunction[P, R]: ...
@overload
def trace(
    fun: None = None,
    *,
    rules: Rule | Sequence[Rule] = (),
    memory_budget: int | float | str | None = None,
    **jit_options: Any,
) -> Callable[[Callable[P, R]], TracedFunction[P, R]]: ...
def trace(
    fun: Callable[..., Any] | None = None,
    *,
    rules: Rule | Sequence[Rule] = (),
    memory_budget: int | float | str | None = None,
    **jit_options: Any,
) -> Any:
    """Compiles a function by way of its `Graph`, in which its gradient annotations are nodes.

    Takes every function that `jax.jit` takes, compiles it to the same optimised program and costs
    the same per call; only annotated or rewritten operations differ. Use it bare (``@trace``), with
    arguments (``@trace(static_argnames="n")``), on methods, and under every JAX transformation.

    The `Variable`s that the function reads, itself or in functions that it calls, are inputs of the
    program, and the Variables that it assigns are outputs: each call uses the current values. A
    Variable among the arguments (also static ones, and in trees) stays that Variable inside, where
    it can be watched and assigned; each such Variable has a program of its own. A Variable in the
    result is returned as an array: its value at the end of the call.

    Modules, optimisers, metrics and random streams of `flax.nnx` among the arguments are changed as
    under ``nnx.jit``, in about half the time; each structure has a program of its own. A module
    that the function closes over is a constant of the program, as under `jax.jit`. The function may
    be a module of flax.nnx or equinox, a method of one, or the result of `equinox.filter_grad`: the
    module's arrays are inputs of the program, and modules of equal structure share the program.

    Args:
      fun: a function of arrays and pytrees of arrays, as for `jax.jit`.
      rules: one function ``Graph -> Graph``, or several, applied in order. Rules act where
        differentiation happens: on the program of `fun`, if the caller differentiates it, and on
        the functions that are differentiated inside it by `tracegrad.grad`, tapes,
        `tracegrad.gradients`, or by `jax.grad` and its like, which `nnx.grad` and
        `equinox.filter_grad` call. A rule that matches nothing in either place raises. So does a
        rule that would match only inside a `jax.grad` that was imported by name
        (``from jax import grad``) or made before the trace. This is decided for each signature,
        whatever was called before: give ``missing_ok=True`` to a rule that only some static
        values need. Another rule compiles `fun` again, even if it was made from equal arguments:
        make rules outside of the training loop.
      memory_budget: the bytes that may be live at once in a gradient (``"2GiB"``, an int), or a
        share of the bytes without recompute (``0.4``, ``"40%"``). As much is recomputed as the
        budget needs, at the least cost that is found; see `tracegrad.plan_recompute`. The budget
        is a rule applied after the others.
      **jit_options: every keyword of `jax.jit`: ``static_argnums``, ``donate_argnums``,
        ``in_shardings``, ``compiler_options``, ...

    Returns:
      A `TracedFunction`.

    Raises:
      TypeError, ValueError: as `jax.jit` does, if `fun` is not a function or an option is wrong.

    Warns:
      RetraceWarning: one argument changes its shape, dtype, weak type, static value or tree again
        and again, and each change compiles the function again.

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
    applied = as_rules(rules)
    if memory_budget is not None:
        applied = (*applied, engine.fit_to_budget(memory_budget))
    return TracedFunction(fun, applied, jit_options)
