"""What a tape remembers: the arrays of what touched something watched, and how they came about.

Arrays are told apart by identity, and numbered by slots.

The structure of a record is a path in a tree that all records share: each operation is one step on
it, told by what it computes and the slots of its operands. Records of one structure go the same way
and end at the same step, so that the last step says all about a record but the values, and what was
made for one (its compiled backward) is found there for the next without looking at an operation
again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from tracegrad import _jax
from tracegrad.ir.occurrence import at, origin_in
from tracegrad.tape.block import Operation, on_the_way
from tracegrad.tape.computations import Computation, when_forgetting
from tracegrad.tape.rules_on_values import Rule
from tracegrad.variables.lending import give_back
from tracegrad.variables.variable import Variable


class LostGradient(NamedTuple):
    """A followed array that a function with a rule closes over, so that the rule gives it none.

    Attributes:
      array: its slot.
      results: the slots of the results that depend on it.
      text: what the user is told.
      inside: for a rule on values the first and the last step of what the function has done, and
        the slots of what it has computed; else the results are known to depend on the array.
    """

    array: int
    results: tuple[int, ...]
    text: Callable[[], str]
    inside: tuple[int, int, tuple[int, ...]] | None = None


def lost_gradient_text(what: tuple[str, str], info: Any) -> str:
    """What the user is told of a lost gradient.

    Args:
      what: the function, and the array on which it depends.
      info: JAX's source info of the call.
    """
    function, array = what
    line, is_users = origin_in(_jax.frames(info))
    return (
        f"{function}, which has a custom gradient, depends on {array}, which it closes over or is "
        "given by keyword, and which is watched or computed from what is watched. Its gradient "
        "function returns no gradient for it, so a part of the gradient is missing: what goes "
        f"through the call{at(line if is_users else None)}. Make it a positional argument and "
        "return its gradient as well or, if it is meant as a constant, use stop_gradient of it"
    )


class Record:
    """The operations of one tape, and the arrays to which data flows from a watched one.

    Arrays are held, so that an identity stays good.

    Attributes:
      keeps_operations: whether gradients are taken of it when it is over.
      orders: as many derivatives of one another it may see; more are slower.
    """

    keeps_operations = True

    __slots__ = (
        "__weakref__",
        "arrays",
        "lost",
        "orders",
        "reads",
        "rules",
        "shown",
        "slots",
        "source_infos",
        "stand_ins",
        "step",
        "steps",
        "tracked",
        "unfollowed",
    )

    def __init__(self, orders: int = 1) -> None:
        self.orders = orders
        self.arrays: list[Any] = []  # by slot
        self.slots: dict[int, int] = {}  # by identity
        self.tracked: Any = set()  # identities
        self.step = _root  # where every record begins
        self.steps: list[Step] = []
        self.source_infos: list[Any] = []  # of each step
        self.rules: dict[int, Rule] = {}  # on values, by the slot of the first result
        self.lost: list[LostGradient] = []
        # What was used where nothing was followed, weakly, by identity.
        self.unfollowed: dict[int, weakref.ref[Any]] = {}
        # Every Variable that is watched, and what it gave at each read, by identity.
        self.reads: dict[Variable, dict[int, Any]] = {}
        # What takes part in a recorded gradient in the stead of an array, by that one's identity.
        self.stand_ins: dict[int, list[Any]] = {}
        # What nobody else was handed of Variables, to be given back.
        self.shown: list[tuple[Variable, Any]] = []

    # --------------------------------------------------------------------------- what is followed

    def watch(self, array: Any) -> None:
        """Follows an array from now on."""
        self.slot(array)
        self.tracked.add(id(array))

    def slot(self, array: Any) -> int:
        """The slot of an array; it gets one if it has none."""
        known = self.slots.get(id(array))
        if known is not None:
            return known
        slot = self.slots[id(array)] = len(self.arrays)
        self.arrays.append(array)
        key = _jax.type_key(array)
        step = self.step.next.get(key)
        if step is None:
            types = (jax.typeof(array),)
            step = Step(None, (slot,), (), types, self.step.is_shared)
            step = self.step.after(key, step)
        self.step = step
        self.steps.append(step)
        self.source_infos.append(None)
        return slot

    def tracks(self, arrays: Iterable[Any]) -> bool:
        """Whether one of the arrays is followed."""
        tracked = self.tracked
        for array in arrays:
            if id(array) in tracked:
                return True
        if self.keeps_operations:
            for array in arrays:
                if isinstance(array, jax.Array):
                    self.unfollowed[id(array)] = weakref.ref(array)
        return False

    def was_used_unfollowed(self, array: Any) -> bool:
        """Whether an array was an operand when it was not followed."""
        identity = id(array)
        seen = self.unfollowed.get(identity)
        is_operand = identity in self.slots and identity not in self.tracked
        return is_operand or (seen is not None and seen() is array)

    def add(
        self, computation: Computation, args: Sequence[Any], results: Sequence[Any], info: Any
    ) -> None:
        """Adds an operation that has run."""
        slots, arrays = self.slots, self.arrays
        key: list[Any] = [computation]
        types: list[Any] = []
        for arg in args:
            identity = id(arg)
            slot = slots.get(identity)
            if slot is None:
                slot = slots[identity] = len(arrays)
                arrays.append(arg)
                types.append(_jax.type_key(arg))
            key.append(slot)
        first = len(arrays)
        # Of new operands the types follow: how many there are is told by the slots.
        known = tuple(key + types) if types else tuple(key)
        step = self.step.next.get(known)
        if step is None:
            step = Step(
                computation,
                tuple(key[1:]),
                tuple(range(first, first + len(results))),
                tuple(map(jax.typeof, (*arrays[first - len(types) :], *results))),
                self.step.is_shared and computation.is_shared,
            )
            step = self.step.after(known, step)
        tracked = self.tracked
        for result, live in zip(results, step.live):
            slots[id(result)] = len(arrays)
            arrays.append(result)
            if live:
                tracked.add(id(result))
        self.step = step
        self.steps.append(step)
        self.source_infos.append(info)

    def add_rule(
        self,
        rule: Rule,
        computation: Computation,
        args: Sequence[Any],
        results: Sequence[Any],
        info: Any,
        lost: Sequence[LostGradient] = (),
    ) -> None:
        """Adds what has run on values, and has a rule; `lost`: of the arrays that it closes over,
        which have none by the rule, but are followed through it, to be missed."""
        self.add(computation, args, results, info)
        self.rules[self.step.results[0]] = rule
        self.lost += [each._replace(results=self.step.results) for each in lost]

    def lose(self, array: Any, results: Sequence[Any], what: tuple[str, str], info: Any) -> None:
        """Hears that a rule in an operation gives none to an array that these results depend on."""
        if id(array) in self.tracked:
            slots = tuple([self.slots[id(result)] for result in results])
            text = functools.partial(lost_gradient_text, what, info)
            self.lost.append(LostGradient(self.slots[id(array)], slots, text))

    # ---------------------------------------------------------------------------------- Variables

    def watch_variable(self, variable: Variable) -> None:
        """Watches a Variable from its next read on."""
        self.reads.setdefault(variable, {})

    def watch_read(self, variable: Variable, value: Any) -> None:
        """Watches a value that a Variable has given."""
        if id(value) not in self.tracked:
            self.watch(value)
        self.reads.setdefault(variable, {})[id(value)] = value

    def reads_of(self, source: Any) -> list[Any]:
        """The arrays that a source stands for: itself, or the values read from a Variable."""
        return (
            list(self.reads.get(source, {}).values()) if isinstance(source, Variable) else [source]
        )

    def add_stand_in(self, stand_in: Any, of: Any) -> None:
        """Follows an array that stands in a gradient for another one that is followed."""
        self.watch(stand_in)
        self.stand_ins.setdefault(id(of), []).append(stand_in)

    def stands_for(self, sources: Sequence[Any]) -> list[Any]:
        """The sources with what has taken part in gradients in the stead of them."""
        return [each for s in sources for each in (s, *self.stand_ins.get(id(s), ()))]

    def refuse_to_stop(self, stopped: Collection[int], targets: Sequence[int]) -> None:
        """Raises NotImplementedError where a value that counts as constant has taken part in a
        gradient by a stand-in: what it was computed from has a part of its own there."""
        stand_ins = [
            self.slots[id(each)]
            for slot in (stopped if self.stand_ins else ())
            for each in self.stand_ins.get(id(self.arrays[slot]), ())
        ]
        if stand_ins and on_the_way(self.operations(), self.types(), stand_ins, targets):
            raise NotImplementedError(
                "stop_gradients has a value that comes after a function with a rule, and the ys "
                "are computed from a gradient of what that value is used for. There it is a part "
                "of the derivative of the rule's forward pass. Stop it where it is used "
                "(tracegrad.stop_gradient), or give it to the first gradients() as well"
            )

    def hand_out(self) -> None:
        """Whoever records what is done with the arrays from now on may keep them."""
        self.shown.clear()

    # ------------------------------------------------------------------------------------- the end

    def forget_arrays(self) -> None:
        """Lets go of all arrays; what was recorded, and which Variables were watched, can still be
        asked."""
        self.arrays.clear()
        self.slots.clear()
        self.tracked.clear()
        self.unfollowed.clear()
        self.lost.clear()
        self.rules.clear()
        self.stand_ins.clear()
        for reads in self.reads.values():
            reads.clear()
        if self.shown:
            give_back(self.shown)
            self.shown.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.forget_arrays()
        self.reads.clear()
        self.steps.clear()
        self.source_infos.clear()
        self.step = _root

    # ------------------------------------------------------------------------------ what it has

    def types(self) -> list[Any]:
        """The type of the array of each slot."""
        return [each for step in self.steps for each in step.types]

    def operations(self) -> list[Operation]:
        """The operations in the order in which they ran."""
        pairs = zip(self.steps, self.source_infos, strict=True)
        return [
            Operation(step.computation, step.args, step.results, info)
            for step, info in pairs
            if step.computation is not None
        ]


# ------------------------------------------------------------------------------------- structure


@dataclass(eq=False, slots=True)
class Step:
    """One operation of a structure, or (without a computation) an array that is followed from then
    on.

    Arrays are numbered by slots, in the order in which a record meets them: first the operands of
    a step that are new, then its results.
    """

    computation: Computation | None
    args: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[Any, ...]  # of the new operands and of the results
    is_shared: bool
    live: tuple[bool, ...] = ()  # for each result, whether it has a gradient: an integer ends it
    next: dict[Any, Step] = field(default_factory=dict)
    # What was compiled for records that end here, as long as others hold it.
    programs: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of_results = self.types[len(self.types) - len(self.results) :]
        self.live = tuple(map(_jax.has_gradient, of_results))

    def after(self, key: Any, step: Step) -> Step:
        """Makes a step that follows this one, unless another thread was faster."""
        if step.is_shared:
            step = self.next.setdefault(key, step)
            _count_step()
        return step


# A tree that would grow for ever (a loop whose structure is another at each turn) is left to the
# records that are on it, and a new one begun.
_LIMIT = 1 << 15
_root = Step(None, (), (), (), is_shared=True)
_steps = 0


def _count_step() -> None:
    global _steps
    _steps += 1
    if _steps > _LIMIT:
        begin_anew()


def begin_anew() -> None:
    """Forgets all structures but those of the records that are on their way."""
    global _root, _steps
    _root, _steps = Step(None, (), (), (), is_shared=True), 0


when_forgetting(begin_anew)  # structures hold computations
