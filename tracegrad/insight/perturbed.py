"""What of a node a program differentiates: the operands that vary with an input of the program, and
the results from which a cotangent comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracegrad._jax.caches import once_for_each
from tracegrad.differentiation.connectivity import Walk
from tracegrad.ir import Graph, Node, Occurrence, Value, has_gradient
from tracegrad.ir.dependence import (
    Masks,
    Rule,
    leading_to,
    mask_of,
    of_each,
    region_outputs_leading_to,
    spread,
)


class Perturbed:
    """Answers for nodes at any depth of one program.

    A constant is not perturbed, nor is what is stopped or rounded on the way; no cotangent comes
    back from a result that only a comparison reads.
    """

    def __init__(self, program: Graph):
        self.program = program
        self._walk = Walk()

    def of(self, found: Occurrence) -> tuple[list[int], list[bool]]:
        """The operands of a node that vary, by position, and for each result whether a cotangent
        comes back from it."""
        graph = self.program
        varying = [int(has_gradient(value)) for value in graph.inputs]
        wanted = [has_gradient(value) for value in graph.outputs]
        for node, name in found.path:
            masks = self._varying(graph, varying)
            live = self._live(graph, varying, wanted)
            entered = self._walk.enter(node, [mask_of(v, masks) for v in node.inputs])
            graph = node.region(name)
            if entered is None:  # differentiated as a whole
                varying = [int(has_gradient(value)) for value in graph.inputs]
                wanted = [has_gradient(value) for value in graph.outputs]
                continue
            varying = [int(mask != 0) for mask in entered[1][name]]
            rule = self._rule(self._varying(graph, varying))
            results = [value in live for value in node.outputs]
            wanted = region_outputs_leading_to(node, name, results, rule)
        masks = self._varying(graph, varying)
        operands = [i for i, value in enumerate(found.node.inputs) if mask_of(value, masks)]
        live = self._live(graph, varying, wanted)
        return operands, [value in live for value in found.node.outputs]

    @once_for_each
    def _varying(self, graph: Graph, inputs: Masks) -> Mapping[Value, int]:
        masks: dict[Value, int] = {}
        spread(graph, inputs, self._walk.rule, masks)
        return masks

    @once_for_each
    def _live(self, graph: Graph, inputs: Masks, outputs: Sequence[bool]) -> set[Value]:
        return leading_to(graph, outputs, self._rule(self._varying(graph, inputs)))

    def _rule(self, varying: Mapping[Value, int]) -> Rule:
        """From which of its operands that vary each result of a node gets its tangent."""

        def rule(node: Node, _: Masks) -> Masks:
            return self._walk.rule(node, of_each(mask_of(v, varying) != 0 for v in node.inputs))

        return rule
