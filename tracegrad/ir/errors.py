"""The errors that wrong graphs, edits and selectors get."""

from collections.abc import Callable


class GraphError(Exception):
    """A graph that is not a program, or an edit that would make it none.

    The message names the node, its source line, what was expected and what came.
    """


class NoMatchError(GraphError, LookupError):
    """A selector that matches nothing in a program, where a rule wants it to.

    The message lists the nearest names; it is made when somebody reads it.
    """

    def __init__(self, message: Callable[[], str]):
        super().__init__()
        self._message = message

    def __str__(self) -> str:
        return self._message()
