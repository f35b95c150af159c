"""Rules on values: a function that has run on arrays, and whose gradient is a Python function.

What it has computed stands in a record as one operation, which has a `Rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.extend

from tracegrad import _jax
from tracegrad.tape.block import Operation
from tracegrad.tape.computations import own_computation

# The primitive of such an operation. It is never bound.
ON_VALUES = jax.extend.core.Primitive("custom_gradient")
ON_VALUES.multiple_results = True


class Rule(NamedTuple):
    """The gradient of what a Python function has computed on values, as a Python function.

    Attributes:
      name: of the function whose gradient it is.
      traced: ``(*inputs) -> results``: the call as it is where it is traced, for what needs a
        program. It runs the user's functions once more.
      pull_back: from the cotangents of the results (None for one that has none), and for each input
        whether it may get slices, to the gradients of the inputs; None for one that has none.
      describe: of an array that the function closes over: what the function is, and what it calls
        the array.
    """

    name: str
    traced: Callable[..., list[Any]]
    pull_back: Callable[[Sequence[Any], Sequence[bool]], list[Any]]
    describe: Callable[[Any], tuple[str, str]]


def is_on_values(operation: Operation) -> bool:
    """Whether an operation is one that has a rule on values."""
    return operation.computation.primitive is ON_VALUES


@contextmanager
def refusing_values(names: Sequence[str]) -> Iterator[None]:
    """Says why the functions of these names are traced, if one of them cannot be."""
    try:
        yield
    except _jax.NEEDS_VALUES as error:
        raise NotImplementedError(
            f"a function with a custom gradient ({', '.join(names)}), or its gradient function, "
            "asks for the value of an array, as `if` and NumPy do. A tape runs it on values, but "
            "has to trace it to be explained, and where the gradient is differentiated in its turn "
            "and a function with a rule of JAX comes before (jax.custom_vjp, jax.custom_jvp, "
            "tracegrad.rewrite): write it with jnp.where or jax.lax.cond"
        ) from error


def as_traced(
    operation: Operation,
    rule: Rule,
    types: list[Any],
    arrays: list[Any],
    known: Mapping[int, int],
) -> Operation:
    """What has run on values, as the operation that it is where it is traced: a call of a rule.

    The types and arrays of further slots, of what it closes over, are added; `known`: the slots of
    arrays that have one, by identity.
    """
    with refusing_values([rule.name]):
        program = jax.make_jaxpr(rule.traced)(*[types[slot] for slot in operation.args])
    open_form = _jax.opened(program)
    (equation,) = open_form.eqns
    slots: dict[Any, int] = dict(zip(open_form.invars, operation.args, strict=True))

    def slot(array: Any) -> int:
        if id(array) in known:
            return known[id(array)]
        types.append(jax.typeof(array))
        arrays.append(array)
        return len(types) - 1

    for variable, array in zip(open_form.constvars, _jax.constants_of(program), strict=True):
        slots[variable] = slot(array)
    args = [slot(v.val) if hasattr(v, "val") else slots[v] for v in equation.invars]
    return Operation(
        own_computation(equation), tuple(args), operation.results, operation.source_info
    )
