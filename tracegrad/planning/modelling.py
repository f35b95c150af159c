"""A graph → what its operations read, write and cost, as XLA runs them.

A buffer is what XLA writes to memory. Views and broadcasts are not: reading one is reading what it
is a view of. Nor is a cheap element-wise result that XLA computes inside each of its readers
(fusion): the backward pass does the same with it, whether or not anything is recomputed, and so it
is what such a result is computed from that is kept. Arguments of the program and constants are
alive anyway and count as nothing, and so do gradients of arguments, which are results.

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
from tracegrad.ir import CustomGradient, Graph, Node, Recompute, RegionNode, Value, operations
from tracegrad.planning.activity import (
    active_in_body,
    active_operands,
    active_values,
)
from tracegrad.planning.flatten import flatten
from tracegrad.planning.flops import elements, node_flops
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.residuals import NodeResiduals, Residuals, nbytes
from tracegrad.planning.simulation import keep_all

LIBRARY_ELEMENTS = 4096  # XLA leaves no element-wise operation on fewer to the library


def model(
    graph: Graph,
    *,
    fused: bool = True,
    active: Collection[Value] | None = None,
    residuals: NodeResiduals | None = None,
) -> MemoryModel:
    """The model of a graph without plain calls (see `flatten`).

    Args:
      graph: the forward program.
      active: the values that get a cotangent; without it those between any input and any output.
      fused: whether cheap element-wise results are taken not to be kept (see above); False for
        what JAX's own residuals hold before XLA fuses anything.
      residuals: what is known already, of `MemoryModel.residuals` of a program with such nodes.

    Raises ValueError for a program without a gradient.
    """
    return _Modelling(graph, fused, residuals or NodeResiduals(), active).result()


def node_reads(
    graph: Graph, active: Collection[Value], residuals: NodeResiduals
) -> tuple[dict[Node, Residuals], set[Node]]:
    """What the backward pass of every node reads where the `active` values get a cotangent, and the
    nodes that write no buffer or take next to nothing to run again."""
    modelling = _Modelling(graph, True, residuals, active)
    modelling.find_residuals()
    modelling.find_buffers()
    cheap = {node for node in graph.nodes if modelling.category[node] in ("view", "cheap")}
    return modelling.read, modelling.absorbed | cheap


class _Modelling:
    """One graph, one step after the other; each fills in a few of the attributes."""

    def __init__(
        self,
        graph: Graph,
        fused: bool,
        residuals: NodeResiduals,
        active: Collection[Value] | None = None,
    ):
        self.graph = graph
        self.fused = fused
        self.index = {node: i for i, node in enumerate(graph.nodes)}
        self.residuals = residuals
        self.is_output = {v for v in graph.outputs if isinstance(v, Value)}
        sources = (*graph.inputs, *graph.constants)
        self.active = active_values(graph, sources, self.is_output) if active is None else active
        self.flops_known: dict[Graph, int] = {}
        self.peaks_known: dict[Graph, int] = {}
        self.category: dict[Node, str] = {node: _category(node) for node in graph.nodes}

    def result(self) -> MemoryModel:
        if not self.active:
            raise ValueError(
                "cannot plan what to recompute for a program without a gradient: no result of "
                f"{self.graph.name} is a float computed from its arguments"
            )
        self.find_residuals()
        self.find_buffers()
        self.find_roots()
        return self.assemble()

    # What its backward pass reads.

    def find_residuals(self) -> None:
        self.read: dict[Node, Residuals] = {}
        self.read_back: dict[Value, list[Node]] = {}  # the nodes whose backward step reads it
        for node in self.graph.nodes:
            if not any(v in self.active for v in node.outputs):
                continue
            positions = active_operands(node, self.active)
            if not positions:
                continue
            found = self.read[node] = self.residuals.of(node, positions)
            for value in _read(node, found):
                self.read_back.setdefault(value, []).append(node)

    # What is a buffer.

    def find_buffers(self) -> None:
        self.absorbed: set[Node] = set()  # it writes no buffer
        self.repeated: set[Node] = set()  # it does, and element-wise readers compute it, too
        self.repeated_back: set[Node] = set()  # so do all its readers in the backward pass
        self.in_call: set[Node] = set()  # absorbed by a reduction
        for node in reversed(self.graph.nodes):
            category = self.category[node]
            if category == "view":
                self.absorbed.add(node)
            elif self.fused and category in ("cheap", "costly"):
                self._find_buffer(node)

    def _find_buffer(self, node: Node) -> None:
        """Finds out where an element-wise result is computed."""
        results = list(self._with_views(node.outputs))
        if any(v in self.is_output for v in results) or self._multiplies_broadcasts(node):
            return
        readers = self._readers(node)
        backward = [u for v in results for u in self.read_back.get(v, ())]
        if len(readers) == 1 and not backward:
            (reader,) = readers
            if self.category[reader] != "kernel":
                self.absorbed.add(node)
            if self._reads_memory(reader):
                self.in_call.add(node)
        elif self.category[node] == "cheap":
            is_kept = any(self._reads_memory_back(u) for u in backward)
            is_written = is_kept or any(self._reads_memory(u) for u in readers)
            if not is_written and (_is_unary(node) or all(map(_reads_alone, readers + backward))):
                self.absorbed.add(node)
            elif _is_unary(node):
                self.repeated.add(node)
                if not is_kept:
                    self.repeated_back.add(node)

    def _multiplies_broadcasts(self, node: Node) -> bool:
        """Whether a node multiplies one broadcast by another, as flax's norms do: to sum up the
        gradient of the one XLA writes the other out, of which the product is no longer unary."""
        if node not in self.read:
            return False
        read = {node.inputs[i] for i in self.read[node].operands}
        spread = [v for v in set(_values(node)) if v in self.active and _is_broadcast(v, node)]
        return len(spread) > 1 and read.issuperset(spread)

    def _with_views(self, values: Iterable[Value]) -> Iterator[Value]:
        for value in values:
            yield value
            for user in dict.fromkeys(value._uses):
                if self.category[user] == "view":
                    yield from self._with_views(user.outputs)

    def _readers(self, node: Node) -> list[Node]:
        """The nodes that read the results of a node or a view of them."""
        users = [u for v in self._with_views(node.outputs) for u in v._uses]
        return [u for u in users if self.category[u] != "view"]

    def _reads_memory(self, node: Node) -> bool:
        """Whether a node reads operands from memory that it might compute."""
        return self.category[node] in ("kernel", "reduction") or node in self.in_call

    def _reads_memory_back(self, node: Node) -> bool:
        """Whether its backward step does: that of a call of a library, and one that sums up the
        gradient of a broadcast operand."""
        if self.category[node] not in ("cheap", "costly"):
            return True
        return any(v in self.active and _is_broadcast(v, node) for v in _values(node))

    def find_roots(self) -> None:
        """For every value the buffers that reading it reads: in the forward pass, in the backward
        pass, and there if all is computed that can be; and the FLOPs of what was absorbed."""
        self.roots: dict[Value, frozenset[int]] = {}
        self.roots_back: dict[Value, frozenset[int]] = {}
        self.behind: dict[Value, frozenset[int]] = {}
        self.inside: dict[Value, int] = {}
        self.ops: list[Node] = [n for n in self.graph.nodes if n not in self.absorbed]
        number = {node: i for i, node in enumerate(self.ops)}
        nothing: frozenset[int] = frozenset()
        for value in (*self.graph.inputs, *self.graph.constants):
            self.roots[value] = self.roots_back[value] = self.behind[value] = nothing
            self.inside[value] = 0
        for node in self.graph.nodes:
            values = set(_values(node))
            roots = back = behind = frozenset((number[node],)) if node in number else nothing
            cost = 0
            if node in self.absorbed:
                roots = nothing.union(*(self.roots[v] for v in values))
                cost = sum(self.inside[v] for v in values) + node_flops(node, self.flops_known)
            if node in self.absorbed or node in self.repeated_back:
                back = nothing.union(*(self.roots_back[v] for v in values))
            if node in self.absorbed or node in self.repeated:
                behind = nothing.union(*(self.behind[v] for v in values))
            for value in node.outputs:
                self.roots[value], self.inside[value] = roots, cost
                self.roots_back[value], self.behind[value] = back, behind

    def assemble(self) -> MemoryModel:
        ops = self.ops
        cotangents, gathered = self._cotangent_bytes()
        needs: list[set[int]] = [set() for _ in ops]
        behind: list[set[int]] = [set() for _ in ops]
        extra = [0] * len(ops)
        peaks = [0] * len(ops)
        waiting = [0] * len(ops)
        fixed = [False] * len(ops)
        step = -1  # the last buffer at a node or before: its backward step takes the node's too
        for node in self.graph.nodes if ops else ():
            step = min(step + (node not in self.absorbed), len(ops) - 1)
            at = max(step, 0)
            fixed[at] |= bool(node.effects)
            peaks[at] = max(peaks[at], cotangents.get(node, 0))
            waiting[at] = max(waiting[at], gathered.get(node, 0))
            if node in self.read:
                for value in _read(node, self.read[node]):
                    needs[at] |= self.roots_back[value]
                    if not self._reads_memory_back(node):
                        behind[at] |= self.behind[value]
                extra[at] += self.read[node].extra + self._divisor_bytes(node)
        # What waits grows while the backward pass goes on.
        for i in reversed(range(len(ops) - 1)):
            waiting[i] = max(waiting[i], waiting[i + 1])
        return MemoryModel(
            sizes=[sum(nbytes(v.aval) for v in node.outputs) for node in ops],
            flops=[
                node_flops(node, self.flops_known) + sum(self.inside[v] for v in set(_values(node)))
                for node in ops
            ],
            args=[_sorted(r for v in _values(node) for r in self.roots[v]) for node in ops],
            needs=[_sorted(found) for found in needs],
            behind=[_sorted(more - found) for more, found in zip(behind, needs, strict=True)],
            cotangents=peaks,
            gathered=waiting,
            extra=extra,
            fixed=fixed,
            cuts=self._cuts(),
            nodes=ops,
            graph=self.graph,
            active=self.active,
            residuals=self.residuals,
        )

    def _cotangent_bytes(self) -> tuple[dict[Node, int], dict[Node, int]]:
        """Bytes alive while each node is pulled back: of cotangents of what it computed or was
        computed from, and of the terms of gradients of arguments.

        The terms of an argument's gradient are added up at once when all of them are there: XLA
        makes one kernel of the additions.
        """
        argument = self._arguments()
        left: dict[Value, int] = {}  # terms that are to come
        for node in self.read:
            if node.outputs[0] not in argument:
                for value in {argument[v] for v in _values(node) if v in argument}:
                    left[value] = left.get(value, 0) + 1
        waits: dict[Value, int] = {}
        buffer: dict[Value, list[int]] = {}  # [bytes, how many values share it]
        live = waiting = 0
        during: dict[Node, int] = {}
        gathered: dict[Node, int] = {}
        for value in self.is_output.intersection(self.active).difference(argument):
            buffer[value] = [nbytes(value.aval), 1]
            live += nbytes(value.aval)
        for node in reversed(self.graph.nodes):
            given = [buffer.pop(v) for v in node.outputs if v in buffer]
            if not given:
                continue
            # An element-wise operation writes its result over its operand.
            in_place = self.category[node] in ("view", "cheap", "costly")
            shares = given[0] if node.op in operations.PASSES_ON and len(given) == 1 else None
            for shared in given:
                shared[1] -= 1
            freed = sum(size for size, users in given if users == 0)
            peak = live
            live -= freed
            made = 0
            taken = node in self.read
            made += self.work(node) if taken else 0
            for value in dict.fromkeys(argument.get(v, v) for v in _values(node)) if taken else ():
                size = nbytes(value.aval)
                if value not in self.active:
                    continue
                if value in left:
                    # Of a slice the part waits: what is around it is zeros, which nobody writes.
                    part = sum(share for share, _ in given)
                    term = min(size, part) if self.category[node] == "view" else size
                    left[value] -= 1
                    waits[value] = waits.get(value, 0) + term
                    waiting += term
                    if left[value] == 0:
                        waiting -= waits[value]
                elif value in buffer and buffer[value][1] == 1:
                    made += 0 if in_place else size  # beside the one that it is added to
                elif value in buffer:  # the sum goes to a buffer of its own
                    buffer[value][1] -= 1
                    buffer[value] = [size, 1]
                    live += size
                elif shares is not None and size == shares[0]:
                    if shares[1] == 0:
                        live += size
                    shares[1] += 1
                    buffer[value] = shares
                else:
                    buffer[value] = [size, 1]
                    live += size
            during[node] = max(peak, live + made + (0 if in_place else freed))
            gathered[node] = waiting
        return during, gathered

    def _arguments(self) -> dict[Value, Value]:
        """The arguments and constants, and for those in another shape which they are: of these
        the gradient is written at once to where that of the argument belongs."""
        found = {v: v for v in (*self.graph.inputs, *self.graph.constants)}
        for node in self.graph.nodes:
            if node.op in operations.RESHAPES and node.outputs[0] not in self.is_output:
                source = node.inputs[0]
                if isinstance(source, Value) and source in found:
                    found[node.outputs[0]] = found[source]
        return found

    def _divisor_bytes(self, node: Node) -> int:
        """Bytes of a broadcast divisor that is written out for the backward pass.

        It is that of a softmax before a product. The gradient, divided by it, goes into the library
        call that starts with the product's own gradient, and which does not take a broadcast that
        the forward pass has as well. If the sums are few, they are no work for the library.
        """
        if not self.fused or node.op != "div":
            return 0
        divisor = node.inputs[1]
        if not isinstance(divisor, Value) or divisor not in self.active:
            return 0
        if not _is_broadcast(divisor, node) or _distinct_elements(divisor) < LIBRARY_ELEMENTS:
            return 0
        readers = self._readers(node)
        is_product = [reader.op == "dot_general" for reader in readers]
        return nbytes(node.outputs[0].aval) if readers and all(is_product) else 0

    def work(self, node: Node) -> int:
        """Bytes that the backward pass of a loop or a recomputed region needs inside: those of one
        iteration with everything kept."""
        if isinstance(node, CustomGradient) or not node.regions:
            return self._transposed_bytes(node)
        is_scan = node.primitive is _jax.SCAN
        inside = max(
            self._region_peak(node, region) - self._cotangents_from_outside(node, region)
            for region in node.regions.values()
        )
        return max(inside, 0) + (handed_bytes(node) if is_scan else 0)

    def _transposed_bytes(self, node: Node) -> int:
        """Bytes of the transposed copies from which the gradient of a convolution's kernel is
        computed, of what the kernel was applied to and of the cotangent."""
        if not self.fused or node.op != "conv_general_dilated" or node.inputs[1] not in self.active:
            return 0
        return nbytes(node.inputs[0].aval) + nbytes(node.outputs[0].aval)

    def _cotangents_from_outside(self, node: Node, region: Graph) -> int:
        """Bytes of cotangents that are counted inside a region as well as outside; a loop has
        those of its carry where they were before it."""
        pairs = list(zip(region.outputs, node.outputs, strict=False))
        if node.primitive is _jax.SCAN:
            pairs = pairs[: _jax.scan_split(node.params)[1]]
        both = {
            inner for inner, outer in pairs if isinstance(inner, Value) and outer in self.active
        }
        return sum(nbytes(v.aval) for v in both)

    def _region_peak(self, node: Node, region: Graph) -> int:
        if region not in self.peaks_known:
            try:
                body = flatten(region)
                is_scan = node.primitive is _jax.SCAN
                active = active_in_body(node, body, self.active) if is_scan else None
                inside = model(body, fused=self.fused, active=active, residuals=self.residuals)
                self.peaks_known[region] = keep_all(inside).peak
            except ValueError:  # it has no gradient by itself
                self.peaks_known[region] = 0
        return self.peaks_known[region]

    def _cuts(self) -> list[int | None]:
        """The place before each buffer's node where the fewest bytes go from one side to the other.

        Results that are no buffers would be, if they went over a region's border.
        """
        graph = self.graph
        last = {v: max((self.index[u] for u in v._uses), default=-1) for v in self.roots}
        for v in self.is_output:
            last[v] = len(graph.nodes)
        changes = [0] * (len(graph.nodes) + 2)
        for node in graph.nodes:
            at = self.index[node]
            for v in node.outputs:
                if last[v] > at:
                    changes[at + 1] += nbytes(v.aval)
                    changes[last[v] + 1] -= nbytes(v.aval)
        crossing, total = [], 0
        for change in changes:
            total += change
            crossing.append(total)
        self.crossing = crossing
        cuts: list[int | None] = []
        before = 0
        for node in self.ops:
            at = self.index[node]
            cuts.append(min(range(before, at + 1), key=lambda p: (crossing[p], -p)))
            before = at + 1
        return cuts


def handed_bytes(scan: Node) -> int:
    """Bytes of what a kernel or a loop inside an iteration needs for itself of what comes into it:
    the slices that are cut out for it, and, for slices and constants, the gradients that it writes
    before they are put in their places or added up."""
    body = scan.regions["jaxpr"]
    constants, carried = _jax.scan_split(scan.params)
    read = [v for v in body.inputs[:constants] if _is_read_by_kernel(v)]
    cut = [v for v in body.inputs[constants + carried :] if _is_read_by_kernel(v)]
    gradients = [v for v in (*read, *cut) if v.has_gradient]
    return sum(nbytes(v.aval) for v in (*cut, *gradients))


def _is_read_by_kernel(value: Value) -> bool:
    for user in value._uses:
        category = _category(user)
        if category == "kernel" or (
            category == "view" and any(map(_is_read_by_kernel, user.outputs))
        ):
            return True
    return False


def _values(node: Node) -> list[Value]:
    return [v for v in node.inputs if isinstance(v, Value)]


def _read(node: Node, residuals: Residuals) -> Iterable[Value]:
    """The values of its graph that the backward pass of a node reads."""
    for i in residuals.operands:
        value = node.inputs[i]
        if isinstance(value, Value):
            yield value
    for i in residuals.results:
        yield node.outputs[i]


def _sorted(positions: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(positions)))


def _category(node: Node) -> str:
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
        inner = {_category(n) for n in region.nodes}
        if inner <= {"view", "cheap"}:
            return "cheap"
        if inner <= {"view", "cheap", "costly"}:
            return "costly"
    return "kernel"


def _is_unary(node: Node) -> bool:
    """Whether at most one operand has as many dimensions longer than one as the result, and is no
    broadcast."""
    rank = max(_rank(v) for v in node.outputs)
    return sum(_rank(v) >= rank and not _is_spread(v) for v in set(_values(node))) <= 1


def _reads_alone(node: Node) -> bool:
    """Whether a node reads one array and nothing beside it: in its backward step, too, it is a
    function of that array alone which the gradient is multiplied by."""
    return len(set(_values(node))) == 1


def _is_broadcast(operand: Value, node: Node) -> bool:
    """Whether an operand has fewer elements than an element-wise result."""
    return _is_spread(operand) or elements(operand.aval) < elements(node.outputs[0].aval)


def _is_spread(value: Value) -> bool:
    producer = value.producer
    while producer is not None and producer.op in operations.REARRANGES and _values(producer):
        producer = _values(producer)[0].producer
    return producer is not None and producer.op in ("broadcast_in_dim", "iota")


def _distinct_elements(value: Value) -> int:
    """How many elements a value has before it is broadcast."""
    found, producer = elements(value.aval), value.producer
    while producer is not None and producer.op in operations.REARRANGES | {"broadcast_in_dim"}:
        (source,) = _values(producer) or (None,)
        if source is None:
            return 1
        found, producer = min(found, elements(source.aval)), source.producer
    return found


def _rank(value: Value) -> int:
    return sum(length != 1 for length in value.aval.shape)
