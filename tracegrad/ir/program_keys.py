"""When two programs compute the same function, so that what was compiled for one serves the other.

Keys are equal only if the functions are: what cannot be compared (a Python function among the
parameters) counts by identity, and is held by the key, so that the identity stays its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad._jax.caches import Cache, of_program
from tracegrad.ir.nodes import CustomGradient

_RULES = (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP)

# The programs that were made for what runs operation by operation, for the next like it: of calls
# with overridden gradients, and what `explain` runs. By all that they depend on; the first part of
# a key says what was made. Without them a jitted call with overrides would take 70 ms and not 1 ms.
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


def params_key(params: Mapping[str, Any]) -> Any:
    """A key equal for parameters of operations that compute the same function."""
    names = tuple(sorted(params))
    return names, _value_keys([params[name] for name in names])


@of_program
def program_key(program: Any) -> Structure:
    """A key equal for programs of the same operations on the same constants.

    Arrays of JAX are the same by identity, others by their numbers: a function that makes one with
    NumPy makes it anew in each trace, and NumPy's can be written to.

    Of functions with a derivative of their own it has the function alone; see `rule_key`.
    """
    open_form, constants = _jax.parts_of(program)
    numbers: dict[Any, int] = {}

    def define(variables: Sequence[Any]) -> tuple[Any, ...]:
        for variable in variables:
            numbers[variable] = len(numbers)
        return tuple(variable.aval for variable in variables)

    def read(atom: Any) -> Any:
        if not hasattr(atom, "val"):
            return numbers[atom]
        return _contents(atom.val), atom.aval

    of_constants = define(open_form.constvars)
    parts: list[Any] = [
        tuple(map(_constant_key, constants)),
        of_constants,
        define(open_form.invars),
    ]
    for equation in open_form.eqns:
        params = equation.params
        if equation.primitive in _RULES:
            params = {"call_jaxpr": params["call_jaxpr"]}
        ins = tuple(map(read, equation.invars))
        # The settings under which it was made (mesh, compute type, random numbers) JAX has once.
        outs = define(equation.outvars)
        parts.append((equation.primitive, params_key(params), equation.ctx, ins, outs))
    parts.append(tuple(map(read, open_form.outvars)))
    return Structure(tuple(parts))


def _constant_key(constant: Any) -> Any:
    if isinstance(constant, jax.Array) or not hasattr(constant, "dtype"):
        return _ById(constant)
    return _contents(constant)


def _contents(value: Any) -> tuple[Any, ...]:
    """An array by its bits: 0.0 equals -0.0, and no NaN another."""
    array = np.asarray(value)
    digest = array.tobytes() if array.nbytes <= 64 else sha256(array.tobytes()).digest()
    return array.dtype, array.shape, digest


def rule_key(node: CustomGradient, *, is_of_operation: bool = False) -> Any:
    """A key equal for functions with the same derivative of their own.

    Its rule is Python code, which a call may have made just now. What it says is in its faces: the
    programs that it traces to. `is_of_operation`: the rule is made of one operation's derivative,
    so that its faces tell it also where it asks what is differentiated.
    """
    if node.params.get("symbolic_zeros") and not is_of_operation:
        # It may do another thing where only some inputs are differentiated.
        names = tuple(sorted(node.params))
        return node.primitive, names, _value_keys([node.params[name] for name in names])
    programs = [node.primal.program, *(node.face(name).program for name in node.face_names)]
    returned = node.returned if node.kind == "vjp" else None  # which the programs do not tell
    keys = tuple(map(program_key, programs))
    return Structure((node.primitive, node.closed_over, returned, *keys))


_PLAIN = frozenset({bool, int, float, str, type(None), np.dtype})


def _value_keys(values: Iterable[Any]) -> tuple[Any, ...]:
    keys: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            keys.append((kind, value))  # 1, 1.0 and True are equal, but not the same parameter
        elif isinstance(value, _jax.PROGRAM_TYPES):
            keys.append(program_key(value))
        elif isinstance(value, tuple | list) and any(
            isinstance(item, _jax.PROGRAM_TYPES) for item in value
        ):
            keys.append((kind, _value_keys(value)))
        else:
            try:
                hash(value)
            except TypeError:
                keys.append(_ById(value))
            else:
                keys.append((kind, value))
    return tuple(keys)
