"""Raises a program to double precision, whatever dtypes it computes in.

Each operation runs on float64 (complex128) operands, and these dtypes replace narrower ones among
its parameters: a conversion to bfloat16 then changes nothing. An operation that cannot run in
double precision (a callback, a kernel, a bitcast) runs in its own dtype, on operands that are
converted to that dtype. Of a custom rule, the faces (its parts as graphs) are raised: so the
arithmetic of the rule is checked, and not the rounding of its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tracegrad import _jax
from tracegrad._jax.caches import once_for_each
from tracegrad.insight.bound_functions import bind_functions
from tracegrad.ir import CustomGradient, Graph, Literal, Node, RegionNode, Value
from tracegrad.ir.authors import is_jaxs_rule
from tracegrad.ir.nodes import has_gradient
from tracegrad.ir.running import read, run_graph, run_node, run_nodes

EPS = float(np.finfo(np.float64).eps)
# Scatters hold programs that have one dtype. These functions of JAX write them for another dtype.
_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter_add": lax.scatter_add,
    "scatter_mul": lax.scatter_mul,
    "scatter_min": lax.scatter_min,
    "scatter_max": lax.scatter_max,
}


class Arithmetic:
    """Runs graphs in double precision, whatever dtypes they are in.

    Tracing a run is enough to update `eps` and `constant_eps`.

    Attributes:
      is_exact: whether the graphs run as they are, since they are in double precision already, and
        have no `while` loops.
      eps: the machine epsilon of the least precise dtype in which an operation had to run so far.
      constant_eps: the machine epsilon of the least precise dtype of a literal so far, not counting
        literals that no dtype rounds.
    """

    def __init__(self, is_exact: bool) -> None:
        self.is_exact = is_exact
        self.eps = EPS
        self.constant_eps = 0.0

    def run_graph(self, graph: Graph, args: Sequence[Any]) -> list[Any]:
        if self.is_exact:
            return run_graph(graph, args)
        given = [_raised(x, v.aval) for x, v in zip(args, graph.inputs, strict=True)]
        outs = read(graph.outputs, run_nodes(graph, given, self.run_node))
        return [_raised(x, v.aval) for x, v in zip(outs, graph.outputs, strict=True)]

    def run_node(self, node: Node, args: Sequence[Any]) -> list[Any]:
        if self.is_exact:
            return run_node(node, args)
        if any(_jax.is_reference(value.aval) for value in (*node.operands, *node.outputs)):
            return self._as_it_is(node, args)
        for v in node.inputs:
            if isinstance(v, Literal) and _eps(v) > self.constant_eps and not _is_round(v.val):
                self.constant_eps = _eps(v)
        operands = [_raised(x, v.aval) for x, v in zip(args, node.inputs, strict=True)]
        if isinstance(node, RegionNode):
            return self._run_regions(node, operands)
        if node.op == "reduce_precision":
            return operands
        function = _in_double(node)
        if function is None or not _runs_in_double(function, operands, node):
            return self._as_it_is(node, operands)
        return function(operands)

    def _run_regions(self, node: RegionNode, operands: list[Any]) -> list[Any]:
        def function_of(name: str) -> Callable[..., list[Any]]:
            def run(*args: Any) -> list[Any]:
                return self.run_graph(node.region(name), args)

            run.__name__ = run.__qualname__ = node.region(name).name
            return run

        if isinstance(node, CustomGradient) and not can_trace_faces(node):
            return self._as_it_is(node, operands)
        scope, settings = _jax.equation_context(*node.source)
        with scope, settings:
            results = bind_functions(node, operands, function_of)
        return self._as_it_is(node, operands) if results is None else results

    def _as_it_is(self, node: Node, args: Sequence[Any]) -> list[Any]:
        """Runs a node in its own dtypes, and converts its results to double precision."""
        given = [converted(x, v.aval) for x, v in zip(args, node.inputs, strict=True)]
        if any(map(has_gradient, node.operands)):
            values = [*node.outputs, *node.operands]
            for region in node.regions.values():
                values += _values_below(region)
            if any(map(has_gradient, node.outputs)):
                self.eps = max(self.eps, *map(_eps, values))
        results = run_node(node, given)
        return [_raised(y, v.aval) for y, v in zip(results, node.outputs, strict=True)]


def is_in_double(graph: Graph) -> bool:
    """Whether a graph computes in double precision alone, and has no `while` loops to bound."""
    inexact = graph.operations.intersection(("reduce_precision", "while"))
    return not inexact and all(_eps(v) <= EPS for v in _values_below(graph, with_faces=True))


def in_double(arrays: Iterable[Any]) -> list[Any]:
    """Converts the float and complex arrays to double precision."""
    return [_raised(array, jax.typeof(array)) for array in arrays]


@once_for_each
def can_trace_faces(node: CustomGradient) -> bool:
    """Whether all faces of a rule can be traced; this traces them. A rule may refuse to be traced
    on all of its inputs (rules of equinox may). It must be asked once, before anything is
    differentiated: JAX cannot use derivatives of the rule any more that it has kept from before a
    refusal."""
    try:
        for name in node.face_names:
            node.face(name)
    except Exception:
        return False
    return True


def _values_below(graph: Graph, with_faces: bool = False) -> Iterator[Value]:
    """Yields the values of a graph, of its regions and, `with_faces`, of the faces of the rules in
    them that are not JAX's own.

    Rules inside of faces are not entered: the forward face of most rules contains the rule itself.
    """
    pending, seen = [(graph, True)], {graph}
    while pending:
        here, is_program = pending.pop()
        yield from here.inputs
        yield from here.constants
        for node in here.nodes:
            yield from node.outputs
            below = [(region, is_program) for region in node.regions.values()]
            if is_program and with_faces and isinstance(node, CustomGradient):
                is_looked_into = not is_jaxs_rule(node) and can_trace_faces(node)
                names = node.face_names if is_looked_into else ()
                below += [(node.face(name), False) for name in names]
            pending += [pair for pair in below if pair[0] not in seen]
            seen.update(region for region, _ in below)


def _is_round(value: Any) -> bool:
    """Whether numbers have at most four bits, as 1, 0.5 and 10 do, so that no dtype rounds them."""
    number = np.asarray(value).astype(float)
    mantissa, _ = np.frexp(np.where(np.isfinite(number), number, 0.0))
    return bool(np.all((mantissa * 16) % 1 == 0))


def _eps(value: Value | Literal) -> float:
    dtype = getattr(value.aval, "dtype", None)
    finfo: Any = jnp.finfo
    return float(finfo(dtype).eps) if _jax.is_inexact(dtype) else 0.0


# ---------------------------------------------------------------------------------- one operation


def _double(dtype: Any) -> Any:
    """Returns the dtype of double precision that replaces a dtype."""
    wide = np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64
    return np.dtype(wide) if _jax.is_inexact(dtype) else dtype


def _raised(value: Any, aval: Any) -> Any:
    """Returns an operand in double precision; integers and others keep the program's dtype."""
    dtype = getattr(aval, "dtype", None)
    if _jax.is_inexact(dtype):
        return jnp.asarray(value, _double(dtype))
    return value if isinstance(value, jax.Array) or dtype is None else np.asarray(value, dtype)


def converted(value: Any, aval: Any) -> Any:
    """Converts an operand or a result to the type of a program."""
    dtype = getattr(aval, "dtype", None)
    return jnp.asarray(value, dtype) if _jax.is_inexact(dtype) else _raised(value, aval)


def _in_double(node: Node) -> Callable[[list[Any]], list[Any]] | None:
    """Returns a node's operation with dtypes of double precision among its parameters; None if its
    parameters hold programs, whose dtypes are fixed."""
    if node.op in _SCATTERS:
        return functools.partial(_scatter, node)
    if _jax.sub_programs(node.params):
        return None
    params = dict(node.params)
    for key, value in params.items():
        if isinstance(value, np.dtype | type) and _jax.is_inexact(np.dtype(value)):
            params[key] = _double(value)
        elif isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset):
            params[key] = None  # an algorithm for products of narrower dtypes
    return functools.partial(run_node, node.having(node.equation.replace(params=params)))


def _scatter(node: Node, operands: list[Any]) -> list[Any]:
    names = ("indices_are_sorted", "unique_indices", "mode")
    options = {name: node.params[name] for name in names}
    return [_SCATTERS[node.op](*operands, node.params["dimension_numbers"], **options)]


def _runs_in_double(
    function: Callable[[list[Any]], list[Any]], operands: list[Any], node: Node
) -> bool:
    """Whether `function` on these operands returns the node's results, all in double precision."""
    try:
        outs = jax.eval_shape(function, operands)
    except Exception:  # it cannot run in double precision
        return False
    return [(out.shape, out.dtype) for out in outs] == [
        (v.aval.shape, _double(v.aval.dtype)) for v in node.outputs
    ]
