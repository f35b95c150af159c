"""Adds notes to errors of tracing: the user's line, the reason, and what to write instead.

The exceptions stay JAX's own, so that code that catches them keeps working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import jax

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Origin, match
from tracegrad.ir.notes import add_note
from tracegrad.ir.occurrence import is_own_file, line_of_error
from tracegrad.tracing import rule_errors

_STATIC = "bind it (`functools.partial`, `static_argnames`)"

# (class of the error, words in its message or "", advice). An advice has at most 200 characters, so
# that there is room for the line above it.
_ADVICE: tuple[tuple[type[Exception], str, str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "",
        "This line branches in Python on an array whose value is known only when the "
        f"program runs. Write `jnp.where`, `jax.lax.cond`, `jax.lax.while_loop`, or {_STATIC}.",
    ),
    *(
        (
            kind,
            words,
            "This line needs a Python integer (an index, a shape, the end of a range), but has an "
            f"array. Index with `jnp.take`, loop with `jax.lax.fori_loop`, or {_STATIC}.",
        )
        for kind, words in (
            (jax.errors.TracerIntegerConversionError, ""),
            (TypeError, "Shapes must be 1D sequences of concrete values"),
            (IndexError, "Array slice indices must have static start/stop/step"),
            (IndexError, "Slice entries must be static integers"),
        )
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "",
        "This line selects by a mask, and how many it selects is known only when the compiled "
        "program runs. Keep the shape: `jnp.where(mask, x, 0)`, `jnp.sum(x, where=mask)`.",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "",
        "This line hands a traced array to NumPy (or another library), which needs its "
        "numbers now. Use the function of the same name in `jax.numpy`.",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "",
        "This line needs the value of an array while the program is being traced, when only its "
        f"shape and dtype are known. Compute in `jax.numpy`, or {_STATIC}.",
    ),
    (  # of flax, such as for a module that a traced function closes over
        Exception,
        "different trace level",
        "This line changes a module that was made outside of the function. Give it as an argument, "
        "or use nnx.scan, nnx.cond; where nothing is to change: nnx.clone(model)(x)",
    ),
)

_STATIC_INSIDE = (
    "A static argument of an inner jax.jit is a traced array here. Fill it in, "
    "`functools.partial(f, n=2)`, or make it static here too, as `tracegrad.trace(f, "
    "static_argnums=1)` does."
)

_NO_REVERSE = (
    "How often this loop runs is known only when it has run, and reverse mode needs its states. "
    "Call `jax.grad(tracegrad.rewrite(loss, tracegrad.rules.checkpointed_loop(where)))` with "
    "`where={where}`."
)


def explain_loop(error: Exception, called: Origin | None = None) -> None:
    """Adds the line and the cure to JAX's error about reverse mode through a while loop.

    `called`: the line of the differentiated operation, for a loop whose line JAX does not know.
    """
    known = isinstance(error, ValueError) and "does not work for lax.while_loop" in str(error)
    if not known or any("checkpointed_loop" in note for note in _notes(error)):
        return
    # The cause of JAX's error has the traceback of the lines in which the loop was traced.
    stack = None if error.__cause__ is None else error.__cause__.__traceback__
    loop = line_of_error(stack)
    if loop is None and called is not None:
        loop = called._replace(function=called.function.rpartition(".")[2])  # so that all fits
    where = match.op("while") if loop is None else match.source(loop.place)
    add_note(error, _NO_REVERSE.format(where=where), loop)


def explain_rule(error: Exception, program: Callable[[], Graph] | None = None) -> None:
    """Adds the name of the rule and the cure to JAX's error at a custom rule.

    `program`: see `rule_errors.rule_advice`.
    """
    if not any("custom rule here" in n or "nondiff_argnums" in n for n in _notes(error)):
        # If a transformation fails, the cause of JAX's error has the operation's traceback.
        stack = None if error.__cause__ is None else error.__cause__.__traceback__
        if (found := rule_errors.rule_advice(error, program)) is not None:
            advice, origin = found
            add_note(error, advice, origin or line_of_error(stack or error.__traceback__))


def _notes(error: Exception) -> Sequence[str]:
    return getattr(error, "__notes__", ())


@contextmanager
def explaining() -> Iterator[None]:
    """A block that differentiates a function; adds notes to its errors."""
    try:
        yield
    except Exception as error:
        _explain(error)
        raise


def _explain(error: Exception) -> None:
    explain_loop(error)
    explain_rule(error)
    advice = next(
        (text for kind, words, text in _ADVICE if isinstance(error, kind) and words in str(error)),
        None,
    )
    if isinstance(error, ValueError) and "Non-hashable static" in str(error):
        advice = _STATIC_INSIDE if "Tracer" in str(error) else advice
    if advice is not None and not any(advice in note for note in _notes(error)):
        add_note(error, advice, line_of_error(error.__traceback__))


def explain_error(error: Exception) -> Exception:
    """Returns the same error, with the user's line and a cure added, and without our frames.

    Raise the returned error in the outermost frame of this package: then only that frame is between
    the user's call and the user's function. ``jax_traceback_filtering=off`` keeps all frames.
    """
    _explain(error)
    if _jax.filters_tracebacks():
        kept = _without_our_frames(error.__traceback__)
        # If no frame of the user is left, our frames stay: the error might be our mistake. Only a
        # `GraphError` (of a graph, an edit or a selector) says all in its message.
        if kept is not None or isinstance(error, GraphError):
            error = error.with_traceback(kept)
    return error


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    for entry in reversed(list(_entries(traceback))):
        if not is_own_file(entry.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
