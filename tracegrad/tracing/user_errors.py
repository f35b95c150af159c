"""Words for what tracing refuses: the user's line, why, and what to write instead.

The exceptions stay JAX's own, so that code which catches them goes on working; what we know more
is added as a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import jax

from tracegrad import _jax
from tracegrad.ir import GraphError, match
from tracegrad.ir.occurrence import is_own_file, line_of_error
from tracegrad.tracing import foreign_modules

# Most special first: the first three are kinds of the last.
_ADVICE: tuple[tuple[type[Exception], str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "This line branches in Python on an array whose value is known only when the compiled "
        "program runs. To choose between values write `jnp.where(condition, a, b)`; between "
        "computations `jax.lax.cond(condition, f, g, *args)`; to loop `jax.lax.while_loop`. If the "
        "value decides what program to compile, make its argument static (`static_argnames`).",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "This line needs a Python integer (an index, a shape, the end of a range), but has an "
        "array whose value is known only when the compiled program runs. Index with "
        "`jnp.take(table, i, axis=0)`, loop with `jax.lax.fori_loop`, or make the argument static "
        "(`static_argnames`).",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "This line hands a traced array to NumPy (or another library), which needs its "
        "numbers now. Use the function of the same name in `jax.numpy`.",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "This line needs the value of an array while the program is being traced, when only its "
        "shape and dtype are known. Compute with it in `jax.numpy`, or make its argument static "
        "(`static_argnames`).",
    ),
)


# What `Variable`s have and arrays have not.
_OF_VARIABLES = frozenset({"assign", "assign_add", "assign_sub", "read_value", "trainable"})
_NO_VARIABLE = (
    "This line takes an array for a `Variable`. Transformations of JAX (jax.vmap, jax.grad, "
    "jax.jit) hand on the value of a Variable among their arguments, and what is assigned to that "
    "would be lost. Let the function close over the Variable, or transform a function of the other "
    "arguments alone, as in `jax.vmap(lambda x: f(v, x))(xs)`; inside of them return a new value, "
    "and assign it outside."
)


_NO_ARRAY = (
    "JAX has no arrays of Python objects or of strings. Give it a dtype of numbers, as in "
    "`np.asarray(x, dtype=float)`; or pass what it holds in a list or an object of its own: leaves "
    "of arguments that are no arrays are static."
)


_STATIC_INSIDE = (
    "A function that jax.jit has compiled takes as static what is an array that is being traced "
    "here. Say that it is static here too, as in `tracegrad.trace(f, static_argnums=1)` or "
    "`tracegrad.graph(f, static_argnums=1)`; or let functools.partial fill it in."
)


_NO_REVERSE = (
    "How often this loop runs is known only when it has run, and reverse mode needs its states. A "
    "rule keeps some of them and replays the rest, `tracegrad.rules.checkpointed_loop(where)`: in "
    "`tracegrad.rewrite(loss, rule)` or `tracegrad.trace(step, rules=[rule])`, here with "
    "`where={where}`. For what converges `rules.fixed_point` needs none of them. For a number of "
    "steps that is known, `jax.lax.scan` has both modes."
)


def explain_loop(error: Exception) -> None:
    """Adds to JAX's error about reverse mode through a while loop which it is, and the cure."""
    known = isinstance(error, ValueError) and "does not work for lax.while_loop" in str(error)
    if not known or any("checkpointed_loop" in note for note in getattr(error, "__notes__", ())):
        return
    # JAX hangs the lines in which the loop was traced on the error, as its cause.
    stack = None if error.__cause__ is None else error.__cause__.__traceback__
    loop = line_of_error(stack)
    where = match.op("while") if loop is None else match.source(loop.place)
    _advise(error, _NO_REVERSE.format(where=where), stack)


def _explain_module(error: Exception) -> None:
    """Adds to flax's error about a change that could not come out whose it is, and the cure."""
    if not any(foreign_modules.CURE in note for note in getattr(error, "__notes__", ())):
        _advise(error, foreign_modules.advice(error), error.__traceback__)


def _advise(error: Exception, advice: str | None, stack: TracebackType | None) -> None:
    notes = getattr(error, "__notes__", ())
    if advice is not None and not any(advice in note for note in notes):
        line = innermost_user_line(stack)
        error.add_note(f"{line}\n{advice}" if line else advice)


@contextmanager
def explaining() -> Iterator[None]:
    """A block that differentiates a function in reverse mode."""
    try:
        yield
    except Exception as error:
        explain_loop(error)
        _explain_module(error)
        raise


def explain(error: Exception) -> Exception:
    """The same error with the user's line and the way out added, and without our frames.

    Raise what it returns at the outermost frame of this package, which then is the only one left
    between the user's call and the user's function. ``jax_traceback_filtering=off`` keeps all.
    """
    explain_loop(error)
    advice = next((text for kind, text in _ADVICE if isinstance(error, kind)), None)
    if isinstance(error, AttributeError) and error.name in _OF_VARIABLES:
        advice = _NO_VARIABLE if isinstance(error.obj, jax.Array) else None
    if isinstance(error, TypeError) and "numpy.ndarray" in str(error):
        advice = _NO_ARRAY if "as an abstract array" in str(error) else advice
    if isinstance(error, ValueError) and "Non-hashable static" in str(error):
        advice = _STATIC_INSIDE if "Tracer" in str(error) else advice
    _advise(error, advice, error.__traceback__)
    _explain_module(error)
    if _jax.filters_tracebacks():
        kept = _without_our_frames(error.__traceback__)
        # An error of an argument has no frame of the user's to show, and might be a mistake of
        # ours; one that is raised for a graph, an edit or a selector says all in its message.
        if kept is not None or isinstance(error, GraphError):
            error = error.with_traceback(kept)
    return error


def innermost_user_line(traceback: TracebackType | None) -> str:
    """The last line of the user's in a traceback, with its place; empty if there is none."""
    found = line_of_error(traceback)
    if found is None:
        return ""
    return f"{found.file}:{found.line} in {found.function}: {found.code}"


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
