"""A function and its rules on the way to XLA: its variants, and which of them a call is.

A `Pipeline` is what all wrappers of a function with the same rules and options share. It has a
bounded table of variants (`variants`), and takes for a call the one that fitted last time. Where
JAX then has to trace, and another one fits, the call goes on with that, and nothing is traced
twice. A function that uses no Variables is left to its jit as soon as that is known: the jit takes
the place of the pipeline in the wrappers, so that a warm call costs what it costs there.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.importer import import_program
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.wording import changes_lost
from tracegrad.tracing.attempts import AnotherVariant, Attempt, attempt_at, tracing_depth
from tracegrad.tracing.callable import call_traced
from tracegrad.tracing.donated_modules import donation
from tracegrad.tracing.graphs import Rule, function_name, trace_to_graph
from tracegrad.tracing.in_force import traced_under
from tracegrad.tracing.known_variants import KnownVariants, signature
from tracegrad.tracing.retracing import Signature, TraceHistory
from tracegrad.tracing.signatures import argument_names
from tracegrad.tracing.static import StaticArguments
from tracegrad.tracing.user_errors import explain, explain_rule
from tracegrad.tracing.variants import Use, Variant
from tracegrad.variables.modules import Modules, Structure, modules_in
from tracegrad.variables.packed import Packing
from tracegrad.variables.trees import Fixed, given, held, taken, without_variables

if TYPE_CHECKING:
    from tracegrad.tracing.traced import TracedFunction

T = TypeVar("T")
Found = tuple[Graph, Use]  # what a function turned out to be, for some arguments

_ATTEMPTS = 8

_NOTHING = replace(
    import_program(jax.make_jaxpr(lambda: ())(), name="nothing"), out_tree=jax.tree.structure(None)
)


class Pipeline:
    """A function with rules and options of `jax.jit`; to call it is to call the compiled function.

    It holds the function weakly, because the table of pipelines lives as long as that does.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        rules: tuple[Rule, ...],
        static: StaticArguments,
        options: dict[str, Any],
        history: TraceHistory | None = None,
    ):
        self.ref = _weak(fun)
        self.rules = rules
        self.static = static
        self.options = options
        self.history = history or TraceHistory(function_name(fun))
        self.__name__ = function_name(fun)
        self.__doc__ = fun.__doc__
        self.__module__ = getattr(fun, "__module__", __name__)
        self._functions: weakref.WeakSet[TracedFunction] = weakref.WeakSet()
        self.text = repr_of(fun)
        self._variants = KnownVariants()
        # Shardings of the parts of an argument or of a result are said along its tree.
        shardings = options.get("in_shardings")
        parts = shardings if isinstance(shardings, tuple) else (shardings,)
        self._donation = donation(fun, options, static)
        self._packs_results = _is_for_all(options.get("out_shardings"))
        self._taken_apart = static.each(Packing() if all(map(_is_for_all, parts)) else _given)
        self.takes_apart = False  # whether any call had arguments with what is no array
        self.holds_modules = False  # whether any had modules of flax.nnx
        self._left_to: Callable[..., Any] | None = None  # instead of coming here
        self._warned = False

    @property
    def fun(self) -> Callable[..., Any]:
        """The user's function."""
        fun = self.ref()
        assert fun is not None, "the traced function holds it"
        return fun

    # ---------------------------------------------------------------------------------- calls

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        packed, named = args, kwargs
        variables: tuple[Fixed, ...] = ()
        modules = None
        found = None
        try:
            if self.takes_apart:
                packed, named, variables, modules = self._packed(args, kwargs)
            variant = self._variants.only.get(variables)
            if variant is not None and not variant.use.is_over:
                try:
                    return variant(packed, named, modules)
                except AnotherVariant as other:
                    if other.of is not self:
                        raise
                    found = other.found
            if _jax.config.jax_disable_jit:
                return self.eagerly(args, kwargs)
            return self.search(args, kwargs, self._call, found)
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)

    def _on_miss(
        self, go_on: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call that has gone to jit directly, which has nothing compiled for it."""
        if self._has_statics(args, kwargs):
            self.take_apart()
            return self(*args, **kwargs)
        with Attempt(self) as attempt:
            go_on()
            return None
        self._leave_to_jit(None)
        return self.search(args, kwargs, self._call, attempt.found)

    def _has_statics(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = self.static.given(args, kwargs)[0]
        return given[0] is not args or given[1] is not kwargs

    def _call(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.takes_apart:
            return variant(args, kwargs)
        args, kwargs, _, modules = self._packed(args, kwargs)
        return variant(args, kwargs, modules)

    def _packed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Fixed, ...], Modules | None]:
        """The arguments of a call as jit gets them, and what is in them besides arrays."""
        if not self.holds_modules:
            args, kwargs, variables = self._taken_apart(args, kwargs)
            return args, kwargs, variables, None
        (args, kwargs), structures = self.static.given(args, kwargs, held)
        modules = modules_in((args, kwargs)) if structures else None
        if modules is not None and self._donation is not None:
            self._donation.refuse_sharing(self.fun, args, kwargs)
        args, kwargs, variables = self._taken_apart(args, kwargs)
        return args, kwargs, (*structures, *variables), modules

    def search(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        action: Callable[[Variant, tuple[Any, ...], dict[str, Any]], T],
        found: Found | None = None,
    ) -> T:
        """Does something with the variant that fits the arguments.

        Args:
          found: what the function is for these arguments, where it is known.
        """
        called = args, kwargs
        (args, kwargs), variables = self.static.given(args, kwargs)
        if args is not called[0] or kwargs is not called[1]:
            self.take_apart()
        if any(isinstance(each, Structure) for each in variables):
            self.holds_modules = True

        key = signature(self.static, args, kwargs)
        variant = None
        if not found and key is None:  # the jit of any says what is wrong with the arguments
            variant = Variant(self, Use(_NOTHING))
        elif not found:
            variant = self._variants.likely(variables, key)
        for _ in range(_ATTEMPTS):
            if variant is None:
                found = found or self.traced(args, kwargs)
                variant = self._variants.of(self, found[1])
            with Attempt(self, found) as attempt:
                try:
                    result = action(variant, args, kwargs)
                except Exception as error:
                    explain_rule(error, lambda: self.graph(args, kwargs))
                    raise
                is_all = self._variants.remember(variant, variables, key)
                if is_all and not self.takes_apart:
                    self._leave_to_jit(variant)
                return result
            variant, found = None, attempt.found
        raise RuntimeError(
            f"{self.__name__} uses other Variables each time it is traced. Create its "
            "Variables once, outside of it."
        )

    def eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call does under `jax.disable_jit`: it is one of the function as it is, or, where
        rules are to change that, it runs the graph, one operation after the other."""
        if not self.rules:
            args, kwargs = taken((args, kwargs))
            return without_variables(self.fun(*args, **kwargs))
        args, kwargs = self.static.given(args, kwargs)[0]
        graph, _ = self.traced(args, kwargs)
        return call_traced(graph, (args, kwargs), self.static.apart(args, kwargs)[0])

    # ------------------------------------------------------------------------------- wrappers

    def joined_by(self, function: TracedFunction) -> None:
        """Has the calls of one more wrapper go where those of the others do."""
        self._functions.add(function)
        function.goes_to(self._left_to or self)

    def take_apart(self) -> None:
        """Has calls look, from now on, for what is no array among their arguments."""
        if not self.takes_apart:
            self.takes_apart = True
            self._leave_to_jit(None)

    def _leave_to_jit(self, variant: Variant | None) -> None:
        """Has the calls of all wrappers go to what a variant is called by, or come here again."""
        self._left_to = None
        if variant is not None and variant.direct is not None:
            self._left_to = variant.handling_misses(_weakly(self._on_miss))
        for function in list(self._functions):
            function.goes_to(self._left_to or self)

    # ---------------------------------------------------------------------------------- graphs

    def graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        """The graph for these arguments, after the rules."""
        trace = functools.partial(trace_to_graph, self.fun, args, kwargs, self.static)
        with with_jit():  # so that rules find the functions
            return traced_under(self.rules, trace)

    def traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_jit: bool = False
    ) -> Found:
        """The graph of a call that is about to be compiled, and what it uses.

        `in_jit`: the compilation has begun, and this is a part of it.
        """
        try:
            graph = self.graph(args, kwargs)
            if graph.loses:
                raise TypeError(changes_lost(self.__name__, graph.loses))
        except Exception as error:
            raise explain(error)  # noqa: B904 (the same error)
        outer = _jax.is_part_of_a_program() if in_jit else _jax.staging_trace() is not None
        donated = () if self._donation is None else self._donation.places(args, kwargs)
        use = Use(graph, donated=donated, packs=self._packs_results)
        if not outer:  # else nothing is compiled for it
            self._note(args, kwargs, graph, use)
        return graph, use

    def known(self, flat: Sequence[Any], tree: Any) -> Found | None:
        """The graph of the call that goes on now, if it is of these arguments; for one use."""
        attempt = attempt_at(self)
        found: Found | None = None if attempt is None else attempt.known
        if attempt is None or found is None or found[0].in_tree != tree:
            return None
        types = list(map(_jax.type_of, flat))
        if found[0].in_avals[: len(types)] != types:
            return None
        attempt.known = None
        return found

    def warn_of_merging(self) -> None:
        """Warns, once, where XLA undoes what a call nested in a compiled function recomputes."""
        # Inside another traced function that one sees to it, or warns itself.
        if self._warned or tracing_depth() or not _jax.under_jit():
            return
        options = _jax.keep_recompute_options(jax.default_backend())
        self._warned = True
        warn_where_called(
            f"{self.__name__} recomputes, and is called inside another "
            "compiled function. On this JAX and backend XLA merges recomputed code with the "
            "original, which saves no memory, unless the outermost function is compiled with "
            f"an option that cannot be set from inside: make it a `tracegrad.trace`, or "
            f"`jax.jit(..., compiler_options={options})`.",
            UserWarning,
        )

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any], graph: Graph, use: Use) -> None:
        names = argument_names(self.fun, len(args))
        named = {**dict(zip(names, args, strict=True)), **kwargs}
        _, positions, static_kwargs = self.static.apart(args, kwargs)
        fixed = {*(names[i] for i in positions), *static_kwargs}
        self.history.note(
            Signature.of(
                {name: v for name, v in named.items() if name not in fixed},
                {name: v for name, v in named.items() if name in fixed},
            )
        )

    def clear_cache(self) -> None:
        """Forgets every program."""
        self._variants.clear()


def with_jit() -> AbstractContextManager[None]:
    """Undoes `jax.disable_jit`, for what is traced."""
    disabled = _jax.config.jax_disable_jit
    return jax.disable_jit(False) if disabled else nullcontext()


def repr_of(fun: Callable[..., Any]) -> str:
    """The user's function, for messages: its `repr`, if that does not raise."""
    try:
        return repr(fun)
    except Exception:  # of a half-made object, or of one with an array that is gone
        return f"<{type(fun).__name__} {function_name(fun)}>"


def _given(argument: Any, found: list[Fixed]) -> Any:
    """An argument for shardings that are said along its tree."""
    argument, variables = given(argument)
    found += variables
    return argument


def _is_for_all(shardings: Any) -> bool:
    """Whether what is said of the shardings of a tree says the same of all arrays in it."""
    return shardings is None or jax.tree_util.all_leaves([shardings])


def _weakly(method: Callable[..., T]) -> Callable[..., T]:
    """A bound method that does not hold its object: whoever calls it does."""
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        bound = ref()
        assert bound is not None, "the traced function that is called holds it"
        return bound(*args)

    return call


def _weak(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    if isinstance(fun, types.MethodType):
        return lambda: fun
    try:
        return weakref.ref(fun)
    except TypeError:
        return lambda: fun
