"""The errors that wrong graphs, edits and selectors get."""

from __future__ import annotations

from collections.abc import Callable


class GraphError(Exception):
    """A graph that is not a program, or an edit that would make it none.

    The message names the node, its source line, what was expected and what came.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> wider = tg.edit(tg.match.op("sin"), lambda op, x: jnp.stack([op(x), x]))
    >>> try:
    ...     tg.rewrite(jnp.sin, wider)(1.0)
    ... except tg.GraphError as error:
    ...     print("the edit gave ~f32[2]" in str(error))
    True
    """


class NoMatchError(GraphError, LookupError):
    """A selector that matches nothing in a program, where a rule wants it to.

    The message lists the nearest names. It is made when somebody reads it, or has it made by
    `with_text`: until then the error holds the program, of which it tells.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> stop = tg.rules.stop_gradient(tg.match.op("sine"))
    >>> try:
    ...     tg.rewrite(jnp.sin, stop)(1.0)
    ... except tg.NoMatchError as error:
    ...     print("nothing" in str(error), "sin" in str(error))
    True True
    """

    def __init__(self, message: Callable[[], str]):
        super().__init__()
        self._message: Callable[[], str] | str = message

    def __str__(self) -> str:
        if not isinstance(self._message, str):
            self._message = self._message()
        return self._message

    def with_text(self) -> NoMatchError:
        """The same error, which holds its message and no program."""
        str(self)
        return self
