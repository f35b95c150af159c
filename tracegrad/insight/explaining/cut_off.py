"""Where a source is cut off from the result, and by what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Cut, cuts, explain_unconnected
from tracegrad.differentiation.selection import is_numeric, type_of
from tracegrad.insight.explaining.authors import whose
from tracegrad.insight.explaining.measuring import Measured
from tracegrad.insight.explaining.observed import Observed, Spot
from tracegrad.insight.explanation import Finding
from tracegrad.ir import CustomGradient, Graph, Literal, Node, Occurrence, StopGradient
from tracegrad.ir.occurrence import is_own_file

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "is_finite"})
_CHOICES = frozenset({"argmax", "argmin", "sort", "top_k", "approx_top_k"})
_ROUNDINGS = frozenset({"floor", "ceil", "round", "sign", "nextafter"})
_HOST = frozenset({"pure_callback", "io_callback", "debug_callback"})
_CUT_CURES = {
    "cast": "keep the float; for a straight-through gradient use `tracegrad.grad_pass_through`",
    "rounding": "a straight-through gradient: `tracegrad.grad_pass_through(jnp.round)(x)`",
    "comparison": "a smooth gate (`jax.nn.sigmoid`), or a straight-through gradient",
    "argmax": "the maximum itself (`jnp.max`), or `jax.nn.softmax` for a soft choice",
    "host conversion": "compute it in jax.numpy, or give the host function a gradient: "
    "`tracegrad.custom_gradient`",
    "custom rule": "let the rule return a cotangent for this input",
}


def findings_of_cuts(
    program: Graph, path: str, i: int, targets: Sequence[int]
) -> Iterator[Finding]:
    """What cuts an input of a graph off from some outputs."""
    for cut in dict.fromkeys(cut for t in targets for cut in cuts(program, i, t)):
        cause, owner = _cause_of_cut(cut), whose(cut.occurrence)
        text, origin = str(cut), cut.occurrence.origin
        if isinstance(cut.occurrence.node, StopGradient):
            by = "your own" if owner == "yours" else f"{owner}'s"
            text = f"{by} stop_gradient"
        yield Finding(
            cause,
            text.split(" at ")[0] if origin is not None and " at " in text else text,
            (path,),
            origin=origin,
            whose=owner,
            cure=_CUT_CURES.get(cause, ""),
            operation=cut.occurrence.node.name,
            occurrence=cut.occurrence,
        )


def _cause_of_cut(cut: Cut) -> str:
    """The class of what cuts: one word or two."""
    node = cut.occurrence.node
    if isinstance(node, StopGradient):
        return "stop_gradient"
    if isinstance(node, CustomGradient):
        return "custom rule"
    if node.op in _HOST:
        return "host conversion"
    if node.op in ("convert_element_type", "bitcast_convert_type") or _called(node, "astype"):
        return "cast"
    if node.op in _CHOICES:
        return "argmax"
    if node.op in _COMPARISONS:
        return "comparison"
    if node.op in _ROUNDINGS:
        return "rounding"
    return "zero derivative"


def _called(node: Node, function: str) -> bool:
    if node.source is None:
        return False
    for frame in _jax.frames(node.source.info):
        if not is_own_file(frame.file_name):
            return False
        if frame.function_name.rsplit(".", 1)[-1] in (function, f"_{function}"):
            return True
    return False


def cut_off(
    program: Graph,
    inputs: Sequence[Any],
    path: str,
    i: int,
    targets: Sequence[int],
    why_unused: Callable[[str], str | None],
) -> Iterator[Finding]:
    found = list(findings_of_cuts(program, path, i, targets))
    yield from found
    if found:
        return
    better = why_unused(path)
    constant = None if better else _closed_over(program, inputs[i])
    if constant is not None:
        yield Finding(
            "closed over",
            "nothing uses it; the function closes over an array of the same numbers, which is a "
            "constant to it",
            (path,),
            origin=constant.origin,
            cure="use the argument in the function's body",
        )
    else:
        words = better or explain_unconnected(program, i, targets[0]) if targets else better
        yield Finding("unused", words or "there is no target", (path,))


def _closed_over(program: Graph, array: Any) -> Occurrence | None:
    """Where an array of the same shape and numbers is used that the program closes over."""
    wanted = np.asarray(array)
    if wanted.size == 0 or not wanted.any() or np.all(wanted == wanted.ravel()[0]):
        wanted_is_telling = False  # zeros and ones are everywhere: then only the very array
    else:
        wanted_is_telling = True

    def fits(constant: Any) -> bool:
        if constant is array:
            return True
        if not wanted_is_telling or np.shape(constant) != wanted.shape:
            return False
        if _jax.is_tracer(constant) or not is_numeric(constant):
            return False
        return bool(np.array_equal(np.asarray(constant), wanted))

    for value, constant in program.constants.items():
        if fits(constant):
            return Occurrence((), value.users[0]) if value.users else None
    for found in program.walk():
        for region in found.node.regions.values():
            for value, constant in region.constants.items():
                if fits(constant) and value.users:
                    return Occurrence((*found.path, (found.node, region.name)), value.users[0])
        for operand in found.node.inputs:
            if isinstance(operand, Literal) and wanted_is_telling and fits(operand.value):
                return found
    return None


def refusals(observed: Observed, measured: Measured) -> Iterator[Finding]:
    for (at, number), words in measured.measured.refused.items():
        found = observed.occurrence(Spot(at, number))
        is_host = found.node.op in ("pure_callback", "io_callback")
        yield Finding(
            "host conversion" if is_host else "not differentiable",
            f"JAX cannot differentiate {found.node.name}: {words}",
            (),
            origin=found.origin,
            cure=_CUT_CURES["host conversion"]
            if is_host
            else "for a loop: `jax.lax.scan`, or `fori_loop` with a number of steps that is fixed"
            if found.node.op == "while"
            else "",
            operation=found.node.op,
            occurrence=found,
        )


def no_gradient(path: str, leaf: Any) -> Finding:
    aval = type_of(leaf)
    kind = type(leaf).__name__ if aval is None else str(aval.dtype)
    return Finding(
        "no gradient",
        f"it is {kind}, which has no gradient",
        (path,),
        problem=is_numeric(leaf),
        cure="make it a float array, or leave it out of wrt" if is_numeric(leaf) else "",
    )
