"""Where the gradient goes in a program: for every node at any depth, whether it passes.

Two walks decide it, both on the program and never on values: forward, what a gradient of some
output could reach the float inputs from (as `connectivity` has it); backward, where a gradient of
the float outputs arrives. It passes a node where the two meet.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from tracegrad._jax.caches import once_for_each
from tracegrad.differentiation.connectivity import Walk
from tracegrad.ir import (
    CustomGradient,
    Graph,
    Literal,
    Node,
    Recompute,
    Value,
    has_gradient,
    is_reference,
)
from tracegrad.ir.dependence import (
    Masks,
    back_around,
    joined,
    leading_to,
    mask_of,
    node_dependence,
    of_each,
    region_outputs_leading_to,
    spread,
)


class Flow(enum.Enum):
    """What happens to the gradient at a node."""

    FLOWS = "flows"  # it passes, as JAX differentiates the operation
    CHANGED = "changed"  # it passes, as a custom rule says
    CUT = "cut"  # data go on to an output, the gradient does not come back through here
    UNREACHED = "unreached"  # a float input leads here, but no gradient arrives from an output
    NONE = "none"  # no float input leads here
    REPLACED = "replaced"  # inside what a custom rule stands for: not run when differentiated
    UNKNOWN = "unknown"  # inside a call of which only JAX knows how it is differentiated


@dataclass(eq=False)
class RegionFlow:
    """The flow through a graph, as one place enters it.

    Attributes:
      graph: the graph.
      flows: what happens at each of its nodes.
      lost: for nodes that pass a gradient to some operands, those that get none although they
        lead to a result.
      regions: the flow through the regions of each node that has some, by name.
      reached: for each input, whether a gradient arrives there.
      recomputed: whether it is run again in the backward pass.
    """

    graph: Graph
    recomputed: bool
    flows: dict[Node, Flow] = field(default_factory=dict)
    lost: dict[Node, tuple[Value | Literal, ...]] = field(default_factory=dict)
    regions: dict[Node, dict[str, RegionFlow]] = field(default_factory=dict)
    reached: list[bool] = field(default_factory=list)

    def along(self, path: Sequence[tuple[Node, str]]) -> RegionFlow:
        """That of a region inside it, by the calls that lead there."""
        flow = self
        for node, name in path:
            flow = flow.regions[node][name]
        return flow


def gradient_flow(graph: Graph, targets: Sequence[int] | None = None) -> RegionFlow:
    """The flow of gradients from some outputs of a graph (None: all of floats) to its float inputs.

    Where a region is entered from several places in the same way, they share one `RegionFlow`.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> def f(x):
    ...     return jnp.sum(x * jnp.floor(x))
    >>> flow = gradient_flow(tg.graph(f, jnp.ones(3)))
    >>> [(node.op, kind.value) for node, kind in flow.flows.items()]
    [('floor', 'cut'), ('mul', 'flows'), ('reduce_sum', 'flows')]
    >>> flow.reached
    [True]
    """
    carrying = [has_gradient(v) or is_reference(v) for v in graph.inputs]
    wanted = [
        has_gradient(v) and (targets is None or k in targets) for k, v in enumerate(graph.outputs)
    ]
    return _Flows().of(graph, carrying, wanted, wanted, recomputed=False)


Bools = Sequence[bool]


@dataclass
class _Flows:
    """Shared regions are looked at once for each way to enter them."""

    walk: Walk = field(default_factory=Walk)

    @once_for_each
    def of(
        self, graph: Graph, carrying: Bools, arriving: Bools, wanted: Bools, *, recomputed: bool
    ) -> RegionFlow:
        """The flow through a graph.

        Args:
          carrying: for each input, whether a gradient there would go on to a source.
          arriving: for each output, whether a gradient arrives there.
          wanted: for each output, whether its data go on to a target.
          recomputed: whether it is inside of a `Recompute`.
        """
        flow = RegionFlow(graph, recomputed)
        masks: dict[Value, int] = {}
        spread(graph, [int(c) for c in carrying], self.walk.rule, masks)
        live = leading_to(graph, wanted)
        arrived = {
            value
            for value, arrives in zip(graph.outputs, arriving, strict=True)
            if arrives and isinstance(value, Value)
        }
        for node in reversed(graph.nodes):
            self._visit(node, flow, masks, live, arrived)
        flow.flows = dict(reversed(flow.flows.items()))
        flow.reached = [
            value in arrived and carries
            for value, carries in zip(graph.inputs, carrying, strict=True)
        ]
        return flow

    def _visit(
        self,
        node: Node,
        flow: RegionFlow,
        masks: dict[Value, int],
        live: set[Value],
        arrived: set[Value],
    ) -> None:
        ins = [mask_of(value, masks) for value in node.inputs]
        got = [value in arrived for value in node.outputs]
        passing = self._passing(node, ins, got, arrived)
        arrived.update(
            v for i, v in enumerate(node.inputs) if isinstance(v, Value) and passing >> i & 1
        )
        carrying = joined(1 << i for i, mask in enumerate(ins) if mask)
        needed = joined(
            data & carrying
            for data, value in zip(node_dependence(node), node.outputs, strict=True)
            if value in live
        )
        if not carrying:
            kind = Flow.NONE
        elif passing:
            kind = Flow.CHANGED if isinstance(node, CustomGradient) else Flow.FLOWS
            lost = tuple(v for i, v in enumerate(node.inputs) if (needed & ~passing) >> i & 1)
            if lost:
                flow.lost[node] = lost
        else:
            # Where a result still carries, something further on cut the gradient.
            carried = any(mask_of(value, masks) for value in node.outputs if value in live)
            kind = Flow.CUT if needed and not carried else Flow.UNREACHED
        flow.flows[node] = kind
        if node.regions:
            flow.regions[node] = self._inside(node, kind, ins, got, passing, live, flow.recomputed)

    def _passing(self, node: Node, ins: Masks, got: Bools, arrived: set[Value]) -> int:
        """The operands to which a gradient goes on from the results at which one arrives."""
        carrying = of_each(map(bool, ins))
        references = [v for v in node.operands if is_reference(v)]
        if references:  # what is written there is read elsewhere
            return joined(carrying) if any(got) or arrived.intersection(references) else 0
        if not any(ins):
            return 0
        rows = self.walk.rule(node, carrying)
        return joined(row for row, arrives in zip(rows, got, strict=True) if arrives)

    def _inside(
        self,
        node: Node,
        kind: Flow,
        ins: Masks,
        got: list[bool],
        passing: int,
        live: set[Value],
        recomputed: bool,
    ) -> dict[str, RegionFlow]:
        recomputed = recomputed or isinstance(node, Recompute)
        entered = None if kind is Flow.NONE else self.walk.enter(node, ins)
        if entered is None:
            inner, reached = kind, [False] * len(node.inputs)
            if isinstance(node, CustomGradient) and kind is not Flow.NONE:
                inner = Flow.REPLACED
            elif kind is Flow.FLOWS or kind is Flow.CUT:
                inner = Flow.UNKNOWN
            if inner is not kind:
                reached = [bool(passing >> i & 1) for i in range(len(node.inputs))]
            flows = {}
            for name, region in node.regions.items():
                at_inputs = reached
                if len(region.inputs) != len(reached):  # the call hands something else on to it
                    at_inputs = [any(reached)] * len(region.inputs)
                flows[name] = self._uniform(region, inner, recomputed, at_inputs)
            return flows
        flows = {}
        results = [value in live for value in node.outputs]
        for name, masks in entered[1].items():
            region = node.regions[name]
            carrying = [mask != 0 for mask in masks]
            wanted = region_outputs_leading_to(node, name, results)
            if name == "cond_jaxpr":
                arriving = [False] * len(region.outputs)
            else:
                arriving = self._arriving(node, region, carrying, got, wanted, recomputed)
            flows[name] = self.of(region, carrying, arriving, wanted, recomputed=recomputed)
        return flows

    def _arriving(
        self,
        node: Node,
        region: Graph,
        carrying: Bools,
        got: Bools,
        wanted: Bools,
        recomputed: bool,
    ) -> list[bool]:
        """At which outputs of a region a gradient arrives: in a loop also from later iterations."""

        def back(arriving: Bools) -> list[bool]:
            return self.of(region, carrying, arriving, wanted, recomputed=recomputed).reached

        return back_around(node, got, back, operator.or_)

    @once_for_each
    def _uniform(self, graph: Graph, kind: Flow, recomputed: bool, reached: Bools) -> RegionFlow:
        """A region with the same kind throughout."""
        flow = RegionFlow(graph, recomputed, reached=list(reached))
        for node in graph.nodes:
            flow.flows[node] = kind
            inner = recomputed or isinstance(node, Recompute)
            if node.regions:
                flow.regions[node] = {
                    name: self._uniform(region, kind, inner, [any(reached)] * len(region.inputs))
                    for name, region in node.regions.items()
                }
        return flow
