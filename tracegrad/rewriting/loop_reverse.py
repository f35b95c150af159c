"""Reverse mode of a `while` loop: the forward pass keeps states, and steps are run again.

JAX linearises a loop by running it in forward mode and separating the known part (the values) from
the unknown part (the tangents). In this module the known part also keeps the states that
`loop_schedule` chooses, and the unknown part becomes one linear operation, whose transpose goes
back from each kept state to the kept state before. The cotangents of a step come from JAX's
transpose of the step's tangents: this module has no derivative of its own.

All loops that this module makes are checkpointed too, so derivatives of any order work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad as _ad  # noqa: TID251
from jax.interpreters import partial_eval as _pe  # noqa: TID251

from tracegrad import _jax
from tracegrad.rewriting import loop_schedule as schedule
from tracegrad.rewriting.loop_primitive import (
    CHECKPOINTED_WHILE,
    LINEAR_WHILE,
    WHILE,
    checkpointed_while_loop,
    split_params,
)

ad: Any = _ad  # some of its functions have type annotations, and others do not
pe: Any = _pe


def bind_checkpointed_while(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Binds a loop; `params` are JAX's parameters of `while` with `checkpoints` and `place`."""
    return _jax.bind(CHECKPOINTED_WHILE, operands, params)


def _find_known_part(while_params: Mapping[str, Any], avals: Any, unknown: Sequence[bool]) -> Any:
    """Returns the parameters of the known part of a loop, and for each operand whether the known
    part omits it.

    The known part computes all values that do not depend on the unknown operands. It omits these
    operands. It also omits a carried value that starts with a known operand, but depends on unknown
    operands after some step (a tangent that is zero at first). Returns None if the number of steps
    depends on an unknown operand.
    """
    program = jax.make_jaxpr(lambda *args: WHILE.bind(*args, **while_params))(*avals)
    (equation,) = _jax.opened(program).eqns
    known, _, unknown_outs, *_ = pe.partial_eval_jaxpr_custom_rules[WHILE](
        None, list(unknown), [True] * len(unknown), equation
    )
    if known is None:
        return None
    return known.params, [*unknown[: -len(unknown_outs)], *unknown_outs]


def _linearise(trace: Any, *tracers: Any, **params: Any) -> Any:
    """The partial evaluation of a loop: runs its known part; binds `LINEAR_WHILE` for the rest."""
    while_params, added = split_params(params)
    unknown = [not tracer.is_known() for tracer in tracers]
    avals = [tracer.aval for tracer in tracers]
    is_linear = all(_jax.is_inexact(a.dtype) for a, u in zip(avals, unknown, strict=True) if u)
    parts = None
    if is_linear and not all(unknown):
        parts = _find_known_part(while_params, avals, unknown)
    if parts is None:
        return trace.default_process_primitive(CHECKPOINTED_WHILE, tracers, params)
    known_params, unknown = parts
    known_args = [t.pval.get_known() for t, u in zip(tracers, unknown, strict=True) if not u]
    outs, kept = _run_and_record(known_args, known_params, added)
    linear = {**params, "unknown": tuple(unknown), "kept": len(kept)}
    results = trace.default_process_primitive(LINEAR_WHILE, [*kept, *tracers], linear)
    *_, is_unknown = _split_operands(while_params, unknown)
    tangents = [result for result, u in zip(results, is_unknown, strict=True) if u]
    return _merge(is_unknown, outs, tangents)


def _merge(choose: Sequence[bool], no: Sequence[Any], yes: Sequence[Any]) -> list[Any]:
    if len(choose) != len(no) + len(yes):
        raise AssertionError("`choose` has one entry for each entry of `no` and `yes`")
    a, b = iter(no), iter(yes)
    return [next(b) if chosen else next(a) for chosen in choose]


def _split_operands(params: Mapping[str, Any], args: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Splits operands into constants of the condition, constants of the body, and the carry."""
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    return list(args[:first]), list(args[first:last]), list(args[last:])


def _run_and_record(args: Any, params: Any, added: Any) -> tuple[list[Any], list[Any]]:
    """Runs a loop and keeps states; returns its results, and the values `kept` for the backward
    pass."""
    effects = params["cond_jaxpr"].effects | params["body_jaxpr"].effects
    if not all(map(_jax.may_be_repeated, effects)):
        raise ValueError(
            f"{added['place']} has an effect in each step, and its steps are run again in the "
            "backward pass, where it would happen once more. Take it out of the loop; "
            "jax.debug.print (without ordered=True) may stay, and prints again"
        )
    *_, init = _split_operands(params, args)
    goes_on, step = _make_condition_and_body(params, args)
    places = added["checkpoints"] + 1
    safe = _replace_states_without_step(init, goes_on)

    def one_step(carry: Any) -> Any:
        position, live, end, state = carry
        state = _step_live(step, live, state, safe)
        return position + 1, goes_on(state), end, state

    def stretch(carry: Any) -> Any:
        position, live, state, level, positions, states = carry
        place = schedule.place_of_state(position, places)
        (positions,) = _put_state([positions], place, [position])
        states = _put_state(states, place, state)
        end, level = schedule.next_to_keep(position, level, places)
        position, live, _, state = checkpointed_while_loop(
            lambda c: jnp.any(c[1]) & (c[0] < c[2]), one_step, (position, live, end, state), added
        )
        return position, live, state, level, positions, states

    zero = jnp.int32(0)
    states = [lax.broadcast(array, (places,)) for array in init]
    carry = (zero, goes_on(init), init, zero, jnp.zeros(places, jnp.int32), states)
    steps, _, outs, level, positions, states = checkpointed_while_loop(
        lambda c: jnp.any(c[1]), stretch, carry, added
    )
    return outs, [steps, level, positions, *states]


def _replay_backward(
    kept: Any, args: Any, unknown: Any, while_params: Any, added: Any, cotangents: Any
) -> Any:
    """Maps the cotangents of a loop's unknown results to the cotangents of its unknown operands.

    Args:
      kept: the kept values that `_run_and_record` returned.
      args: the operands of the whole loop; the unknown operands are ignored.
      while_params: the parameters of the whole loop.
    """
    known_params, _ = _find_known_part(while_params, [_aval(arg) for arg in args], unknown)
    known_args = [arg for arg, u in zip(args, unknown, strict=True) if not u]
    goes_on, step = _make_condition_and_body(known_params, known_args)
    steps, level, positions, *states = kept
    slots = added["checkpoints"]
    reaches = schedule.reaches(slots)
    _, of_body, _ = _split_operands(while_params, args)
    _, unknown_constants, unknown_carry = _split_operands(while_params, unknown)
    constants = [arg for arg, u in zip(of_body, unknown_constants, strict=True) if not u]
    sums = [
        ad.instantiate_zeros(ad.Zero(_aval(arg)))
        for arg, u in zip(of_body, unknown_constants, strict=True)
        if u
    ]

    safe = _replace_states_without_step(_take_state(states, 0), goes_on)

    def back_through(state: Any, sums: Any, cotangents: Any) -> Any:
        def step_tangents(of_constants: Any, of_state: Any) -> Any:
            known_and_tangents = [
                *_merge(unknown_constants, constants, of_constants),
                *_merge(unknown_carry, state, of_state),
            ]
            results = _jax.eval_program(while_params["body_jaxpr"], known_and_tangents)
            return [t for t, u in zip(results, unknown_carry, strict=True) if u]

        live = goes_on(state)
        state = _select_live(live, state, safe)
        types = jax.tree.map(jax.typeof, (sums, cotangents))
        zeros = [jnp.zeros_like(ct) for ct in cotangents]
        live_cotangents = _select_live(live, cotangents, zeros)
        of_constants, of_state = jax.linear_transpose(step_tangents, *types)(live_cotangents)
        sums = [a + b for a, b in zip(sums, of_constants, strict=True)]
        return sums, _select_live(live, of_state, cotangents)

    def forward(carry: Any) -> Any:
        position, end, state = carry
        return position + 1, end, _step_live(step, goes_on(state), state, safe)

    def advance(carry: Any) -> Any:
        top, places, stack, end = carry
        position = places[top]
        after = position + schedule.steps_to_next(end - position, slots - 1 - top, reaches)
        start = (position, after, _take_state(stack, top))
        *_, state = checkpointed_while_loop(lambda c: c[0] < c[1], forward, start, added)
        return top + 1, places.at[top + 1].set(after), _put_state(stack, top + 1, state), end

    def back_one(carry: Any) -> Any:
        top, places, stack, end, start, sums, cotangents = carry
        top, places, stack, _ = checkpointed_while_loop(
            lambda c: c[1][c[0]] < c[3] - 1, advance, (top, places, stack, end), added
        )
        sums, cotangents = back_through(_take_state(stack, top), sums, cotangents)
        return jnp.maximum(top - 1, 0), places, stack, end - 1, start, sums, cotangents

    def back_stretch(carry: Any) -> Any:
        end, places, stack, sums, cotangents = carry
        start = schedule.last_before(end, level, positions)
        base = _take_state(states, schedule.place_of_state(start, len(positions)))
        places, stack = places.at[0].set(start), _put_state(stack, 0, base)
        inner = (jnp.int32(0), places, stack, end, start, sums, cotangents)
        _, places, stack, end, _, sums, cotangents = checkpointed_while_loop(
            lambda c: c[3] > c[4], back_one, inner, added
        )
        return end, places, stack, sums, cotangents

    # One place more than slots, for the state that is differentiated when no slot is free.
    stack = [lax.broadcast(array, (slots + 1,)) for array in _take_state(states, 0)]
    carry = (steps, jnp.zeros(slots + 1, jnp.int32), stack, sums, list(cotangents))
    *_, sums, cotangents = checkpointed_while_loop(lambda c: c[0] > 0, back_stretch, carry, added)
    return [*sums, *cotangents]


def _make_condition_and_body(params: Any, args: Any) -> tuple[Any, Any]:
    """Returns two functions of a state: whether the loop goes on (for each element of a batch), and
    the next state."""
    of_condition, of_body, _ = _split_operands(params, args)

    def goes_on(state: Any) -> Any:
        live = _jax.eval_program(params["cond_jaxpr"], [*of_condition, *state])[0]
        return jnp.asarray(live)  # of a carry that begins as True, it is this Python bool

    def step(state: Any) -> Any:
        return _jax.eval_program(params["body_jaxpr"], [*of_body, *state])

    return goes_on, step


def _select_live(live: Any, yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    """Selects `yes` for the live elements of a batch, else `no`; without a batch, `yes`."""
    if live.ndim == 0:
        return list(yes)

    def choose(a: Any, b: Any) -> Any:
        mask = lax.broadcast_in_dim(live, a.shape, range(live.ndim))
        return lax.select(mask, a, b)

    return [choose(a, b) for a, b in zip(yes, no, strict=True)]


def _step_live(step: Any, live: Any, state: Sequence[Any], safe: Sequence[Any]) -> list[Any]:
    """Returns the state after a step of the live elements of a batch. An element that is not live
    keeps its state. A step from such a state may give NaN or Inf, so the step runs on the element's
    state in `safe` instead, and its result is dropped."""
    return _select_live(live, step(_select_live(live, state, safe)), state)


def _replace_states_without_step(init: Sequence[Any], goes_on: Any) -> list[Any]:
    """Returns the first states of a batch, with a state that takes a step in place of each state
    that takes none."""
    live = goes_on(init)
    if live.ndim == 0:
        return list(init)
    stepping = jnp.argmax(lax.collapse(live, 0))
    flat = [lax.collapse(each, 0, live.ndim) for each in init]
    some = [lax.dynamic_index_in_dim(each, stepping, 0, keepdims=False) for each in flat]
    return _select_live(live, init, [lax.broadcast(each, live.shape) for each in some])


def _put_state(states: Sequence[Any], place: Any, state: Sequence[Any]) -> list[Any]:
    return [
        lax.dynamic_update_index_in_dim(arrays, array, place, 0)
        for arrays, array in zip(states, state, strict=True)
    ]


def _take_state(states: Sequence[Any], place: Any) -> list[Any]:
    return [lax.dynamic_index_in_dim(arrays, place, 0, keepdims=False) for arrays in states]


def _aval(arg: Any) -> Any:
    return arg.aval if ad.is_undefined_primal(arg) else jax.typeof(arg)


def _transpose_linear(cotangents: Any, *args: Any, **params: Any) -> list[Any]:
    """Returns a cotangent for each operand of a loop; None if the operand is not transposed."""
    while_params, added = split_params(params)
    kept, args, unknown = args[: params["kept"]], args[params["kept"] :], params["unknown"]
    *_, unknown_carry = _split_operands(while_params, unknown)
    tangents = zip(cotangents, unknown_carry, strict=True)
    arrays = [ad.instantiate_zeros(ct) for ct, is_unknown in tangents if is_unknown]
    of_unknown = iter(_replay_backward(kept, args, unknown, while_params, added, arrays))
    of_operands = [next(of_unknown) if u else None for u in unknown]
    answer = [ct if ad.is_undefined_primal(arg) else None for ct, arg in zip(of_operands, args)]
    return [*[None] * len(kept), *answer]


ad.primitive_transposes[LINEAR_WHILE] = _transpose_linear
pe.custom_partial_eval_rules[CHECKPOINTED_WHILE] = _linearise
