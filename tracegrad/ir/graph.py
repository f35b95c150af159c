"""A traced program: inputs, constants, nodes in order, outputs; and how it is read.

A graph *is* a program of JAX's (a jaxpr) with a way to look at it, and nobody changes one: each
edit makes another graph, which shares what it did not touch. So a graph that was not edited has the
very program that it came from, and lowering is no work.

Graphs nest: a node with regions holds a graph for each. A jitted function that is called forty
times is one region.
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
from tracegrad.ir import folding, match, text, verification, walking
from tracegrad.ir.engine import engine
from tracegrad.ir.nodes import Atom, Node, RegionNode, Value
from tracegrad.ir.occurrence import Matches, Occurrence
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import some

_TYPES = 8  # that a graph's `repr` lists


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Graph:
    """A program over JAX's primitives.

    Attributes:
      program: JAX's program, which the graph is.
      nodes: its equations, in the order of execution.
      name: the traced function's name.
      function_source: the traced function and its line, ``loss at /home/ada/train.py:12``.
      hints: what the names of the inputs are made from, ``params.w``; "" where nothing is known.
      aliases: further paths by which `match.param` knows the inputs; () for none.
      first: the graph that this one was made from by edits; None: it was traced as it is. A value
        keeps the name that it has there.
      in_tree, out_tree: the pytrees of ``(args, kwargs)`` and of the result; None for regions.
      signature: the traced function's, static parameters left out; None where it has none.
      variables: the Variables that the function reads: the last inputs are their values.
      assigned: the Variables that it assigns: the last outputs are their new values. Not counted
        in `out_tree`, as `variables` are not in `in_tree`.
      updates: where in the modules of flax.nnx of a call the function assigns new arrays: the very
        last outputs. Not counted in `out_tree` either.
      changes_structure: whether it changes what these modules are made of: then the result has all
        that is in them.
      differentiated: of each input whether somebody takes the gradient with respect to it; ()
        where that is not known.
      loses: paths of what the function changes in a state that it is given, and nobody would see.

    `print(graph)` is meant to be read.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> graph = tg.graph(lambda x: jnp.sin(x) * 2, 1.0)
    >>> [node.op for node in graph.nodes], [graph.names[value] for value in graph.inputs]
    (['sin', 'mul'], ['x'])
    """

    program: Any
    nodes: tuple[Node, ...]
    name: str
    function_source: str = ""
    hints: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    first: Graph | None = None
    in_tree: Any = None
    out_tree: Any = None
    signature: inspect.Signature | None = None
    variables: tuple[Any, ...] = ()
    assigned: tuple[Any, ...] = ()
    updates: tuple[Any, ...] = ()
    changes_structure: bool = False
    differentiated: tuple[bool, ...] = ()
    loses: tuple[str, ...] = ()

    # ---------------------------------------------------------------------------------- its parts

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
        """The arrays (or tracers) that the function closed over, by their values."""
        open_form, arrays = _jax.parts_of(self.program)
        return MappingProxyType(dict(zip(open_form.constvars, arrays, strict=True)))

    @property
    def in_avals(self) -> list[Any]:
        return [value.aval for value in self.inputs]

    @property
    def out_avals(self) -> list[Any]:
        return [atom.aval for atom in self.outputs]

    @property
    def effects(self) -> frozenset[Any]:
        """The side effects of all its nodes (prints, callbacks, reads and writes of Refs)."""
        return frozenset(self.program.effects)

    @property
    def result_count(self) -> int:
        """How many of the outputs are the result: those before new values of what is assigned."""
        return len(self.outputs) - len(self.assigned) - len(self.updates)

    # ---------------------------------------------------------------------------------- its values

    @cached_property
    def users(self) -> Mapping[Value, tuple[Node, ...]]:
        """The nodes that take a value as an operand, each once, in order; no entry for none."""
        found: dict[Value, dict[Node, None]] = {}
        for node in self.nodes:
            for value in node.operands:
                found.setdefault(value, {})[node] = None
        return {value: tuple(nodes) for value, nodes in found.items()}

    @cached_property
    def producers(self) -> Mapping[Value, Node]:
        """The node that computes a value; no entry for inputs and constants."""
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def names(self) -> Mapping[Value, str]:
        """The names of its values in the text form, no two alike: ``w``, ``dot_general_1``."""
        return text.names_of(self)

    @cached_property
    def results(self) -> frozenset[Value]:
        """The values among its outputs."""
        return frozenset(atom for atom in self.outputs if isinstance(atom, Value))

    # ---------------------------------------------------------------------------------- looking

    @property
    def recomputes(self) -> bool:
        """Whether it or a region below it has a `Recompute`."""
        return _jax.REMAT.name in self.operations

    @property
    def calls_host(self) -> bool:
        """Whether it, or a region below it, runs code that XLA did not compile: callbacks into
        Python, prints, foreign functions. That may fail, after the program was started, and may
        look at whatever the process holds."""
        return any(map(_jax.calls_host, self.operations))

    @cached_property
    def closes_over(self) -> bool:
        """Whether a `jax.custom_jvp` in it closes over what may be differentiated."""
        return any(isinstance(node, RegionNode) and node.closes_over for node in self.nodes)

    @cached_property
    def operations(self) -> frozenset[str]:
        """The names of the primitives of all nodes in it and in the regions below it."""
        return frozenset(node.op for region in self.regions_below for node in region.nodes)

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
          A list that prints one match a line, with its scope and its source line. The matches are
          good in every graph that was made from this one by edits of other places.
        """
        selector = wanted if isinstance(wanted, Selector) else match.where(wanted)
        return Matches(selector.look(self).matches)

    def region_of(self, occurrence: Occurrence) -> Graph:
        """The region that a node of this graph stands in."""
        if not occurrence.path:
            return self
        node, name = occurrence.path[-1]
        return node.region(name)

    def __str__(self) -> str:
        return text.format_graph(self)

    def __repr__(self) -> str:
        total = walking.count(self, {})
        types = some([*map(_jax.type_text, self.in_avals)], _TYPES)
        results = some([*map(_jax.type_text, self.out_avals)], _TYPES)
        return f"<Graph {self.name}({types}) -> ({results}), {total} nodes>"

    def _repr_html_(self) -> str:  # `tracegrad.show` has where the gradient flows
        return folding.of_text(str(self))

    def verify(self) -> None:
        """Checks that this is a program, by JAX's own checker, in each region once: every value is
        defined once and before its uses, and the types are those of JAX's typing rules.

        Raises GraphError naming the node and its source line.
        """
        verification.verify(self)

    # ---------------------------------------------------------------------------------- running

    def __call__(self, *args: Any) -> list[Any]:
        """Runs it, or traces it, on flat arguments; returns its flat outputs."""
        self._refuse_others(args)
        return _jax.eval_program(self.program, args)

    def as_call(self, *args: Any) -> list[Any]:
        """The same while JAX traces a program that it will lower: as one call, which takes no time
        for what is in it."""
        self._refuse_others(args)
        return _jax.call_program(self.program, args, self.name)

    def _refuse_others(self, args: Sequence[Any]) -> None:
        expected = len(self.inputs)
        if len(args) == expected:
            return
        if len(args) > expected or len(jax.tree.leaves(args)) == expected:
            raise TypeError(
                f"{self.name} takes {expected} arrays, {len(args)} were given: a graph takes them "
                "one by one, and its `to_callable()` takes the arguments of the function"
            )
        raise TypeError(
            f"{self.name} is given a part of a reference, ref.at[i], which is several arrays "
            "to JAX. Give it the reference and the index, and let it take the part"
        )

    def to_callable(self) -> Callable[..., Any]:
        """A function with the traced function's own signature (pytrees, keyword arguments).

        It runs under every JAX transformation. It reads the Variables among its inputs, and
        assigns those among its outputs, whenever it is called. A graph that is a region takes and
        returns flat lists.
        """
        return engine.to_callable(self)

    # ---------------------------------------------------------------------------------- other parts

    def replace(
        self,
        *,
        nodes: Iterable[Node] | None = None,
        inputs: Sequence[Value] | None = None,
        outputs: Sequence[Atom] | None = None,
        constants: Mapping[Value, Any] | None = None,
        **other: Any,
    ) -> Graph:
        """The graph with other parts.

        Args:
          nodes, inputs, outputs: in the place of its own. They use and define JAX's variables.
          constants: arrays by their values, in the place of its own.
          **other: further attributes of the graph.
        """
        nodes = self.nodes if nodes is None else tuple(nodes)
        constants = self.constants if constants is None else constants
        hints, aliases = self.hints, self.aliases
        if inputs is not None:
            known = dict(zip(self.inputs, hints, strict=False))
            hints = tuple(known.get(value, "") for value in inputs)
            also = dict(zip(self.inputs, aliases, strict=False))
            aliases = tuple(also.get(value, "") for value in inputs) if aliases else ()
        program = _jax.program_of(
            self.program,
            constants=constants,
            inputs=self.inputs if inputs is None else inputs,
            outputs=self.outputs if outputs is None else outputs,
            equations=[node.equation for node in nodes],
        )
        first = self.first or self
        parts = {"program": program, "nodes": nodes, "hints": hints, "aliases": aliases}
        return dataclasses.replace(self, **(parts | {"first": first} | other))
