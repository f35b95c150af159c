"""A traced program: inputs, constants, nodes in order, outputs; and how it is read and edited.

Graphs nest: a node with regions holds a graph for each. A region may be shared by many calls (a
jitted function called forty times is one region), and by a graph and its copies. Reading walks
through sharing; editing goes through `Graph.own`, which copies the regions on the way to a node
where somebody else uses them too.

A graph that was not edited keeps the JAX program that it was imported from, and is lowered to
exactly that. So the graph alone changes what it holds: its lists and its nodes are read-only to
everybody else, and each method that edits says so, to the graphs around a region too.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import match, text, verification
from tracegrad.ir.engine import engine
from tracegrad.ir.errors import GraphError
from tracegrad.ir.grouping import entering, leaving, parted
from tracegrad.ir.nodes import (
    Call,
    CustomGradient,
    Literal,
    Node,
    Recompute,
    RegionNode,
    Source,
    Value,
    set_field,
)
from tracegrad.ir.occurrence import Matches, Occurrence, Path
from tracegrad.ir.selector import Selector


@dataclass(frozen=True)
class Tap:
    """An input whose gradient is the one that arrives at a place of the program.

    `name` is what the user calls it, `match` the name of the match at which it is, and `place` that
    of the one value of the match; each different among the taps of a name.
    """

    name: str
    match: str
    place: str
    aval: Any


# Of the nodes of one graph, each with every path of calls to it: a walk over as many takes minutes.
_MOST = 20_000_000


class Graph:
    """A program over JAX's primitives.

    Attributes:
      name: the traced function's name.
      inputs: one `Value` per flat input.
      constants: the arrays (or tracers) that the function closed over, by their `Value`.
      nodes: in the order of execution.
      outputs: one `Value` or `Literal` per flat output.
      in_tree, out_tree: the pytrees of ``(args, kwargs)`` and of the result; None for regions.
      signature: the traced function's, static parameters left out; None where it has none.
      variables: the Variables that the function reads: the last inputs are their values.
      taps: the taps that are inputs of it, behind all others; see `tracegrad.rules.tap_gradient`.
      assigned: the Variables that it assigns: the last outputs are their new values. Not counted
        in `out_tree`, as `variables` are not in `in_tree`.
      program: the JAX program that it was imported from; None once it, or a region below it, was
        edited.
      function_source: the traced function and its line, ``loss at /home/ada/train.py:12``.

    `print(graph)` is meant to be read. See `tracegrad.graph` for an example.
    """

    def __init__(
        self,
        name: str,
        *,
        function_source: str = "",
        in_tree: Any = None,
        out_tree: Any = None,
    ):
        self.name = name
        self.function_source = function_source
        self.in_tree = in_tree
        self.out_tree = out_tree
        self.signature: inspect.Signature | None = None
        self.variables: tuple[Any, ...] = ()
        self.assigned: tuple[Any, ...] = ()
        self.taps: tuple[Tap, ...] = ()
        self._program: Any = None
        self._inputs: tuple[Value, ...] = ()
        self._outputs: tuple[Value | Literal, ...] = ()
        self._constants: dict[Value, Any] = {}
        self._nodes: list[Node] = []
        self._nodes_read: tuple[Node, ...] | None = ()  # the same for others, who may keep it
        self._names: dict[str, int] = {}  # base name -> how many times it was taken again
        self._owners: weakref.WeakSet[RegionNode] = weakref.WeakSet()
        # For a copy: the node of the original -> its node here, so that occurrences stay good.
        self._copies: weakref.WeakKeyDictionary[Node, Node] = weakref.WeakKeyDictionary()

    # ------------------------------------------------------------------------------- building

    def add_input(self, aval: Any, hint: str = "", *, at: int | None = None) -> Value:
        """Takes one more value, behind the others or at a position."""
        self._edited()
        value = Value(aval, self, hint=hint)
        at = len(self._inputs) if at is None else at
        self._inputs = (*self._inputs[:at], value, *self._inputs[at:])
        return value

    def add_constant(self, array: Any, aval: Any, hint: str = "const") -> Value:
        """Closes over one more array."""
        self._edited()
        value = Value(aval, self, hint=hint)
        self._constants[value] = array
        return value

    def add_output(self, value: Value | Literal, *, at: int | None = None) -> None:
        """Returns one more value, behind the others or at a position; for a region see `widen`."""
        if isinstance(value, Value):
            self._check_mine(value)
        self._edited()
        at = len(self._outputs) if at is None else at
        self._outputs = (*self._outputs[:at], value, *self._outputs[at:])

    def append(self, node: Node, avals: Sequence[Any]) -> Node:
        """Puts a node at the end and gives it its outputs."""
        self._edited()
        self._adopt(node, avals)
        self._nodes.append(node)
        self._nodes_read = None
        return node

    def seal(self, program: Any) -> None:
        """Notes the program that it was imported from: with that it is clean."""
        self._program = program

    def _adopt(self, node: Node, avals: Sequence[Any]) -> None:
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

    # -------------------------------------------------------------------------------- reading

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
        return [value.aval for value in self.inputs]

    @property
    def out_avals(self) -> list[Any]:
        return [value.aval for value in self.outputs]

    @property
    def is_clean(self) -> bool:
        """Whether neither it nor any region below it was edited since it was imported."""
        return self._program is not None

    @property
    def recomputes(self) -> bool:
        """Whether it or a region below it has a `Recompute`."""
        return any(isinstance(node, Recompute) for g in self.regions_below for node in g.nodes)

    @property
    def calls_host(self) -> bool:
        """Whether it, or a region below it, runs code that XLA did not compile: callbacks into
        Python, prints, foreign functions. That may fail, after the program was started, and may
        look at whatever the process holds."""
        return any(_jax.calls_host(node.op) for g in self.regions_below for node in g.nodes)

    @property
    def regions_below(self) -> list[Graph]:
        """This graph and the regions at any depth, each once."""
        return list(self._below({}))

    def _below(self, seen: dict[Graph, None]) -> Iterable[Graph]:
        if self not in seen:
            seen[self] = None
            for node in self.nodes:
                for region in node.regions.values():
                    region._below(seen)
        return seen

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

    def walk(self) -> Iterator[Occurrence]:
        """Every node at any depth with the calls that lead to it, in the order of execution.

        A region that is entered from several places comes once for each. Where such regions are
        nested in one another that number grows exponentially: raises GraphError for more nodes
        than anybody could look at. `graph.regions_below` has each region once.
        """
        total = self._total({})
        if total > _MOST:
            raise GraphError(
                f"{self.name} has {total:.1e} nodes, each counted with every path of calls to it: "
                "functions that are called several times call others several times, and so on. "
                "Look at one of its regions by itself: node.regions, or graph.regions_below"
            )
        return self._walk(())

    def _total(self, known: dict[Graph, int]) -> int:
        """The number of nodes that `walk` gives."""
        if self not in known:
            below = (region for node in self.nodes for region in node.regions.values())
            known[self] = len(self.nodes) + sum(region._total(known) for region in below)
        return known[self]

    def _walk(self, path: Path) -> Iterator[Occurrence]:
        for node in self.nodes:
            yield Occurrence(path, node)
            for name, region in node.regions.items():
                yield from region._walk((*path, (node, name)))

    def find(self, wanted: Selector | Callable[[Occurrence], object]) -> Matches:
        """The matches of a selector (see `tracegrad.match`), in the order of `walk`.

        Args:
          wanted: a selector, or a predicate on each `Occurrence`.

        Returns:
          A list that prints one match a line, with its scope and its source line.
        """
        selector = wanted if isinstance(wanted, Selector) else match.where(wanted)
        return Matches(selector.look(self).matches)

    def name_values(self) -> None:
        """Names every value that has no name yet: from the argument, else from the operation."""
        for value in (*self.inputs, *self.constants):
            self._name(value, value.hint or "arg")
        for node in self.nodes:
            for value in node.outputs:
                self._name(value, value.hint or node.name)

    def _name(self, value: Value, hint: str) -> None:
        if value._name is not None:
            return
        # The array of a flax.nnx variable: `model.blocks[0].kernel.value`.
        base = re.sub(r"\W+", "_", hint.removesuffix(".value")).strip("_") or "value"
        if base[0].isdigit():
            base = f"v{base}"
        # A name that a reader can type, as torch.fx has it.
        name = f"{base}_" if keyword.iskeyword(base) or hasattr(builtins, base) else base
        while name in self._names:  # `x_1` may be an argument's own name
            self._names[base] = self._names.get(base, 0) + 1
            name = f"{base}_{self._names[base]}"
        self._names.setdefault(name, 0)
        value._name = name

    def __str__(self) -> str:
        return text.format_graph(self)

    def __repr__(self) -> str:
        total = self._total({})
        types = ", ".join(map(_jax.type_text, self.in_avals))
        results = ", ".join(map(_jax.type_text, self.out_avals))
        return f"<Graph {self.name}({types}) -> ({results}), {total} nodes>"

    def verify(self) -> None:
        """Checks that this is a program: every value defined once and before its uses, user lists
        right, and every node's types as JAX's own typing rules give them, at any depth.

        Raises GraphError naming the node and its source line.
        """
        verification.verify(self)

    def to_callable(self) -> Callable[..., Any]:
        """A function with the traced function's own signature (pytrees, keyword arguments).

        It runs under every JAX transformation. It reads the Variables among its inputs, and
        assigns those among its outputs, whenever it is called. A graph that is a region takes and
        returns flat lists.
        """
        return engine.to_callable(self)

    # -------------------------------------------------------------------------------- copying

    def copy(self) -> Graph:
        """A graph of its own with the same nodes; the regions below are shared until edited.

        Occurrences found in the original are good in the copy, through `own`.
        """
        new = Graph(
            self.name,
            function_source=self.function_source,
            in_tree=self.in_tree,
            out_tree=self.out_tree,
        )
        new.signature = self.signature
        new.variables, new.assigned, new.taps = self.variables, self.assigned, self.taps
        values: dict[Value, Value | Literal] = {
            value: new.add_input(value.aval, value.hint) for value in self.inputs
        }
        new._set_nodes(new._splice(self, values))
        new._outputs = tuple(values[v] if isinstance(v, Value) else v for v in self.outputs)
        new.seal(self._program)
        copies = dict(zip(self.nodes, new.nodes, strict=True))
        new._copies.update(copies)
        new._copies.update((old, copies[now]) for old, now in self._copies.items() if now in copies)
        return new

    def _splice(
        self, graph: Graph, values: dict[Value, Value | Literal], source: Source | None = None
    ) -> list[Node]:
        """Copies the nodes of another graph for this one, without putting them anywhere.

        `values` holds what stands for its inputs, and grows by what every other value has become.
        `source`: where they came from; None: each as it is.
        """
        for value, array in graph.constants.items():
            values[value] = self.add_constant(array, value.aval, value.hint)
        nodes = []
        for node in graph.nodes:
            new = _copy_node(node, [values[v] if isinstance(v, Value) else v for v in node.inputs])
            if source is not None:
                set_field(new, "source", source)
            self._adopt(new, [value.aval for value in node.outputs])
            for old_value, new_value in zip(node.outputs, new.outputs, strict=True):
                new_value.hint = old_value.hint
                values[old_value] = new_value
            nodes.append(new)
        return nodes

    def own(self, occurrence: Occurrence) -> Occurrence:
        """The occurrence in regions that nobody else enters: copies those on its path that are
        shared, and the primal and faces of a custom gradient. Edit `result.graph` around
        `result.node` then.

        Takes occurrences found before other edits, or in the graph that this one was copied from.
        Raises GraphError if the node was erased or is of another graph.
        """
        graph: Graph = self
        path: list[tuple[Node, str]] = []
        for step, name in occurrence.path:
            node = graph.node_here(step)
            assert isinstance(node, RegionNode)
            path.append((node, name))
            graph = _own_region(node, name)
        here = graph.node_here(occurrence.node)
        if isinstance(here, CustomGradient):  # its edit concerns all of them
            for name in tuple(here._regions):
                _own_region(here, name)
        return Occurrence(tuple(path), here)

    def node_here(self, node: Node) -> Node:
        """What a node of the graph that this one was copied from has become.

        Raises GraphError if it was erased or is of another graph.
        """
        here = node if node.graph is self else self._copies.get(node)
        if here is None or here.graph is not self:
            raise GraphError(f"{node!r} is not a node of {self.name} (any more)")
        return here

    # -------------------------------------------------------------------------------- editing

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
        self._check_mine(old)
        if isinstance(new, Value):
            self._check_mine(new)
        if not _same_type(old.aval, new.aval):
            raise GraphError(
                f"cannot replace {old!r} by {new!r} in {self.name}: the types differ "
                f"({_jax.type_text(old.aval)}, {_jax.type_text(new.aval)})"
            )
        self._edited()
        between = _nodes_between(old, new)
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
        for value in inputs:
            if isinstance(value, Value):
                self._check_mine(value)
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
        if len(outputs) != len(self.outputs):
            raise GraphError(
                f"{self.name} returns {len(self.outputs)} values, {len(outputs)} were given"
            )
        for new, old in zip(outputs, self.outputs, strict=True):
            if isinstance(new, Value):
                self._check_mine(new)
            if not _same_type(new.aval, old.aval):
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
        if not _same_type(value.aval, jax.typeof(array)):
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
        """Gives a node other parameters, or makes it another operation without regions.

        That it takes its inputs and gives its outputs still, `verify` checks.

        Args:
          node: a node of this graph. Its regions stay, whatever programs `params` holds for them.
          params: all of them.
          primitive: of the operation that it becomes; None: it stays the same.
          everywhere: in a region that several places enter, for all of them.
        """
        self._check_node(node)
        if primitive is not None and isinstance(node, RegionNode):
            raise GraphError(f"{node!r} has regions: insert another operation, and replace_uses")
        self._edited(everywhere=everywhere)
        set_field(node, "params", MappingProxyType(dict(params)))
        if primitive is not None:
            set_field(node, "primitive", primitive)
        if isinstance(node, RegionNode):
            set_field(node, "replaced", frozenset(node._regions))

    def insert(
        self,
        program: Graph | Callable[..., Any],
        inputs: Sequence[Value | Literal],
        *,
        before: Node | None = None,
        after: Node | None = None,
    ) -> list[Value | Literal]:
        """Writes the nodes of another program into this one.

        Args:
          program: a function of as many arrays, which is traced for this place (inside a
            `jax.shard_map`, in its mesh), or a `Graph`, which is copied.
          inputs: one value of this graph (or literal) for each of its inputs.
          before, after: the node of this graph beside which the new ones stand; at most one of
            them. Neither: at the end.

        Returns:
          The values that the outputs of `program` have become; nothing uses them yet: see
          `replace_uses`.

        Raises GraphError for a wrong number or type of inputs.

        >>> import jax.numpy as jnp, tracegrad as tg
        >>> g = tg.graph(lambda x: jnp.sin(x) + 1)(0.5)
        >>> sin = g.nodes[0]
        >>> (clipped,) = g.insert(lambda v: jnp.minimum(v, 0.25), sin.outputs, after=sin)
        >>> g.replace_uses(sin.outputs[0], clipped)
        >>> float(g.to_callable()(0.5))
        1.25
        """
        if before is not None and after is not None:
            raise ValueError("give `before` or `after`, not both")
        beside = before or after
        if not isinstance(program, Graph):
            program = engine.trace_at(program, [value.aval for value in inputs], self)
        if len(inputs) != len(program.inputs):
            raise GraphError(
                f"{program.name} takes {len(program.inputs)} inputs, {len(inputs)} were given"
            )
        for given, expected in zip(inputs, program.inputs, strict=True):
            if isinstance(given, Value):
                self._check_mine(given)
            if not _same_type(given.aval, expected.aval):
                raise GraphError(f"{program.name} takes {expected!r}, not {given!r}")
        index = len(self._nodes)
        if beside is not None:
            self._check_node(beside)
            index = self._nodes.index(beside) + (after is not None)
        values: dict[Value, Value | Literal] = dict(zip(program.inputs, inputs, strict=True))
        self._edited()
        # They stand for the place where they are put.
        new = self._splice(program, values, beside.source if beside is not None else None)
        self._set_nodes([*self._nodes[:index], *new, *self._nodes[index:]])
        self._tell_owners(frozenset().union(*(node.effects for node in new)))
        return [values[v] if isinstance(v, Value) else v for v in program.outputs]

    def _tell_owners(self, effects: frozenset[Any]) -> None:
        """A call has the effects of its region: without them it could be erased or moved."""
        if not effects:
            return
        for owner in self._owners:
            set_field(owner, "effects", owner.effects | effects)
            if owner.graph is not None:
                owner.graph._tell_owners(effects)

    def widen(
        self,
        node: Node,
        regions: Mapping[str, Graph],
        inputs: Sequence[Value],
        avals: Sequence[Any],
    ) -> Node:
        """Replaces a call by one with wider regions: of more inputs or outputs, behind the others.

        Args:
          node: a node with regions, of this graph.
          regions: all of its regions, by name.
          inputs: what it is given for their further inputs.
          avals: the types of its further outputs.

        Returns:
          The new node.
        """
        self._check_node(node)
        assert isinstance(node, RegionNode)
        for value in inputs:
            self._check_mine(value)
        self._edited()
        in_order = {name: regions[name] for name in node.regions}  # that of branches has a meaning
        wide = _copy_node(node, (*node.inputs, *inputs), is_new=True, _regions=in_order)
        self._adopt(wide, [*(value.aval for value in node.outputs), *avals])
        for old, new in zip(node.outputs, wide.outputs, strict=False):
            new.hint = old.hint
            self.replace_uses(old, new)
        self._set_nodes(wide if n is node else n for n in self._nodes)
        self._disown(node)
        return wide

    def set_region(self, node: Node, name: str, region: Graph) -> None:
        """Gives a node another region: of as many inputs and outputs, of the same types."""
        self._check_node(node)
        assert isinstance(node, RegionNode)
        old = node.region(name)
        for what, ours, theirs in (
            ("takes", old.in_avals, region.in_avals),
            ("returns", old.out_avals, region.out_avals),
        ):
            same = len(ours) == len(theirs) and all(map(_same_type, ours, theirs))
            if not same:
                raise GraphError(f"{region!r} {what} other values than {old!r}")
        self._edited()
        before = frozenset().union(*(r.effects for r in node._regions.values()))
        node._regions[name] = region
        after = frozenset().union(*(r.effects for r in node._regions.values()))
        set_field(node, "effects", (node.effects - before) | after)
        set_field(node, "replaced", node.replaced | {name})
        region.add_owner(node)
        _leave(node, old)
        self._tell_owners(after)

    def erase(self, node: Node, *, with_effects: bool = False, everywhere: bool = False) -> None:
        """Takes a node out.

        Args:
          node: a node of this graph.
          with_effects: even if it has effects.
          everywhere: in a region that several places enter, for all of them.

        Raises GraphError if something uses its outputs, or if it has effects (which would be
        dropped in silence).
        """
        self._check_node(node)
        outputs = set(node.outputs)
        users = [user for value in node.outputs for user in value.users]
        if users or outputs.intersection(v for v in self.outputs if isinstance(v, Value)):
            name = users[0].name if users else "the graph's outputs"
            raise GraphError(f"cannot erase {Occurrence((), node)}: {name} still uses it")
        if node.effects and not with_effects:
            raise GraphError(
                f"cannot erase {Occurrence((), node)}: it has effects {set(node.effects)}, which "
                "an edit must not drop"
            )
        self._edited(everywhere=everywhere)
        self._set_nodes(n for n in self._nodes if n is not node)
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

    def group(
        self,
        nodes: Iterable[Node],
        *,
        recompute: bool = False,
        policy: Callable[..., Any] | None = None,
        name: str = "group",
    ) -> Call | Recompute:
        """Moves nodes of this graph into a region of their own.

        Args:
          nodes: a convex set: no path leads from one of them out and back to another.
          recompute: make a `Recompute` of them (with `policy`), else a jitted `Call`.
          name: the region's name.

        Returns:
          The new node, which stands where its inputs are defined and before its users.

        Raises GraphError if the set is empty or not convex, or if grouping would change the order
        of effects.
        """
        chosen = set(nodes)
        for node in chosen:
            self._check_node(node)
        if not chosen:
            raise GraphError(f"no nodes to group in {self.name}")
        places = [i for i, node in enumerate(self._nodes) if node in chosen]
        stretch = slice(places[0], places[-1] + 1)
        members, before, after = parted(self._nodes[stretch], chosen)
        inputs, outputs = entering(members), leaving(self, members)
        region = self._region_of(members, inputs, outputs, name)
        kind = Recompute if recompute else Call
        grouped = kind(
            primitive=_jax.REMAT if recompute else _jax.JIT,
            params={"policy": policy} if recompute else {"name": name},
            inputs=tuple(inputs),
            source=members[0].source,
            effects=frozenset().union(*(node.effects for node in members)),
            is_new=True,
            _regions={"jaxpr": region},
        )
        self._edited()
        self._adopt(grouped, [v.aval for v in outputs])
        for old, new in zip(outputs, grouped.outputs, strict=True):
            new.hint = old.hint or old.name
            for user in old.users:
                if user not in chosen:
                    self.set_inputs(user, [new if v is old else v for v in user.inputs])
            self._outputs = tuple(new if v is old else v for v in self._outputs)
        for node in members:
            self._disown(node)
        self._set_nodes(
            [*self._nodes[: stretch.start], *before, grouped, *after, *self._nodes[stretch.stop :]]
        )
        return grouped

    def _region_of(
        self, members: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value], name: str
    ) -> Graph:
        """A graph of copies of some nodes."""
        region = Graph(name, function_source=self.function_source)
        values: dict[Value, Value | Literal] = {
            value: region.add_input(value.aval, value.name) for value in inputs
        }
        for node in members:
            new = _copy_node(node, [values[v] if isinstance(v, Value) else v for v in node.inputs])
            region.append(new, [v.aval for v in node.outputs])
            values.update(zip(node.outputs, new.outputs, strict=True))
        region._outputs = tuple(values[v] for v in outputs)
        return region

    def _check_node(self, node: Node) -> None:
        if node.graph is not self:
            raise GraphError(f"{node!r} is not a node of {self.name} (any more)")

    def _check_mine(self, value: Value) -> None:
        if value.graph is not self:
            raise GraphError(
                f"{value!r} is not a value of this graph, {self.name}, but of another one "
                f"({value.graph.name}): a region sees only its own inputs and what it computes"
            )


def _own_region(node: RegionNode, name: str) -> Graph:
    region = node.region(name)
    if region.is_shared:  # the copy computes the same, so this is no edit yet
        copy = node._regions[name] = region.copy()
        copy.add_owner(node)
        _leave(node, region)
        return copy
    return region


def _leave(node: RegionNode, region: Graph) -> None:
    """Takes a node from the owners of what it has given up, unless that is another region of it."""
    if all(other is not region for other in node._regions.values()):
        region._owners.discard(node)


def _nodes_between(old: Value, new: Value | Literal) -> set[Node]:
    """The nodes by which `new` is computed, back to `old`."""
    found: set[Node] = set()
    pending = [new]
    while pending:
        value = pending.pop()
        producer = value.producer if isinstance(value, Value) and value is not old else None
        if producer is not None and producer not in found:
            found.add(producer)
            pending.extend(producer.inputs)
    return found


def _copy_node(node: Node, inputs: Sequence[Value | Literal], **changes: Any) -> Node:
    common: dict[str, Any] = {
        "primitive": node.primitive,
        "params": node.params,
        "inputs": tuple(inputs),
        "source": node.source,
        "effects": node.effects,
        "is_new": node.is_new,
    }
    if isinstance(node, RegionNode):
        common |= {"_regions": dict(node._regions), "replaced": node.replaced}
    if isinstance(node, CustomGradient):
        common["trace_face"] = node.trace_face
        common["_returned"] = node._returned
    return type(node)(**(common | changes))


def _same_type(a: Any, b: Any) -> bool:
    """Whether one value can stand for the other: of one shape and dtype.

    Weak types and the mesh axes over which a value varies follow from where it stands, and
    lowering works them out anew.
    """
    if hasattr(a, "shape") and hasattr(b, "shape"):
        return bool(type(a) is type(b) and (a.shape, a.dtype) == (b.shape, b.dtype))
    return bool(a == b)
