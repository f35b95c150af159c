"""When two recorded operations compute the same function, so that one compiled program serves both.

Keys are equal only if the functions are: what cannot be compared (a Python function among the
parameters) counts by identity, and is held by the key, so that the identity stays its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np

from tracegrad import _jax
from tracegrad._jax.caches import Cache, of_program
from tracegrad.ir import CustomGradient, Source
from tracegrad.ir.importer import lone_node

RULES = (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP)

# The programs that were made for what runs operation by operation, for the next like it: of tapes,
# of calls with overridden gradients, and what `explain` runs. By all that they depend on; the first
# part of a key says what was made. They save all of a step but its last hundred microseconds:
# without them each would trace and compile its backward pass, and a jitted call with overrides
# would take 70 ms and not 1 ms.
PROGRAMS: Cache[Any, Any] = Cache(1024)


class Structure:
    """A deep key with its hash: compared in depth only with another of the same hash."""

    __slots__ = ("__weakref__", "_hash", "_parts")

    def __init__(self, parts: Any):
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or self._hash != other._hash:
            return False
        return bool(self._parts == other._parts)


class _ById:
    """A value that cannot be compared is told apart by its identity."""

    __slots__ = ("_value",)

    def __init__(self, value: Any):
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self._value is other._value


@dataclass(frozen=True, eq=False)
class Enclosing:
    """The rules in whose faces a program stands, each in the faces of the one before
    (each as `_rule_identity` tells it).

    `known`: keys of rules in those, to be asked for once each.
    """

    rules: tuple[Any, ...] = ()
    known: dict[Any, Any] = field(default_factory=dict)

    def faces_of(self, rule: Any) -> Enclosing:
        return Enclosing((*self.rules, rule), self.known)


# How a key is made: of a function as it runs, or as it is differentiated any number of times.
AS_RUN = None
EXACT = Enclosing()


def params_key(params: Mapping[str, Any], enclosing: Enclosing | None = EXACT) -> Any:
    """A key equal for parameters that mean the same function.

    `enclosing`: `AS_RUN` for the function as it runs, not as it is differentiated: then of custom
    rules in its programs just the primal counts.
    """
    if "bwd" in params:
        made = _made_rule_key(params, enclosing)
        if made is not None:
            return made
    names = tuple(sorted(params))
    return names, _value_keys([params[name] for name in names], enclosing)


def program_key(program: Any, enclosing: Enclosing | None = EXACT) -> Structure:
    """A key equal for programs of the same operations on the same constants (by identity)."""
    if enclosing is AS_RUN:
        return _key_as_run(program)
    if enclosing.rules and has_rules(_jax.program_facts(program)):
        return Structure(_parts(program, enclosing))
    return _exact_key(program)


@of_program
def _key_as_run(program: Any) -> Structure:
    return Structure(_parts(program, AS_RUN))


@of_program
def _exact_key(program: Any) -> Structure:
    return Structure(_parts(program, EXACT))


# ------------------------------------------------------------------------------------------ rules


def rule_keys(node: CustomGradient) -> tuple[Any, Any]:
    """Keys of a function with a derivative of its own: as one that is differentiated once, and as
    one that is differentiated any number of times.

    Its rule is Python code, which a call may have made just now. What it says is in its faces: the
    programs that it traces to.
    """
    rule = _rule_identity(node.primitive, node.params)
    enclosing = AS_RUN, EXACT if rule is None else Enclosing().faces_of(rule)
    if "bwd" in node.params:
        made = [_made_rule_key(node.params, each) for each in enclosing]
        if None not in made:
            return made[0], made[1]
    if node.params.get("symbolic_zeros"):
        # It may do another thing where only some inputs are differentiated.
        by_identity = node.primitive, params_key(node.params)
        return by_identity, by_identity
    once, exact = (_faces_key(node, each) for each in enclosing)
    return once, exact


def _faces_key(node: CustomGradient, enclosing: Enclosing | None) -> Structure:
    programs = [node.primal.program, *(node.face(name).program for name in node.face_names)]
    keys = [program_key(program, enclosing) for program in programs]
    returned = node.returned if node.kind == "vjp" else None  # which the programs do not tell
    return Structure((node.primitive, node.closed_over, returned, *keys))


# As many rules in the faces of one, and in theirs, are looked into; a further one is told apart by
# its identity.
_MOST_INNER = 16


def _inner_rule_key(equation: Any, enclosing: Enclosing) -> Any:
    """That of a rule in the faces of others; None if what it does cannot be told from its faces.

    Its faces have their faces in turn, and often have the rule itself: a function calls itself in
    its forward pass. Rules of the same functions on operands of the same types are the same rule.
    """
    primitive, params = equation.primitive, equation.params
    try:
        rule = _rule_identity(primitive, params)
        if rule is None or params.get("symbolic_zeros"):
            return None
        if rule in enclosing.rules:
            return RULES, len(enclosing.rules) - enclosing.rules.index(rule)
        place = rule, enclosing.rules
        if place not in enclosing.known:
            if len(enclosing.known) >= _MOST_INNER:
                return None
            enclosing.known[place] = None
            avals = [atom.aval for atom in equation.invars]
            node = lone_node(primitive, params, avals, Source(equation.source_info, equation.ctx))
            assert isinstance(node, CustomGradient)
            enclosing.known[place] = _faces_key(node, enclosing.faces_of(rule))
        return enclosing.known[place]
    except Exception:  # whoever differentiates it is told; or something in it cannot be compared
        return None


def _rule_identity(primitive: Any, params: Mapping[str, Any]) -> Any:
    """What is equal only for rules of the same functions on operands of the same types; None for
    rules of which that is not known."""
    names = ("fwd_jaxpr_thunk", "bwd") if primitive is _jax.CUSTOM_VJP else ("jvp_jaxpr_fun",)
    try:
        inside = [_jax.inside_of_rule(params[name]) for name in names]
    except TypeError:  # a tree with something that has no hash
        return None
    if not all(functions for functions, _ in inside):
        return None
    functions = tuple([_ById(function) for of, _ in inside for function in of])
    around = tuple([around for _, around in inside])
    return primitive, functions, around, program_key(params["call_jaxpr"]), params["num_consts"]


def has_rules(facts: _jax.ProgramFacts) -> bool:
    """Whether a function with a derivative of its own is anywhere in programs."""
    return not facts.primitives.isdisjoint(RULES)


class MadeOf(NamedTuple):
    """What a rule that this package has made does, told by what it was made of.

    Such a rule runs programs that are traced already, and nothing of the user's. So two of them
    made of equal parts have equal derivatives of every order, though each is a function of its own.

    Attributes:
      programs: what the rule runs.
      settings: how it puts them together; hashable.
      closed_over: the positions of arrays that its function closes over, each with what the
        function is and what it calls the array.
    """

    programs: tuple[Any, ...]
    settings: tuple[Any, ...]
    closed_over: tuple[tuple[int, tuple[str, str]], ...] = ()


def parts_of_rule(params: Mapping[str, Any]) -> MadeOf | None:
    """What a `jax.custom_vjp` in a program was made of; None if it was not told."""
    parts = getattr(_jax.users_function(params["bwd"]), "made_of", None)
    return parts if isinstance(parts, MadeOf) else None


def closed_over_by(primitive: Any, params: Mapping[str, Any]) -> list[tuple[int, tuple[str, str]]]:
    """Which operands of a call of a rule that this package has made are arrays that its function
    closes over, with what the user calls function and array; none of another operation."""
    parts = parts_of_rule(params) if primitive is _jax.CUSTOM_VJP else None
    if parts is None or not parts.closed_over:
        return []
    first = _jax.closed_over(params)
    return [(first + position, what) for position, what in parts.closed_over]


@of_program
def closes_over_arrays(program: Any) -> bool:
    """Whether there is such an operand in a program or in those that it calls."""
    return any(
        closed_over_by(equation.primitive, equation.params)
        or any(closes_over_arrays(inner) for _, inner in _jax.sub_programs(equation.params))
        for equation in _jax.opened(program).eqns
    )


def tell_made_of(backward: Callable[..., Any], parts: MadeOf) -> None:
    """Tells what a rule, known by its backward function, was made of."""
    backward.made_of = parts  # type: ignore[attr-defined]


def _made_of(params: Mapping[str, Any]) -> tuple[MadeOf, tuple[Any, ...]] | None:
    """What a rule in a program was made of, and what is around it; None if it was not told."""
    if "bwd" not in params:
        return None
    backward, around = _jax.rule_and_what_is_around(params["bwd"])
    parts = getattr(backward, "made_of", None) if isinstance(backward, FunctionType) else None
    return (parts, around) if isinstance(parts, MadeOf) else None


# Of the parameters of a rule in a program: what its backward function tells of.
_TOLD = frozenset({"bwd", "fwd_jaxpr_thunk", "out_trees"})


def _made_rule_key(params: Mapping[str, Any], enclosing: Enclosing | None) -> Structure | None:
    """A key equal for the parameters of rules made of the same: then their derivatives of every
    order are (as they run: the first is). None for rules of which it was not told."""
    known = _made_of(params)
    if known is None:
        return None
    parts, around = known
    programs = tuple([program_key(program, enclosing) for program in parts.programs])
    rest = [(name, _items_key(params[name], enclosing)) for name in sorted(params.keys() - _TOLD)]
    own = parts.settings, parts.closed_over
    return Structure((MadeOf, programs, own, _items_key(around, enclosing), tuple(rest)))


def _items_key(value: Any, enclosing: Enclosing | None) -> Any:
    if isinstance(value, tuple | list):
        return tuple([_items_key(item, enclosing) for item in value])
    (key,) = _value_keys([value], enclosing)
    return key


# --------------------------------------------------------------------------------- parameters


_PLAIN = frozenset({bool, int, float, str, type(None), np.dtype})


def _value_keys(values: Iterable[Any], enclosing: Enclosing | None) -> tuple[Any, ...]:
    keys: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            keys.append((kind, value))  # 1, 1.0 and True are equal, but not the same parameter
        elif isinstance(value, _jax.PROGRAM_TYPES):
            keys.append(program_key(value, enclosing))
        elif isinstance(value, tuple | list) and any(
            isinstance(item, _jax.PROGRAM_TYPES) for item in value
        ):
            keys.append((kind, _value_keys(value, enclosing)))
        else:
            try:
                hash(value)
            except TypeError:
                keys.append(_ById(value))
            else:
                keys.append((kind, value))
    return tuple(keys)


def _parts(program: Any, enclosing: Enclosing | None) -> Any:
    open_form, constants = _jax.parts_of(program)
    numbers: dict[Any, int] = {}

    def define(variables: Sequence[Any]) -> tuple[Any, ...]:
        for variable in variables:
            numbers[variable] = len(numbers)
        return tuple(variable.aval for variable in variables)

    def read(atom: Any) -> Any:
        if not hasattr(atom, "val"):
            return numbers[atom]
        value = np.asarray(atom.val)  # by its bits: 0.0 equals -0.0, and no NaN another
        return value.dtype, value.shape, value.tobytes(), atom.aval

    of_constants = define(open_form.constvars)
    parts: list[Any] = [tuple(map(_ById, constants)), of_constants, define(open_form.invars)]
    for equation in open_form.eqns:
        params, key = equation.params, None
        if equation.primitive in RULES:
            if enclosing is None:
                params = {"call_jaxpr": params["call_jaxpr"]}
            elif enclosing.rules and _made_of(params) is None:
                key = _inner_rule_key(equation, enclosing)
        key = params_key(params, enclosing) if key is None else key
        ins = tuple(map(read, equation.invars))
        # The settings under which it was made (mesh, compute type, random numbers) JAX has once.
        parts.append((equation.primitive, key, equation.ctx, ins, define(equation.outvars)))
    parts.append(tuple(map(read, open_form.outvars)))
    return tuple(parts)


# ---------------------------------------------------------------------------- JAX's own functions


def is_jaxs_own(function: Any) -> bool:
    """Whether a function is part of JAX, and closes over nothing but such: it is what it is, so
    that its identity tells what it does."""
    return _is_from_jax(function) and _is_jaxs_own_function(function)


@of_program
def _is_jaxs_own_function(function: Any) -> bool:
    return _is_jaxs_own(function, depth=6)


def _is_jaxs_own(value: Any, depth: int) -> bool:
    if value is None or isinstance(value, bool | int | float | str | jax.tree_util.PyTreeDef):
        return True
    if isinstance(value, tuple):
        return all(_is_jaxs_own(item, depth) for item in value)
    if depth == 0 or not callable(value) or not _is_from_jax(value):
        return False
    inner = getattr(value, "__wrapped__", None)
    if inner is not None and not _is_jaxs_own(inner, depth - 1):
        return False
    cells = getattr(value, "__closure__", None) or ()
    return all(_is_jaxs_own(cell.cell_contents, depth - 1) for cell in cells)


def _is_from_jax(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return bool(module.partition(".")[0] == "jax")


# What of JAX's settings a function of JAX may read while it is traced.
jax_settings = operator.attrgetter(
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)
