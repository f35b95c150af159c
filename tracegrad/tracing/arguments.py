"""The arguments of a call: which arguments are static, and how a program takes the others.

To pack an argument is to flatten it into its arrays and a structure, which also holds everything
that is not an array; see `variables.packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tracegrad.tracing.signatures import parameters_of, positional
from tracegrad.variables.modules import NnxObjectFinder
from tracegrad.variables.nnx_objects import ignore_cached_partial, nnx
from tracegrad.variables.packed import (
    ArgumentPacker,
    NotAPytree,
    Packed,
    PackedStatic,
    pack_by_flax,
)
from tracegrad.variables.statics import VariableNode
from tracegrad.variables.trees import flatten_finding_variables

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

    def within(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The static positions of a call."""
        count = len(args)
        return tuple(sorted({p % count for p in self.positions if -count <= p < count}))

    def named(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The static keyword arguments of a call."""
        return {name: value for name, value in sorted(kwargs.items()) if name in self.names}


NONE_STATIC = StaticArguments()


class PackedCall(NamedTuple):
    """A call whose arguments are packed.

    Attributes:
      args, kwargs: the arguments: trees as `Packed`, arrays and static arguments unchanged.
      variables: the Variables in the arguments: the key of the call's program.
      objects: the nnx objects in the arguments, each once.
      positions, names: of the static arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    variables: tuple[VariableNode, ...] = ()
    objects: Sequence[Any] = ()
    positions: Sequence[int] = ()
    names: Collection[str] = ()

    @property
    def dynamic(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) without the static arguments."""
        if not self.positions and not self.names:
            return self.args, self.kwargs
        named = {name: arg for name, arg in self.kwargs.items() if name not in self.names}
        return tuple(x for i, x in enumerate(self.args) if i not in self.positions), named

    @property
    def static_kwargs(self) -> dict[str, Any]:
        return {name: self.kwargs[name] for name in self.names}

    @property
    def is_of_arrays(self) -> bool:
        """Whether `jax.jit` accepts the arguments as they are."""
        if self.variables or self.objects:
            return False
        return not any(
            isinstance(arg, Packed) and arg.has_non_arrays
            for arg in (*self.args, *self.kwargs.values())
        )

    def of_trees(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs); unpacks the arguments that hold only arrays."""

        def of_tree(arg: Any) -> Any:
            return arg.argument() if type(arg) is Packed and not arg.has_non_arrays else arg

        return tuple(map(of_tree, self.args)), {k: of_tree(arg) for k, arg in self.kwargs.items()}


class CallPacker:
    """Packs the calls of one function.

    Attributes:
      looks_for_modules: whether to look for nnx objects, at the cost of a check per node.
    """

    def __init__(self, static: StaticArguments = NONE_STATIC, *, looks_for_modules: bool = True):
        self._static = static
        self._pack = ArgumentPacker(static.parameters, static.rest)
        self.looks_for_modules = looks_for_modules

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
        static = self._static
        fixed = static.within(args) if static.positions else ()
        names = tuple(sorted(kwargs.keys() & static.names)) if static.names else ()
        pack, found = self._pack, list[VariableNode]()
        finder = NnxObjectFinder() if self.looks_for_modules and nnx() is not None else None
        objects: Sequence[Any] = ()
        try:
            packed = tuple(
                [
                    _pack_static(arg, found) if i in fixed else pack(arg, i, found, finder)
                    for i, arg in enumerate(args)
                ]
            )
            named = {}
            for name in sorted(kwargs) if len(kwargs) > 1 else kwargs:
                arg = kwargs[name]
                named[name] = (
                    _pack_static(arg, found) if name in names else pack(arg, name, found, finder)
                )
            if finder is not None:
                objects = finder.objects
        except NotAPytree:
            found.clear()
            arguments: dict[str | int, Any] = dict(enumerate(args))
            arguments.update((name, kwargs[name]) for name in sorted(kwargs))
            own = {key: arguments.pop(key) for key in list[str | int]((*fixed, *names))}
            of_all, objects = pack_by_flax(arguments, found, pack.name_of)
            of_all.update((key, _pack_static(arg, found)) for key, arg in own.items())
            packed = tuple([of_all[i] for i in range(len(args))])
            named = {name: of_all[name] for name in kwargs}
        if objects:
            ignore_cached_partial()
        return PackedCall(packed, named, tuple(found), objects, fixed, names)


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
