"""Effects happen once: when an operation runs, not again when its gradient is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node, RegionNode
from tracegrad.rewriting.host_calls import would_run_again
from tracegrad.tape.made_rules import parts_of_rule


def reads_the_host(params: Mapping[str, Any]) -> bool:
    """Whether such a call gives results, so that what follows depends on them."""
    return any(_gives_results(program) for _, program in _jax.sub_programs(params))


def _gives_results(program: Any) -> bool:
    open_form = _jax.opened(program)
    if not open_form.effects:
        return False
    return any(
        _gives_results_itself(equation)
        or any(_gives_results(inner) for _, inner in _jax.sub_programs(equation.params))
        for equation in open_form.eqns
    )


def _gives_results_itself(equation: Any) -> bool:
    if not equation.effects or not equation.outvars or any(_jax.sub_programs(equation.params)):
        return False
    return not any(_jax.is_reference(v.aval) for v in (*equation.invars, *equation.outvars))


def silence(node: Node, depth: int = 3) -> None:
    """Takes out of a node's regions what has an effect and no result: prints, most of all.

    Of custom rules out of the forward pass too; their backward pass has not run yet. Raises
    NotImplementedError where a call of the host gives results: to be differentiated, the region
    would have to call it again. `depth`: the forward pass of a rule may use the rule itself, for
    derivatives of higher order, and so on for ever; that many are looked at.
    """
    if isinstance(node, CustomGradient):
        if depth == 0 or _has_no_effects(node):
            return
        face = node.face("jvp" if node.kind == "jvp" else "forward")
        if face.effects:
            silence_in(face, depth - 1)
    if isinstance(node, RegionNode):
        for region in node.regions.values():
            if region.effects:
                silence_in(region, depth)


def _has_no_effects(node: CustomGradient) -> bool:
    """Whether it is known without a trace of a rule's faces that it has no effects. (A trace takes
    the derivatives of all operands, and the rule refuses those that its function closes over.)"""
    parts = None if node.kind == "jvp" else parts_of_rule(node.params["bwd"])
    return parts is not None and not any(
        _jax.program_facts(program).has_effects for program in parts.programs
    )


def silence_in(graph: Graph, depth: int = 3) -> None:
    """The same for all nodes of a graph."""
    for node in graph.nodes:
        if node.has_references and not node.regions:
            continue  # writing to a Ref is computing: later reads depend on it
        if node.effects and not node.outputs and not node.regions:
            graph.erase(node, with_effects=True, everywhere=True)
            continue
        if node.effects and not node.regions:
            raise would_run_again(node)
        if node.effects:
            silence(node, depth)
