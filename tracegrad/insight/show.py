"""`show`: displays a graph in a terminal, a notebook, an HTML page or an SVG picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from tracegrad.insight import drawing, html
from tracegrad.insight.colours import LOOKS, has_colours, painted
from tracegrad.insight.gradient_flow import Flow, RegionFlow, gradient_flow
from tracegrad.ir import CustomGradient, Graph, Node, Recompute, StopGradient
from tracegrad.ir.occurrence import Path
from tracegrad.ir.text import format_graph, label
from tracegrad.tracing.graphs import graph_of_call
from tracegrad.tracing.tools import tool
from tracegrad.tracing.traced import find_traced


@tool
def show(fun: Callable[..., Any] | Graph, /, *args: Any, **kwargs: Any) -> GraphView:
    """Shows the graph of a function, and what happens to the gradient at each operation.

    A notebook shows the graph folded by region and by named scope. It counts and lists the
    operations where the gradient ends, and shows an operation's line of code when the mouse rests
    on the operation. A terminal shows the text of the graph in colour, or plain if `NO_COLOR <https://no-color.org>`_
    is set in the environment. Nothing is computed.

    Five kinds of operations differ in colour: the gradient passes through the operation on its way
    from the float outputs to the float inputs; a custom rule changes the gradient; the gradient
    ends there (the data go on, but no gradient comes back); no gradient arrives, because it ended
    further on; no float input leads there. The program decides this, not the values.

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
        if not has_colours():
            return str(self.graph)
        return f"{format_graph(self.graph, self._paint)}\n{_LEGEND}"

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

    def _paint(self, path: Path, node: Node, left: str, types: str, place: str) -> str:
        flow = self._flow.along(path)
        style = LOOKS[flow.flows[node]].style
        if flow.recomputed and flow.flows[node] is Flow.FLOWS:
            style = _RECOMPUTED
        line = painted(style, left)
        if isinstance(node, (CustomGradient, StopGradient, Recompute)):
            before, what, after = left.partition(label(node))
            what = painted(_ANNOTATIONS[type(node)], what)
            line = f"{painted(style, before)}{what}{painted(style, after)}"
        return f"{line}  {painted('36', types)}  {painted('2', place)}"


_RECOMPUTED = "34"
_ANNOTATIONS: dict[type[Node], str] = {
    CustomGradient: "1;35",
    StopGradient: "1;31",
    Recompute: "1;34",
}
_LEGEND = "  " + " · ".join(
    [
        *(painted(look.style, look.words) for look in LOOKS.values() if look.words),
        painted(_RECOMPUTED, "it flows, and is recomputed"),
    ]
)
