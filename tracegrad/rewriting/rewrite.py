"""`rewrite`: a function with rules applied to its program; `edit`: a rule with code of your own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Never

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import code_name
from tracegrad.rewriting.match_rule import MatchRule, edit_around, refusing_refs, shows_arguments
from tracegrad.tracing.arguments import CallPacker, PackedCall, resolve_static
from tracegrad.tracing.callable import call_traced
from tracegrad.tracing.graphs import Rule, as_rules, trace_to_graph
from tracegrad.tracing.in_force import trace_under_rules
from tracegrad.tracing.module_functions import function_taking_module
from tracegrad.tracing.signatures import require_takes
from tracegrad.tracing.user_errors import explain_error, explain_rule


class RewrittenFunction:
    """A function whose program is rewritten by rules in each call; made by `rewrite`.

    Call it like the original function, under any JAX transformation. Further attributes:

      graph(*args, **kwargs): its `Graph` for these arguments, after the rules.
      __wrapped__: the original function.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, fun: Callable[..., Any], rules: tuple[Rule, ...]):
        functools.update_wrapper(self, fun, updated=())
        self.rules = rules
        self._made_with = (rules,)
        self._called, self._module = function_taking_module(fun)
        self._packer = CallPacker(resolve_static(self._called, None, None))
        self._earlier: dict[Any, Any] = {}  # see `trace_under_rules`

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """Returns the graph for arguments (arrays or `jax.ShapeDtypeStruct`s), after the rules."""
        return self._trace_with_rules(self._pack(args, kwargs))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._pack(args, kwargs)
        program = self._trace_with_rules(call)
        try:
            return call_traced(program, call)
        except Exception as error:
            explain_rule(error, lambda: program)
            raise

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
        return self._packer((*self._module, *args), kwargs)

    def _trace_with_rules(self, call: PackedCall) -> Graph:
        def trace() -> Graph:
            return trace_to_graph(self._called, call)

        leaves, tree = jax.tree.flatten(call.dynamic)
        _, static = call.by_name
        signature: Any = tree, (*map(_jax.type_of, leaves),), (*static,)
        try:
            hash(signature)
        except TypeError:
            signature = object()  # `trace` raises, and names the argument
        try:
            return trace_under_rules(self.rules, trace, self._earlier, signature)
        except Exception as error:
            raise explain_error(error)  # noqa: B904 (the same error)

    def __repr__(self) -> str:
        return f"<rewritten {self.__wrapped__!r}>"


def rewrite(
    fun: Callable[..., Any],
    rules: Rule | Sequence[Rule],
    *more: Never,
) -> RewrittenFunction:
    """Applies rules to the program of a function.

    Args:
      fun: any function that `jax.jit` takes; or a module or its method, as for `trace`.
      rules: one rule, or a list of rules that are applied in order. A rule is a function
        ``Graph -> Graph``: one of `tracegrad.rules`, or your own. Rules also apply to functions
        that `fun` differentiates by `jax.grad` and the like, as in `trace`.

    Returns:
      A function of the same arguments. Each call traces `fun`, applies the rules and runs the
      result, under any transformation (`jit`, `grad`, `vmap`, `scan`, ...). The function compiles
      nothing itself: if you call it often, put `jax.jit` or `tracegrad.trace` around it.

    Raises:
      TypeError: `fun` or a rule is not callable, rules are not in a list, or a rule does not return
        a `Graph`.
      NoMatchError, GraphError: raised by the rules when the function is called.

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
            f"tracegrad.rewrite({code_name(fun)}, {[rules, *more]!r})"
        )
    return RewrittenFunction(fun, as_rules(rules))


@shows_arguments
def edit(where: Selector, function: Callable[..., Any], *, missing_ok: bool = False) -> MatchRule:
    """Replaces each match with code of your own.

    Args:
      where: a selector.
      function: ``function(op, *operands)``, in ``jax.numpy`` and the like. ``op(*operands)``
        computes the original operation, and may be called any number of times, or not at all;
        ``op.match``, ``op.name`` and ``op.params`` describe it. The function returns the result, or
        a list of results if the match has several, of the same shapes and dtypes. The operands are
        the inputs in `rules.override_gradient`.
      missing_ok: whether `where` may match nothing.

    Returns:
      A rule. The code is traced into the program, and is evaluated and differentiated like the rest
      of the program; the rules of `tracegrad.rules` are written in the same way. Applied to a
      program, the rule raises GraphError if the number, shapes or dtypes of the results differ.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def model(x):
    ...     return jnp.sum(jax.nn.relu(x) * x)
    >>> half = tg.rewrite(model, tg.edit(tg.match.call("relu"), lambda op, x: 0.5 * op(x)))
    >>> print(half(jnp.array([-2.0, 3.0])), jax.grad(half)(jnp.array([-2.0, 3.0])))
    4.5 [0. 3.]

    The model is interception in qwix and in penzai; this rule edits a traced program.
    """
    require_takes(function, 1, "function(op, *operands)")
    return MatchRule(
        "edit", where, refusing_refs(edit_around(function, lambda match: match)), missing_ok
    )
