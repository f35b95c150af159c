"""The errors raised for wrong graphs, edits and selectors."""

from __future__ import annotations

from collections.abc import Callable


class GraphError(Exception):
    """Raised for a graph that is not a valid program, and for an edit that would make it invalid.

    The message has the node, its source line, the expected value and the actual value.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> wider = tg.edit(tg.match.op("sin"), lambda op, x: jnp.stack([op(x), x]))
    >>> try:
    ...     tg.rewrite(jnp.sin, wider)(1.0)
    ... except tg.GraphError as error:
    ...     print("the edit gave ~f32[2]" in str(error))
    True
    """


class NoMatchError(GraphError, LookupError):
    """Raised if the selector of a rule matches nothing in a program.

    The message lists the nearest names. The first reader, or `with_text`, computes the message from
    the program; until then the error keeps the program alive.

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
        """Computes the message now, so that the error no longer keeps the program alive."""
        str(self)
        return self
