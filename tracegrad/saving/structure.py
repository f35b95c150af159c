"""Trees of arrays as JSON: what the arguments and the result of a saved function look like.

Written are the containers whose meaning is plain without any code: dictionaries, lists, tuples,
named tuples and None. A type of the user's own, registered with JAX, is rebuilt by its own Python
code, which is not there when the file is read.
"""

from __future__ import annotations

import keyword
import unicodedata
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.wording import with_article
from tracegrad.saving import dimensions, documents
from tracegrad.saving.errors import ArtefactError

Structure = Any
"""A tree as JSON. None: nothing. ``{"dtype": ..., "shape": ...}``: an array. Otherwise one of
``{"tuple": [tree, ...]}``, ``{"list": [tree, ...]}``, ``{"dict": [[key, tree], ...]}``,
``{"namedtuple": name, "fields": [[name, tree], ...]}``; keys are strings or integers, in the order
in which JAX flattens them."""

_DEEPEST = 100  # nested three times as deep in JSON, which Python reads by recursion
_SEQUENCES: Mapping[str, type] = {"tuple": tuple, "list": list}
_LONGEST_PLACE = 60  # characters


def describe(tree: Any, leaf: Callable[[Any], Structure], where: str, depth: int = 0) -> Structure:
    """A tree as JSON.

    Args:
      tree: containers around leaves.
      leaf: gives the JSON of a leaf; raises TypeError, without a place, for what is none.
      where: what the tree is, for errors: ``the argument x``.
      depth: how many containers are around it.

    Raises TypeError for a container that cannot be written, naming its place.

    >>> describe({"b": (1, None), "a": []}, lambda x: {"dtype": "int", "shape": []}, "x")
    {'dict': [['a', {'list': []}], ['b', {'tuple': [{'dtype': 'int', 'shape': []}, None]}]]}
    """
    if tree is None:
        return None
    if depth > _DEEPEST:
        raise TypeError(_too_deep(where))
    kind = type(tree)

    def below(items: Iterable[tuple[str, Any]]) -> list[Structure]:
        return [describe(item, leaf, f"{where}{place}", depth + 1) for place, item in items]

    if kind is list or kind is tuple:
        return {kind.__name__: below((f"[{i}]", item) for i, item in enumerate(tree))}
    if kind is dict:
        for key in tree:
            if _key(key) is not None:
                raise TypeError(
                    f"{where} is a dictionary with the key {documents.show(key)} of type "
                    f"{type(key).__name__}: keys are saved if they are {_key(key)}"
                )
        pairs = sorted(tree.items())
        items = below((f"[{key!r}]", item) for key, item in pairs)
        return {"dict": [[key, item] for (key, _), item in zip(pairs, items, strict=True)]}
    if is_namedtuple(kind):
        if (why := why_no_name(kind.__name__) or _why_no_fields(kind._fields)) is not None:
            raise TypeError(f"{where} is a named tuple that cannot be saved: {why}")
        items = below((f".{name}", item) for name, item in zip(kind._fields, tree, strict=True))
        pairs = [[name, item] for name, item in zip(kind._fields, items, strict=True)]
        return {"namedtuple": kind.__name__, "fields": pairs}
    if kind in (OrderedDict, defaultdict):
        raise TypeError(
            f"{where} is {with_article(kind.__name__)}, which is not saved: convert it with "
            "`dict(...)`"
        )
    try:
        return leaf(tree)
    except TypeError as error:
        raise TypeError(f"{where} {error}") from None


def is_namedtuple(kind: type) -> bool:
    """Whether a class was made by `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _parts(structure: Structure) -> list[tuple[str, Structure]]:
    """What is directly in a container, each with its place; nothing in a leaf or in None."""
    if structure is None or "dtype" in structure:
        return []
    if "dict" in structure:
        return [(f"[{key!r}]", item) for key, item in structure["dict"]]
    if "fields" in structure:
        return [(f".{name}", item) for name, item in structure["fields"]]
    (items,) = structure.values()
    return [(f"[{i}]", item) for i, item in enumerate(items)]


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The tree that a structure describes, with these leaves, in the order of `leaf_types`.

    Named tuples are of classes made here, of the name and the fields of the original.
    """
    if structure is None:
        return None
    if "dtype" in structure:
        return next(leaves)
    items = [rebuild(item, leaves) for _, item in _parts(structure)]
    if "dict" in structure:
        return dict(zip((key for key, _ in structure["dict"]), items, strict=True))
    if "fields" in structure:
        names = tuple(name for name, _ in structure["fields"])
        return _namedtuple(structure["namedtuple"], names)(*items)
    return tuple(items) if "tuple" in structure else items


# No cache, but the classes in use: trees of equal results match only where their classes are one.
_classes: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def _namedtuple(name: str, fields: tuple[str, ...]) -> type:
    known = _classes.get((name, fields))
    return known or _classes.setdefault((name, fields), namedtuple(name, fields, rename=True))


def placed(structure: Structure, where: str) -> list[tuple[str, dict[str, Any]]]:
    """The leaves of a structure, each with its place, in order."""
    if structure is not None and "dtype" in structure:
        return [(where, structure)]
    return [leaf for place, item in _parts(structure) for leaf in placed(item, where + place)]


def leaf_types(structure: Structure) -> list[dict[str, Any]]:
    """The leaves of a structure, in order."""
    return [leaf for _, leaf in placed(structure, "")]


def text(structure: Structure) -> str:
    """A structure as it is printed, ``(f32[b,2], {'w': f32[2]})``."""
    if structure is None:
        return "None"
    if "dtype" in structure:
        return type_text(structure["dtype"], structure["shape"])
    items = [text(item) for _, item in _parts(structure)]
    if "dict" in structure:
        pairs = zip((key for key, _ in structure["dict"]), items, strict=True)
        return "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
    if "fields" in structure:
        names = (name for name, _ in structure["fields"])
        fields = (f"{name}={item}" for name, item in zip(names, items, strict=True))
        return f"{structure['namedtuple']}({', '.join(fields)})"
    if "list" in structure:
        return f"[{', '.join(items)}]"
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def type_text(dtype: str, shape: Sequence[int | str]) -> str:
    """``f32[b,3]``; names that NumPy does not know, such as those of random keys, stay.

    Example:
        >>> type_text("float32", ("b", 3)), type_text("key<fry>", ())
        ('f32[b,3]', 'key<fry>[]')
    """
    try:
        short = _jax.type_text(jax.core.ShapedArray((), jnp.dtype(dtype))).removesuffix("[]")
    except TypeError:
        short = dtype
    return f"{short}{dimensions.shown(shape)}"


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
    if "dict" in structure:
        keys = [key for key, _ in structure["dict"]]
        fits = isinstance(tree, Mapping) and set(tree) == set(keys)
        wanted = f"a dictionary with the keys {keys}"
    elif "fields" in structure:
        names = [name for name, _ in structure["fields"]]
        fits = is_namedtuple(type(tree)) and list(tree._fields) == names
        wanted = f"a named tuple with the fields {names}"
    else:
        ((kind, items),) = structure.items()
        same: object = type(tree)
        fits = same is _SEQUENCES[kind] and len(tree) == len(items)
        wanted = f"a {kind} of {len(items)}"
    if not fits:
        raise TypeError(f"{where} should be {wanted} and is {_named(tree)}")
    given = [tree[key] for key in keys] if "dict" in structure else tree
    pairs = zip(_parts(structure), given, strict=True)
    return [leaf for (at, item), part in pairs for leaf in flatten_as(item, part, where + at)]


def _named(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict):
        return f"a dictionary with the keys {sorted(map(str, value))}"
    if is_namedtuple(type(value)):
        return f"a named tuple with the fields {list(value._fields)}"
    if isinstance(value, (list, tuple)):
        return f"{with_article(type(value).__name__)} of {len(value)}"
    return f"of type {type(value).__name__}"


# ---------------------------------------------------------------------------------- from a file


def check(structure: Any, member: str, where: str, depth: int = 0) -> None:
    """Raises ArtefactError unless what was read from a file is a structure."""
    if structure is None:
        return
    if depth > _DEEPEST:
        raise ArtefactError(member, _too_deep(where))
    if type(structure) is not dict:
        raise ArtefactError(member, f"{where} should describe a tree")
    if "dtype" in structure:
        documents.parse(_Leaf, structure, member, where)
    elif len(structure) == 1 and ("tuple" in structure or "list" in structure):
        (key,) = structure
        documents.parse(tuple[Any, ...], structure[key], member, f"{where}.{key}")
    elif set(structure) == {"dict"}:
        pairs = documents.parse(_Keyed, structure["dict"], member, f"{where}.dict")
        keys = [key for key, _ in pairs]
        if len({type(key) for key in keys}) > 1 or keys != sorted(set(keys)):
            raise ArtefactError(member, f"{where} has keys out of order, or one twice")
    elif set(structure) == {"namedtuple", "fields"}:
        name = documents.parse(str, structure["namedtuple"], member, f"{where}.namedtuple")
        fields = documents.parse(_Named, structure["fields"], member, f"{where}.fields")
        why = why_no_name(name) or _why_no_fields([field for field, _ in fields])
        if why is not None:
            raise ArtefactError(member, f"{where} is no named tuple: {why}")
    else:
        raise ArtefactError(member, f"{where} has the keys of no tree: {sorted(structure)[:5]}")
    for place, item in _parts(structure):
        check(item, member, where + place, depth + 1)


def _key(value: Any) -> str | None:
    if documents.text(value) is None or (type(value) is int and -(2**63) <= value < 2**63):
        return None
    return "strings or integers of 64 bits"


_Keyed = tuple[tuple[Annotated[Any, _key], Any], ...]
_Named = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Leaf:
    dtype: str
    shape: tuple[Annotated[Any, dimensions.size], ...]


def _too_deep(where: str) -> str:
    return f"{where[:_LONGEST_PLACE]}… is nested more than {_DEEPEST} deep"


# ----------------------------------------------------------------------- names: of both directions


def why_no_name(name: str) -> str | None:
    """Why a parameter, a field or a class cannot be called `name`; None if it can.

    Python folds names that it reads to one form of Unicode (PEP 3131): what is not in this form
    could not be written in a program, and be equal to another name after all.
    """
    folded = unicodedata.normalize("NFKC", name)
    if not name.isidentifier() or keyword.iskeyword(folded):
        return f"{documents.show(name)} is no identifier of Python"
    if folded != name:
        return f"{documents.show(name)} is another name than Python reads there, {folded!r}"
    return None


def _why_no_fields(names: Sequence[str]) -> str | None:
    """Why a named tuple cannot have these fields; None if it can. Those that Python made itself,
    for ``namedtuple(..., rename=True)``, tell their position."""
    for i, name in enumerate(names):
        if name.startswith("_") and name != f"_{i}":
            return f"the field {documents.show(name)} begins with an underscore"
        if (why := why_no_name(name)) is not None:
            return f"the field {why}"
        if name in names[:i]:
            return f"there are two fields {documents.show(name)}"
    return None
