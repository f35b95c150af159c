"""How JSON from a file is read: strictly, with bounded memory, and checked against a schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from tracegrad.saving.errors import ArtefactError

Schema = Any
"""What a JSON value has to be; see `check`."""

# Python objects cost more than their text: `{"":0},` are seven bytes, the dictionary has some 200.
# Whoever writes a file of such text could make its reader use thirty times its size.
_OBJECT, _ARRAY, _ITEM = 232, 64, 64
# What small files may use all the same: enough for the names of some ten thousand Variables.
_ALLOWANCE = 16 << 20  # bytes
_LONGEST_SHOWN = 60  # characters


def write(document: dict[str, Any]) -> bytes:
    """The JSON text of a document, readable, in UTF-8, equal for equal documents.

    Raises:
        ValueError, TypeError: it holds what JSON has no form for (NaN, a key that is no string).

    Example:
        >>> write({"a": [1, "ö"]})
        b'{\\n  "a": [\\n    1,\\n    "\\xc3\\xb6"\\n  ]\\n}'
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)
    return text.encode("utf-8")


def read(text: memoryview, member: str, *, most: int = _ALLOWANCE) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        text: the member's bytes, UTF-8.
        member: its name, for errors.
        most: bytes that the objects may take, if that is more than 16 MiB; what is bounded is an
            estimate from above, made before anything is read.

    Raises:
        ArtefactError: it is no JSON object, a key occurs twice, a number or a character is none
            that can be written back, it is nested too deeply, or it would take too much memory.

    Example:
        >>> read(memoryview(b'{"a": [1, 2]}'), "manifest.json")
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

    raw = text.tobytes()
    check_cost(raw, member, most)
    try:
        found = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=no_key_twice,
            parse_constant=refuse,
            parse_float=finite,
        )
        # Half of a surrogate pair can be read, but neither printed nor written.
        if b"\\u" in raw:
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


def check(value: Any, schema: Schema, member: str, where: str = "") -> None:
    """Raises unless a JSON value has the form that `schema` describes.

    Args:
        value: what was read.
        schema: a type (``str``, ``int``, ``float``, ``bool``, ``type(None)``: exactly that one,
            so True is no int); a function from a value to what is wrong with it, or None; ``[s]``,
            a list of `s`; ``{"key": s, ...}``, an object with exactly these keys, where those that
            end in ``?`` may be missing; ``{str: s}``, an object with any keys; ``(s, t)``, one of
            these.
        member: the name of the member, for errors.
        where: where in it `value` stands, for errors.

    Raises:
        ArtefactError: `value` has another form; the message says where, and what was expected.

    Example:
        >>> check({"shape": [2, 3]}, {"shape": [natural], "name?": str}, "manifest.json")
        >>> check({"shape": [2, -3]}, {"shape": [natural], "name?": str}, "manifest.json")
        Traceback (most recent call last):
        tracegrad.saving.errors.ArtefactError: manifest.json: shape[1] should be an integer from 0
        to 2**63 - 1 and is -3
    """
    wrong = _wrong(value, schema, where)
    if wrong is not None:
        raise ArtefactError(member, wrong)


def natural(value: Any) -> str | None:
    """A schema: what an offset, a length or a size may be."""
    if type(value) is int and 0 <= value < 2**63:
        return None
    return "an integer from 0 to 2**63 - 1"


def text(value: Any) -> str | None:
    """A schema: a string that UTF-8 can write, which half of a surrogate pair is not."""
    if type(value) is str and not any("\ud800" <= c <= "\udfff" for c in value):
        return None
    return "a string of Unicode"


def sha256(value: Any) -> str | None:
    """A schema: a SHA-256 in hexadecimal digits."""
    if type(value) is str and re.fullmatch("[0-9a-f]{64}", value):
        return None
    return "64 hexadecimal digits"


def one_of(*values: Any) -> Callable[[Any], str | None]:
    """A schema: one of these, which are of one type."""

    def check_one(value: Any) -> str | None:
        fits = any(type(value) is type(each) and value == each for each in values)
        return None if fits else " or ".join(map(show, values))

    return check_one


def show(value: Any) -> str:
    """A value in an error: shortly, and without what a terminal would take for commands."""
    if isinstance(value, dict | list):
        return f"{_WORDS[type(value)]} of {len(value)}"
    if isinstance(value, str):
        value = value if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]}…"
        return ascii(value) if not value.isprintable() else repr(value)
    if isinstance(value, int) and not -(2**64) < value < 2**64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value)


_WORDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
    list: "a list",
    dict: "an object",
}


def _wrong(value: Any, schema: Schema, where: str) -> str | None:
    """What is wrong with `value`, as a sentence; None if it fits."""
    place = where or "the document"
    if isinstance(schema, type):
        if type(value) is schema:
            return None
        return f"{place} should be {_WORDS[schema]} and is {show(value)}"
    if callable(schema):
        expected = schema(value)
        return expected and f"{place} should be {expected} and is {show(value)}"
    if isinstance(schema, tuple):
        wrong = [_wrong(value, each, where) for each in schema]
        # Of several forms the one that comes closest says most: it failed further inside.
        return None if None in wrong else max(filter(None, wrong), key=lambda text: text.find(" "))
    if isinstance(schema, list):
        if type(value) is not list:
            return f"{place} should be a list and is {show(value)}"
        inside = (_wrong(each, schema[0], f"{where}[{i}]") for i, each in enumerate(value))
        return next(filter(None, inside), None)
    return _wrong_object(value, schema, where)


def _wrong_object(value: Any, schema: dict[Any, Schema], where: str) -> str | None:
    place, prefix = where or "the document", f"{where}." if where else ""
    if type(value) is not dict:
        return f"{place} should be an object and is {show(value)}"
    if str in schema:
        any_key = schema[str]
        inside = (_wrong(each, any_key, f"{where}[{show(key)}]") for key, each in value.items())
        return next(filter(None, inside), None)
    known = {key.removesuffix("?"): each for key, each in schema.items()}
    for key in value:
        if key not in known:
            return f"{place} has a key {show(key)} that should not be there"
    for key in schema:
        if key not in value and not key.endswith("?"):
            return f"{place} lacks the key {show(key)}"
    inside = (_wrong(each, known[key], f"{prefix}{key}") for key, each in value.items())
    return next(filter(None, inside), None)
