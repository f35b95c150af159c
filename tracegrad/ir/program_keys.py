"""Keys of programs: programs with equal keys compute the same function and can share compiled code.

Keys are equal only if the functions are equal. An object that cannot be compared (a Python function
among the parameters) counts by identity; the key holds the object, so that its id is not reused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad._jax.caches import Cache, of_program
from tracegrad.ir.nodes import CustomGradient

_RULES = (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP)

# A cache of programs made for code that runs operation by operation: for calls with overridden
# gradients, and for `explain`. A key contains everything on which the program depends; its first
# part is the kind of program. The cache reduces a jitted call with overrides from 70 ms to 1 ms.
PROGRAMS: Cache[Any, Any] = Cache(1024)


class Structure:
    """A nested key that stores its hash; keys are compared in depth only if hashes are equal."""

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
    """A key for a value that cannot be compared: keys are equal for the same object."""

    __slots__ = ("_value",)

    def __init__(self, value: Any):
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self._value is other._value


def params_key(params: Mapping[str, Any]) -> Any:
    """Returns a key of a primitive's parameters."""
    names = tuple(sorted(params))
    return names, _value_keys([params[name] for name in names])


@of_program
def program_key(program: Any) -> Structure:
    """Returns a key that is equal for programs of the same operations on the same constants.

    JAX arrays are compared by identity. NumPy arrays are compared by their contents, since a
    function may make a new array in each trace, and since NumPy arrays can be written to.

    For custom gradients, the key contains only the primal function; see `rule_key`.
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
        return _bits_key(atom.val), atom.aval

    parts: list[Any] = [
        tuple(map(_constant_key, constants)),
        define(open_form.constvars),
        define(open_form.invars),
    ]
    for equation in open_form.eqns:
        params = equation.params
        if equation.primitive in _RULES:
            params = {"call_jaxpr": params["call_jaxpr"]}
        ins = tuple(map(read, equation.invars))
        outs = define(equation.outvars)
        # `ctx` is one object for equal settings (mesh, compute type, random numbers).
        parts.append((equation.primitive, params_key(params), equation.ctx, ins, outs))
    parts.append(tuple(map(read, open_form.outvars)))
    return Structure(tuple(parts))


def operations_key(
    equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Structure:
    """Returns a key that is equal for the same operations at the same lines in the same scopes. If
    their parameters cannot be compared, the key equals no other key.

    `inputs` are the operands that enter the operations; the values of literals are part of the key.
    """
    count = itertools.count()
    numbers = {value: next(count) for value in inputs if not hasattr(value, "val")}

    def read(atom: Any) -> Any:
        return (_bits_key(atom.val), atom.aval) if hasattr(atom, "val") else numbers[atom]

    parts: list[Any] = [[value.aval for value in numbers]]
    for equation in equations:
        codes, offsets = _jax.frame_positions(equation.source_info)
        ins = list(map(read, equation.invars))
        numbers.update((value, next(count)) for value in equation.outvars)
        stack = equation.source_info.name_stack
        params = [(name, type(value), value) for name, value in equation.params.items()]
        parts += [equation.primitive, equation.ctx, stack, params, ins, codes, offsets]
    parts.append(list(map(read, outputs)))
    try:
        return Structure(_as_tuples(parts))
    except TypeError:
        return Structure(object())


def _as_tuples(parts: list[Any]) -> tuple[Any, ...]:
    return tuple([_as_tuples(x) if type(x) is list else x for x in parts])


def _constant_key(constant: Any) -> Any:
    if isinstance(constant, jax.Array) or not hasattr(constant, "dtype"):
        return _ById(constant)
    return _bits_key(constant)


def _bits_key(value: Any) -> tuple[Any, ...]:
    """Returns a key for an array's bits; by value, 0.0 equals -0.0, and NaN differs from NaN."""
    array = np.asarray(value)
    digest = array.tobytes() if array.nbytes <= 64 else sha256(array.tobytes()).digest()
    return array.dtype, array.shape, digest


def rule_key(node: CustomGradient, *, is_of_operation: bool) -> Any:
    """Returns a key that is equal for custom gradients with the same primal and the same rule.

    A rule is Python code, and a call may make a new rule each time; so the key contains the
    programs to which the rule traces (its faces). But rules that see which inputs are
    differentiated are equal only if they are the same object, unless `is_of_operation`: the rule is
    made from the derivative of one operation, and its faces identify it.
    """
    if node.params.get("symbolic_zeros") and not is_of_operation:
        return node.primitive, *params_key(node.params)
    programs = [node.primal.program, *(node.face(name).program for name in node.face_names)]
    returned = node.returned if node.kind == "vjp" else None  # not visible in the programs
    keys = tuple(map(program_key, programs))
    return Structure((node.primitive, node.closed_over, returned, *keys))


_PLAIN = frozenset({bool, int, float, str, type(None), np.dtype})


def _value_keys(values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns keys of parameters: of programs by their operations, of uncomparable values by
    identity."""
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
