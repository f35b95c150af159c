"""`check_grads`: compares derivatives, and every custom rule, with finite differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad._jax.progress import progress
from tracegrad.differentiation.wrt import partition
from tracegrad.insight.check_rules import check_rules, is_host_call, operands_in
from tracegrad.insight.comparing import Comparison
from tracegrad.insight.comparisons import GradCheck
from tracegrad.insight.deliberate import STOP, Declared, is_stop, predicate_of, without_deliberate
from tracegrad.insight.finite_differences import Limits
from tracegrad.insight.raising import Arithmetic, can_trace_faces, in_double, is_in_double
from tracegrad.ir import CustomGradient, Graph, Occurrence
from tracegrad.ir.occurrence import at
from tracegrad.ir.wording import first_line, some
from tracegrad.tracing.graphs import function_name, graph, require_function

Mode = Literal["fwd", "rev"]
MODES: tuple[Mode, ...] = get_args(Mode)


class GradientError(AssertionError):
    """A derivative differs from finite differences; `report` is the whole `GradCheck`."""

    def __init__(self, report: GradCheck, hint: str = ""):
        self.report = report
        first = "\n".join(f"  {check}" for check in report.wrong[:8])
        more = f"\n  ... and {len(report.wrong) - 8} more" if len(report.wrong) > 8 else ""
        super().__init__(f"derivatives of {report.function} are wrong:\n{first}{more}{hint}")
        self._hint = hint

    def __reduce__(self) -> tuple[Any, ...]:  # pickle needs the arguments, not the message
        return type(self), (self.report, self._hint), self.__dict__


def check_grads(
    fun: Callable[..., Any],
    args: Sequence[Any],
    order: int = 2,
    modes: Sequence[Mode] = MODES,
    *,
    deliberate: str | Collection[str] | Declared = (),
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> GradCheck:
    """Checks the derivatives of a function against finite differences, in double precision.

    All operations run in double precision, also those that the function computes in another dtype:
    the verdict is on the mathematics, not on how bfloat16 rounds. Some functions cannot be traced
    with arguments in double precision, because they make arrays of a fixed dtype (the first state
    of flax's recurrent layers). They are traced in single precision, and the report says so.

    First, each custom rule of the function (`jax.custom_vjp`, `jax.custom_jvp`,
    `tracegrad.custom_gradient`; not JAX's own) is checked on its own, at the operands that the
    program gives it; inside of a loop, at the first and the last step. A wrong rule is reported
    with its line, the input, the expected number and the rule's number. Then the whole function is
    checked, leaf by leaf, up to the given order. Each check takes a random direction in the leaf
    and weights the results by random numbers, so that an error in any element shows.

    Args:
      fun: a function of pytrees; their floating leaves are differentiated.
      args: a tuple of the arguments. Their floating leaves are converted to float64 (complex128)
        in a local x64 scope, or to float32 (complex64) if `fun` cannot be traced in float64.
      order: the highest derivative to check: 1, 2, ... For a model of some layers the first
        derivative takes seconds and the second takes minutes: each sequence of modes is compiled,
        and differences of gradients are taken along each leaf.
      modes: ``"fwd"``, ``"rev"``, or both; above the first order, every sequence of these modes.
      deliberate: rules that differ from the derivative on purpose (straight-through, clipping): a
        name, several names, or a predicate on the name of the function that has the rule. The
        report lists these rules, but they do not fail; the check of the whole function uses the
        derivatives of their functions, without stops. ``"stop_gradient"`` stands for every
        `stop_gradient`, and every rule whose function has one: these rules are not judged, however
        wrong they are. `tracegrad.grad_pass_through`, `rules.override_gradient`,
        `rules.straight_through`, `rules.clip_gradient` and `rules.scale_gradient` are always
        deliberate.
      rtol: the largest allowed difference, relative to the larger number. Default: 1e-5, or more if
        a part of the function cannot run in double precision (a callback that returns float32).
        Pass more if the function itself, an iteration for example, is no more precise.
      atol: the largest allowed absolute difference, added to the relative one. Default: 0.
      seed: the seed of the random numbers.

    Returns:
      A `GradCheck`; print it.

    Raises:
      GradientError: a derivative is wrong. It is an `AssertionError`.
      ValueError: an unknown mode, or an order below 1; no floating leaf in the arguments, or none
        in the results of `fun`; a name in `deliberate` that no rule has.

    Stopped values vary in differences, but not in derivatives: the error names their lines. If they
    are meant, pass ``deliberate="stop_gradient"``. JAX's derivative of samples of a gamma
    distribution (`jax.random.gamma`, `beta`, `dirichlet`, `t`) is implicit; differences of the
    algorithm that draws them are not. So outside of custom rules the check replaces such a sample
    by the parameter times a constant sample. A rule that differs from its function is not judged if
    the function draws such samples, and the whole function is checked without the rule.

    If there is doubt, there is no verdict: a derivative is not judged if the function has a kink or
    a jump nearby, if a `while` loop (outside of `jax.lax.custom_root`) does not end nearby (after
    100,000 iterations its results are NaN), or if rounding leaves too few digits of a number; but a
    derivative of NaN is wrong if the differences are finite. If nothing is wrong, the first line of
    the report says how many derivatives were not judged. A derivative that does not exist (a
    `while` loop in reverse mode) is not judged either. A rule is checked for what the program
    differentiates: the inputs of the rule that vary with a leaf, and the results that lead to a
    result of the function.

    >>> import jax, jax.numpy as jnp
    >>> from tracegrad import check_grads
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
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"args is a tuple of arguments, check_grads(fun, (x, y)); got {type(args).__name__}"
        )
    if order < 1 or not modes or any(mode not in MODES for mode in modes):
        raise ValueError(
            f"order is 1 or more and modes are of {MODES}; got order={order!r}, modes={modes!r}"
        )
    require_function(fun, "check the derivatives of")

    def check(double: bool) -> tuple[GradCheck, str]:
        return _check(fun, args, order, tuple(modes), deliberate, rtol, atol, seed, double)

    refused: Exception | None = None
    report, hint = None, ""
    try:
        report, hint = check(double=True)
        said = next((c.note for c in report.wrong if c.note), "")
    except Exception as error:
        refused, said = error, first_line(error) or type(error).__name__
    if said:  # something cannot run in double precision
        try:
            single, single_hint = check(double=False)
        except Exception:
            single = None
        if single and not any(c.note for c in single.wrong):
            note = "traced in single precision, as double precision failed: " + said
            report, hint = dataclasses.replace(single, note=note), single_hint
    if report is None:
        assert refused is not None
        raise refused
    if report.wrong:
        raise GradientError(report, hint)
    return report


def _check(
    fun: Callable[..., Any],
    args: Sequence[Any],
    order: int,
    modes: tuple[str, ...],
    deliberate: str | Collection[str] | Declared,
    rtol: float | None,
    atol: float | None,
    seed: int,
    double: bool,
) -> tuple[GradCheck, str]:
    """Returns the report on a function, and a hint if something is wrong.

    `double` says whether to trace in double or in single precision. The trace runs in double
    precision either way.
    """
    random = np.random.default_rng(seed)
    program, leaves, paths = _traced(fun, args, double=double)
    if not any(_jax.has_gradient(out.aval) for out in program.outputs):
        raise ValueError(
            f"check_grads compares derivatives of floats, and {function_name(fun)} returns "
            "none. Is its `return` missing?"
        )
    declared = predicate_of(deliberate, program)
    is_exact = is_in_double(program)
    with jax.enable_x64(True):
        operands = operands_in(program, leaves, Arithmetic(is_exact))
        leaves = in_double(leaves)

        def limits() -> Limits:  # for one run
            return Limits(Arithmetic(is_exact), rtol, atol or 0.0)

        rules = tuple(check_rules(program, operands, declared, limits, random))
        others = {check.name for check in rules if check.status != "right"}
        right = {check.name for check in rules} - others
        whole = without_deliberate(program, declared, right)
        values = [variable.value for variable in whole.variables]
        own = limits()

        def run(given: Sequence[Any]) -> list[Any]:
            return own.arithmetic.run_graph(whole, [*given, *values])

        steps = sum(len(modes) ** k for k in range(order)) * (len(leaves) + len(modes))
        with progress("check_grads", steps) as begin:
            comparison = Comparison(
                run, run, leaves, paths, own, random, whole="all leaves", begin=begin
            )
            checks = tuple(comparison.checks(modes, order))
    report = GradCheck(function_name(fun), rules, checks)
    return report, _hint_of(program) if report.wrong else ""


def _hint_of(program: Graph) -> str:
    """Returns words on what may be to blame for a wrong derivative of a program."""
    hint = ""
    if stops := program.find(is_stop):  # the stop of a parameter by a rule has no line
        hint += (
            f"\nStopped values vary in finite differences, but are constants in derivatives: {STOP}"
            f'{_places(stops)}. If they are meant, deliberate="{STOP}" checks the function without '
            "stops, and does not judge the rules whose functions have stops"
        )
    if calls := program.find(is_host_call):
        hint += f"\nThese are checked with the whole function alone: numpy_function{_places(calls)}"
    return hint


def _places(found: Sequence[Occurrence]) -> str:
    return some(list(dict.fromkeys(at(each.origin) for each in found)), 4)


def _traced(
    fun: Callable[..., Any], args: Sequence[Any], *, double: bool
) -> tuple[Graph, list[Any], list[str]]:
    """Returns the graph of `fun` as a function of its floating leaves alone; these leaves, in
    double or single precision; and their paths."""
    every = tuple(range(len(args)))
    chosen = partition(fun, every, tuple(args), {}).differentiable("none") if args else None
    if not chosen or not chosen.leaves:
        raise ValueError("check_grads needs an argument with a floating leaf to differentiate by")

    def flat(leaves: list[Any]) -> list[Any]:
        return jax.tree.leaves(chosen.call(leaves)[0])

    flat.__name__ = function_name(fun)
    # A rule that refuses an operand is useless afterwards, also to other programs that share it.
    for key in ("to be checked", object()):
        with jax.enable_x64(double), _jax.tracing_apart(key):
            leaves = [
                jnp.asarray(leaf, complex if jnp.iscomplexobj(leaf) else float)
                for leaf in chosen.leaves
            ]
            program = graph(flat, leaves)
            nodes = [node for region in program.regions_below for node in region.nodes]
            rules = [node for node in nodes if isinstance(node, CustomGradient)]
            refusing = [rule for rule in rules if not can_trace_faces(rule)]  # traces them all here
            if not refusing:
                break
    return program, leaves, chosen.names
