"""The place of a node: the calls that lead to it, the user's source line, the named scopes.

A shared region can be called from many places, so origin and scope belong to an *occurrence*: a
node and the path of calls to it. JAX recorded the traceback of a node in a shared region when it
first traced the region's function, so the traceback includes the frames of that first caller; only
the frames inside the region's own function are right for every occurrence. If none of these frames
is the user's, the node has the origin of the call.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import jax
import jaxlib

from tracegrad import _jax
from tracegrad._jax.caches import cached
from tracegrad.ir import scopes
from tracegrad.ir.nodes import CustomGradient, Node, Source
from tracegrad.ir.wording import notebook_cell

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = tuple(os.path.dirname(os.path.abspath(str(m.__file__))) + os.sep for m in (jax, jaxlib))
_PYTHON = (
    "<frozen",
    *(
        folder + os.sep
        for folder in {
            os.path.dirname(os.__file__),
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
        }
    ),
)
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")

Path = tuple[tuple[Node, str], ...]

# JAX differentiates a linear solve by another solve, not by differentiating these regions.
_SOLVES = {("custom_linear_solve", f"jaxprs.{name}") for name in ("solve", "transpose_solve")}


class Origin(NamedTuple):
    """A line of Python code: ``model.py:42 (Block.__call__)``."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """``model.py:42``; in a notebook ``In[3]:42``."""
        return f"{_short_name(self.file)}:{self.line}"

    @property
    def code(self) -> str:
        """The code of the line; "" if the file cannot be read any more."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.place} ({self.function})"


def at(place: object) -> str:
    """Returns a place as the end of a phrase: `` at model.py:42``; "" for None or ""."""
    return f" at {place}" if place else ""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A node, and the calls that lead to it from the graph that was walked.

    `path` contains, from the outside in, each enclosing node and the name of its region.
    """

    path: Path
    node: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the match: this one node, or all nodes of a `Fragment`."""
        return (self.node,)

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies the match in its region, also after edits."""
        return tuple([node.key for node in self.nodes])

    @property
    def name(self) -> str:
        """The name to show: the node's name, or the label of a `Fragment`."""
        return self.node.name

    @property
    def scope(self) -> str:
        """All named scopes around the node, outermost first: ``encoder/block_0``."""
        return "/".join(filter(None, (scopes.text(scopes.around(node)) for node in self.steps)))

    @property
    def scopes(self) -> tuple[str, ...]:
        """The names of the scopes, one by one, without transformations (``vmap(...)``)."""
        return tuple(name for node in self.steps for name in scopes.scopes(scopes.around(node)))

    @property
    def steps(self) -> list[Node]:
        """The enclosing nodes from the outside in, and then the node."""
        return [*(node for node, _ in self.path), self.node]

    @property
    def rule_around(self) -> Node | None:
        """The outermost enclosing call whose derivative comes from a rule, not from its body: a
        custom gradient, a `jax.lax.custom_linear_solve` (if the node is in one of its solves), or a
        call whose rule JAX keeps in an object, such as `jax.lax.custom_root`. None if derivatives
        reach the node."""
        for node, region in self.path:
            if isinstance(node, CustomGradient) or (node.op, region) in _SOLVES:
                return node
            if node.op == _jax.OBJECT_PRIMITIVE:
                return node
        return None

    def into(self, region: str) -> Path:
        """Returns the path of the nodes in one of the node's regions."""
        return (*self.path, (self.node, region))

    @property
    def origin(self) -> Origin | None:
        """The user's line that made the node; without a user's frame, a library's line; None if JAX
        recorded no frame outside of JAX and this package."""
        library: Origin | None = None
        for depth, node in reversed(list(enumerate(self.steps))):
            origin, is_users = _origin_in(node, within=bool(depth))
            if is_users:
                return origin
            library = library or origin
        return library

    @property
    def lines(self) -> tuple[Origin, ...]:
        """The lines that led to the node, from the function of its region inwards, without lines of
        JAX and of this package."""
        stack = _frames_within(_jax.frames(self.node.source.info), self.node.function)
        return tuple(
            Origin(frame.file_name, frame.line_num, frame.function_name)
            for frame in reversed(stack)
            if not is_own_file(frame.file_name)
        )

    def __str__(self) -> str:
        where = " > ".join(node.name for node, _ in self.path)
        place = f" in {where}" if where else ""
        origin = self.origin
        return f"{self.node!r}{place}" + (f" from {origin}" if origin else "")


@dataclass(frozen=True, slots=True)
class Fragment(Occurrence):
    """Several nodes of one region that are one match of a selector: the operations of an inlined
    call, a scope or a line. `node` is the first of `nodes`."""

    members: tuple[Node, ...]
    label: str

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.members

    @property
    def name(self) -> str:
        return self.label

    def __str__(self) -> str:
        where = "".join(f" in {node.name}" for node, _ in reversed(self.path))
        origin = self.origin
        count = len(self.members)
        counted = f"<{self.label}: {count} node{'s'[: count != 1]} from {self.node!r} on>"
        return counted + where + (f" from {origin}" if origin else "")


def is_under_rules(occurrence: Occurrence) -> bool:
    """Whether the rules in force were already applied to the loss around an occurrence."""
    return any(scopes.is_under_rules(scopes.around(node)) for node in occurrence.steps)


def is_call_without_operands(occurrence: Occurrence) -> bool:
    """Whether no gradient can pass through a call, since it has no operands. When JAX
    differentiates a call in a scan, it moves the constant part of the call before the scan, into a
    call of the same name outside of all scopes."""
    return bool(occurrence.node.regions) and not occurrence.node.inputs


class Matches(list[Occurrence]):
    """The occurrences that a selector found, in the order of execution; prints one a line."""

    def __repr__(self) -> str:
        return (
            "\n".join(
                " ".join(filter(None, (str(match), match.scope and f"[{match.scope}]")))
                for match in self
            )
            or "(no matches)"
        )


def _origin_in(node: Node, *, within: bool) -> tuple[Origin | None, bool]:
    """Finds the innermost user's frame of a node (with `within`: only in its region's function).
    Returns the origin, if any frame has one, and whether it is the user's."""
    stack = _jax.frames(node.source.info)
    return origin_in(_frames_within(stack, node.function) if within else stack)


def origin_in(stack: Iterable[Any]) -> tuple[Origin | None, bool]:
    """Finds the first frame of the user in a stack (innermost first), or else of a library. Returns
    the origin (None if all frames are JAX's or this package's) and whether it is the user's."""
    library = None
    for frame in stack:
        owner = _owner_of_file(frame.file_name)
        if owner == "user":
            return Origin(frame.file_name, frame.line_num, frame.function_name), True
        if library is None and owner == "library":
            library = Origin(frame.file_name, frame.line_num, frame.function_name)
    return library, False


def users_line(node: Node) -> Origin | None:
    """Returns the user's line of a node, if the line is in the function of the node's region."""
    origin, is_users = _origin_in(node, within=True)
    return origin if is_users else None


def source_after_inlining(call: Node, node: Node) -> Source:
    """Returns the source that a node of a call's region has after the call was inlined."""
    has_line = users_line(node) is not None
    info = _jax.inside_call(call.source.info, node.source.info, has_line=has_line)
    return node.source._replace(info=info)


def was_called_by(node: Node, function_source: str) -> bool:
    """Whether the function of a region (`Graph.function_source`) was running when JAX traced a
    node."""
    return _index_of_frame(_jax.frames(node.source.info), function_source) is not None


def shows_callers(node: Node) -> bool:
    """Whether the frames of a node go back to the beginning of its thread. They do not in a program
    that JAX traced by itself (`jax.make_jaxpr`)."""
    stack = _jax.frames(node.source.info)
    return bool(stack) and stack[-1].function_name in ("<module>", "Thread._bootstrap")


def _frames_within(stack: Sequence[Any], function_source: str) -> Sequence[Any]:
    """Returns the frames up to the function of a region; all frames if it is not among them."""
    index = _index_of_frame(stack, function_source)
    return stack if index is None else stack[: index + 1]


def _index_of_frame(stack: Sequence[Any], function_source: str) -> int | None:
    """Returns the index of the innermost frame of a function."""
    function = origin_of_function(function_source)
    if function is None:
        return None
    for i, frame in enumerate(stack):
        if frame.function_start_line == function.line and frame.file_name == function.file:
            return i
    return None


def origin_of_function(function_source: str) -> Origin | None:
    """Parses a `Graph.function_source`, ``f at /path/file.py:12``; None if it has no line."""
    function, _, place = function_source.partition(" at ")
    file, _, line = place.rpartition(":")
    return Origin(file, int(line), function) if file and line.isdecimal() else None


def _short_name(file: str) -> str:
    return notebook_cell(file) or os.path.basename(file)


def calling_line() -> Origin | None:
    """Returns the user's innermost line that runs now."""
    frame = _users_calling_frame()
    if frame is None:
        return None
    return Origin(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def _users_calling_frame() -> FrameType | None:
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return next((f for f in frames if _owner_of_file(f.f_code.co_filename) == "user"), None)


def line_of_error(stack: TracebackType | None) -> Origin | None:
    """Returns the user's innermost line in a traceback."""
    origin = None
    for frame, line in traceback.walk_tb(stack):
        code = frame.f_code
        if is_user_file(code.co_filename):
            origin = Origin(code.co_filename, line, code.co_qualname)
    return origin


def warn_where_called(message: str, category: type[Warning]) -> None:
    """Warns at the user's innermost line that runs now; by default once per line."""
    frame = _users_calling_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    module_globals = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=module_globals.get("__name__"),
        registry=module_globals.setdefault("__warningregistry__", {}),
    )


def is_user_file(file: str) -> bool:
    """Whether a file is not part of JAX, this package, an installed library, or Python."""
    return _owner_of_file(file) == "user"


def is_own_file(file: str) -> bool:
    """Whether a file is part of this package or of JAX."""
    return _owner_of_file(file) == "jax"


def is_jaxs_file(file: str) -> bool:
    return file.startswith(_JAX)


@cached(1024)
def _owner_of_file(file: str) -> str:
    """Returns ``"user"``, ``"library"``, or ``"jax"`` (also for this package)."""
    if file.startswith((PACKAGE, *_JAX)):
        return "jax"
    if file.startswith(_PYTHON) or _INSTALLED.search(file):
        return "library"
    return "user"
