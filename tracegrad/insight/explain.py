"""`explain`: why is this gradient None, zero, NaN, or not what it should be?"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.checks import pair
from tracegrad.differentiation.connectivity import connections, cuts, explain_unconnected
from tracegrad.differentiation.selection import (
    Selection,
    Wrt,
    check_wrt,
    is_differentiable,
    is_numeric,
    resolve,
    type_of,
)
from tracegrad.insight.cures import backward_cure, forward_cure
from tracegrad.insight.diagnosis import (
    INF,
    LAYER_LIMIT,
    NAN,
    STEP_LIMIT,
    Culprit,
    Given,
    Observed,
    Slope,
    Spot,
    backward_culprit,
    cause_of_cut,
    changed_rules,
    dead_units,
    forward_culprit,
    killers,
    layer_slopes,
    makers,
    scope_norms,
    steepest,
    step_slopes,
    users,
    value_statistic,
    whose,
)
from tracegrad.insight.explain_pass import Measured, compile_pass, is_jaxs_rule
from tracegrad.insight.explanation import Explanation, Finding, SourceReport
from tracegrad.ir import CustomGradient, Graph, Literal, Occurrence, StopGradient, Value
from tracegrad.ir.dependence import is_reference
from tracegrad.tape.keys import Remembered, program_key, rule_keys
from tracegrad.tracing.graphs import function_name, graph


def explain(
    fun: Callable[..., Any],
    *args: Any,
    wrt: Wrt = 0,
    cotangent: Any = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Why the gradients of a function are what they are, leaf by leaf, at the user's lines.

    Of each leaf that `wrt` selects: whether anything connects it with the result, and if not, what
    cut it off and where; its norm and its zeros; where a gradient that is all zeros died; for NaN
    or Inf the first operation that made it, in the forward or in the reverse pass, what its
    operands were there, and the known cure. Besides: rectifiers that no example activates, norms
    that vanish or explode along the layers or the steps of a scan, and rules (`jax.custom_vjp`,
    `tracegrad.custom_gradient`) that give something else than the derivative.

    Args:
      fun: a function, traced or plain, that returns one float scalar, or anything with a cotangent.
      *args, **kwargs: what it is called with.
      wrt: what to differentiate with respect to, as for `tracegrad.grad`.
      cotangent: a tree like the result of cotangents, each of its leaf's shape; needed unless the
        result is one scalar.
      has_aux: whether `fun` returns ``(value, aux)``.

    Returns:
      An `Explanation`: print it. `findings` has what was found, the worst first, `problems` only
      what wants repair.

    Raises:
      TypeError: `wrt` is no way to select; the result is no scalar and `cotangent` is not given.
      ValueError: `wrt` selects what the call does not have; an array has been donated.
      Whatever the function itself raises when it is traced.

    The cost is that of one forward and one reverse pass, compiled at the first call, and of the
    few numbers taken of each array on the way; again as much where something is not finite. A
    program that was seen before is not compiled again.

    >>> import jax.numpy as jnp
    >>> from tracegrad.insight import explain
    >>> def loss(params, x):
    ...     return jnp.sum(jnp.sqrt(params["w"] * x)) + jnp.round(params["b"])
    >>> found = explain(loss, {"w": jnp.ones(3), "b": jnp.float32(0.2)}, jnp.arange(3.0))
    >>> [finding.cause for finding in found.findings]
    ['Inf in the reverse pass', 'rounding']
    >>> found.findings[0].operation, found.findings[0].operands
    ('sqrt', (0.0,))

    After PyTorch's anomaly mode and TensorFlow's ``check_numerics``.
    """
    if not callable(fun):
        raise TypeError(f"expected a function to explain the gradients of, got {fun!r}")
    _check_sources(fun, wrt)
    selection = resolve(fun, wrt, args, kwargs)
    _require_alive(args, kwargs)
    program, dynamic, positions, others = _trace(selection, has_aux)
    _refuse_references(program)
    seeds = _seeds(fun, program, cotangent)
    return explain_graph(
        program,
        dynamic,
        dict(zip(selection.paths, positions, strict=True)),
        seeds,
        name=function_name(fun),
        unselectable={
            path: leaf
            for path, leaf, i in zip(selection.paths, selection.leaves, positions, strict=True)
            if i is None
        },
        others=others,
    )


# ------------------------------------------------------------------------------------ the inputs


def _check_sources(fun: Callable[..., Any], wrt: Any) -> None:
    leaves = [] if callable(wrt) else jax.tree.leaves(wrt)
    if any(isinstance(leaf, jax.Array | np.ndarray | float) for leaf in leaves):
        raise TypeError(
            "a source is an argument of the function, and wrt says which: by position, by name, or "
            f"by a predicate (path, leaf) -> bool. An array was given. If {function_name(fun)} "
            "closes over it, make it an argument; of arrays that were watched, ask a tape"
        )
    check_wrt(wrt)


def _require_alive(args: Any, kwargs: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, jax.Array) and not _jax.is_tracer(leaf) and leaf.is_deleted():
            where = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            raise ValueError(
                f"the argument {where} has been donated to a compiled function, and its buffer is "
                "gone: explain before that call, pass what it returned, or leave out donate_argnums"
            )
        if _jax.is_tracer(leaf):
            raise TypeError(
                "explain looks at numbers, which a traced function does not have: call it outside "
                "of jit, grad and vmap, with the arrays themselves"
            )


def _trace(
    selection: Selection, has_aux: bool
) -> tuple[Graph, list[Any], list[int | None], dict[int, str]]:
    """The graph of the call, its inputs, for each selected leaf which of them it is, and the names
    of the others.

    The inputs are all arrays among the arguments; where the function needs the value of one that
    is not selected (an `if` on a flag), the selected leaves alone, as under `jax.grad`.
    """
    leaves = selection.leaves
    is_input = [is_differentiable(leaf) for leaf in leaves]
    chosen = [leaf for leaf, fits in zip(leaves, is_input, strict=True) if fits]
    refined = selection.refined(is_input)
    others, structure = jax.tree.flatten((refined.args, refined.kwargs))
    rest = [i for i, leaf in enumerate(others) if isinstance(leaf, jax.Array | np.ndarray)]
    name = function_name(selection.fun)

    def outputs(result: Any) -> Any:
        return pair(selection.fun, result)[0] if has_aux else result

    def of_all(chosen: list[Any], more: list[Any]) -> Any:
        leaves = list(others)
        for i, leaf in zip(rest, more, strict=True):
            leaves[i] = leaf
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return outputs(_with_arguments(refined, args, kwargs).call(chosen))

    def of_selected(chosen: list[Any]) -> Any:
        return outputs(refined.call(chosen))

    of_all.__name__ = of_selected.__name__ = name
    arrays = [others[i] for i in rest]
    try:
        program, dynamic = graph(of_all)(chosen, arrays), [*chosen, *arrays]
        names = _argument_paths(selection)
        names_of_others = {len(chosen) + k: names[i] for k, i in enumerate(rest)}
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        program, dynamic, names_of_others = graph(of_selected)(chosen), list(chosen), {}
    for k, variable in enumerate(program.variables, len(dynamic)):
        names_of_others[k] = f"the Variable {variable.name}"
    dynamic += [variable.value for variable in program.variables]
    numbers = iter(range(len(chosen)))
    positions = [next(numbers) if fits else None for fits in is_input]
    return program, dynamic, positions, names_of_others


def _argument_paths(selection: Selection) -> list[str]:
    """The path of every leaf of the arguments, in the order in which JAX flattens them."""
    args, kwargs = selection.args, selection.kwargs
    return resolve(selection.fun, (*range(len(args)), *sorted(kwargs)), args, kwargs).paths


def _refuse_references(program: Graph) -> None:
    for node in program.nodes:
        if any(is_reference(value.aval) for value in node.outputs):
            line = Occurrence((), node).origin
            raise NotImplementedError(
                f"the function makes a jax.Ref{f' at {line}' if line else ''}, and what is written "
                "to it can be differentiated only as a whole. Put the part that uses it in a "
                "function of its own under jax.jit, which is then one operation to explain"
            )


def _with_arguments(selection: Selection, args: Any, kwargs: Any) -> Selection:
    return Selection(selection.fun, args, kwargs, selection.arguments, selection.single)


def _seeds(fun: Callable[..., Any], program: Graph, cotangent: Any) -> list[Any]:
    count = len(program.outputs) - len(program.assigned)
    outs = program.outputs[:count]
    if cotangent is None:
        types = [_jax.type_text(out.aval) for out in outs]
        fits = (
            count == 1
            and getattr(outs[0].aval, "shape", None) == ()
            and jnp.issubdtype(outs[0].aval.dtype, jnp.floating)
        )
        if not fits:
            raise TypeError(
                f"{function_name(fun)} returns {', '.join(types) or 'nothing'}; a gradient is that "
                "of one float scalar. Return its sum or mean, or say by `cotangent=` with what to "
                "weigh the results: a tree like the result (`has_aux=True` leaves out all but the "
                "first of a pair)"
            )
        return [jnp.ones((), outs[0].aval.dtype)] + [None] * len(program.assigned)
    leaves = jax.tree.leaves(cotangent, is_leaf=lambda leaf: leaf is None)
    if len(leaves) != count:
        raise ValueError(
            f"cotangent has {len(leaves)} leaves, the result of {function_name(fun)} {count}"
        )
    seeds: list[Any] = []
    for leaf, out in zip(leaves, outs, strict=True):
        if leaf is not None and (
            jnp.shape(leaf) != out.aval.shape or not _jax.has_gradient(out.aval)
        ):
            raise ValueError(
                f"a cotangent of shape {jnp.shape(leaf)} was given for a result "
                f"{_jax.type_text(out.aval)}; None stands for a result that is left out"
            )
        seeds.append(None if leaf is None else jnp.asarray(leaf, out.aval.dtype))
    return seeds + [None] * len(program.assigned)


# ---------------------------------------------------------------------------------- the diagnosis

_programs = Remembered(32)


def explain_graph(
    program: Graph,
    inputs: Sequence[Any],
    sources: dict[str, int | None],
    seeds: Sequence[Any],
    *,
    name: str,
    unselectable: dict[str, Any],
    why_unused: Callable[[str], str | None] = lambda path: None,
    others: Mapping[int, str] = MappingProxyType({}),
) -> Explanation:
    """Explains the gradients of a graph.

    Args:
      program: the graph.
      inputs: the arrays of its inputs.
      sources: by path which input a source is; None for what is of no differentiable type.
      seeds: for each output of the graph a cotangent, or None.
      name: of the function.
      unselectable: the sources without an input.
      why_unused: words for a source that nothing leads from to the result, if there are better
        ones than that.
      others: the names of inputs that are no sources.
    """
    seeded = [seed is not None for seed in seeds]
    targets = [i for i, is_seeded in enumerate(seeded) if is_seeded]
    reached = _connected(program, targets)
    findings: list[Finding] = []
    flowing = [False] * len(program.inputs)
    for path, i in sources.items():
        if i is None:
            findings.append(_no_gradient(path, unselectable[path]))
        elif i in reached:
            flowing[i] = True
        else:
            findings += _cut_off(program, inputs, path, i, targets, why_unused)
    observed, measured = _measure(program, flowing, seeded, inputs, seeds, close=False)
    findings += _refusals(observed, measured)
    if _looks_bad(observed):
        observed, measured = _measure(program, flowing, seeded, inputs, seeds, close=True)
        findings += _not_finite(observed, measured, program, sources, targets, others)
    reports = [_report(observed, program, path, i, findings) for path, i in sources.items()]
    norms = {r.path: r.norm for r in reports if r.connected and math.isfinite(r.norm)}
    findings += _all_zero(observed, reports, sources)
    findings += _slopes(observed, norms)
    findings += _rules(observed)
    findings += _dead(observed, findings)
    value = observed.stats.get(("output", (), 0, targets[0])) if targets else None
    return Explanation(
        name,
        tuple(reports),
        tuple(sorted(_merged(findings), key=lambda f: f.rank)),
        tuple(scope_norms(observed)),
        "" if value is None else _output_text(value),
    )


T = TypeVar("T")


def _remembered(program: Graph, key: Hashable, make: Callable[[], T]) -> T:
    """What was made before for a graph of the same program; a recorded one is like no other."""
    if program.program is None:
        return make()
    whole = key_of(program), key
    known: T | None = _programs.get(whole)
    if known is None:
        known = make()
        _programs.put(whole, known)
    return known


def key_of(program: Graph) -> Hashable:
    """Equal for programs that compute the same with the same derivatives.

    JAX makes the functions of a custom rule anew whenever it traces a call, so that by these no
    program with a rule would be known again; what a rule says is in what it traces to.
    """
    nodes = (o.node for o in program.walk() if isinstance(o.node, CustomGradient))
    rules = tuple(map(_rule_key, dict.fromkeys(nodes)))
    return program_key(program.program, as_run=True), rules


def _rule_key(node: CustomGradient) -> Hashable:
    if is_jaxs_rule(node):
        return node.primal.function_source
    try:
        key: Hashable = rule_keys(node)[0]
    except Exception:  # it cannot be traced by itself: then it is like no other
        return object()
    return key


def _connected(program: Graph, targets: Sequence[int]) -> frozenset[int]:
    def find() -> frozenset[int]:
        linked = connections(program)
        return frozenset[int]().union(*(linked[t] for t in targets))

    return _remembered(program, ("connections", tuple(targets)), find)


def _measure(
    program: Graph,
    sources: Sequence[bool],
    seeded: Sequence[bool],
    inputs: Sequence[Any],
    seeds: Sequence[Any],
    close: bool,
) -> tuple[Observed, Measured]:
    compiled = _remembered(
        program,
        (tuple(sources), tuple(seeded), close),
        lambda: compile_pass(program, sources, seeded, close),
    )
    stats = compiled.call(list(inputs), [seed for seed in seeds if seed is not None])
    return Observed(program, stats), compiled


def _looks_bad(observed: Observed) -> bool:
    """Whether a result or a gradient is not finite (or a sum of squares overflows)."""
    return any(
        not np.isfinite(stat[..., :4]).all() or stat[..., NAN : INF + 1].any()
        for (kind, *_), stat in observed.stats.items()
        if kind in ("source", "output")
    )


def _no_gradient(path: str, leaf: Any) -> Finding:
    aval = type_of(leaf)
    kind = type(leaf).__name__ if aval is None else str(aval.dtype)
    return Finding(
        "no gradient",
        f"it is {kind}, which has no gradient",
        (path,),
        problem=is_numeric(leaf),
        cure="make it a float array, or leave it out of wrt" if is_numeric(leaf) else "",
    )


# ------------------------------------------------------------------------------------- cut off

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
        cause, owner = cause_of_cut(cut), whose(cut.occurrence)
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


def _cut_off(
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


def _refusals(observed: Observed, measured: Measured) -> Iterator[Finding]:
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


# ------------------------------------------------------------------------------------ not finite


def _not_finite(
    observed: Observed,
    measured: Measured,
    program: Graph,
    sources: dict[str, int | None],
    targets: Sequence[int],
    others: Mapping[int, str],
) -> list[Finding]:
    stats = observed.stats
    names = {i: path for path, i in sources.items() if i is not None}
    touched = tuple(
        path
        for path, i in sources.items()
        if i is not None
        and (stat := stats.get(("source", (), 0, i))) is not None
        and stat[NAN] + stat[INF] > 0
    )
    found: list[Finding] = []
    for target in targets:
        out = stats.get(("output", (), 0, target))
        if out is not None and out[NAN] + out[INF] > 0:
            which = NAN if out[NAN] else INF
            culprit = forward_culprit(observed, (), (), program.outputs[target], which)
            found += _forward_findings(observed, culprit, which, names, others, touched)
    found += [
        Finding(
            "NaN in an input",
            f"the argument has {int(stat[NAN])} NaN{'s' * (int(stat[NAN]) != 1)} already",
            (path,),
        )
        for i, path in names.items()
        if (stat := stats.get(("input", (), 0, i))) is not None and stat[NAN] > 0
    ]
    if not found:
        culprit_back = backward_culprit(observed)
        if culprit_back is not None:
            found.append(_backward_finding(observed, measured, culprit_back, touched))
        elif touched:
            found.append(Finding("not finite", "it came in with the cotangent", touched))
    return found


def _forward_findings(
    observed: Observed,
    culprit: Culprit | Given | None,
    which: int,
    names: dict[int, str],
    others: Mapping[int, str],
    touched: tuple[str, ...],
) -> Iterator[Finding]:
    kind = "NaN" if which == NAN else "Inf"
    if isinstance(culprit, Given):
        if culprit.index is None:
            nodes = culprit.value.users if isinstance(culprit.value, Value) else ()
            origin = Occurrence((), nodes[0]).origin if nodes else None
            yield Finding(
                f"{kind} in an input", f"the function closes over a {kind}", (), origin=origin
            )
            return
        path = names.get(culprit.index) or others.get(culprit.index, "that is not a source")
        count = int(observed.stats["input", (), 0, culprit.index][which])
        yield Finding(
            f"{kind} in an input",
            f"the argument {path} has {count} {kind}{'s' * (count != 1)} already",
            (path,) if culprit.index in names else touched,
        )
        return
    if culprit is None:
        return
    spot = culprit.spot
    found = observed.occurrence(spot)
    node = found.node
    origin_of_inf = None
    if which == NAN:  # of an Inf, perhaps, that was made before
        for value in node.inputs:
            made = forward_culprit(observed, spot.at, spot.steps, value, INF)
            if isinstance(made, Culprit):
                origin_of_inf = made
                break
    words = f"{node.name} makes {kind} in the forward pass"
    operands = _operand_ranges(observed, spot)
    if operands:
        words += f" of {operands}"
    cure = forward_cure(node.op, makers(observed, spot), users(observed, spot))
    if origin_of_inf is not None:
        first = observed.occurrence(origin_of_inf.spot)
        ranges = _operand_ranges(observed, origin_of_inf.spot)
        place = f" at {first.origin.place}" if first.origin else ""
        yield Finding(
            "Inf in the forward pass",
            f"{first.node.name} makes Inf of {ranges}, and {node.name}"
            f"{f' at {found.origin.place}' if found.origin else place} makes NaN of that",
            touched,
            origin=first.origin,
            cure=forward_cure(
                first.node.op,
                makers(observed, origin_of_inf.spot),
                users(observed, origin_of_inf.spot),
            ),
            operation=first.node.op,
            step=origin_of_inf.spot.steps[0] if origin_of_inf.spot.steps else None,
            occurrence=first,
        )
        return
    yield Finding(
        f"{kind} in the forward pass",
        words,
        touched,
        origin=found.origin,
        cure=cure,
        operation=node.op,
        step=spot.steps[0] if spot.steps else None,
        occurrence=found,
    )


def _backward_finding(
    observed: Observed, measured: Measured, culprit: Culprit, touched: tuple[str, ...]
) -> Finding:
    found = observed.occurrence(culprit.spot)
    node = found.node
    made_by, used_by = makers(observed, culprit.spot), users(observed, culprit.spot)
    known = [x for x in culprit.operands if not math.isnan(x)]
    at = f" at {', '.join(_number(x) for x in known)}" if known else ""
    faces = [k for k, (_, name) in enumerate(culprit.spot.at) if name in ("backward", "jvp")]
    inside, origin = "", found.origin
    if faces:
        outer, (number, _) = culprit.spot.at[: faces[0]], culprit.spot.at[faces[0]]
        inside = f"in the rule of {found.path[faces[0]][0].name} "
        origin = measured.measured.lines.get((outer, number), origin)
    if math.isnan(culprit.given) or inside:
        through = ""
    elif culprit.given == 0:
        through = ", where the cotangent that comes in is 0: something masks it, and 0 * inf is NaN"
    else:
        through = f", of a cotangent {_number(culprit.given)}"
    return Finding(
        f"{culprit.kind} in the reverse pass",
        f"{inside}{'' if inside else 'the derivative of '}{node.name}{at} is not finite{through}"
        + _made_before(observed, culprit),
        touched,
        origin=origin,
        cure=backward_cure(node.op, culprit.operands, culprit.given, made_by, used_by),
        operation=node.op,
        operands=culprit.operands,
        step=culprit.spot.steps[0] if culprit.spot.steps else None,
        occurrence=found,
    )


def _made_before(observed: Observed, culprit: Culprit) -> str:
    """Which operation of the forward pass made the Inf that an operand is."""
    spot = culprit.spot
    for value, x in zip(observed.node(spot).inputs, culprit.operands, strict=False):
        if math.isinf(x):  # a NaN stands for what is not known
            made = forward_culprit(observed, spot.at, spot.steps, value, INF)
            if isinstance(made, Culprit):
                found = observed.occurrence(made.spot)
                place = f" at {found.origin.place}" if found.origin else ""
                return f"; {found.node.name}{place} made the Inf"
    return ""


def _operand_ranges(observed: Observed, spot: Spot) -> str:
    from_values = []
    for value in observed.node(spot).inputs:
        if isinstance(value, Literal):
            from_values.append(_number(float(np.asarray(value.value).ravel()[0].real)))
            continue
        stat = value_statistic(observed, spot, value)
        if stat is not None:
            low, high = float(stat[4]), float(stat[5])
            from_values.append(
                _number(low) if low == high else f"{_number(low)} to {_number(high)}"
            )
    return " and ".join(from_values)


def _number(x: float) -> str:
    return f"{x:.4g}"


# ------------------------------------------------------------------------------ zeros, and the rest

_ZERO_WORDS = {
    "untaken branch": "its branch is not taken in this call",
    "dead units": "no unit of it is active on this batch",
    "clipped": "every element is outside of the bounds, where the derivative is zero",
    "multiplied by zero": "it is multiplied by zeros",
    "index out of bounds": "no index selects it (those out of bounds are dropped)",
    "saturated": "it is saturated: its derivative is zero in this precision",
    "custom rule": "its rule returns zeros",
    "zero derivative": "its derivative is zero here",
}
_ZERO_CURES = {
    "dead units": "smaller steps or biases, `jax.nn.leaky_relu`, `jax.nn.gelu`",
    "multiplied by zero": "initialise with small random numbers",
    "saturated": "normalise what goes in, or compute with the logarithm",
    "clipped": "a soft bound (`jnp.tanh`, `jax.nn.softplus`), or a straight-through gradient",
}


def _all_zero(
    observed: Observed, reports: Sequence[SourceReport], sources: dict[str, int | None]
) -> Iterator[Finding]:
    for report in reports:
        index = sources[report.path]
        if not report.connected or index is None or report.zeros < 1 or report.size == 0:
            continue
        for killer in killers(observed, index):
            found = observed.occurrence(killer.spot)
            yield Finding(
                killer.cause,
                f"{found.node.name}: {_ZERO_WORDS[killer.cause]}",
                (report.path,),
                origin=found.origin,
                whose=whose(found),
                cure=_ZERO_CURES.get(killer.cause, ""),
                operation=found.node.name,
                # At an extremum, say: that is no mistake.
                problem=killer.cause != "zero derivative",
                occurrence=found,
            )


def _slopes(observed: Observed, norms: dict[str, float]) -> Iterator[Finding]:
    for slope, limit in [
        *((slope, LAYER_LIMIT) for slope in layer_slopes(norms)),
        *((slope, STEP_LIMIT) for slope in step_slopes(observed)),
    ]:
        first, last = slope.norms[0], slope.norms[-1]
        if not (math.isfinite(first) and math.isfinite(last)) or last == 0 or first == last == 0:
            continue
        shrinks, grows = slope.ratio < limit, slope.ratio > 1 / limit
        if shrinks or grows:
            yield _slope_finding(observed, slope, shrinks)


def _slope_finding(observed: Observed, slope: Slope, shrinks: bool) -> Finding:
    spot = steepest(observed, shrinks)
    if spot is None:
        spot = slope.spot
    found = None if spot is None else observed.occurrence(spot)
    what = "shrinks" if shrinks else "grows"
    kind = "steps" if slope.spot is not None else "layers"
    return Finding(
        "vanishing" if shrinks else "exploding",
        f"along {slope.name} the norm {what} from {_number(slope.norms[-1])} to "
        f"{_number(slope.norms[0])} over {len(slope.norms)} {kind}"
        + (f", most of it in {found.node.name}" if found is not None else ""),
        (slope.name,),
        origin=None if found is None else found.origin,
        cure="residual connections, normalisation, another activation or initialisation"
        if shrinks
        else "normalisation, a smaller initialisation, clipping by the global norm",
        operation="" if found is None else found.node.name,
        occurrence=found,
    )


def _rules(observed: Observed) -> Iterator[Finding]:
    for spot, i, given, own, difference in changed_rules(observed):
        found = observed.occurrence(spot)
        assert isinstance(found.node, CustomGradient)
        origin = found.origin
        yield Finding(
            "changed by a rule",
            f"the rule of {found.node.name} gives input {i} a gradient of norm {_number(given)}; "
            f"the derivative of the function has {_number(own)}, the difference "
            f"{_number(difference)}",
            (),
            origin=origin,
            problem=False,
            cure="check it by `check_grads`, or declare it deliberate there",
            operation=found.node.name,
            occurrence=found,
        )


def _dead(observed: Observed, findings: Sequence[Finding]) -> Iterator[Finding]:
    known = {f.origin for f in findings if f.cause == "dead units"}
    for spot, dead, total in dead_units(observed):
        found = observed.occurrence(spot)
        if 2 * dead > total and found.origin not in known:
            yield Finding(
                "dead units",
                f"{dead} of {total} units of {found.node.name} are active for no example",
                (),
                origin=found.origin,
                problem=dead == total,
                cure=_ZERO_CURES["dead units"],
                operation=found.node.name,
                occurrence=found,
            )


def _report(
    observed: Observed, program: Graph, path: str, i: int | None, findings: Sequence[Finding]
) -> SourceReport:
    stat = None if i is None else observed.stats.get(("source", (), 0, i))
    aval = None if i is None else program.inputs[i].aval
    size = 0 if aval is None else math.prod(aval.shape)
    if stat is None:
        reason = next((f.short for f in findings if path in f.sources), "")
        type_text = "" if aval is None else _jax.type_text(aval)
        return SourceReport(path, type_text, False, 0.0, 0.0, 0, 0, size, reason)
    return SourceReport(
        path,
        _jax.type_text(aval),
        True,
        float(np.sqrt(stat[0])),
        float(stat[1]) / size if size else 0.0,
        int(stat[NAN]),
        int(stat[INF]),
        size,
        "",
    )


def _merged(findings: Sequence[Finding]) -> Iterator[Finding]:
    """One finding for all sources that one place concerns."""
    groups: dict[Any, list[Finding]] = {}
    for finding in findings:
        key = finding.cause, finding.what, finding.origin, finding.step
        groups.setdefault(key, []).append(finding)
    for group in groups.values():
        sources = tuple(dict.fromkeys(path for f in group for path in f.sources))
        yield group[0].for_sources(sources)


def _output_text(stat: np.ndarray[Any, Any]) -> str:
    if stat[NAN] > 0:
        return "NaN"
    return _number(float(stat[4])) if stat[4] == stat[5] else ""
