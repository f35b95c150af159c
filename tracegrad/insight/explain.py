"""`explain`: why is this gradient None, zero, NaN, or not what it should be?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.checks import pair
from tracegrad.differentiation.gradient_types import is_numeric, type_of
from tracegrad.differentiation.partition import Partition
from tracegrad.differentiation.wrt import Wrt, check_wrt, partition
from tracegrad.insight.explaining.cut_off import state_of_model, type_without_gradient
from tracegrad.insight.explaining.explain_graph import explain_graph
from tracegrad.insight.explanation import Explanation
from tracegrad.ir import Graph, Occurrence, dtype_of, is_reference
from tracegrad.ir.occurrence import at
from tracegrad.ir.wording import some
from tracegrad.tracing.graphs import function_name, graph, require_function
from tracegrad.tracing.statics import Static
from tracegrad.tracing.tools import tool

_TYPES = 4  # a message lists at most so many types


@tool
def explain(
    fun: Callable[..., Any],
    /,
    *args: Any,
    wrt: Wrt = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Explains why the gradients of a function are what they are, with the lines responsible.

    For each leaf that `wrt` selects, the explanation says whether anything connects the leaf with
    the result; if not, which operation cut it off; and the gradient's norm and share of zeros. For
    a gradient of zeros, it names the operation where the gradient became zero. For a NaN or Inf, it
    names the operation that made the first one, in the forward or reverse pass, the values of the
    operands, and the known cure. It also lists norms that vanish or explode along layers or along
    the steps of a scan, and rules (`jax.custom_vjp`, `tracegrad.custom_gradient`) whose gradient is
    not the derivative of their function.

    Args:
      fun: a function, traced or plain, that returns one float scalar.
      *args, **kwargs: the arguments of the call.
      wrt: what to differentiate with respect to, as for `tracegrad.grad`: without it the
        first argument alone. For two models, give both: ``wrt=("encoder", "decoder")``.
      has_aux: whether `fun` returns ``(value, aux)``.

    Returns:
      An `Explanation`, to be printed. Its `findings` start with the worst; its `problems` are the
      findings that need repair.

    Raises:
      TypeError: `wrt` is not a selection; an argument has no numbers (a tracer or a shape); the
        result is not one float scalar.
      ValueError: `wrt` selects something that the call does not have; an array has been donated.
      NotImplementedError: the function makes a `jax.Ref`.
      Whatever the function itself raises when it is traced.

    The first call takes about as long as compiling the gradient. Later calls take several times as
    long as running it, because the program is compiled in runs of operations that also return the
    measurements. If something is not finite, `explain` runs the program once more, and measures
    every value near the place where that began. If a gradient is zero, vanishes or explodes, it
    runs the program once more and measures every value. The first call then takes two to three
    times as long. Effects happen again: the program prints again, and a custom rule that calls the
    host calls it once more. A note lists the operations with effects that ran more than once.

    >>> import jax.numpy as jnp
    >>> from tracegrad import explain
    >>> def loss(params, x):
    ...     return jnp.sum(jnp.sqrt(params["w"] * x)) + jnp.round(params["b"])
    >>> found = explain(loss, {"w": jnp.ones(3), "b": jnp.float32(0.2)}, jnp.arange(3.0))
    >>> [finding.cause for finding in found.findings]
    ['Inf in the reverse pass', 'rounding']
    >>> found.findings[0].operation, found.findings[0].operands
    ('sqrt', (0.0,))

    After PyTorch's anomaly mode and TensorFlow's ``check_numerics``.
    """
    require_function(fun, "explain the gradients of")
    _check_sources(fun, wrt)
    selection = partition(fun, wrt, args, kwargs)
    _require_alive(selection)
    program, inputs, found, others = _trace(selection, has_aux)
    named = zip(selection.names, selection.leaves, selection.kinds, strict=True)
    leaves = {name: Static(leaf) if kind == "setting" else leaf for name, leaf, kind in named}
    # A model's functions and strings are not sources, unless `wrt` selects nothing else.
    sources = {
        name: i for name, i in found.items() if i is not None or type_of(leaves[name]) is not None
    } or found
    is_meant = [each.means_each_leaf for each in selection.arguments for c in each.counted if c]
    meant = {name for name, is_one in zip(selection.names, is_meant, strict=True) if is_one}
    excused = {
        name: type_without_gradient(name, leaves[name], name in meant)
        for name, i in sources.items()
        if i is None
    }
    excused |= {
        leaf.name: state_of_model(leaf.name) for leaf in selection.named if not leaf.is_trained
    }
    return explain_graph(program, inputs, sources, function_name(fun), excused, others)


# ------------------------------------------------------------------------------------ the inputs


def _check_sources(fun: Callable[..., Any], wrt: Any) -> None:
    """Raises TypeError if `wrt` is an array, or is not a selection."""
    leaves = [] if callable(wrt) else jax.tree.leaves(wrt)
    if any(isinstance(leaf, jax.Array | np.ndarray | float) for leaf in leaves):
        raise TypeError(
            "a source is an argument of the function, and wrt says which: by position, by name, by "
            "a glob for paths or by a predicate (path, leaf) -> bool. An array was given. If "
            f"{function_name(fun)} closes over it, make it an argument"
        )
    check_wrt(wrt)


def _require_alive(selection: Partition) -> None:
    """Raises unless every argument has numbers: no tracer, no shape, no donated array."""
    for name, leaf in selection.all_leaves:
        if _jax.is_tracer(leaf):
            raise TypeError(
                "explain looks at numbers, which a traced function does not have: call it outside "
                "of jit, grad and vmap, with the arrays themselves"
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"explain looks at numbers, and the argument {name} is only a shape")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"the argument {name} has been donated to a compiled function, and its buffer is "
                "gone: explain before that call, pass what it returned, or leave out donate_argnums"
            )


def _trace(
    selection: Partition, has_aux: bool
) -> tuple[Graph, list[Any], dict[str, int | None], dict[int, str]]:
    """Traces the call of a selection.

    The inputs of the program are all arrays among the arguments. If the function needs the value of
    an array that is not selected (an `if` on a flag), they are only the selected leaves, as under
    `jax.grad`.

    Returns:
      The program; the values of its inputs; for each selected leaf the index of its input, None if
      its type has no gradient; and the names of the other inputs.

    Raises TypeError unless the value is one float scalar, and NotImplementedError if the function
    makes a `jax.Ref`.
    """
    part = selection.differentiable("none")
    chosen, others = part.leaves, [leaf for _, leaf in part.all_leaves]
    rest = [i for i, leaf in enumerate(others) if isinstance(leaf, jax.Array | np.ndarray)]
    count = 0

    def run(chosen: list[Any], more: Sequence[Any]) -> list[Any]:
        """Calls the function; `more`: the arrays not selected (if left out, they are constants)."""
        nonlocal count
        leaves = list(others)
        for i, leaf in zip(rest, more, strict=False):
            leaves[i] = leaf
        args, kwargs = part.combine(chosen, leaves)
        result = selection.fun(*args, **kwargs)
        value, aux = pair(selection.fun, result) if has_aux else (result, None)
        results = jax.tree.leaves(value)
        count = len(results)
        return [*results, *(leaf for leaf in jax.tree.leaves(aux) if is_numeric(leaf))]

    run.__name__ = function_name(selection.fun)
    arrays = [others[i] for i in rest]
    names: dict[int, str] = {}
    try:
        program, inputs = graph(run, chosen, arrays), [*chosen, *arrays]
        names.update((len(chosen) + k, part.all_leaves[i][0]) for k, i in enumerate(rest))
    except _jax.NEEDS_VALUES:
        program, inputs = graph(run, chosen, ()), list(chosen)
    for variable in program.variables:
        names[len(inputs)] = f"the Variable {variable.name}"
        inputs.append(variable.value)
    sources: dict[str, int | None] = dict.fromkeys(selection.names)
    sources |= {path: i for i, path in enumerate(part.names)}
    _refuse_references(program)
    _require_scalar(selection.fun, program, count)
    return program, inputs, sources, names


def _refuse_references(program: Graph) -> None:
    for node in program.nodes:
        if any(is_reference(value) for value in node.outputs):
            line = Occurrence((), node).origin
            raise NotImplementedError(
                f"the function makes a jax.Ref{at(line)}, and what is written "
                "to it can be differentiated only as a whole. Put the part that uses it in a "
                "function of its own under jax.jit, which is then one operation to explain"
            )


def _require_scalar(fun: Callable[..., Any], program: Graph, count: int) -> None:
    """Raises TypeError unless the value, the first `count` outputs, is one float scalar."""
    outs = program.outputs[:count]
    is_scalar = count == 1 and getattr(outs[0].aval, "shape", None) == ()
    if not is_scalar or not jnp.issubdtype(dtype_of(outs[0]), jnp.floating):
        types = [_jax.type_text(out.aval) for out in outs]
        raise TypeError(
            f"{function_name(fun)} returns {some(types, _TYPES) or 'nothing'}; a gradient is "
            "that of one float scalar. Explain the loss, not the train step. Return a sum or mean, "
            "weighted if you like (`has_aux=True` leaves out all but the first of a pair)"
        )
