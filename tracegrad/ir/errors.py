"""The error that every wrong graph or edit gets."""


class GraphError(Exception):
    """A graph that is not a program, or an edit that would make it none.

    The message names the node, its source line, what was expected and what came.
    """
