"""Leading values of a program out of it, and perturbations of them in, through loops and calls.

Every region between a place and the root gets one more input or output. A scan stacks what its
steps give, and hands each step its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Node, Occurrence, Recompute, RegionNode, Value
from tracegrad.ir.nodes import Tap
from tracegrad.ir.occurrence import Path
from tracegrad.lowering import evaluate_node, has_jit_settings
from tracegrad.rewriting.edits import (
    hand_out,
    leaving,
    made_different,
    place_names,
    refuse_references,
)


@dataclass(frozen=True)
class Port:
    """A value that crosses a region's border: of which match, its type there, and in that region
    the value itself (of an input the perturbation's)."""

    match: Occurrence
    value: Value


# Makes the ports of one match in its own region.
_Open = Callable[[Graph, Sequence[Node], Occurrence], list[Port]]


def with_outputs(graph: Graph, matches: Sequence[Occurrence]) -> tuple[Graph, list[list[int]]]:
    """A copy of a graph that returns what leaves each match, behind its own results.

    Returns the graph, and for each match the positions of its values among the further results.
    """

    def open_(here: Graph, nodes: Sequence[Node], match: Occurrence) -> list[Port]:
        return [Port(match, value) for value in leaving(here, nodes)]

    new = graph.copy()
    ports = _thread(graph, new, [(match.path, match) for match in matches], _Outward(open_))
    new.add_outputs([port.value for port in ports])
    return new, [[i for i, p in enumerate(ports) if p.match is match] for match in matches]


def with_taps(graph: Graph, name: str, matches: Sequence[Occurrence]) -> Graph:
    """A copy of a graph with a tap for every float value that leaves a match."""

    def open_(here: Graph, nodes: Sequence[Node], match: Occurrence) -> list[Port]:
        refuse_references(here, nodes, match)
        ports = []
        for value in leaving(here, nodes):
            if value.has_gradient:
                perturbation = here.add_input(value.aval, "tap")
                (new,) = here.insert(perturbed, [value, perturbation], after=value.producer)
                hand_out(here, nodes, value, new)
                ports.append(Port(match, perturbation))
        return ports

    new = graph.copy()
    ports = _thread(graph, new, [(match.path, match) for match in matches], _Inward(open_))
    # In the order of the matches, which that of the inputs need not be.
    ordered: list[tuple[Value, str]] = []
    wanted = []
    for match, name_of_match in zip(matches, place_names(matches), strict=True):
        own = [port.value for port in ports if port.match is match]
        ordered += [(value, name_of_match) for value in own]
        wanted += [
            name_of_match if len(own) == 1 else f"{name_of_match}.{i}" for i in range(len(own))
        ]
    taps = [
        (value, Tap(name, of, place, value.aval))
        for (value, of), place in zip(ordered, made_different(wanted), strict=True)
    ]
    if any(tap.name == name for tap in graph.taps):
        raise GraphError(f"{graph.name} has a tap {name!r} already: choose another name")
    order = {value: i for i, (value, _) in enumerate(taps)}
    given = [value for value in new.inputs if value not in order]
    new.reorder_inputs([*given, *(value for value, _ in taps)])
    new.taps = (*graph.taps, *(tap for _, tap in taps))
    return new


def with_steps(graph: Graph) -> tuple[Graph, list[Any]]:
    """A copy of a graph in which whatever has an effect in a loop depends on the loop's step.

    JAX takes out of a scan that it differentiates what is the same at each step, and takes along
    what prints or calls the host there: it would happen once. It stays where it takes a branch on
    an operand that is a slice for each step.

    Returns the graph, and the types of the further inputs that it has for that; any values serve.
    """

    def open_(here: Graph, nodes: Sequence[Node], match: Occurrence) -> list[Port]:
        (node,) = nodes
        step = here.add_input(jax.core.ShapedArray((), jnp.dtype(bool)), "step")

        def run(*operands: Any) -> list[Any]:
            return evaluate_node(node, operands)

        def either(step: Any, *operands: Any) -> Any:
            return jax.lax.cond(step, run, lambda *operands: run(*operands), *operands)

        here.replace(node, either, [step, *node.inputs])
        return [Port(match, step)]

    new = graph.copy()
    places = [(found.path, found) for found in _effects_in_loops(graph, ())]
    ports = _thread(graph, new, places, _Inward(open_))
    return new, [port.value.aval for port in ports]


def _effects_in_loops(graph: Graph, path: Path) -> Iterator[Occurrence]:
    for node in graph.nodes:
        if not node.effects:
            continue
        if isinstance(node, RegionNode) and _why_not_to_pass(node) is None:
            for name, region in node.regions.items():
                yield from _effects_in_loops(region, (*path, (node, name)))
        elif not node.has_references and any(holder.primitive is _jax.SCAN for holder, _ in path):
            yield Occurrence(path, node)


@jax.custom_jvp
def perturbed(value: Any, perturbation: Any) -> Any:
    """The value, as if the perturbation, which is zero, had been added: to the last bit."""
    return value


@perturbed.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _jax.keeping_rule(perturbed, primals), tangents[0] + tangents[1]


@dataclass(frozen=True)
class _Outward:
    open_: _Open

    def close(self, region: Graph, ports: Sequence[Port]) -> None:
        region.add_outputs([port.value for port in ports])

    def fill(self, region: Graph, avals: Sequence[Any], behind: int) -> None:
        """A branch that was not taken gives zeros."""
        zeros = region.insert(lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in avals], [])
        region.add_outputs(zeros, at=len(region.outputs) - behind)

    def pass_on(
        self, here: Graph, node: Node, regions: dict[str, Graph], ports: Sequence[Port]
    ) -> tuple[Node, list[Port]]:
        avals = [_outside(node, port.value.aval) for port in ports]
        wide = here.widen(node, regions, (), avals)
        new = wide.outputs[len(node.outputs) :]
        return wide, [replace(port, value=value) for port, value in zip(ports, new, strict=True)]


@dataclass(frozen=True)
class _Inward:
    open_: _Open

    def close(self, region: Graph, ports: Sequence[Port]) -> None:
        pass  # they were made as its inputs

    def fill(self, region: Graph, avals: Sequence[Any], behind: int) -> None:
        region.add_inputs(avals, ["tap"] * len(avals), at=len(region.inputs) - behind)

    def pass_on(
        self, here: Graph, node: Node, regions: dict[str, Graph], ports: Sequence[Port]
    ) -> tuple[Node, list[Port]]:
        avals = [_outside(node, port.value.aval) for port in ports]
        inputs = here.add_inputs(avals, ["tap"] * len(avals))
        wide = here.widen(node, regions, inputs, ())
        return wide, [replace(port, value=value) for port, value in zip(ports, inputs, strict=True)]


def _thread(
    old: Graph,
    new: Graph,
    places: Sequence[tuple[Path, Occurrence]],
    way: _Outward | _Inward,
) -> list[Port]:
    """Opens the places in `new`, a copy of `old`, and in its regions; returns their ports here."""
    below: dict[Node, dict[str, list[tuple[Path, Occurrence]]]] = {}
    for path, match in places:
        if path:
            (node, name), rest = path[0], path[1:]
            below.setdefault(node, {}).setdefault(name, []).append((rest, match))
    found: list[Port] = []
    for path, match in places:  # first, since a node with places inside gives way to a wider one
        if not path:
            found += way.open_(new, [new.node_here(node) for node in match.nodes], match)
    for node, by_region in below.items():
        holder = new.node_here(node)
        _refuse_to_pass(node, next(iter(by_region.values()))[0][1])
        regions: dict[str, Graph] = {}
        ports: list[Port] = []
        own: dict[str, list[Port]] = {}
        for name, inner in by_region.items():
            region = node.region(name)
            regions[name] = region.copy()
            own[name] = _thread(region, regions[name], inner, way)
            way.close(regions[name], own[name])
            ports += own[name]
        if len(node.regions) > 1:  # branches take and return the same
            for name, region in node.regions.items():
                regions[name] = _aligned(regions.get(name) or region.copy(), name, own, way)
        wide, passed_on = way.pass_on(new, holder, regions, ports)
        now = dict(zip(holder.outputs, wide.outputs, strict=False))
        found = [replace(port, value=now.get(port.value, port.value)) for port in found]
        found += passed_on
    return found


def _aligned(
    region: Graph, name: str, own: dict[str, list[Port]], way: _Outward | _Inward
) -> Graph:
    """A branch with ports for those of the others too, in the order of all."""
    order = list(own)
    position = order.index(name) if name in own else 0
    before = [port.value.aval for n in order[:position] for port in own[n]]
    after = [port.value.aval for n in order[position:] if n != name for port in own[n]]
    way.fill(region, before, behind=len(own.get(name, ())))
    way.fill(region, after, behind=0)
    return region


def _outside(node: Node, aval: Any) -> Any:
    """The type, outside of a call, of a value inside of it."""
    if node.primitive is _jax.SCAN:
        return jax.core.ShapedArray((node.params["length"], *aval.shape), aval.dtype)
    return aval


def _refuse_to_pass(node: Node, match: Occurrence) -> None:
    why = _why_not_to_pass(node)
    if why is not None:
        raise GraphError(
            f"{match} lies in {node.name} ({node.op}), which {why}, so that its values and "
            "gradients cannot be led out; a tap with a callback can show them"
        )


def _why_not_to_pass(node: Node) -> str | None:
    known = (_jax.JIT, _jax.SCAN, _jax.COND)
    if not isinstance(node, Recompute) and node.primitive not in known:
        return "has no place for more inputs and outputs"
    if node.primitive is _jax.JIT and has_jit_settings(node):
        return "has shardings, layouts or donated arguments of its own"
    return None
