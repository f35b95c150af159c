"""Calls of annotated functions: chooses the traced arguments, and names the inputs."""

from __future__ import annotations

import functools
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType, MappingProxyType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad.ir.notes import add_note
from tracegrad.ir.wording import brief, code_of, name_of
from tracegrad.tracing.parted import Parted
from tracegrad.tracing.signatures import leaves_of_call, name_in_module

P = ParamSpec("P")
R = TypeVar("R")


class AnnotatedFunction(Generic[P, R]):
    """A decorated function: every call is ``apply(fun, args, kwargs)``.

    As an attribute of an instance, an annotated function wraps the bound method: ``self`` is not an
    argument, but a value that the function closes over. ``__wrapped__`` is the function without the
    annotation.
    """

    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fun: Callable[..., Any],
        apply: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], R],
    ) -> None:
        functools.update_wrapper(cast("Callable[..., Any]", self), fun)
        # After update_wrapper, which copies `_apply` too if `fun` is an annotated function.
        self._apply = apply

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._apply(self.__wrapped__, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> AnnotatedFunction[..., R]:
        bind = getattr(self.__wrapped__, "__get__", None)
        if bind is None or (instance is None and not isinstance(self.__wrapped__, staticmethod)):
            return self
        return AnnotatedFunction(bind(instance, owner), self._apply)

    def __reduce__(self) -> str | tuple[Any, ...]:  # as for a traced function
        return name_in_module(self) or (AnnotatedFunction, (self.__wrapped__, self._apply))

    def __repr__(self) -> str:
        return f"<annotated {self.__wrapped__!r}>"


def require_callable(fun: object, annotation: str) -> None:
    if not callable(fun):
        raise TypeError(f"{annotation} decorates a function; it was given {brief(fun)}.")


# --------------------------------------------------------------------------------- arguments


def is_input(leaf: object) -> bool:
    """Whether a leaf of the arguments is an input, traced as an array: arrays and floats are.
    Python's ints and bools, and NumPy's integer scalars, stay Python values: they are axes, sizes
    and flags, on which a function may branch."""
    if isinstance(leaf, np.generic):
        return bool(jnp.issubdtype(leaf.dtype, np.inexact))  # (NumPy does not know bfloat16)
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, jax.Array | float | complex)


def is_array_like(leaf: object) -> bool:
    """Whether JAX can make an array of a leaf."""
    return isinstance(leaf, int) or is_input(leaf) or isinstance(leaf, np.integer | np.bool_)


def inputs_in(arguments: Any) -> Parted:
    """Splits arguments into the inputs, which are the traced arrays, and the Python values."""
    return Parted.of(arguments, is_input)


# ------------------------------------------------------------------------------------- naming


def input_names(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """Returns the names of the inputs, as in the user's call: ``params.w``."""
    names = [leaf.name for leaf in leaves_of_call(fun, args, kwargs)]
    return inputs_in((args, dict(kwargs))).of_chosen(names)


def take_users_name(
    fun: Callable[..., Any], program: Callable[..., R], names: Sequence[str] = ()
) -> Callable[..., R]:
    """Sets the name and the source line of the user's function on `program`, which JAX traces.

    `program` keeps a signature of positional arrays only, because JAX binds arrays by it. `names`
    has the user's name of each array, which becomes the name of the program's input.
    """
    name, code = name_of(fun), code_of(fun)
    program.__name__ = program.__qualname__ = name
    program.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
            for name in _make_identifiers(names)
        ]
        or [inspect.Parameter("arrays", inspect.Parameter.VAR_POSITIONAL)]
    )
    if code is not None:
        # JAX reads the source line from `__wrapped__`. This is a new function of the same code,
        # because JAX would keep the user's function alive, with all values that it closes over.
        cells = tuple(CellType() for _ in code.co_freevars)
        program.__wrapped__ = FunctionType(code, {}, closure=cells)  # type: ignore[attr-defined]
    return program


def _make_identifiers(names: Sequence[str]) -> list[str]:
    """Returns distinct identifiers: ``params_w`` for ``params.w``."""
    words: dict[str, None] = {}
    for name in names:
        word = re.sub(r"\W+", "_", name).strip("_") or "value"
        word = f"{word}_" if keyword.iskeyword(word) or word[0].isdigit() else word
        while not word.isidentifier() or word in words:
            word = f"_{word}" if not word.isidentifier() else f"{word}_"
        words[word] = None
    return list(words)


# ------------------------------------------------------------------------------------- errors


@contextmanager
def add_note_on_error(note: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        add_note(error, note())
        raise
