"""Trees of arrays as JSON: what the arguments and the result of a saved function look like.

Written are the containers whose meaning is plain without any code: dictionaries, lists, tuples,
named tuples and None. A type of the user's own, registered with JAX, is rebuilt by its own Python
code, which is not there when the file is read.
"""

from __future__ import annotations

import functools
import keyword
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tracegrad.saving import documents
from tracegrad.saving.errors import ArtefactError

Structure = Any
"""A tree as JSON. None: nothing. ``{"dtype": ..., "shape": ...}``: an array. Otherwise one of
``{"tuple": [tree, ...]}``, ``{"list": [tree, ...]}``, ``{"dict": [[key, tree], ...]}``,
``{"namedtuple": name, "fields": [[name, tree], ...]}``; keys are strings or integers, in the order
in which JAX flattens them."""

_DEEPEST = 200


def describe(tree: Any, leaf: Callable[[Any], Structure], where: str) -> Structure:
    """A tree as JSON.

    Args:
      tree: containers around leaves.
      leaf: gives the JSON of a leaf; raises TypeError, without a place, for what is none.
      where: what the tree is, for errors: ``the argument x``.

    Raises TypeError for a container that cannot be written, naming its place.

    >>> describe({"b": (1, None), "a": []}, lambda x: {"dtype": "int", "shape": []}, "x")
    {'dict': [['a', {'list': []}], ['b', {'tuple': [{'dtype': 'int', 'shape': []}, None]}]]}
    """
    if tree is None:
        return None
    kind = type(tree)
    if kind is list or kind is tuple:
        items = [describe(item, leaf, f"{where}[{i}]") for i, item in enumerate(tree)]
        return {kind.__name__: items}
    if kind is dict:
        for key in tree:
            if type(key) is not str and type(key) is not int:
                raise TypeError(
                    f"{where} is a dictionary with the key {key!r} of type {type(key).__name__}: "
                    "keys are saved if they are strings or integers"
                )
        pairs = [[key, describe(tree[key], leaf, f"{where}[{key!r}]")] for key in sorted(tree)]
        return {"dict": pairs}
    if is_namedtuple(kind):
        fields = [
            [name, describe(item, leaf, f"{where}.{name}")]
            for name, item in zip(kind._fields, tree, strict=True)
        ]
        return {"namedtuple": kind.__name__, "fields": fields}
    if kind in (OrderedDict, defaultdict):
        raise TypeError(
            f"{where} is a {kind.__name__}, which is not saved: convert it with `dict(...)`"
        )
    try:
        return leaf(tree)
    except TypeError as error:
        raise TypeError(f"{where} {error}") from None


def is_namedtuple(kind: type) -> bool:
    """Whether a class was made by `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The tree that a structure describes, with these leaves, in the order of `leaf_types`.

    Named tuples are of classes made here, of the name and the fields of the original.
    """
    if structure is None:
        return None
    if "tuple" in structure:
        return tuple(rebuild(item, leaves) for item in structure["tuple"])
    if "list" in structure:
        return [rebuild(item, leaves) for item in structure["list"]]
    if "dict" in structure:
        return {key: rebuild(item, leaves) for key, item in structure["dict"]}
    if "namedtuple" in structure:
        names = tuple(name for name, _ in structure["fields"])
        kind = _namedtuple(structure["namedtuple"], names)
        return kind(*(rebuild(item, leaves) for _, item in structure["fields"]))
    return next(leaves)


@functools.lru_cache(maxsize=256)
def _namedtuple(name: str, fields: tuple[str, ...]) -> type:
    return namedtuple(name, fields)


def leaf_types(structure: Structure) -> list[dict[str, Any]]:
    """The leaves of a structure, in order."""
    if structure is None:
        return []
    if "dtype" in structure:
        return [structure]
    if "tuple" in structure or "list" in structure:
        items = structure.get("tuple", structure.get("list"))
    else:
        items = [item for _, item in structure.get("dict", structure.get("fields"))]
    return [leaf for item in items for leaf in leaf_types(item)]


def flatten_as(structure: Structure, tree: Any, where: str) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its place, if the tree has a given structure.

    A named tuple fits one of the same fields, a dictionary any mapping with the same keys. What
    the leaves are is not looked at.

    Raises TypeError naming the place where it differs.
    """
    if structure is None:
        if tree is not None:
            raise TypeError(f"{where} should be None and is {_named(tree)}")
        return []
    if "dtype" in structure:
        if tree is None or isinstance(tree, (dict, list, tuple)):
            raise TypeError(f"{where} should be an array and is {_named(tree)}")
        return [(where, tree)]
    pairs: list[tuple[str, Structure, Any]]
    if "dict" in structure:
        keys = [key for key, _ in structure["dict"]]
        if not isinstance(tree, Mapping) or set(tree) != set(keys):
            raise TypeError(
                f"{where} should be a dictionary with the keys {keys} and is {_named(tree)}"
            )
        pairs = [(f"{where}[{key!r}]", item, tree[key]) for key, item in structure["dict"]]
    elif "namedtuple" in structure:
        names = [name for name, _ in structure["fields"]]
        if not is_namedtuple(type(tree)) or list(tree._fields) != names:
            raise TypeError(
                f"{where} should be a named tuple with the fields {names} and is {_named(tree)}"
            )
        fields = structure["fields"]
        pairs = [(f"{where}.{name}", item, getattr(tree, name)) for name, item in fields]
    else:
        ((kind, items),) = structure.items()
        if type(tree).__name__ != kind or len(tree) != len(items):
            raise TypeError(f"{where} should be a {kind} of {len(items)} and is {_named(tree)}")
        pairs = [(f"{where}[{i}]", *both) for i, both in enumerate(zip(items, tree, strict=True))]
    return [leaf for place, item, part in pairs for leaf in flatten_as(item, part, place)]


def _named(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict):
        return f"a dictionary with the keys {sorted(map(str, value))}"
    if is_namedtuple(type(value)):
        return f"a named tuple with the fields {list(value._fields)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"


# ---------------------------------------------------------------------------------- from a file


def check(structure: Any, member: str, where: str, depth: int = 0) -> None:
    """Raises ArtefactError unless what was read from a file is a structure."""
    if structure is None:
        return
    if depth > _DEEPEST:
        raise ArtefactError(member, f"{where} is nested more than {_DEEPEST} deep")
    if type(structure) is not dict:
        raise ArtefactError(member, f"{where} should describe a tree")
    inside: list[tuple[str, Any]] = []
    if "dtype" in structure:
        leaf = {"dtype": str, "shape": [(documents.natural, str)]}
        documents.check(structure, leaf, member, where)
    elif len(structure) == 1 and ("tuple" in structure or "list" in structure):
        (key,) = structure
        documents.check(structure, {key: [anything]}, member, where)
        inside = [(f"{where}.{key}[{i}]", item) for i, item in enumerate(structure[key])]
    elif set(structure) == {"dict"}:
        documents.check(structure, {"dict": [_pair(_key)]}, member, where)
        keys = [key for key, _ in structure["dict"]]
        if len({type(key) for key in keys}) > 1 or keys != sorted(set(keys)):
            raise ArtefactError(member, f"{where} has keys out of order, or one twice")
        inside = [(f"{where}[{key!r}]", item) for key, item in structure["dict"]]
    elif set(structure) == {"namedtuple", "fields"}:
        form = {"namedtuple": _identifier, "fields": [_pair(_identifier)]}
        documents.check(structure, form, member, where)
        names = [name for name, _ in structure["fields"]]
        if len(set(names)) != len(names) or any(name.startswith("_") for name in names):
            raise ArtefactError(member, f"{where} has a field twice, or one that begins with _")
        inside = [(f"{where}.{name}", item) for name, item in structure["fields"]]
    else:
        raise ArtefactError(member, f"{where} has the keys of no tree: {sorted(structure)[:5]}")
    for place, item in inside:
        check(item, member, place, depth + 1)


def anything(value: Any) -> str | None:
    """A schema: any value, to be checked elsewhere."""
    return None


def _pair(first: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    def pair(value: Any) -> str | None:
        if type(value) is list and len(value) == 2 and first(value[0]) is None:
            return None
        return "a pair that begins with " + (first(None) or "a name")

    return pair


def _key(value: Any) -> str | None:
    return None if type(value) in (str, int) else "a string or an integer"


def _identifier(value: Any) -> str | None:
    if type(value) is str and value.isidentifier() and not keyword.iskeyword(value):
        return None
    return "a name"
