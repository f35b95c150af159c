"""The part of a record between some sources and targets: its structure, and its graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tracegrad import _jax
from tracegrad.ir import Graph, Node, Source, Value
from tracegrad.ir.importer import make_node
from tracegrad.rewriting.host_calls import end_gradients_at_host
from tracegrad.tape.computations import Computation
from tracegrad.tape.effects import silence
from tracegrad.tape.linearised import Linearised


class Operation(NamedTuple):
    """One operation of a record: what it computes, and the slots of its arrays."""

    computation: Computation
    args: tuple[int, ...]
    results: tuple[int, ...]
    source_info: Any  # JAX's: the traceback and the named scopes


@dataclass(frozen=True)
class Block:
    """The part of a record between some sources and targets; its arrays have slots of their own.

    `key` is equal for blocks of one structure: then one compiled program serves both.
    """

    operations: tuple[Operation, ...]
    slots: tuple[int, ...]  # of each of its arrays in the record
    types: tuple[Any, ...]  # of each of its arrays
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    key: tuple[Any, ...]
    exact_key: tuple[Any, ...]  # equal only if the backward's own derivatives are the same too


def on_the_way(
    operations: Sequence[Operation],
    types: Sequence[Any],
    sources: Sequence[int],
    targets: Sequence[int],
) -> list[int]:
    """Which operations are on a path of data flow from a source to a target, in order."""
    reached = set(sources)
    forward = []
    for i, operation in enumerate(operations):
        if not reached.isdisjoint(operation.args):
            forward.append(i)
            reached.update(r for r in operation.results if _jax.has_gradient(types[r]))
    needed = set(targets)
    chosen = []
    for i in reversed(forward):
        if not needed.isdisjoint(operations[i].results):
            chosen.append(i)
            needed.update(operations[i].args)
    return chosen[::-1]


def following(operations: Sequence[Operation], sources: Iterable[int]) -> list[Operation]:
    """The operations to which data flows from some slots, in order."""
    reached = set(sources)
    found = []
    for operation in operations:
        if not reached.isdisjoint(operation.args):
            found.append(operation)
            reached.update(operation.results)
    return found


def block_between(
    operations: Sequence[Operation],
    types: Sequence[Any],
    sources: Sequence[int],
    targets: Sequence[int],
) -> Block:
    """The operations on a path of data flow from a source to a target, in order.

    Sources and targets are slots of the record that has the operations; `types`: of its slots.
    """
    chosen = [operations[i] for i in on_the_way(operations, types, sources, targets)]
    slots = [*sources, *targets, *(slot for o in chosen for slot in (*o.args, *o.results))]
    places = {slot: place for place, slot in enumerate(dict.fromkeys(slots))}

    def placed(slots: Sequence[int]) -> tuple[int, ...]:
        return tuple([places[slot] for slot in slots])

    ends = placed(sources), placed(targets)
    own = [o._replace(args=placed(o.args), results=placed(o.results)) for o in chosen]
    own_types = tuple([types[slot] for slot in places])
    form = (ends, tuple([(o.args, o.results) for o in own]), own_types)
    keys = [o.computation.keys for o in own]
    return Block(
        tuple(own),
        tuple(places),
        own_types,
        *ends,
        (form, tuple([once for once, _ in keys])),
        (form, tuple([exact for _, exact in keys])),
    )


def graph_of(
    operations: Sequence[Operation],
    types: Sequence[Any],
    *,
    as_called: bool = False,
    is_shown: bool = False,
) -> tuple[Graph, dict[int, Value], Mapping[Node, Linearised]]:
    """The graph of recorded operations, its value for every slot, and which of its nodes save what
    their derivatives need.

    Arrays that no operation made are the graph's inputs. `as_called`: functions as they were
    called, without what they save; `is_shown`: also with their effects, which do not happen again
    when the graph is differentiated.
    """
    graph = Graph("tape")
    made = {slot for operation in operations for slot in operation.results}
    values: dict[int, Value] = {
        slot: graph.add_input(aval) for slot, aval in enumerate(types) if slot not in made
    }
    seen: dict[int, Graph] = {}
    saving: dict[Node, Linearised] = {}
    nodes: list[Node] = []
    for operation in operations:
        computation, results = operation.computation, operation.results
        params = computation.params
        if (as_called or is_shown) and isinstance(computation, Linearised):
            results, computation = results[: computation.count], computation.original
            params = computation.params
        inputs = []
        for slot in operation.args:
            if slot not in values:  # saved by a function, and used by a recorded backward pass
                values[slot] = graph.add_input(types[slot])
            inputs.append(values[slot])
        source = Source(operation.source_info, None)
        node = make_node(computation.primitive, params, tuple(inputs), source, (), seen)
        if isinstance(computation, Linearised):
            saving[node] = computation
        elif not is_shown:
            if computation.has_effects:
                silence(node)
            if computation.hands_to_host:
                end_gradients_at_host(node)
        graph.adopt(node, [types[slot] for slot in results])
        nodes.append(node)
        values.update(zip(results, node.outputs, strict=True))
    graph.fill(nodes, (), None, False)
    return graph, values, saving


def refuse_saved(operations: Sequence[Operation]) -> None:
    """Raises NotImplementedError if an operation uses what a function saved for its derivative: a
    backward pass that was recorded. Seen as it was called the function does not give that."""
    saved: set[int] = set()
    for operation in operations:
        if not saved.isdisjoint(operation.args):
            raise NotImplementedError(
                "rules (or a gradient_override_map) came into force between the call of a compiled "
                "function on this tape and a second derivative through it: open the tape inside "
                "their block"
            )
        if isinstance(operation.computation, Linearised):
            saved.update(operation.results[operation.computation.count :])
