"""`check_grads`: derivatives against finite differences, and every custom rule on its own."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os.path
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.forward import jvp
from tracegrad.differentiation.selection import is_differentiable, resolve
from tracegrad.insight.explaining.authors import file_of_rule, is_jaxs_rule
from tracegrad.insight.explaining.measuring import MeasuredPass, occurrence
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence, Origin
from tracegrad.ir.occurrence import is_own_file
from tracegrad.lowering import Lowering, evaluate, evaluate_node
from tracegrad.tracing.graphs import function_name, graph

MODES = ("fwd", "rev")
Declared = str | Collection[str] | Callable[[str], Any]

# Of each of these a complex number differs from a real one by its derivative alone.
_ANALYTIC = frozenset(
    """
    add sub mul div neg exp log sin cos tan tanh sinh cosh sqrt integer_pow square
    logistic log1p expm1 dot_general reduce_sum broadcast_in_dim reshape transpose
    concatenate slice squeeze expand_dims add_any copy pad rev cumsum jit
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Checked:
    """One comparison: a derivative along a direction, and what finite differences give for it.

    `what` names the leaf (``params/w``) or the rule and its input (``clip, input 0``), `order` and
    `mode` the derivative (``"rev"``, ``"fwd"``, ``"fwd of rev"``), `expected` is the number by
    finite differences and `got` the derivative's; both are of the results, weighed by random
    numbers. `status` is ``"right"``, ``"wrong"``, ``"not smooth"`` (a kink or a jump is so near
    that differences say nothing), ``"none"`` (there is no such derivative; `got` is NaN) or
    ``"deliberate"``; `note` says why there is none. `origin` is the user's line of a rule's call,
    `defined` where the rule is.
    """

    what: str
    order: int
    mode: str
    expected: float
    got: float
    status: str
    origin: Origin | None = None
    defined: str = ""
    note: str = ""

    def __str__(self) -> str:
        where = f" at {self.origin}" if self.origin else ""
        defined = f" (defined at {self.defined})" if self.defined else ""
        said = self.note or f"expected {self.expected:.6g}, got {self.got:.6g}"
        return f"{self.what}{where}{defined}, order {self.order}, {self.mode}: {said}"


@dataclass(frozen=True)
class GradCheck:
    """What `check_grads` compared: `rules` each on its own, then the whole function's `leaves`."""

    function: str
    rules: tuple[Checked, ...]
    leaves: tuple[Checked, ...]

    @property
    def wrong(self) -> tuple[Checked, ...]:
        """What failed, rules first: a wrong rule is why a leaf is wrong."""
        return tuple(c for c in (*self.rules, *self.leaves) if c.status == "wrong")

    @property
    def deliberate(self) -> tuple[Checked, ...]:
        """The rules that differ from the derivative and were declared to."""
        return tuple(c for c in self.rules if c.status == "deliberate")

    def __str__(self) -> str:
        lines = [
            f"derivatives of {self.function}: "
            + (f"{len(self.wrong)} wrong" if self.wrong else "right")
        ]
        marks = {"right": "✓", "wrong": "✗", "deliberate": "·", "not smooth": "?", "none": "–"}
        for check in (*self.rules, *self.leaves):
            name = "" if check.status in ("right", "wrong") else f" [{check.status}]"
            lines.append(f"{marks[check.status]} {check}{name}")
        return "\n".join(lines)


class GradientError(AssertionError):
    """A derivative is not what finite differences give; `report` is the whole `GradCheck`."""

    def __init__(self, report: GradCheck):
        self.report = report
        first = "\n".join(f"  {check}" for check in report.wrong[:8])
        more = f"\n  ... and {len(report.wrong) - 8} more" if len(report.wrong) > 8 else ""
        super().__init__(f"derivatives of {report.function} are wrong:\n{first}{more}")


def check_grads(
    fun: Callable[..., Any],
    args: Sequence[Any],
    order: int = 2,
    modes: Sequence[str] = MODES,
    *,
    deliberate: Declared = (),
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> GradCheck:
    """Checks the derivatives of a function against finite differences, in double precision.

    First each custom rule in it (`jax.custom_vjp`, `jax.custom_jvp`, `tracegrad.custom_gradient`;
    JAX's own are left out) by itself, at the values that flow there, inside of loops at the first
    and the last step: a wrong rule is named with its line, the input, what was expected and what
    it gave. Then the whole function, leaf by leaf, up to the given order. All along a random
    direction in the leaf, with the results weighed by random numbers, so that an error in any
    element shows.

    Args:
      fun: a function of pytrees whose floating leaves are differentiated.
      args: a tuple of its arguments. They are made float64 (complex128) inside a local x64 scope.
      order: 1, 2, ...: the derivatives of derivatives too.
      modes: ``"fwd"``, ``"rev"``, or both; of a higher order every sequence of them.
      deliberate: rules that are meant to differ from the derivative (straight-through, clipping):
        a name, several, or a predicate on the name of the function with the rule. They are listed
        and not failed, and the whole function is checked with the derivatives of their functions.
        Those of `tracegrad.grad_pass_through` and of rules for graphs (`rules.clip_gradient`) are.
      rtol, atol: how far the numbers may be apart; default: by the least precise dtype that the
        function computes in, 1e-5 and 1e-7 for float64.
      seed: of the random numbers.

    Returns:
      A `GradCheck`; print it.

    Raises:
      GradientError: an `AssertionError`, if something is wrong.
      ValueError: another mode or an order below 1; an argument without a floating leaf.

    Where a function has a kink or a jump nearby, differences say nothing, and it is not judged.

    >>> import jax, jax.numpy as jnp
    >>> from tracegrad.insight import check_grads
    >>> @jax.custom_vjp
    ... def square(x):
    ...     return x**2
    >>> square.defvjp(lambda x: (x**2, x), lambda x, ct: (ct * x,))
    >>> check_grads(lambda x: jnp.sum(square(x)), (jnp.ones(3),), order=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    tracegrad.insight.check_grads.GradientError: derivatives of <lambda> are wrong:
      square, input 0 at ...

    After ``check_grads`` of HIPS Autograd and of JAX.
    """
    if order < 1 or not modes or any(mode not in MODES for mode in modes):
        raise ValueError(
            f"order is 1 or more and modes are of {MODES}; got order={order!r}, modes={modes!r}"
        )
    declared = _predicate(deliberate)
    with jax.enable_x64(True):
        random = np.random.default_rng(seed)
        flat, leaves, paths = _flat(fun, args)
        program = graph(flat)(leaves)
        limits = _limits(program, rtol, atol)
        rules = tuple(_check_rules(program, leaves, declared, limits, random))
        whole = _without(program, {c.what.split(",")[0] for c in rules if c.status == "deliberate"})
        checks = tuple(_check_leaves(whole, leaves, paths, order, tuple(modes), limits, random))
    report = GradCheck(function_name(fun), rules, checks)
    if report.wrong:
        raise GradientError(report)
    return report


def _predicate(declared: Declared) -> Callable[[str], Any]:
    if callable(declared):
        return declared
    names = {declared} if isinstance(declared, str) else set(declared)
    return lambda name: name in names


def _flat(
    fun: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[[list[Any]], list[Any]], list[Any], list[str]]:
    """The function of its floating leaves alone, those in double precision, and their paths."""
    if not isinstance(args, tuple | list):
        raise TypeError(f"args is a tuple of arguments, got {type(args).__name__}")
    selection = resolve(fun, tuple(range(len(args))), tuple(args), {}) if args else None
    chosen = selection and selection.refined([is_differentiable(x) for x in selection.leaves])
    if not chosen or not chosen.leaves:
        raise ValueError("check_grads needs an argument with a floating leaf to differentiate by")

    def flat(leaves: list[Any]) -> list[Any]:
        return jax.tree.leaves(chosen.call(leaves))

    flat.__name__ = function_name(fun)
    leaves = [
        jnp.asarray(leaf, jnp.complex128 if jnp.iscomplexobj(leaf) else jnp.float64)
        for leaf in chosen.leaves
    ]
    return flat, leaves, chosen.paths


# ------------------------------------------------------------------------------------- the numbers


@dataclass(frozen=True)
class _Limits:
    """How far apart two numbers may be, and with what step differences are best."""

    rtol: float
    atol: float
    step: float
    exact: bool  # whether every operation is analytic, so that a complex step is exact


def _limits(program: Graph, rtol: float | None, atol: float | None) -> _Limits:
    """By the least precise float dtype that a program computes in."""
    eps = float(np.finfo(np.float64).eps)
    exact = True
    for found in program.walk():
        exact = exact and found.node.op in _ANALYTIC
        for value in found.node.outputs:
            dtype = getattr(value.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                finfo: Any = jnp.finfo
                eps = max(eps, float(finfo(dtype).eps))
                exact = exact and bool(jnp.issubdtype(dtype, jnp.floating))
    default = max(1e-5, 50 * eps ** (2 / 3))
    return _Limits(
        default if rtol is None else rtol,
        default / 100 if atol is None else atol,
        eps ** (1 / 5),
        exact and eps < 1e-15,
    )


Function = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class _Estimate:
    """The derivative of the weighed results along a direction, by differences: its value, how far
    it may be off, and whether the function is smooth there."""

    direction: Any
    value: float
    error: float
    smooth: bool


def _difference(
    fun: Function, at: Sequence[Any], which: int, direction: Any, weights: Any, limits: _Limits
) -> _Estimate:
    """The derivative of the weighed results along a direction in one leaf."""
    spread = float(np.sqrt(np.mean(np.abs(at[which]) ** 2))) if np.size(at[which]) else 0.0
    step = limits.step * (spread or 1.0)
    if limits.exact:
        exact = _complex_step(fun, at, which, direction, weights)
        if exact is not None:
            return _Estimate(direction, exact, 0.0, True)

    def along(distance: float) -> float:
        moved = list(at)
        moved[which] = at[which] + distance * direction
        return _weighed(fun(moved), weights)

    here = along(0.0)
    best = _Estimate(direction, math.nan, math.inf, False)
    for scale in (1.0, 0.1, 0.01):
        h = step * scale
        ahead, behind, near, nearer = along(h), along(-h), along(h / 2), along(-h / 2)
        wide, narrow = (ahead - behind) / (2 * h), (near - nearer) / h
        # The one-sided derivatives of a smooth function meet as the step shrinks; at a kink not.
        bend, less = (abs(x - 2 * here + y) for x, y in ((ahead, behind), (near, nearer)))
        bend, less = bend / h, 2 * less / h
        value, error = (4 * narrow - wide) / 3, abs(narrow - wide)
        noise = limits.rtol * max(abs(value), abs(wide)) + limits.atol
        smooth = math.isfinite(value) and error < 100 * noise and not (less > noise + 0.75 * bend)
        if smooth and (not best.smooth or error < best.error):
            best = _Estimate(direction, value, error, True)
            if error < noise:
                break
        elif not best.smooth:
            best = _Estimate(direction, value, error, False)
    return best


def _along_smooth(
    fun: Function,
    at: Sequence[Any],
    which: int,
    direction: Any,
    weights: Any,
    limits: _Limits,
    random: Any,
) -> _Estimate:
    """The same along a direction in which the function is smooth.

    Where it is not, some element is at a kink (a rectifier at zero): then half of the elements
    that move stay where they are, a few times.
    """
    found = _difference(fun, at, which, direction, weights, limits)
    for _ in range(4):
        if found.smooth or np.size(direction) < 2:
            break
        kept = direction * (random.random(np.shape(direction)) < 0.5)
        if np.any(kept):
            attempt = _difference(fun, at, which, kept, weights, limits)
            if attempt.smooth or np.count_nonzero(kept) < np.count_nonzero(direction):
                direction, found = kept, attempt
    return found


def _complex_step(
    fun: Function, at: Sequence[Any], which: int, direction: Any, weights: Any
) -> float | None:
    """The same by one evaluation at an imaginary distance, without cancellation; None where the
    function does not take complex numbers."""
    moved = [jnp.asarray(leaf, jnp.complex128) for leaf in at]
    moved[which] = moved[which] + 1e-30j * direction
    try:
        outs = fun(moved)
    except Exception:
        return None
    if not all(jnp.iscomplexobj(out) for out in outs):
        return None
    return _weighed([jnp.imag(out) for out in outs], weights) / 1e-30


def _weighed(outs: Sequence[Any], weights: Sequence[Any]) -> float:
    """The real part of the sum of the floating results, each element by its weight."""
    total = 0.0
    for out, weight in zip(outs, weights, strict=True):
        if weight is not None:
            total += float(np.sum(np.real(np.asarray(out) * weight)))
    return total


def _random_like(random: Any, avals: Sequence[Any]) -> list[Any]:
    """Random numbers of each floating type, in double precision; None for the others."""
    found: list[Any] = []
    for aval in avals:
        if not _jax.has_gradient(aval):
            found.append(None)
            continue
        numbers = random.normal(size=aval.shape)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            numbers = numbers + 1j * random.normal(size=aval.shape)
        found.append(numbers)
    return found


def _judge(expected: Sequence[_Estimate], got: float, limits: _Limits) -> str:
    if not all(estimate.smooth for estimate in expected):
        return "not smooth"
    want, error = sum(e.value for e in expected), sum(e.error for e in expected)
    near = limits.rtol * max(abs(want), abs(got)) + limits.atol + 10 * error
    return "right" if abs(want - got) <= near else "wrong"


# ------------------------------------------------------------------------------ the whole function


def _check_leaves(
    program: Graph,
    leaves: list[Any],
    paths: list[str],
    order: int,
    modes: tuple[str, ...],
    limits: _Limits,
    random: Any,
) -> Iterator[Checked]:
    def run(given: Sequence[Any]) -> list[Any]:
        return evaluate(program, given, Lowering(rebuild=True))

    yield from _check_order(run, leaves, paths, 1, order, modes, (), limits, random)


def _check_order(
    fun: Function,
    leaves: list[Any],
    paths: list[str],
    level: int,
    order: int,
    modes: tuple[str, ...],
    before: tuple[str, ...],
    limits: _Limits,
    random: Any,
) -> Iterator[Checked]:
    avals = jax.eval_shape(fun, leaves)
    weights = _random_like(random, avals)
    flowing = [i for i, weight in enumerate(weights) if weight is not None]
    if not flowing:
        return
    compiled = jax.jit(fun)
    expected = [
        _along_smooth(compiled, leaves, i, direction, weights, limits, random)
        for i, direction in enumerate(_random_like(random, leaves))
    ]
    directions = [estimate.direction for estimate in expected]

    def backward(given: Sequence[Any]) -> list[Any]:
        outs, vjp = jax.vjp(lambda given: [fun(given)[i] for i in flowing], list(given))
        cts = [jnp.asarray(weights[i], out.dtype) for i, out in zip(flowing, outs, strict=True)]
        return list(vjp(cts)[0])

    def forward(given: Sequence[Any]) -> list[Any]:
        tangents = [jnp.asarray(d, leaf.dtype) for d, leaf in zip(directions, given, strict=True)]
        primal = [jnp.asarray(leaf) for leaf in given]
        return list(jvp(lambda given: [fun(given)[i] for i in flowing], (primal,), (tangents,))[1])

    derivatives = {"rev": backward, "fwd": forward}
    for mode in modes:
        name = " of ".join((mode, *before))
        try:
            found = jax.jit(derivatives[mode])(leaves)
        except Exception as error:
            note = str(error).split("\n")[0]
            status = "none" if "no forward-mode derivative" in note else "wrong"
            yield Checked("all leaves", level, name, math.nan, math.nan, status, note=note)
            continue
        if mode == "rev":
            got = [_weighed([ct], [d]) for ct, d in zip(found, directions, strict=True)]
            for path, want, number in zip(paths, expected, got, strict=True):
                status = _judge([want], number, limits)
                yield Checked(path, level, name, want.value, number, status)
        else:  # along all leaves at once: a leaf that is wrong is named by the reverse mode
            number = _weighed(found, [weights[i] for i in flowing])
            total = sum(want.value for want in expected)
            status = _judge(expected, number, limits)
            yield Checked("all leaves", level, name, total, number, status)
        if level < order:
            yield from _check_order(
                derivatives[mode],
                leaves,
                paths,
                level + 1,
                order,
                modes,
                (mode, *before),
                # A reverse pass need not be analytic where its function is.
                dataclasses.replace(limits, exact=False),
                random,
            )


def _without(program: Graph, names: set[str]) -> Graph:
    """The program with the rules of these names replaced by their functions."""
    if not names:
        return program
    program = program.copy()
    for found in program.find(
        lambda o: isinstance(o.node, CustomGradient) and o.node.name in names
    ):
        here = program.own(found)
        node = here.node
        assert isinstance(node, CustomGradient)
        results = here.graph.insert(node.primal, node.inputs, before=node)
        for old, new in zip(node.outputs, results, strict=True):
            here.graph.replace_uses(old, new)
        node.effects = frozenset()  # its function has them now
        here.graph.erase(node)
    return program


# --------------------------------------------------------------------------------------- the rules


class _Operands(MeasuredPass):
    """A forward pass that keeps what each custom rule is given."""

    def _forward_node(self, node: Node, args: list[Any], kept: Any, at: Any, number: int) -> Any:
        if isinstance(node, CustomGradient) and not is_jaxs_rule(node):
            for i, arg in enumerate(args):
                self._note("operand", at, number, i, lambda x: x, jnp.asarray(arg))
        return super()._forward_node(node, args, kept, at, number)


def _defined(node: CustomGradient) -> str:
    return node.primal.function_source.rpartition(" at ")[2]


def _is_meant(node: CustomGradient) -> bool:
    """Whether this package has put a rule in to change a gradient."""
    frames = () if node.source is None else _jax.frames(node.source.info)
    ours = itertools.takewhile(is_own_file, (frame.file_name for frame in frames))
    named = {os.path.basename(file) for file in (*ours, file_of_rule(node))}
    return not named.isdisjoint({"rules.py", "pass_through.py"})


def _check_rules(
    program: Graph,
    leaves: Sequence[Any],
    declared: Callable[[str], Any],
    limits: _Limits,
    random: Any,
) -> Iterator[Checked]:
    run = _Operands(program, [True] * len(program.inputs), close=False)
    given = [*leaves, *(variable.value for variable in program.variables)]
    with run._collecting() as found:
        run.forward(program, given, ())
    places: dict[tuple[Any, int], dict[int, Any]] = {}
    branches = {
        (at, number): np.ravel(found[k])
        for k, (kind, at, number, _) in enumerate(run.keys)
        if kind == "branch" and k in found
    }
    for k, (kind, at, number, i) in enumerate(run.keys):
        if kind == "operand" and k in found and _has_run(at, branches):
            places.setdefault((at, number), {})[i] = found[k]
    for (at, number), operands in places.items():
        rule = occurrence(program, at, number)
        args = [operands[i] for i in range(len(operands))]
        yield from _check_rule(rule, args, declared, limits, random)


def _has_run(at: Any, branches: dict[Any, Any]) -> bool:
    """Whether every branch on the way was taken (in a loop: at every step)."""
    for depth, (number, name) in enumerate(at):
        index = branches.get((at[:depth], number))
        if index is not None and name.startswith("branches["):
            mine = int(name[len("branches[") : -1])
            if not np.all(index == mine):
                return False
    return True


def _check_rule(
    rule: Occurrence,
    stacked: Sequence[Any],
    declared: Callable[[str], Any],
    limits: _Limits,
    random: Any,
) -> Iterator[Checked]:
    node = rule.node
    assert isinstance(node, CustomGradient)
    extra = next(
        (
            np.ndim(arg) - len(value.aval.shape)
            for arg, value in zip(stacked, node.inputs, strict=True)
        ),
        0,
    )
    steps = [np.shape(stacked[0])[:extra]] if stacked else [()]
    first, last = (0,) * extra, tuple(n - 1 for n in steps[0])
    closed_over = int(node.params.get("num_consts", 0))
    active = [
        i
        for i, value in enumerate(node.inputs)
        if i >= closed_over and _jax.has_gradient(value.aval)
    ]

    def primal(given: Sequence[Any]) -> list[Any]:
        return evaluate(node.primal, given, Lowering())

    def with_rule(given: Sequence[Any]) -> list[Any]:
        return evaluate_node(node, list(given), Lowering())

    compiled = jax.jit(primal)
    for step in dict.fromkeys((first, last)):
        args = [arg[step] for arg in stacked]
        weights = _random_like(random, [value.aval for value in node.outputs])
        for i in active:
            (direction,) = _random_like(random, [args[i]])
            want = _along_smooth(compiled, args, i, direction, weights, limits, random)
            number, note = _rule_along(node, with_rule, args, i, want.direction, weights)
            status = "wrong" if note else _judge([want], number, limits)
            if status == "wrong" and (declared(node.name) or _is_meant(node)):
                status = "deliberate"
            yield Checked(
                f"{node.name}, input {i}",
                1,
                "rev" if node.kind == "vjp" else "fwd",
                want.value,
                number,
                status,
                rule.origin,
                _short(_defined(node)),
                note,
            )


def _rule_along(
    node: CustomGradient,
    with_rule: Function,
    args: Sequence[Any],
    i: int,
    direction: Any,
    weights: Sequence[Any],
) -> tuple[float, str]:
    """What a rule gives for the derivative; and why, if it gives none."""
    flowing = [k for k, weight in enumerate(weights) if weight is not None]

    def of_input(x: Any) -> list[Any]:
        outs = with_rule([*args[:i], x, *args[i + 1 :]])
        return [outs[k] for k in flowing]

    tangent = jnp.asarray(direction, jnp.result_type(args[i]))
    try:
        if node.kind == "jvp":
            _, outs = jax.jvp(of_input, (args[i],), (tangent,))
            return _weighed(outs, [weights[k] for k in flowing]), ""
        outs, vjp = jax.vjp(of_input, args[i])
        cts = [jnp.asarray(weights[k], out.dtype) for k, out in zip(flowing, outs, strict=True)]
        return _weighed(vjp(cts), [direction]), ""
    except Exception as error:
        return math.nan, str(error).split("\n")[0]


def _short(place: str) -> str:
    file, _, line = place.rpartition(":")
    return Origin(file, int(line), "").place
