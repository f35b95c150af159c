"""The text form of a graph, made to be read.

One node a line: results, operation, operands, parameters that say something, type, source line.
The three gradient annotations stand out by a sign of their own; a region follows the first node
that enters it, indented; a line tells when the named scope changes. The form is stable: it holds no
addresses, no absolute paths, and the same program prints the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tracegrad import _jax
from tracegrad.ir.nodes import (
    CustomGradient,
    Literal,
    Node,
    Recompute,
    StopGradient,
    Value,
)
from tracegrad.ir.occurrence import Occurrence, Path

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph

CUSTOM, STOP, RECOMPUTE = "◆", "■", "↻"
_WIDTH = 100
_INDENT = "│ "
_KNOWN = " (as above)"

# Parameters that repeat what the line says already, or say nothing of the mathematics.
_SILENT = frozenset(
    """
    name jaxpr call_jaxpr jaxprs num_consts num_carry ft_in ft_out cond_nconsts body_nconsts
    const_lengths linear unroll in_shardings out_shardings in_layouts out_layouts donated_invars
    ctx_mesh keep_unused inline compiler_options_kvs differentiated prevent_cse policy
    symbolic_zeros fwd_jaxpr_thunk bwd out_trees jvp_jaxpr_fun shape weak_type accuracy sharding
    out_sharding in_tree out_tree logging_record np_printoptions static_args partitioned
    preferred_element_type has_placeholders transpose_unary_op indices_are_sorted unique_indices
    """.split()  # noqa: SIM905
)


def format_graph(graph: Graph) -> str:
    """The whole text of a graph, regions included; see `Graph.__str__`."""
    return "\n".join(_graph_lines(graph, (), set(), set()))


def _graph_lines(graph: Graph, path: Path, seen: set[Graph], texts: set[str]) -> list[str]:
    graph.name_values()
    lines = _header(graph)
    rows = []
    scope = ""
    for node in graph.nodes:
        inner = _jax.name_stack(node.source.info) if node.source is not None else ""
        if inner != scope:
            rows.append(("scope", inner or "(no scope)", "", ""))
            scope = inner
        origin = Occurrence(path, node).origin
        place = "" if origin is None else origin.place
        rows.append(("node", _statement(node, seen), _types(node.outputs), place))
        for name, region in node.regions.items():
            if region not in seen:
                seen.add(region)
                title = "" if name in ("jaxpr", "call_jaxpr") else f"{name}: "
                body = _graph_lines(region, (*path, (node, name)), seen, texts)
                body[0] = title + body[0]
                # A function that was traced anew for each call is one thing to a reader.
                if (text := "\n".join(body)) in texts:
                    rows[-1] = ("node", f"{rows[-1][1]}{_KNOWN}", *rows[-1][2:])
                    continue
                texts.add(text)
                rows.extend(("text", _INDENT + line, "", "") for line in body)
    lines += _aligned(rows)
    lines.append(f"  return {', '.join(map(_operand, graph.outputs))}".rstrip())
    return lines


def _header(graph: Graph) -> list[str]:
    arguments = [f"{v.name}: {_jax.type_text(v.aval)}" for v in graph.inputs]
    results = ", ".join(_jax.type_text(aval) for aval in graph.out_avals)
    line = f"{graph.name}({', '.join(arguments)}) -> {results or '()'}"
    if len(line) > _WIDTH and len(arguments) > 1:
        lines = [f"{graph.name}(", *(f"    {a}," for a in arguments), f") -> {results or '()'}"]
    else:
        lines = [line]
    for value in graph.constants:
        lines.append(f"  {value.name}: {_jax.type_text(value.aval)} is a constant")
    return lines


def _aligned(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Sets types and source lines in columns, as far as lines are short enough for that."""
    fits = [len(left) for kind, left, _, _ in rows if kind == "node" and len(left) <= 56]
    column = max(fits, default=0)
    type_fits = [len(t) for kind, _, t, _ in rows if kind == "node" and len(t) <= 24]
    type_column = max(type_fits, default=0)
    lines = []
    for kind, left, types, place in rows:
        if kind == "scope":
            lines.append(f"  # {left}")
        elif kind == "text":
            lines.append(f"  {left}")
        else:
            lines.append(f"  {left:<{column}}  {types:<{type_column}}  {place}".rstrip())
    return lines


def _statement(node: Node, seen: set[Graph]) -> str:
    results = ", ".join(v.name for v in node.outputs) or "_"
    operands = ", ".join(map(_operand, node.inputs))
    label = node.op
    if isinstance(node, CustomGradient):
        label = f"{CUSTOM} custom_gradient[{node.kind}] {node.name}"
    elif isinstance(node, StopGradient):
        label = f"{STOP} stop_gradient"
    elif isinstance(node, Recompute):
        policy = "" if node.policy is None else f"[{_jax.policy_name(node.policy)}]"
        label = f"{RECOMPUTE} recompute{policy} {node.name}"
    elif node.regions:
        label = f"{node.op} {node.name}" if node.name != node.op else node.op
    parameters = "" if isinstance(node, CustomGradient) else _parameters(node)
    # A reader who has met a region above is told so, and not shown it again.
    known = _KNOWN if any(region in seen for region in node.regions.values()) else ""
    return f"{results} = {label}({operands}){parameters}{known}"


def _types(values: Sequence[Value]) -> str:
    return ", ".join(_jax.type_text(v.aval) for v in values)


def _operand(value: Value | Literal) -> str:
    if isinstance(value, Value):
        return value.name
    array = np.asarray(value.value) if np.ndim(value.value) == 0 else None
    return str(value.value if array is None else array.item())


def _parameters(node: Node) -> str:
    shown = {key: _parameter(value) for key, value in node.params.items() if key not in _SILENT}
    if node.op == "dot_general":
        shown = {**_product_axes(node), **shown, "dimension_numbers": ""}
    text = " ".join(f"{key}={value}" for key, value in shown.items() if value)
    return f" {text}" if text else ""


def _product_axes(node: Node) -> dict[str, str]:
    """The contracted and batch axes of a product; nothing for the ordinary ``x @ w``."""
    contracted, batch = node.params["dimension_numbers"]
    ordinary = ((len(node.inputs[0].aval.shape) - 1,), (0,))
    pairs = {"contract": () if contracted == ordinary else contracted, "batch": batch}
    return {
        key: "·".join(f"({','.join(map(str, axes))})" for axes in sides)
        for key, sides in pairs.items()
        if any(sides)
    }


def _parameter(value: Any) -> str:
    """A short text without addresses; "" for what has none or says nothing."""
    if value is None or value is False or isinstance(value, (dict, frozenset, set)):
        return ""
    if isinstance(value, (bool, int, float, complex)):
        return str(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else repr(value[:37] + "...")
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, tuple):
        return _tuple(value)
    if callable(value) or _jax.is_program(value):
        return ""
    text = str(value)
    return text if " at 0x" not in text and "\n" not in text and len(text) <= 40 else ""


def _tuple(value: tuple[Any, ...]) -> str:
    if not value or any(_jax.is_program(v) for v in value):
        return ""
    fields = getattr(value, "_fields", None)  # a named tuple, as gather's dimension numbers are
    parts = [_parameter(v) or ("()" if v == () else "") for v in value]
    if fields is not None:
        parts = [f"{k}={p}" for k, p in zip(fields, parts, strict=True) if p and p != "()"]
    parts = [p for p in parts if p]
    return f"({parts[0]},)" if len(parts) == 1 and fields is None else f"({', '.join(parts)})"
