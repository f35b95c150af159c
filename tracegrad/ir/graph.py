"""A traced program: inputs, constants, nodes in order, outputs; and how it is read and edited.

Graphs nest: a node with regions holds a graph for each. A region may be shared by many calls (a
jitted function called forty times is one region), and by a graph and its copies. Reading walks
through sharing; editing goes through `Graph.own`, which copies the regions on the way to a node
where somebody else uses them too.

A graph that was not edited keeps the JAX program that it was imported from, and is lowered to
exactly that; how it knows, see `ir.body`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.ir import copying, grouping, match, text, verification, walking
from tracegrad.ir.body import Body, leave
from tracegrad.ir.engine import Insertable, engine
from tracegrad.ir.errors import GraphError
from tracegrad.ir.nodes import (
    Call,
    Literal,
    Node,
    Recompute,
    RegionNode,
    Tap,
    Value,
    copied,
    same_type,
    set_field,
)
from tracegrad.ir.occurrence import Matches, Occurrence
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import some

_TYPES = 8  # that a graph's `repr` lists


class Graph(Body):
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
      settings: attributes of these modules that are no data, and that the function changes.
      updates: which of the inputs that are arrays of modules of flax.nnx, counted by themselves,
        the function gives new values: the very last outputs. Not counted in `out_tree` either.
      differentiated: of each input whether somebody takes the gradient with respect to it; ()
        where that is not known.
      loses: paths of what the function changes in a state that it is given, and nobody would see.
      program: the JAX program that it was imported from; None once it, or a region below it, was
        edited.
      function_source: the traced function and its line, ``loss at /home/ada/train.py:12``.

    `print(graph)` is meant to be read.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> graph = tg.graph(lambda x: jnp.sin(x) * 2)(1.0)
    >>> [node.op for node in graph.nodes], graph.inputs, graph.is_clean
    (['sin', 'mul'], (x: ~f32[],), True)
    """

    def __init__(self, name: str, *, function_source: str = ""):
        super().__init__(name)
        self.function_source = function_source
        self.in_tree: Any = None
        self.out_tree: Any = None
        self.signature: inspect.Signature | None = None
        self.variables: tuple[Any, ...] = ()
        self.assigned: tuple[Any, ...] = ()
        self.taps: tuple[Tap, ...] = ()
        self.updates: tuple[int, ...] = ()
        self.settings: tuple[Any, ...] = ()
        self.differentiated: tuple[bool, ...] = ()
        self.loses: tuple[str, ...] = ()
        self.surroundings: dict[str, weakref.ref[Any]] = {}
        self._names: dict[str, int] = {}  # base name -> how many times it was taken again
        # For a copy: the node of the original -> its node here, so that occurrences stay good.
        self._copies: weakref.WeakKeyDictionary[Node, Node] = weakref.WeakKeyDictionary()

    # ---------------------------------------------------------------------------------- reading

    @property
    def recomputes(self) -> bool:
        """Whether it or a region below it has a `Recompute`."""
        return _jax.REMAT.name in self.operations

    @property
    def result_count(self) -> int:
        """How many of the outputs are the result: those before new values of what is assigned."""
        return len(self._outputs) - len(self.assigned) - len(self.updates)

    @property
    def calls_host(self) -> bool:
        """Whether it, or a region below it, runs code that XLA did not compile: callbacks into
        Python, prints, foreign functions. That may fail, after the program was started, and may
        look at whatever the process holds."""
        return any(map(_jax.calls_host, self.operations))

    @property
    def operations(self) -> set[str]:
        """The names of the primitives of all nodes in it and in the regions below it."""
        return {node.op for region in walking.regions_below(self) for node in region._nodes}

    @property
    def regions_below(self) -> list[Graph]:
        """This graph and the regions at any depth, each once."""
        return walking.regions_below(self)

    def walk(self) -> Iterator[Occurrence]:
        """Every node at any depth with the calls that lead to it, in the order of execution.

        A region that is entered from several places comes once for each. Where such regions are
        nested in one another that number grows exponentially: raises GraphError for more nodes
        than anybody could look at. `graph.regions_below` has each region once.
        """
        return walking.walk(self)

    def find(self, wanted: Selector | Callable[[Occurrence], object]) -> Matches:
        """The matches of a selector (see `tracegrad.match`), in the order of `walk`.

        Args:
          wanted: a selector, or a predicate on each `Occurrence`.

        Returns:
          A list that prints one match a line, with its scope and its source line.
        """
        selector = wanted if isinstance(wanted, Selector) else match.where(wanted)
        return Matches(selector.look(self).matches)

    def name_values(self, *erased: Value) -> None:
        """Names every value that has no name yet, and those of nodes that were erased: from the
        argument, else from the operation."""
        text.name_values(self, erased)

    def __str__(self) -> str:
        return text.format_graph(self)

    def __repr__(self) -> str:
        total = walking.count(self, {})
        types = some([*map(_jax.type_text, self.in_avals)], _TYPES)
        results = some([*map(_jax.type_text, self.out_avals)], _TYPES)
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

        What it computes is the graph as that is when it is called. JAX keeps what it has traced:
        a call under `jax.jit` that was compiled before an edit does not see the edit, so make a
        new function after one, or take that of a `copy` for one that no edit reaches.
        """
        return engine.to_callable(self)

    # ---------------------------------------------------------------------------------- copying

    def copy(self) -> Graph:
        """A graph of its own with the same nodes; the regions below are shared until edited.

        Occurrences found in the original are good in the copy, through `own`.
        """
        return copying.copy(self)

    __copy__ = copy

    def __deepcopy__(self, memo: object) -> Graph:
        return self.copy()

    def written_into(
        self, place: Graph, inputs: Sequence[Value | Literal], beside: Node | None
    ) -> tuple[list[Node], list[Value | Literal]]:
        """Its nodes as nodes of another graph; see `tracegrad.ir.copying`."""
        return copying.written(self, place, inputs, beside)

    def own(self, occurrence: Occurrence) -> Occurrence:
        """The occurrence in regions that nobody else enters: copies those on its path that are
        shared, and the primal and faces of a custom gradient. Edit `result.graph` around
        `result.node` then.

        Takes occurrences found before other edits, or in the graph that this one was copied from.
        Raises GraphError if the node was erased or is of another graph.
        """
        return copying.own(self, occurrence)

    def node_here(self, node: Node) -> Node:
        """What a node of the graph that this one was copied from has become.

        Raises GraphError if it was erased or is of another graph.
        """
        here = node if node.graph is self else self._copies.get(node)
        if here is None or here.graph is not self:
            raise GraphError(f"{node!r} is not a node of {self.name} (any more)")
        return here

    # ---------------------------------------------------------------------------------- editing

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
        return self._write(self._for_here(program, inputs), inputs, before, after)

    def _for_here(
        self, program: Graph | Callable[..., Any], inputs: Sequence[Value | Literal]
    ) -> Insertable:
        """A graph that takes these inputs, or what a function of them is traced to."""
        self._check_mine(*inputs)
        if not isinstance(program, Graph):
            return engine.trace_at(program, [value.aval for value in inputs], self)
        if len(inputs) != len(program.inputs):
            raise GraphError(
                f"{program.name} takes {len(program.inputs)} inputs, {len(inputs)} were given"
            )
        for given, expected in zip(inputs, program.inputs, strict=True):
            if not same_type(given.aval, expected.aval):
                raise GraphError(f"{program.name} takes {expected!r}, not {given!r}")
        return program

    def _write(
        self,
        program: Insertable,
        inputs: Sequence[Value | Literal],
        before: Node | None,
        after: Node | None,
    ) -> list[Value | Literal]:
        beside, index = before or after, len(self._nodes)
        if beside is not None:
            self._check_node(beside)
            index = self._nodes.index(beside) + (after is not None)
        self._edited()
        new, outputs = program.written_into(self, inputs, beside)
        self._set_nodes([*self._nodes[:index], *new, *self._nodes[index:]])
        self._tell_owners(frozenset().union(*(node.effects for node in new)))
        return outputs

    def replace(
        self,
        node: Node,
        program: Graph | Callable[..., Any],
        inputs: Sequence[Value | Literal] | None = None,
    ) -> None:
        """Puts the nodes of another program in the place of a node.

        Args:
          node: a node of this graph.
          program: as in `insert`; its outputs are of the types of the node's.
          inputs: one value of this graph (or literal) for each of its inputs. None: the node's.

        Raises GraphError for a wrong number or type of inputs or outputs, or if the node has an
        effect that the program has not (which would be dropped in silence).
        """
        self._check_node(node)
        inputs = node.inputs if inputs is None else inputs
        new = self._for_here(program, inputs)
        given, wanted = new.out_avals, [value.aval for value in node.outputs]
        if len(given) != len(wanted) or not all(map(same_type, given, wanted)):
            raise GraphError(
                f"{new!r} gives other values than {Occurrence((), node)}, in whose place it is to "
                "stand"
            )
        if {*map(type, node.effects)} - {*map(type, new.effects)}:
            raise GraphError(
                f"cannot replace {Occurrence((), node)}: it has effects {set(node.effects)}, which "
                "an edit must not drop"
            )
        results = self._write(new, inputs, before=node, after=None)
        for old, result in zip(node.outputs, results, strict=True):
            self.replace_uses(old, result)
        self.erase(node, with_effects=True)

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
        self._check_mine(*inputs)
        self._edited()
        in_order = {name: regions[name] for name in node.regions}  # that of branches has a meaning
        wide = copied(node, (*node.inputs, *inputs), is_new=True, _regions=in_order)
        self.adopt(wide, [*(value.aval for value in node.outputs), *avals])
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
            same = len(ours) == len(theirs) and all(map(same_type, ours, theirs))
            if not same:
                raise GraphError(f"{region!r} {what} other values than {old!r}")
        self._edited()
        before = frozenset().union(*(r.effects for r in node._regions.values()))
        node._regions[name] = region
        after = frozenset().union(*(r.effects for r in node._regions.values()))
        set_field(node, "effects", (node.effects - before) | after)
        set_field(node, "replaced", node.replaced | {name})
        region.add_owner(node)
        leave(node, old)
        self._tell_owners(after)

    def group(
        self,
        nodes: Iterable[Node],
        *,
        recompute: bool = False,
        policy: Callable[..., Any] | None = None,
        name: str = "group",
        copies: Sequence[Node] = (),
    ) -> Call | Recompute:
        """Moves nodes of this graph into a region of their own.

        Args:
          nodes: a convex set: no path leads from one of them out and back to another.
          recompute: make a `Recompute` of them (with `policy`), else a jitted `Call`.
          name: the region's name.
          copies: nodes before them, in order, that are in the region as well as where they stand.

        Returns:
          The new node, which stands where its inputs are defined and before its users.

        Raises GraphError for a set that is empty or not convex, and for effects moved or copied.
        """
        return grouping.group(self, nodes, recompute, policy, name, copies)
