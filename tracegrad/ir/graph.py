"""`Graph`: a traced program with its inputs, constants, nodes in order, and outputs.

A graph wraps one of JAX's programs (a jaxpr) and gives access to its parts. Graphs are immutable:
each edit makes another graph, which shares all nodes that the edit did not touch. So an unedited
graph has the program that JAX traced, and lowering that program needs no conversion.

Graphs nest: a node with regions holds a graph for each region. A jitted function that is called
forty times is one region, held by forty nodes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import engine, folding, match, text, verification, walking
from tracegrad.ir.nodes import Atom, Node, Value
from tracegrad.ir.occurrence import Matches, Occurrence
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import some

_MAX_TYPES = 8  # in a graph's `repr`


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Graph:
    """A program over JAX's primitives.

    Attributes:
      program: JAX's program (a closed or open jaxpr).
      make_nodes: returns `nodes`.
      name: the traced function's name.
      function_source: the traced function and its line, ``loss at /home/ada/train.py:12``.
      hints: for each input the path from which its name is made, ``params.w``; "" if unknown.
      aliases: for each input a second path by which `match.param` finds it, or ""; () if no input
        has a second path.
      in_tree, out_tree: the pytrees of ``(args, kwargs)`` and of the result; None for regions.
      signature: the traced function's signature without static parameters; None if it has none.
      variables: the Variables that the function reads. Their values are the last inputs, which
        `in_tree` does not count.
      assigned: the Variables that the function assigns. Their new values are outputs after the
        result, which `out_tree` does not count.
      updates: the places in flax.nnx modules among the arguments to which the function assigns new
        arrays. These arrays are the last outputs, after the Variables' new values; `out_tree` does
        not count them. If the function changes the structure of these modules, there are no
        updates, and the result contains the whole new state of the modules.
      differentiated: for each input, whether the program is differentiated with respect to it; ()
        if unknown.
      loses: the paths of changes that are lost, since the function makes them to a copy of a state.

    `print(graph)` is meant to be read.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> graph = tg.graph(lambda x: jnp.sin(x) * 2, 1.0)
    >>> [node.op for node in graph.nodes], [graph.names[value] for value in graph.inputs]
    (['sin', 'mul'], ['x'])
    """

    program: Any
    make_nodes: Callable[[], tuple[Node, ...]]
    name: str
    function_source: str = ""
    hints: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    in_tree: Any = None
    out_tree: Any = None
    signature: inspect.Signature | None = None
    variables: tuple[Any, ...] = ()
    assigned: tuple[Any, ...] = ()
    updates: tuple[Any, ...] = ()
    differentiated: tuple[bool, ...] = ()
    loses: tuple[str, ...] = ()

    # -------------------------------------------------------------------------------------- parts

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The equations of the program, in the order of execution."""
        return self.make_nodes()  # when first read: most graphs are compiled without nodes

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """One value for each flat input."""
        return tuple(_jax.opened(self.program).invars)

    @cached_property
    def outputs(self) -> tuple[Atom, ...]:
        """One value or literal for each flat output."""
        return tuple(_jax.opened(self.program).outvars)

    @cached_property
    def constants(self) -> Mapping[Value, Any]:
        """The arrays (or tracers) that the function closed over, by their values in the program."""
        open_form, arrays = _jax.parts_of(self.program)
        return MappingProxyType(dict(zip(open_form.constvars, arrays, strict=True)))

    @property
    def in_avals(self) -> list[Any]:
        return list(self.program.in_avals)

    @property
    def out_avals(self) -> list[Any]:
        return list(self.program.out_avals)

    @property
    def effects(self) -> frozenset[Any]:
        """The side effects of all nodes (prints, callbacks, reads and writes of Refs)."""
        return frozenset(self.program.effects)

    @property
    def result_count(self) -> int:
        """The number of outputs that make up the function's result. Outputs for `assigned` and
        `updates` follow them."""
        return len(self.program.out_avals) - len(self.assigned) - len(self.updates)

    # ------------------------------------------------------------------------------------- values

    @cached_property
    def users(self) -> Mapping[Value, tuple[Node, ...]]:
        """For each value the nodes that use it as an operand, each once, in order.

        A value that no node uses has no entry.
        """
        users: dict[Value, dict[Node, None]] = {}
        for node in self.nodes:
            for value in node.operands:
                users.setdefault(value, {})[node] = None
        return {value: tuple(nodes) for value, nodes in users.items()}

    @cached_property
    def producers(self) -> Mapping[Value, Node]:
        """For each value the node that computes it; inputs and constants have no entry."""
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def names(self) -> Mapping[Value, str]:
        """The unique name of each value in the text form: ``w``, ``dot_general_1``."""
        return text.names_of(self)

    @cached_property
    def results(self) -> frozenset[Value]:
        """The outputs that are values, without the literals."""
        return frozenset(atom for atom in self.outputs if isinstance(atom, Value))

    # ---------------------------------------------------------------------------------- looking

    @property
    def recomputes(self) -> bool:
        """Whether the graph or a region below it has a `Recompute` node."""
        return _jax.REMAT.name in self.operations

    @property
    def calls_host(self) -> bool:
        """Whether the graph or a region below it runs code that XLA did not compile.

        Such code (callbacks into Python, prints, foreign functions) may fail after the program was
        started, and may read any object of the process.
        """
        return _jax.calls_host(self.operations)

    @property
    def closes_over(self) -> bool:
        """Whether a `jax.custom_jvp` in the graph closes over a value of a float or complex dtype,
        which may be differentiated."""
        return _jax.program_facts(self.program).closes_over

    @cached_property
    def operations(self) -> frozenset[str]:
        """The names of the primitives of all nodes of the graph and of the regions below it."""
        return frozenset(p.name for p in _jax.program_facts(self.program).primitives)

    @property
    def regions_below(self) -> list[Graph]:
        """This graph and its regions at any depth, each once."""
        return walking.regions_below(self)

    def walk(self) -> Iterator[Occurrence]:
        """Yields every node at any depth with the calls that lead to it, in order of execution.

        The nodes of a region come once for each call of the region. If such regions are nested, the
        number of nodes grows exponentially: `walk` raises GraphError for too many nodes.
        `graph.regions_below` has each region only once.
        """
        return walking.walk(self)

    def find(self, wanted: Selector | Callable[[Occurrence], object]) -> Matches:
        """Returns the matches of a selector (see `tracegrad.match`), in the order of `walk`.

        Args:
          wanted: a selector, or a predicate on each `Occurrence`.

        Returns:
          A list that prints one match a line, with its scope and its source line. The matches stay
          valid in graphs made from this graph by edits that do not touch them.
        """
        selector = wanted if isinstance(wanted, Selector) else match.where(wanted)
        return Matches(selector.select_in(self).matches)

    def region_of(self, occurrence: Occurrence) -> Graph:
        """Returns the region that contains the node of an occurrence."""
        if not occurrence.path:
            return self
        node, name = occurrence.path[-1]
        return node.region(name)

    def __str__(self) -> str:
        return text.format_graph(self)

    def __repr__(self) -> str:
        total = walking.count(self, {})
        types = some([*map(_jax.type_text, self.in_avals)], _MAX_TYPES)
        results = some([*map(_jax.type_text, self.out_avals)], _MAX_TYPES)
        return f"<Graph {self.name}({types}) -> ({results}), {total} nodes>"

    def _repr_html_(self) -> str:  # `tracegrad.show` also colours where the gradient flows
        return folding.of_text(str(self))

    def verify(self) -> None:
        """Checks that the graph is a valid program, each region once.

        Every value must be defined once and before its uses, and have the type that JAX's typing
        rule of its operation gives. Raises GraphError with the wrong node and its source line.
        """
        verification.verify(self)

    # ---------------------------------------------------------------------------------- running

    def __call__(self, *args: Any) -> list[Any]:
        """Evaluates the program on flat arguments, or traces it; returns its flat outputs."""
        self._require_one_array_per_input(args)
        return _jax.eval_program(self.program, args)

    def as_call(self, *args: Any) -> list[Any]:
        """Binds the program as one call, while JAX traces another program to lower it.

        `__call__` binds each node; this takes the same time for any number of nodes.
        """
        self._require_one_array_per_input(args)
        return _jax.call_program(self.program, args, self.name)

    def _require_one_array_per_input(self, args: Sequence[Any]) -> None:
        expected = len(self.program.in_avals)
        if len(args) == expected:
            return
        if len(args) > expected or len(jax.tree.leaves(args)) == expected:
            raise TypeError(
                f"{self.name} takes {expected} arrays, {len(args)} were given: a graph takes them "
                "one by one, and its `to_callable()` takes the arguments of the function"
            )
        raise TypeError(
            f"an argument of {self.name} is a part of a reference, ref.at[i], which is several "
            "arrays to JAX. Pass the reference and the index, and take the part in the function"
        )

    def to_callable(self) -> Callable[..., Any]:
        """Returns a function with the traced function's own signature (pytrees, keywords).

        The function runs under every JAX transformation. Each call reads the Variables in
        `variables`, and sets the Variables in `assigned`. If the graph is a region, the function
        takes and returns flat lists.
        """
        return engine.to_callable(self)

    # ------------------------------------------------------------------------------------- editing

    def replace(
        self,
        *,
        nodes: Iterable[Node] | None = None,
        inputs: Sequence[Value] | None = None,
        outputs: Sequence[Atom] | None = None,
        constants: Mapping[Value, Any] | None = None,
        **other: Any,
    ) -> Graph:
        """Returns the graph with some parts replaced.

        Args:
          nodes, inputs, outputs: the new parts, which use and define JAX's variables.
          constants: the new constants: arrays by their values in the program.
          **other: new values of further attributes.
        """
        nodes = self.nodes if nodes is None else tuple(nodes)
        constants = self.constants if constants is None else constants
        hints, aliases = self.hints, self.aliases
        if inputs is not None:
            hint_of = dict(zip(self.inputs, hints, strict=False))
            hints = tuple(hint_of.get(value, "") for value in inputs)
            alias_of = dict(zip(self.inputs, aliases, strict=False))
            aliases = tuple(alias_of.get(value, "") for value in inputs) if aliases else ()
        program = _jax.program_of(
            self.program,
            constants=constants,
            inputs=self.inputs if inputs is None else inputs,
            outputs=self.outputs if outputs is None else outputs,
            equations=[node.equation for node in nodes],
        )
        parts = {
            "program": program,
            "make_nodes": lambda: nodes,
            "hints": hints,
            "aliases": aliases,
        }
        return dataclasses.replace(self, **(parts | other))
