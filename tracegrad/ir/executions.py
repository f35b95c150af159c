"""Selectors that find the operations of one call, or of one source line.

The Python frames that JAX records separate the operations of one execution from those of the next.
"""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from tracegrad.ir.errors import GraphError
from tracegrad.ir.frames import Frame, Stack, has_loop_around, is_in_loop, stack_of
from tracegrad.ir.nodes import Node
from tracegrad.ir.occurrence import (
    PACKAGE,
    Occurrence,
    Origin,
    Path,
    is_under_rules,
    is_user_file,
)
from tracegrad.ir.selector import Group, Grouping, fits_any

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


class _ByFrame(Grouping):
    """Finds groups of nodes that come from one execution of a piece of Python code.

    For each operation JAX records the Python frames and their instructions. The operations of one
    execution are adjacent in the program and have the same frames outside of the code. If the code
    was executed several times in a row from one place, the next execution starts where a frame goes
    back to an earlier instruction, unless a loop in the code itself can explain that.
    """

    @abstractmethod
    def _find_frame(self, stack: Stack, known: dict[int, bool]) -> tuple[int, Any] | None:
        """Returns the index (innermost first) of the frame that a pattern matches, and a key; None
        if no frame matches. Frames with different keys are in different groups. `known` caches an
        answer about each code object, by identity."""

    def _is_named(self, node: Node) -> bool:
        return False

    _each_iteration = False  # whether each iteration of a loop in the code is a separate match

    def _groups(self, graph: Graph, path: Path) -> dict[Node, Group]:
        groups: dict[Node, Group] = {}
        run: list[_FramedNode] = []
        last: Any = None
        known: dict[int, bool] = {}

        def finish() -> None:
            for members in self._split_executions(run, path):
                group = (
                    _short_qualname(members[0].inner[-1].code.co_qualname),
                    [b.node for b in members],
                )
                groups.update(dict.fromkeys(group[1], group))
            run.clear()

        for node in graph.nodes:
            stack = stack_of(node, root=not path)
            anchor = self._find_frame(stack, known)
            if anchor is None:
                finish()
                last = None
                if self._is_named(node):
                    groups[node] = (None, [node])
                continue
            index, pattern = anchor
            key = (stack.key(index + 1), id(stack.codes[index]), pattern)
            if key != last:
                finish()
            last = key
            run.append(_FramedNode(node, stack.frames(0, index + 1), stack.frames(index + 1)))
        finish()
        return groups

    def _split_executions(self, run: Sequence[_FramedNode], path: Path) -> list[list[_FramedNode]]:
        """Splits successive nodes of the same code into its executions."""
        if not run:
            return []
        level, may_loop = _deciding_level(run)
        executions = [[run[0]]]
        unsure: set[int] = set()  # groups that may belong to the execution before
        for before, now in itertools.pairwise(run):
            went_back = _classify_step_back(before, now, level, run[-1].node)
            if not went_back:
                executions[-1].append(now)
                continue
            if (may_loop or went_back == "in a loop") and not self._each_iteration:
                unsure.add(len(executions))
            executions.append([now])
        if not unsure or _are_independent(executions):
            return executions
        # Only the code's own loop can go back; or rules have acted here already, and do not again.
        here = [Occurrence(path, framed.node) for framed in run]
        if not any(map(is_in_loop, run[0].outer)) or all(map(is_under_rules, here)):
            return _join_unsure(executions, unsure)
        name = _short_qualname(run[0].inner[-1].code.co_qualname)
        raise GraphError(
            f"{self!r}: {name} is called in a loop and has a loop of its own, so that its calls "
            f"cannot be distinguished from {Occurrence((), run[0].node)} on: put a jax.named_scope "
            "around each call and use match.scope"
        )


class _FramedNode(NamedTuple):
    """A node with its frames, split into the frames inside of the matched code and outside of
    it."""

    node: Node
    inner: tuple[Frame, ...]  # innermost first; the last is the frame of the matched code
    outer: tuple[Frame, ...]


def _deciding_level(run: Sequence[_FramedNode]) -> tuple[int, bool]:
    """Returns the outermost level at which the nodes' frames are at several instructions (0: none),
    and whether a frame further out is in a loop of its code. Level 1 is the matched code."""
    may_loop = False
    for level in range(1, min(len(bound.inner) for bound in run) + 1):
        frames = {bound.inner[-level] for bound in run}
        if len(frames) > 1:
            return level, may_loop
        may_loop = may_loop or is_in_loop(frames.pop())
    return 0, may_loop


def _classify_step_back(before: _FramedNode, now: _FramedNode, level: int, end: Node) -> str:
    """Returns ``"in a loop"`` or ``"again"`` if execution went back at a level, else ``""``.

    At level 0 all frames are equal, since JAX gives all operations of an inlined jitted function
    the frames of its call (`jnp.mean`; a product that first converts or broadcasts an operand).
    Then each execution ends with the primitive of the `end` node, the last node of all.
    """
    if level == 0:
        is_end = before.node.primitive is end.primitive
        return "again" if is_end and len(before.inner) == len(now.inner) else ""
    old, new = before.inner[-level], now.inner[-level]
    if old.code is not new.code or new.at >= old.at:
        return ""
    return "in a loop" if has_loop_around(new, old) else "again"


def _join_unsure(executions: list[list[_FramedNode]], unsure: set[int]) -> list[list[_FramedNode]]:
    joined: list[list[_FramedNode]] = []
    for i, members in enumerate(executions):
        if i in unsure:
            joined[-1].extend(members)
        else:
            joined.append(list(members))
    return joined


def _are_independent(executions: Sequence[Sequence[_FramedNode]]) -> bool:
    """Whether no execution uses a value of another execution."""
    makers = {
        value: i
        for i, members in enumerate(executions)
        for bound in members
        for value in bound.node.outputs
    }
    return all(
        makers.get(value, i) == i
        for i, members in enumerate(executions)
        for bound in members
        for value in bound.node.operands
    )


class CallOf(_ByFrame):
    made_by = "match.call"

    def _find_frame(self, stack: Stack, known: dict[int, bool]) -> tuple[int, Any] | None:
        for index in range(len(stack.codes) - 1, -1, -1):  # a recursive call is one match
            code = stack.codes[index]
            found = known.get(id(code))
            if found is None:
                found = known[id(code)] = _matches_function(code.co_qualname, self.patterns)
            if found:
                return index, None
        return None

    def _is_named(self, node: Node) -> bool:
        return bool(node.regions) and _matches_function(node.name, self.patterns)

    def names(self, graph: Graph) -> list[str]:
        found: dict[str, None] = {}
        for o in graph.walk():
            if o.node.regions:
                found[o.node.name] = None
            for code in reversed(stack_of(o.node, root=not o.path).codes):
                if not _is_machinery(code):
                    found[_short_qualname(code.co_qualname)] = None
        return list(found)


def _is_machinery(code: CodeType) -> bool:
    """Whether a function is not worth naming: JAX's tracing code, JAX's private functions, and
    wrappers of this package."""
    *_, folder, name = ["", "", *code.co_filename.replace("\\", "/").split("/")]
    is_tracing_code = folder in ("_src", "interpreters") and name != "random.py"
    is_wrapper = code.co_filename.startswith(PACKAGE) and "<locals>" in code.co_qualname
    is_private = "/_src/" in code.co_filename and code.co_name.startswith("_")
    return is_tracing_code or is_wrapper or is_private


def _matches_function(qualname: str, patterns: tuple[str, ...]) -> bool:
    names = {qualname, _short_qualname(qualname), qualname.rsplit(".", 1)[-1]}
    return any(fits_any(name, patterns) for name in names)


def _short_qualname(qualname: str) -> str:
    """Returns a function's name within its module, without the enclosing functions. For the
    ``__call__`` of a class, returns the name of the class."""
    return qualname.rsplit("<locals>.", 1)[-1].removesuffix(".__call__")


class SourceOf(_ByFrame):
    made_by = "match.source"
    _each_iteration = True

    def _find_frame(self, stack: Stack, known: dict[int, bool]) -> tuple[int, Any] | None:
        for index, code in enumerate(stack.codes):
            if id(code) not in known:
                known[id(code)] = is_user_file(code.co_filename)
            if known[id(code)]:
                (frame,) = stack.frames(index, index + 1)
                pattern = next((p for p in self.patterns if _matches_place(frame, p)), None)
                return None if pattern is None else (index, pattern)
        return None

    def names(self, graph: Graph) -> list[str]:
        origins = [o.origin for o in graph.walk()]
        places = [name for o in origins if o is not None for name in (o.place, o.function)]
        return list(dict.fromkeys(places))


def _matches_place(frame: Frame, pattern: str) -> bool:
    origin = Origin(frame.code.co_filename, frame.line, frame.code.co_qualname)
    if re.search(r":\d+$", pattern):
        file, line = pattern.rsplit(":", 1)
        return origin.line == int(line) and _matches_file(origin, file)
    return _matches_file(origin, pattern) or _matches_function(origin.function, (pattern,))


def _matches_file(origin: Origin, pattern: str) -> bool:
    short = origin.place.rsplit(":", 1)[0]
    file = origin.file.replace("\\", "/")
    return fits_any(short, (pattern,)) or file == pattern or file.endswith("/" + pattern)
