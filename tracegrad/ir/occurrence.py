"""Where a node stands: the calls that lead to it, the user's source line, the named scopes.

A shared region can be entered from many places, so origin and scope belong to an *occurrence*: a
node and the path of calls to it. The traceback of a node in a shared region was taken when its
function was first traced, and runs through that first caller; only the frames inside the region's
own function are true of every occurrence. Where none of those is the user's, the origin is that of
the call.
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
from tracegrad.ir import scopes
from tracegrad.ir.nodes import CustomGradient, Node, Source
from tracegrad.ir.wording import notebook_cell

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = tuple(os.path.dirname(os.path.abspath(str(m.__file__))) + os.sep for m in (jax, jaxlib))
_OWN = (_PACKAGE, *_JAX)
_PYTHONS = (
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

# JAX takes the derivative of a solve by a further solve.
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
        """What stands there; "" if that cannot be read any more."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.place} ({self.function})"


def at(place: object) -> str:
    """A place as a message goes on with it: `` at model.py:42``; nothing for None or ""."""
    return f" at {place}" if place else ""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A node, and the calls that lead to it from the graph that was walked.

    `path` holds, from the outside in, each node that was entered and the name of its region.
    """

    path: Path
    node: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The node; of a `Fragment` all of them."""
        return (self.node,)

    @property
    def name(self) -> str:
        """What a reader calls it: the node's name, or a `Fragment`'s label."""
        return self.node.name

    @property
    def scope(self) -> str:
        """All named scopes around it, those of the enclosing calls first: ``encoder/block_0``."""
        return "/".join(filter(None, (scopes.text(scopes.around(node)) for node in self.steps)))

    @property
    def scopes(self) -> tuple[str, ...]:
        """Their names one by one, without what transformations write around them."""
        return tuple(name for node in self.steps for name in scopes.scopes(scopes.around(node)))

    @property
    def steps(self) -> list[Node]:
        """The nodes that were entered on the way to it, and the node."""
        return [*(node for node, _ in self.path), self.node]

    @property
    def rule_around(self) -> Node | None:
        """The outermost call around it that is differentiated by a rule, not by what is in it: a
        custom gradient, a `jax.lax.custom_linear_solve` in a solve of which it stands, or what JAX
        has in an object, as a `jax.lax.custom_root`. None where derivatives reach it."""
        for node, region in self.path:
            if isinstance(node, CustomGradient) or (node.op, region) in _SOLVES:
                return node
            if node.op == _jax.OF_AN_OBJECT:
                return node
        return None

    def into(self, region: str) -> Path:
        """The path of what is in one of its regions."""
        return (*self.path, (self.node, region))

    @property
    def origin(self) -> Origin | None:
        """The user's line that made it; a library's only where no user's frame exists.

        None where JAX recorded no traceback at all.
        """
        fallback: Origin | None = None
        for depth, node in reversed(list(enumerate(self.steps))):
            found, is_users = _origin_in(node, within=bool(depth))
            if is_users:
                return found
            fallback = fallback or found
        return fallback

    @property
    def lines(self) -> tuple[Origin, ...]:
        """The lines of the user and of libraries, but for JAX's own, that led to it: from the
        function of its region inwards."""
        stack = _within(_jax.frames(self.node.source.info), self.node.function)
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
    """Several nodes of one region that are one match of a selector.

    What an inlined call, a scope or a line has become. `node` is the first of `nodes`.
    """

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
    """Whether it lies in a loss to which the rules in force were applied before."""
    return any(scopes.is_under_rules(scopes.around(node)) for node in occurrence.steps)


def is_of_nothing(occurrence: Occurrence) -> bool:
    """Whether it is a call without operands, so that no gradient passes it.

    Of a call in a scan that JAX differentiates it puts what is constant before the scan, in a call
    of the same name, out of all scopes.
    """
    return bool(occurrence.node.regions) and not occurrence.node.inputs


class Matches(list[Occurrence]):
    """The occurrences that were found, in the order of execution; prints one a line."""

    def __repr__(self) -> str:
        return (
            "\n".join(
                " ".join(filter(None, (str(match), match.scope and f"[{match.scope}]")))
                for match in self
            )
            or "(no matches)"
        )


def _origin_in(node: Node, *, within: bool) -> tuple[Origin | None, bool]:
    """The innermost user's frame of a node; `within`: inside its region's function.

    Returns the origin (None if there is no frame) and whether it is the user's.
    """
    stack = _jax.frames(node.source.info)
    return origin_in(_within(stack, node.function) if within else stack)


def origin_in(stack: Iterable[Any]) -> tuple[Origin | None, bool]:
    """The innermost user's frame of some, the innermost first; a library's where there is none.

    Returns the origin (None if there is no frame but JAX's) and whether it is the user's.
    """
    fallback = None
    for frame in stack:
        kind = _owner(frame.file_name)
        if kind == "user":
            return Origin(frame.file_name, frame.line_num, frame.function_name), True
        if fallback is None and kind == "library":
            fallback = Origin(frame.file_name, frame.line_num, frame.function_name)
    return fallback, False


def users_line(node: Node) -> Origin | None:
    """The user's line of a node inside the function of its region; None if it has none there."""
    found, is_users = _origin_in(node, within=True)
    return found if is_users else None


def written_out(call: Node, node: Node) -> Source:
    """The source of a node of a call's region, where that stands in the place of the call."""
    has_line = users_line(node) is not None
    info = _jax.inside_call(call.source.info, node.source.info, has_line=has_line)
    return node.source._replace(info=info)


def _within(stack: Sequence[Any], function_source: str) -> Sequence[Any]:
    """The frames from the innermost one up to the function of a region."""
    function = origin_of_function(function_source)
    if function is None:
        return stack
    for i, frame in enumerate(stack):
        if frame.function_start_line == function.line and frame.file_name == function.file:
            return stack[: i + 1]
    return stack


def origin_of_function(function_source: str) -> Origin | None:
    """What `Graph.function_source` says: ``f at /path/file.py:12``. None if that is no place."""
    function, _, place = function_source.partition(" at ")
    file, _, line = place.rpartition(":")
    return Origin(file, int(line), function) if file and line.isdecimal() else None


def _short_name(file: str) -> str:
    return notebook_cell(file) or os.path.basename(file)


def calling_line() -> Origin | None:
    """The line of the user's code that is running now; None if there is none on the stack."""
    frame = _calling_frame()
    if frame is None:
        return None
    return Origin(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def _calling_frame() -> FrameType | None:
    return next(
        (f for f, _ in traceback.walk_stack(None) if is_user_file(f.f_code.co_filename)), None
    )


def line_of_error(stack: TracebackType | None) -> Origin | None:
    """The innermost line of the user's code that an error came through; None if there is none."""
    found = None
    for frame, line in traceback.walk_tb(stack):
        code = frame.f_code
        if is_user_file(code.co_filename):
            found = Origin(code.co_filename, line, code.co_qualname)
    return found


def warn_where_called(message: str, category: type[Warning]) -> None:
    """Warns at the line of the user's code that is running now; there, by default, once."""
    frame = _calling_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    of_module = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=of_module.get("__name__"),
        registry=of_module.setdefault("__warningregistry__", {}),
    )


def is_user_file(file: str) -> bool:
    """Whether a file is neither of JAX, of this package, of an installed library nor Python's."""
    return _owner(file) == "user"


def is_own_file(file: str) -> bool:
    """Whether a file is one of this package or of JAX."""
    return _owner(file) == "jax"


def is_jaxs_file(file: str) -> bool:
    """Whether a file is one of JAX."""
    return file.startswith(_JAX)


def _owner(file: str) -> str:
    """Whose code a file is: ``"user"``, ``"library"`` or ``"jax"`` (and this package)."""
    if file.startswith(_OWN):
        return "jax"
    if file.startswith(_PYTHONS) or _INSTALLED.search(file):
        return "library"
    return "user"
