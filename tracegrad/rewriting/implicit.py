"""The derivative of what a loop converges to, as that of a fixed point of its body.

Where ``x = body(c, x)`` and v is the tangent of c, that of x is the u with
``u - (d body / d x) u = (d body / d c) v``.

What is told apart here is what x is. A loop carries more than that: counters, the state before, an
error that its condition reads. So the x of a result is what the body makes it of, by way of any
number of steps; a result that goes into no other is computed from that x.

What the body does to tangents is JAX's derivative of it, and derivatives of the solution of any
order and mode are those of `jax.lax.custom_linear_solve`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node
from tracegrad.ir.authors import file_of_primal
from tracegrad.ir.dependence import dependence
from tracegrad.ir.importer import import_program
from tracegrad.lowering import evaluate, evaluate_node
from tracegrad.rewriting.norms import at_least_32_bits
from tracegrad.rewriting.overriding import with_tangents

Matvec = Callable[[Any], Any]
LinearSolve = Callable[[Matvec, Any], Any]


@dataclass(frozen=True)
class FixedPoint:
    """How `rules.fixed_point` goes about it."""

    solve: LinearSolve
    rtol: float
    atol: float

    def allows(self, error: Any, beside: Any, eps: float) -> Any:
        """Whether an error is small beside an array that is computed with a precision of eps."""
        return error <= max(self.rtol, 8 * eps) * _largest(beside) + self.atol


@dataclass(frozen=True)
class _Tangents:
    """What a body is differentiated at and along: its operands, and by their positions the tangents
    of those that are the same in each step."""

    body: Graph
    operands: list[Any]
    constant: dict[int, Any]

    def body_of(self, inputs: Sequence[int], outputs: Sequence[int]) -> Callable[..., Any]:
        """The body as a function of some operands; what it makes of some, by their positions."""
        before = len(self.operands) - len(self.body.outputs)
        wanted = [i - before for i in outputs]
        return _jax.of_some(lambda all_: evaluate(self.body, all_), self.operands, inputs, wanted)

    def pushed(self, carried: dict[int, Any], outputs: Sequence[int]) -> tuple[Any, Any]:
        """What the body makes of some operands, and the tangents of that."""
        along = {**self.constant, **carried}
        values = [self.operands[i] for i in along]
        return _jax.jvp(self.body_of(list(along), outputs), values, list(along.values()))


def implicit(node: Node, body: Graph, how: FixedPoint) -> Callable[..., list[Any]]:
    """A loop as a function of its operands, differentiated as a fixed point of its body.

    `body`: that of the node, or one that computes the same and may have other derivatives.
    """
    first, count = node.params["cond_nconsts"], node.params["body_nconsts"]
    carried = range(count, len(body.inputs))  # positions are those of the operands of the body
    pairs = zip(carried, body.inputs[count:], body.outputs, strict=True)
    constant = {*range(count), *(i for i, before, after in pairs if before is after)}
    floats = [i for i, value in enumerate(body.inputs) if value.has_gradient]
    moving = [i for i in floats if i not in constant]

    def fixed_point(*args: Any) -> list[Any]:
        return evaluate_node(node, args)

    sources = functools.cache(lambda: _sources(body, floats, moving))

    def differentiated(
        primals: Sequence[Any], active: Sequence[int], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        outs = _jax.keeping_rule(rule, primals)
        given = {i - first: tangent for i, tangent in zip(active, tangents, strict=True)}
        operands = [*primals[first : first + count], *outs]
        at = _Tangents(body, operands, {i: t for i, t in given.items() if i in constant})
        found = dict(at.constant)
        solved: dict[tuple[int, ...], tuple[dict[int, Any], Any]] = {}
        for i in moving:
            behind = _behind(i, sources())
            state = tuple(j for j in moving if j in behind)
            if state not in solved:
                solved[state] = _solved(at, state, how)
            of_state, is_fixed = solved[state]
            tangent = of_state.get(i)
            if tangent is None:
                (after,), (tangent,) = at.pushed(of_state, [i])
                eps = _precision([after])
                is_fixed &= how.allows(_largest(after - operands[i]), operands[i], eps)
            # To what no derivative leads, one that does not exist would be zero otherwise.
            others = [t for j, t in given.items() if j not in at.constant or j not in behind]
            found[i] = _nan_unless(is_fixed, tangent, others)
        flowing = [
            found[i] if i in found else jnp.zeros_like(operands[i]) for i in carried if i in floats
        ]
        return outs, _jax.align(list(map(jax.typeof, outs)), flowing)

    rule = with_tangents(fixed_point, "fixed_point", differentiated)
    return rule


def is_fixed_point(node: Node) -> bool:
    """Whether it is one that `rules.fixed_point` has put in."""
    return isinstance(node, CustomGradient) and file_of_primal(node) == __file__


def _solved(at: _Tangents, state: Sequence[int], how: FixedPoint) -> tuple[dict[int, Any], Any]:
    """The tangents of a state that the body makes of itself, and whether it is a fixed point at
    which the equation has one solution."""
    if not state:
        return {}, True
    point, parts = _as_vector([at.operands[i] for i in state])
    eps = _precision([at.operands[i] for i in state])

    def step(point: Any) -> Any:
        return _as_vector(at.body_of(state, state)(*parts(point)))[0]

    after, along = _jax.linearize(step, point)
    along = jax.jit(along)  # traced once for all its uses below
    results, pushed = at.pushed({}, state)
    _, right = _jax.jvp(lambda results: _as_vector(results)[0], (results,), (pushed,))

    def matvec(u: Any) -> Any:
        return u - along(u)

    def checked(matvec: Matvec, b: Any) -> Any:
        # At length one: to JAX's GMRES a vector shorter than the rounding error is zero.
        length = _largest(b)
        b = b / jnp.where(length > 0, length, 1)
        u = how.solve(matvec, b)
        is_solved = how.allows(_largest(matvec(u) - b), jnp.ones_like(b), eps)
        return jnp.where(is_solved, length * u, jnp.nan)

    def solution(b: Any) -> Any:
        return lax.custom_linear_solve(matvec, b, checked, checked)

    # One that leads nowhere special: of a bisection's steps the right side is zero, and so would be
    # the solution, though there is none of any other.
    probe = 1 + jnp.cos(jnp.arange(point.size, dtype=point.dtype) ** 2)
    probe += 0 * lax.stop_gradient(point)  # in a shard_map it varies with the device as that does
    growth = lax.stop_gradient(_largest(solution(probe)) / 2)
    is_fixed = jnp.isfinite(growth)
    for pair in zip(parts(point), parts(after), strict=True):
        value, new = lax.stop_gradient(pair)
        # The distance to the fixed point: how far all steps together would go on.
        distance = _largest(new - value) * jnp.maximum(growth, 1)
        is_fixed &= how.allows(distance, value, eps)
    return dict(zip(state, parts(solution(right)), strict=True)), is_fixed


# ------------------------------------------------------------------------------------ dependence


def _sources(body: Graph, floats: Sequence[int], moving: Sequence[int]) -> dict[int, set[int]]:
    """From which operands a derivative reaches the new values of some of them."""
    types = body.in_avals

    def tangents(operands: list[Any], along: list[Any]) -> Any:
        tangents = dict(zip(floats, along, strict=True))
        return _Tangents(body, operands, tangents).pushed({}, moving)[1]

    program = jax.make_jaxpr(tangents)(types, [types[i] for i in floats])
    masks = [mask >> len(types) for mask in dependence(import_program(program))]
    return {
        i: {j for place, j in enumerate(floats) if mask >> place & 1}
        for i, mask in zip(moving, masks, strict=True)
    }


def _behind(i: int, sources: dict[int, set[int]]) -> set[int]:
    """From which operands a derivative reaches a result, by any number of steps."""
    behind: set[int] = set()
    new = sources[i]
    while new:
        behind |= new
        new = {k for j in new for k in sources.get(j, ())} - behind
    return behind


# -------------------------------------------------------------------------------------- vectors


def _as_vector(values: Sequence[Any]) -> tuple[Any, Callable[[Any], list[Any]]]:
    """Arrays as one real vector, of 32 bits at least, and what undoes that."""
    # One operand: JAX does not transpose a system of which a part of the right side is known. Real,
    # since a derivative of complex numbers is linear in their parts, not always in them.
    parts = [[x.real, x.imag] if jnp.iscomplexobj(x) else [x] for x in values]
    vector, undo = ravel_pytree(parts)

    def undone(wide: Any) -> list[Any]:
        parts = undo(wide.astype(vector.dtype))
        return [lax.complex(*each) if len(each) == 2 else each[0] for each in parts]

    return at_least_32_bits(vector), undone


def _precision(arrays: Sequence[Any]) -> float:
    return max(float(_finfo(array.dtype).eps) for array in arrays)


def _largest(array: Any) -> Any:
    return jnp.max(jnp.abs(array), initial=0)


def _nan_unless(is_fixed: Any, tangent: Any, others: Sequence[Any]) -> Any:
    """A tangent or NaN; which is NaN to those that are no part of it as well."""
    nothing = jnp.where(is_fixed, 0, jnp.nan).astype(tangent.dtype)
    rest = sum(jnp.sum(jnp.real(other)).astype(tangent.dtype) for other in others)
    return tangent * (nothing + 1) + nothing * rest


# --------------------------------------------------------------------------------- linear systems


def _gmres(matvec: Matvec, b: Any) -> Any:
    tolerance = 100 * float(_finfo(b.dtype).eps)
    restart = max(1, min(b.size, 32))
    return _jax_gmres(matvec, b, tol=tolerance, restart=restart, maxiter=20)[0]


def _neumann(matvec: Matvec, b: Any) -> Any:
    small = _finfo(b.dtype).eps

    def add(carry: Any) -> Any:
        count, total, power = carry
        power = power - matvec(power)
        return count + 1, total + power, power

    def goes_on(carry: Any) -> Any:
        count, total, power = carry
        return (count < _MOST_POWERS) & (_largest(power) > small * _largest(total))

    return lax.while_loop(goes_on, add, (0, b, b))[1]


_MOST_POWERS = 1000
_finfo: Any = jnp.finfo  # has no types, nor has this
_jax_gmres: Any = jax.scipy.sparse.linalg.gmres

SOLVERS: dict[str, LinearSolve] = {"neumann": _neumann, "gmres": _gmres}
