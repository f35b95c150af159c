"""What a program is made of: values, and the five kinds of node that compute them.

| node             | what it is |
|------------------|-----------------------------------------------------------------|
| `Apply`          | one JAX primitive without sub-programs: every ordinary operation |
| `Call`           | one JAX primitive with regions: jit, scan, while, cond, shard_map, ... |
| `CustomGradient` | a primal region and the rule that replaces its derivative |
| `StopGradient`   | its input, through which no gradient flows |
| `Recompute`      | a region whose intermediates are computed again in the backward pass |

A node belongs to one `Graph`, which alone changes it (`Graph.replace_uses`, `Graph.set_params`,
...): so the users of every value are always right, and a graph knows whether it was edited. To
everybody else it is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tracegrad import _jax

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


class Value:
    """The result of a node, or an input or constant of a graph.

    `aval` is its JAX type (shape, dtype, weak type, sharding), `producer` the node that computes
    it (None for inputs and constants), `graph` the graph that it lives in. `has_gradient` says
    whether it has cotangents, `is_reference` whether it is no array, but a place that arrays are
    written to (a `jax.Ref`).
    """

    __slots__ = (
        *("_name", "_uses", "aval", "graph", "has_gradient", "hint", "is_reference", "producer"),
    )

    def __init__(self, aval: Any, graph: Any, producer: Node | None = None, hint: str = ""):
        self.aval = aval
        self.has_gradient = _jax.is_inexact(getattr(aval, "dtype", None))
        self.is_reference = not isinstance(aval, _jax.ARRAY)
        self.graph: Graph = graph
        self.producer = producer
        self.hint = hint  # what its name is made from: `x`, `params['w']`; "": the operation's
        self._name: str | None = None
        self._uses: list[Node] = []  # one entry per use

    @property
    def name(self) -> str:
        """Its name in the text form, unique in its graph: ``w``, ``dot_general_1``."""
        if self._name is None:
            self.graph.name_values(self)
        assert self._name is not None
        return self._name

    @property
    def users(self) -> tuple[Node, ...]:
        """The nodes that take it as an input, each once, in the order in which they began to."""
        return tuple(dict.fromkeys(self._uses))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    def __repr__(self) -> str:
        return f"{self.name}: {_jax.type_text(self.aval)}"


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A scalar written into the program: the ``2.0`` of ``mul(x, 2.0)``."""

    value: Any
    aval: Any

    is_reference: ClassVar[bool] = False

    @property
    def has_gradient(self) -> bool:
        return _jax.has_gradient(self.aval)

    def __repr__(self) -> str:
        return str(self.value)


class Source(NamedTuple):
    """Where an equation came from, and the JAX settings under which it was made."""

    info: Any  # JAX's SourceInfo: a traceback and the named scopes
    # JAX's JaxprEqnContext: mesh, compute type, random number settings; None for what was recorded.
    settings: Any


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


# `set_field(node, name, value)` changes a node: for its graph, which knows then that it was edited.
set_field: Callable[[Node, str, Any], None] = object.__setattr__


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Node:
    """What all five kinds share. Not used itself.

    `primitive` and `params` are JAX's, `op` is the name of the primitive (``dot_general``, ``jit``,
    ``custom_vjp_call``); `params` has no entry for the regions of a node that this
    package made (`is_new`), since lowering builds these. `graph` is None until it is inserted.
    """

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Value | Literal, ...]
    outputs: tuple[Value, ...] = ()
    source: Source | None = None
    effects: frozenset[Any] = frozenset()
    is_new: bool = False
    graph: Graph | None = None
    op: str = field(init=False)

    regions: ClassVar[Mapping[str, Graph]] = MappingProxyType({})
    """Its sub-programs by name; empty for most nodes."""

    def __post_init__(self) -> None:
        set_field(self, "params", MappingProxyType(dict(self.params)))
        set_field(self, "op", self.primitive.name)

    @property
    def name(self) -> str:
        """What a reader calls it: the function's name for calls and rules, else the operation's."""
        return self.op

    @property
    def operands(self) -> list[Value]:
        """Its inputs but for literals."""
        return [value for value in self.inputs if isinstance(value, Value)]

    @property
    def has_references(self) -> bool:
        """Whether an operand or a result is no array, but a place that arrays are written to."""
        return any(v.is_reference for v in (*self.inputs, *self.outputs))

    def region(self, name: str) -> Graph:
        """One sub-program; for a `CustomGradient` also a face of its rule."""
        return self.regions[name]

    def let_go(self) -> None:
        """Gives up all that it holds, when its graph is done with; see `Graph.let_go`."""
        set_field(self, "params", MappingProxyType({}))

    def __repr__(self) -> str:
        inputs = ", ".join(v.name if isinstance(v, Value) else repr(v) for v in self.inputs)
        outputs = ", ".join(map(repr, self.outputs))
        return f"<{type(self).__name__} {outputs} = {self.name}({inputs})>"


class Apply(Node):
    """One JAX primitive without sub-programs: every ordinary operation."""

    __slots__ = ()


class StopGradient(Node):
    """Hands on its one input; the gradient ends here. (`stop_gradient` of either library.)"""

    __slots__ = ()


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class RegionNode(Node):
    """A node with regions.

    `replaced` names those that compute another thing than the programs in `params`, though they
    may be clean themselves.
    """

    _regions: dict[str, Graph] = field(default_factory=dict)
    replaced: frozenset[str] = frozenset()

    @property
    def regions(self) -> Mapping[str, Graph]:  # type: ignore[override]  # nobody sets it
        return MappingProxyType(self._regions)

    def let_go(self) -> None:
        Node.let_go(self)
        for region in self._regions.values():
            region.let_go()

    def keeps(self, name: str) -> bool:
        """Whether a region is the program that `params` has for it."""
        return name not in self.replaced and self._regions[name].is_clean

    @property
    def closes_over(self) -> bool:
        """Whether a `jax.custom_jvp` closes over what may be differentiated: this, or one below."""
        return any(region.closes_over for region in self._regions.values())


class Call(RegionNode):
    """One JAX primitive with regions: ``jit`` and control flow.

    A region is named as the parameter that holds it: ``jaxpr`` (jit, scan), ``cond_jaxpr`` and
    ``body_jaxpr`` (while), ``branches[0]``, ``branches[1]``, ... (cond and switch).
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self.params.get("name", self.op))


class Recompute(RegionNode):
    """A region (``jaxpr``) whose intermediates are computed again in the backward pass.

    `policy` decides which of them are saved all the same (`jax.checkpoint_policies`);
    None saves nothing but the inputs.
    """

    __slots__ = ()

    @property
    def policy(self) -> Callable[..., Any] | None:
        policy: Callable[..., Any] | None = self.params.get("policy")
        return policy

    @property
    def name(self) -> str:
        return self._regions["jaxpr"].name


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class CustomGradient(RegionNode):
    """A primal region (``call_jaxpr``) and the rule that replaces its derivative.

    `kind` is ``"vjp"`` (`jax.custom_vjp`, `tracegrad.custom_gradient`) or ``"jvp"``
    (`jax.custom_jvp`). The rule is Python code until somebody looks: `face` traces it to a graph.
    An edit must reach all faces, since under differentiation the primal region is not run:
    lowering refuses a rule whose primal alone was edited.
    """

    # Of a face's name: the graphs, by name, that are traced together, and `returned`.
    trace_face: Callable[[str], tuple[dict[str, Graph], frozenset[int]]] | None = None
    _returned: frozenset[int] = frozenset()

    def let_go(self) -> None:
        RegionNode.let_go(self)
        set_field(self, "trace_face", None)

    def region(self, name: str) -> Graph:
        return self.primal if name == "call_jaxpr" else self.face(name)

    @property
    def regions(self) -> Mapping[str, Graph]:  # type: ignore[override]  # nobody sets it
        """The primal region alone: the faces of the rule are other programs (see `face`)."""
        return MappingProxyType({"call_jaxpr": self.primal})

    @property
    def kind(self) -> str:
        return "jvp" if self.primitive is _jax.CUSTOM_JVP else "vjp"

    @property
    def closed_over(self) -> int:
        """How many of its operands, the first ones, are what the function closes over. JAX has no
        derivative with respect to them."""
        return _jax.closed_over(self.params)

    @property
    def closes_over(self) -> bool:
        operands = self.inputs[: self.closed_over] if self.kind == "jvp" else ()
        return any(isinstance(v, Value) and v.has_gradient for v in operands)

    @property
    def name(self) -> str:
        return self._regions["call_jaxpr"].name

    @property
    def primal(self) -> Graph:
        """What runs when nothing is differentiated."""
        return self._regions["call_jaxpr"]

    def face(self, name: str) -> Graph:
        """One part of the rule as a graph.

        `name`: for a vjp ``"forward"`` (inputs → outputs and residuals) or ``"backward"``
        (residuals and output cotangents → cotangents of the inputs of float or complex dtype that
        the function does not close over);
        for a jvp ``"jvp"`` (inputs and tangents of the float ones → outputs and their tangents).
        Raises KeyError for another name.
        """
        if name not in self._regions:
            if name not in self.face_names or self.trace_face is None:
                raise KeyError(f"{self.name} has the faces {self.face_names}, not {name!r}")
            faces, returned = self.trace_face(name)
            set_field(self, "_returned", returned)
            for key, graph in faces.items():
                self._regions[key] = graph
                graph.add_owner(self)
        return self._regions[name]

    @property
    def returned(self) -> frozenset[int]:
        """The inputs (by position) for which a rule of kind vjp returns a gradient, and not None.

        Its backward face has zeros in the place of a None.
        """
        self.face("backward")
        return self._returned

    @property
    def face_names(self) -> tuple[str, ...]:
        return ("jvp",) if self.kind == "jvp" else ("forward", "backward")


def _refuse(node: Node, name: str, *_: object) -> None:
    raise AttributeError(
        f"cannot set {name!r} of {node!r}: its graph alone changes a node, so that it knows that "
        "it was edited. See the methods of Graph: set_inputs, set_params, set_region, replace_uses"
    )


# What `dataclass` puts there says less, and before Python 3.14 fails where there are slots too.
for _kind in (Node, RegionNode, CustomGradient):
    type.__setattr__(_kind, "__setattr__", _refuse)
    type.__setattr__(_kind, "__delattr__", _refuse)


# ------------------------------------------------------------------------------------- of several


def copied(node: Node, inputs: Sequence[Value | Literal], **changes: Any) -> Node:
    """A node of the same kind on other inputs, which belongs to no graph yet."""
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


def nodes_between(old: Value, new: Value | Literal) -> set[Node]:
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


def same_type(a: Any, b: Any) -> bool:
    """Whether one value can stand for the other: of one shape and dtype.

    Weak types and the mesh axes over which a value varies follow from where it stands, and
    lowering works them out anew.
    """
    if hasattr(a, "shape") and hasattr(b, "shape"):
        return bool(type(a) is type(b) and (a.shape, a.dtype) == (b.shape, b.dtype))
    return bool(a == b)
