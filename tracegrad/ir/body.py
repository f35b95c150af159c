"""What a graph holds: inputs, constants, nodes in order, outputs; and the edits that keep it right.

So that the users of every value are always right, and a graph knows whether it was edited, its
lists and its nodes are read-only to everybody else, and each method that edits says so, to the
graphs around a region too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir.errors import GraphError
from tracegrad.ir.nodes import (
    Literal,
    Node,
    RegionNode,
    Value,
    nodes_between,
    same_type,
    set_field,
)
from tracegrad.ir.occurrence import Occurrence


class Body:
    """What `Graph` holds, and what changes it node by node."""

    def __init__(self, name: str):
        self.name = name
        self._program: Any = None
        self.closes_over = False  # of a clean one: whether one of its nodes does
        self._inputs: tuple[Value, ...] = ()
        self._outputs: tuple[Value | Literal, ...] = ()
        self._constants: dict[Value, Any] = {}
        self._nodes: list[Node] = []
        self._nodes_read: tuple[Node, ...] | None = ()  # the same for others, who may keep it
        self._owners: weakref.WeakSet[RegionNode] = weakref.WeakSet()

    # --------------------------------------------------------------------------------- building

    def add_inputs(
        self, avals: Sequence[Any], hints: Sequence[str], *, at: int | None = None
    ) -> list[Value]:
        """Takes more values, behind the others or from a position on."""
        self._edited()
        values = [Value(aval, self, hint=hint) for aval, hint in zip(avals, hints, strict=True)]
        at = len(self._inputs) if at is None else at
        self._inputs = (*self._inputs[:at], *values, *self._inputs[at:])
        return values

    def add_input(self, aval: Any, hint: str = "", *, at: int | None = None) -> Value:
        """Takes one more value."""
        (value,) = self.add_inputs([aval], [hint], at=at)
        return value

    def add_constant(self, array: Any, aval: Any, hint: str = "const") -> Value:
        """Closes over one more array."""
        self._edited()
        value = Value(aval, self, hint=hint)
        self._constants[value] = array
        return value

    def add_outputs(self, values: Sequence[Value | Literal], *, at: int | None = None) -> None:
        """Returns more values, behind the others or from a position on; for a region see `widen`.

        Raises GraphError if one is a value of another graph.
        """
        self._check_mine(*values)
        self._edited()
        at = len(self._outputs) if at is None else at
        self._outputs = (*self._outputs[:at], *values, *self._outputs[at:])

    def add_output(self, value: Value | Literal, *, at: int | None = None) -> None:
        """Returns one more value."""
        self.add_outputs([value], at=at)

    def append(self, node: Node, avals: Sequence[Any]) -> None:
        """Puts a node at the end and gives it its outputs."""
        self._edited()
        self._nodes.append(node)
        self._nodes_read = None
        self.adopt(node, avals)

    def fill(
        self, nodes: Iterable[Node], outputs: Sequence[Any], program: Any, closes_over: bool
    ) -> None:
        """Gives a new graph its nodes, adopted before, and its outputs; with the program that it
        was imported from it is clean."""
        self._set_nodes(nodes)
        self._outputs = tuple(outputs)
        self._program = program
        self.closes_over = closes_over

    def adopt(self, node: Node, avals: Sequence[Any]) -> None:
        """Gives a node its outputs, values of this graph. It stands nowhere in it yet."""
        set_field(node, "graph", self)
        set_field(node, "outputs", tuple([Value(aval, self, node) for aval in avals]))
        for value in node.inputs:
            if isinstance(value, Value):
                value._uses.append(node)
        if isinstance(node, RegionNode):
            for region in node._regions.values():
                region.add_owner(node)

    def _disown(self, node: Node) -> None:
        """Takes a node out of what it uses; it is none of the graph's any more."""
        for value in node.inputs:
            if isinstance(value, Value):
                value._uses.remove(node)
        if isinstance(node, RegionNode):
            for region in node._regions.values():
                region._owners.discard(node)
        set_field(node, "graph", None)

    def add_owner(self, node: RegionNode) -> None:
        """Notes that a node holds this graph as a region."""
        self._owners.add(node)

    # ---------------------------------------------------------------------------------- reading

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self._inputs

    @property
    def constants(self) -> Mapping[Value, Any]:
        return MappingProxyType(self._constants)

    @property
    def nodes(self) -> tuple[Node, ...]:
        if self._nodes_read is None:
            self._nodes_read = tuple(self._nodes)
        return self._nodes_read

    @property
    def outputs(self) -> tuple[Value | Literal, ...]:
        return self._outputs

    @property
    def program(self) -> Any:
        return self._program

    @property
    def effects(self) -> frozenset[Any]:
        """The side effects of all its nodes (prints, callbacks, reads and writes of Refs)."""
        return frozenset().union(*(node.effects for node in self.nodes))

    @property
    def in_avals(self) -> list[Any]:
        return [value.aval for value in self._inputs]

    @property
    def out_avals(self) -> list[Any]:
        return [value.aval for value in self._outputs]

    @property
    def is_clean(self) -> bool:
        """Whether neither it nor any region below it was edited since it was imported."""
        return self._program is not None

    @property
    def is_shared(self) -> bool:
        """Whether more than one place enters it, so that an edit here would reach all of them."""
        slots = (region for owner in self._owners for region in owner._regions.values())
        return sum(region is self for region in slots) > 1

    def enclosing(self) -> list[RegionNode]:
        """The nodes around this graph, if it is a region, from the inside out.

        Of a shared region, those around one of the places that enter it.
        """
        node = next(iter(self._owners), None)
        return [] if node is None or node.graph is None else [node, *node.graph.enclosing()]

    # ---------------------------------------------------------------------------------- editing

    def _edited(self, *, everywhere: bool = False) -> None:
        """Comes before each edit. Raises GraphError if that would reach other calls too, unless it
        is meant to be seen everywhere."""
        if self._program is None and not self._owners:  # as while it is built
            return
        if not everywhere:
            self._refuse_shared()
        self._forget_program()

    def _refuse_shared(self) -> None:
        around = [node.graph for node in self.enclosing()]
        if self.is_shared or any(graph is not None and graph.is_shared for graph in around):
            raise GraphError(
                f"{self.name} is entered from more than one place, in this graph or a copy of it, "
                "and an edit here would reach all of them: edit where `graph.own(occurrence)` "
                "leads, which only that occurrence enters"
            )

    def _forget_program(self) -> None:
        """Here and in the graphs around it, whose programs hold this one's."""
        if self._program is None:  # then so it is in those
            return
        self._program = None
        for owner in tuple(self._owners):
            if owner.graph is not None:
                owner.graph._forget_program()

    def _set_nodes(self, nodes: Iterable[Node]) -> None:
        self._nodes = list(nodes)
        self._nodes_read = None

    def _tell_owners(self, effects: frozenset[Any]) -> None:
        """A call has the effects of its region: without them it could be erased or moved."""
        if not effects:
            return
        for owner in self._owners:
            set_field(owner, "effects", owner.effects | effects)
            if owner.graph is not None:
                owner.graph._tell_owners(effects)

    def replace_uses(
        self,
        old: Value,
        new: Value | Literal,
        where: Callable[[Node], object] = lambda node: True,
        *,
        outputs: bool = True,
    ) -> None:
        """Makes the users of `old` take `new` instead, all but those that compute `new` from it.

        Args:
          old: a value of this graph.
          new: a value of this graph of the same type, defined before those users, or a literal.
          where: only the users for which it is true.
          outputs: whether the graph's own outputs follow too.

        Raises GraphError if the types differ or a value is of another graph.
        """
        self._check_mine(old, new)
        if not same_type(old.aval, new.aval):
            raise GraphError(
                f"cannot replace {old!r} by {new!r} in {self.name}: the types differ "
                f"({_jax.type_text(old.aval)}, {_jax.type_text(new.aval)})"
            )
        self._edited()
        between = nodes_between(old, new)
        for user in old.users:
            if user not in between and where(user):
                inputs = tuple(new if v is old else v for v in user.inputs)
                self.set_inputs(user, inputs)
        if outputs:
            self._outputs = tuple(new if v is old else v for v in self._outputs)

    def set_inputs(self, node: Node, inputs: Sequence[Value | Literal]) -> None:
        """Gives a node other inputs.

        Raises GraphError if one is a value of another graph. That the node takes them, `verify`
        checks.
        """
        self._check_node(node)
        self._check_mine(*inputs)
        self._edited()
        for value in node.inputs:
            if isinstance(value, Value):
                value._uses.remove(node)
        set_field(node, "inputs", tuple(inputs))
        for value in node.inputs:
            if isinstance(value, Value):
                value._uses.append(node)

    def set_outputs(self, outputs: Sequence[Value | Literal]) -> None:
        """Gives the graph other outputs: as many, of the same types.

        Raises GraphError if they differ in number or type.
        """
        if len(outputs) != len(self._outputs):
            raise GraphError(
                f"{self.name} returns {len(self._outputs)} values, {len(outputs)} were given"
            )
        self._check_mine(*outputs)
        for new, old in zip(outputs, self._outputs, strict=True):
            if not same_type(new.aval, old.aval):
                raise GraphError(f"{self.name} returns {old!r}; {new!r} is of another type")
        self._edited()
        self._outputs = tuple(outputs)

    def reorder_inputs(self, inputs: Sequence[Value]) -> None:
        """Takes the same inputs in another order.

        Raises GraphError if they are not the same.
        """
        if len(inputs) != len(self._inputs) or set(inputs) != set(self._inputs):
            raise GraphError(f"expected the inputs of {self.name} in any order; got {inputs!r}")
        self._edited()
        self._inputs = tuple(inputs)

    def set_constant(self, value: Value, array: Any, *, everywhere: bool = False) -> None:
        """Closes over another array of the same type in the place of one.

        `everywhere`: in a region that several places enter, for all of them.

        Raises GraphError if `value` is no constant of this graph, or the types differ.
        """
        if value not in self._constants:
            raise GraphError(f"{value!r} is not a constant of {self.name}")
        if not same_type(value.aval, jax.typeof(array)):
            raise GraphError(
                f"cannot replace the constant {value!r} of {self.name} by "
                f"{_jax.type_text(jax.typeof(array))}: the types differ"
            )
        self._edited(everywhere=everywhere)
        self._constants[value] = array

    def set_params(
        self,
        node: Node,
        params: Mapping[str, Any],
        *,
        primitive: Any = None,
        everywhere: bool = False,
    ) -> None:
        """Gives a node other parameters, or makes it another operation: one without regions, or
        another kind of loop.

        That it takes its inputs and gives its outputs still, `verify` checks.

        Args:
          node: a node of this graph. Its regions stay, whatever programs `params` holds for them.
          params: all of them.
          primitive: of the operation that it becomes; None: it stays the same.
          everywhere: in a region that several places enter, for all of them.
        """
        self._check_node(node)
        if isinstance(node, RegionNode) and primitive not in (None, *_jax.WHILES):
            raise GraphError(f"{node!r} has regions: insert another operation, and replace_uses")
        self._edited(everywhere=everywhere)
        set_field(node, "params", MappingProxyType(dict(params)))
        if primitive is not None:
            set_field(node, "primitive", primitive)
            set_field(node, "op", primitive.name)
        if isinstance(node, RegionNode):
            set_field(node, "replaced", frozenset(node._regions))

    def erase(self, *nodes: Node, with_effects: bool = False, everywhere: bool = False) -> None:
        """Takes nodes out.

        Args:
          nodes: nodes of this graph.
          with_effects: even if they have effects.
          everywhere: in a region that several places enter, for all of them.

        Raises GraphError if something else uses their outputs, or if they have effects (which would
        be dropped in silence).
        """
        gone, returned = dict.fromkeys(nodes), {*self._outputs}
        for node in gone:
            self._check_node(node)
            users = [user for v in node.outputs for user in v.users if user not in gone]
            if users or not returned.isdisjoint(node.outputs):
                name = users[0].name if users else "the graph's outputs"
                raise GraphError(f"cannot erase {Occurrence((), node)}: {name} still uses it")
            if node.effects and not with_effects:
                raise GraphError(
                    f"cannot erase {Occurrence((), node)}: it has effects {set(node.effects)}, "
                    "which an edit must not drop"
                )
        self._edited(everywhere=everywhere)
        self._set_nodes(n for n in self._nodes if n not in gone)
        for node in gone:
            self._disown(node)

    def let_go(self) -> None:
        """Gives up all that it and the regions below it hold: arrays, most of all, which would live
        on until Python looks for cycles."""
        if self._program is None and not self._constants and not self._nodes:
            return
        nodes, self._program, self._nodes, self._nodes_read = self._nodes, None, [], ()
        self._constants.clear()
        for node in nodes:
            node.let_go()

    def _check_node(self, node: Node) -> None:
        if node.graph is not self:
            raise GraphError(f"{node!r} is not a node of {self.name} (any more)")

    def _check_mine(self, *values: Value | Literal) -> None:
        for value in values:
            if isinstance(value, Value) and value.graph is not self:
                raise GraphError(
                    f"{value!r} is not a value of this graph, {self.name}, but of another one "
                    f"({value.graph.name}): a region sees only its own inputs and what it computes"
                )


def leave(node: RegionNode, region: Body) -> None:
    """Takes a node from the owners of what it has given up, unless that is another region of it."""
    if all(other is not region for other in node._regions.values()):
        region._owners.discard(node)
