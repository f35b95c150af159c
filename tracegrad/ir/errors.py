"""The errors that wrong graphs, edits and selectors get."""


class GraphError(Exception):
    """A graph that is not a program, or an edit that would make it none.

    The message names the node, its source line, what was expected and what came.
    """


class NoMatchError(GraphError, LookupError):
    """A selector that matches nothing in a program, where a rule wants it to.

    The message lists the nearest names.
    """
