"""Finds the leaves that ``wrt=`` selects: by argument, path, filter or predicate."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tracegrad.differentiation.partition import Argument, Partition
from tracegrad.ir.parameters import Parameters
from tracegrad.ir.wording import nearest, some
from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.leaves import Leaf, leaves_of
from tracegrad.tracing.nnx_objects import nnx
from tracegrad.tracing.signatures import (
    argument_names,
    parameters_of,
    positional,
    require_takes,
)
from tracegrad.variables.trees import is_variable

Predicate = Callable[[str, Any], Any]
Wrt = int | str | Sequence[int | str] | Parameters | Predicate | Any


def select(tree: Any, wrt: Any) -> Any:
    """Returns a mask of a tree: True for each leaf that ``wrt`` selects in the gradient functions.

    A gradient of zero does not freeze a weight if the optimiser changes weights without a gradient,
    as weight decay does. Pass the mask to the optimiser: then the other weights stay unchanged.

    Args:
      tree: a pytree.
      wrt: a glob for paths (``"layers.*.kernel"``), `tracegrad.match.param` of several globs, a
        filter of flax.nnx (``nnx.Param``), or a predicate ``(path, leaf) -> bool``. A path is the
        name of a leaf in messages: ``"layers.0.kernel"``, for models of any library.

    Returns:
      A tree of Python bools with the structure of `tree`.

    Raises:
      ValueError: no leaf is selected; the message lists paths.

    >>> import jax.numpy as jnp, optax, tracegrad as tg
    >>> params = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
    >>> select(params, "bias")
    {'bias': True, 'kernel': False}

    Zeros alone do not freeze the kernel, since the weight decay still shrinks it; the mask does:

    >>> from tracegrad import grad, select
    >>> biases = select(params, "bias")
    >>> gradient = grad(lambda p: jnp.sum(p["kernel"] * p["bias"]), wrt="bias")(params)
    >>> print(gradient["kernel"], gradient["bias"])
    [0. 0.] [1. 1.]
    >>> def step(optimiser):
    ...     updates, _ = optimiser.update(gradient, optimiser.init(params), params)
    ...     return optax.apply_updates(params, updates)["kernel"]
    >>> decaying = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1.0))
    >>> print(step(decaying), step(optax.masked(decaying, biases)))
    [0.9 0.9] [1. 1.]
    """
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _mask_of_leaves(wrt, leaves_of(tree), leaves))


def partition(
    fun: Callable[..., Any], wrt: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Partition:
    """Splits the arguments of a call of `fun` into the leaves that `wrt` selects and the rest.

    Raises ValueError if the call does not have the selected argument (the message lists the
    function's parameters), if an argument is selected twice, or if nothing is selected (the message
    lists similar paths).
    """
    arguments = [*map(_make_argument, range(len(args)), args)]
    arguments += [_make_argument(key, kwargs[key]) for key in sorted(kwargs)]
    is_single = not _is_sequence_of_keys(wrt)
    wanted: list[int] = []
    for each in [wrt] if is_single else wrt:
        place, selected = _select_leaves(fun, each, arguments)
        if place in wanted:
            cure = " (several globs for one argument are one tracegrad.match.param)"
            raise ValueError(
                f"wrt={wrt!r} selects the same argument twice: {each!r}"
                f"{cure if isinstance(each, str) else ''}"
            )
        wanted.append(place)
        is_by_predicate = callable(each) and not _is_filter(each)
        arguments[place] = replace(
            arguments[place], selected=selected, counted=selected, is_by_predicate=is_by_predicate
        )
    return Partition(fun, tuple(arguments), tuple(wanted), is_single)


def check_wrt(wrt: Any) -> None:
    if _is_key(wrt) or isinstance(wrt, Parameters) or _is_filter(wrt):
        return
    if callable(wrt):
        return require_takes(wrt, 2, "predicate (path, leaf) -> bool")
    if not _is_sequence_of_keys(wrt):
        if any(map(is_variable, jax.tree.leaves(wrt, is_leaf=is_variable))):
            raise TypeError(
                "wrt selects arguments, and a Variable that the function reads is not an argument: "
                "make it an argument of the function, or take its gradient with a "
                "tracegrad.GradientTape"
            )
        raise TypeError(
            "wrt is a position, an argument name, a glob for paths, a sequence of these, a filter "
            "of flax.nnx, or a predicate (path, leaf) -> bool over the first argument's leaves; "
            f"got {wrt!r}"
        )
    if not wrt:
        raise ValueError("wrt=() selects nothing to differentiate with respect to")


def _is_key(wrt: Any) -> bool:
    return isinstance(wrt, (str, int, np.integer)) and not isinstance(wrt, bool)


def _is_sequence_of_keys(wrt: Any) -> bool:
    return isinstance(wrt, Sequence) and not isinstance(wrt, str) and all(map(_is_key, wrt))


# ------------------------------------------------------------------------------ which argument


def _make_argument(key: int | str, tree: Any) -> Argument:
    leaves, structure = jax.tree.flatten(tree)
    none = [False] * len(leaves)
    return Argument(leaves, structure, none, key, tree, none)


def _select_leaves(
    fun: Callable[..., Any], wrt: Any, arguments: Sequence[Argument]
) -> tuple[int, Sequence[bool]]:
    """Returns the index of the argument, and a mask of its leaves."""
    if _is_key(wrt) and not isinstance(wrt, str):
        return _all_leaves(arguments, _argument_at(fun, operator.index(wrt), arguments))
    names = _parameter_names(fun, arguments)
    if isinstance(wrt, str):
        if wrt in names:
            return _all_leaves(arguments, names.index(wrt))
        if not _is_path(wrt, fun, names, arguments):
            raise ValueError(_not_called_with_message(fun, wrt, names))
        wrt = Parameters((wrt,))
    first = {pattern.partition(".")[0] for pattern in getattr(wrt, "patterns", ())}
    named = [place for place, name in enumerate(names) if name in first]
    if len(named) > 1:
        args = " and ".join(names[place] for place in named)
        raise ValueError(
            f"{wrt!r} names leaves of {args}, but selects leaves of one argument: give wrt a list "
            "with one glob for each argument"
        )
    place = named[0] if named else _first_argument(fun, names, arguments)
    argument = arguments[place]
    return place, _mask_of_leaves(wrt, argument.named, argument.leaves, names[place])


def _all_leaves(arguments: Sequence[Argument], place: int) -> tuple[int, Sequence[bool]]:
    return place, [True] * len(arguments[place].leaves)


def _parameter_names(fun: Callable[..., Any], arguments: Sequence[Argument]) -> list[str]:
    names = argument_names(fun, sum(isinstance(each.key, int) for each in arguments))
    return [names[k] if isinstance(k, int) else k for k in (each.key for each in arguments)]


def _first_argument(
    fun: Callable[..., Any], names: Sequence[str], arguments: Sequence[Argument]
) -> int:
    if arguments and arguments[0].key == 0:
        return 0
    called = [p.name for p in parameters_of(fun) if p.name in names]
    if not names or (not called and len(names) > 1):
        raise ValueError(
            f"wrt selects leaves of the first argument; {_describe_function(fun)} was called "
            "without one"
        )
    return names.index(called[0]) if called else 0


def _argument_at(fun: Callable[..., Any], position: int, arguments: Sequence[Argument]) -> int:
    count = sum(isinstance(each.key, int) for each in arguments)
    if -count <= position < count:
        return position % count
    ordered = [parameter.name for parameter in positional(parameters_of(fun))]
    keys = [each.key for each in arguments]
    if 0 <= position < len(ordered) and ordered[position] in keys:
        return keys.index(ordered[position])
    names = _parameter_names(fun, arguments)
    raise ValueError(_not_called_with_message(fun, position, names))


def _not_called_with_message(fun: Callable[..., Any], wrt: int | str, names: Sequence[str]) -> str:
    return (
        f"wrt={wrt!r}: {_describe_function(fun)} was called with {', '.join(names) or 'nothing'}. "
        "wrt selects what was passed, by position or name; a default is not differentiated"
    )


def _describe_function(fun: Callable[..., Any]) -> str:
    """Returns the function with its parameters, as ``loss(params, x, y)``."""
    marks: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    names = [marks.get(p.kind, "") + p.name for p in parameters_of(fun)]
    return f"{function_name(fun)}({', '.join(names) or '...'})"


def _is_path(
    wrt: str, fun: Callable[..., Any], names: Sequence[str], arguments: Sequence[Argument]
) -> bool:
    """Whether a text that is not the name of an argument is a glob for paths. A text that could be
    the name of a parameter must match a path of the first argument."""
    if not wrt.isidentifier():
        return True
    if not arguments or wrt in [parameter.name for parameter in parameters_of(fun)]:
        return False
    glob = Parameters((wrt,))
    first = arguments[_first_argument(fun, names, arguments)]
    return any(glob.fits(f".{leaf.name}") for leaf in first.named)


def _is_filter(wrt: Any) -> bool:
    """True for a class of variables of flax.nnx, or an object of its filters."""
    flax = nnx()
    if flax is None:
        return False
    if isinstance(wrt, type):
        return issubclass(wrt, flax.Variable)
    return bool(type(wrt).__module__ == flax.Not.__module__)


def _filter_selects(wrt: Any, leaf: Leaf, value: Any) -> bool:
    path = tuple(int(key) if key.isdigit() else key for key in leaf.name.split("."))
    holder = value if leaf.holder is None else leaf.holder
    return bool(nnx().filterlib.to_predicate(wrt)(path, holder))


def _mask_of_leaves(
    wrt: Any, named: Sequence[Leaf], leaves: Sequence[Any], argument: str = ""
) -> list[bool]:
    """Says for each leaf whether `wrt` selects it. Raises ValueError if no leaf is selected."""
    if isinstance(wrt, str):
        wrt = Parameters((wrt,))
    paths = [leaf.name for leaf in named]
    if isinstance(wrt, Parameters):
        paths = [leaf.within(argument).name for leaf in named]
        mask = [wrt.fits(path) for path in paths]
    elif _is_filter(wrt):
        paths = [leaf.within(argument).name for leaf in named]
        mask = [
            _filter_selects(wrt, leaf, value) for leaf, value in zip(named, leaves, strict=True)
        ]
    else:
        require_takes(wrt, 2, "glob, match.param, filter or predicate (path, leaf) -> bool")
        mask = [bool(wrt(path, leaf)) for path, leaf in zip(paths, leaves, strict=True)]
    if not any(mask):
        raise ValueError(_nothing_selected_message(wrt, paths))
    return mask


def _nothing_selected_message(wrt: Any, paths: Sequence[str]) -> str:
    what = "the predicate"
    if isinstance(wrt, Parameters):
        what = repr(wrt)
        if near := nearest(wrt.patterns, paths):
            return f"{what} selects nothing; the nearest paths: {', '.join(map(repr, near))}"
    elif _is_filter(wrt):
        what = f"the filter {wrt.__name__ if isinstance(wrt, type) else repr(wrt)}"
    shown = some([repr(path) for path in paths], 8)
    return f"{what} selects nothing; " + (
        f"the leaves are {shown}" if paths else "the tree has no leaves"
    )
