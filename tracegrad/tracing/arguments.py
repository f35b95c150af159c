"""The arguments of a call: which are static, and how a program takes the others.

To take arguments apart is to flatten each one into its arrays and a structure, which also holds
whatever is not an array; see `variables.packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tracegrad.tracing.signatures import parameters_of, positional
from tracegrad.variables.modules import Survey
from tracegrad.variables.nnx_objects import ignore_cached_partial, nnx
from tracegrad.variables.packed import NoTree, Packed, PackedStatic, Packing, packed_by_flax
from tracegrad.variables.statics import Given
from tracegrad.variables.trees import flattened

Indices = int | Iterable[int] | None
Names = str | Iterable[str] | None


class StaticArguments(NamedTuple):
    """Which arguments are static (each value of them needs a program of its own), by position and
    by name.

    Attributes:
      parameters: the names of the function's positional parameters, static or not, for messages.
      rest: the name of the parameter for all further ones, ``*args``.
    """

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()
    rest: str = "args"

    @property
    def others(self) -> tuple[str, ...]:
        """The names of the positional parameters that are not static."""
        return tuple(p for i, p in enumerate(self.parameters) if i not in self.positions)

    def argument_names(self, count: int) -> list[str]:
        """Returns the names of the first `count` positional arguments: ``x``, ``args.0``."""
        further = range(count - len(self.parameters))
        return [*self.parameters[:count], *(f"{self.rest}.{i}" for i in further)]

    def within(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Returns the static positions of a call with these positional arguments."""
        count = len(args)
        return tuple(sorted({p % count for p in self.positions if -count <= p < count}))

    def named(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the static keyword arguments of a call."""
        return {name: value for name, value in sorted(kwargs.items()) if name in self.names}

    def apart(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[tuple[Any, ...], Mapping[str, Any]], tuple[int, ...], dict[str, Any]]:
        """Splits the arguments of a call. Returns the dynamic arguments, as (args, kwargs); the
        positions of the static arguments; and the static keyword arguments."""
        if not self.positions and not self.names:
            return (args, kwargs), (), {}
        positions, static = self.within(args), self.named(kwargs)
        dynamic = tuple(arg for i, arg in enumerate(args) if i not in positions)
        named = {name: value for name, value in kwargs.items() if name not in static}
        return (dynamic, named), positions, static


NONE_STATIC = StaticArguments()


class Call(NamedTuple):
    """A call whose arguments are taken apart.

    Attributes:
      args, kwargs: the arguments: arrays as they are, trees as `Packed`, static arguments as they
        are.
      variables: the Variables in the arguments: the key of the call's program.
      objects: the modules and nnx.Variables of flax in the arguments, each once.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    variables: tuple[Given, ...] = ()
    objects: Sequence[Any] = ()

    @property
    def is_of_arrays(self) -> bool:
        """Whether `jax.jit` accepts the arguments as they are."""
        if self.variables or self.objects:
            return False
        return not any(
            isinstance(arg, Packed) and arg.has_parts for arg in (*self.args, *self.kwargs.values())
        )

    def of_trees(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs), where arguments that hold only arrays are not packed."""

        def of_tree(arg: Any) -> Any:
            return arg.argument() if type(arg) is Packed and not arg.has_parts else arg

        return tuple(map(of_tree, self.args)), {k: of_tree(arg) for k, arg in self.kwargs.items()}


class TakingApart:
    """Takes the arguments of the calls of one function apart.

    Attributes:
      looks_for_modules: whether it looks for objects of flax.nnx, at the cost of a check per node.
    """

    def __init__(self, static: StaticArguments = NONE_STATIC, *, looks_for_modules: bool = True):
        self._static = static
        self._has_static = bool(static.positions or static.names)
        self._pack = Packing(static.others, static.rest)
        self.looks_for_modules = looks_for_modules

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = (self._with_static if self._has_static else self._call)(args, kwargs)
        if call.objects:
            ignore_cached_partial()
        return call

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        pack, found = self._pack, list[Given]()
        survey = Survey() if self.looks_for_modules and nnx() is not None else None
        try:
            packed = tuple([pack(arg, i, found, survey) for i, arg in enumerate(args)])
            named = {}
            for name in sorted(kwargs) if len(kwargs) > 1 else kwargs:
                named[name] = pack(kwargs[name], name, found, survey)
        except NoTree:
            return self._by_flax(args, kwargs)
        return Call(packed, named, tuple(found), () if survey is None else survey.objects)

    def _by_flax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        found: list[Given] = []
        arguments: dict[str | int, Any] = dict(enumerate(args))
        arguments.update((name, kwargs[name]) for name in sorted(kwargs))
        packed, objects = packed_by_flax(arguments, found, self._pack.name_of)
        positional = tuple(packed[i] for i in range(len(args)))
        return Call(positional, {name: packed[name] for name in kwargs}, tuple(found), objects)

    def _with_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Takes a call with static arguments apart; also collects the Variables in static ones."""
        (dynamic, named), positions, static = self._static.apart(args, kwargs)
        of_dynamic = self._call(dynamic, named)
        found = list(of_dynamic.variables)
        own = iter([_static(args[i], found) for i in positions])
        rest = iter(of_dynamic.args)
        return Call(
            tuple(next(own if i in positions else rest) for i in range(len(args))),
            {**of_dynamic.kwargs, **{k: _static(v, found) for k, v in static.items()}},
            tuple(found),
            of_dynamic.objects,
        )


def _static(value: Any, found: list[Given]) -> Any:
    """Returns a static argument in which no Variable is held strongly: JAX's caches keep it."""
    own: list[Given] = []
    leaves, structure = flattened(value, own)
    if not own:
        return value
    found += own
    return PackedStatic(leaves, structure)


def resolve(fun: Callable[..., Any], argnums: Indices, argnames: Names) -> StaticArguments:
    """Returns the static arguments. If only positions or only names are given, the other follows
    from the signature, as in `jax.jit`."""
    positions = _tuple(argnums, int)
    names = _tuple(argnames, str)
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
    """Returns which arguments the options of `jax.jit` donate."""
    by_position, by_name = options.get("donate_argnums"), options.get("donate_argnames")
    if by_position is None and by_name is None:
        return NONE_STATIC
    return resolve(fun, by_position, by_name)


def _tuple(given: Any, kind: type) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, kind) else tuple(given)
