"""The parts of a program: values, and the five kinds of node that compute values.

| node             | what it is |
|------------------|-----------------------------------------------------------------|
| `Apply`          | one JAX primitive without sub-programs: every ordinary operation |
| `Call`           | one JAX primitive with regions: jit, scan, while, cond, shard_map, ... |
| `CustomGradient` | a primal region and the rule that replaces its derivative |
| `StopGradient`   | its input, through which no gradient flows |
| `Recompute`      | a region whose intermediates are computed again in the backward pass |

A value is JAX's own variable, and a node holds JAX's own equation. Both are immutable, and so is
the `Graph` that holds them: an edit makes another graph (`tracegrad.edit`). The graph knows the
node that computes a value, the nodes that use it, and its name: `Graph.producers`, `Graph.users`,
`Graph.names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax.extend.core as jex

from tracegrad import _jax

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph

Value = jex.Var
"""The result of a node, or an input or constant of a graph; `aval` is its JAX type."""

Literal = jex.Literal
"""A scalar written into the program, as ``2.0`` in ``mul(x, 2.0)``: `val`, of the type `aval`."""

Atom = Value | Literal


def renamed(atoms: Sequence[Atom], names: Mapping[Value, Atom]) -> list[Atom]:
    """Returns the atoms, with ``names[value]`` in place of each value that has a new name."""
    return [names.get(atom, atom) if isinstance(atom, Value) else atom for atom in atoms]


def dtype_of(atom: Any) -> Any:
    """Returns the dtype of a value that is an array."""
    return atom.aval.dtype


def has_gradient(atom: Any) -> bool:
    """Whether a value is a float or complex array."""
    return _jax.is_inexact(getattr(atom.aval, "dtype", None))


def is_reference(atom: Any) -> bool:
    """Whether a value is not an array but a `jax.Ref`, to which operations write arrays."""
    return not isinstance(atom.aval, _jax.ARRAY)


def same_type(a: Any, b: Any) -> bool:
    """Whether a value of one type can replace a value of another type: shape and dtype are equal.
    The edit that uses the value adapts its weak type and its varying mesh axes."""
    if hasattr(a, "shape") and hasattr(b, "shape"):
        return bool(type(a) is type(b) and (a.shape, a.dtype) == (b.shape, b.dtype))
    return bool(a == b)


class Source(NamedTuple):
    """The origin of an equation, and the JAX settings under which it was traced."""

    info: Any  # JAX's SourceInfo: a traceback and the named scopes
    settings: Any  # JAX's JaxprEqnContext: mesh, compute type, random number settings


NO_REGIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """One equation of a program: the base class of the five kinds of node.

    Attributes:
      equation: JAX's equation.
      key: the equation as JAX first traced it. Edits of operands and regions keep the key, so that
        a match from before an edit is found again after the edit.
      regions: the graphs of the programs among the parameters, by name; empty for most nodes.
      function: the function whose program contains the node, ``loss at /home/ada/train.py:12``.
    """

    equation: Any
    key: Any
    regions: Mapping[str, Graph]
    function: str = ""

    primitive = property(lambda self: self.equation.primitive)
    """JAX's primitive."""
    params = property(lambda self: self.equation.params)
    """The parameters of the primitive."""
    inputs = property(lambda self: self.equation.invars)
    """The operands: values and literals."""
    outputs = property(lambda self: self.equation.outvars)
    """The results."""
    effects = property(lambda self: self.equation.effects)
    """The side effects: prints, callbacks, reads and writes of a `jax.Ref`."""

    @property
    def op(self) -> str:
        """The name of the primitive: ``dot_general``, ``jit``, ``custom_vjp_call``."""
        return str(self.equation.primitive.name)

    @property
    def name(self) -> str:
        """The name to show: the function's name for calls and rules, else the primitive's name."""
        return self.op

    @property
    def source(self) -> Source:
        return Source(self.equation.source_info, self.equation.ctx)

    @property
    def operands(self) -> list[Value]:
        """The inputs that are values, without the literals."""
        return [atom for atom in self.equation.invars if isinstance(atom, Value)]

    @property
    def has_references(self) -> bool:
        return any(map(is_reference, (*self.inputs, *self.outputs)))

    def region(self, name: str) -> Graph:
        """Returns one sub-program; for a `CustomGradient` also a face of its rule. Raises KeyError
        for another name."""
        return self.regions[name]

    def having(self, equation: Any, regions: Mapping[str, Graph] | None = None) -> Self:
        """Returns a node with another equation and the same key; None keeps the regions."""
        regions = self.regions if regions is None else regions
        return replace(self, equation=equation, regions=regions)

    def with_renamed_operands(self, names: Mapping[Value, Atom]) -> Self:
        if names.keys().isdisjoint(self.operands):
            return self
        return self.having(self.equation.replace(invars=renamed(self.inputs, names)))

    def with_renamed_values(self, names: Mapping[Value, Any]) -> Self:
        """Returns a node with renamed operands and results."""
        operands = renamed(self.inputs, names)
        results = [names.get(value, value) for value in self.outputs]
        return self.having(self.equation.replace(invars=operands, outvars=results))

    def __repr__(self) -> str:
        inputs = ", ".join(_jax.type_text(atom.aval) for atom in self.inputs)
        outputs = ", ".join(_jax.type_text(value.aval) for value in self.outputs)
        return f"<{type(self).__name__} {self.name}({inputs}) -> ({outputs})>"


class Apply(Node):
    """One JAX primitive without sub-programs: every ordinary operation."""


class StopGradient(Node):
    """The identity, through which no gradient flows: `stop_gradient` of JAX or of this package."""


class RegionNode(Node):
    """A node with regions."""

    @property
    def closes_over(self) -> bool:
        """Whether this node, or a node below it, is a `jax.custom_jvp` that closes over a value of
        a float or complex dtype, which may be differentiated."""
        return any(region.closes_over for region in self.regions.values())


class Call(RegionNode):
    """One JAX primitive with regions: ``jit`` and control flow.

    A region has the name of the parameter that holds it: ``jaxpr`` (jit, scan), ``cond_jaxpr`` and
    ``body_jaxpr`` (while), ``branches[0]``, ``branches[1]``, ... (cond and switch).
    """

    @property
    def name(self) -> str:
        return str(self.params.get("name", self.op))


class Recompute(RegionNode):
    """A region (``jaxpr``) whose intermediates are computed again in the backward pass.

    `policy` decides which intermediates are saved instead (`jax.checkpoint_policies`); None saves
    only the inputs.
    """

    @property
    def policy(self) -> Callable[..., Any] | None:
        policy: Callable[..., Any] | None = self.params.get("policy")
        return policy

    @property
    def name(self) -> str:
        return self.regions["jaxpr"].name


# The faces of a rule by name (see `CustomGradient.face`), and `CustomGradient.returned`.
Faces = tuple["Mapping[str, Graph]", frozenset[int]]


@dataclass(frozen=True, eq=False, repr=False)
class CustomGradient(RegionNode):
    """A primal region (``call_jaxpr``) and the rule that replaces its derivative.

    `kind` is ``"vjp"`` (`jax.custom_vjp`, `tracegrad.custom_gradient`) or ``"jvp"``
    (`jax.custom_jvp`). The rule is Python code; `face` traces it to a graph.
    """

    # Traces the rule; returns `Faces`.
    trace_faces: Callable[[CustomGradient], tuple[Mapping[str, Graph], frozenset[int]]] | None = (
        None
    )

    @property
    def kind(self) -> str:
        return "jvp" if self.primitive is _jax.CUSTOM_JVP else "vjp"

    @property
    def closed_over(self) -> int:
        """The number of values that the function closes over: the first operands. JAX has no
        derivative with respect to these operands."""
        return _jax.count_closed_over(self.params)

    @property
    def closes_over(self) -> bool:
        return _jax.rule_closes_over(self.equation)

    @property
    def name(self) -> str:
        return self.primal.name

    @property
    def primal(self) -> Graph:
        """The region that runs when nothing is differentiated."""
        return self.regions["call_jaxpr"]

    def region(self, name: str) -> Graph:
        return self.primal if name == "call_jaxpr" else self.face(name)

    def face(self, name: str) -> Graph:
        """Returns one face (one function of the rule) as a graph.

        `name`: for a vjp ``"forward"`` (inputs → outputs and residuals) or ``"backward"``
        (residuals and output cotangents → cotangents of the inputs of float or complex dtype,
        without the inputs that the function closes over); for a jvp ``"jvp"`` (inputs and tangents
        → outputs and tangents, with tangents only of float and complex values). Raises KeyError for
        another name.
        """
        if name not in self.face_names:
            raise KeyError(f"{self.name} has the faces {self.face_names}, not {name!r}")
        return self._faces[0][name]

    @property
    def returned(self) -> frozenset[int]:
        """The inputs (by position) for which a rule of kind vjp returns a gradient, and not None.
        The backward face returns zeros instead of None."""
        return self._faces[1]

    @property
    def face_names(self) -> tuple[str, ...]:
        return ("jvp",) if self.kind == "jvp" else ("forward", "backward")

    @cached_property
    def _faces(self) -> Faces:
        assert self.trace_faces is not None
        return self.trace_faces(self)
