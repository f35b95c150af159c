"""What a tape remembers: the arrays of what touched something watched, and how they came about.

Arrays are told apart by identity, and numbered by slots; the structure of the record is a path of
steps that it shares with other records (see `structure`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend

from tracegrad import _jax
from tracegrad.ir import Graph, Node, Source, Value
from tracegrad.rewriting.host_calls import calls_host, end_gradients_at_host
from tracegrad.tape.computations import Computation
from tracegrad.tape.effects import silence
from tracegrad.tape.linearised import Linearised
from tracegrad.tape.structure import Step, root
from tracegrad.tracing.importer import make_node
from tracegrad.variables.lending import give_back
from tracegrad.variables.variable import Variable


class Operation(NamedTuple):
    """One operation of a record: what it computes, and the slots of its arrays."""

    computation: Computation
    args: tuple[int, ...]
    results: tuple[int, ...]
    source_info: Any  # JAX's: the traceback and the named scopes


# What has run on values and has a rule stands in a record as one operation. It is never bound.
ON_VALUES = jax.extend.core.Primitive("custom_gradient")
ON_VALUES.multiple_results = True


class Rule(NamedTuple):
    """The gradient of what a Python function has computed on values, as a Python function.

    Attributes:
      name: of the function whose gradient it is.
      traced: ``(*inputs) -> results``: the call as it is where it is traced, for what needs a
        program. It runs the user's functions once more.
      pull_back: from the cotangents of the results (None for one that has none), and for each input
        whether it may get slices, to the gradients of the inputs; None for one that has none.
    """

    name: str
    traced: Callable[..., list[Any]]
    pull_back: Callable[[Sequence[Any], Sequence[bool]], list[Any]]


class Record:
    """The operations of one tape, and the arrays to which data flows from a watched one.

    Arrays are held, so that an identity stays good.

    Attributes:
      keeps_operations: whether gradients are taken of it when it is over.
      orders: as many derivatives of one another it may see; more are slower.
    """

    keeps_operations = True

    __slots__ = (
        "__weakref__",
        "arrays",
        "orders",
        "reads",
        "rules",
        "shown",
        "slots",
        "source_infos",
        "stand_ins",
        "step",
        "steps",
        "tracked",
        "unfollowed",
    )

    def __init__(self, orders: int = 1) -> None:
        self.orders = orders
        self.arrays: list[Any] = []  # by slot
        self.slots: dict[int, int] = {}  # by identity
        self.tracked: Any = set()  # identities
        self.step: Step = root()
        self.steps: list[Step] = []
        self.source_infos: list[Any] = []  # of each step
        self.rules: dict[int, Rule] = {}  # on values, by the slot of the first result
        # What was used where nothing was followed, weakly, by identity.
        self.unfollowed: dict[int, weakref.ref[Any]] = {}
        # Every Variable that is watched, and what it gave at each read, by identity.
        self.reads: dict[Variable, dict[int, Any]] = {}
        # What takes part in a recorded gradient in the stead of an array, by that one's identity.
        self.stand_ins: dict[int, list[Any]] = {}
        # What nobody else was handed of Variables, to be given back.
        self.shown: list[tuple[Variable, Any]] = []

    # --------------------------------------------------------------------------- what is followed

    def watch(self, array: Any) -> None:
        """Follows an array from now on."""
        self.slot(array)
        self.tracked.add(id(array))

    def slot(self, array: Any) -> int:
        """The slot of an array; it gets one if it has none."""
        known = self.slots.get(id(array))
        if known is not None:
            return known
        slot = self.slots[id(array)] = len(self.arrays)
        self.arrays.append(array)
        key = _jax.type_key(array)
        step = self.step.next.get(key)
        if step is None:
            types = (jax.typeof(array),)
            step = Step(None, (slot,), (), types, self.step.is_shared)
            step = self.step.after(key, step)
        self._go(step, None)
        return slot

    def tracks(self, arrays: Iterable[Any]) -> bool:
        """Whether one of the arrays is followed."""
        tracked = self.tracked
        for array in arrays:
            if id(array) in tracked:
                return True
        if self.keeps_operations:
            for array in arrays:
                if isinstance(array, jax.Array):
                    self.unfollowed[id(array)] = weakref.ref(array)
        return False

    def was_used_unfollowed(self, array: Any) -> bool:
        """Whether an array was an operand when it was not followed."""
        identity = id(array)
        seen = self.unfollowed.get(identity)
        is_operand = identity in self.slots and identity not in self.tracked
        return is_operand or (seen is not None and seen() is array)

    def add(
        self, computation: Computation, args: Sequence[Any], results: Sequence[Any], info: Any
    ) -> None:
        """Adds an operation that has run."""
        slots, arrays = self.slots, self.arrays
        key: list[Any] = [computation]
        types: list[Any] = []
        for arg in args:
            identity = id(arg)
            slot = slots.get(identity)
            if slot is None:
                slot = slots[identity] = len(arrays)
                arrays.append(arg)
                types.append(_jax.type_key(arg))
            key.append(slot)
        first = len(arrays)
        # Of new operands the types follow: how many there are is told by the slots.
        known = tuple(key + types) if types else tuple(key)
        step = self.step.next.get(known)
        if step is None:
            step = Step(
                computation,
                tuple(key[1:]),
                tuple(range(first, first + len(results))),
                tuple(map(jax.typeof, (*arrays[first - len(types) :], *results))),
                self.step.is_shared and computation.is_shared,
            )
            step = self.step.after(known, step)
        tracked = self.tracked
        for result, live in zip(results, step.live):
            slots[id(result)] = len(arrays)
            arrays.append(result)
            if live:
                tracked.add(id(result))
        self.step = step
        self.steps.append(step)
        self.source_infos.append(info)

    def add_rule(
        self,
        rule: Rule,
        computation: Computation,
        args: Sequence[Any],
        results: Sequence[Any],
        info: Any,
    ) -> None:
        """Adds what has run on values, and has a rule."""
        self.add(computation, args, results, info)
        self.rules[self.step.results[0]] = rule

    def _go(self, step: Step, info: Any) -> None:
        self.step = step
        self.steps.append(step)
        self.source_infos.append(info)

    # ---------------------------------------------------------------------------------- Variables

    def watch_variable(self, variable: Variable) -> None:
        """Watches a Variable from its next read on."""
        self.reads.setdefault(variable, {})

    def watch_read(self, variable: Variable, value: Any) -> None:
        """Watches a value that a Variable has given."""
        if id(value) not in self.tracked:
            self.watch(value)
        self.reads.setdefault(variable, {})[id(value)] = value

    def reads_of(self, source: Any) -> list[Any]:
        """The arrays that a source stands for: itself, or the values read from a Variable."""
        return (
            list(self.reads.get(source, {}).values()) if isinstance(source, Variable) else [source]
        )

    def add_stand_in(self, stand_in: Any, of: Any) -> None:
        """Follows an array that stands in a gradient for another one that is followed."""
        self.watch(stand_in)
        self.stand_ins.setdefault(id(of), []).append(stand_in)

    def stands_for(self, sources: Sequence[Any]) -> list[Any]:
        """The sources with what has taken part in gradients in the stead of them."""
        if not self.stand_ins:
            return list(sources)
        return [each for s in sources for each in (s, *self.stand_ins.get(id(s), ()))]

    def refuse_to_stop(self, stopped: Collection[int], targets: Sequence[int]) -> None:
        """Raises NotImplementedError where a value that counts as constant has taken part in a
        gradient by a stand-in: what it was computed from has a part of its own there."""
        stand_ins = [
            self.slots[id(each)]
            for slot in (stopped if self.stand_ins else ())
            for each in self.stand_ins.get(id(self.arrays[slot]), ())
        ]
        if stand_ins and on_the_way(self.operations(), self.types(), stand_ins, targets):
            raise NotImplementedError(
                "stop_gradients has a value that comes after a function with a rule, and the ys "
                "are computed from a gradient of what that value is used for. There it is a part "
                "of the derivative of the rule's forward pass. Stop it where it is used "
                "(tracegrad.stop_gradient), or give it to the first gradients() as well"
            )

    def hand_out(self) -> None:
        """Whoever records what is done with the arrays from now on may keep them."""
        self.shown.clear()

    # ------------------------------------------------------------------------------------- the end

    def forget_arrays(self) -> None:
        """Lets go of all arrays; what was recorded, and which Variables were watched, can still be
        asked."""
        self.arrays.clear()
        self.slots.clear()
        self.tracked.clear()
        self.unfollowed.clear()
        self.rules.clear()
        self.stand_ins.clear()
        for reads in self.reads.values():
            reads.clear()
        if self.shown:
            give_back(self.shown)
            self.shown.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.forget_arrays()
        self.reads.clear()
        self.steps.clear()
        self.source_infos.clear()
        self.step = root()

    # ------------------------------------------------------------------------------ what it has

    def types(self) -> list[Any]:
        """The type of the array of each slot."""
        return [each for step in self.steps for each in step.types]

    def operations(self) -> list[Operation]:
        """The operations in the order in which they ran."""
        pairs = zip(self.steps, self.source_infos, strict=True)
        return [
            Operation(step.computation, step.args, step.results, info)
            for step, info in pairs
            if step.computation is not None
        ]


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
    places: dict[int, int] = {}

    def place(slot: int) -> int:
        return places.setdefault(slot, len(places))

    ends = tuple(map(place, sources)), tuple(map(place, targets))
    placed = [
        operation._replace(
            args=tuple(map(place, operation.args)), results=tuple(map(place, operation.results))
        )
        for operation in chosen
    ]
    own_types = tuple(types[slot] for slot in places)
    form = (ends, tuple([(o.args, o.results) for o in placed]), own_types)
    once = tuple([operation.computation.keys[0] for operation in placed])
    exact = tuple([operation.computation.keys[1] for operation in placed])
    return Block(
        tuple(placed),
        tuple(places),
        own_types,
        *ends,
        (form, once),
        (form, exact),
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
            if calls_host(params):
                end_gradients_at_host(node)
        graph.append(node, [types[slot] for slot in results])
        values.update(zip(results, node.outputs, strict=True))
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
