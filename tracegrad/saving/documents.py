"""How JSON from a file is read: strictly, with bounded memory, and as values of declared types."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

from tracegrad.saving.errors import ArtefactError

T = TypeVar("T")

# Python objects cost more than their text: `{"":0},` are seven bytes, the dictionary has some 200.
# Whoever writes a file of such text could make its reader use thirty times its size.
_OBJECT, _ARRAY, _ITEM = 232, 64, 64
# What small files may use all the same: enough for the names of some ten thousand Variables.
_ALLOWANCE = 16 << 20  # bytes
_LONGEST_SHOWN = 60  # characters


def write(document: Any) -> str:
    """The JSON text of a document, equal for equal documents; of records their fields.

    Raises:
        ValueError, TypeError: it holds what JSON has no form for (NaN, a key that is no string).

    Example:
        >>> write({"a": [1, "ö"]})
        '{"a":[1,"ö"]}'
    """
    return json.dumps(
        document, default=vars, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )


def read(text: bytes, member: str, *, most: int = _ALLOWANCE) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        text: of the document, UTF-8.
        member: the part of the file that it is, for errors.
        most: bytes that the objects may take, if that is more than 16 MiB; what is bounded is an
            estimate from above, made before anything is read.

    Raises:
        ArtefactError: it is no JSON object, a key occurs twice, a number or a character is none
            that can be written back, it is nested too deeply, or it would take too much memory.

    Example:
        >>> read(b'{"a": [1, 2]}', "manifest")
        {'a': [1, 2]}
    """

    def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ArtefactError(member, f"the key {show(twice)} occurs twice")
        return found

    def refuse(word: str) -> NoReturn:
        raise ArtefactError(member, f"{show(word)} is no number that can be read")

    def finite(word: str) -> float:
        number = float(word)
        return number if math.isfinite(number) else refuse(word)

    check_cost(text, member, most)
    try:
        found = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=no_key_twice,
            parse_constant=refuse,
            parse_float=finite,
        )
        # Half of a surrogate pair can be read, but neither printed nor written.
        if b"\\u" in text:
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except ArtefactError:
        raise
    except RecursionError:
        raise ArtefactError(member, "it is nested too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, an integer of thousands of digits
        raise ArtefactError(member, f"it is no JSON that can be read: {error}") from None
    if not isinstance(found, dict):
        raise ArtefactError(member, f"it should be a JSON object and is {show(found)}")
    return found


def check_cost(text: bytes, member: str, most: int) -> None:
    """Raises ArtefactError if reading a JSON text could take more than `most` bytes and 16 MiB.

    Whoever writes asks too: what is written has to be readable.
    """
    cost = 4 * len(text) + _OBJECT * text.count(b"{") + _ARRAY * text.count(b"[")
    cost += _ITEM * text.count(b",")
    if cost > max(most, _ALLOWANCE):
        raise ArtefactError(
            member,
            f"reading it could take {cost} bytes; for a file of its size at most "
            f"{max(most, _ALLOWANCE)} are allowed",
        )


def parse(kind: type[T], value: Any, member: str, where: str = "") -> T:
    """A JSON value as a value of a declared type.

    Args:
        kind: ``str``, ``int``, ``float``, ``bool``: exactly that one, so True is no int;
            ``tuple[s, ...]`` and ``frozenset[s]``, a list; ``tuple[s, t]``, a list of two;
            ``dict[str, s]``, an object with any keys; a dataclass, an object with exactly its
            fields as keys; ``s | None``; ``Annotated[s, f]`` with a function from a value to what
            it should be, or None if that is what it is; `Any`.
        value: what was read.
        member: the part of the file that it is in, for errors.
        where: where in it `value` stands, for errors.

    Raises:
        ArtefactError: `value` has another form; the message says where, and what was expected.

    Example:
        >>> parse(tuple[Natural, ...], [2, 3], "manifest", "shape")
        (2, 3)
        >>> parse(tuple[Natural, ...], [2, -3], "manifest", "shape")
        Traceback (most recent call last):
        tracegrad.saving.errors.ArtefactError: manifest: shape[1] should be an integer from 0 to
        2**63 - 1 and is -3
    """
    try:
        found: T = _parse(kind, value, where)
    except _WrongForm as error:
        raise ArtefactError(member, str(error)) from None
    except RecursionError:
        raise ArtefactError(member, "it is nested too deeply") from None
    return found


class _WrongForm(Exception):
    """What is wrong with a value, as a sentence."""


def _parse(kind: Any, value: Any, where: str) -> Any:
    place, origin = where or "the document", typing.get_origin(kind)
    if kind is Any or isinstance(kind, TypeVar):
        return value
    if kind in _WORDS:
        if type(value) is not kind:
            raise _WrongForm(f"{place} should be {_WORDS[kind]} and is {show(value)}")
        return value
    if origin is Annotated:
        inner, check = typing.get_args(kind)
        if (expected := check(value)) is not None:
            raise _WrongForm(f"{place} should be {expected} and is {show(value)}")
        return _parse(inner, value, where)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (each for each in typing.get_args(kind) if each is not type(None))
        return None if value is None else _parse(inner, value, where)
    if origin in (tuple, frozenset):
        if type(value) is not list:
            raise _WrongForm(f"{place} should be a list and is {show(value)}")
        kinds = typing.get_args(kind)
        if origin is frozenset or kinds[-1] is ...:
            kinds = kinds[:1] * len(value)
        elif len(kinds) != len(value):
            raise _WrongForm(f"{place} should be a list of {len(kinds)} and is {show(value)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        return origin([_parse(each, item, f"{where}[{i}]") for i, (each, item) in pairs])
    if type(value) is not dict:
        raise _WrongForm(f"{place} should be an object and is {show(value)}")
    if origin is dict:
        _, inner = typing.get_args(kind)
        return {key: _parse(inner, each, f"{where}[{show(key)}]") for key, each in value.items()}
    fields, prefix = _fields(origin or kind), f"{where}." if where else ""
    for key in value:
        if key not in fields:
            raise _WrongForm(f"{place} has a key {show(key)} that should not be there")
    for key in fields:
        if key not in value:
            raise _WrongForm(f"{place} lacks the key {show(key)}")
    found = {key: _parse(each, value[key], f"{prefix}{key}") for key, each in fields.items()}
    return kind(**found)


def _fields(kind: Any) -> dict[str, Any]:
    """The types of the fields of a class of this package, which keeps them: to find them for each
    object is a third of the time that loading takes."""
    if "_types" not in vars(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        kind._types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    types: dict[str, Any] = kind._types
    return types


def natural(value: Any) -> str | None:
    """What an offset, a length or a size may be."""
    if type(value) is int and 0 <= value < 2**63:
        return None
    return "an integer from 0 to 2**63 - 1"


def text(value: Any) -> str | None:
    """A string that UTF-8 can write, which half of a surrogate pair is not."""
    if type(value) is str and not any("\ud800" <= c <= "\udfff" for c in value):
        return None
    return "a string of Unicode"


def one_of(*values: str) -> Callable[[Any], str | None]:
    """One of these strings."""

    def check_one(value: Any) -> str | None:
        return None if type(value) is str and value in values else " or ".join(map(show, values))

    return check_one


Natural = Annotated[int, natural]


def show(value: Any) -> str:
    """A value in an error: shortly, and without what a terminal would take for commands."""
    if isinstance(value, dict | list):
        return f"{_WORDS[type(value)]} of {len(value)}"
    if isinstance(value, str):
        return repr(value if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]}…")
    if isinstance(value, int) and not -(2**64) < value < 2**64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value)


_WORDS: dict[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
