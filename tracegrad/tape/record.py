"""What a tape remembers: the operations that touched something watched, by identity of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Source, Value
from tracegrad.rewriting.host_calls import calls_host, end_gradients_at_host
from tracegrad.tape.effects import has_effects, silence
from tracegrad.tape.keys import params_key, rule_keys
from tracegrad.tracing.importer import make_node
from tracegrad.tracing.variable import Variable


@dataclass(slots=True, eq=False)
class Operation:
    """One operation as it ran: its primitive and parameters, and the very arrays."""

    primitive: Any
    params: Mapping[str, Any]
    args: tuple[Any, ...]
    results: tuple[Any, ...]
    source_info: Any  # JAX's: the traceback and the named scopes
    # How many leading args are closed over: they carry no gradient through a custom rule.
    constants: int = 0
    # A custom rule that was made for this one run: it is known by what it traces to.
    rule: CustomGradient | None = None
    _keys: tuple[Any, Any] | None = None

    @property
    def key(self) -> Any:
        """Equal only for operations that compute the same function; good while it runs, too."""
        return self.primitive, params_key(self.params)

    @property
    def keys(self) -> tuple[Any, Any]:
        """Two keys: equal for operations that compute the same function with the same derivative;
        and equal only if their derivatives of every order are the same. They differ for rules.

        A rule is traced for it, and that may not happen before it has run.
        """
        if self._keys is None:
            if self.rule is None:
                self._keys = self.key, self.key
            else:
                self._keys = rule_keys(self.rule)
        return self._keys


@dataclass(slots=True, eq=False, weakref_slot=True)
class Record:
    """The operations of one tape, and the arrays to which data flows from a watched one.

    Arrays are told apart by identity, and held, so that an identity stays good.
    """

    operations: list[Operation] = field(default_factory=list)
    tracked: dict[int, Any] = field(default_factory=dict)
    # Every Variable that is watched, and what it gave at each read, by identity.
    reads: dict[Variable, dict[int, Any]] = field(default_factory=dict)

    def watch(self, array: Any) -> None:
        self.tracked[id(array)] = array

    def tracks(self, arrays: Iterable[Any]) -> bool:
        tracked = self.tracked
        return any(id(array) in tracked for array in arrays)

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)
        for result in operation.results:
            if _jax.has_gradient(result):  # an integer ends the gradient
                self.tracked[id(result)] = result

    def watch_variable(self, variable: Variable) -> None:
        """Watches a Variable from its next read on."""
        self.reads.setdefault(variable, {})

    def watch_read(self, variable: Variable, value: Any) -> None:
        """Watches a value that a Variable has given."""
        self.watch(value)
        self.reads.setdefault(variable, {})[id(value)] = value

    def reads_of(self, source: Any) -> list[Any]:
        """The arrays that a source stands for: itself, or the values read from a Variable."""
        return (
            list(self.reads.get(source, {}).values()) if isinstance(source, Variable) else [source]
        )

    def forget_operations(self) -> None:
        """Lets go of all arrays; which Variables were watched can still be asked."""
        self.operations.clear()
        self.tracked.clear()
        for reads in self.reads.values():
            reads.clear()

    def clear(self) -> None:
        self.forget_operations()
        self.reads.clear()


@dataclass(frozen=True)
class Block:
    """The part of a record between some sources and targets, each array numbered by a slot.

    `key` is equal for blocks of one structure: then one compiled program serves both.
    """

    operations: tuple[Operation, ...]
    arrays: tuple[Any, ...]
    slots: Mapping[int, int]  # identity -> slot
    key: tuple[Any, ...]
    exact_key: tuple[Any, ...]  # equal only if the backward's own derivatives are the same too


def block_between(record: Record, sources: Sequence[Any], targets: Sequence[Any]) -> Block:
    """The operations on a path of data flow from a source to a target, in order."""
    reached = {id(source) for source in sources}
    forward = []
    for operation in record.operations:
        if any(id(arg) in reached for arg in operation.args):
            forward.append(operation)
            reached.update(id(r) for r in operation.results if _jax.has_gradient(r))
    needed = {id(target) for target in targets}
    chosen = []
    for operation in reversed(forward):
        if any(id(result) in needed for result in operation.results):
            chosen.append(operation)
            needed.update(id(arg) for arg in operation.args)
    chosen.reverse()

    arrays: list[Any] = []
    slots: dict[int, int] = {}

    def slot(array: Any) -> int:
        if id(array) not in slots:
            slots[id(array)] = len(arrays)
            arrays.append(array)
        return slots[id(array)]

    ends = tuple(map(slot, sources)), tuple(map(slot, targets))
    places = [
        (operation.constants, *map(slot, operation.args), None, *map(slot, operation.results))
        for operation in chosen
    ]
    form = (ends, tuple(places), tuple(map(_jax.type_key, arrays)))
    return Block(
        tuple(chosen),
        tuple(arrays),
        slots,
        (form, tuple(operation.keys[0] for operation in chosen)),
        (form, tuple(operation.keys[1] for operation in chosen)),
    )


def graph_of(
    operations: Sequence[Operation], arrays: Sequence[Any], slots: Mapping[int, int]
) -> tuple[Graph, list[Value]]:
    """The graph of recorded operations, and its value for every slot.

    Arrays that no operation made are the graph's inputs.
    """
    graph = Graph("tape")
    made = {id(result) for operation in operations for result in operation.results}
    values: list[Value | None] = [None] * len(arrays)
    for i, array in enumerate(arrays):
        if id(array) not in made:
            values[i] = graph.add_input(jax.typeof(array))
    seen: dict[int, Graph] = {}
    for operation in operations:
        inputs = []
        for arg in operation.args:
            value = values[slots[id(arg)]]
            assert value is not None, "operations stand in the order in which they ran"
            inputs.append(value)
        node = make_node(
            operation.primitive,
            operation.params,
            tuple(inputs),
            Source(operation.source_info, None),
            (),
            seen,
        )
        if has_effects(operation.params):
            silence(node)
        if calls_host(operation.params):
            end_gradients_at_host(node)
        graph.append(node, [jax.typeof(result) for result in operation.results])
        for result, value in zip(operation.results, node.outputs, strict=True):
            values[slots[id(result)]] = value
    return graph, [value for value in values if value is not None]
