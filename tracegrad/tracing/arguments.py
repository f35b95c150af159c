"""The arguments of a call: which arguments are static, and how a program takes the others.

To pack an argument is to flatten it into its arrays and a structure, which also holds everything
that is not an array; see `packed`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tracegrad.tracing.modules import NnxObjectFinder
from tracegrad.tracing.nnx_objects import ignore_cached_partial, nnx
from tracegrad.tracing.packed import (
    Layout,
    Packed,
    PackedStatic,
)
from tracegrad.tracing.signatures import parameters_of, positional
from tracegrad.tracing.statics import has_equinox_modules, is_kind_of_array
from tracegrad.variables.trees import VariableNode, flatten_finding_variables

_KEPT = 256  # the most layouts of a function in the cache

ArgumentIndices = int | Iterable[int] | None
ArgumentNames = str | Iterable[str] | None


class StaticArguments(NamedTuple):
    """The static arguments, by position and by name: each of their values needs its own program.

    Attributes:
      parameters: the names of the function's positional parameters, static or not, for messages.
      rest: the name of the parameter for further arguments, ``*args``.
    """

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()
    rest: str = "args"

    def argument_names(self, count: int) -> list[str]:
        """Of the first `count` positional arguments: ``x``, ``args.0``."""
        further = range(count - len(self.parameters))
        return [*self.parameters[:count], *(f"{self.rest}.{i}" for i in further)]

    def argument_name(self, where: str | int) -> str:
        """Of a keyword argument, or of a positional argument by its index; for messages."""
        name = where if isinstance(where, str) else self.argument_names(where + 1)[where]
        return f"the argument {name}"

    def within(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The static positions of a call."""
        count = len(args)
        return tuple(sorted({p % count for p in self.positions if -count <= p < count}))

    def named(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The static keyword arguments of a call."""
        return {name: value for name, value in sorted(kwargs.items()) if name in self.names}

    def chosen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Those arguments of a call."""
        return [*(args[i] for i in self.within(args)), *self.named(kwargs).values()]


NONE_STATIC = StaticArguments()


@dataclass(eq=False)
class PackedCall:
    """A call whose arguments are packed.

    Attributes:
      args, kwargs: the arguments: trees as `Packed`, arrays and static arguments unchanged.
      static: which arguments are static.
      variables: the Variables in the arguments: the key of the call's program.
      objects: the nnx objects in the arguments, each once.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: StaticArguments = NONE_STATIC
    variables: tuple[VariableNode, ...] = ()
    objects: Sequence[Any] = ()

    @cached_property
    def dynamic(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) without the static arguments."""
        static = self.static
        if not static.positions and not static.names:
            return self.args, self.kwargs
        positions = static.within(self.args)
        named = {name: arg for name, arg in self.kwargs.items() if name not in static.names}
        return tuple(x for i, x in enumerate(self.args) if i not in positions), named

    @cached_property
    def by_name(self) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """(name, argument) for the arguments that are not static, in JAX's order of flattening, and
        for the static arguments."""
        positions, names = self.static.within(self.args), self.static.argument_names(len(self.args))
        dynamic: list[tuple[str, Any]] = []
        static: list[tuple[str, Any]] = []
        for i, pair in enumerate(zip(names, self.args, strict=True)):
            (static if i in positions else dynamic).append(pair)
        for pair in sorted(self.kwargs.items()):
            (static if pair[0] in self.static.names else dynamic).append(pair)
        return dynamic, static

    def with_dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedCall:
        """Replaces the arguments that are not static."""
        static, given = self.static, iter(args)
        fixed = static.within(self.args) if static.positions else ()
        args = tuple([x if i in fixed else next(given) for i, x in enumerate(self.args)])
        return PackedCall(args, {**kwargs, **static.named(self.kwargs)}, static)

    @property
    def is_of_arrays(self) -> bool:
        """Whether `jax.jit` accepts the arguments as they are, and flattens them without the help
        of Python."""
        if self.variables or self.objects:
            return False
        return not any(
            isinstance(arg, Packed) and (arg.has_non_arrays or has_equinox_modules(arg.structure))
            for arg in (*self.args, *self.kwargs.values())
        )

    def of_trees(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs); unpacks the arguments that hold only arrays."""

        def of_tree(arg: Any) -> Any:
            return arg.argument() if type(arg) is Packed and not arg.has_non_arrays else arg

        return tuple(map(of_tree, self.args)), {k: of_tree(arg) for k, arg in self.kwargs.items()}


class CallPacker:
    """Packs the calls of one function, and caches the layouts of its arguments.

    Attributes:
      looks_for_modules: whether to look for nnx objects, at the cost of a check per node.
    """

    def __init__(self, static: StaticArguments = NONE_STATIC, *, looks_for_modules: bool = True):
        self._static = static
        self._layouts: dict[Any, Layout] = {}
        self.looks_for_modules = looks_for_modules

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
        static, pack = self._static, self._pack
        found: list[VariableNode] = []
        finder = NnxObjectFinder() if self.looks_for_modules and nnx() is not None else None
        objects: Sequence[Any] = () if finder is None else finder.objects
        fixed = static.within(args) if static.positions else ()
        by_name: dict[str, Any] = {}
        # Warm calls run this.
        by_position = tuple(
            [
                _pack_static(arg, found) if i in fixed else pack(arg, i, found, finder)
                for i, arg in enumerate(args)
            ]
        )
        for name in sorted(kwargs) if len(kwargs) > 1 else kwargs:
            arg, is_static = kwargs[name], name in static.names
            by_name[name] = (
                _pack_static(arg, found) if is_static else pack(arg, name, found, finder)
            )
        if objects:
            ignore_cached_partial()
        return PackedCall(by_position, by_name, static, tuple(found), objects)

    def _pack(
        self,
        argument: Any,
        where: str | int,
        found: list[VariableNode],
        finder: NnxObjectFinder | None,
    ) -> Any:
        """Returns the argument packed, or the argument itself if it is an array.

        Args:
          where: the name or the index of the argument, for messages.
          found: the Variables in the argument are added to this list.
          finder: the finder of the call; None if nobody needs the nnx objects.
        """
        kind = type(argument)
        if is_kind_of_array(kind):
            return argument
        if finder is None:
            leaves, tree = flatten_finding_variables(argument, found)
        else:
            leaves, tree = finder.flatten(argument, found)
        kinds = tuple(map(type, leaves))
        try:
            layout = self._layouts.get((tree, kinds))
        except Exception:  # a part of the tree has no equality: jit will name it
            layout = Layout(kinds, tree)
        if layout is None:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            layout = self._layouts[tree, kinds] = Layout(kinds, tree)
        if not layout.others:
            return Packed(leaves, layout.tree)
        key = tuple([id(leaves[i]) for i in layout.others])
        known = layout.known.get(key)
        if known is None:
            known = layout.find(key, leaves, tree, self._static.argument_name(where))
        structure, is_array = known
        if layout.is_leaf and all(is_array):
            return argument
        return Packed(list(itertools.compress(leaves, is_array)), structure)


def _pack_static(value: Any, found: list[VariableNode]) -> Any:
    """Refers to Variables weakly: JAX's caches keep the static argument."""
    own: list[VariableNode] = []
    leaves, structure = flatten_finding_variables(value, own)
    if not own:
        return value
    found += own
    return PackedStatic(leaves, structure)


def resolve_static(
    fun: Callable[..., Any], argnums: ArgumentIndices, argnames: ArgumentNames
) -> StaticArguments:
    """If only positions or only names are given, finds the others as `jax.jit` does."""
    positions = _as_tuple(argnums, int)
    names = _as_tuple(argnames, str)
    parameters = parameters_of(fun)
    ordered = positional(parameters)
    variadic = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    if not variadic:  # with ``*args``, a negative position depends on the call
        positions = tuple(p + len(ordered) if p < 0 else p for p in positions)
    if argnums is not None and argnames is None:
        chosen = (ordered[p] for p in positions if 0 <= p < len(ordered))
        names = tuple(p.name for p in chosen if p.kind is p.POSITIONAL_OR_KEYWORD)
    elif argnames is not None and argnums is None:
        positions = tuple(i for i, p in enumerate(ordered) if p.name in names)
    own = tuple(p.name for p in ordered)
    return StaticArguments(frozenset(positions), frozenset(names), own, *variadic)


def donated_by(fun: Callable[..., Any], options: Mapping[str, Any]) -> StaticArguments:
    """The arguments that the options of `jax.jit` donate."""
    by_position, by_name = options.get("donate_argnums"), options.get("donate_argnames")
    if by_position is None and by_name is None:
        return NONE_STATIC
    return resolve_static(fun, by_position, by_name)


def _as_tuple(given: Any, kind: type) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, kind) else tuple(given)
