"""`show`: displays a graph in a terminal, a notebook, an HTML page or an SVG picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from tracegrad.insight import drawing, html
from tracegrad.insight.gradient_flow import RegionFlow, gradient_flow
from tracegrad.ir import Graph
from tracegrad.tracing.graphs import graph_of_call
from tracegrad.tracing.tools import tool
from tracegrad.tracing.traced import find_traced


@tool
def show(fun: Callable[..., Any] | Graph, /, *args: Any, **kwargs: Any) -> GraphView:
    """Shows the graph of a function, and what happens to the gradient at each operation.

    A notebook shows the graph folded by region and by named scope. It counts and lists the
    operations where the gradient ends, and shows an operation's line of code when the mouse rests
    on the operation. A terminal shows the text of the graph. Nothing is computed.

    In notebooks, pages and pictures, five kinds of operations differ in colour: the gradient passes
    through the operation on its way from the float outputs to the float inputs; a custom rule
    changes the gradient; the gradient ends there (the data go on, but no gradient comes back); no
    gradient arrives, because it ended further on; no float input leads there. The program decides
    this, not the values.

    Args:
      fun: a function of arrays and pytrees of arrays; a traced function, whose graph is shown with
        its rules applied (``show(tg.trace(fun, static_argnames="n"), x, n=3)`` takes static
        arguments); or a graph.
      *args, **kwargs: the arguments of `fun`, or `jax.ShapeDtypeStruct`s instead of arrays. A graph
        takes no arguments.

    Returns:
      A `GraphView`, which displays itself; `to_html` and `to_svg` return a page and a picture.

    Raises:
      TypeError: `fun` is neither a function nor a graph, or a graph comes with arguments.

    TensorBoard and Model Explorer fold graphs by scope in the same way.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(jnp.floor(x @ w))
    >>> view = show(loss, jnp.ones((4, 2)), jax.ShapeDtypeStruct((8, 4), "float32"))
    >>> view  # doctest: +ELLIPSIS
    loss(w: f32[4,2], x: f32[8,4]) -> f32[]
      dot_general = dot_general(x, w)                f32[8,2]  ...
      floor = floor(dot_general)                     f32[8,2]  ...
      reduce_sum = reduce_sum(floor) axes=(0, 1)     f32[]     ...
      div = div(reduce_sum, 16.0)                    f32[]     ...
      return div
    >>> view.to_svg().startswith("<svg")
    True
    """
    if isinstance(fun, Graph):
        if args or kwargs:
            raise TypeError(
                f"show was given the graph {fun.name} and arguments: a graph is shown as it is, "
                "so call show(graph), or show(fun, *args) to trace the function for them"
            )
        return GraphView(fun)
    traced, first = find_traced(fun)
    if traced is not None:
        return GraphView(traced.graph(*first, *args, **kwargs))
    if not callable(fun):
        raise TypeError(f"expected a function or a Graph to show, got {type(fun).__name__}")
    return GraphView(graph_of_call(fun, args, kwargs))


class GraphView:
    """A graph that displays itself; made by `show`.

    Attributes:
      graph: the graph.
    """

    def __init__(self, graph: Graph):
        self.graph = graph

    @cached_property
    def _flow(self) -> RegionFlow:
        return gradient_flow(self.graph)

    def __str__(self) -> str:
        return str(self.graph)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html.fragment(self._flow)

    def to_html(self) -> str:
        """Returns an HTML page that shows the same as a notebook: write it to a file, and open the
        file in a browser. The page loads nothing from elsewhere."""
        return html.page(self._flow)

    def to_svg(self) -> str:
        """Returns an SVG picture for documents: the text of the graph, where the background of each
        operation has the colour of what happens to the gradient there."""
        return drawing.to_svg(self._flow)
