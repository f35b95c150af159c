"""What tells one program from another, in any process: operations, parameters, regions and types.

The values of constants do not count, since no plan depends on them, nor do names and source lines.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node, Value

_DEEPEST = 8  # functions in functions, as far as they are looked into


def fingerprint(graph: Graph) -> str:
    """Equal for programs of the same operations with the same parameters, on the same types in the
    same order, at any depth."""
    return _of_graph(graph, {}, with_rules=True)


def _of_graph(graph: Graph, known: dict[tuple[Graph, bool], str], with_rules: bool) -> str:
    """`with_rules`: those of custom gradients count. They do not in one another, where none is
    differentiated: a rule that uses itself would have no end."""
    if (graph, with_rules) in known:
        return known[graph, with_rules]
    number: dict[Value, int] = {}
    digest = hashlib.sha256()

    def write(*texts: str) -> None:
        for text in texts:
            digest.update(f"{len(text)}:{text}".encode())

    def define(values: Sequence[Value]) -> None:
        for value in values:
            number[value] = len(number)
            write(_jax.type_text(value.aval))

    def read(values: Sequence[Any]) -> None:
        for v in values:
            literal = not isinstance(v, Value)
            write(f"{v!r}: {_jax.type_text(v.aval)}" if literal else f"%{number[v]}")

    define(graph.inputs)
    write("closes over")
    define(tuple(graph.constants))
    for node in graph.nodes:
        write("node", node.op)
        read(node.inputs)
        for name, value in sorted(node.params.items()):
            is_title = name == "name" and bool(node.regions)  # that of `checkpoint_name` counts
            is_rule = isinstance(node, CustomGradient) and callable(value)
            if not (is_title or is_rule):
                write(name, _described(value, programs=not node.regions))
        for name, region in _regions(node, with_rules):
            inner = with_rules and not isinstance(node, CustomGradient)
            write("region", name, _of_graph(region, known, inner))
        define(node.outputs)
    write("returns")
    read(graph.outputs)
    return known.setdefault((graph, with_rules), digest.hexdigest())


def _regions(node: Node, with_rules: bool) -> list[tuple[str, Graph]]:
    """The regions of a node, and what a rule says as programs."""
    regions = sorted(node.regions.items())
    if with_rules and isinstance(node, CustomGradient):
        for name in node.face_names:
            try:
                regions.append((name, node.face(name)))
            except Exception:  # who differentiates it is told why
                return regions
    return regions


def _described(value: Any, *, programs: bool = False, depth: int = _DEEPEST) -> str:
    """A parameter as text that is the same in every process: without addresses and hashes.

    `programs`: whether those in it count; where they are regions, they are told as such.
    """
    describe: Callable[[Any], str] = functools.partial(
        _described, programs=programs, depth=depth - 1
    )
    if depth == 0:
        return type(value).__qualname__
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.generic | np.dtype):
        return str(value)
    if isinstance(value, np.ndarray | jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return str(value) if programs else "a program"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{describe(k)}: {describe(v)}' for k, v in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(describe, value)))}}}"
    if isinstance(value, tuple | list):
        return f"{type(value).__qualname__}({', '.join(map(describe, value))})"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__qualname__}{describe(fields)}"
    if callable(value):
        return _described_function(value, describe)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _described_function(function: Any, describe: Callable[[Any], str]) -> str:
    """What a function does, as far as its code and what it closes over tell."""
    if isinstance(function, functools.partial):
        return f"partial({describe((function.func, function.args, function.keywords))})"
    if isinstance(function, MethodType):
        return f"{describe(type(function.__self__))}.{describe(function.__func__)}"
    if isinstance(function, FunctionType):
        cells = [_content(cell) for cell in function.__closure__ or ()]
        parts = describe((function.__defaults__, function.__kwdefaults__, cells))
        return f"{_described_code(function.__code__, describe)}{parts}"
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        return describe(inner)
    return f"{type(function).__qualname__} {getattr(function, '__qualname__', '')}"


def _described_code(code: CodeType, describe: Callable[[Any], str]) -> str:
    constants = [
        _described_code(c, describe) if isinstance(c, CodeType) else describe(c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()}{code.co_names}{constants}"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
