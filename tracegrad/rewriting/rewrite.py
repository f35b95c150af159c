"""`rewrite`: a function with rules applied to its program; `edit`: a rule with code of your own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Never

from tracegrad.ir import Graph
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import name_of
from tracegrad.rewriting.match_rule import MatchRule, around, of_arrays, shows_arguments
from tracegrad.tracing.arguments import Call, Indices, Names, TakingApart, resolve
from tracegrad.tracing.callable import call_traced
from tracegrad.tracing.graphs import Rule, as_rules, trace_to_graph
from tracegrad.tracing.in_force import traced_under
from tracegrad.tracing.signatures import require_takes
from tracegrad.tracing.user_errors import explain, explain_rule


class RewrittenFunction:
    """A function whose program is rewritten wherever it is called; made by `rewrite`.

    Call it as the original, under every JAX transformation. Beside that:

      graph(*args, **kwargs): its `Graph` for these arguments, after the rules.
      __wrapped__: the original function.
    """

    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fun: Callable[..., Any],
        rules: tuple[Rule, ...],
        static_argnums: Indices,
        static_argnames: Names,
    ):
        functools.update_wrapper(self, fun, updated=())
        self.rules = rules
        self._static = resolve(fun, static_argnums, static_argnames)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph for these arguments (arrays or `jax.ShapeDtypeStruct`s), after the rules."""
        return self._traced(TakingApart(self._static)(args, kwargs))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = TakingApart(self._static)(args, kwargs)
        program = self._traced(call)
        try:
            return call_traced(program, call, self._static)
        except Exception as error:
            explain_rule(error, lambda: program)
            raise

    def _traced(self, call: Call) -> Graph:
        def trace() -> Graph:
            return trace_to_graph(self.__wrapped__, call, self._static)

        try:
            return traced_under(self.rules, trace)
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)

    def __repr__(self) -> str:
        return f"<rewritten {self.__wrapped__!r}>"


def rewrite(
    fun: Callable[..., Any],
    rules: Rule | Sequence[Rule],
    *more: Never,
    static_argnums: Indices = None,
    static_argnames: Names = None,
) -> RewrittenFunction:
    """Applies rules to the program of a function.

    Args:
      fun: any function that `jax.jit` takes.
      rules: functions ``Graph -> Graph``, applied in order, or one alone: those of
        `tracegrad.rules`, or your own. They reach what `jax.grad` and the like differentiate inside
        of `fun`, as in `trace`.
      static_argnums, static_argnames: arguments that are Python values, as in `jax.jit`.

    Returns:
      A function of the same arguments. Each call of it traces `fun`, applies the rules and runs
      the result, in whatever transformation it is called (`jit`, `grad`, `vmap`, `scan`, ...). It
      compiles nothing itself: put `jax.jit` or `tracegrad.trace` around what is called often.

    Raises:
      TypeError: `fun` or a rule is not callable, rules are not in a list, or a rule returns no
        `Graph`.
      NoMatchError, GraphError: when it is called, as the rules do.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(x):
    ...     return jnp.sum(jnp.sin(x) * x)
    >>> edited = tg.rewrite(loss, tg.rules.stop_gradient(tg.match.op("sin")))
    >>> print(jax.grad(edited)(jnp.array([0.5, 1.0])))  # sin(x), without x cos(x)
    [0.47942555 0.84147096]
    """
    if not callable(fun):
        raise TypeError(f"rewrite takes a function and rules; got {fun!r} for the function")
    if more:
        raise TypeError(
            "rewrite takes one rule or a list of them: write "
            f"tracegrad.rewrite({name_of(fun)}, {[rules, *more]!r})"
        )
    return RewrittenFunction(fun, as_rules(rules), static_argnums, static_argnames)


@shows_arguments
def edit(where: Selector, function: Callable[..., Any], *, missing_ok: bool = False) -> MatchRule:
    """Writes code of your own in the place of each match.

    Args:
      where: a selector.
      function: ``function(op, *operands)``, in ``jax.numpy`` and the like; ``op(*operands)`` is
        what stood there before, and may be left out, or called several times. ``op.match``,
        ``op.name`` and ``op.params`` say what it is. It returns the result, or a list of as many
        as the match has, of their shapes and dtypes. The operands are those of
        `rules.override_gradient`.
      missing_ok: whether it may match nothing.

    Returns:
      A rule. The code is traced for its place and takes part in everything as if it had stood
      there, values and gradients; the rules of `tracegrad.rules` are written in the same way. It
      raises GraphError, when it is applied, for another number, shape or dtype of results.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def model(x):
    ...     return jnp.sum(jax.nn.relu(x) * x)
    >>> half = tg.rewrite(model, tg.edit(tg.match.call("relu"), lambda op, x: 0.5 * op(x)))
    >>> print(half(jnp.array([-2.0, 3.0])), jax.grad(half)(jnp.array([-2.0, 3.0])))
    4.5 [0. 3.]

    As interception in qwix and in penzai, of a program that is traced already.
    """
    require_takes(function, 1, "function(op, *operands)")
    return MatchRule("edit", where, of_arrays(around(function, lambda match: match)), missing_ok)
