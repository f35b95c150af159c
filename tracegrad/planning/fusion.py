"""Which results of a graph XLA writes to memory, and which it computes inside of their readers.

The rules of fusion are those of XLA's compiler for CPUs. A product, a convolution or a reduction is
a call of a library, which reads its operands from memory; what it alone reads, element by element,
it may compute itself. Other element-wise results are computed inside those of their readers that
are element-wise, too: if one reader is all that there is; if they are cheap, and all but one of
their operands are broadcasts or have fewer dimensions (XLA's ``EffectivelyAtMostUnary``); or, with
more operands, if every reader can do so. What some readers take from memory and others compute
themselves is both: written, and what it is computed from is kept as well. It is not where it comes
into a region that is recomputed, of which the barrier lets through no more than the values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from tracegrad import _jax
from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.ir import CustomGradient, Graph, Node, Recompute, RegionNode, Value, operations
from tracegrad.planning.flops import elements
from tracegrad.planning.residuals import NodeResiduals, Residuals, nbytes


class Fusion:
    """What the nodes of a graph read and write.

    Args:
      graph: a program without plain calls (see `flatten`).
      active: the values that get a cotangent.
      fused: whether cheap element-wise results are taken not to be kept.
      residuals: what the backward pass of a node reads.

    Attributes:
      category: of each node; see `category_of`.
      read: what the backward pass of a node reads, of those that have one.
      absorbed: the nodes that write no buffer.
      repeated: those that do, though element-wise readers compute them, too.
      repeated_back: of these the ones that all readers in the backward pass compute.
    """

    def __init__(
        self, graph: Graph, active: Collection[Value], fused: bool, residuals: NodeResiduals
    ):
        self.graph = graph
        self.active = active
        self.category: dict[Node, str] = {node: category_of(node) for node in graph.nodes}
        self.read: dict[Node, Residuals] = {}
        self.absorbed: set[Node] = set()
        self.repeated: set[Node] = set()
        self.repeated_back: set[Node] = set()
        self._readers_back: dict[Value, list[Node]] = {}  # the nodes whose backward step reads it
        self._is_output = {v for v in graph.outputs if isinstance(v, Value)}
        for node in graph.nodes:
            self._find_residuals(node, residuals)
        for node in reversed(graph.nodes):
            category = self.category[node]
            if category == "view":
                self.absorbed.add(node)
            elif fused and category in ("cheap", "costly"):
                self._find_buffer(node)

    def _find_residuals(self, node: Node, residuals: NodeResiduals) -> None:
        if not any(v in self.active for v in node.outputs):
            return
        positions = active_inputs(node, self.active)
        if positions:
            self.read[node] = residuals.of(node, positions)
            for value in self.read_back(node):
                self._readers_back.setdefault(value, []).append(node)

    def read_back(self, node: Node) -> Iterator[Value]:
        """The values of the graph that the backward pass of a node reads."""
        if node not in self.read:
            return
        for i in self.read[node].operands:
            value = node.inputs[i]
            if isinstance(value, Value):
                yield value
        for i in self.read[node].results:
            yield node.outputs[i]

    def _find_buffer(self, node: Node) -> None:
        """Finds out where an element-wise result is computed."""
        results = list(self._with_views(node.outputs))
        if any(v in self._is_output for v in results) or self._multiplies_broadcasts(node):
            return
        readers = self.readers(node)
        backward = [u for v in results for u in self._readers_back.get(v, ())]
        if len(readers) == 1 and not backward:
            (reader,) = readers
            if self.category[reader] != "kernel":
                self.absorbed.add(node)
        elif self.category[node] == "cheap":
            is_kept = any(self.reads_memory_back(u) for u in backward)
            is_written = is_kept or any(
                self.category[u] in ("kernel", "reduction") for u in readers
            )
            if not is_written and (is_unary(node) or all(map(reads_alone, readers + backward))):
                self.absorbed.add(node)
            elif is_unary(node):
                self.repeated.add(node)
                if not is_kept:
                    self.repeated_back.add(node)

    def _multiplies_broadcasts(self, node: Node) -> bool:
        """Whether a node multiplies one broadcast by another, as flax's norms do: to sum up the
        gradient of the one XLA writes the other out, of which the product is no longer unary."""
        if node not in self.read:
            return False
        read = {node.inputs[i] for i in self.read[node].operands}
        spread = [v for v in set(operands(node)) if v in self.active and is_broadcast(v, node)]
        return len(spread) > 1 and read.issuperset(spread)

    def _with_views(self, values: Iterable[Value]) -> Iterator[Value]:
        for value in values:
            yield value
            for user in dict.fromkeys(value._uses):
                if self.category[user] == "view":
                    yield from self._with_views(user.outputs)

    def readers(self, node: Node) -> list[Node]:
        """The nodes that read the results of a node or a view of them."""
        users = [u for v in self._with_views(node.outputs) for u in v._uses]
        return [u for u in users if self.category[u] != "view"]

    def reads_memory_back(self, node: Node) -> bool:
        """Whether its backward step does: that of a call of a library, and one that sums up the
        gradient of a broadcast operand."""
        if self.category[node] not in ("cheap", "costly"):
            return True
        return any(v in self.active and is_broadcast(v, node) for v in operands(node))


def category_of(node: Node) -> str:
    """How XLA treats a node: ``view``, ``cheap`` and ``costly`` element-wise, ``reduction``, or
    ``kernel``, which reads its operands from memory and writes its result there."""
    if node.op in operations.VIEWS:
        return "view"
    if node.op in operations.CHEAP:
        return "cheap"
    if node.op in operations.COSTLY:
        return "costly"
    if node.op in operations.REDUCTIONS:
        return "reduction"
    if isinstance(node, (CustomGradient, RegionNode)) and not isinstance(node, Recompute):
        if not isinstance(node, CustomGradient) and node.primitive is not _jax.JIT:
            return "kernel"
        region = next(iter(node._regions.values()))
        inner = {category_of(n) for n in region.nodes}
        if inner <= {"view", "cheap"}:
            return "cheap"
        if inner <= {"view", "cheap", "costly"}:
            return "costly"
    return "kernel"


def is_unary(node: Node) -> bool:
    """Whether at most one operand has as many dimensions longer than one as the result, and is no
    broadcast."""
    rank = max((_rank(v) for v in node.outputs), default=0)
    return sum(_rank(v) >= rank and not _is_spread(v) for v in set(operands(node))) <= 1


def reads_alone(node: Node) -> bool:
    """Whether a node reads one array and nothing beside it: in its backward step, too, it is a
    function of that array alone which the gradient is multiplied by."""
    return len(set(operands(node))) == 1


def is_broadcast(operand: Value, node: Node) -> bool:
    """Whether an operand has fewer elements than an element-wise result."""
    return _is_spread(operand) or elements(operand.aval) < elements(node.outputs[0].aval)


def _is_spread(value: Value) -> bool:
    producer = value.producer
    while producer is not None and producer.op in operations.REARRANGES and operands(producer):
        producer = operands(producer)[0].producer
    return producer is not None and producer.op in ("broadcast_in_dim", "iota")


def distinct_elements(value: Value) -> int:
    """How many elements a value has before it is broadcast."""
    found, producer = elements(value.aval), value.producer
    while producer is not None and producer.op in operations.REARRANGES | {"broadcast_in_dim"}:
        (source,) = operands(producer) or (None,)
        if source is None:
            return 1
        found, producer = min(found, elements(source.aval)), source.producer
    return found


def _rank(value: Value) -> int:
    return sum(length != 1 for length in value.aval.shape)


def operands(node: Node) -> list[Value]:
    return [v for v in node.inputs if isinstance(v, Value)]


def handed_bytes(scan: Node) -> int:
    """Bytes of what an iteration has of its own of what comes into it: the slices that are cut out
    for it and, of slices and constants, the gradients that it writes before they are put in their
    places or added up."""
    body = scan.regions["jaxpr"]
    constants, carried = _jax.scan_split(scan.params)
    read, cut = body.inputs[:constants], body.inputs[constants + carried :]
    gradients = [v for v in (*read, *cut) if v.has_gradient]
    return sum(nbytes(v.aval) for v in (*cut, *gradients))
