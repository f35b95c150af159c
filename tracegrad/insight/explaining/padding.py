"""Rows without variance, as padding, of which a normalisation makes most of the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tracegrad.insight.explaining.observed import Observed
from tracegrad.insight.explanation import Finding, number_text
from tracegrad.ir import Atom, Graph, Node, Value, operations

# So much further than the least one is the largest factor, and so much more gradient is of the rows
# with such factors than of all others.
_FACTOR, _SHARE = 100.0, 10.0
_PAST = operations.VIEWS | {"broadcast_in_dim", "mul"}
_DEPTH = 4  # operations between the root and the product


def scale_of_normalisation(graph: Graph, node: Node) -> int | None:
    """Which operand of a node is the reciprocal of a standard deviation, or a standard deviation
    that it divides by; None if none is."""
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
    """Whether a value is a difference: of an array and its mean."""
    made = graph.producers.get(value) if isinstance(value, Value) else None
    return made is not None and made.op == "sub"


def _comes_of(graph: Graph, value: Atom, root: str, depth: int) -> bool:
    made = graph.producers.get(value) if isinstance(value, Value) else None
    if made is None or depth == 0:
        return False
    if made.op == root:
        return len(made.outputs[0].aval.shape) > 0
    if made.op not in _PAST:
        return False
    return any(_comes_of(graph, v, root, depth - 1) for v in made.inputs)


def normalised_padding(observed: Observed, norms: Mapping[str, float]) -> Iterator[Finding]:
    """Where rows without variance have most of the gradient, and it arrives at a source.

    Args:
      norms: of the gradients of the sources, by their paths.
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
        if not reached:  # what goes in there is zero, as padded embeddings are
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
