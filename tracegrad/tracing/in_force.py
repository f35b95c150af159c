"""The rules in force: those of an enclosing trace, which act where differentiation happens.

A train step that differentiates its loss holds, in its own program, only what is left of the loss:
custom gradients are gone, and an edit of how gradients flow would do nothing. So while a function
with rules is being traced, `tracegrad.grad` and its like, tapes and `gradients` inside it ask here
for the rules, and apply them to what they are about to differentiate.

JAX keeps the traces of jitted functions, of loops and of branches; what is in force is part of the
key under which it does, so that a trace made under some rules is not found under others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError
from tracegrad.ir.errors import NoMatchError
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.tracing.graphs import Rule, apply_rules, graph

_key = _jax.user_context()


class Force:
    """Rules, and which of them have matched something since they were first in force.

    Each trace of a function has one of its own, so that whether a rule matches is decided for the
    signature that is traced, and by nothing that was traced before or is on another thread: what
    JAX keeps of inner functions is kept under the `Force`.

    `everywhere`: they act on every traced function inside the block, not only on what is
    differentiated there. Those of equal `key` (default: itself) are one to JAX's caches.
    """

    def __init__(self, rules: Sequence[Rule], *, everywhere: bool = False, key: Any = None):
        self.rules = tuple(rules)
        self.everywhere = everywhere
        self.key = id(self) if key is None else key
        self._matched: set[int] = set()  # by place
        self._missed: dict[int, NoMatchError] = {}  # why, by the rule's place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Force) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def apply(self, program: Graph) -> Graph:
        """Applies them to what is about to be differentiated: a rule may match nothing there."""
        for place, rule in enumerate(self.rules):
            try:
                program = apply_rules(program, [rule])
            except NoMatchError as error:
                if not self.everywhere:  # else nobody asks
                    self._missed[place] = error.with_traceback(None)
                continue
            self._matched.add(place)
        return program

    def finish(self, program: Graph) -> Graph:
        """Applies them to the traced function itself. A rule that matches nothing there must have
        matched before."""
        missed, self._missed = self._missed, {}  # they hold graphs, and JAX's caches hold this
        for place, rule in enumerate(self.rules):
            try:
                program = apply_rules(program, [rule])
            except NoMatchError as error:
                # What was differentiated is what the rule was meant for.
                missed.setdefault(place, error)
            else:
                self._matched.add(place)
            if place not in self._matched:
                raise missed[place].with_text()
        for force in _in_force.forces:
            if force.everywhere:
                program = force.apply(program)
        _refuse_taps(program)
        return program


class _InForce(threading.local):
    forces: tuple[Force, ...] = ()  # the innermost first


_in_force = _InForce()


@contextmanager
def in_force(force: Force) -> Iterator[None]:
    """A block in which these rules are in force, before those that are already."""
    if not force.rules:
        yield
        return
    before = _in_force.forces
    _in_force.forces = (force, *before)
    try:
        with _key(_in_force.forces):
            yield
    except BaseException:
        force._missed.clear()  # nobody will ask
        raise
    finally:
        _in_force.forces = before


def rules_in_force() -> tuple[Force, ...]:
    """What is in force, the innermost first: a part of every key that depends on it."""
    return _in_force.forces


def apply_in_force(program: Graph) -> Graph:
    """A program with the rules in force applied; they may match nothing in it."""
    for force in _in_force.forces:
        program = force.apply(program)
    _refuse_taps(program)
    return program


def under_rules(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of arrays as it is to be differentiated: with the rules in force applied to it.

    `name`: what the program is called in messages.
    """
    if not _in_force.forces:
        return fun

    def edited(*args: Any) -> Any:
        others: list[Any] = []  # the structure of the result, and what in it is no array

        def arrays(*args: Any) -> list[Any]:
            leaves, structure = jax.tree.flatten(fun(*args))
            is_array = [_is_array(leaf) for leaf in leaves]
            others[:] = structure, [None if a else x for a, x in zip(is_array, leaves, strict=True)]
            return [leaf for a, leaf in zip(is_array, leaves, strict=True) if a]

        arrays.__name__ = arrays.__qualname__ = name
        program = apply_in_force(graph(arrays)(*args))
        results = iter(under_rules_already(program.to_callable())(*args))
        structure, leaves = others
        return jax.tree.unflatten(structure, [next(results) if x is None else x for x in leaves])

    return edited


def under_rules_already(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function to which the rules in force were applied, and so are not applied again."""
    return jax.named_call(fun, name=UNDER_RULES) if _in_force.forces else fun


def _is_array(leaf: Any) -> bool:
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _refuse_taps(program: Graph) -> None:
    if program.taps:
        raise GraphError(
            f"the tap {program.taps[0].name!r} without a callback has no way to hand its values "
            "out of a traced function: give it a callback, or use tracegrad.rewrite on the loss"
        )
