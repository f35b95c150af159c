"""Tells for every node of a program, at any depth, whether the gradient passes through it.

Three sets of values decide this: values that vary with a float input, values at which a gradient of
a float output arrives, and values whose data lead to an output. The sets follow from the program
alone, not from numbers. A gradient passes through a node if a result of the node varies and gets a
gradient.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import or_

from tracegrad._jax.caches import once_for_each
from tracegrad.differentiation.connectivity import Walk
from tracegrad.ir import (
    Atom,
    CustomGradient,
    Graph,
    Node,
    Recompute,
    Value,
    has_gradient,
    is_reference,
)
from tracegrad.ir.dependence import (
    Masks,
    Rule,
    back_around,
    joined,
    leading_to,
    node_dependence,
    of_each,
    region_outputs_leading_to,
    spread,
)
from tracegrad.ir.occurrence import Path

Bools = Sequence[bool]


class Flow(enum.Enum):
    """What happens to the gradient at a node."""

    FLOWS = "flows"  # the gradient passes, as JAX differentiates the operation
    CHANGED = "changed"  # the gradient passes, as a custom rule defines it
    CUT = "cut"  # data go on to an output, but no gradient comes back through here
    UNREACHED = "unreached"  # a float input leads here, but no gradient arrives from an output
    NONE = "none"  # no float input leads here
    REPLACED = "replaced"  # inside a function whose custom rule is used instead of it
    UNKNOWN = "unknown"  # inside a call that JAX differentiates as a whole


@dataclass(eq=False)
class RegionFlow:
    """The flow through a graph that is entered from one place.

    Attributes:
      graph: the graph.
      recomputed: whether the graph runs again in the backward pass.
      varying: the values that vary with a float input.
      arrived: the values at which a gradient arrives from an output.
      flows: what happens to the gradient at each node.
      regions: for each node with regions, the flow through them, by the region's name.
    """

    graph: Graph
    recomputed: bool
    varying: AbstractSet[Value]
    arrived: AbstractSet[Value]
    flows: dict[Node, Flow] = field(default_factory=dict)
    regions: dict[Node, dict[str, RegionFlow]] = field(default_factory=dict)

    @property
    def reached(self) -> list[bool]:
        """For each input, whether a gradient arrives there, and goes on to a float input of the
        program."""
        return [v in self.arrived and v in self.varying for v in self.graph.inputs]

    def along(self, path: Path) -> RegionFlow:
        """Returns the flow through an inner region; `path`: the calls that lead there."""
        flow = self
        for node, name in path:
            flow = flow.regions[node][name]
        return flow


def gradient_flow(graph: Graph, inputs: Collection[int] | None = None) -> RegionFlow:
    """Returns the flow of gradients from the float outputs of a graph to its float inputs, or to
    some `inputs` by their positions.

    Calls of the same region share a `RegionFlow` if the same inputs of the region lead back to
    inputs of the program, gradients arrive at the same outputs, and the same outputs are used.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> def f(x):
    ...     return jnp.sum(x * jnp.floor(x))
    >>> flow = gradient_flow(tg.graph(f, jnp.ones(3)))
    >>> [(node.op, kind.value) for node, kind in flow.flows.items()]
    [('floor', 'cut'), ('mul', 'flows'), ('reduce_sum', 'flows')]
    >>> flow.reached
    [True]
    """
    if inputs is None:
        carrying = [has_gradient(v) or is_reference(v) for v in graph.inputs]
    else:
        carrying = [i in inputs for i in range(len(graph.inputs))]
    wanted = list(map(has_gradient, graph.outputs))
    return _Flows().of(graph, carrying, wanted, wanted, recomputed=False)


class _Flows:
    """Computes the flow through a shared region once for each set of arguments of `of`."""

    def __init__(self) -> None:
        self._walk = Walk()

    @once_for_each
    def of(
        self,
        graph: Graph,
        carrying: Bools,
        arriving: Bools,
        wanted: Bools,
        *,
        recomputed: bool,
        every: Flow | None = None,
    ) -> RegionFlow:
        """Returns the flow through a graph.

        Args:
          carrying: for each input, whether a gradient there would go on to an input of the program.
          arriving: for each output, whether a gradient arrives there.
          wanted: for each output, whether its data go on to a float output of the program.
          recomputed: whether the graph is inside of a `Recompute`.
          every: the flow at every node, if JAX differentiates an enclosing call as a whole.
        """
        masks: dict[Value, int] = {}
        spread(graph, [int(c) for c in carrying], self._walk.rule, masks)
        varying = {value for value, mask in masks.items() if mask}
        arrived = leading_to(graph, arriving, self._rule(varying))
        live = leading_to(graph, wanted)
        flow = RegionFlow(graph, recomputed, varying, arrived)
        for node in graph.nodes:
            flow.flows[node] = every or _flow_at(node, flow, live)
            if node.regions:
                flow.regions[node] = {
                    name: self._inside(node, name, flow, live, every) for name in node.regions
                }
        return flow

    def _rule(self, varying: AbstractSet[Value]) -> Rule:
        """Returns a rule: to which varying operands each result of a node passes a gradient."""

        def rule(node: Node, _: Masks) -> Masks:
            return self._walk.rule(node, of_each(is_among(v, varying) for v in node.inputs))

        return rule

    def _inside(
        self,
        node: Node,
        name: str,
        flow: RegionFlow,
        live: AbstractSet[Value],
        every: Flow | None,
    ) -> RegionFlow:
        """Returns the flow through one region of a node."""
        region, recomputed = node.regions[name], flow.recomputed or isinstance(node, Recompute)
        varying = [int(is_among(v, flow.varying)) for v in node.inputs]
        entered = self._walk.enter(node, varying)
        if entered is None:  # JAX differentiates the node as a whole
            carrying = [any(varying) and has_gradient(v) for v in region.inputs]
            wanted = list(map(has_gradient, region.outputs))
            every = every or _flow_in(node, flow.flows[node])
        else:
            carrying = [mask != 0 for mask in entered[1][name]]
            wanted = region_outputs_leading_to(node, name, [v in live for v in node.outputs])

        def of(arriving: Bools) -> RegionFlow:
            return self.of(region, carrying, arriving, wanted, recomputed=recomputed, every=every)

        if entered is None:
            return of(wanted)
        if name == "cond_jaxpr":
            return of([False] * len(wanted))
        arrived = [v in flow.arrived for v in node.outputs]
        return of(back_around(node, arrived, lambda arriving: of(arriving).reached, or_))


def is_among(atom: Atom, values: AbstractSet[Value]) -> bool:
    """Whether an operand is among some values; a literal never is."""
    return isinstance(atom, Value) and atom in values


def _flow_at(node: Node, flow: RegionFlow, live: AbstractSet[Value]) -> Flow:
    """Returns the flow at a node; `live`: the values whose data lead to an output."""
    varying = [is_among(v, flow.varying) for v in node.inputs]
    if not any(varying):
        return Flow.NONE
    # Other nodes read what a node writes to a reference.
    ends = [*node.outputs, *filter(is_reference, node.operands)]
    if any(v in flow.varying and v in flow.arrived for v in ends):
        return Flow.CHANGED if isinstance(node, CustomGradient) else Flow.FLOWS
    results = [(v, mask) for v, mask in zip(node.outputs, node_dependence(node)) if v in live]
    is_needed = any(mask & joined(of_each(varying)) for _, mask in results)
    # If a result still varies, a later node has cut the gradient.
    is_cut_here = is_needed and not any(v in flow.varying for v, _ in results)
    return Flow.CUT if is_cut_here else Flow.UNREACHED


def _flow_in(node: Node, kind: Flow) -> Flow:
    """Returns the flow at every node inside of a node that JAX differentiates as a whole."""
    if isinstance(node, CustomGradient) and kind is not Flow.NONE:
        return Flow.REPLACED
    return Flow.UNKNOWN if kind in (Flow.FLOWS, Flow.CUT) else kind
