"""A region that keeps nothing but what is chosen, as XLA holds it.

What is to be kept gets a name (see `checkpoint_names`), and the policy of the region saves these
names and nothing else. What comes into it is kept anyway; to be kept on the host it gets a name
inside.

So that nothing else is kept, what XLA computes inside of what reads it goes over no border: the
region has copies of it. And there is a barrier in front of the region and behind it, over which XLA
does not compute again in one place what was written in another.

All of a region is run again when its cotangents arrive. What may wait for those of one operation
inside is in a region with that, in there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from tracegrad.ir import Graph, Node, Value
from tracegrad.ir.grouping import entering
from tracegrad.rewriting.checkpoint_names import name_results, name_values

_BARRIER = "together"  # see `_barrier`


def recompute_but_for(
    graph: Graph,
    nodes: Sequence[Node],
    saved: Mapping[Node, bool],
    names: Iterator[str],
    instead: Mapping[Node, Graph],
    late: Mapping[Node, Node],
    copied: Collection[Node],
    on_host: Collection[Value] | None,
) -> None:
    """Puts a stretch of a graph's nodes into a `Recompute`.

    Args:
      saved: those of the nodes whose results are kept, and whether their derivatives read them.
      names: for what is kept.
      instead: what is run in the place of some of the nodes.
      late: nodes that are run again when the cotangents of another arrive, and that other, which
        alone reads them, or what else waits for it.
      copied: nodes of the graph of which the region has copies instead of taking their results.
      on_host: if what is kept goes to the host, what else of the graph's inputs may.
    """
    first, behind = graph.nodes.index(nodes[0]), len(graph.nodes) - graph.nodes.index(nodes[-1]) - 1
    kept = [n for node in saved for n in name_results(graph, node, names, saved[node])]
    for node, program in instead.items():
        graph.replace(node, program)
    inside = graph.nodes[first : len(graph.nodes) - behind]
    if on_host is not None:
        alone = _read_alone(graph, inside, on_host)
        kept += (given := list(itertools.islice(names, len(alone))))
        name_values(graph, alone, given, before=inside[0])
        inside = graph.nodes[first : len(graph.nodes) - behind]
        copied = ()  # what comes in has its name here
    for reader in dict.fromkeys(late.values()):
        waiting = _between(reader, [node for node in late if late[node] is reader])
        if waiting.issubset(inside):  # or there is a view of it outside
            _region(graph, [node for node in inside if node in waiting], None, copied)
    inside = graph.nodes[first : len(graph.nodes) - behind]
    region = _region(graph, inside, _keeping(kept, on_host is not None), copied)
    # JAX rounds what is saved, and XLA has the original beside it as long as that is read. Regions
    # behind have a barrier of their own.
    if left := [v for v in region.outputs if any(user.name != _BARRIER for user in v.users)]:
        for value, waited in zip(left, graph.insert(_barrier(), left, after=region), strict=True):
            graph.replace_uses(value, waited)


def _read_alone(graph: Graph, nodes: Sequence[Node], inputs: Collection[Value]) -> list[Value]:
    """What comes into some nodes and nothing else reads, but arguments, which are alive anyway;
    except these `inputs`."""
    inside = {*nodes}
    return [
        value
        for value in entering(nodes)
        if (value.producer is not None or value in inputs)
        and value not in graph.outputs
        and inside.issuperset(value.users)
    ]


def _barrier() -> Callable[..., list[Any]]:
    """What gives nothing of what it is given before all of it is there."""
    barrier: Callable[..., Sequence[Any]] = jax.lax.optimization_barrier

    @jax.custom_jvp
    def together(*values: Any) -> list[Any]:
        return list(barrier(values))

    def derivative(values: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        # Cotangents do not wait for each other: those of an argument's slices would be padded.
        return together(*values), list(tangents)

    together.defjvp(derivative, symbolic_zeros=True)
    return together


def _keeping(names: Sequence[str], on_host: bool) -> Callable[..., Any] | None:
    """The policy of a region that keeps nothing but what has these names."""
    policies: Any = jax.checkpoint_policies
    if not names:
        return None
    keep: Callable[..., Any] = policies.save_only_these_names(*names)
    if on_host:
        keep = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return keep


def _between(reader: Node, nodes: Sequence[Node]) -> set[Node]:
    """Some nodes, all that reads them, and so on up to a reader."""
    found, pending = {reader}, [*nodes]
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending += [user for value in node.outputs for user in value.users]
    return found


def _region(
    graph: Graph,
    nodes: Sequence[Node],
    policy: Callable[..., Any] | None,
    copied: Collection[Node],
) -> Node:
    """Puts nodes of a graph into a `Recompute`, but those of which only copies are read, with a
    barrier in front."""
    read, pending = set[Node](), entering(nodes)
    while pending:
        producer = pending.pop().producer
        if producer is not None and producer in copied and producer not in read:
            read.add(producer)
            pending += producer.operands
    unread = set[Node]()
    for node in reversed(nodes):
        is_read = any(v in graph.outputs or not unread.issuperset(v.users) for v in node.outputs)
        if node in copied and not is_read:
            unread.add(node)
    members = [node for node in nodes if node not in unread]
    copies = [node for node in graph.nodes if node in read]
    region = graph.group(members, recompute=True, policy=policy, name="recomputed", copies=copies)
    # XLA may run what depends on arguments alone (an RNN's products with its inputs) for all
    # regions ahead, and holds it until their turn comes. And in a loop JAX keeps what has a name
    # once more for each region inside of this one that takes it, if nothing else is in between.
    came = entering([region])
    if any(v.producer is not None for v in came):
        waited = dict(zip(came, graph.insert(_barrier(), came, before=region), strict=True))
        inputs = [waited[v] if isinstance(v, Value) else v for v in region.inputs]
        graph.set_inputs(region, inputs)
    return region
