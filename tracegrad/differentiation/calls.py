"""One call that is differentiated: as a function of its leaves, and from these to the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from tracegrad.differentiation.checks import Unconnected, differentiable_leaves
from tracegrad.differentiation.closing_over import refusing
from tracegrad.differentiation.module_state import ModuleState
from tracegrad.differentiation.selection import resolve
from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.in_force import under_rules


class DifferentiatedCall:
    """A call of a function, of which some leaves are differentiated.

    Attributes:
      selection: the leaves that `wrt` selects.
      differentiable: which of these JAX is to differentiate.
      chosen: the selection of those alone.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        wrt: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unconnected: Unconnected = "zero",
        allowed: Callable[[Any], bool] | Literal[False] = False,
    ):
        self.selection = resolve(fun, wrt, args, kwargs)
        self.differentiable = differentiable_leaves(self.selection, unconnected, allowed)
        self.chosen = self.selection.refined(self.differentiable)
        self._state = ModuleState(self.chosen)

    def of_leaves(self, parted: Callable[[Any], tuple[Any, Any]]) -> Callable[[list[Any]], Any]:
        """The function of the chosen leaves, with the rules in force.

        It returns what `parted` makes of the result to be differentiated, and, for `settle`, what
        stands beside that.
        """

        def result(leaves: list[Any]) -> Any:
            outcome, assigned = self._state.call(leaves)
            outputs, aux = parted(outcome)
            return outputs, (aux, assigned)

        return refusing(under_rules(result, function_name(self.selection.fun)))

    def settle(self, beside: tuple[Any, list[Any]]) -> Any:
        """Assigns what the function has assigned in modules; returns what `parted` put beside."""
        aux, assigned = beside
        self._state.assign(assigned)
        return aux

    def answer(self, results: Sequence[Any], absent: Callable[[Any], Any] | None = None) -> Any:
        """One result for each chosen leaf, in the structure that the caller gave to `wrt`."""
        rest = iter(results)
        each = [next(rest) if is_present else None for is_present in self.differentiable]
        return self.selection.answer(each, absent)
