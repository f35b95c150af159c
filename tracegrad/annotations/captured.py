"""The error for a differentiated value to which a custom gradient returns no gradient.

The value belongs to an enclosing trace. The function with the custom gradient closes over the
value, or takes it by keyword. The error contains the user's name for the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir.closed_over import depends_on
from tracegrad.ir.closures import values_closed_over
from tracegrad.ir.importer import graph_of
from tracegrad.ir.paths import path_name
from tracegrad.tape.lost_gradients import CURE_OF_LOST_GRADIENT
from tracegrad.variables.capture import variable_of
from tracegrad.variables.trees import is_variable


@dataclass(frozen=True)
class Captured:
    """A value of an enclosing trace that a function with a custom gradient closes over, or takes by
    keyword."""

    position: int  # the index in the rule's inputs
    name: str | None
    function: str
    primal: Callable[..., Any]  # maps the inputs to the output

    def message(self, types: Sequence[Any]) -> str:
        what = captured_text(self.name, types[self.position])
        return (
            f"{self.function}, which has a custom gradient, depends on {what}, which is being "
            "differentiated and is not one of its positional arguments: the gradient function "
            "cannot return a gradient for it, so that gradient would silently be zero. "
            f"{CURE_OF_LOST_GRADIENT}."
        )


def explain_captured(
    captured: Sequence[Captured], types: Sequence[Any], perturbed: Sequence[bool]
) -> str | None:
    """Returns the message for the first captured input that is being differentiated and on which
    the output depends. `types` has the type of each input, and `perturbed` says of each input
    whether it is being differentiated."""
    for each in captured:
        if perturbed[each.position]:
            primal = graph_of(jax.make_jaxpr(each.primal)(*types))
            if depends_on(primal, each.position):
                return each.message(types)
    return None


# ------------------------------------------------------------------------------------- naming


def captured_text(name: str | None, aval: Any) -> str:
    kind = _jax.type_text(aval)
    return f"a value ({kind})" if name is None else f"{name} ({kind})"


def captured_name(value: object, fun: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
    """Returns the user's name of a value that ``fun`` captures; None if the name is not found.

    Searches the keyword arguments, the values that the function closes over, the attributes of a
    method's object, and the values that a closed-over function closes over.
    """
    if (variable := variable_of(value)) is not None:
        return f"the Variable {variable.name!r}"
    for name, container in kwargs.items():
        if (path := _path_to(value, container, name)) is not None:
            return f"keyword argument '{path}'"
    for name, container in values_closed_over(fun, depth=2):
        if (path := _path_to(value, container, name)) is not None:
            return f"'{path}'"
    return None


def _path_to(value: object, container: object, name: str) -> str | None:
    """Returns the path of `value` in the tree `container`, which is called `name`."""
    # A Variable is one leaf: flattening a Variable would read it, and tapes record reads.
    for path, leaf in jax.tree_util.tree_flatten_with_path(container, is_leaf=is_variable)[0]:
        if leaf is value:
            return path_name(path, name)
    return None
