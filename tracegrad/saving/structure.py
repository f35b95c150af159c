"""Trees of arrays as JSON: what the arguments and the result of a saved function look like.

Written are the containers whose meaning is plain without any code: dictionaries, lists, tuples,
named tuples and None. A type of the user's own, registered with JAX, is rebuilt by its own Python
code, which is not there when the file is read. In memory such a tree is one, of `Leaf`s. A string
in it is what the function was saved for, and no leaf (`variables.statics.Static`).
"""

from __future__ import annotations

import keyword
import unicodedata
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.wording import with_article
from tracegrad.saving import dimensions, documents
from tracegrad.saving.errors import ArtefactError
from tracegrad.variables.statics import Static

Structure = Any
"""A tree as JSON. None: nothing. ``{"dtype": ..., "shape": ...}``: an array. ``{"static": text}``:
a string. Otherwise one of
``{"tuple": [tree, ...]}``, ``{"list": [tree, ...]}``, ``{"dict": [[key, tree], ...]}``,
``{"namedtuple": name, "fields": [[name, tree], ...]}``; keys are strings or integers, in the order
in which JAX flattens them."""

_DEEPEST = 100  # nested three times as deep in JSON, which Python reads by recursion
_SEQUENCES: Mapping[str, type] = {"tuple": tuple, "list": list}
_LONGEST_PLACE = 60  # characters


@dataclass(frozen=True)
class Leaf:
    """The type of an array; its sizes are numbers, and the texts of open ones.

    Example:
        >>> {"w": (Leaf("float32", ("b", 3)), Leaf("key<fry>", ()))}
        {'w': (f32[b,3], key<fry>[])}
    """

    dtype: str
    shape: tuple[Annotated[Any, dimensions.size], ...]

    def __repr__(self) -> str:
        try:
            short = _jax.type_text(jax.core.ShapedArray((), jnp.dtype(self.dtype)))
        except TypeError:  # NumPy has not all names, those of random keys for example
            short = self.dtype
        return f"{short.removesuffix('[]')}{dimensions.shown(self.shape)}"


def leaf_of(array: Any) -> Leaf:
    """The type of an array, or of what has the shape and the dtype of one."""
    shape = tuple(size if isinstance(size, int) else str(size) for size in array.shape)
    return Leaf(str(array.dtype), shape)


def is_namedtuple(kind: type) -> bool:
    """Whether a class was made by `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _parts(tree: Any) -> list[tuple[str, Any]]:
    """What is directly in a container, each with its place; nothing in None."""
    if isinstance(tree, dict):
        return [(f"[{key!r}]", item) for key, item in tree.items()]
    if is_namedtuple(type(tree)):
        return [(f".{name}", item) for name, item in zip(tree._fields, tree, strict=True)]
    return [(f"[{i}]", item) for i, item in enumerate(tree or ())]


# --------------------------------------------------------------------------------------- written


def describe(tree: Any, where: str, depth: int = 0) -> Structure:
    """A tree of `Leaf`s as JSON.

    Args:
      tree: containers around leaves.
      where: what the tree is, for errors: ``the argument x``.
      depth: how many containers are around it.

    Raises TypeError for a container that cannot be written, naming its place.

    >>> describe({"b": (Leaf("int32", ()), None), "a": []}, "x")
    {'dict': [['a', {'list': []}], ['b', {'tuple': [{'dtype': 'int32', 'shape': []}, None]}]]}
    """
    if tree is None:
        return None
    if depth > _DEEPEST:
        raise TypeError(_too_deep(where))
    if isinstance(tree, Leaf):
        for size in tree.shape:
            if isinstance(size, str) and (why := dimensions.why_no_size(size)) is not None:
                raise TypeError(f"{where} has the size {size}: {why}")
        return {"dtype": tree.dtype, "shape": list(tree.shape)}
    if isinstance(tree, Static):
        if documents.text(tree.leaf) is not None:
            raise TypeError(
                f"{where} is {tree!r} of type {type(tree.leaf).__name__}, which no file can hold "
                "(of what is no array, strings are saved): let the function close over it"
            )
        return {"static": tree.leaf}
    kind = type(tree)
    if kind is dict:
        for key in tree:
            if _key(key) is not None:
                raise TypeError(
                    f"{where} is a dictionary with the key {documents.show(key)} of type "
                    f"{type(key).__name__}: keys are saved if they are {_key(key)}"
                )
        tree = dict(sorted(tree.items()))
    elif is_namedtuple(kind):
        if (why := why_no_name(kind.__name__) or _why_no_fields(kind._fields)) is not None:
            raise TypeError(f"{where} is a named tuple that cannot be saved: {why}")
    elif kind in (OrderedDict, defaultdict):
        raise TypeError(
            f"{where} is {with_article(kind.__name__)}, which is not saved: convert it with "
            "`dict(...)`"
        )
    elif kind not in _SEQUENCES.values():
        raise TypeError(
            f"{where} is of type {kind.__name__}, which is rebuilt by its Python code, and no code "
            "is saved: make a dictionary, list or tuple of it, or pass its arrays, as "
            "`jax.tree.leaves` has them, to a function that closes over the rest of it; or let the "
            "function close over all of it, which makes constants of the arrays, and of those in "
            "`tracegrad.as_variables` arrays of the file"
        )
    items = [describe(item, f"{where}{place}", depth + 1) for place, item in _parts(tree)]
    if kind is dict:
        return {"dict": [[key, item] for key, item in zip(tree, items, strict=True)]}
    if is_namedtuple(kind):
        fields = [[name, item] for name, item in zip(kind._fields, items, strict=True)]
        return {"namedtuple": kind.__name__, "fields": fields}
    return {kind.__name__: items}


# ------------------------------------------------------------------------------------------ read


def read(structure: Any, member: str, where: str, depth: int = 0) -> Any:
    """The tree of `Leaf`s that JSON from a file describes.

    Named tuples are of classes made here, of the name and the fields of the original.

    Raises ArtefactError, naming the place, if it is no `Structure`.
    """
    if structure is None:
        return None
    if depth > _DEEPEST:
        raise ArtefactError(member, _too_deep(where))
    if type(structure) is not dict:
        raise ArtefactError(member, f"{where} should describe a tree")

    def below(items: Iterable[tuple[str, Any]]) -> list[Any]:
        return [read(item, member, f"{where}{place}", depth + 1) for place, item in items]

    if set(structure) == {"static"}:
        return Static(documents.parse(_Text, structure["static"], member, f"{where}.static"))
    if "dtype" in structure:
        return documents.parse(Leaf, structure, member, where)
    if len(structure) == 1 and ("tuple" in structure or "list" in structure):
        ((kind, given),) = structure.items()
        items = documents.parse(tuple[Any, ...], given, member, f"{where}.{kind}")
        return _SEQUENCES[kind](below((f"[{i}]", item) for i, item in enumerate(items)))
    if set(structure) == {"dict"}:
        pairs = documents.parse(_Keyed, structure["dict"], member, f"{where}.dict")
        keys = [key for key, _ in pairs]
        if len({type(key) for key in keys}) > 1 or keys != sorted(set(keys)):
            raise ArtefactError(member, f"{where} has keys out of order, or one twice")
        return dict(zip(keys, below((f"[{key!r}]", item) for key, item in pairs), strict=True))
    if set(structure) == {"namedtuple", "fields"}:
        name = documents.parse(str, structure["namedtuple"], member, f"{where}.namedtuple")
        fields = documents.parse(_Named, structure["fields"], member, f"{where}.fields")
        names = tuple(field for field, _ in fields)
        if (why := why_no_name(name) or _why_no_fields(names)) is not None:
            raise ArtefactError(member, f"{where} is no named tuple: {why}")
        return _namedtuple(name, names)(*below((f".{field}", item) for field, item in fields))
    raise ArtefactError(member, f"{where} has the keys of no tree: {sorted(structure)[:5]}")


def _key(value: Any) -> str | None:
    if documents.text(value) is None or (type(value) is int and -(2**63) <= value < 2**63):
        return None
    return "strings or integers of 64 bits"


_Keyed = tuple[tuple[Annotated[Any, _key], Any], ...]
_Named = tuple[tuple[str, Any], ...]
_Text = Annotated[Any, documents.text]


# No cache, but the classes in use: trees of equal results match only where their classes are one.
_classes: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def _namedtuple(name: str, fields: tuple[str, ...]) -> type:
    known = _classes.get((name, fields))
    return known or _classes.setdefault((name, fields), namedtuple(name, fields, rename=True))


def _too_deep(where: str) -> str:
    return f"{where[:_LONGEST_PLACE]}… is nested more than {_DEEPEST} deep"


# -------------------------------------------------------------------------------------- compared


def flatten_as(wanted: Any, tree: Any, where: str) -> list[tuple[str, Leaf, Any]]:
    """The leaves of a tree that has the structure of a tree of `Leaf`s: where each is, what stands
    there in that one, and the leaf itself, which is not looked at.

    A named tuple fits one of the same fields, a dictionary any mapping with the same keys.

    Raises TypeError naming the place where it differs.
    """
    kind: Any = type(wanted)
    if kind is Leaf:
        if tree is None or isinstance(tree, (dict, list, tuple)):
            raise TypeError(f"{where} should be an array and is {_named(tree)}")
        return [(where, wanted, tree)]
    if kind is Static:
        if type(tree) is str and tree == wanted.leaf:
            return []
        raise TypeError(f"{where} should be {wanted!r}, for which it was saved, and is {tree!r}")
    if wanted is None:
        fits = tree is None
    elif kind is dict:
        fits = isinstance(tree, Mapping) and set(tree) == set(wanted)
    elif is_namedtuple(kind):
        fits = is_namedtuple(type(tree)) and tree._fields == wanted._fields
    else:
        fits = type(tree) is kind and len(tree) == len(wanted)
    if not fits:
        raise TypeError(f"{where} should be {_named(wanted)} and is {_named(tree)}")
    if kind is dict:
        tree = {key: tree[key] for key in wanted}
    pairs = zip(_parts(wanted), _parts(tree), strict=True)
    return [
        leaf
        for (place, item), (_, part) in pairs
        for leaf in flatten_as(item, part, f"{where}{place}")
    ]


def _named(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"a dictionary with the keys [{', '.join(sorted(map(repr, value)))}]"
    if is_namedtuple(type(value)):
        return f"a named tuple with the fields {list(value._fields)}"
    if isinstance(value, (list, tuple)):
        return f"{with_article(type(value).__name__)} of {len(value)}"
    return f"of type {type(value).__name__}"


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
