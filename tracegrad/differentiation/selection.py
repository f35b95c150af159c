"""Which leaves of a call's arguments are differentiated, and what stands for the others.

``wrt`` says it by position, by argument name, or by a predicate on each leaf of the first argument
and its path. Only the selected leaves go through JAX's differentiation, so that the others need
not be arrays at all.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad.differentiation.gradient_types import is_differentiable, zeros_for
from tracegrad.ir.wording import counted, some
from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.signatures import (
    argument_names,
    parameters_of,
    positional,
    require_takes,
)
from tracegrad.variables.leaves import Leaf, leaves_of
from tracegrad.variables.statics import are_traced, settings

Predicate = Callable[[str, Any], Any]
Wrt = int | str | Sequence[int | str] | Predicate


def select(tree: Any, predicate: Predicate) -> Any:
    """A mask of a tree: True where a leaf is selected, as the gradient functions' ``wrt`` does it.

    Gradients of zero do not freeze a weight under an optimiser that changes weights by themselves,
    as weight decay does. The mask is what optimisers take to leave them alone.

    Args:
      tree: a pytree.
      predicate: ``(path, leaf) -> bool``; ``path`` is what messages call the leaf,
        ``"layers.0.kernel"`` in every library's models.

    Returns:
      A tree of Python bools with the structure of `tree`.

    Raises:
      ValueError: the predicate selects no leaf.

    >>> import jax.numpy as jnp, optax, tracegrad as tg
    >>> params = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
    >>> def is_bias(path, leaf):
    ...     return path.endswith("bias")
    >>> select(params, is_bias)
    {'bias': True, 'kernel': False}

    Zeros alone do not freeze the kernel, since the decay shrinks it all the same; the mask does:

    >>> from tracegrad import grad, select
    >>> gradient = grad(lambda p: jnp.sum(p["kernel"] * p["bias"]), wrt=is_bias)(params)
    >>> print(gradient["kernel"], gradient["bias"])
    [0. 0.] [1. 1.]
    >>> def step(optimiser):
    ...     updates, _ = optimiser.update(gradient, optimiser.init(params), params)
    ...     return optax.apply_updates(params, updates)["kernel"]
    >>> decaying = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1.0))
    >>> print(step(decaying), step(optax.masked(decaying, select(params, is_bias))))
    [0.9 0.9] [1. 1.]
    """
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _selected(predicate, leaves_of(tree), leaves))


def _selected(predicate: Predicate, named: Sequence[Leaf], leaves: Sequence[Any]) -> list[bool]:
    """Which leaves a predicate selects."""
    require_takes(predicate, 2, "predicate (path, leaf) -> bool")
    names = [leaf.name for leaf in named]
    mask = [bool(predicate(name, leaf)) for name, leaf in zip(names, leaves, strict=True)]
    if not any(mask):
        raise ValueError(_nothing_selected(names))
    return mask


# --------------------------------------------------------------------------------- one argument


@dataclass(frozen=True)
class Argument:
    """One argument of a call, of which some leaves are selected."""

    key: int | str  # its position among the positional arguments, or its keyword
    tree: Any
    leaves: list[Any]
    structure: Any
    mask: list[bool]
    is_whole: bool  # whether `wrt` names it, rather than some of its leaves

    @functools.cached_property
    def named_leaves(self) -> list[Leaf]:
        """Each leaf as messages name it, and what it is to a model."""
        return leaves_of(self.tree)

    @functools.cached_property
    def settings(self) -> frozenset[int]:
        """The indices of the leaves that are numbers, and part of what a model computes."""
        return settings([type(leaf) for leaf in self.leaves], self.structure)

    @property
    def differentiable(self) -> list[bool]:
        """Of each selected leaf whether it has a gradient."""
        return [
            is_differentiable(leaf) and i not in self.settings
            for i, (leaf, m) in enumerate(zip(self.leaves, self.mask, strict=True))
            if m
        ]

    def filled(self, chosen: Iterable[Any]) -> Any:
        """The argument with others in place of its selected leaves."""
        rest = iter(chosen)
        leaves = [next(rest) if m else leaf for leaf, m in zip(self.leaves, self.mask, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    def answer(self, chosen: Iterable[Any], absent: Callable[[Any], Any]) -> Any:
        """A tree like the argument: what was computed, and ``absent(leaf)`` for the others."""
        rest = iter(chosen)
        leaves = [
            next(rest) if m else None if i in self.settings else absent(leaf)
            for i, (leaf, m) in enumerate(zip(self.leaves, self.mask, strict=True))
        ]
        return jax.tree.unflatten(self.structure, leaves)


@dataclass(frozen=True)
class Selection:
    """The leaves of one call with respect to which a function is differentiated.

    `arguments` are those that `wrt` names, in its order; `single` is whether the answer is that of
    the one argument itself rather than a tuple.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: tuple[Argument, ...]
    single: bool

    @property
    def leaves(self) -> list[Any]:
        """The selected leaves, flat, in the order of `arguments`."""
        return [
            leaf
            for argument in self.arguments
            for leaf, m in zip(argument.leaves, argument.mask, strict=True)
            if m
        ]

    @property
    def of_inputs(self) -> tuple[bool, ...]:
        """Of each array in the arguments, as a program takes them, whether it is selected."""
        masks = {argument.key: argument.mask for argument in self.arguments}
        given: list[tuple[int | str, Any]] = [*enumerate(self.args), *sorted(self.kwargs.items())]
        found: list[bool] = []
        for key, tree in given:
            leaves, structure = jax.tree.flatten(tree)
            mask = masks.get(key, [False] * len(leaves))
            found += itertools.compress(mask, are_traced(leaves, structure))
        return tuple(found)

    @property
    def differentiable(self) -> list[bool]:
        """Of each selected leaf whether it has a gradient."""
        return [fits for argument in self.arguments for fits in argument.differentiable]

    @property
    def settings(self) -> list[bool]:
        """Of each selected leaf whether it is a number that is part of what a model computes."""
        return [
            i in argument.settings
            for argument in self.arguments
            for i, m in enumerate(argument.mask)
            if m
        ]

    @functools.cached_property
    def named_leaves(self) -> list[Leaf]:
        """Each selected leaf by the argument's name and its path in that: ``params.0.kernel``."""
        return [
            leaf
            for argument in self.arguments
            for leaf, m in zip(self._named(argument), argument.mask, strict=True)
            if m
        ]

    @functools.cached_property
    def others(self) -> list[Argument]:
        """The arguments that `wrt` does not name, of which nothing is selected."""
        named = {argument.key for argument in self.arguments}
        keys = (*range(len(self.args)), *sorted(self.kwargs))
        found = [_argument(key, self.args, self.kwargs, None) for key in keys if key not in named]
        return [dataclasses.replace(each, mask=[False] * len(each.mask)) for each in found]

    @functools.cached_property
    def names_of_all(self) -> list[str]:
        """The names of all leaves of all arguments, in the order in which JAX flattens these."""
        by_key = {argument.key: argument for argument in (*self.arguments, *self.others)}
        keys = (*range(len(self.args)), *sorted(self.kwargs))
        return [leaf.name for key in keys for leaf in self._named(by_key[key])]

    @functools.cached_property
    def _argument_names(self) -> list[str]:
        return argument_names(self.fun, len(self.args))

    def _named(self, argument: Argument) -> list[Leaf]:
        key = argument.key
        name = key if isinstance(key, str) else self._argument_names[key]
        return [leaf.within(name) for leaf in argument.named_leaves]

    @property
    def names(self) -> list[str]:
        """The names of the selected leaves: ``params.0.kernel``."""
        return [leaf.name for leaf in self.named_leaves]

    def call(self, leaves: Sequence[Any]) -> Any:
        """The function with these in place of its selected leaves."""
        args, kwargs, _ = self.filled(leaves)
        return self.fun(*args, **kwargs)

    def filled(
        self, leaves: Sequence[Any], copied: Sequence[Argument] = ()
    ) -> tuple[list[Any], dict[str, Any], list[Any]]:
        """The arguments of the call with these in place of its selected leaves, and those of them
        that `wrt` names by themselves, before copies of some of the `others`."""
        args, kwargs = list(self.args), dict(self.kwargs)
        values = []
        rest = iter(leaves)
        for argument in (*self.arguments, *copied):
            value = argument.filled([next(rest) for m in argument.mask if m])
            values.append(value)
            if isinstance(argument.key, int):
                args[argument.key] = value
            else:
                kwargs[argument.key] = value
        return args, kwargs, values

    def answer(self, results: Sequence[Any], absent: Callable[[Any], Any] | None = None) -> Any:
        """One result per selected leaf, in the structure that the caller gave to `wrt`."""
        rest = iter(results)
        trees = tuple(
            argument.answer([next(rest) for m in argument.mask if m], absent or zeros_for)
            for argument in self.arguments
        )
        return trees[0] if self.single else trees

    def flatten(self, answer: Any) -> list[Any]:
        """The entries for the selected leaves of a tree like an answer.

        Raises ValueError if the structure is another one. None may stand for what is not selected.
        """
        trees = (answer,) if self.single else tuple(answer)
        if len(trees) != len(self.arguments):
            raise ValueError(
                f"expected {len(self.arguments)} trees, one per argument in wrt; got {len(trees)}"
            )
        entries: list[Any] = []
        for argument, tree in zip(self.arguments, trees, strict=True):
            try:
                flat = argument.structure.flatten_up_to(tree)
            except ValueError as error:
                raise ValueError(
                    f"expected a tree like argument {argument.key!r}, of type "
                    f"{type(argument.tree).__name__}, as grad returns it for wrt; "
                    f"got one of another structure, of type {type(tree).__name__}"
                ) from error
            entries += [entry for entry, m in zip(flat, argument.mask, strict=True) if m]
        return entries

    def refined(self, keep: Sequence[bool]) -> Selection:
        """The same with only some of the selected leaves."""
        rest = iter(keep)
        arguments = tuple(
            dataclasses.replace(argument, mask=[m and next(rest) for m in argument.mask])
            for argument in self.arguments
        )
        return dataclasses.replace(self, arguments=arguments)


# ------------------------------------------------------------------------------- reading `wrt`


def check_wrt(wrt: Any) -> None:
    """Raises TypeError for what is no way to select, ValueError for an empty one."""
    if callable(wrt) or _is_key(wrt):
        return
    if not isinstance(wrt, Sequence) or not all(map(_is_key, wrt)):
        raise TypeError(
            "wrt is a position, an argument name, several of these, or a predicate "
            f"(path, leaf) -> bool over the leaves of the first argument; got {wrt!r}"
        )
    if not wrt:
        raise ValueError("wrt=() selects nothing to differentiate with respect to")


def _is_key(wrt: Any) -> bool:
    return isinstance(wrt, str) or (hasattr(wrt, "__index__") and not isinstance(wrt, bool))


def resolve(
    fun: Callable[..., Any], wrt: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Selection:
    """The leaves that `wrt` selects in a call of `fun`.

    Raises ValueError for an argument that the call does not have, listing the function's
    parameters; for one that is selected twice; and for a predicate that selects nothing.
    """
    if callable(wrt):
        key = _first_argument(fun, args, kwargs)
        return Selection(fun, args, kwargs, (_argument(key, args, kwargs, wrt),), True)
    wanted = (wrt,) if _is_key(wrt) else tuple(wrt)
    keys = [_locate(fun, which, args, kwargs) for which in wanted]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ValueError(f"wrt={wrt!r} selects the same argument twice: {wanted[i]!r}")
    arguments = tuple(_argument(key, args, kwargs, None) for key in keys)
    return Selection(fun, args, kwargs, arguments, _is_key(wrt))


def _argument(
    key: int | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    predicate: Predicate | None,
) -> Argument:
    tree = args[key] if isinstance(key, int) else kwargs[key]
    leaves, structure = jax.tree.flatten(tree)
    argument = Argument(key, tree, leaves, structure, [True] * len(leaves), predicate is None)
    if predicate is None:
        return argument
    mask = _selected(predicate, argument.named_leaves, leaves)
    return dataclasses.replace(argument, mask=mask)


def _first_argument(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | str:
    if args:
        return 0
    first = next((p.name for p in parameters_of(fun) if p.name in kwargs), None)
    if first is None and len(kwargs) == 1:
        (first,) = kwargs
    if first is None:
        raise ValueError(
            f"a predicate selects leaves of the first argument; {_described(fun)} was called "
            "without one"
        )
    return first


def _not_passed(parameter: inspect.Parameter, name: str) -> str:
    has_default = parameter.default is not parameter.empty
    what = "its default is not differentiated, so pass it" if has_default else "pass it"
    return f"was called without {name}; {what}"


def _locate(
    fun: Callable[..., Any], which: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | str:
    """Where in the call the argument is that a position or name means."""
    if not isinstance(which, str):
        position = operator.index(which)
        if -len(args) <= position < len(args):
            return position % len(args)
        ordered = positional(parameters_of(fun))
        if 0 <= position < len(ordered) and ordered[position].name in kwargs:
            return ordered[position].name
        why = f"was called with {counted(len(args), 'positional argument')}"
        if len(args) <= position < len(ordered):
            why = _not_passed(ordered[position], ordered[position].name)
        raise ValueError(f"wrt={position}: {_described(fun)} {why}")
    if which in kwargs:
        return which
    names = [p.name for p in positional(parameters_of(fun))]
    if which in names and names.index(which) < len(args):
        return names.index(which)
    for parameter in parameters_of(fun):
        if parameter.name == which:
            why = _not_passed(parameter, "it")
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                why = "has any number of these; say which by position, argnums=, or by its name"
            raise ValueError(f"wrt={which!r}: {_described(fun)} {why}")
    near = difflib.get_close_matches(which, [*names, *kwargs], 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"wrt={which!r} is no parameter of {_described(fun)}{hint}")


def _described(fun: Callable[..., Any]) -> str:
    """A function with its parameters: ``loss(params, x, y)``."""
    marks: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    names = [marks.get(p.kind, "") + p.name for p in parameters_of(fun)]
    return f"{function_name(fun)}({', '.join(names) or '...'})"


def _nothing_selected(paths: Sequence[str]) -> str:
    shown = some([repr(path) for path in paths], 8)
    what = f"the leaves are {shown}" if paths else "the tree has no leaves"
    return f"the predicate selects nothing; {what}"
