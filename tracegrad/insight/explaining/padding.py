"""Finds rows without variance (padding, say) that get most of the gradient from a normalisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tracegrad.insight.explaining.observed import Observed
from tracegrad.insight.explanation import Finding, number_text
from tracegrad.ir import Atom, Graph, Node, Value, operations

# The largest factor must be at least `_FACTOR` times the smallest, and the gradient of the rows
# with large factors more than `_SHARE` times the norm of the gradient of all other rows.
_FACTOR, _SHARE = 100.0, 10.0
_PAST = operations.VIEWS | {"broadcast_in_dim", "mul"}
_DEPTH = 4  # at most so many operations from the product back to the root


def scale_of_normalisation(graph: Graph, node: Node) -> int | None:
    """Returns the index of the operand that normalises the other one: the reciprocal of a standard
    deviation in a product, or a divisor; None if the node is no normalisation."""
    if node.op == "mul":
        made = [_comes_of(graph, value, "rsqrt", _DEPTH) for value in node.inputs]
        is_scaled = sum(made) == 1 and _is_centred(graph, node.inputs[1 - made.index(True)])
        return made.index(True) if is_scaled else None
    if (
        node.op == "div"
        and _is_centred(graph, node.inputs[0])
        and _comes_of(graph, node.inputs[1], "sqrt", _DEPTH)
    ):
        return 1
    return None


def _is_centred(graph: Graph, value: Atom) -> bool:
    """Whether a value is a difference (presumably of an array and its mean)."""
    made = graph.producers.get(value) if isinstance(value, Value) else None
    return made is not None and made.op == "sub"


def _comes_of(graph: Graph, value: Atom, root: str, depth: int) -> bool:
    """Whether a value is the root of an array after at most `depth` views, broadcasts, products."""
    made = graph.producers.get(value) if isinstance(value, Value) else None
    if made is None or depth == 0:
        return False
    if made.op == root:
        return len(made.outputs[0].aval.shape) > 0
    if made.op not in _PAST:
        return False
    return any(_comes_of(graph, v, root, depth - 1) for v in made.inputs)


def normalised_padding(observed: Observed, norms: Mapping[str, float]) -> Iterator[Finding]:
    """Returns findings on rows without variance that get most of a gradient, if so large a gradient
    arrives at a source.

    Args:
      norms: the norms of the gradients of the sources, by their paths.
    """
    for found, _, stat in observed.of("amplified"):
        runs = np.asarray(stat, np.float64).reshape(-1, 3)
        runs = runs[np.isfinite(runs).all(axis=1)]
        if not len(runs):
            continue
        ratio, large, rest = runs[np.argmax(runs[:, 1])]
        if ratio < _FACTOR or large <= _SHARE * rest or rest == 0:
            continue
        reached = tuple(path for path, norm in norms.items() if norm > large / _SHARE)
        if not reached:  # those rows are zeros, such as padded embeddings: they pass nothing on
            continue
        yield Finding.of(
            found,
            "rows without variance",
            f"{found.node.name} divides by standard deviations of which some are "
            f"{number_text(ratio)} times as small as others: rows that are constant, as padding. "
            f"Their gradient has norm {number_text(large)}, that of all other rows "
            f"{number_text(rest)}",
            reached,
            cure="mask such rows after each normalisation (`jnp.where(mask, y, 0.0)`), in the loss "
            "too, or a larger epsilon",
        )
