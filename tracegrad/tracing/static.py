"""Which arguments of a call are static: Python values that a program is made for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tracegrad.tracing.signatures import parameters_of, positional
from tracegrad.variables.trees import Arguments, Fixed, given

Indices = int | Iterable[int] | None
Names = str | Iterable[str] | None
Taken = tuple[tuple[Any, ...], dict[str, Any], tuple[Fixed, ...]]


class StaticArguments(NamedTuple):
    """Static arguments by position and by name."""

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def within(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The static positions of a call with these positional arguments."""
        count = len(args)
        return tuple(sorted({p % count for p in self.positions if -count <= p < count}))

    def named(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The static keyword arguments of a call."""
        return {name: value for name, value in sorted(kwargs.items()) if name in self.names}

    def apart(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[tuple[Any, ...], Mapping[str, Any]], tuple[int, ...], dict[str, Any]]:
        """The arguments of a call that are not static, as (args, kwargs); the positions of those
        that are; and those among the keyword arguments."""
        if not self.positions and not self.names:
            return (args, kwargs), (), {}
        positions, static = self.within(args), self.named(kwargs)
        dynamic = tuple(arg for i, arg in enumerate(args) if i not in positions)
        named = {name: value for name, value in kwargs.items() if name not in static}
        return (dynamic, named), positions, static

    def given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], take: Callable[..., Any] = given
    ) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], tuple[Fixed, ...]]:
        """`variables.trees.given` (or `given_before`) of a call, whose static arguments are Python
        values as they are: the same objects if there is nothing to replace."""
        if not self.positions and not self.names:
            arguments, variables = take(Arguments(args, kwargs))
            return arguments, variables
        dynamic, positions, named = self.apart(args, kwargs)
        static = [args[i] for i in positions], named
        left, variables = take(Arguments(*dynamic))
        fixed, others = take(static, statics=False)
        args_left, kwargs_left = left
        if args_left is dynamic[0] and kwargs_left is dynamic[1] and fixed is static:
            return (args, kwargs), (*variables, *others)
        own, rest = iter(fixed[0]), iter(args_left)
        args = tuple(next(own if i in positions else rest) for i in range(len(args)))
        return (args, {**kwargs_left, **fixed[1]}), (*variables, *others)

    def each(
        self, take: Callable[[Any, list[Fixed]], Any]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Taken]:
        """`given` of a call argument by argument, as jit is to get them.

        Args:
          take: replaces an argument that is not static, and adds its Variables to a list.
        """

        def of_dynamic(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Taken:
            found: list[Fixed] = []
            try:
                taken = tuple([take(arg, found) for arg in args])
                if not kwargs:
                    return taken, {}, tuple(found)
                named = {name: take(arg, found) for name, arg in sorted(kwargs.items())}
            except TypeError:
                given(Arguments(args, kwargs))  # says where it is
                raise
            return taken, named, tuple(found)  # in the order of a tree

        def of_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
            (dynamic, named), positions, static = self.apart(args, kwargs)
            dynamic, named, found = of_dynamic(dynamic, named)
            (own, static), others = given(([args[i] for i in positions], static), statics=False)
            left, fixed = iter(dynamic), iter(own)
            args = tuple(next(fixed if i in positions else left) for i in range(len(args)))
            return args, {**named, **static}, (*found, *others)

        return of_all if self.positions or self.names else of_dynamic


NONE_STATIC = StaticArguments()


def resolve(fun: Callable[..., Any], argnums: Indices, argnames: Names) -> StaticArguments:
    """Completes positions by names and names by positions, as `jax.jit` does: where only one of
    them is given, the other follows from the signature."""
    positions = _tuple(argnums, int)
    names = _tuple(argnames, str)
    parameters = parameters_of(fun)
    ordered = positional(parameters)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not variadic:  # from the end only where the end is known
        positions = tuple(p + len(ordered) if p < 0 else p for p in positions)
    if argnums is not None and argnames is None:
        chosen = (ordered[p] for p in positions if 0 <= p < len(ordered))
        names = tuple(p.name for p in chosen if p.kind is p.POSITIONAL_OR_KEYWORD)
    elif argnames is not None and argnums is None:
        positions = tuple(i for i, p in enumerate(ordered) if p.name in names)
    return StaticArguments(frozenset(positions), frozenset(names))


def _tuple(given: Any, kind: type) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, kind) else tuple(given)
