"""Advice for JAX's errors at custom derivative rules, which do not name the rule."""

from __future__ import annotations

import gc
import itertools
import sys
import traceback
from collections.abc import Callable, Sequence
from types import CodeType, TracebackType

import jax

from tracegrad.ir import CustomGradient, Graph, Occurrence, Origin, Value
from tracegrad.ir.wording import code_of, first_line, listed

CLOSES_OVER = "closes over a value that is differentiated"
_CLOSING_OVER = ("closed-over value", "No constant handler for type", CLOSES_OVER)
_INDICATED = "indicated by nondiff_argnums"


def rule_advice(
    error: Exception, program: Callable[[], Graph] | None = None
) -> tuple[str, Origin | None] | None:
    """Returns the advice for a rule that JAX refused; None for other errors.

    Args:
      error: JAX's error at a `jax.custom_vjp` or a `jax.custom_jvp`.
      program: returns the program that was differentiated, if it is known; called only if the
        error is about a rule.

    Returns:
      The advice, and the line where the rule is called, if it was found in the program.
    """
    words = str(error)
    if _INDICATED in words:
        return (
            "A custom rule here has an array in nondiff_argnums: make it an argument, with None "
            "for its gradient."
        ), None
    is_unexpected = isinstance(error, jax.errors.UnexpectedTracerError)
    if not is_unexpected and not any(text in words for text in _CLOSING_OVER):
        return None
    if (name := rule_in(error.__traceback__)) is not None:
        return closing_over_advice([name]), None
    found = [] if program is None else closing_over(program())
    if not found and is_unexpected:  # the leaked tracer need not come from a rule
        return None
    return closing_over_advice([each.name for each in found]), found[0].origin if found else None


def words_at(node: CustomGradient, error: Exception) -> str:
    """The error of a rule in one line."""
    if is_about_closing_over(str(error)):
        return closing_over_advice([node.name])
    return words_of(error)


def words_of(error: Exception) -> str:
    """An error in one line: the advice, if any, else JAX's first line."""
    found = rule_advice(error)
    return first_line(error) if found is None else found[0]


def dtype_advice(who: str, expected: object, got: object) -> str:
    """For a rule whose gradient has another dtype than its input."""
    return (
        f"{who} returned a gradient {got} for an input {expected}. A gradient has the dtype of its "
        "input: convert it, .astype(x.dtype)."
    )


def closing_over_advice(names: Sequence[str]) -> str:
    """For rules whose functions close over a traced array."""
    where = f"tracegrad.match.call({names[0]!r})" if names else "where"
    who = listed([f"`{each}`" for each in names], 2) if names else "A custom rule here"
    return (
        f"{who} may not close over a traced array, nor have one in nondiff_argnums. Make it an "
        f"argument; or `tracegrad.rewrite(f, tracegrad.rules.own_derivative({where}))`."
    )


def is_about_closing_over(words: str) -> bool:
    """`words`: of an error at a rule."""
    return "unexpected tracer" in words or any(text in words for text in _CLOSING_OVER)


def closing_over(graph: Graph) -> list[Occurrence]:
    """Returns the custom gradients in a graph that close over values, each name once."""
    found: dict[str, Occurrence] = {}
    for each in graph.walk():
        node = each.node
        if not isinstance(node, CustomGradient):
            continue
        if any(isinstance(v, Value) for v in node.inputs[: node.closed_over]):
            found.setdefault(node.name, each)
    return list(found.values())


def rule_in(stack: TracebackType | None) -> str | None:
    """Returns the name of the innermost function with a rule of JAX's in a traceback.

    JAX removes its own frames, which know the rule, and the remaining frames have lost their
    variables but have their code objects: this function searches all existing rules for the code.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(stack)]
    rules: dict[CodeType | None, str] = {}
    # The collector does not list objects frozen by `gc.freeze`, so modules are searched too.
    spaces = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    for each in itertools.chain(gc.get_objects(), *(list(space.values()) for space in spaces)):
        if issubclass(type(each), jax.custom_vjp | jax.custom_jvp):
            functions = (getattr(each, name, None) for name in ("fun", "fwd", "bwd", "jvp"))
            name = str(getattr(each, "__name__", "a rule"))
            rules.update((code_of(function), name) for function in functions if function)
    return next((rules[code] for code in reversed(codes) if code in rules), None)
