"""Splits a call into the leaves that JAX differentiates with respect to, and the rest.

A leaf *counts* if JAX differentiates with respect to it. JAX gets a function of these leaves only,
so the other leaves need not be arrays. The two parts are combined to call the user's function.

The user's function may assign Variables in modules of flax.nnx that are its arguments (statistics,
counts of random numbers). The function gets copies of these modules with the differentiated values;
afterwards the assigned values are written to the modules themselves, as `nnx.grad` does.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from tracegrad.differentiation.closing_over import refuse_lost_derivatives
from tracegrad.differentiation.gradient_types import Kind, kind_of, type_of, zeros_for
from tracegrad.ir.wording import with_article
from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.in_force import under_rules
from tracegrad.tracing.leaves import Leaf, leaves_of
from tracegrad.tracing.modules import is_whole_or_variable
from tracegrad.tracing.nnx_objects import (
    is_module,
    is_variable_of_nnx,
    nnx,
    set_leaf,
)
from tracegrad.tracing.parted import Parted
from tracegrad.tracing.signatures import leaves_of_call
from tracegrad.tracing.statics import are_traced, equinox_settings

# Maps the position of a leaf to the value that the function assigned: see `Partition.call`.
Assigned = dict[int, Any]


@dataclass(frozen=True, eq=False)
class Argument(Parted):
    """One argument of a call, with flags for the leaves that count.

    Attributes:
      key: the argument's position among the positional arguments, or its keyword.
      selected: for each leaf, whether the caller selects it. All leaves that count are selected; a
        selected leaf does not count if JAX cannot differentiate with respect to it.
      is_by_predicate: whether a predicate selects the leaves; then each of them is meant to count.
    """

    key: int | str
    tree: Any
    selected: Sequence[bool]
    is_by_predicate: bool = False

    @functools.cached_property
    def kinds(self) -> list[Kind]:
        fixed = equinox_settings([type(leaf) for leaf in self.leaves], self.structure)
        return ["setting" if i in fixed else kind_of(leaf) for i, leaf in enumerate(self.leaves)]

    @functools.cached_property
    def named(self) -> list[Leaf]:
        """The leaves, with paths that are relative to the argument."""
        return leaves_of(self.tree)

    def restrict_to_kinds(self, kinds: Collection[Kind]) -> Argument:
        """Returns the argument, in which only leaves of these kinds count."""
        if not any(self.counted):
            return self
        pairs = zip(self.counted, self.kinds, strict=True)
        return replace(self, counted=[counts and kind in kinds for counts, kind in pairs])

    @property
    def means_each_leaf(self) -> bool:
        """Whether each leaf that counts is meant to have a gradient. If a whole argument is
        selected and holds floats and other leaves (a model has functions, counters, flags), the
        other leaves are not meant to have one."""
        has_floats = any(self.counted) and "inexact" in self.of_chosen(self.kinds)
        return self.is_by_predicate or not has_floats

    def answer(self, results: Iterator[Any], absent: Callable[[Any], Any]) -> Any:
        """Returns a tree like the argument, with a result for each leaf that counts. A leaf that is
        not selected gets ``absent(leaf)``; a selected leaf that does not count gets None."""

        def entry(i: int) -> Any:
            if self.counted[i]:
                return next(results)
            is_none = self.selected[i] or self.kinds[i] == "setting"
            return None if is_none else absent(self.leaves[i])

        return jax.tree.unflatten(self.structure, [entry(i) for i in range(len(self.leaves))])

    @functools.cached_property
    def has_modules(self) -> bool:
        if nnx() is None:
            return False
        return any(map(is_module, jax.tree.leaves(self.tree, is_leaf=is_whole_or_variable)))

    @functools.cached_property
    def variables_of_nnx(self) -> dict[int, Any]:
        """Maps the ``id`` of each nnx.Variable in the argument to the nnx.Variable."""
        nodes = jax.tree.leaves(self.tree, is_leaf=is_variable_of_nnx)
        return {id(node): node for node in nodes if is_variable_of_nnx(node)}


@dataclass(frozen=True, eq=False)
class Partition:
    """A call of a function, split into the leaves that count and the rest; made by `wrt.partition`.

    Attributes:
      arguments: the arguments of the call, in the order in which JAX flattens them.
      wanted: the indices of the arguments that the answer has trees for, in the caller's order.
      is_single: whether the answer is the tree of one argument rather than a tuple.
    """

    fun: Callable[..., Any]
    arguments: tuple[Argument, ...]
    wanted: tuple[int, ...]
    is_single: bool

    # ------------------------------------------------------------------- the leaves that count

    @property
    def leaves(self) -> list[Any]:
        """The leaves that count, in the order in which JAX flattens the call."""
        return [leaf for each in self.arguments for leaf in each.chosen]

    @property
    def kinds(self) -> list[Kind]:
        chosen = [each for each in self.arguments if any(each.counted)]
        return [kind for each in chosen for kind in each.of_chosen(each.kinds)]

    @property
    def named(self) -> list[Leaf]:
        """The leaves that count, with paths that begin with the argument: ``params.0.kernel``."""
        return _compress(self.all_named, [c for each in self.arguments for c in each.counted])

    @property
    def names(self) -> list[str]:
        return [leaf.name for leaf in self.named]

    @functools.cached_property
    def all_named(self) -> list[Leaf]:
        args = [each.tree for each in self.arguments if isinstance(each.key, int)]
        kwargs = {each.key: each.tree for each in self.arguments if isinstance(each.key, str)}
        return leaves_of_call(self.fun, args, kwargs)

    @property
    def all_leaves(self) -> list[tuple[str, Any]]:
        """The path and the value of each leaf of the call."""
        leaves = [leaf for each in self.arguments for leaf in each.leaves]
        return [(named.name, leaf) for named, leaf in zip(self.all_named, leaves, strict=True)]

    @property
    def counted_inputs(self) -> tuple[bool, ...]:
        """For each array of the call, in the order of a program's inputs, whether it counts."""
        return tuple(
            c
            for each in self.arguments
            for c in _compress(each.counted, are_traced(each.leaves, each.structure))
        )

    def differentiable(
        self, unconnected: str = "zero", allowed: Collection[Kind] = ()
    ) -> Partition:
        """Returns the call, in which only the leaves count that JAX can differentiate.

        The other selected leaves get None in the answer. Raises TypeError for a leaf that is meant
        to have a gradient (`Argument.means_each_leaf`), unless `unconnected` is "none": then the
        caller accepts None. Leaves of the kinds `allowed` count as well, and get float0 zeros.
        """
        takes_none = unconnected == "none"
        kept: list[Kind] = ["inexact", *(() if takes_none else allowed)]
        arguments = tuple([each.restrict_to_kinds(kept) for each in self.arguments])
        for place, each in enumerate(arguments):
            has_lost_leaf = each.counted != self.arguments[place].counted
            if has_lost_leaf and each.means_each_leaf and not takes_none:
                raise TypeError(self._no_gradient_message(place, each, allowed))
        return replace(self, arguments=arguments)

    def _no_gradient_message(
        self, place: int, argument: Argument, allowed: Collection[Kind]
    ) -> str:
        first = sum(len(each.leaves) for each in self.arguments[:place])
        pairs = zip(argument.selected, argument.counted, strict=True)
        i = next(i for i, (is_selected, counts) in enumerate(pairs) if is_selected and not counts)
        return _no_gradient_message(
            self.all_named[first + i].name, argument.leaves[i], argument.kinds[i], allowed
        )

    # --------------------------------------------------------------------------------- the call

    def combine(
        self, values: Iterable[Any], leaves: Sequence[Any] | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments of the call, in which `values` replace the leaves that count;
        `leaves`, if any, replace all leaves first. An argument without a replaced leaf is the
        caller's own object."""
        rest, others = iter(values), None if leaves is None else iter(leaves)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for each in self.arguments:
            if others is not None:
                each = replace(each, leaves=list(itertools.islice(others, len(each.leaves))))
            is_new = any(each.counted) or others is not None or each.key in self._copied_keys
            value = each.combine(itertools.islice(rest, sum(each.counted))) if is_new else each.tree
            if isinstance(each.key, int):
                args.append(value)
            else:
                kwargs[each.key] = value
        return args, kwargs

    def call(self, values: Iterable[Any]) -> tuple[Any, Assigned]:
        """Calls the function, with `values` in place of the leaves that count. Also returns the
        values that the function assigned in modules, for `settle`."""
        args, kwargs = self.combine(values)
        if not any(each.has_modules for each in self.arguments):
            return self.fun(*args, **kwargs), {}
        structure: Any
        changed_structure: Any
        trees = [
            args[each.key] if isinstance(each.key, int) else kwargs[each.key]
            for each in self._arguments_with_leaves
        ]
        before, structure = jax.tree.flatten(trees)
        result = self.fun(*args, **kwargs)
        after, changed_structure = jax.tree.flatten(trees)
        if structure != changed_structure:
            raise TypeError(
                "a function that is differentiated changes the structure of a module of flax.nnx "
                "that it is given: its attributes, or its set of Variables. Change the structure "
                "before the call (model.eval(), a Variable with an initial value)"
            )
        pairs = enumerate(zip(before, after, strict=True))
        return result, {i: new for i, (old, new) in pairs if old is not new}

    def of_leaves(self, split: Callable[[Any], tuple[Any, Any]]) -> Callable[[list[Any]], Any]:
        """Returns a function of the leaves that count, which applies the rules in force.

        `split` splits the result of the user's function into the outputs to differentiate and
        `aux`. The returned function returns these outputs, and a pair for `settle`: `aux` and the
        values that were assigned in modules.
        """

        def result(leaves: list[Any]) -> Any:
            outcome, assigned = self.call(leaves)
            outputs, aux = split(outcome)
            return outputs, (aux, assigned)

        return refuse_lost_derivatives(
            under_rules(result, function_name(self.fun), paths=lambda: self.names)
        )

    def settle(self, aux_and_assigned: tuple[Any, Assigned]) -> Any:
        """Writes the values that the function assigned to the caller's modules; returns `aux`."""
        aux, assigned = aux_and_assigned
        if assigned:
            trees = [each.tree for each in self._arguments_with_leaves]
            nodes = jax.tree.leaves(trees, is_leaf=is_variable_of_nnx)
            places = [(node, i) for node in nodes for i in range(len(jax.tree.leaves(node)))]
            for place, value in assigned.items():
                _assign_nnx_variable(*places[place], value)
        return aux

    @functools.cached_property
    def _copied_keys(self) -> frozenset[int | str]:
        """The keys of arguments with modules that share no nnx.Variable with other arguments.

        The function gets copies of these arguments even if none of their leaves counts. A shared
        Variable must not be copied: the copy would be another object than the Variable in the other
        argument, and flax refuses to change it.
        """
        modules = [each for each in self.arguments if each.has_modules]
        uses = Counter(variable for each in modules for variable in each.variables_of_nnx)
        return frozenset(
            each.key for each in modules if all(uses[v] == 1 for v in each.variables_of_nnx)
        )

    @property
    def _arguments_with_leaves(self) -> list[Argument]:
        return [
            each for each in self.arguments if any(each.counted) or each.key in self._copied_keys
        ]

    # ------------------------------------------------------------------------------- the answer

    def answer(self, results: Iterable[Any], absent: Callable[[Any], Any] = zeros_for) -> Any:
        """Puts one result for each leaf that counts into the structure that `wrt` asks for. A leaf
        that is not selected gets ``absent(leaf)``."""
        rest = iter(results)
        trees = {i: self.arguments[i].answer(rest, absent) for i in sorted(self.wanted)}
        wanted = tuple(trees[i] for i in self.wanted)
        return wanted[0] if self.is_single else wanted

    def entries(self, answer: Any) -> list[Any]:
        """Returns the entries of a tree like an answer that belong to the leaves that count.

        Raises ValueError if the structure differs. None may stand for a leaf that is not selected.
        """
        trees = (answer,) if self.is_single else tuple(answer)
        if len(trees) != len(self.wanted):
            raise ValueError(
                f"expected {len(self.wanted)} trees, one per argument in wrt; got {len(trees)}"
            )
        entries: list[Any] = []
        for i, tree in sorted(zip(self.wanted, trees, strict=True), key=lambda pair: pair[0]):
            argument = self.arguments[i]
            try:
                flat = argument.structure.flatten_up_to(tree)
            except ValueError as error:
                raise ValueError(
                    f"expected a tree like argument {argument.key!r}, of type "
                    f"{type(argument.tree).__name__}, as grad returns for this wrt; "
                    f"got a tree of another structure, of type {type(tree).__name__}"
                ) from error
            entries += argument.of_chosen(flat)
        return entries


def _compress(items: Iterable[Any], flags: Iterable[bool]) -> list[Any]:
    return list(itertools.compress(items, flags))


def _assign_nnx_variable(variable: Any, leaf: int, value: Any) -> None:
    """Assigns a value to a leaf of an nnx.Variable; raises TypeError for any other object."""
    if not is_variable_of_nnx(variable):
        raise TypeError(
            f"a function that is differentiated assigns {with_article(type(variable).__name__)} in "
            "a module of flax.nnx that it is given. The assigned value would be lost: make it an "
            "nnx.Variable"
        )
    set_leaf(variable, leaf, value)


def _no_gradient_message(path: str, leaf: Any, kind: Kind, allowed: Collection[Kind]) -> str:
    if kind == "setting":
        return (
            f"wrt selects {path}, the number {leaf!r} of an equinox module, where numbers are "
            "settings that are not trained: make it an array, as in `jnp.asarray(0.5)`"
        )
    aval = type_of(leaf)
    name = type(leaf).__name__ if aval is None else str(aval.dtype)
    return (
        f"wrt selects {path}, of type {name}: only float and complex arrays "
        "have gradients. Select other leaves, by a predicate `wrt=lambda path, leaf: ...`; or "
        'accept None for this leaf, with `unconnected="none"`'
        + ("; or float0, with `allow_int=True`" if kind in ("exact", "key") and not allowed else "")
    )
