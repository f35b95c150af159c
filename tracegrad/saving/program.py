"""A function → its programs, as `jax.export` writes them: itself, its gradients, theirs, and so on.

The function's program takes its arguments and the values of Variables, and returns its result and
new values of Variables. A gradient program takes the same, flat, and the cotangents of *some*
results, and returns gradients of the operands that are connected to them. There is one for each
float result alone, so that what leads to another result takes no part (an infinite derivative there
makes no NaN here), and one for all of them together. New values of Variables have no cotangents.

Rules of the user's act where JAX differentiates one program to make the next. Where JAX
differentiates a function with rules, its value too comes from another program: the forward pass of
the rules. So such a function is written with that value, which has gradients of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export

from tracegrad import _jax
from tracegrad._jax.progress import progress
from tracegrad.differentiation.connectivity import connections
from tracegrad.ir import CustomGradient, Graph
from tracegrad.ir.dependence import leading_to
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.saving import outside_calls, refusals
from tracegrad.saving.file import sha256
from tracegrad.saving.interface import Trees
from tracegrad.saving.manifest import OWN, Gradient, Program
from tracegrad.saving.source import Source
from tracegrad.saving.trees import check_containers

MOST_SINGLE = 16
"""Of so many results at most, over all gradients of one order, each has a gradient program."""
_MOST_BYTES = 16 << 20  # which programs of single results may have together
# Arrays that a function closes over are written into each of its programs.
_LARGE_CONSTANTS = 16 << 20  # bytes

_LOCATION = re.compile(r' loc\((#loc\d*|unknown|"[^"]*")\)')


@dataclass
class Programs:
    """The programs of one function, each different one once; made by `export`.

    Attributes:
      name: of the function.
      trees: what it takes and returns.
      order: how many times it can be differentiated.
      platforms: where they run.
      begin: tells somebody who waits what is written next.
      contents: what is written, by the names of the arrays.
      calls: the targets of the custom calls in each.
      tree: how they belong together.
    """

    name: str
    trees: Trees
    order: int
    platforms: Sequence[str] | None
    begin: Callable[[str], None]
    contents: dict[str, bytes] = field(default_factory=dict)
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tree: Program = field(default_factory=lambda: Program(""))
    _has_begun: int = -1  # with programs of this order
    _texts: dict[str, str] = field(default_factory=dict)
    _compares: bool = False

    def write(self, source: Source, order: int = 0, width: int = 1) -> Program:
        """A program with its gradients, if any are wanted. `width`: how many gradients of this
        order there are."""
        self._compares |= order == 0 and _has_rules(source.graph)
        array, size = self._export(source, order)
        if order == self.order:
            return Program(array)
        refused: tuple[tuple[int, str], ...] = ()
        active = _floats(source.avals)
        try:
            gradients = self._gradients(source, active, size, order, width)
        except Exception:
            refused = _refused(source, active)
            active = [i for i in active if i not in dict(refused)]
            if not refused or not active:
                raise
            source = source.fresh()
            gradients = self._gradients(source, active, size, order, width)
        value = None
        if _has_rules(source.graph) and active:
            value = self.write(source.value(active), order + 1, width)
        nodes = (found.node for found in source.graph.walk())
        adds = not any(isinstance(node, CustomGradient) and node.kind == "vjp" for node in nodes)
        return Program(array, gradients, value, refused, adds)

    def _gradients(
        self, source: Source, active: Sequence[int], size: int, order: int, width: int
    ) -> tuple[Gradient, ...]:
        connected = [set(inputs).intersection(active) for inputs in connections(source.graph)]
        flowing = [j for j in _floats(source.graph.out_avals[: source.count]) if connected[j]]
        choices: list[tuple[int, ...]] = [(j,) for j in flowing]
        if width * len(flowing) > MOST_SINGLE or size * len(flowing) > _MOST_BYTES:
            choices = []
        if flowing and len(choices) != 1:
            choices.append(tuple(flowing))
        return tuple(
            Gradient(
                results,
                operands := tuple(sorted(set().union(*(connected[j] for j in results)))),
                self.write(source.gradient(operands, results), order + 1, width * len(choices)),
            )
            for results in choices
        )

    def _export(self, source: Source, order: int) -> tuple[str, int]:
        """Writes a program; its name, and how many bytes it has."""
        what = f"the derivative of order {order} of {self.name}" if order else self.name
        if order > self._has_begun:
            self._has_begun = order
            self.begin(f"writing {what}")
        try:
            exported = refusals.exported(*self._function(source, order), self.platforms)
            contents, calls = bytes(exported.serialize(vjp_order=0)), _jax.outside_calls(exported)
            if exported.ordered_effects or exported.unordered_effects:
                raise ValueError("it has effects")
        except Exception as error:
            why = refusals.reason(source, what, order, self.platforms, error)
            if why is None:
                raise
            raise ValueError(why) from error
        if (unknown := outside_calls.unknown(calls)) is not None:
            raise ValueError(
                f"{what} cannot be saved: it calls {unknown!r} by a custom call of XLA, which is "
                "none of those that this version of tracegrad would load"
            )
        self.platforms = exported.platforms
        name = f"{OWN}program/{sha256(contents)[:16]}"
        if self._compares:
            name = self._texts.setdefault(_text(exported), name)
        if name not in self.contents:
            self.contents[name], self.calls[name] = contents, tuple(calls)
        return name, len(contents)

    def _function(self, source: Source, order: int) -> tuple[Callable[..., Any], list[Any]]:
        """What is exported, and the types that it takes. What is differentiated was traced."""
        run: Callable[..., Any] = lambda *operands: source.run(operands)  # noqa: E731
        if order == self.order:
            run = source.fun
        given: list[Any] = list(map(_jax.without_devices, source.avals))
        arguments: Any = jax.tree.structure(tuple(self.trees.arguments.values()))
        result = jax.tree.structure(self.trees.result)

        def program(*given: Any) -> Any:
            results = run(*jax.tree.leaves(given))
            if source.above is not None:
                return results
            tree = jax.tree.unflatten(result, results[: source.count])
            return tree, results[source.count :]

        if source.above is None:
            count = arguments.num_leaves
            given = [jax.tree.unflatten(arguments, given[:count]), given[count:]]
        program.__name__ = program.__qualname__ = source.name
        return program, given


def export(source: Source, trees: Trees, order: int, platforms: Sequence[str] | None) -> Programs:
    """The programs of a function and of its derivatives.

    Args:
      source: the function.
      trees: what it takes and returns.
      order: how many times it can be differentiated.
      platforms: as of `jax.export.export`; None: the one that JAX runs on.

    Raises:
      ValueError: part of the program cannot be written, or not differentiated in reverse; the
        message names the node and its line.
      TypeError: a container in the trees cannot be written.
    """
    with progress("save", order + 1) as begin:
        programs = Programs(source.name, trees, order, platforms, begin)
        try:
            programs.tree = programs.write(source)
        except Exception:
            trees.check(check_containers, source.name)  # which may be why
            raise
    # Some were written before another of the same function could not be.
    programs.contents = {name: programs.contents[name] for name in programs.tree.arrays()}
    _warn_of_constants(source.graph, len(programs.contents))
    return programs


def _floats(avals: Sequence[Any]) -> list[int]:
    return [i for i, aval in enumerate(avals) if _jax.has_gradient(aval)]


def _text(exported: Any) -> str:
    """The text of a program without source lines, by which two that compute the same differ."""
    lines = (line for line in exported.mlir_module().splitlines() if not line.startswith("#loc"))
    return _LOCATION.sub("", "\n".join(lines))


def _has_rules(graph: Graph) -> bool:
    """Whether a custom gradient leads to a result."""
    rules = [found for found in graph.walk() if isinstance(found.node, CustomGradient)]
    live = leading_to(graph, [True] * len(graph.outputs)) if rules else set()
    return any(not live.isdisjoint(rule.steps[0].outputs) for rule in rules)


def _refused(source: Source, active: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """The operands for which there is no gradient, with the reason.

    A rule has no gradient for what its function closes over, a Variable that is not trainable for
    example, and refuses to be differentiated with respect to it. For the rest it has.
    """

    def why_not(operands: Sequence[int]) -> str | None:
        try:
            fresh = source.fresh()
            gradient = fresh.gradient(operands, _floats(fresh.graph.out_avals[: source.count]))
            jax.eval_shape(gradient.fun, *gradient.avals)
        except Exception as error:
            return _without_folders(str(error))
        return None

    if why_not(active) is None:  # something else was wrong
        return ()
    reasons = {i: why_not([i]) for i in active}
    return tuple((i, why) for i, why in reasons.items() if why is not None)


def _without_folders(text: str) -> str:
    """Words about somebody's source lines, for others."""
    return re.sub(r"(?<![\w.])([A-Za-z]:)?[/\\]([^\s/\\:()]+[/\\])+", "", text)


def _warn_of_constants(graph: Graph, programs: int) -> None:
    arrays: dict[int, Any] = {}
    for region in graph.regions_below:
        arrays.update((id(array), array) for array in region.constants.values())
    size = sum(getattr(array, "nbytes", 0) for array in arrays.values())
    if size >= _LARGE_CONSTANTS:
        warn_where_called(
            f"{graph.name} closes over arrays of {size >> 20} MiB, which become a part of each of "
            f"its programs, and so are written {programs} times. Pass them as arguments, or make "
            "Variables of them, which are written once.",
            UserWarning,
        )
