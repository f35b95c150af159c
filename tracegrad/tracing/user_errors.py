"""Words for what tracing refuses: the user's line, why, and what to write instead.

The exceptions stay JAX's own, so that code which catches them goes on working; what we know more
is added as a note.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import jax

from tracegrad.ir.occurrence import is_user_file

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


@contextmanager
def explained() -> Iterator[None]:
    """Adds the user's line and the way out to errors of tracing."""
    try:
        yield
    except Exception as error:
        advice = next((text for kind, text in _ADVICE if isinstance(error, kind)), None)
        if advice is not None and not getattr(error, "__notes__", None):
            line = _innermost_user_line(error.__traceback__)
            error.add_note(f"{line}\n{advice}" if line else advice)
        raise


def _innermost_user_line(traceback: TracebackType | None) -> str:
    found = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            text = linecache.getline(code.co_filename, traceback.tb_lineno).strip()
            found = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_qualname}: {text}"
        traceback = traceback.tb_next
    return found
