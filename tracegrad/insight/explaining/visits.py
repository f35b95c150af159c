"""The state of the measuring passes at a node: the values kept, and the cotangents there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tracegrad import _jax
from tracegrad.ir import Node, Occurrence, Recompute, Value
from tracegrad.ir.occurrence import Path
from tracegrad.ir.running import read

# Operations that only call a region on their operands.
_ENTERED = frozenset({"jit", "closed_call", "core_call"})


@dataclass(frozen=True)
class Kept:
    """What the forward pass over a graph keeps for the reverse pass."""

    values: Mapping[Value, Any]
    inner: Mapping[Node, Any]  # for each entered node: what its reverse pass needs


jax.tree_util.register_pytree_node(
    Kept,
    lambda kept: (
        (list(kept.values.values()), list(kept.inner.values())),
        (tuple(kept.values), tuple(kept.inner)),
    ),
    lambda names, arrays: Kept(*(dict(zip(*each, strict=True)) for each in zip(names, arrays))),
)


@dataclass(frozen=True)
class Visit:
    """A node in the reverse pass.

    `given` are the cotangents of its results (None: zero by structure), `active` the indices of the
    operands whose cotangents are wanted.
    """

    here: Occurrence
    kept: Kept
    given: Sequence[Any]
    active: Sequence[int]

    @property
    def operands(self) -> list[Any]:
        return read(self.here.node.inputs, self.kept.values)

    @property
    def wanted(self) -> list[bool]:
        """For each operand whether its cotangent is wanted."""
        return [i in self.active for i in range(len(self.here.node.inputs))]

    @property
    def inner(self) -> Any:
        """What the forward pass kept for the node's regions."""
        return self.kept.inner[self.here.node]


def is_entered(node: Node) -> bool:
    """Whether the passes enter the regions of a node, and do not treat it as one operation."""
    loops = node.primitive is _jax.SCAN or node.primitive is _jax.COND
    if not node.regions or not (loops or is_called(node)):
        return False
    # A value written to a Ref may be read anywhere; JAX differentiates such a region as a whole.
    return not (node.has_references or _jax.facts_below(node.params).has_references)


def is_called(node: Node) -> bool:
    """Whether a node runs one region, once, on its operands."""
    return isinstance(node, Recompute) or node.op in _ENTERED


def is_in_scan(path: Path) -> bool:
    return any(around.primitive is _jax.SCAN for around, _ in path)


def or_zeros(ct: Any, like: Any) -> Any:
    return jnp.zeros_like(like, jnp.result_type(like)) if ct is None else ct


def first_of(given: Sequence[Any]) -> Any:
    return next(ct for ct in given if ct is not None)


def strong(x: Any) -> Any:
    """Removes the weak type, so that the carry of a loop keeps its type."""
    aval = jax.typeof(x)
    if not isinstance(aval, jax.core.ShapedArray) or jnp.issubdtype(
        aval.dtype, jax.dtypes.extended
    ):
        return x
    return lax.convert_element_type(x, aval.dtype)
