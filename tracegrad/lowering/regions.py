"""Binding a node whose regions must be built: after an edit, or because this package made it.

The rule is to trace the region and put the program where the old one was, so that JAX sees the same
primitive with one changed parameter. Where that is not enough the public function does it:

- `shard_map`, whose region means something only inside its mesh;
- a node that this package made, which has no parameters to change;
- a region that now holds a tracer of an outer transformation (an edit wrote in a function that
  closes over one). As a constant of the region it would pass for a number: scan and its like would
  differentiate as if it did not depend on anything, and the gradient would silently be zero.
  The public functions make an operand of it. Where there is no such function, it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from tracegrad import _jax
from tracegrad.ir import (
    CustomGradient,
    Graph,
    GraphError,
    Literal,
    Node,
    Occurrence,
    Recompute,
    RegionNode,
    Value,
)
from tracegrad.lowering.closed_over import not_differentiated

if TYPE_CHECKING:
    from tracegrad.lowering.evaluate import Lowering

Evaluate = Callable[[Graph, Sequence[Any], Any], list[Any]]


def bind(node: RegionNode, args: list[Any], lowering: Lowering, evaluate: Evaluate) -> list[Any]:
    """Binds a node on `args` with the regions as they are now; returns its results."""

    def function_of(name: str) -> Callable[..., list[Any]]:
        region = node._regions[name]

        def run(*operands: Any) -> list[Any]:
            return evaluate(region, operands, lowering)

        run.__name__ = run.__qualname__ = region.name
        return run

    if isinstance(node, CustomGradient) and _rule_is_edited(node):
        return _bind_rule(node, args, function_of)
    called = _jax.CALLS_WITH_RULES.get(node.op)
    if called is not None and not node.keeps(called):
        # The rule knows nothing of the edit: what is there instead, JAX maps and transposes.
        return function_of(called)(*args)
    if node.op == "shard_map":
        return _shard_map(node, args, function_of)
    if node.is_new:
        return _bind_publicly(node, args, function_of)

    programs = {}
    for name in node.regions:
        programs[name] = _build(node, name, lowering, function_of(name))
    if any(_captures(program) for program in programs.values()):
        return _bind_publicly(node, args, function_of)
    constants: list[Any] = []
    if node.op in _jax.OPEN_PROGRAM_PRIMITIVES:
        ((name, program),) = programs.items()
        constants = list(_jax.constants_of(program))
        programs[name] = _jax.opened(_hoist(program) if constants else program)
    return _jax.bind(node.primitive, [*constants, *args], _with_programs(node.params, programs))


def bind_functions(
    node: RegionNode, args: list[Any], function_of: Callable[[str], Callable[..., list[Any]]]
) -> list[Any] | None:
    """Binds a node with functions in the place of its regions, and of the faces of its rule; they
    need not be of the types that the regions are of. None if JAX has no public function for that.
    """
    if isinstance(node, CustomGradient):
        return _bind_rule(node, args, function_of)
    if node.op == "shard_map":
        return _shard_map(node, args, function_of)
    publicly = (_jax.SCAN, _jax.COND, _jax.WHILE)
    if isinstance(node, Recompute) or node.primitive in publicly:
        return _bind_publicly(node, args, function_of)
    return None


def _build(
    node: RegionNode, name: str, lowering: Lowering, function: Callable[..., list[Any]]
) -> Any:
    """The region's program, traced; one for all nodes that share the region."""
    region = node._regions[name]
    key = (region, node.source.settings if node.source else None)
    if key not in lowering.built:
        # A fresh function each time: JAX caches traces by the identity of the function.
        lowering.built[key] = jax.make_jaxpr(lambda *operands: function(*operands))(
            *region.in_avals
        )
    return lowering.built[key]


def _captures(program: Any) -> bool:
    return any(isinstance(c, jax.core.Tracer) for c in _jax.constants_of(program))


def _hoist(program: Any) -> Any:
    """The same program with its constants as leading arguments."""
    open_form, constants = _jax.parts_of(program)
    count = len(constants)

    def run(*args: Any) -> list[Any]:
        return list(jax.core.eval_jaxpr(open_form, args[:count], *args[count:]))

    avals = [v.aval for v in (*open_form.constvars, *open_form.invars)]
    return jax.make_jaxpr(run)(*avals)


def _with_programs(params: Any, programs: dict[str, Any]) -> dict[str, Any]:
    """A primitive's parameters with its sub-programs replaced; see `_jax.sub_programs`."""
    new = dict(params)
    for key, value in params.items():
        if key in programs:
            new[key] = programs[key]
        elif isinstance(value, (tuple, list)):
            fields = getattr(value, "_fields", None)
            items = [
                programs.get(f"{key}.{fields[i]}" if fields else f"{key}[{i}]", item)
                for i, item in enumerate(value)
            ]
            new[key] = type(value)(*items) if fields else type(value)(items)
    return new


# ------------------------------------------------------------------------------------ custom rules


def _rule_is_edited(node: CustomGradient) -> bool:
    """Whether the rule must be built from its faces.

    Raises GraphError for an edit that differentiation would lose: the primal region is not run
    then, the rule's own forward pass is.
    """
    edited = {name: not node.keeps(name) for name in node._regions}
    running = "jvp" if node.kind == "jvp" else "forward"
    if edited["call_jaxpr"] and not edited.get(running):
        raise GraphError(
            f"the primal region of the custom gradient {node.name} was edited, its {running} face "
            "was not: under differentiation the edit would be lost. Apply it to "
            f"`node.face({running!r})` too, or edit outside the rule"
        )
    if edited.get(running) and not edited["call_jaxpr"] and node.kind == "vjp":
        raise GraphError(
            f"the forward face of the custom gradient {node.name} was edited, its primal region "
            "was not: the function would return one thing, and another under differentiation. "
            "Apply the edit to `node.primal` too"
        )
    return any(edited.values())


def _bind_rule(
    node: CustomGradient, args: list[Any], function_of: Callable[[str], Callable[..., list[Any]]]
) -> list[Any]:
    """Binds a custom gradient built from its faces."""
    primal = function_of("call_jaxpr")
    flowing = [value.has_gradient for value in node.inputs]
    if node.kind == "vjp":  # what the function closes over, first, gets nothing from its rule
        closed_over = node.closed_over
        flowing[:closed_over] = [False] * closed_over
        args = [not_differentiated(node, a) for a in args[:closed_over]] + args[closed_over:]
    outputs = [value.aval for value in node.outputs]
    if node.kind == "jvp":
        rule = jax.custom_jvp(primal)
        node.face("jvp")
        run_jvp = function_of("jvp")

        def jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
            given = [t for t, flows in zip(tangents, flowing, strict=True) if flows]
            results = run_jvp(*primals, *given)
            return results[: len(outputs)], _jax.align(outputs, results[len(outputs) :])

        rule.defjvp(jvp)
        return _called(rule, args, node)

    node.face("backward")
    forward, backward = function_of("forward"), function_of("backward")
    rule_vjp = jax.custom_vjp(primal)

    def fwd(*primals: Any) -> tuple[list[Any], list[Any]]:
        results = forward(*primals)
        return results[: len(outputs)], results[len(outputs) :]

    def bwd(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        given = [
            ct for ct, aval in zip(cotangents, outputs, strict=True) if _jax.has_gradient(aval)
        ]
        grads = backward(*residuals, *given)
        given_back: list[Any] = [None] * len(flowing)
        places = [i for i, flows in enumerate(flowing) if flows]
        for i, ct, value in zip(places, grads, node.face("backward").outputs, strict=True):
            # What the rule returned as None is none, unless an edit has put something there.
            if i in node.returned or not _is_written_zero(value):
                given_back[i] = ct
        return tuple(given_back)

    rule_vjp.defvjp(fwd, bwd)
    return _called(rule_vjp, args, node)


def _called(rule: Callable[..., list[Any]], args: list[Any], node: CustomGradient) -> list[Any]:
    try:
        return list(rule(*args))
    except jax.errors.UnexpectedTracerError as error:
        raise GraphError(
            f"the custom gradient {node.name}, or an edit in it, closes over a value that is being "
            "differentiated, and its rule has no gradient for it. Pass the value as an argument, "
            f"or close over jax.lax.stop_gradient(value): {Occurrence((), node)}"
        ) from error


def _is_written_zero(value: Value | Literal) -> bool:
    """Whether a value is the zeros that JAX writes for no gradient."""
    producer = value.producer if isinstance(value, Value) else None
    if producer is not None and producer.op == "broadcast_in_dim":
        value = producer.inputs[0]
    return isinstance(value, Literal) and not np.any(value.value)


# -------------------------------------------------------------------------------- public functions


def _bind_publicly(
    node: RegionNode, args: list[Any], function_of: Callable[[str], Callable[..., list[Any]]]
) -> list[Any]:
    """Binds through the public function of JAX for this primitive."""
    if isinstance(node, Recompute):
        options = {k: node.params[k] for k in ("prevent_cse",) if k in node.params}
        run = jax.checkpoint(function_of("jaxpr"), policy=node.policy, **options)
        return list(run(*args))
    if node.primitive is _jax.JIT:
        if not node.is_new:
            _refuse_jit_settings(node)
        return list(jax.jit(function_of("jaxpr"))(*args))
    if node.primitive is _jax.SCAN:
        return _scan(node, args, function_of("jaxpr"))
    if node.primitive is _jax.COND:
        branches = [function_of(name) for name in node.regions]
        return list(lax.switch(args[0], branches, *args[1:]))
    if node.primitive in _jax.WHILES:
        return _while(node, args, function_of)
    raise GraphError(
        f"an edit made a region of {node.op} close over a value that is being traced outside of "
        f"it; for {node.op} there is no way to make that an operand, and as a constant its "
        f"gradient would silently be zero. Pass the value in as an input: {Occurrence((), node)}"
    )


def _refuse_jit_settings(node: RegionNode) -> None:
    """The public `jax.jit` cannot be given a closed-over operand *and* settings per operand."""
    if has_jit_settings(node):
        raise GraphError(
            f"an edit made the jitted function {node.name} close over a value that is being traced "
            "outside of it; it has shardings, layouts or donated arguments of its own, so that the "
            "value cannot be made an operand. Pass the value in as an input"
        )


def has_jit_settings(node: Node) -> bool:
    """Whether a jitted call has shardings, layouts or donated arguments of its own."""
    params = node.params
    special = any(params["donated_invars"]) or any(
        "Unspecified" not in type(s).__name__
        for s in (*params["in_shardings"], *params["out_shardings"])
    )
    return special or any(x is not None for x in (*params["in_layouts"], *params["out_layouts"]))


def _scan(node: RegionNode, args: list[Any], body: Callable[..., list[Any]]) -> list[Any]:
    params = node.params
    constant_count, carry_count = _jax.scan_split(params)
    constants = args[:constant_count]
    carry = args[constant_count : constant_count + carry_count]
    scanned = args[constant_count + carry_count :]

    def step(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*constants, *state, *slices)
        return results[:carry_count], results[carry_count:]

    final, stacked = lax.scan(
        step,
        list(carry),
        list(scanned),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*final, *stacked]


def _while(
    node: RegionNode, args: list[Any], function_of: Callable[[str], Callable[..., list[Any]]]
) -> list[Any]:
    condition, body = function_of("cond_jaxpr"), function_of("body_jaxpr")
    split = node.params["cond_nconsts"]
    end = split + node.params["body_nconsts"]

    def goes_on(state: Any) -> Any:
        return condition(*args[:split], *state)[0]

    def step(state: Any) -> Any:
        return body(*args[split:end], *state)

    if node.primitive is _jax.WHILE:
        return list(lax.while_loop(goes_on, step, list(args[end:])))
    return list(_jax.checkpointed_while_loop(goes_on, step, list(args[end:]), node.params))


def _shard_map(
    node: RegionNode, args: list[Any], function_of: Callable[[str], Callable[..., list[Any]]]
) -> list[Any]:
    params = node.params
    mapped = jax.shard_map(
        function_of("jaxpr"),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        **_jax.shard_map_options(params),
    )
    return list(mapped(*args))
