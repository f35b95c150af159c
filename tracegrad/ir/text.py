"""The text form of a graph, made to be read.

One node a line: results, operation, operands, informative parameters, type, source line. A sign
marks each of the three gradient annotations. A region follows, indented, the first node that has
the region. A line says where the named scope changes. The form is stable: it contains no addresses
and no absolute paths, and the same program prints the same text.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.ir.nodes import Atom, CustomGradient, Node, Recompute, StopGradient, Value
from tracegrad.ir.occurrence import Occurrence, Path
from tracegrad.ir.scopes import around
from tracegrad.ir.scopes import text as scope_text

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph

# Returns a line of text. Takes the path to a node, the node, and the line's three aligned columns:
# statement, types and source line.
Paint = Callable[[Path, Node, str, str, str], str]

CUSTOM, STOP, RECOMPUTE = "◆", "■", "↻"
_WIDTH = 100
_INDENT = "│ "
_AS_ABOVE = " (as above)"

# Parameters that repeat other parts of the line, or that do not matter for the mathematics.
_HIDDEN = frozenset(
    """
    name jaxpr call_jaxpr jaxprs num_consts num_carry ft_in ft_out cond_nconsts body_nconsts
    const_lengths linear unroll in_shardings out_shardings in_layouts out_layouts donated_invars
    ctx_mesh keep_unused inline compiler_options_kvs differentiated prevent_cse policy
    symbolic_zeros fwd_jaxpr_thunk bwd out_trees jvp_jaxpr_fun shape weak_type accuracy sharding
    out_sharding in_tree out_tree logging_record np_printoptions static_args partitioned
    preferred_element_type has_placeholders transpose_unary_op indices_are_sorted unique_indices
    """.split()  # noqa: SIM905
)
# Parameters of windows and convolutions, each hidden if all its entries are this number.
_DEFAULTS = {
    "padding": 0,
    "window_strides": 1,
    **dict.fromkeys(("base_dilation", "window_dilation", "lhs_dilation", "rhs_dilation"), 1),
    **dict.fromkeys(("feature_group_count", "batch_group_count"), 1),
}


def plain(path: Path, node: Node, left: str, types: str, place: str) -> str:
    return f"{left}  {types}  {place}".rstrip()


def format_graph(graph: Graph, paint: Paint = plain) -> str:
    return "\n".join(_graph_lines(graph, (), set(), set(), paint))


def _graph_lines(
    graph: Graph, path: Path, seen: set[Graph], texts: set[str], paint: Paint
) -> list[str]:
    """Returns the lines of a graph; `seen` has the regions printed so far, `texts` their texts."""
    lines = header(graph)
    rows: list[_Row] = []
    scope = ""
    for node in graph.nodes:
        inner = scope_text(around(node))
        if inner != scope:
            rows.append(_Row(f"# {inner or '(no scope)'}"))
            scope = inner
        origin = Occurrence(path, node).origin
        place = "" if origin is None else origin.place
        note = _AS_ABOVE if any(region in seen for region in node.regions.values()) else ""
        rows.append(_Row(f"{statement(graph, node)}{note}", types_text(node.outputs), place, node))
        for name, region in node.regions.items():
            if region not in seen:
                seen.add(region)
                title = "" if name in ("jaxpr", "call_jaxpr") else f"{name}: "
                body = _graph_lines(region, (*path, (node, name)), seen, texts, paint)
                body[0] = title + body[0]
                # Regions of equal text are printed once: JAX may trace a function for each call.
                if (text := "\n".join(body)) in texts:
                    rows[-1].left += _AS_ABOVE
                    continue
                texts.add(text)
                rows.extend(_Row(_INDENT + line) for line in body)
    lines += _align_columns(rows, path, paint)
    lines.append(f"  return {operands_text(graph, graph.outputs)}".rstrip())
    return lines


def header(graph: Graph) -> list[str]:
    """Returns lines with the name, inputs and results of a graph, and with its constants."""
    arguments = [value_text(graph, value) for value in graph.inputs]
    results = ", ".join(_jax.type_text(aval) for aval in graph.out_avals)
    line = f"{graph.name}({', '.join(arguments)}) -> {results or '()'}"
    if len(line) > _WIDTH and len(arguments) > 1:
        lines = [f"{graph.name}(", *(f"    {a}," for a in arguments), f") -> {results or '()'}"]
    else:
        lines = [line]
    for value in graph.constants:
        lines.append(f"  {value_text(graph, value)} is a constant")
    return lines


@dataclass
class _Row:
    left: str
    types: str = ""
    place: str = ""
    node: Node | None = None  # None: the line is only the text `left`


def _align_columns(rows: Sequence[_Row], path: Path, paint: Paint) -> list[str]:
    """Aligns types and source lines in columns; long lines do not widen the columns."""
    nodes = [row for row in rows if row.node is not None]
    column = max((len(row.left) for row in nodes if len(row.left) <= 56), default=0)
    type_column = max((len(row.types) for row in nodes if len(row.types) <= 24), default=0)
    lines = []
    for row in rows:
        if row.node is None:
            lines.append(f"  {row.left}")
        else:
            left, types = f"{row.left:<{column}}", f"{row.types:<{type_column}}"
            lines.append(f"  {paint(path, row.node, left, types, row.place)}")
    return lines


def statement(graph: Graph, node: Node) -> str:
    """Returns a node as an assignment, ``y = dot_general(x, w)``."""
    results = ", ".join(graph.names[v] for v in node.outputs if v in graph.names) or "_"
    operands = operands_text(graph, node.inputs)
    return f"{results} = {_label(node)}({operands}){parameters(node)}"


def _label(node: Node) -> str:
    """Returns a node's operation or annotation: ``mul``, ``◆ custom_gradient[vjp] clip``."""
    if isinstance(node, CustomGradient):
        return f"{CUSTOM} custom_gradient[{node.kind}] {node.name}"
    if isinstance(node, StopGradient):
        return f"{STOP} stop_gradient"
    if isinstance(node, Recompute):
        policy = "" if node.policy is None else f"[{_jax.policy_name(node.policy)}]"
        return f"{RECOMPUTE} recompute{policy} {node.name}"
    return f"{node.op} {node.name}" if node.regions and node.name != node.op else node.op


def names_of(graph: Graph) -> dict[Value, str]:
    """See `Graph.names`."""
    input_hints = graph.hints or [""] * len(graph.inputs)
    hints = [(value, hint or "arg") for value, hint in zip(graph.inputs, input_hints)]
    hints += [(value, "const") for value in graph.constants]
    hints += [(value, node.name) for node in graph.nodes for value in node.outputs]
    taken: dict[str, int] = {}
    return {value: _make_unique(taken, *_readable_name(hint)) for value, hint in hints}


def _make_unique(taken: dict[str, int], base: str, name: str) -> str:
    """Appends a number to `base` if `name` is taken; `taken` has the last number of each base."""
    while name in taken:  # `x_1` may be an argument's own name
        taken[base] = taken.get(base, 0) + 1
        name = f"{base}_{taken[base]}"
    taken.setdefault(name, 0)
    return name


def _readable_name(hint: str) -> tuple[str, str]:
    """Returns the base of a value's name, and the first name to try, made from a hint.

    The hint is the path of a leaf (``params.dense.kernel.0``, or in a region JAX's
    ``params['dense'].kernel[0]``, with the same result), or the name of an operation. As in
    torch.fx, the name is not a keyword or a builtin.
    """
    parts = re.split(r"\W*[\[\].]\W*", hint)
    base = ".".join(filter(None, (re.sub(r"\W+", "_", part).strip("_") for part in parts)))
    base = base or "value"
    if base[0].isdigit():
        base = f"v{base}"
    return base, f"{base}_" if keyword.iskeyword(base) or hasattr(builtins, base) else base


def types_text(values: Sequence[Value]) -> str:
    """Returns the types of values, ``f32[8,4], i32[]``."""
    return ", ".join(_jax.type_text(v.aval) for v in values)


def operands_text(graph: Graph, atoms: Iterable[Atom]) -> str:
    """Returns operands, ``x, 2.0``."""
    return ", ".join(operand_text(graph, atom) for atom in atoms)


def operand_text(graph: Graph, atom: Atom) -> str:
    return graph.names.get(atom, "?") if isinstance(atom, Value) else str(np.asarray(atom.val))


def value_text(graph: Graph, atom: Atom) -> str:
    """Returns a value with its type, ``x: f32[3]``; a literal without."""
    if not isinstance(atom, Value):
        return operand_text(graph, atom)
    return f"{operand_text(graph, atom)}: {_jax.type_text(atom.aval)}"


def parameters(node: Node) -> str:
    """Returns a node's informative parameters, each after a space: `` axes=(0,)``."""
    if isinstance(node, CustomGradient):
        return ""
    shown = {
        key: _parameter_text(value)
        for key, value in node.params.items()
        if key not in _HIDDEN and not _is_default(key, value)
    }
    if node.op == "dot_general":
        shown = {**_product_axes(node), **shown, "dimension_numbers": ""}
    if node.op == "conv_general_dilated":
        shown["dimension_numbers"] = _layouts(*node.params["dimension_numbers"])
    text = " ".join(f"{key}={value}" for key, value in shown.items() if value)
    return f" {text}" if text else ""


def _is_default(key: str, value: Any) -> bool:
    return key in _DEFAULTS and all(each == _DEFAULTS[key] for each in jax.tree.leaves(value))


def _product_axes(node: Node) -> dict[str, str]:
    """Returns the contracted and batch axes of a product; nothing for the ordinary ``x @ w``."""
    contracted, batch = node.params["dimension_numbers"]
    ordinary = ((len(node.inputs[0].aval.shape) - 1,), (0,))
    pairs = {"contract": () if contracted == ordinary else contracted, "batch": batch}
    return {
        key: "·".join(f"({','.join(map(str, axes))})" for axes in sides)
        for key, sides in pairs.items()
        if any(sides)
    }


def _layouts(lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> str:
    """Returns the axes of a convolution as XLA writes them: ``b01f_01io->b01f``."""

    def letters(axes: Sequence[int], names: str) -> str:
        places = zip(axes, itertools.chain(names, map(str, itertools.count())), strict=False)
        return "".join(name for _, name in sorted(places))

    return f"{letters(lhs, 'bf')}_{letters(rhs, 'oi')}->{letters(out, 'bf')}"


def _parameter_text(value: Any) -> str:
    """Returns a short text of a parameter without addresses; "" to hide the parameter."""
    if value is None or value is False or isinstance(value, (dict, frozenset, set)):
        return ""
    if isinstance(value, (bool, int, float, complex)):
        return str(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else repr(value[:37] + "...")
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, tuple):
        return _tuple_text(value)
    if callable(value) or isinstance(value, _jax.PROGRAM_TYPES):
        return ""
    text = str(value)
    return text if " at 0x" not in text and "\n" not in text and len(text) <= 40 else ""


def _tuple_text(value: tuple[Any, ...]) -> str:
    if any(isinstance(v, _jax.PROGRAM_TYPES) for v in value):
        return ""
    fields = getattr(value, "_fields", None)  # a named tuple, as gather's dimension numbers are
    names = [""] * len(value) if fields is None else [f"{field}=" for field in fields]
    parts = [name + part for name, part in zip(names, map(_parameter_text, value)) if part]
    if fields is None and len(parts) == 1:
        return f"({parts[0]},)"
    return f"({', '.join(parts)})" if parts else ""
